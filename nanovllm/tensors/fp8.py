"""FP8 (e4m3), and `Codes`: a matrix in 8 bits.

Micikevicius et al., FP8 Formats for Deep Learning, 2022.
"""

from dataclasses import dataclass

import torch

FP8 = torch.float8_e4m3fn
LARGEST = 448.0  # FP8 value
LARGEST_INT8 = 127.0  # INT8 code
PART = 2**22  # elements that are computed at a time


@dataclass(frozen=True)
class Codes:
    """T x K values: each is a code times the scale of its block.

    Attributes:
        codes: [T, K] `FP8` or int8.
        scales: [T / block rows, K / block columns] float32, both rounded up.
        block: rows and columns that share a scale.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    block: tuple[int, int]

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, rows: slice) -> "Codes":
        """Neighbouring rows, which begin with a block."""
        (begin, end, _), size = rows.indices(len(self)), self.block[0]
        assert begin % size == 0, "rows share scales"
        scales = self.scales[begin // size : -(-end // size)]
        return Codes(self.codes[begin:end], scales, self.block)

    def numbers(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The dequantised values [T, K], computed in parts: those of experts take gigabytes."""
        (T, K), (rows, columns) = self.codes.shape, self.block
        numbers = torch.empty(T, K, dtype=dtype, device=self.codes.device)
        step = max(1, PART // K // rows) * rows
        for begin in range(0, T, step):
            part, out = self[begin : begin + step], numbers[begin : begin + step]
            scales = part.scales.repeat_interleave(rows, 0) if rows > 1 else part.scales
            if scales.shape[1] > 1:
                scales = scales.repeat_interleave(columns, 1)[:, :K]
            torch.mul(part.codes.float(), scales[: len(part)], out=out)
        return numbers
