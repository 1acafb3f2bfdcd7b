"""MXFP4: blocks of 32 numbers of 4 bits with a common power of two (OCP Microscaling Formats, 1.0).

A number is E2M1: a sign, two bits of exponent, one of mantissa; two are in a byte, the first in its
lower half. The power of two is E8M0: an exponent alone. gpt-oss stores its experts so.
"""

from typing import Any

import torch

from nanovllm.checkpoint.model_config import MXFP4_BLOCK as BLOCK
from nanovllm.layers.weights.shard import Shard

BIAS = 127  # of its exponent
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by three bits; the fourth is the sign


class BlocksShard(Shard):
    """The numbers of a tensor [E, rows, columns] as E2M1."""

    dtypes = "U8", "I8", "F8_E8M0"  # bytes

    @property
    def full_shape(self) -> list[int]:
        *shape, columns = super().full_shape
        return [*shape, columns // BLOCK, BLOCK // 2]

    def fill(self, source: Any) -> None:
        for i, target in enumerate(self.target):  # a matrix at a time: unpacked ones are large
            numbers = self.decode(source[i].view(torch.uint8).to(target.device))
            self.put_matrix(target, Shard(target, self.parts[1:]).read(numbers))

    def decode(self, stored: torch.Tensor) -> torch.Tensor:
        """Bytes of a matrix -> float32 numbers."""
        values = [*VALUES, *(-value for value in VALUES)]
        table = torch.tensor(values, dtype=torch.float32, device=stored.device)
        return table[torch.stack([stored & 15, stored >> 4], -1).int()].flatten(-3)

    def put_matrix(self, target: torch.Tensor, numbers: torch.Tensor) -> None:
        """Fill a matrix of the target."""
        target.copy_(numbers)


class ScalesShard(BlocksShard):
    """Their powers of two, by which the numbers that are there are multiplied."""

    comes_last = True

    @property
    def full_shape(self) -> list[int]:
        return super().full_shape[:-1]

    def decode(self, stored: torch.Tensor) -> torch.Tensor:
        ones = torch.ones_like(stored, dtype=torch.float32)
        return torch.ldexp(ones, stored.int() - BIAS).repeat_interleave(BLOCK, -1)

    def put_matrix(self, target: torch.Tensor, numbers: torch.Tensor) -> None:
        target.copy_(target * numbers)
