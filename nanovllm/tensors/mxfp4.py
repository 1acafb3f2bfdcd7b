"""`Mxfp4Codes`: a matrix in MXFP4, in the order in which our kernels unpack it.

A code is E2M1: a sign, two bits of exponent, one of mantissa. BLOCK columns of a row share a power
of two, E8M0: an exponent alone (OCP Microscaling Formats, 1.0).

An int16 has four codes, of four planes of a block each, as in `tensors.int4`, but with their bits
where bfloat16 has a sign, its last two bits of exponent and its first of mantissa: those of the
first plane in these very places, of the next two 3 and 6 bits lower, and of the last in the bits
that these leave free.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from nanovllm.tensors.int4 import PLANES

BLOCK = 32  # columns that share an exponent
CHUNK = PLANES * BLOCK  # columns of a row of int16s, and of an int32 of exponents
BIAS = 127  # of an exponent
MAX_EXPONENT = 128  # of weights that kernels multiply in bfloat16: 2
# For each plane, masks of bits of a code and how much higher these are in an int16.
PLACES = (((8, 12), (7, 6)), ((8, 9), (7, 3)), ((8, 6), (7, 0)), ((12, 11), (3, 10)))
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by the lower three bits; the fourth is the sign


def values_of(codes: torch.Tensor) -> torch.Tensor:
    """The values of codes, without their powers of two: float32."""
    values = [*VALUES, *(-value for value in VALUES)]
    return torch.tensor(values, dtype=torch.float32, device=codes.device)[codes.int()]


def quantize(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes [N, K] and the exponents [N, K / BLOCK] of numbers [N, K], both uint8: each block's
    largest number becomes 4 or 6.
    """
    blocks = numbers.float().unflatten(1, (-1, BLOCK))
    _, exponents = torch.frexp(blocks.abs().amax(2))  # of a mantissa in [0.5, 1)
    exponents = (exponents - 3).clamp(-BIAS, BIAS)
    scaled = torch.ldexp(blocks, -exponents[..., None])
    edges = torch.tensor(VALUES, device=numbers.device)
    codes = torch.bucketize(scaled.abs(), (edges[1:] + edges[:-1]) / 2)
    codes = codes + 8 * (scaled < 0)
    return codes.flatten(1).to(torch.uint8), (exponents + BIAS).to(torch.uint8)


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Pack the codes of planes [..., PLANES, BLOCK] uint8: [..., BLOCK] int16."""
    planes = codes.to(torch.int16).unbind(-2)
    words = torch.zeros_like(planes[0])
    for plane, places in zip(planes, PLACES, strict=True):
        for mask, shift in places:
            words |= (plane & mask) << shift
    return words


def unpack(words: torch.Tensor) -> torch.Tensor:
    """Undo `pack`."""
    codes = torch.zeros(*words.shape[:-1], PLANES, BLOCK, dtype=torch.int16, device=words.device)
    for i, places in enumerate(PLACES):
        for mask, shift in places:
            codes[..., i, :] |= words >> shift & mask
    return codes.to(torch.uint8)


@dataclass(frozen=True)
class Mxfp4Codes:
    """N x K values: each is a code times its block's power of two.

    Attributes:
        data: [C, N, BLOCK] int16, packed codes of C chunks of columns; 0 beyond the last column.
        exponents: [C, N, PLANES] uint8, of the blocks.
        num_cols: K, a multiple of BLOCK.
    """

    data: torch.Tensor
    exponents: torch.Tensor
    num_cols: int

    def __len__(self) -> int:
        return self.data.shape[1]

    @property
    def shape(self) -> tuple[int, int]:
        """N, K"""
        return len(self), self.num_cols

    def numbers(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The dequantised values [N, K]."""
        codes = unpack(self.data).permute(1, 0, 2, 3).flatten(1)
        exponents = self.exponents.transpose(0, 1).flatten(1).int()
        powers = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents - BIAS)
        values = values_of(codes).unflatten(1, (-1, BLOCK)) * powers[..., None]
        return values.flatten(1)[:, : self.num_cols].to(dtype)


def packed(codes: torch.Tensor) -> torch.Tensor:
    """Codes [N, K] uint8 as `Mxfp4Codes.data`."""
    codes = F.pad(codes, (0, -codes.shape[1] % CHUNK))
    return pack(codes.unflatten(1, (-1, PLANES, BLOCK)).transpose(0, 1)).contiguous()


def packed_exponents(exponents: torch.Tensor) -> torch.Tensor:
    """Exponents [N, K / BLOCK] uint8 as `Mxfp4Codes.exponents`."""
    exponents = F.pad(exponents, (0, -exponents.shape[1] % PLANES))
    return exponents.unflatten(1, (-1, PLANES)).transpose(0, 1).contiguous()
