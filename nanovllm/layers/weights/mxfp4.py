"""MXFP4: blocks of 32 values of 4 bits with a common power of two (OCP Microscaling Formats, 1.0).

A value is E2M1: a sign, two bits of exponent, one of mantissa; a byte has two, the first in its
lower half. The power of two is E8M0: an exponent alone. gpt-oss stores its experts in this format.
"""

from typing import Any

import torch

from nanovllm.checkpoint.model_config import MXFP4_BLOCK as BLOCK
from nanovllm.layers.weights.shard import Shard

BIAS = 127  # of the exponent in E8M0
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by the lower three bits; the fourth is the sign


class BlocksShard(Shard):
    """The values of a tensor [E, rows, columns], as E2M1."""

    dtypes = "U8", "I8", "F8_E8M0"  # bytes

    @property
    def full_shape(self) -> list[int]:
        *shape, columns = super().full_shape
        return [*shape, columns // BLOCK, BLOCK // 2]

    def fill(self, source: Any) -> None:
        for i, target in enumerate(self.target):  # one matrix at a time: unpacked, they are large
            numbers = self.decode(source[i].view(torch.uint8).to(target.device))
            self.put_matrix(target, Shard(target, self.parts[1:]).read(numbers))

    def decode(self, stored: torch.Tensor) -> torch.Tensor:
        """Unpack the bytes of a matrix to float32 values."""
        values = [*VALUES, *(-value for value in VALUES)]
        table = torch.tensor(values, dtype=torch.float32, device=stored.device)
        return table[torch.stack([stored & 15, stored >> 4], -1).int()].flatten(-3)

    def put_matrix(self, target: torch.Tensor, numbers: torch.Tensor) -> None:
        """Fill a matrix of the target."""
        target.copy_(numbers)


class ScalesShard(BlocksShard):
    """The powers of two of these blocks, which multiply the values that are already filled in."""

    comes_last = True

    @property
    def full_shape(self) -> list[int]:
        return super().full_shape[:-1]

    def decode(self, stored: torch.Tensor) -> torch.Tensor:
        ones = torch.ones_like(stored, dtype=torch.float32)
        return torch.ldexp(ones, stored.int() - BIAS).repeat_interleave(BLOCK, -1)

    def put_matrix(self, target: torch.Tensor, numbers: torch.Tensor) -> None:
        target.copy_(target * numbers)
