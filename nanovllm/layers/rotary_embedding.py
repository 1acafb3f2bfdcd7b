"""Rotary position embedding (Su et al., 2021): the table of rotations, and the order of a head."""

import math

import torch
from torch import nn

from nanovllm.layers.base import Build
from nanovllm.model_config import ModelConfig
from nanovllm.rope import RopeParameters


class RotaryEmbedding(nn.Module):
    """Turns each pair (x[i], x[i + D/2]) of a head by an angle that grows with its position.

    A model may pair the numbers of a head otherwise, or turn a part of them. Then the projections
    write them in another order (`order`), the same for queries and keys: their products do not
    change by that, and there is one layout. Pairs that are not turned have the angle 0.

    Args:
        head_dim: D.
        num_positions: positions from 0, at most so many.
        rope: how the model turns.

    Attributes:
        cos_sin: [num_positions, D] float32, the cosines of a position and then its sines.
        order: which number of the checkpoint's heads goes where; None: they stay.
        query_scale: [num_positions] float32, by which queries are multiplied behind it, or None.
    """

    cos_sin: torch.Tensor
    query_scale: torch.Tensor | None

    def __init__(self, head_dim: int, num_positions: int, rope: RopeParameters) -> None:
        super().__init__()
        half, turned = head_dim // 2, rope.rotary_dim // 2
        positions = torch.arange(num_positions, dtype=torch.float32)
        cos, sin = torch.ones(num_positions, half), torch.zeros(num_positions, half)
        if rope.rope_type != "none":
            angles = torch.outer(positions, frequencies(rope, num_positions))
            cos[:, :turned] = angles.cos() * rope.attention_factor
            sin[:, :turned] = angles.sin() * rope.attention_factor
        self.register_buffer("cos_sin", torch.cat([cos, sin], dim=-1), persistent=False)
        self.order = _order(head_dim, rope)
        scale = None
        if beta := rope.llama_4_scaling_beta:
            steps = (positions / rope.original_max_position_embeddings).floor()
            scale = 1 + beta * torch.log1p(steps)
        self.register_buffer("query_scale", scale, persistent=False)

    def forward(self, positions: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Rotate x: [T, H, D] to its positions: [T] int32."""
        # [T, 1, D/2] each
        cos, sin = self.cos_sin.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
        x1, x2 = x.float().chunk(2, dim=-1)
        return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1).to(x.dtype)


def _order(head_dim: int, rope: RopeParameters) -> list[int] | None:
    R, D = rope.rotary_dim, head_dim
    first, second = range(R // 2), range(R // 2, R)
    if rope.interleaved:
        first, second = range(0, R, 2), range(1, R, 2)
    middle = R + (D - R) // 2
    order = [*first, *range(R, middle), *second, *range(middle, D)]
    return None if order == list(range(D)) else order


def frequencies(rope: RopeParameters, num_positions: int) -> torch.Tensor:
    """Radians by which each pair turns from one position to the next: [rotary_dim / 2] float32.

    - "default": theta^(-2i/R).
    - "linear" (Chen et al., 2023): divided by the factor.
    - "dynamic" (bloc97 and emozilla, 2023): theta grows with the context, here the longest that the
      engine allows (`num_positions`), where transformers takes the sequence's own.
    - "llama3" (Grattafiori et al., 2024): divided by the factor where a pair makes fewer than
      `low_freq_factor` turns within the original context, kept where more than `high_freq_factor`,
      between them in between.
    - "yarn" (Peng et al., 2023): divided or kept likewise; between, pair by pair.
    - "longrope" (Ding et al., 2024): each divided by its own factor, of one set if `num_positions`
      is within the original context, of another if it is beyond; so vLLM does, where transformers
      takes the sequence's own length.
    """
    R, theta, original = rope.rotary_dim, rope.rope_theta, rope.original_max_position_embeddings
    if rope.rope_type == "dynamic" and num_positions > original:
        theta *= (rope.factor * num_positions / original - (rope.factor - 1)) ** (R / (R - 2))
    plain = 1.0 / theta ** (torch.arange(0, R, 2, dtype=torch.float32) / R)
    if rope.rope_type == "linear":
        return plain / rope.factor
    if rope.rope_type == "llama3":
        turns = original * plain / (2 * math.pi)
        low, high = rope.low_freq_factor, rope.high_freq_factor
        return _between(plain, rope.factor, ((turns - low) / (high - low)).clamp(0, 1))
    if rope.rope_type == "yarn":
        return _between(plain, rope.factor, 1 - _yarn_ramp(rope))
    if rope.rope_type == "longrope":
        factors = rope.long_factor if num_positions > original else rope.short_factor
        return 1.0 / (torch.tensor(factors) * theta ** (torch.arange(0, R, 2).float() / R))
    return plain


def _between(plain: torch.Tensor, factor: float, kept: torch.Tensor) -> torch.Tensor:
    return plain * (kept + (1 - kept) / factor)


def _yarn_ramp(rope: RopeParameters) -> torch.Tensor:
    """How far each pair's wavelength is on the way from `beta_fast` turns within the original
    context to `beta_slow`.
    """
    R = rope.rotary_dim
    context = rope.original_max_position_embeddings / (2 * math.pi)
    first, last = (
        R * math.log(context / beta) / (2 * math.log(rope.rope_theta))
        for beta in (rope.beta_fast, rope.beta_slow)
    )
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, R - 1)
    steps = torch.arange(R // 2, dtype=torch.float32) - first
    return (steps / max(last - first, 1e-3)).clamp(0, 1)


def rotary_embeddings(config: ModelConfig, build: Build) -> dict[RopeParameters, RotaryEmbedding]:
    """Those of a model's layers, each once."""
    return {
        rope: RotaryEmbedding(config.head_dim, build.max_model_len, rope)
        for rope in dict.fromkeys(layer.rope for layer in config.layers)
    }
