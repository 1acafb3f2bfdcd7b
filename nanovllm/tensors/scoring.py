"""`Scoring`: how queries score keys."""

from typing import NamedTuple

import torch


class Scoring(NamedTuple):
    """Of a layer.

    Attributes:
        scale: multiplies the products.
        window: tokens that a token sees, itself and those before it; 0: all.
        softcap: scores are `softcap * tanh(score / softcap)`; 0: as they are.
        sinks: [Hq], scores of a key that each head sees beside its own, and that has no value.
    """

    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: torch.Tensor | None = None
