"""`Int4Weight`: the matrix of a product in 4 bits, and the shards of checkpoints that fill it.

A value is a code minus the zero point of its group, times the group's scale. Checkpoints pack eight
codes, or zero points, into an int32 (`checkpoint/int4.py`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nanovllm.checkpoint.int4 import Int4
from nanovllm.layers.weights.quantized import QuantizedWeight
from nanovllm.layers.weights.shard import Part, Shard, UnheldShard
from nanovllm.tensors.int4 import OFFSETS, PLANES, ZERO, Int4Codes, pack, plane_size

IN_WORD = 8  # codes in an int32
DUMMY_SCALE = 0.02 / 3  # codes from 0 to 15 reach over two and a half standard deviations of 0.02


@dataclass(frozen=True)
class PackedShard(Shard):
    """A tensor of codes, eight in an int32.

    Attributes:
        packed: dimension along which neighbours share an int32.
        order: place in the int32 of each of eight neighbours; 0: the lowest four bits.
        transposed: whether the checkpoint has columns first.
    """

    dtypes = ("I32",)

    packed: int
    order: tuple[int, ...]
    transposed: bool

    @property
    def full_shape(self) -> list[int]:
        return [
            -(-part.total // IN_WORD) if dim == self.packed else part.total
            for dim, part in enumerate(self.parts)
        ]

    def fill(self, source: Any) -> None:
        dim, part = self.packed, self.parts[self.packed]
        first, last = min(part.held) // IN_WORD, max(part.held) // IN_WORD
        in_words = list(self.parts)
        in_words[dim] = Part(range(first, last + 1), self.full_shape[dim])
        words = Shard(self.target, tuple(in_words)).read(source).to(self.target.device)
        held = torch.tensor(part.held, device=words.device)
        places = torch.tensor(self.order, device=words.device)[held % IN_WORD]
        stored = words.contiguous().view(torch.uint8)  # four bytes of each along the last dimension
        if dim == 0:
            stored = stored.view(*words.shape, 4).transpose(1, 2).flatten(0, 1)
        index = (held // IN_WORD - first) * 4 + places // 2
        shifts = (4 * (places % 2)).to(torch.uint8)
        codes = stored.index_select(dim, index) >> (shifts[:, None] if dim == 0 else shifts) & 15
        self.put_codes(codes.T if self.transposed else codes)

    def put_codes(self, codes: torch.Tensor) -> None:
        """Fill the target: [rows, columns] uint8."""
        raise NotImplementedError


@dataclass(frozen=True)
class CodesShard(PackedShard):
    """The codes of the matrix.

    Attributes:
        plane: columns of a plane, see `tensors.int4`.
    """

    plane: int

    def put_codes(self, codes: torch.Tensor) -> None:
        self.target.copy_(pack(codes.contiguous(), self.plane))

    def put(self, numbers: torch.Tensor) -> None:
        numbers = numbers.T if self.transposed else numbers
        self.put_codes((numbers / DUMMY_SCALE + ZERO).round().clamp(0, 15).to(torch.uint8))


@dataclass(frozen=True)
class ZerosShard(PackedShard):
    """The zero points of the matrix. The target is [groups, rows] (`Int4Codes.scales`).

    Attributes:
        added: constant added to the checkpoint's zero points, modulo 16.
    """

    added: int

    def put_codes(self, codes: torch.Tensor) -> None:
        zeros = (codes + self.added) & 15
        self.target.copy_(-(zeros.T.to(self.target.dtype) + OFFSETS[self.target.dtype]))

    def put(self, numbers: torch.Tensor) -> None:
        self.target.fill_(-(ZERO + OFFSETS[self.target.dtype]))  # dummies


@dataclass(frozen=True)
class ScalesShard(Shard):
    """The scales of the matrix. The target is [groups, rows].

    Attributes:
        transposed: whether the checkpoint has groups first.
        zeros: [groups, rows], zero points to fill, too, if the checkpoint has none.
    """

    transposed: bool
    zeros: torch.Tensor | None

    @property
    def targets(self) -> tuple[torch.Tensor, ...]:
        return (self.target,) if self.zeros is None else (self.target, self.zeros)

    def fill(self, source: Any) -> None:
        scales = self.read(source)
        self._put(scales if self.transposed else scales.T)

    def put(self, numbers: torch.Tensor) -> None:
        self._put(torch.full_like(self.target, DUMMY_SCALE))

    def _put(self, scales: torch.Tensor) -> None:
        self.target.copy_(scales)
        if self.zeros is not None:
            self.zeros.fill_(-(ZERO + OFFSETS[self.target.dtype]))


@dataclass(frozen=True)
class OrderShard(UnheldShard):
    """The group of each column. The columns must be in order.

    Attributes:
        group: columns per group.
    """

    dtypes = "I32", "I64"

    group: int

    def check(self, name: str, source: Any) -> None:
        super().check(name, source)
        groups = source[...].long()
        if not groups.equal(torch.arange(len(groups)) // self.group):
            raise ValueError(
                f"tensor {name}: reordered columns (act-order) are not supported: "
                "use a checkpoint without them, or the original weights"
            )


class Int4Weight(QuantizedWeight):
    """N x K values in 4 bits, uninitialised until loaded.

    Args:
        num_rows, num_cols: N and K on this rank.
        dtype: torch.dtype of activations and results.
        fused, fixed_order: see `Weight`.
        format: format of the checkpoint.

    Attributes:
        data, scales: see `Int4Codes`.
    """

    name = "int4"

    def __init__(
        self,
        num_rows: int,
        num_cols: int,
        dtype: torch.dtype,
        fused: bool,
        format: Int4,
        fixed_order: bool = False,
    ) -> None:
        super().__init__(dtype, fused, fixed_order)
        self.format, group = format, format.group
        # `shards` refuses columns that are not whole groups.
        data = torch.empty(num_rows, -(-num_cols // group) * group // PLANES, dtype=torch.int16)
        scales = torch.empty(-(-num_cols // group), num_rows, 2, dtype=dtype)
        self.data, self.scales = nn.Parameter(data, False), nn.Parameter(scales, False)
        if fused:
            from nanovllm.kernels.products import int4_linear

            if int4_linear.can_multiply(self.codes, dtype):
                self.use(int4_linear)

    @property
    def codes(self) -> Int4Codes:
        return Int4Codes(self.data, self.scales, self.format.group)

    def shards(
        self, module: str, begin: int, rows: Part, cols: Part
    ) -> Iterator[tuple[str, Shard]]:
        how, end = self.format, begin + len(rows.held)
        assert isinstance(cols.held, range), "ranks divide columns evenly"
        if len(cols.held) % how.group:
            remedy = "" if cols.total % how.group else "another tensor_parallel_size, or "
            raise ValueError(
                f"{module}: each rank's shard must consist of whole INT4 groups of {how.group} "
                f"inputs: use {remedy}the original weights"
            )
        first = cols.held.start // how.group
        held = range(first, first + len(cols.held) // how.group)
        groups = Part(held, cols.total // how.group)
        zeros, scales = self.scales.data[:, begin:end].unbind(2)
        transposed = how.transposed
        plane = plane_size(len(cols.held), how.group)

        def in_order(rows: Part, cols: Part) -> tuple[Part, ...]:
            return (cols, rows) if transposed else (rows, cols)

        along_rows = 1 if transposed else 0
        codes_along = along_rows if how.along_rows else 1 - along_rows
        codes = self.data.data[begin:end]
        yield (
            f"{module}.{how.codes}",
            CodesShard(codes, in_order(rows, cols), codes_along, how.order, transposed, plane),
        )
        if how.zeros:
            parts = in_order(rows, groups)
            yield (
                f"{module}.{how.zeros}",
                ZerosShard(zeros, parts, along_rows, how.order, transposed, how.added),
            )
        yield (
            f"{module}.{how.scales}",
            ScalesShard(scales, in_order(rows, groups), transposed, None if how.zeros else zeros),
        )
        if how.groups:
            yield (
                f"{module}.{how.groups}",
                OrderShard(torch.empty(0), (Part.whole(cols.total),), how.group),
            )
