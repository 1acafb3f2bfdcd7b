"""Rotary position embedding (Su et al., 2021): the table of rotations, and the order of a head."""

import torch
from torch import nn

from nanovllm.checkpoint.model_config import ModelConfig
from nanovllm.checkpoint.rope import RopeParameters
from nanovllm.layers.base import Build
from nanovllm.layers.rope_frequencies import frequencies
from nanovllm.tensors.qk_norm_rope import Turn


class RotaryEmbedding(nn.Module):
    """Rotation of each pair (x[i], x[i + D/2]) of a head, by an angle that grows with the position.

    A model may pair the elements of a head differently, or rotate only some of them. Then rotated
    heads have their elements in another order (`order`), the same for queries and keys: that
    changes none of their products, and there is one layout. Pairs that are not rotated have the
    angle 0.

    Args:
        head_dim: head size D.
        num_positions: number of positions, which begin at 0.
        rope: parameters of the rotation.

    Attributes:
        cos_sin: [num_positions, D] float32, the cosines of a position, then its sines.
        order: [D] int64, place in a projection's heads of each element of rotated ones; None: the
            same.
        query_scale: [num_positions] float32, factor on rotated queries; None: no factor.
    """

    cos_sin: torch.Tensor
    order: torch.Tensor | None
    query_scale: torch.Tensor | None

    def __init__(self, head_dim: int, num_positions: int, rope: RopeParameters) -> None:
        super().__init__()
        half, rotated = head_dim // 2, rope.rotary_dim // 2
        self._rope = rope
        positions = torch.arange(num_positions, dtype=torch.float32)
        cos = torch.ones(num_positions, half, dtype=torch.float32)
        sin = torch.zeros_like(cos)
        if rope.rope_type != "none":
            angles = torch.outer(positions, frequencies(rope, num_positions))
            cos[:, :rotated] = angles.cos() * rope.attention_factor
            sin[:, :rotated] = angles.sin() * rope.attention_factor
        self.register_buffer("cos_sin", torch.cat([cos, sin], dim=-1), persistent=False)
        self.register_buffer("order", _order(head_dim, rope), persistent=False)
        scale = None
        if beta := rope.llama_4_scaling_beta:
            steps = (positions / rope.original_max_position_embeddings).floor()
            scale = 1 + beta * torch.log1p(steps)
        self.register_buffer("query_scale", scale, persistent=False)

    @property
    def turn(self) -> Turn:
        """The rotation for kernels."""
        return Turn(self.cos_sin, self._rope.rotary_dim, self._rope.interleaved)

    def by_axes(self, positions: torch.Tensor, axes: torch.Tensor) -> torch.Tensor:
        """The rotations of tokens with several positions: of each pair, that by the position on its
        axis.

        Args:
            positions: [number of axes, T] int32.
            axes: [D / 2] int64, axis of each pair.

        Returns:
            [T, D] float32, in the form of `cos_sin`.
        """
        rows = positions.index_select(0, axes.repeat(2)).T  # [T, D]
        return self.cos_sin.gather(0, rows.long())

    def forward(
        self, positions: torch.Tensor, x: torch.Tensor, rotations: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Rotate x: [T, H, D] to its positions: [T] int32, which are rows of `rotations` if they
        are given (see `Context.rotations`).
        """
        table = self.cos_sin if rotations is None else rotations
        # [T, 1, D/2] each
        cos, sin = table.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
        if self.order is not None:
            x = x.index_select(-1, self.order)
        x1, x2 = x.float().chunk(2, dim=-1)
        return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1).to(x.dtype)


def _order(head_dim: int, rope: RopeParameters) -> torch.Tensor | None:
    R, D = rope.rotary_dim, head_dim
    first, second = range(R // 2), range(R // 2, R)
    if rope.interleaved:
        first, second = range(0, R, 2), range(1, R, 2)
    middle = R + (D - R) // 2
    order = [*first, *range(R, middle), *second, *range(middle, D)]
    return None if order == list(range(D)) else torch.tensor(order)


def rotary_embeddings(
    config: ModelConfig, build: Build
) -> dict[RopeParameters | None, RotaryEmbedding]:
    """The rotary embeddings of a model's layers, one for each set of parameters."""
    return {
        rope: RotaryEmbedding(config.head_dim, build.max_model_len, rope) for rope in config.ropes
    }
