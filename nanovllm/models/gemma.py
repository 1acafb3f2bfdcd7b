"""Gemma 2 and 3 (Gemma team, 2024 and 2025) and GLM-4-0414: Qwen3's layers, with norms after
attention and MLP as well as before them.
"""

import torch
from torch import nn

from nanovllm.checkpoint.model_config import ModelConfig
from nanovllm.layers.base import Build, Hidden
from nanovllm.layers.layernorm import norm
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.layers.sequence_parallel import Residual
from nanovllm.models.qwen3 import Qwen3Attention, Qwen3ForCausalLM, Qwen3MLP


class Gemma2DecoderLayer(nn.Module):
    """x = x + norm(attention(norm(x))); x = x + norm(mlp(norm(x)))"""

    # Before and after attention, before and after the MLP.
    norms = (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    )

    def __init__(self, config: ModelConfig, i: int, rope: RotaryEmbedding, build: Build) -> None:
        super().__init__()
        self.self_attn = Qwen3Attention(config, i, rope, build.at("self_attn"))
        self.mlp = Qwen3MLP(config, build.at("mlp"))
        before, after, before_mlp, after_mlp = self.norms
        self.add_module(before, norm(config, build, act_block=self.self_attn.qkv_proj.act_block))
        self.add_module(after, norm(config, build))
        self.add_module(before_mlp, norm(config, build, act_block=self.mlp.act_block))
        self.add_module(after_mlp, norm(config, build))

    def forward(
        self, positions: torch.Tensor, hidden: Hidden, residual: Residual
    ) -> tuple[torch.Tensor, Residual]:
        before, after, before_mlp, after_mlp = (getattr(self, name) for name in self.norms)
        hidden, residual = before.add_forward(hidden, residual)
        hidden = after.whole_forward(self.self_attn(positions, hidden))
        hidden, residual = before_mlp.add_forward(hidden, residual)
        return after_mlp.whole_forward(self.mlp(hidden)), residual


class Glm4DecoderLayer(Gemma2DecoderLayer):
    """Gemma 2's layer, with other names for its norms."""

    norms = (
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
