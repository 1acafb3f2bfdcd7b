"""`Fp8Weight`: the matrix of a product in 8 bits, and the shards of checkpoints that fill it.

A value is a code (e4m3) times the scale of its block. See `checkpoint/fp8.py`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nanovllm.checkpoint.fp8 import Fp8
from nanovllm.layers.weights.quantized import QuantizedWeight
from nanovllm.layers.weights.shard import Part, Shard
from nanovllm.tensors.fp8 import FP8, LARGEST, LARGEST_INT8, PART, Codes


class CodesShard(Shard):
    """A checkpoint's tensor of FP8 codes."""

    dtypes = ("F8_E4M3",)

    def fill(self, source: Any) -> None:
        self.target.copy_(self.read(source))

    def put(self, numbers: torch.Tensor) -> None:
        self.target.copy_((numbers * 2.0**10).clamp(-LARGEST, LARGEST))  # dummies


class ScalesShard(Shard):
    """The scales of these codes."""

    ignores_ones = True

    def fill(self, source: Any) -> None:
        whole = source[...] if source.get_shape() else source[()]
        super().fill(whole.reshape(self.full_shape))

    def put(self, numbers: torch.Tensor) -> None:
        self.target.copy_(numbers)  # one scale of a whole tensor is copied to each of its rows


@dataclass(frozen=True)
class QuantizingShard(Shard):
    """A tensor of values that is quantised to FP8 or int8 while it is loaded, with one scale per
    row, the same on all ranks.

    Attributes:
        scales: [rows, 1] float32, filled, too.
    """

    scales: torch.Tensor

    @property
    def targets(self) -> tuple[torch.Tensor, ...]:
        return self.target, self.scales

    def fill(self, source: Any) -> None:
        rows, cols = self.parts
        whole = Shard(self.target, (rows, Part.whole(cols.total))).read(source)
        assert isinstance(cols.held, range), "ranks divide columns evenly"
        self._quantize(whole, whole[:, cols.held.start : cols.held.stop])

    def put(self, numbers: torch.Tensor) -> None:
        self._quantize(numbers, numbers)  # dummies

    def _quantize(self, rows: torch.Tensor, numbers: torch.Tensor) -> None:
        """Quantise `numbers` by the largest of each of `rows`, which have the other ranks' columns,
        too. This goes by parts: an LM head would take gigabytes in float32.
        """
        is_fp8, device = self.target.dtype == FP8, self.target.device
        largest, step = LARGEST if is_fp8 else LARGEST_INT8, max(1, PART // rows.shape[1])
        for begin in range(0, len(rows), step):
            part = slice(begin, begin + step)
            most = rows[part].to(device).abs().amax(1, keepdim=True).float()
            scales = self.scales[part].copy_((most / largest).clamp(min=2.0**-100))
            scaled = (numbers[part].to(device, torch.float32) / scales).clamp_(-largest, largest)
            self.target[part].copy_(scaled if is_fp8 else scaled.round_())


class Fp8Weight(QuantizedWeight):
    """N x K values in FP8, uninitialised until loaded.

    Args:
        num_rows, num_cols: N and K on this rank.
        dtype: torch.dtype of activations and results.
        fused, fixed_order: see `Weight`.
        format: format of the checkpoint.

    Attributes:
        data: [N, K] `FP8`, codes.
        scales: [N / block rows, K / block columns] float32, both rounded up.
        block: rows and columns that share a scale.
    """

    name = "fp8"

    def __init__(
        self,
        num_rows: int,
        num_cols: int,
        dtype: torch.dtype,
        fused: bool,
        format: Fp8,
        fixed_order: bool = False,
    ) -> None:
        super().__init__(dtype, fused, fixed_order)
        rows, cols = format.block
        self.block = rows or 1, cols or num_cols
        self.format = format
        self.data = nn.Parameter(torch.empty(num_rows, num_cols, dtype=FP8), False)
        counts = [-(-n // size) for n, size in zip((num_rows, num_cols), self.block, strict=True)]
        self.scales = nn.Parameter(torch.empty(counts, dtype=torch.float32), False)
        if fused:
            from nanovllm.kernels.products import fp8_half, fp8_linear

            if fp8_linear.can_multiply(self.codes, dtype):
                if self.use(fp8_linear):
                    self.act_block = fp8_linear.act_block_of(self.codes)
            elif fp8_half.can_multiply(self.codes, dtype):
                self.use(fp8_half)

    def shards(
        self, module: str, begin: int, rows: Part, cols: Part
    ) -> Iterator[tuple[str, Shard]]:
        end, size = begin + len(rows.held), self.block[0]
        codes, scales = self.data.data[begin:end], self.scales.data[begin // size : -(-end // size)]
        if not self.format.scale:
            yield f"{module}.weight", QuantizingShard(codes, (rows, cols), scales)
            return
        yield f"{module}.weight", CodesShard(codes, (rows, cols))
        if self.format.block == (0, 0):
            parts: tuple[Part, ...] = Part.whole(1), Part.whole(1)
        elif self.format.block[1] == 0:
            parts = rows, Part.whole(1)
        else:
            if begin % size:
                raise _cut(module, self.block, rows)
            parts = (
                _blocks(rows, size, module, self.block),
                _blocks(cols, self.block[1], module, self.block),
            )
        yield f"{module}.{self.format.scale}", ScalesShard(scales, parts)

    @property
    def codes(self) -> Codes:
        return Codes(self.data, self.scales, self.block)


def _blocks(part: Part, size: int, module: str, block: tuple[int, int]) -> Part:
    """The scale blocks of a dimension's part, which may hold the elements of a block in any order.
    ValueError if it holds any block in part.
    """
    blocks = []
    for i in range(0, len(part.held), size):
        held = sorted(part.held[i : i + size])
        first = held[0]
        if first % size or held != list(range(first, min(first + size, part.total))):
            raise _cut(module, block, part)
        blocks.append(first // size)
    return Part(blocks, -(-part.total // size))


def _cut(module: str, block: tuple[int, int], part: Part) -> ValueError:
    remedy = "another tensor_parallel_size, or " if len(part.held) < part.total else ""
    return ValueError(
        f"{module}: each rank's shard of each projection must consist of whole FP8 scale blocks "
        f"({block[0]} x {block[1]}): use {remedy}the original weights with "
        'quantization="fp8"'
    )
