"""Linear layers, by the part they play when a model is split over GPUs (Megatron's names).

Each computes `x @ weight.T + bias` with the part of the weight that its rank holds. `fused` layers
take our kernels where these are faster.
"""

from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.distributed.bulk import Gathered, Hidden, Scattered
from nanovllm.distributed.group import Group
from nanovllm.layers.base import Build, Layer, Shard


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`x @ weight.T + bias`. A weight in oneDNN's keeping (`onednn.py`) is multiplied there."""
    if weight.is_mkldnn:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


def sum_over_ranks(x: torch.Tensor, group: Group) -> torch.Tensor | Scattered:
    """Sum x: [T, M] over the ranks. Where kernels exchange rows, the norm that follows does it:
    x is returned as partial results then, [1, T, M] or `Scattered`.
    """
    if bulk := group.bulk_for(x):
        return bulk.scatter(len(x), lambda rows, out: out.copy_(x[rows]))
    if group.can_exchange(x):
        return x.unsqueeze(0)
    return group.all_reduce(x)


def gather_owned_rows(own: torch.Tensor, index: torch.Tensor, held: range) -> torch.Tensor:
    """Rows of a matrix that is split over the ranks. The rows of other ranks are 0 here, so the sum
    over the ranks has all of them.

    Args:
        own: [len(held) or more, M], this rank's rows.
        index: [n] int32, rows of the whole matrix.
        held: the rows of the whole that are in `own`.

    Returns:
        [n, M]
    """
    if not held:
        return own.new_zeros(len(index), own.shape[1])
    place = index - held.start
    ours = (place >= 0) & (place < len(held))
    return F.embedding(place.where(ours, 0), own).masked_fill_(~ours.unsqueeze(1), 0)


class Rows(NamedTuple):
    """Rows (or columns) of a projection in the checkpoint.

    Attributes:
        held: those that this rank holds.
        total: how many there are.
    """

    held: range
    total: int

    @classmethod
    def of(cls, total: int, group: Group) -> "Rows":
        """An equal share of `total` for each rank."""
        size = total // group.size
        assert size * group.size == total, f"{total} rows for {group.size} ranks"
        return cls(range(group.rank * size, (group.rank + 1) * size), total)


class ReplicatedLinear(Layer):
    """`x @ weight.T + bias`, the same on every device. weight: [out, in].

    Attributes:
        partial: whether `forward`, if `fused`, may return partial results [S, T, out].
    """

    partial = False

    def __init__(self, input_size: int, output_size: int, bias: bool, build: Build) -> None:
        super().__init__()
        dtype = build.dtype
        self.weight = nn.Parameter(torch.empty(output_size, input_size, dtype=dtype), False)
        self.bias = nn.Parameter(torch.empty(output_size, dtype=dtype), False) if bias else None
        self.build = build
        self.fused = build.fused and not bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in] -> [T, out]"""
        if self.fused:
            from nanovllm.kernels import linear as kernels

            return kernels.linear(x, self.weight, self.partial)
        return linear(x, self.weight, self.bias)

    def variants(self) -> dict[Hashable, Callable[[], object]]:
        if not self.fused:
            return {}
        from nanovllm.kernels import linear as kernels

        gated = isinstance(self, MergedColumnParallelLinear)
        return kernels.variants(self.weight, self.partial, gated)

    def _into(self, out: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None) -> None:
        """The plain product of many rows, into `out`."""
        if bias is None:
            torch.mm(x, self.weight.T, out=out)
        else:
            torch.addmm(bias, x, self.weight.T, out=out)


class ColumnParallelLinear(ReplicatedLinear):
    """Split along its outputs. It may pack several projections, each split on its own.

    Args:
        outputs: the rows of each projection.
    """

    def __init__(self, input_size: int, outputs: list[Rows], bias: bool, build: Build) -> None:
        super().__init__(input_size, sum(len(rows.held) for rows in outputs), bias, build)
        self.outputs = outputs

    def shards(self, param: nn.Parameter) -> list[Shard]:
        targets = param.data.split([len(rows.held) for rows in self.outputs])
        return [
            Shard(target, 0, rows.held.start, rows.total)
            for target, rows in zip(targets, self.outputs, strict=True)
        ]

    def forward(self, x: torch.Tensor | Gathered) -> torch.Tensor:
        """[T, in] -> [T, out]"""
        if not isinstance(x, Gathered):
            return super().forward(x)
        out = x.rows.new_empty(len(x.rows), len(self.weight))
        for rows in x.parts():
            self._into(out[rows], x.rows[rows], self.bias)
        return out


class MergedColumnParallelLinear(ColumnParallelLinear):
    """Several projections of the same input as one product, each split evenly.

    Args:
        output_sizes: the outputs of each on all ranks, in the order of their rows in `weight`.
    """

    def __init__(self, input_size: int, output_sizes: list[int], bias: bool, build: Build) -> None:
        outputs = [Rows.of(size, build.group) for size in output_sizes]
        super().__init__(input_size, outputs, bias, build)

    def gated(self, x: Hidden) -> torch.Tensor:
        """`silu(gate) * up` of two packed projections, by our kernels: [T, in] -> [T, out / 2]"""
        from nanovllm.kernels.activation import silu_and_mul
        from nanovllm.kernels.linear import gated_linear

        if isinstance(x, Gathered):
            return silu_and_mul(self(x))
        assert isinstance(x, torch.Tensor), "rows are normalised before they come here"
        return gated_linear(x, self.weight)


class QKVParallelLinear(ColumnParallelLinear):
    """Query, key and value projection as one product: [T, M] -> [T, (Hq + 2 Hkv) * D]; `fused`
    also [S, T, (Hq + 2 Hkv) * D], for `qk_norm_rope_store` to sum.

    Ranks divide the heads. With fewer KV heads than ranks, several ranks hold the same one.

    Attributes:
        num_heads, num_kv_heads: heads of this rank.
    """

    partial = True

    def __init__(
        self,
        hidden_size: int,
        head_dim: int,
        num_heads: int,
        num_kv_heads: int,
        bias: bool,
        build: Build,
    ) -> None:
        group = build.group
        q = Rows.of(num_heads * head_dim, group)
        kv = local_kv_heads(num_kv_heads, group)
        rows = range(kv.start * head_dim, kv.stop * head_dim)
        kv_rows = Rows(rows, num_kv_heads * head_dim)
        super().__init__(hidden_size, [q, kv_rows, kv_rows], bias, build)
        self.num_heads, self.num_kv_heads = num_heads // group.size, len(kv)


def local_kv_heads(num_kv_heads: int, group: Group) -> range:
    """The KV heads of this rank: its share, or the one that its query heads belong to."""
    count = max(1, num_kv_heads // group.size)
    first = group.rank * num_kv_heads // group.size
    return range(first, first + count)


class RowParallelLinear(ReplicatedLinear):
    """Split along its inputs; the ranks' results are summed.

    Args:
        input_size: inputs on all ranks.
    """

    def __init__(self, input_size: int, output_size: int, bias: bool, build: Build) -> None:
        inputs = Rows.of(input_size, build.group)
        super().__init__(len(inputs.held), output_size, bias, build)
        self.inputs = inputs
        # The norm behind it sums; NCCL wants whole results.
        self.partial = build.group.size == 1 or build.group.peers is not None

    def shards(self, param: nn.Parameter) -> list[Shard]:
        if param is self.bias:
            return [Shard.whole(param.data)]
        return [Shard(param.data, 1, self.inputs.held.start, self.inputs.total)]

    def forward(self, x: torch.Tensor) -> torch.Tensor | Scattered:  # type: ignore[override]
        """[T, in] -> [T, out]; `fused` also [S, T, out] or `Scattered`, for `RMSNorm.add_forward`
        to sum.
        """
        group = self.build.group
        bias = self.bias if group.rank == 0 else None
        if bulk := group.bulk_for(x):
            return bulk.scatter(len(x), lambda rows, out: self._into(out, x[rows], bias))
        if self.fused:
            from nanovllm.kernels import linear as kernels

            out = kernels.linear(x, self.weight, self.partial)
        else:
            out = linear(x, self.weight, bias)
        return out if out.dim() == 3 else sum_over_ranks(out, group)
