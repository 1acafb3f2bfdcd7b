"""Linear layers, named after how they are split over GPUs (Megatron's names).

Each computes `x @ weight.T + bias` with the part of the weight that its rank holds. `fused` layers
use our kernels where these are faster.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn

from nanovllm.checkpoint.fp8 import Fp8
from nanovllm.checkpoint.int8 import Int8
from nanovllm.checkpoint.model_config import ModelConfig
from nanovllm.distributed.bulk import Gathered, Scattered
from nanovllm.distributed.group import Group
from nanovllm.layers.base import Build, Hidden, Layer
from nanovllm.layers.sequence_parallel import sum_over_ranks
from nanovllm.layers.weights.fp8 import Fp8Weight
from nanovllm.layers.weights.int4 import Int4Weight
from nanovllm.layers.weights.int8 import Int8Weight
from nanovllm.layers.weights.shard import Part, Shard, ZeroShard
from nanovllm.layers.weights.weight import Gate, PlainWeight, Weight
from nanovllm.tensors.fp8 import Codes


def make_weight(num_rows: int, num_cols: int, modules: Iterable[str], build: Build) -> Weight:
    """A weight that is filled by these modules of the checkpoint, in their format."""
    format = None if build.quantization is None else build.quantization.of(modules)
    if format is None:
        values = torch.empty(num_rows, num_cols, dtype=build.dtype)
        return PlainWeight(values, build.fused, build.fixed_order)
    size, fused, fixed_order = (num_rows, num_cols, build.dtype), build.fused, build.fixed_order
    if isinstance(format, Fp8):
        return Fp8Weight(*size, fused, format, fixed_order)
    if isinstance(format, Int8):
        return Int8Weight(*size, fused, format, fixed_order)
    return Int4Weight(*size, fused, format, fixed_order)


class LinearBase(Layer):
    """`x @ weight.T + bias` with this rank's part of the weight.

    Args:
        inputs: columns that this rank holds.
        outputs: rows that this rank holds, by name of the checkpoint's module that they come from.
            A packed layer has several such modules, its siblings there; "" is its own name.

    Attributes:
        partial: whether `forward`, if built with `fused`, may return partial results [S, T, out].
    """

    partial, is_gated, gelu = False, False, False
    next_block: int | None = None

    def __init__(self, inputs: Part, outputs: dict[str, Part], bias: bool, build: Build) -> None:
        super().__init__()
        self.inputs, self.outputs, self.build = inputs, outputs, build
        num_rows = sum(len(rows.held) for rows in outputs.values())
        self.weight = make_weight(num_rows, len(inputs.held), self.sources(build.path), build)
        self.bias = nn.Parameter(torch.empty(num_rows, dtype=build.dtype), False) if bias else None

    @property
    def act_block(self) -> int | None:
        """See `Weight`."""
        return self.weight.act_block

    @property
    def own_bias(self) -> torch.Tensor | None:
        """The bias that this rank adds."""
        return self.bias

    def sources(self, path: str) -> list[str]:
        """The paths of the checkpoint's modules that fill this layer.

        Args:
            path: path of this layer in the model.
        """
        parent, _, own_name = path.rpartition(".")
        return [f"{parent}.{name or own_name}".lstrip(".") for name in self.outputs]

    def shards(self, path: str) -> Iterator[tuple[str, Shard]]:
        begin = 0
        for module, rows in zip(self.sources(path), self.outputs.values(), strict=True):
            yield from self.weight.shards(module, begin, rows, self.inputs)
            end = begin + len(rows.held)
            if self.bias is not None:
                yield f"{module}.bias", Shard(self.bias.data[begin:end], (rows,))
            elif isinstance(
                self.weight.stored, Int4Weight
            ):  # AutoGPTQ writes a bias for every layer
                yield f"{module}.bias", ZeroShard(torch.empty(0), (rows,))
            begin = end

    def forward(self, x: torch.Tensor | Codes) -> torch.Tensor:
        """[T, in] -> [T, out]"""
        return self.weight.multiply(x, self.own_bias, partial=self.partial)


class ReplicatedLinear(LinearBase):
    """A linear layer that is the same on every rank."""

    def __init__(self, input_size: int, output_size: int, bias: bool, build: Build) -> None:
        super().__init__(Part.whole(input_size), {"": Part.whole(output_size)}, bias, build)


class ColumnParallelLinear(LinearBase):
    """A linear layer split along its outputs. It may pack several projections, each split on its
    own.
    """

    def forward(self, x: torch.Tensor | Codes | Gathered) -> torch.Tensor:
        """[T, in] -> [T, out]"""
        if not isinstance(x, Gathered):
            return super().forward(x)
        out = x.new_empty(self.weight.num_rows, self.build.dtype)
        for rows in x.parts():
            self.weight.multiply(x.rows[rows], self.bias, out=out[rows])
        return out


class MergedColumnParallelLinear(ColumnParallelLinear):
    """Several projections of the same input as one product, each split evenly.

    Args:
        outputs: number of outputs on all ranks, by module of the checkpoint.
        packed: whether the checkpoint has them as one module, of this layer's name.
        gelu: whether `gated` activates by GELU (tanh), not SiLU.
        next_block: `Weight.act_block` of the layer that uses the results of `gated`.
    """

    is_gated = True

    def __init__(
        self,
        input_size: int,
        outputs: dict[str, int],
        bias: bool,
        build: Build,
        *,
        packed: bool = False,
        gelu: bool = False,
        next_block: int | None = None,
    ) -> None:
        parts = {name: Part.equal(size, build.group) for name, size in outputs.items()}
        super().__init__(Part.whole(input_size), _named(parts, packed), bias, build)
        self.gelu, self.next_block = gelu, next_block

    def gated(self, x: Hidden) -> torch.Tensor | Codes:
        """`act(gate) * up` of two packed projections: [T, in] -> [T, out / 2]"""
        if isinstance(x, Gathered):
            out, gate = x.new_empty(self.weight.num_rows // 2, self.build.dtype), Gate(self.gelu)
            for rows in x.parts():
                self.weight.multiply(x.rows[rows], self.bias, gate=gate, out=out[rows])
            return out
        assert isinstance(x, (torch.Tensor, Codes)), "rows are normalised before they come here"
        return self.weight.multiply(x, self.bias, gate=Gate(self.gelu, self.next_block))


class QKVParallelLinear(ColumnParallelLinear):
    """Query, key and value projection as one product: [T, M] -> [T, (Hq + 2 Hkv) * D]; if `fused`,
    also [S, T, (Hq + 2 Hkv) * D], for `Attention` to sum.

    Ranks divide the heads. With fewer KV heads than ranks, several ranks hold the same one.

    With `ModelConfig.attention_gate` the checkpoint's query projection has, for each head, D rows
    of queries, then D of gates. Here all gates come first, so that queries, keys and values remain
    side by side: [T, Hq D + (Hq + 2 Hkv) D].

    Attributes:
        num_heads, num_kv_heads: heads of this rank.
        head_parts: parts of the query and of the key projection that this rank computes.
    """

    partial = True

    def __init__(self, config: ModelConfig, build: Build) -> None:
        D, num_heads = config.head_dim, config.num_attention_heads
        num_kv_heads = config.num_key_value_heads
        q = Part.equal(num_heads, build.group).held
        kv = local_kv_heads(num_kv_heads, build.group)
        q_rows = _rows_of_heads(q, num_heads, D)
        kv_rows = _rows_of_heads(kv, num_kv_heads, D)
        with_gates = _gated_rows(q, num_heads, D) if config.attention_gate else q_rows
        outputs = {"q_proj": with_gates, "k_proj": kv_rows, "v_proj": kv_rows}
        inputs, outputs = Part.whole(config.hidden_size), _named(outputs, config.packed_qkv)
        super().__init__(inputs, outputs, config.qkv_bias, build)
        self.num_heads, self.num_kv_heads = len(q), len(kv)
        self.head_parts = q_rows, kv_rows

    def split_gate(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The gates [..., Hq D] of the results with gates, and queries, keys and values."""
        width = len(self.head_parts[0].held)
        return rows[..., :width], rows[..., width:]


def _named(parts: dict[str, Part], packed: bool) -> dict[str, Part]:
    return {"": Part.packed([*parts.values()])} if packed else parts


def _rows_of_heads(heads: Sequence[int], num_heads: int, head_dim: int) -> Part:
    """The rows of these heads in a projection."""
    rows = range(heads[0] * head_dim, (heads[-1] + 1) * head_dim)
    return Part(rows, num_heads * head_dim)


def _gated_rows(heads: Sequence[int], num_heads: int, head_dim: int) -> Part:
    """The rows of these heads in a query projection with gates: those of gates, then of queries."""
    gates, queries = (
        [2 * head * head_dim + begin + i for head in heads for i in range(head_dim)]
        for begin in (head_dim, 0)
    )
    return Part(gates + queries, 2 * num_heads * head_dim)


def local_kv_heads(num_kv_heads: int, group: Group) -> range:
    """The KV heads of this rank: its share, or the one that its query heads use."""
    count = max(1, num_kv_heads // group.size)
    first = group.rank * num_kv_heads // group.size
    return range(first, first + count)


class RowParallelLinear(LinearBase):
    """A linear layer split along its inputs; the ranks' results are summed.

    Args:
        input_size: number of inputs on all ranks.
        multiplier: factor on the results.
    """

    def __init__(
        self, input_size: int, output_size: int, bias: bool, build: Build, multiplier: float = 1.0
    ) -> None:
        inputs = Part.equal(input_size, build.group)
        super().__init__(inputs, {"": Part.whole(output_size)}, bias, build)
        self.multiplier = multiplier
        # NCCL needs whole results.
        self.partial = build.group.size == 1 or build.group.peers is not None

    @property
    def own_bias(self) -> torch.Tensor | None:
        """The bias that this rank adds: only rank 0 does, so that the ranks' sum has it once."""
        return self.bias if self.build.group.rank == 0 else None

    def forward(self, x: torch.Tensor | Codes) -> torch.Tensor | Scattered:  # type: ignore[override]
        """[T, in] -> [T, out]; if `fused`, also [S, T, out] or `Scattered`, for
        `RMSNorm.add_forward` to sum.
        """
        group, bias = self.build.group, self.own_bias
        if bulk := group.bulk_for(x):
            return bulk.scatter(len(x), lambda rows, out: self._multiply_into(out, x[rows]))
        partial = group.size == 1 or group.can_exchange(x)  # the norm that follows sums
        out = self.weight.multiply(x, bias, partial=partial)
        if self.multiplier != 1.0:
            out *= self.multiplier
        return out if out.dim() == 3 else sum_over_ranks(out, group)

    def _multiply_into(self, out: torch.Tensor, x: torch.Tensor | Codes) -> None:
        self.weight.multiply(x, self.own_bias, out=out)
        if self.multiplier != 1.0:
            out *= self.multiplier
