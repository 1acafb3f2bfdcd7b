"""`Weight`: the matrix of a product. What knows how it is stored fills it and multiplies by it.

Every product of a model goes through here. Another way to store a matrix is another class with
these methods (`onednn.py`).
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.layers.activation import act_and_mul
from nanovllm.layers.weights.shard import Part, Shard
from nanovllm.tensors.fp8 import Codes
from nanovllm.tensors.int4 import Int4Codes

NO_CODES = "`x_block` is None"


class Weight(nn.Module):
    """N x K numbers of the model's dtype, which start uninitialised.

    Args:
        num_rows, num_cols: N and K, of this rank.
        dtype: of the numbers.
        fused: multiply by our kernels where they are faster than the library's.

    Attributes:
        data: [N, K].
        x_block: how it likes activations, if not as they are: as `Codes` of which so many numbers
            share a scale; 0: all of a row.
    """

    x_block: int | None = None

    def __init__(self, num_rows: int, num_cols: int, dtype: torch.dtype, fused: bool) -> None:
        super().__init__()
        self.data = nn.Parameter(torch.empty(num_rows, num_cols, dtype=dtype), False)
        self.num_cols, self.dtype, self.fused = num_cols, dtype, fused

    @property
    def codes(self) -> torch.Tensor | Codes | Int4Codes:
        """All of it, as kernels take it."""
        return self.data

    def shards(
        self, module: str, begin: int, rows: Part, cols: Part
    ) -> Iterator[tuple[str, Shard]]:
        """The tensors of the checkpoint's `module` that fill our rows from `begin`, as
        `Layer.shards` does.
        """
        target = self.data.data[begin : begin + len(rows.held)]
        yield f"{module}.weight", Shard(target, (rows, cols))

    def multiply(
        self, x: torch.Tensor | Codes, bias: torch.Tensor | None = None, partial: bool = False
    ) -> torch.Tensor:
        """`x @ weight.T + bias`.

        Args:
            x: [T, K]; `Codes` if `x_block` allows.
            bias: [N]
            partial: allow a result whose sum is left to the caller.

        Returns:
            [T, N]; or [S, T, N] float32, to be summed over S, if `partial` and that is faster.
        """
        assert isinstance(x, torch.Tensor), NO_CODES
        if self.fused:
            from nanovllm.kernels.products.linear import linear

            return linear(x, self.data, bias, partial)
        return F.linear(x, self.data, bias)

    def multiply_gated(
        self,
        x: torch.Tensor | Codes,
        bias: torch.Tensor | None = None,
        gelu: bool = False,
        x_block: int | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor | Codes:
        """`act(gate) * up`, where the first half of the product is the gate: [T, N / 2]; act is
        SiLU, or GELU by tanh. The result may be as a weight with `x_block` likes it, or in `out`.
        """
        assert out is None or (self.fused and x_block is None), "`out` wants our kernels, no codes"
        if not self.fused:
            return act_and_mul(self.multiply(x, bias), gelu)
        from nanovllm.kernels.activation import gate, gated_product
        from nanovllm.kernels.fp8 import quantize

        if len(x) == 1 and isinstance(x, torch.Tensor) and out is None:
            row = self.multiply_row_gated(x, bias, gelu)
            if row is not None:
                return row
        gated = gated_product(x, self.codes, self.dtype, bias, gelu, out)
        if gated is None:
            return gate(self.multiply(x, bias), gelu, x_block, out)
        return gated if x_block is None else quantize(gated, x_block)

    def multiply_row_gated(
        self, x: torch.Tensor, bias: torch.Tensor | None, gelu: bool
    ) -> torch.Tensor | None:
        """`multiply_gated` of a single row by a kernel of its own, if there is one."""
        from nanovllm.kernels.products.linear import HALF
        from nanovllm.kernels.products.row import one_row

        return one_row(x, self.data, bias, gated=True, gelu=gelu) if x.dtype in HALF else None

    def multiply_into(
        self, out: torch.Tensor, x: torch.Tensor | Codes, bias: torch.Tensor | None = None
    ) -> None:
        """`multiply` by the library, for many rows, into `out`: [T, N]."""
        assert isinstance(x, torch.Tensor), NO_CODES
        if bias is None:
            torch.mm(x, self.data.T, out=out)
        else:
            torch.addmm(bias, x, self.data.T, out=out)
