"""`Shard`: a rank's part of a checkpoint tensor, and the parameter that it fills."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar, NamedTuple

import torch

from nanovllm.distributed.group import Group


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
    dtypes: ClassVar[tuple[str, ...]] = "F64", "F32", "F16", "BF16"  # as safetensors names them

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

    def fits(self, shape: list[int]) -> bool:
        """Whether the checkpoint's tensor may have this shape."""
        return shape == self.full_shape

    def check(self, name: str, source: Any) -> None:
        """Refuse a tensor of the checkpoint, given as a slice of safetensors, before any is read.

        Raises:
            ValueError: naming it.
        """
        shape = list(source.get_shape())
        if not self.fits(shape):
            raise ValueError(
                f"tensor {name} has shape {shape}, but config.json implies {self.full_shape}"
            )
        if (dtype := source.get_dtype()) not in self.dtypes:
            wanted = " or ".join(self.dtypes)
            raise ValueError(f"tensor {name} is {dtype}, but config.json implies {wanted}")

    def read(self, source: Any) -> torch.Tensor:
        """This rank's part of the checkpoint's tensor, given whole or as a slice of safetensors."""
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

    def fill(self, source: Any) -> None:
        """Fill the target from `source`, a slice of safetensors."""
        self.put(self.read(source))

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
