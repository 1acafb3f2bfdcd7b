"""LFM2 (Liquid AI, 2025): most layers mix a few neighbouring tokens instead of attending."""

import torch
from torch import nn

from nanovllm.checkpoint.model_config import ModelConfig
from nanovllm.layers.attention import Attention, scoring_of
from nanovllm.layers.base import MLP, Build, Hidden
from nanovllm.layers.layernorm import norm
from nanovllm.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.layers.sequence_parallel import Residual
from nanovllm.models.qwen3 import Qwen3ForCausalLM
from nanovllm.recurrent.short_conv import ShortConv


class Lfm2Attention(nn.Module):
    """Qwen3's attention, with other names."""

    def __init__(self, config: ModelConfig, i: int, rope: RotaryEmbedding, build: Build) -> None:
        super().__init__()
        M, D = config.hidden_size, config.head_dim
        width = config.num_attention_heads * D
        self.qkv_proj = QKVParallelLinear(config, build.at("qkv_proj"))
        self.out_proj = RowParallelLinear(width, M, False, build.at("out_proj"))
        plain, is_last = build._replace(fused=False), i == config.num_hidden_layers - 1
        self.q_layernorm, self.k_layernorm = norm(config, plain, D), norm(config, plain, D)
        norms = self.q_layernorm, self.k_layernorm
        scoring = scoring_of(config, i, build.max_model_len)
        self.attn = Attention(self.qkv_proj, D, rope, norms, scoring, is_last, build)

    def forward(self, positions: torch.Tensor, hidden: Hidden) -> Hidden:
        return self.out_proj(self.attn(positions, self.qkv_proj(hidden)))


class Lfm2MLP(MLP):
    """w2(silu(w1(x)) * w3(x))"""

    def __init__(self, config: ModelConfig, build: Build) -> None:
        super().__init__()
        M, I = config.hidden_size, config.intermediate_size
        self.w2 = RowParallelLinear(I, M, False, build.at("w2"))
        outputs, next_block = {"w1": I, "w3": I}, self.w2.act_block
        self.gate_up = MergedColumnParallelLinear(
            M, outputs, False, build.at("gate_up"), next_block=next_block
        )
        self.act_block = self.gate_up.act_block

    def forward(self, hidden: Hidden) -> Hidden:
        return self.w2(self.gate_up.gated(hidden))


class Lfm2DecoderLayer(nn.Module):
    """x = x + operator(norm(x)); x = x + mlp(norm(x)), the operator being attention or a
    convolution.
    """

    def __init__(self, config: ModelConfig, i: int, rope: RotaryEmbedding, build: Build) -> None:
        super().__init__()
        self.attends = config.layers[i].rope is not None
        if self.attends:
            self.self_attn = Lfm2Attention(config, i, rope, build.at("self_attn"))
            act_block = self.self_attn.qkv_proj.act_block
        else:
            is_last = i == config.num_hidden_layers - 1
            self.conv = ShortConv(config, is_last, build.at("conv"))
            act_block = self.conv.in_proj.act_block
        self.feed_forward = Lfm2MLP(config, build.at("feed_forward"))
        self.operator_norm = norm(config, build, act_block=act_block)
        self.ffn_norm = norm(config, build, act_block=self.feed_forward.act_block)

    def forward(
        self, positions: torch.Tensor, hidden: Hidden, residual: Residual
    ) -> tuple[Hidden, Residual]:
        hidden, residual = self.operator_norm.add_forward(hidden, residual)
        hidden = self.self_attn(positions, hidden) if self.attends else self.conv(hidden)
        hidden, residual = self.ffn_norm.add_forward(hidden, residual)
        return self.feed_forward(hidden), residual


class Lfm2ForCausalLM(Qwen3ForCausalLM):
    """LFM2, dense."""

    layer_class, final_norm = Lfm2DecoderLayer, "embedding_norm"
