"""OLMo 2 and 3 (OLMo team, 2024 and 2025): norms behind attention and MLP, none before them."""

import torch
from torch import nn

from nanovllm.layers.base import Build, Hidden
from nanovllm.layers.layernorm import Residual, RMSNorm, add
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.model_config import ModelConfig
from nanovllm.models.qwen3 import Qwen3Attention, Qwen3ForCausalLM, Qwen3MLP


class Olmo2DecoderLayer(nn.Module):
    """x = x + norm(attention(x)); x = x + norm(mlp(x))"""

    def __init__(self, config: ModelConfig, i: int, rope: RotaryEmbedding, build: Build) -> None:
        super().__init__()
        M, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = Qwen3Attention(config, i, rope, build)
        self.mlp = Qwen3MLP(config, build)
        self.post_attention_layernorm = RMSNorm(M, eps, build)
        self.post_feedforward_layernorm = RMSNorm(M, eps, build)

    def forward(
        self, positions: torch.Tensor, hidden: Hidden, residual: Residual
    ) -> tuple[torch.Tensor, Residual]:
        residual = add(hidden, residual)
        hidden = self.post_attention_layernorm.sum_forward(self.self_attn(positions, residual))
        residual = add(hidden, residual)
        return self.post_feedforward_layernorm.sum_forward(self.mlp(residual)), residual


class Olmo2ForCausalLM(Qwen3ForCausalLM):
    """OLMo 2 and 3."""

    layer_class, adds_behind_norms = Olmo2DecoderLayer, True
