"""MXFP4: blocks of 32 numbers of 4 bits with a common power of two (OCP Microscaling Formats, 1.0).

A number is E2M1: a sign, two bits of exponent, one of mantissa; two are in a byte, the first in its
lower half. The power of two is E8M0: an exponent alone. gpt-oss stores its experts so.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from nanovllm.model_config import MXFP4_BLOCK as BLOCK

BIAS = 127  # of its exponent
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by three bits; the fourth is the sign


class Packing(NamedTuple):
    """How the checkpoint stores a tensor.

    Attributes:
        shape: the shape of the numbers -> that of the stored tensor.
        decode: the stored tensor -> float32 numbers.
        multiplies: numbers that are there already, which belong to another tensor.
    """

    shape: Callable[[list[int]], list[int]]
    decode: Callable[[torch.Tensor], torch.Tensor]
    multiplies: bool


def _decode_blocks(stored: torch.Tensor) -> torch.Tensor:
    values = torch.tensor([*VALUES, *(-value for value in VALUES)], device=stored.device)
    return values[torch.stack([stored & 15, stored >> 4], -1).int()].flatten(-3)


def _decode_scales(stored: torch.Tensor) -> torch.Tensor:
    ones = torch.ones_like(stored, dtype=torch.float32)
    return torch.ldexp(ones, stored.int() - BIAS).repeat_interleave(BLOCK, -1)


BLOCKS = Packing(
    lambda shape: [*shape[:-1], shape[-1] // BLOCK, BLOCK // 2], _decode_blocks, multiplies=False
)
SCALES = Packing(lambda shape: [*shape[:-1], shape[-1] // BLOCK], _decode_scales, multiplies=True)
