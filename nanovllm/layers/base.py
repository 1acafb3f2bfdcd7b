"""What layers are told when they are built, and what they tell the loader and the runner."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar, NamedTuple, TypeAlias

import torch
from torch import nn

from nanovllm.attention.base import AttentionBackend
from nanovllm.distributed.bulk import Gathered, Scattered
from nanovllm.distributed.group import Group
from nanovllm.quantization import Quantization
from nanovllm.utils.fp8 import Codes

Hidden: TypeAlias = (
    torch.Tensor | Codes | Scattered | Gathered
)  # between layers: [T, M] in some state


class Build(NamedTuple):
    """What all layers of a model are built with.

    Attributes:
        dtype: of the parameters.
        fused: take our kernels where they are faster.
        group: the ranks that the model is split over.
        backend: what attends.
        max_model_len: tokens of the longest sequence.
        cache_dtype: of the KV cache; None: `dtype`.
        quantization: of the matrices of linear layers.
    """

    dtype: torch.dtype
    fused: bool
    group: Group
    backend: AttentionBackend
    max_model_len: int
    cache_dtype: torch.dtype | None = None
    quantization: Quantization | None = None


class Part(NamedTuple):
    """The part of a tensor's dimension that this rank holds.

    Attributes:
        held: the indices, in the order in which they are held.
        total: the size of the dimension in the checkpoint.
    """

    held: Sequence[int]
    total: int

    @classmethod
    def whole(cls, total: int) -> "Part":
        """All of it."""
        return cls(range(total), total)

    @classmethod
    def equal(cls, total: int, group: Group) -> "Part":
        """An equal share for each rank."""
        size = total // group.size
        assert size * group.size == total, f"{total} elements for {group.size} ranks"
        return cls(range(group.rank * size, (group.rank + 1) * size), total)

    @classmethod
    def packed(cls, parts: Sequence["Part"]) -> "Part":
        """Of a dimension that is theirs, one behind the other."""
        starts = accumulate((part.total for part in parts), initial=0)
        held = [start + i for start, part in zip(starts, parts, strict=False) for i in part.held]
        return cls(held, sum(part.total for part in parts))


@dataclass(frozen=True)
class Shard:
    """A tensor of the checkpoint, or the part of it that this rank holds. A subclass is of a tensor
    that is stored in another way than as numbers.

    Attributes:
        target: the parameter, or rows of a packed one, that it fills.
        parts: what of each dimension fills it.
    """

    comes_last: ClassVar[bool] = False  # it changes what another one has filled

    target: torch.Tensor
    parts: tuple[Part, ...]

    @classmethod
    def whole(cls, target: torch.Tensor) -> "Shard":
        """A tensor that every rank holds."""
        return cls(target, tuple(Part.whole(size) for size in target.shape))

    @property
    def full_shape(self) -> list[int]:
        """The shape of the tensor in the checkpoint."""
        return [part.total for part in self.parts]

    @property
    def targets(self) -> tuple[torch.Tensor, ...]:
        """All that it fills."""
        return (self.target,)

    def fits(self, shape: list[int]) -> bool:
        """Whether the checkpoint's tensor may have this shape."""
        return shape == self.full_shape

    def read(self, source: Any) -> torch.Tensor:
        """Our part of the checkpoint's tensor, given whole or as a slice of safetensors."""
        spans = [
            part.held if isinstance(part.held, range) else range(min(part.held), max(part.held) + 1)
            for part in self.parts
        ]
        tensor: torch.Tensor = source[tuple(slice(span.start, span.stop) for span in spans)]
        for dim, (part, span) in enumerate(zip(self.parts, spans, strict=True)):
            if part.held is not span:
                index = torch.tensor(part.held, device=tensor.device) - span.start
                tensor = tensor.index_select(dim, index)
        return tensor

    def fill(self, name: str, source: Any) -> None:
        """Fill the target from `source`, a slice of safetensors.

        Raises:
            ValueError: naming the tensor, if it is stored in another way.
        """
        tensor = self.read(source)
        if not tensor.is_floating_point() or tensor.element_size() == 1:
            raise ValueError(f"tensor {name} is {tensor.dtype}: config.json does not say so")
        self.put(tensor)

    def put(self, numbers: torch.Tensor) -> None:
        """Fill the target with numbers of its shape."""
        self.target.copy_(numbers)


class Layer(nn.Module):
    """A layer with parameters."""

    def shards(self, path: str) -> Iterator[tuple[str, Shard]]:
        """The checkpoint's tensors that fill this layer, and what of it each fills.

        Args:
            path: of this layer in the model, which names it in the checkpoint.
        """
        for name, param in self.named_parameters(recurse=False):
            yield f"{path}.{name}", Shard.whole(param.data)

    def variants(self) -> dict[Hashable, Callable[[], object]]:
        """A call for each of our kernels that small steps take here, by what tells kernels apart:
        those of other layers may be the same. The weights may hold anything.
        """
        return {}


class MLP(nn.Module):
    """What stands behind attention: [T, M] -> [T, M].

    Attributes:
        x_block: see `Weight`, of its first product.
    """

    x_block: int | None = None


def kernel_variants(model: nn.Module) -> list[Callable[[], object]]:
    """The calls that compile a model's kernels ahead of its first small step."""
    calls: dict[Hashable, Callable[[], object]] = {}
    for layer in model.modules():
        if isinstance(layer, Layer):
            calls |= layer.variants()
    return list(calls.values())
