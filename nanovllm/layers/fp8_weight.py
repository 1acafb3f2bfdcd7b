"""`Fp8Weight`: the matrix of a product in 8 bits, and how checkpoints' tensors fill it.

A number is a code (e4m3) times the scale of its block. See `quantization.py`. Where no kernel
multiplies by codes they are dequantised once, behind loading.
"""

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nanovllm.layers.shard import Part, Shard, check_plain
from nanovllm.layers.weight import Weight
from nanovllm.quantization import Quantization
from nanovllm.utils.fp8 import FP8, LARGEST, Codes


class CodesShard(Shard):
    """A tensor of codes."""

    def fill(self, name: str, source: Any) -> None:
        tensor = self.read(source)
        if tensor.dtype != FP8:
            raise ValueError(f"tensor {name} is {tensor.dtype}: config.json says float8_e4m3fn")
        self.target.copy_(tensor)

    def put(self, numbers: torch.Tensor) -> None:
        self.target.copy_((numbers * 2.0**10).clamp(-LARGEST, LARGEST))  # dummies


class ScalesShard(Shard):
    """Their scales, of which dimensions of 1 may be missing."""

    def fits(self, shape: list[int]) -> bool:
        return [n for n in shape if n != 1] == [n for n in self.full_shape if n != 1]

    def fill(self, name: str, source: Any) -> None:
        whole = source[...] if source.get_shape() else source[()]
        super().fill(name, whole.reshape(self.full_shape))

    def put(self, numbers: torch.Tensor) -> None:
        self.target.copy_(numbers)  # the scale of a tensor is that of each of its rows


@dataclass(frozen=True)
class QuantizingShard(Shard):
    """Numbers that become codes, with a scale for each row, the same on all ranks.

    Attributes:
        scales: [rows, 1], which this fills, too.
    """

    scales: torch.Tensor

    @property
    def targets(self) -> tuple[torch.Tensor, ...]:
        return self.target, self.scales

    def fill(self, name: str, source: Any) -> None:
        rows, cols = self.parts
        whole = Shard(self.target, (rows, Part.whole(cols.total))).read(source)
        check_plain(name, whole)
        assert isinstance(cols.held, range), "ranks divide columns evenly"
        self._quantize(whole, whole[:, cols.held.start : cols.held.stop])

    def put(self, numbers: torch.Tensor) -> None:
        self._quantize(numbers, numbers)  # dummies

    def _quantize(self, rows: torch.Tensor, numbers: torch.Tensor) -> None:
        """`numbers` by the largest of `rows`, which have those of the other ranks, too."""
        most = rows.to(self.target.device).abs().amax(1, keepdim=True).float()
        self.scales.copy_((most / LARGEST).clamp(min=2.0**-100))
        numbers = numbers.to(self.target.device, torch.float32) / self.scales
        self.target.copy_(numbers.clamp(-LARGEST, LARGEST))


class Fp8Weight(Weight):
    """N x K numbers, which start uninitialised.

    Args:
        num_rows, num_cols: N and K, of this rank.
        dtype: of activations and results.
        fused: see `Weight`.
        quantization: how the checkpoint has them.

    Attributes:
        data: [N, K] of `FP8`.
        scales: [N / block rows, K / block columns] float32, rounded up.
        block: rows and columns that share a scale.
    """

    def __init__(
        self,
        num_rows: int,
        num_cols: int,
        dtype: torch.dtype,
        fused: bool,
        quantization: Quantization,
    ) -> None:
        nn.Module.__init__(self)
        rows, cols = quantization.block
        self.block = rows or 1, cols or num_cols
        self.dtype, self.quantization = dtype, quantization
        self.data = nn.Parameter(torch.empty(num_rows, num_cols, dtype=FP8), False)
        counts = [-(-n // size) for n, size in zip((num_rows, num_cols), self.block, strict=True)]
        self.scales = nn.Parameter(torch.empty(counts, dtype=torch.float32), False)
        self.fused = fused
        if fused:
            from nanovllm.kernels.fp8_linear import can_multiply, x_block_of

            if can_multiply(self.codes, dtype):
                self.x_block = x_block_of(self.codes)

    def shards(
        self, module: str, begin: int, rows: Part, cols: Part
    ) -> Iterator[tuple[str, Shard]]:
        end, size = begin + len(rows.held), self.block[0]
        codes, scales = self.data.data[begin:end], self.scales.data[begin // size : -(-end // size)]
        if not self.quantization.scale:
            yield f"{module}.weight", QuantizingShard(codes, (rows, cols), scales)
            return
        yield f"{module}.weight", CodesShard(codes, (rows, cols))
        if self.quantization.block == (0, 0):
            parts: tuple[Part, ...] = Part.whole(1), Part.whole(1)
        elif self.quantization.block[1] == 0:
            parts = rows, Part.whole(1)
        else:
            if begin % size:
                raise _cut(module, self.block)
            parts = (
                _blocks(rows, size, module, self.block),
                _blocks(cols, self.block[1], module, self.block),
            )
        yield f"{module}.{self.quantization.scale}", ScalesShard(scales, parts)

    @property
    def codes(self) -> Codes:
        """All of it."""
        return Codes(self.data, self.scales, self.block)

    def plain(self) -> Weight:
        """What the codes mean."""
        K = self.data.shape[1]
        weight = Weight(0, K, self.dtype, self.fused)
        weight.data = nn.Parameter(self.codes.numbers().to(self.dtype), False)
        return weight

    def multiply(
        self, x: torch.Tensor | Codes, bias: torch.Tensor | None = None, partial: bool = False
    ) -> torch.Tensor:
        from nanovllm.kernels.fp8_linear import linear

        return linear(x, self.codes, self.dtype, bias, partial)

    def multiply_gated(
        self,
        x: torch.Tensor | Codes,
        bias: torch.Tensor | None = None,
        gelu: bool = False,
        x_block: int | None = None,
    ) -> torch.Tensor | Codes:
        from nanovllm.kernels.fp8_linear import gated_linear

        return gated_linear(x, self.codes, self.dtype, bias, gelu, x_block)

    def multiply_into(
        self, out: torch.Tensor, x: torch.Tensor | Codes, bias: torch.Tensor | None = None
    ) -> None:
        from nanovllm.kernels.fp8_linear import multiply_into

        multiply_into(out, x, self.codes, bias)

    def variants(
        self,
        bias: torch.Tensor | None,
        partial: bool,
        gated: bool,
        gelu: bool = False,
        x_block: int | None = None,
    ) -> dict[Hashable, Callable[[], object]]:
        if self.x_block is None:  # it does not multiply
            return {}
        from nanovllm.kernels.fp8_linear import variants

        return variants(self.codes, self.dtype, bias, partial, gated, gelu, x_block)


def dequantize(model: nn.Module) -> None:
    """Replace filled weights that cannot multiply here, by plain ones. A CPU multiplies these
    faster.
    """
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, Fp8Weight) and weight.x_block is None:
            module.weight = weight.plain()


def held_in(model: nn.Module) -> str:
    """What a model's matrices are held in, beside their dtype: "fp8" or "none"."""
    held = (isinstance(getattr(module, "weight", None), Fp8Weight) for module in model.modules())
    return "fp8" if any(held) else "none"


def _blocks(part: Part, size: int, module: str, block: tuple[int, int]) -> Part:
    """The blocks of a dimension's part, which may hold each in an order of its own."""
    blocks = []
    for i in range(0, len(part.held), size):
        held = sorted(part.held[i : i + size])
        first = held[0]
        if first % size or held != list(range(first, min(first + size, part.total))):
            raise _cut(module, block)
        blocks.append(first // size)
    return Part(blocks, -(-part.total // size))


def _cut(module: str, block: tuple[int, int]) -> ValueError:
    return ValueError(
        f"{module}: FP8 weights in blocks of {block[0]} x {block[1]} want whole blocks of each "
        "projection on each rank: take another tensor_parallel_size, or the original weights"
    )
