"""`Int8Head`: the matrix of an LM head in INT8, with one scale per row.

INT8 takes as many bytes as FP8. Its error is a fifth of FP8's if the values of a row are alike,
which matters where no later layer evens out errors (docs/experiments.md, 42).
"""

from collections.abc import Iterator

import torch
from torch import nn

from nanovllm.checkpoint.quantization import WHILE_LOADING
from nanovllm.layers.base import Build
from nanovllm.layers.weights.fp8 import QuantizingShard
from nanovllm.layers.weights.shard import Part, Shard
from nanovllm.layers.weights.weight import Weight
from nanovllm.tensors.fp8 import Codes


class Int8Head(Weight):
    """N x K values in INT8, zero until loaded; see `in_int8`.

    Attributes:
        data: [N, K] int8, codes.
        scales: [N, 1] float32.
    """

    def __init__(
        self, num_rows: int, num_cols: int, dtype: torch.dtype, fixed_order: bool = False
    ) -> None:
        super().__init__(dtype, fused=True, fixed_order=fixed_order)
        self.data = nn.Parameter(torch.zeros(num_rows, num_cols, dtype=torch.int8), False)
        self.scales = nn.Parameter(torch.zeros(num_rows, 1, dtype=torch.float32), False)

    def shard(self, rows: Part, cols: Part) -> QuantizingShard:
        """The shard that quantises a tensor of values into this weight."""
        held = slice(len(rows.held))
        return QuantizingShard(self.data.data[held], (rows, cols), self.scales.data[held])

    def shards(
        self, module: str, begin: int, rows: Part, cols: Part
    ) -> Iterator[tuple[str, Shard]]:
        assert begin == 0, "its rows are of one module"
        yield f"{module}.weight", self.shard(rows, cols)

    @property
    def codes(self) -> Codes:
        return Codes(self.data, self.scales, (1, self.data.shape[1]))

    def product(
        self,
        x: torch.Tensor | Codes,
        bias: torch.Tensor | None,
        partial: bool,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        from nanovllm.kernels.products.int8_linear import ONE_TILE, linear_into

        assert isinstance(x, torch.Tensor) and bias is None
        if out is None:
            out = torch.empty(len(x), len(self.data), dtype=self.dtype, device=self.data.device)
        linear_into(out, x, self.codes, ONE_TILE if self.fixed_order else None)
        return out


def in_int8(num_rows: int, num_cols: int, build: Build) -> Int8Head | None:
    """An INT8 weight for an LM head; None unless the model's matrices are quantised while they are
    loaded (otherwise the checkpoint determines the format) and our kernels can multiply by it.
    """
    if not build.fused or build.quantization != WHILE_LOADING:
        return None
    from nanovllm.kernels.products.int8_linear import can_multiply

    fits = can_multiply(torch.empty(0).device, build.dtype, num_cols)
    return Int8Head(num_rows, num_cols, build.dtype, build.fixed_order) if fits else None
