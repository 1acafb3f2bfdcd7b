"""`Int8Weight`: the matrix of a product in INT8, whose activations are in INT8, too."""

from collections.abc import Iterator

import torch
from torch import nn

from nanovllm.checkpoint.int8 import Int8
from nanovllm.layers.weights import fp8
from nanovllm.layers.weights.quantized import QuantizedWeight
from nanovllm.layers.weights.shard import Part, Shard, ZeroShard
from nanovllm.tensors.fp8 import LARGEST_INT8, Codes


class CodesShard(fp8.CodesShard):
    """A checkpoint's tensor of INT8 codes."""

    dtypes = ("I8",)

    def put(self, numbers: torch.Tensor) -> None:
        self.target.copy_((numbers * 2.0**10).clamp(-LARGEST_INT8, LARGEST_INT8))  # dummies


class ZeroPointsShard(ZeroShard):
    """Zero points, which a checkpoint of symmetric codes may have: all 0."""

    dtypes = ("I8",)


class Int8Weight(QuantizedWeight):
    """N x K values in INT8, uninitialised until loaded.

    Args:
        num_rows, num_cols: N and K on this rank.
        dtype: torch.dtype of activations and results.
        fused, fixed_order: see `Weight`.
        format: format of the checkpoint.

    Attributes:
        data: [N, K] int8, codes.
        scales: [N, 1] float32.
    """

    name = "int8"

    def __init__(
        self,
        num_rows: int,
        num_cols: int,
        dtype: torch.dtype,
        fused: bool,
        format: Int8,
        fixed_order: bool = False,
    ) -> None:
        super().__init__(dtype, fused, fixed_order)
        self.format = format
        self.data = nn.Parameter(torch.empty(num_rows, num_cols, dtype=torch.int8), False)
        self.scales = nn.Parameter(torch.empty(num_rows, 1, dtype=torch.float32), False)
        if fused:
            from nanovllm.kernels.products import int8_linear

            if int8_linear.can_multiply(self.data.device, dtype, num_cols):
                self.use(int8_linear)

    def shards(
        self, module: str, begin: int, rows: Part, cols: Part
    ) -> Iterator[tuple[str, Shard]]:
        held = slice(begin, begin + len(rows.held))
        yield f"{module}.weight", CodesShard(self.data.data[held], (rows, cols))
        one = Part.whole(1)
        of_rows = rows if self.format.per_row else one
        yield (
            f"{module}.{self.format.scale}",
            fp8.ScalesShard(self.scales.data[held], (of_rows, one)),
        )
        zeros = ZeroPointsShard(torch.empty(0), (of_rows, one))
        yield f"{module}.weight_zero_point", zeros

    @property
    def codes(self) -> Codes:
        return Codes(self.data, self.scales, (1, self.data.shape[1]))
