"""`Scoring`: the parameters of attention scores."""

from typing import NamedTuple

import torch


class Scoring(NamedTuple):
    """The parameters by which a layer's queries score keys.

    Attributes:
        scale: factor on the products of queries and keys.
        window: number of tokens that a token sees, itself and those before it; 0: all.
        softcap: bound of scores, `softcap * tanh(score / softcap)`; 0: none.
        sinks: [Hq], score of an additional key that each head sees, and that has no value.
    """

    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: torch.Tensor | None = None
