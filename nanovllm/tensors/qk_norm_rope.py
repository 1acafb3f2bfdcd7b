"""`QKNormRope`: the norms, rotation and slots that a projection's heads need before attention."""

from typing import NamedTuple

import torch


class QKNormRope(NamedTuple):
    """The arguments with which query and key heads are normalised and rotated, and keys and values
    stored in their slots.

    Attributes:
        norms: weights [D] of the queries' and of the keys' RMS norm, and eps; None: no norms.
        plus_one: whether norms multiply by `1 + weight`.
        cos_sin: [max_position, D] float32, see `RotaryEmbedding`.
        positions: [T] int32.
        slot_mapping: [T] int32, see `Context`.
    """

    norms: tuple[torch.Tensor, torch.Tensor, float] | None
    plus_one: bool
    cos_sin: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
