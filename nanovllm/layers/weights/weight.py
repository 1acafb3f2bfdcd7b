"""`Weight`: the matrix of a product. It knows its format, its loading and its multiplication.

Every product of a model goes through `Weight.multiply`. A format is a subclass with its own
`product`: `PlainWeight` here, others in `quantized.py` and `onednn.py`. A wrapper of a weight,
which adds to each of its products, is a subclass with its own `multiply`.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, overload

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.layers.activation import act_and_mul
from nanovllm.layers.weights.shard import Part, Shard
from nanovllm.tensors.fp8 import Codes
from nanovllm.tensors.int4 import Int4Codes
from nanovllm.tensors.mxfp4 import Mxfp4Codes

NO_CODES = "`act_block` is None"


class Gate(NamedTuple):
    """The last operation on the product of gate and up projections: `act(gate) * up`. The first
    half of the product is the gate.

    Attributes:
        gelu: whether to activate by GELU (tanh), not SiLU.
        next_block: `Weight.act_block` of the weight that multiplies the result.
    """

    gelu: bool = False
    next_block: int | None = None

    def apply(
        self, both: torch.Tensor, fused: bool, out: torch.Tensor | None = None
    ) -> torch.Tensor | Codes:
        """Gate a product of both projections: [T, N] -> [T, N / 2], in `out` if it is given; by our
        kernels if `fused`.
        """
        if not fused:
            assert out is None, "`out` needs our kernels"
            return act_and_mul(both, self.gelu)
        from nanovllm.kernels import activation

        return activation.gate(both, self.gelu, self.next_block, out)


class Weight(nn.Module):
    """The matrix of a product: N x K values in some format.

    Args:
        dtype: torch.dtype of activations and results.
        fused: whether to multiply by our kernels where they are faster than the library's.
        fixed_order: whether a product adds up in one order, whatever the number of rows, see
            `Build.fixed_order`.

    Attributes:
        data: values or codes, [N, K] unless the format says otherwise.
        act_block: group size of the FP8 activations (`Codes`) that this weight prefers, in columns;
            0: one scale per row; None: activations stay in `dtype`.
    """

    data: nn.Parameter
    act_block: int | None = None

    def __init__(self, dtype: torch.dtype, fused: bool, fixed_order: bool = False) -> None:
        super().__init__()
        self.dtype, self.fused, self.fixed_order = dtype, fused, fixed_order

    @property
    def num_rows(self) -> int:
        """N"""
        return len(self.data)

    @property
    def stored(self) -> "Weight":
        """The weight in the checkpoint's format: itself, unless it was made of another (see
        `converted.py`).
        """
        return self

    def of_stored(
        self, shards_of: Callable[[Any], Iterator[tuple[str, Shard]]]
    ) -> Iterator[tuple[str, Shard]]:
        """The shards that a function returns for the weight in the checkpoint's format."""
        return shards_of(self)

    @property
    def codes(self) -> torch.Tensor | Codes | Int4Codes | Mxfp4Codes:
        """The whole matrix, in the form that kernels accept."""
        raise NotImplementedError

    def shards(
        self, module: str, begin: int, rows: Part, cols: Part
    ) -> Iterator[tuple[str, Shard]]:
        """The tensors of the checkpoint's `module` that fill our rows from `begin`, as
        `Layer.shards` does.
        """
        raise NotImplementedError

    @overload
    def multiply(
        self,
        x: torch.Tensor | Codes,
        bias: torch.Tensor | None = None,
        *,
        partial: bool = False,
        gate: None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor: ...

    @overload
    def multiply(
        self,
        x: torch.Tensor | Codes,
        bias: torch.Tensor | None = None,
        *,
        partial: bool = False,
        gate: Gate,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor | Codes: ...

    def multiply(
        self,
        x: torch.Tensor | Codes,
        bias: torch.Tensor | None = None,
        *,
        partial: bool = False,
        gate: Gate | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor | Codes:
        """`x @ weight.T + bias`: every product of a model, in any format, except those of experts
        (`Experts.multiply`).

        Formats implement `product`, and may have a kernel of their own for `gated_row`.

        Args:
            x: [T, K]; also `Codes`, unless `act_block` is None.
            bias: [N]
            partial: whether the result may be partial, its sum left to the caller.
            gate: operation on the product of gate and up projections.
            out: [T, N], or [T, N / 2] with a gate: output buffer, for many rows.

        Returns:
            [T, N]; or [S, T, N] float32, to be summed over S, if `partial` and that is faster.
            With a gate [T, N / 2], as `Codes` if its `next_block` is not None.
        """
        if gate is None:
            return self.product(x, bias, partial and not self.fixed_order, out)
        gated = self.gated(x, bias, gate, out) if self.fused and not self.fixed_order else None
        if gated is not None:
            return gated
        return gate.apply(self.product(x, bias, False, None), self.fused, out)

    def gated(
        self,
        x: torch.Tensor | Codes,
        bias: torch.Tensor | None,
        gate: Gate,
        out: torch.Tensor | None,
    ) -> torch.Tensor | Codes | None:
        """The gated product by a kernel that makes both at once, if there is one."""
        from nanovllm.kernels.fp8 import quantize
        from nanovllm.kernels.products.gated import gated_product

        assert out is None or gate.next_block is None, "`out` has no codes"
        if len(x) == 1 and isinstance(x, torch.Tensor) and out is None:
            row = self.gated_row(x, bias, gate.gelu)
            if row is not None:
                return row
        codes = self.codes
        assert not isinstance(codes, Mxfp4Codes), "experts have products of their own"
        gated = gated_product(x, codes, self.dtype, bias, gate.gelu, out)
        if gated is None or gate.next_block is None:
            return gated
        return quantize(gated, gate.next_block)

    def product(
        self,
        x: torch.Tensor | Codes,
        bias: torch.Tensor | None,
        partial: bool,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        """The product without a gate, see `multiply`."""
        raise NotImplementedError

    def gated_row(
        self, x: torch.Tensor, bias: torch.Tensor | None, gelu: bool
    ) -> torch.Tensor | None:
        """The gated product of a single row by a kernel of its own, if there is one."""
        return None


class PlainWeight(Weight):
    """N x K values of the model's dtype.

    Args:
        data: [N, K], may be uninitialised until loaded.
        fused, fixed_order: see `Weight`.
    """

    def __init__(self, data: torch.Tensor, fused: bool, fixed_order: bool = False) -> None:
        super().__init__(data.dtype, fused, fixed_order)
        self.data = nn.Parameter(data, False)

    @property
    def codes(self) -> torch.Tensor:
        return self.data

    def shards(
        self, module: str, begin: int, rows: Part, cols: Part
    ) -> Iterator[tuple[str, Shard]]:
        target = self.data.data[begin : begin + len(rows.held)]
        yield f"{module}.weight", Shard(target, (rows, cols))

    def product(
        self,
        x: torch.Tensor | Codes,
        bias: torch.Tensor | None,
        partial: bool,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        """The product without a gate; by the library if `out` is given, unless `fixed_order`."""
        assert isinstance(x, torch.Tensor), NO_CODES
        if self.fixed_order:
            from nanovllm.kernels.products.linear import in_fixed_order

            return in_fixed_order(x, self.data, bias, out)
        if out is not None:
            if bias is None:
                return torch.mm(x, self.data.T, out=out)
            return torch.addmm(bias, x, self.data.T, out=out)
        if self.fused:
            from nanovllm.kernels.products.linear import linear

            return linear(x, self.data, bias, partial)
        return F.linear(x, self.data, bias)

    def gated_row(
        self, x: torch.Tensor, bias: torch.Tensor | None, gelu: bool
    ) -> torch.Tensor | None:
        from nanovllm.kernels.products.linear import HALF
        from nanovllm.kernels.products.row import one_row

        return one_row(x, self.data, bias, gated=True, gelu=gelu) if x.dtype in HALF else None
