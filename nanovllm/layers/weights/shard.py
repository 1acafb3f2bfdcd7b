"""`Shard`: a rank's part of a checkpoint tensor, and the parameter that it fills."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, ClassVar, NamedTuple

import torch

from nanovllm.checkpoint.names import FLOATS, Wanted
from nanovllm.distributed.group import Group
from nanovllm.tensors.source import same_values


class Part(NamedTuple):
    """The part of a tensor's dimension that this rank holds.

    Attributes:
        held: indices in the checkpoint, in the order in which the rank holds them.
        total: size of the dimension in the checkpoint.
    """

    held: Sequence[int]
    total: int

    @classmethod
    def whole(cls, total: int) -> "Part":
        """The whole dimension."""
        return cls(range(total), total)

    @classmethod
    def equal(cls, total: int, group: Group) -> "Part":
        """An equal share for each rank."""
        size = total // group.size
        assert size * group.size == total, (
            f"{total} elements do not divide into {group.size} equal shards"
        )
        return cls(range(group.rank * size, (group.rank + 1) * size), total)

    @classmethod
    def blocks(cls, total: int, size: int, group: Group) -> "Part":
        """A share of whole blocks of a size for each rank, which differ by one at most."""
        count = total // size
        assert count * size == total >= size * group.size, "blocks for every rank"
        first, end = (count * rank // group.size * size for rank in (group.rank, group.rank + 1))
        return cls(range(first, end), total)

    @classmethod
    def packed(cls, parts: Sequence["Part"]) -> "Part":
        """The part of a dimension in which these parts' dimensions are concatenated."""
        starts = accumulate((part.total for part in parts), initial=0)
        held = [start + i for start, part in zip(starts, parts, strict=False) for i in part.held]
        return cls(held, sum(part.total for part in parts))


@dataclass(frozen=True)
class Shard:
    """A tensor of the checkpoint, or the part of it that this rank holds. Subclasses are for
    tensors that are not stored as plain values.

    Attributes:
        target: parameter to fill, or rows of a packed one.
        parts: part of each dimension that fills the target.
    """

    comes_last: ClassVar[bool] = False  # another shard's targets include its own
    is_optional: ClassVar[bool] = False  # the checkpoint may lack it
    ignores_ones: ClassVar[bool] = False  # the checkpoint may lack dimensions of size 1
    dtypes: ClassVar[tuple[str, ...]] = FLOATS

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
        """All tensors that it fills."""
        return (self.target,)

    @cached_property
    def wanted(self) -> Wanted:
        """The requirements on the tensor."""
        return Wanted(self.full_shape, self.dtypes, self.is_optional, self.ignores_ones)

    def check(self, name: str, source: Any) -> None:
        """Refuse a tensor of the checkpoint, given as a slice of safetensors, before any is read.

        Raises:
            ValueError: naming it.
        """
        self.wanted.check(name, list(source.get_shape()), source.get_dtype())

    def read(self, source: Any) -> torch.Tensor:
        """This rank's part of the checkpoint's tensor, given whole or as a slice of safetensors."""
        tensor: torch.Tensor = source[tuple(slice(span.start, span.stop) for span in self._spans)]
        for dim, (part, span) in enumerate(zip(self.parts, self._spans, strict=True)):
            if part.held is not span:
                tensor = tensor.index_select(dim, self._index(dim, tensor.device))
        return tensor

    @cached_property
    def _spans(self) -> list[range]:
        """The indices of each dimension from the first that is held to the last."""
        return [
            part.held if isinstance(part.held, range) else range(min(part.held), max(part.held) + 1)
            for part in self.parts
        ]

    @cached_property
    def _indices(self) -> dict[tuple[int, torch.device], torch.Tensor]:
        return {}

    def _index(self, dim: int, device: torch.device) -> torch.Tensor:
        """The places of a dimension's held indices in its span; kept, for tensors that come again
        and again.
        """
        if (dim, device) not in self._indices:
            held = torch.tensor(self.parts[dim].held, device=device)
            self._indices[dim, device] = held - self._spans[dim].start
        return self._indices[dim, device]

    def fill(self, source: Any) -> None:
        """Fill the target from `source`, a slice of safetensors."""
        self.put(self.read(source))

    def holds(self, source: Any) -> bool:
        """Whether the target has the values of `source`."""
        own = self.read(source).to(self.target.device, self.target.dtype)
        return same_values(self.target, own)

    def put(self, numbers: torch.Tensor) -> None:
        """Fill the target with values of its shape."""
        self.target.copy_(numbers)


@dataclass(frozen=True)
class StackedShard(Shard):
    """A tensor that stacks, for each of E modules, one or several shards along their rows.

    Attributes:
        of_each: shards of each module, in the order of their rows.
    """

    of_each: Sequence[Sequence[Shard]]

    @classmethod
    def of(
        cls, of_each: Sequence[Sequence[Shard]], modules: Part, parts: tuple[Part, ...]
    ) -> "StackedShard":
        """The tensor of these modules; `parts` are the dimensions of one module's part of it."""
        return cls(of_each[0][0].target, (modules, *parts), of_each)

    @property
    def targets(self) -> tuple[torch.Tensor, ...]:
        return tuple(target for each in self.of_each for shard in each for target in shard.targets)

    def fill(self, source: Any) -> None:
        for i, each in enumerate(self.of_each):
            begin, rows = 0, source[i]
            for shard in each:
                end = begin + shard.parts[0].total
                shard.fill(rows[begin:end])
                begin = end


class UnheldShard(Shard):
    """A tensor that the checkpoint may have but the model has not. It is checked, but fills
    nothing: the target is empty.
    """

    is_optional = True

    def fill(self, source: Any) -> None:
        pass


class ZeroShard(UnheldShard):
    """A tensor whose values must all be 0."""

    def check(self, name: str, source: Any) -> None:
        super().check(name, source)
        if source[...].any():
            raise ValueError(
                f"tensor {name} has values other than 0, but config.json says that there is none"
            )
