"""Matrix products of a float32 model on a CPU through oneDNN.

PyTorch sends float32 products to MKL. oneDNN is faster for the few rows of a decode, most of all
with weights in its own packed layout, which PyTorch offers through the operators of its compiler
(`torch.ops.mkldnn`): docs/experiments.md, section 14. The results differ in rounding only: no
precision is lost.
"""

from collections.abc import Iterator
from operator import attrgetter

import torch
from torch import nn

from nanovllm.layers.embed_head import ParallelLMHead
from nanovllm.layers.linear import LinearBase
from nanovllm.layers.weights.converted import Origin
from nanovllm.layers.weights.quantized import DequantizedWeight
from nanovllm.layers.weights.shard import Part, Shard
from nanovllm.layers.weights.weight import Weight
from nanovllm.tensors.fp8 import Codes

MIN_WEIGHT = 2**18  # elements; smaller weights gain less than a call costs (640 x 640 gains)


class OneDnnWeight(Weight):
    """A float32 weight in oneDNN's own layout.

    Args:
        plain: same weight, filled, in PyTorch's layout.
    """

    def __init__(self, plain: Weight) -> None:
        super().__init__(plain.dtype, fused=False)
        self._pack(plain.data)
        if isinstance(plain, DequantizedWeight):
            self.origin = plain.origin.of_another(self._pack)
        else:
            self.origin = Origin(plain, attrgetter("data"), self._pack)

    @property
    def stored(self) -> Weight:
        return self.origin.weight

    def shards(
        self, module: str, begin: int, rows: Part, cols: Part
    ) -> Iterator[tuple[str, Shard]]:
        return self.origin.shards(module, begin, rows, cols)

    def drop(self) -> None:
        """Have no values, until the weight is filled again."""
        self.data = nn.Parameter(torch.empty(0, dtype=self.dtype), False)

    def _pack(self, values: torch.Tensor) -> None:
        packed = torch.ops.mkldnn._reorder_linear_weight(values)
        self.data = nn.Parameter(packed, False)

    def product(
        self,
        x: torch.Tensor | Codes,
        bias: torch.Tensor | None,
        partial: bool,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        found = torch.ops.mkldnn._linear_pointwise(x, self.data, bias, "none", [], "")
        return found if out is None else out.copy_(found)


def use_onednn(model: nn.Module) -> None:
    """Pack the weights of the larger products for oneDNN. A tied embedding keeps its own copy."""
    for module in model.modules():
        if (
            isinstance(module, (LinearBase, ParallelLMHead))
            and module.weight.data.numel() >= MIN_WEIGHT
        ):
            module.weight = OneDnnWeight(module.weight)
            if isinstance(module, ParallelLMHead) and module.embedding is not None:
                module.tie_to(module.embedding)


def can_use_onednn(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether oneDNN is available and a gain: PyTorch sends 16-bit products to it anyway."""
    on_cpu = device.type == "cpu" and dtype == torch.float32
    # These operators are internal to PyTorch, and may disappear.
    known = hasattr(torch.ops.mkldnn, "_linear_pointwise") and hasattr(
        torch.ops.mkldnn, "_reorder_linear_weight"
    )
    return on_cpu and torch.backends.mkldnn.is_available() and known
