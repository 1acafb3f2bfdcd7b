"""Tiles: the parts of a product that programs compute, and the division of its sum (split-K).

A library's product of a few rows leaves much of the GPU idle. Programs that sum over a part of the
inputs fill it; the next kernel adds their results.

Letters: T rows, N outputs, K inputs.
"""

from typing import NamedTuple

import torch

from nanovllm.utils.integers import cdiv

SPLITS = (2, 4)  # possible numbers of partial results: powers of two
# Of kernels that unpack weights of 4 bits on Hopper (`hopper_packed.py`): outputs of two groups of
# warps, or half of them, and columns that are copied at a time.
OUTPUTS, COLUMNS = 128, 256


class Tiles(NamedTuple):
    """The tiles of a product: `block_t` rows by `block_n` outputs, summed over `block_k` inputs at
    a time.

    Attributes:
        splits: programs among which the sum is divided.
        more: rows that a program computes beside `block_t` (in FP8).
        warps, stages: warps of a program, and tiles that are loaded ahead.
    """

    block_t: int
    block_n: int
    block_k: int
    splits: int = 1
    more: int = 0
    warps: int = 4
    stages: int = 4

    def grid(self, T: int, N: int) -> tuple[int, int, int]:
        """The programs of a product, by rows, outputs and parts of the sum; those of the same
        weights are neighbours.
        """
        return cdiv(T, self.block_t + self.more), cdiv(N, self.block_n), self.splits

    def split(self, T: int, N: int, at_once: int, chunks: int = SPLITS[-1]) -> "Tiles":
        """The tiles with the sum in so many parts that all programs run at once.

        Args:
            at_once: programs that run at once.
            chunks: parts of the inputs that are not divided.
        """
        row_tiles, output_tiles, splits = self.grid(T, N)
        fitting = [S for S in SPLITS if chunks % S == 0 and S * row_tiles * output_tiles <= at_once]
        return self._replace(splits=max([splits, *fitting]))


def empty_parts(S: int, T: int, N: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Uninitialised results: [S, T, N] float32 for S > 1 splits; [T, N] of `dtype` for one."""
    if S > 1:
        return torch.empty(S, T, N, dtype=torch.float32, device=device)
    return torch.empty(T, N, dtype=dtype, device=device)
