"""Gemma 2 and 3 (Gemma team, 2024 and 2025) and GLM-4-0414: Qwen3's layers, with norms after
attention and MLP as well as before them.
"""

from typing import NamedTuple

import torch
from torch import nn

from nanovllm.checkpoint.model_config import ModelConfig
from nanovllm.layers.base import Build, Hidden
from nanovllm.layers.layernorm import norm
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.layers.sequence_parallel import Residual
from nanovllm.models.qwen3 import Qwen3Attention, Qwen3ForCausalLM, Qwen3MLP


class Norms(NamedTuple):
    """The names of a layer's norms."""

    before_attention: str
    after_attention: str
    before_mlp: str
    after_mlp: str


class Gemma2DecoderLayer(nn.Module):
    """x = x + norm(attention(norm(x))); x = x + norm(mlp(norm(x)))"""

    norms = Norms(
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    )

    def __init__(self, config: ModelConfig, i: int, rope: RotaryEmbedding, build: Build) -> None:
        super().__init__()
        self.self_attn = Qwen3Attention(config, i, rope, build.at("self_attn"))
        self.mlp = Qwen3MLP(config, build.at("mlp"))
        names, block = self.norms, self.self_attn.qkv_proj.act_block
        self.add_module(names.before_attention, norm(config, build, act_block=block))
        self.add_module(names.after_attention, norm(config, build))
        self.add_module(names.before_mlp, norm(config, build, act_block=self.mlp.act_block))
        self.add_module(names.after_mlp, norm(config, build))

    def forward(
        self, positions: torch.Tensor, hidden: Hidden, residual: Residual
    ) -> tuple[torch.Tensor, Residual]:
        names = self.norms
        hidden, residual = getattr(self, names.before_attention).add_forward(hidden, residual)
        hidden = self.self_attn(positions, hidden)
        hidden = getattr(self, names.after_attention).whole_forward(hidden)
        hidden, residual = getattr(self, names.before_mlp).add_forward(hidden, residual)
        return getattr(self, names.after_mlp).whole_forward(self.mlp(hidden)), residual


class Glm4DecoderLayer(Gemma2DecoderLayer):
    """Gemma 2's layer, with other names for its norms."""

    norms = Norms(
        "input_layernorm",
        "post_self_attn_layernorm",
        "post_attention_layernorm",
        "post_mlp_layernorm",
    )


class Gemma2ForCausalLM(Qwen3ForCausalLM):
    """Gemma 2 and 3."""

    layer_class, adds_after_norms = Gemma2DecoderLayer, True


class Glm4ForCausalLM(Qwen3ForCausalLM):
    """GLM-4-0414."""

    layer_class, adds_after_norms = Glm4DecoderLayer, True
