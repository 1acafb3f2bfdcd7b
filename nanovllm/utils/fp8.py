"""FP8 (e4m3), and `Codes`: a matrix in it.

Micikevicius et al., FP8 Formats for Deep Learning, 2022.
"""

from dataclasses import dataclass

import torch

FP8 = torch.float8_e4m3fn
LARGEST = 448.0  # of its numbers
PART = 2**22  # numbers that are computed at a time


@dataclass(frozen=True)
class Codes:
    """T x K numbers: each is a code times the scale of its block.

    Attributes:
        codes: [T, K] of `FP8`.
        scales: [T / block rows, K / block columns] float32, rounded up.
        block: rows and columns that share a scale.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    block: tuple[int, int]

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, rows: slice) -> "Codes":
        """Some rows, where each has scales of its own."""
        assert self.block[0] == 1, "rows share scales"
        return Codes(self.codes[rows], self.scales[rows], self.block)

    def numbers(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """[T, K], a part at a time: those of experts take gigabytes."""
        (T, K), (rows, columns) = self.codes.shape, self.block
        numbers = torch.empty(T, K, dtype=dtype, device=self.codes.device)
        step = max(1, PART // K // rows) * rows
        for begin in range(0, T, step):
            codes, out = self.codes[begin : begin + step], numbers[begin : begin + step]
            scales = self.scales[begin // rows : -(-(begin + step) // rows)]
            scales = scales.repeat_interleave(rows, 0) if rows > 1 else scales
            if scales.shape[1] > 1:
                scales = scales.repeat_interleave(columns, 1)[:, :K]
            torch.mul(codes.float(), scales[: len(codes)], out=out)
        return numbers
