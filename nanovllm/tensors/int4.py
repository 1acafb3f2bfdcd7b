"""`Int4Codes`: a matrix in 4 bits, in the order in which our kernels unpack it.

An int16 has four codes of a row, one of each "plane": 4 P columns are four planes of P. A mask
extracts one plane from all int16s, in the layout that tensor cores need. The first two planes are
in the lower halves of bytes, the others in the upper ones. Two planes belong to one group.
"""

from dataclasses import dataclass

import torch

PLANES = 4  # codes in an int16
SHIFTS = (0, 8, 4, 12)  # first bit of each plane's code
SIZES = (64, 32, 16, 8)  # possible P, the best first
ZERO = 8  # zero point, unless the checkpoint has others
# An exponent before a code's bits makes them a value that is too large by this offset. In 32 bits,
# codes are converted instead.
OFFSETS = {torch.bfloat16: 128, torch.float16: 1024, torch.float32: 0}


def plane_size(num_cols: int, group: int) -> int:
    """P for a matrix with `num_cols` columns, a multiple of `group`, itself a multiple of 32."""
    return next(P for P in SIZES if num_cols % (PLANES * P) == group % (2 * P) == 0)


def pack(codes: torch.Tensor, P: int) -> torch.Tensor:
    """Pack codes: [N, K] uint8 -> [N, K / 4] int16."""
    N, K = codes.shape
    words = torch.zeros(N, K // PLANES // P, P, dtype=torch.int16, device=codes.device)
    for plane, shift in zip(codes.view(N, -1, PLANES, P).unbind(2), SHIFTS, strict=True):
        words |= plane.to(torch.int16) << shift  # the last one includes the sign bit
    return words.view(N, K // PLANES)


def unpack(data: torch.Tensor, P: int) -> torch.Tensor:
    """Undo `pack`."""
    words = data.view(len(data), -1, P)
    return torch.stack([words >> shift & 15 for shift in SHIFTS], 2).to(torch.uint8).flatten(1)


@dataclass(frozen=True)
class Int4Codes:
    """N x K values: each is a code minus its group's zero point, times its group's scale.

    Attributes:
        data: [N, K / 4] int16, see above.
        scales: [K / group, N, 2] of the values' dtype: -(zero point + offset of the dtype, see
            `OFFSETS`), and the scale. In 16 bits, the two make one word.
        group: columns that share a zero point and a scale.
    """

    data: torch.Tensor
    scales: torch.Tensor
    group: int

    def __len__(self) -> int:
        return len(self.data)

    @property
    def shape(self) -> tuple[int, int]:
        """N, K"""
        return len(self.data), self.data.shape[1] * PLANES

    @property
    def plane(self) -> int:
        """P"""
        return plane_size(self.shape[1], self.group)

    def numbers(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The dequantised values [N, K]."""
        N, K = self.shape
        minus, scales = self.scales.float().transpose(0, 1).unbind(2)  # [N, K / group] each
        minus = minus + OFFSETS[self.scales.dtype]
        codes = unpack(self.data, self.plane).view(N, -1, self.group).float()
        return ((codes + minus[..., None]) * scales[..., None]).view(N, K).to(dtype)
