"""`QuantizedWeight`: the matrix of a product as codes, with kernels that multiply by them.

Where no kernel can (on a CPU, other GPUs, odd sizes), codes are dequantised once, after loading.
"""

import logging
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Protocol, TypeGuard

import torch
from torch import nn

from nanovllm.layers.weights.converted import Origin
from nanovllm.layers.weights.shard import Part, Shard
from nanovllm.layers.weights.weight import PlainWeight, Weight
from nanovllm.tensors.fp8 import Codes
from nanovllm.tensors.int4 import Int4Codes
from nanovllm.tensors.mxfp4 import Mxfp4Codes

logger = logging.getLogger(__name__)

NO_KERNELS = "it is dequantised after loading"


class Kernels(Protocol):
    """The module of a format's kernels, such as `kernels.products.fp8_linear`."""

    @property
    def one_row(self) -> Callable[..., torch.Tensor] | None: ...

    def linear(
        self,
        x: Any,
        weight: Any,
        dtype: torch.dtype,
        bias: torch.Tensor | None = None,
        partial: bool = False,
    ) -> torch.Tensor: ...

    def multiply_into(
        self, out: torch.Tensor, x: Any, weight: Any, bias: torch.Tensor | None
    ) -> None: ...

    def can_fix_order(self, weight: Any) -> bool: ...

    def in_fixed_order(
        self, x: Any, weight: Any, dtype: torch.dtype, bias: torch.Tensor | None = None
    ) -> torch.Tensor: ...


class QuantizedWeight(Weight):
    """A `Weight` in few bits.

    Attributes:
        name: name of the format.
        kernels: kernels that multiply by the codes; None: none can.
    """

    name: ClassVar[str]
    kernels: Kernels | None = None

    @property
    def has_kernels(self) -> bool:
        """Whether any kernel multiplies by the codes."""
        return self.kernels is not None

    @property
    def codes(self) -> Codes | Int4Codes | Mxfp4Codes:
        """The whole matrix."""
        raise NotImplementedError

    def use(self, kernels: Kernels) -> bool:
        """Multiply by these kernels, unless they are to have one tile for any number of rows, and
        have none for this matrix. Returns whether it does.
        """
        if not self.fixed_order or kernels.can_fix_order(self.codes):
            self.kernels = kernels
        return self.kernels is not None

    def numbers(self) -> torch.Tensor:
        """The dequantised values, [N, K]."""
        return self.codes.numbers(self.dtype)

    def product(
        self,
        x: torch.Tensor | Codes,
        bias: torch.Tensor | None,
        partial: bool,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        assert self.kernels is not None, NO_KERNELS
        if self.fixed_order:
            found = self.kernels.in_fixed_order(x, self.codes, self.dtype, bias)
            return found if out is None else out.copy_(found)
        if out is None:
            return self.kernels.linear(x, self.codes, self.dtype, bias, partial)
        self.kernels.multiply_into(out, x, self.codes, bias)
        return out

    def gated_row(
        self, x: torch.Tensor, bias: torch.Tensor | None, gelu: bool
    ) -> torch.Tensor | None:
        assert self.kernels is not None, NO_KERNELS
        row = self.kernels.one_row
        return None if row is None else row(x, self.codes, bias, gated=True, gelu=gelu)


class DequantizedWeight(PlainWeight):
    """The values of a quantised weight whose codes no kernel here can multiply.

    Args:
        weight: that weight, filled.
    """

    def __init__(self, weight: QuantizedWeight) -> None:
        super().__init__(weight.numbers(), weight.fused, weight.fixed_order)
        self.origin = Origin(weight, type(weight).numbers, self.data.copy_)

    @property
    def stored(self) -> Weight:
        return self.origin.weight

    def shards(
        self, module: str, begin: int, rows: Part, cols: Part
    ) -> Iterator[tuple[str, Shard]]:
        return self.origin.shards(module, begin, rows, cols)

    def of_stored(
        self, shards_of: Callable[[Any], Iterator[tuple[str, Shard]]]
    ) -> Iterator[tuple[str, Shard]]:
        return self.origin.refilling("all", shards_of)


def dequantize(model: nn.Module) -> None:
    """Replace filled weights whose codes no kernel here can multiply by plain ones."""
    count = 0
    for module in model.modules():
        for name, weight in module.named_children():
            if _has_no_kernels(weight):
                setattr(module, name, DequantizedWeight(weight))
                count += 1
    if count:
        logger.info(
            "%d quantised matrices were dequantised: no kernel here supports their format", count
        )


def is_to_be_plain(model: nn.Module) -> bool:
    """Whether `dequantize` will replace any weight."""
    return any(map(_has_no_kernels, model.modules()))


def _has_no_kernels(module: nn.Module) -> TypeGuard[QuantizedWeight]:
    """Whether the module is a weight whose codes no kernel here can multiply."""
    return isinstance(module, QuantizedWeight) and not module.has_kernels


def held_in(model: nn.Module) -> str:
    """The format of a model's quantised matrices in memory, "fp8", "int8", "int4" or "mxfp4";
    others are of its dtype, as all are with "none".
    """
    names = (module.name for module in model.modules() if isinstance(module, QuantizedWeight))
    return next(names, "none")
