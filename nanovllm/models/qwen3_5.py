"""Qwen3.5 (Qwen team, 2026) and Qwen3-Next (2025): three of four layers keep a state instead of
attending, and attention has gates. Of checkpoints that also see images, the text.

Classes are named as the architectures in config.json.
"""

import torch
from torch import nn

from nanovllm.checkpoint.model_config import ModelConfig
from nanovllm.layers.attention import gate_heads
from nanovllm.layers.base import MLP, Build, Hidden
from nanovllm.layers.experts import NumberedExperts, SparseMLP, StackedExperts
from nanovllm.layers.layernorm import norm
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.layers.sequence_parallel import Residual
from nanovllm.models.qwen3 import Qwen3Attention, Qwen3ForCausalLM, Qwen3MLP
from nanovllm.recurrent.gated_delta_net import GatedDeltaNet


class Qwen3_5Attention(Qwen3Attention):
    """Attention whose heads are gated: the query projection has a gate of each number, too."""

    def forward(self, positions: torch.Tensor, hidden: Hidden) -> Hidden:
        gate, qkv = self.qkv_proj.split_gate(self.qkv_proj(hidden))
        out, fused = self.attn(positions, qkv), self.attn.build.fused
        return self.o_proj(gate_heads(out, gate, self.attn.kept_rows(), fused))


class Qwen3_5DecoderLayer(nn.Module):
    """x = x + mixer(norm(x)); x = x + mlp(norm(x)), the mixer being attention or Gated DeltaNet."""

    def __init__(self, config: ModelConfig, i: int, rope: RotaryEmbedding, build: Build) -> None:
        super().__init__()
        self.attends = config.layers[i].rope is not None
        act_block = None
        if self.attends:
            self.self_attn = Qwen3_5Attention(config, i, rope, build.at("self_attn"))
            act_block = self.self_attn.qkv_proj.act_block
        else:
            is_last = i == config.num_hidden_layers - 1
            self.linear_attn = GatedDeltaNet(config, is_last, build.at("linear_attn"))
        self.make_mlp(config, i, build)
        self.input_layernorm = norm(config, build, act_block=act_block)
        self.post_attention_layernorm = norm(config, build, act_block=self.mlp.act_block)

    def make_mlp(self, config: ModelConfig, i: int, build: Build) -> None:
        self.mlp: MLP = Qwen3MLP(config, build.at("mlp"))

    def forward(
        self, positions: torch.Tensor, hidden: Hidden, residual: Residual
    ) -> tuple[Hidden, Residual]:
        hidden, residual = self.input_layernorm.add_forward(hidden, residual)
        hidden = self.self_attn(positions, hidden) if self.attends else self.linear_attn(hidden)
        hidden, residual = self.post_attention_layernorm.add_forward(hidden, residual)
        return self.mlp(hidden), residual


class Qwen3_5MoeDecoderLayer(Qwen3_5DecoderLayer):
    """A layer with experts, one of them for all tokens, or a dense MLP."""

    def make_mlp(self, config: ModelConfig, i: int, build: Build) -> None:
        if config.layers[i].is_sparse:
            assert config.experts is not None, "a dense model"
            experts = StackedExperts if config.experts.packed else NumberedExperts
            build = build.at("mlp")
            self.mlp = SparseMLP(config, experts(config, build.at("experts")), build)
        else:
            super().make_mlp(config, i, build)


class Qwen3_5ForCausalLM(Qwen3ForCausalLM):
    """Qwen3.5, dense."""

    layer_class = Qwen3_5DecoderLayer


class Qwen3_5MoeForCausalLM(Qwen3ForCausalLM):
    """Qwen3.5 with experts, and Qwen3-Next."""

    layer_class = Qwen3_5MoeDecoderLayer
