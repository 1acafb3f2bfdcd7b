"""`QKNormRope`: what attention needs done to the heads of a projection first."""

from typing import NamedTuple

import torch


class QKNormRope(NamedTuple):
    """Query and key heads are normalised and rotated, keys and values go to their slots.

    Attributes:
        norms: weights [D] of queries and of keys, and eps, of their RMS norms; None: no norms.
        plus_one: norms multiply by `1 + weight`.
        cos_sin: [max_position, D] float32, see `RotaryEmbedding`.
        positions: [T] int32.
        slot_mapping: [T] int32, see `Context`.
    """

    norms: tuple[torch.Tensor, torch.Tensor, float] | None
    plus_one: bool
    cos_sin: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
