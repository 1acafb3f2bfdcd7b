"""`Mxfp4Weight`: the matrices of experts in MXFP4 (`tensors.mxfp4`), and the shards of checkpoints
that fill it.

Checkpoints have two codes in a byte, the first in its lower half. gpt-oss stores its experts so.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nanovllm.layers.weights.quantized import QuantizedWeight
from nanovllm.layers.weights.shard import Part, Shard
from nanovllm.tensors.int4 import PLANES
from nanovllm.tensors.mxfp4 import (
    BIAS,
    BLOCK,
    CHUNK,
    MAX_EXPONENT,
    Mxfp4Codes,
    packed,
    packed_exponents,
    quantize,
)
from nanovllm.utils.device import MIN_CAPABILITY, capability

HALF = torch.bfloat16, torch.float16
NAN = 255  # as an exponent


def codes_of(stored: torch.Tensor) -> torch.Tensor:
    """The codes of bytes [rows, blocks, BLOCK / 2]: [rows, columns] uint8."""
    return torch.stack([stored & 15, stored >> 4], -1).flatten(1)


@dataclass(frozen=True)
class CodesShard(Shard):
    """The codes of a tensor [E, rows, columns], which fill `Mxfp4Weight.data`.

    Attributes:
        exponents: `Mxfp4Weight.exponents`, which dummies need.
    """

    dtypes = "U8", "I8", "F8_E8M0"  # bytes

    exponents: torch.Tensor

    @property
    def full_shape(self) -> list[int]:
        *shape, columns = super().full_shape
        return [*shape, columns // BLOCK, BLOCK // 2]

    @property
    def targets(self) -> tuple[torch.Tensor, ...]:
        return self.target, self.exponents

    def fill(self, source: Any) -> None:
        for i in self.parts[0].held:  # one matrix at a time: unpacked, they are large
            codes = codes_of(source[i].view(torch.uint8).to(self.target.device))
            self._put(i, Shard(self.target, self.parts[1:]).read(codes))

    def _put(self, i: int, codes: torch.Tensor) -> None:
        self.target[:, i * len(codes) : (i + 1) * len(codes)] = packed(codes)

    def put(self, numbers: torch.Tensor) -> None:
        for i, matrix in enumerate(numbers):  # dummies
            codes, exponents = quantize(matrix)
            self._put(i, codes)
            _put_exponents(self.exponents, i, exponents)


@dataclass(frozen=True)
class ExponentsShard(Shard):
    """The exponents of these blocks, which fill `Mxfp4Weight.exponents`.

    Attributes:
        max_exponent: largest exponent.
    """

    comes_last = True  # of dummies, `CodesShard` fills it
    dtypes = CodesShard.dtypes

    max_exponent: int

    @property
    def full_shape(self) -> list[int]:
        *shape, columns = super().full_shape
        return [*shape, columns // BLOCK]

    def check(self, name: str, source: Any) -> None:
        super().check(name, source)
        largest = int(source[...].view(torch.uint8).max())
        if largest == NAN:
            raise ValueError(f"tensor {name} has scales that are no numbers: download it again")
        if largest > self.max_exponent:
            raise ValueError(
                f"tensor {name} has scales above {2.0 ** (self.max_exponent - BIAS):g}, which "
                "kernels for MXFP4 do not support: use fused_kernels=False"
            )

    def fill(self, source: Any) -> None:
        experts, rows, columns = self.parts
        held = columns.held
        assert isinstance(held, range), "ranks hold whole blocks"
        blocks = Part(range(held.start // BLOCK, held.stop // BLOCK), columns.total // BLOCK)
        for i in experts.held:
            stored = source[i].view(torch.uint8)
            _put_exponents(self.target, i, Shard(self.target, (rows, blocks)).read(stored))


def _put_exponents(target: torch.Tensor, i: int, exponents: torch.Tensor) -> None:
    """Fill an expert's rows of `Mxfp4Weight.exponents` with [rows, blocks]."""
    rows = len(exponents)
    target[:, i * rows : (i + 1) * rows] = packed_exponents(exponents)


class Mxfp4Weight(QuantizedWeight):
    """N x K values of all experts of a layer, without values until loaded. Only the kernels of
    experts multiply by them (`kernels.experts`).

    Args:
        num_rows, num_cols: N and K on this rank.
        dtype: torch.dtype of activations and results.
        fused: see `Weight`.

    Attributes:
        data, exponents: see `Mxfp4Codes`.
    """

    name = "mxfp4"

    def __init__(self, num_rows: int, num_cols: int, dtype: torch.dtype, fused: bool) -> None:
        super().__init__(dtype, fused)
        self.num_cols, chunks = num_cols, -(-num_cols // CHUNK)
        data = torch.zeros(chunks, num_rows, BLOCK, dtype=torch.int16)
        self.data = nn.Parameter(data, False)
        exponents = torch.zeros(chunks, num_rows, PLANES, dtype=torch.uint8)
        self.exponents = nn.Parameter(exponents, False)

    @property
    def has_kernels(self) -> bool:
        if not self.fused or self.dtype not in HALF:
            return False
        device = self.data.device
        return device.type != "cuda" or capability(device.index) >= MIN_CAPABILITY

    @property
    def num_rows(self) -> int:
        return self.data.shape[1]

    @property
    def codes(self) -> Mxfp4Codes:
        return Mxfp4Codes(self.data, self.exponents, self.num_cols)

    def stacked_shards(
        self, name: str, parts: tuple[Part, Part, Part]
    ) -> Iterator[tuple[str, Shard]]:
        """The tensors of a checkpoint that stack these matrices; `parts` are of experts, rows and
        columns.
        """
        yield f"{name}_blocks", CodesShard(self.data.data, parts, self.exponents.data)
        max_exponent = MAX_EXPONENT if self.has_kernels else 2 * BIAS
        yield f"{name}_scales", ExponentsShard(self.exponents.data, parts, max_exponent)
