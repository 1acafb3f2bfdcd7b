"""OLMo 2 and 3 (OLMo team, 2024 and 2025): norms after attention and MLP, none before them, and
norms of all queries and of all keys as a whole.
"""

from collections.abc import Iterator

import torch
from torch import nn

from nanovllm.checkpoint.model_config import ModelConfig
from nanovllm.distributed.group import Group
from nanovllm.layers.base import Build, Hidden
from nanovllm.layers.layernorm import RMSNorm, norm
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.layers.sequence_parallel import Residual, kept
from nanovllm.layers.weights.shard import Part, Shard
from nanovllm.models.qwen3 import Qwen3Attention, Qwen3ForCausalLM, Qwen3MLP


class SplitRMSNorm(RMSNorm):
    """RMSNorm of rows that are divided over the ranks.

    Args:
        part: part of a row that this rank has.
        eps: constant added to the mean square.
        build: facts and options that all layers share.
    """

    def __init__(self, part: Part, eps: float, build: Build) -> None:
        super().__init__(len(part.held), eps, build)
        self.part = part

    def shards(self, path: str) -> Iterator[tuple[str, Shard]]:
        yield f"{path}.weight", Shard(self.weight.data, (self.part,))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise [T, len(part.held)]; the result has the same shape."""
        return super().forward(x) if self.build.group.size == 1 else self.plain(x)

    def mean_square(self, h: torch.Tensor) -> torch.Tensor:
        """The mean square over all ranks, whose parts are equally long; some may be the same."""
        group = self.build.group
        return group.all_reduce(super().mean_square(h)) / group.size


def add(hidden: Hidden, residual: Residual, group: Group) -> torch.Tensor:
    """The sum; None stands for zero, and `hidden` for partial results [1, T, M] of an embedding."""
    assert isinstance(hidden, torch.Tensor), "models that add after a norm divide no rows"
    if hidden.dim() == 3:
        hidden = group.all_reduce(hidden.squeeze(0).contiguous())
    own = kept(residual, len(hidden), group)
    return hidden if own is None else hidden + own


class Olmo2Attention(Qwen3Attention):
    """Attention with queries and keys normalised over all heads."""

    def __init__(self, config: ModelConfig, i: int, rope: RotaryEmbedding, build: Build) -> None:
        super().__init__(config, i, rope, build)
        self.qkv_proj.partial = False  # the norms need complete results
        eps = config.rms_norm_eps
        self.q_norm, self.k_norm = (
            SplitRMSNorm(part, eps, build) for part in self.qkv_proj.head_parts
        )

    def forward(self, positions: torch.Tensor, hidden: Hidden) -> Hidden:
        qkv = self.qkv_proj(hidden)
        widths = [len(part.held) for part in self.qkv_proj.head_parts]
        q, k, v = qkv.split([*widths, widths[1]], dim=-1)
        qkv = torch.cat([self.q_norm(q), self.k_norm(k), v], dim=-1)
        return self.o_proj(self.attn(positions, qkv))


class Olmo2DecoderLayer(nn.Module):
    """x = x + norm(attention(x)); x = x + norm(mlp(x))"""

    attention_class: type[Qwen3Attention] = Olmo2Attention

    def __init__(self, config: ModelConfig, i: int, rope: RotaryEmbedding, build: Build) -> None:
        super().__init__()
        self.group = build.group
        self.self_attn = self.attention_class(config, i, rope, build.at("self_attn"))
        self.mlp = Qwen3MLP(config, build.at("mlp"))
        self.post_attention_layernorm = norm(config, build)
        self.post_feedforward_layernorm = norm(config, build)

    def forward(
        self, positions: torch.Tensor, hidden: Hidden, residual: Residual
    ) -> tuple[torch.Tensor, Residual]:
        residual = add(hidden, residual, self.group)
        hidden = self.post_attention_layernorm.whole_forward(self.self_attn(positions, residual))
        residual = add(hidden, residual, self.group)
        return self.post_feedforward_layernorm.whole_forward(self.mlp(residual)), residual


class Olmo2ForCausalLM(Qwen3ForCausalLM):
    """OLMo 2 and 3."""

    layer_class, adds_after_norms = Olmo2DecoderLayer, True
