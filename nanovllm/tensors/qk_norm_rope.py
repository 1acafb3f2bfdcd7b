"""`QKNormRope`: the norms, rotation and slots that a projection's heads need before attention."""

from typing import NamedTuple

import torch


class Turn(NamedTuple):
    """The rotation of heads by position.

    Attributes:
        cos_sin: [max_position, D] float32, see `RotaryEmbedding`.
        rotary_dim: number of leading elements of a head that are rotated.
        interleaved: whether these are paired with their neighbours.
    """

    cos_sin: torch.Tensor
    rotary_dim: int
    interleaved: bool = False

    @property
    def reorders(self) -> bool:
        """Whether rotated heads have their elements in another order than projections."""
        return self.interleaved or self.rotary_dim < self.cos_sin.shape[1]


class QKNormRope(NamedTuple):
    """The arguments with which query and key heads are normalised and rotated, and keys and values
    stored in their slots.

    Attributes:
        norms: weights [D] of the queries' and of the keys' RMS norm, and eps; None: no norms.
        plus_one: whether norms multiply by `1 + weight`.
        turn: rotation.
        positions: [T] int32.
        slot_mapping: [T] int32, see `Context`.
    """

    norms: tuple[torch.Tensor, torch.Tensor, float] | None
    plus_one: bool
    turn: Turn
    positions: torch.Tensor
    slot_mapping: torch.Tensor
