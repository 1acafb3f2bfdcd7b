"""`Origin`: the weight in a checkpoint's format of which another was made after loading.

A weight that no kernel here can multiply is dequantised, and float32 products on a CPU use oneDNN's
own layout. Neither can be filled by a checkpoint's tensors in place: these fill the original, which
is made anew for it, and the other is made of it again once all of them have come.
"""

import copy
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from nanovllm.layers.weights.shard import Part, Shard, Wanted
from nanovllm.layers.weights.weight import Weight

Shards = Iterator[tuple[str, Shard]]


class Origin:
    """A weight without memory, of which another was made.

    Args:
        weight: weight that is filled; its memory is not kept.
        values: function that returns the values of a weight like it: [N, K].
        put: function that puts these values into the weight that was made of it.
        device: torch.device of both; None: that of `weight`.
    """

    def __init__(
        self,
        weight: Weight,
        values: Callable[[Any], torch.Tensor],
        put: Callable[[torch.Tensor], Any],
        device: torch.device | None = None,
    ) -> None:
        without_memory: dict[int, Any] = {
            id(param): nn.Parameter(param.to("meta"), False) for param in weight.parameters()
        }
        self.weight: Weight = copy.deepcopy(weight, without_memory)
        self._values, self._put = values, put
        self._device = weight.data.device if device is None else device
        self._filling: Weight | None = None
        self._wanted: set[Hashable] = set()  # keys of the tensors that fill it
        self._come: set[Hashable] = set()

    def of_another(self, put: Callable[[torch.Tensor], Any]) -> "Origin":
        """The origin of a weight that was made of the one whose origin this is."""
        return Origin(self.weight, self._values, put, self._device)

    def shards(self, module: str, begin: int, rows: Part, cols: Part) -> Shards:
        """See `Weight.shards`."""
        return self.refilling(begin, lambda weight: weight.shards(module, begin, rows, cols))

    def refilling(self, key: Hashable, shards_of: Callable[[Any], Shards]) -> Shards:
        """Shards, each with its name, for those of a weight like the original, which fill one.

        Args:
            key: key that tells these from others of the same weight.
            shards_of: function that returns them for such a weight.
        """
        for i, (name, shard) in enumerate(shards_of(self.weight)):
            if shard.wanted.is_optional:  # it fills nothing
                yield name, shard
                continue
            self._wanted.add((key, i))
            own = shard.target, shard.parts
            yield name, RefillingShard(*own, self, shards_of, (key, i), shard)

    def fill(
        self,
        shards_of: Callable[[Any], Shards],
        key: tuple[Hashable, int],
        fill: Callable[[Shard], None],
    ) -> None:
        """Fill the shard of a key by a function. The last of all makes the other weight."""
        if self._filling is None:
            self._filling = copy.deepcopy(self.weight).to_empty(device=self._device)
            for param in self._filling.parameters():
                param.data.view(torch.uint8).zero_()  # rows that no tensor fills
        [shard] = [shard for i, (_, shard) in enumerate(shards_of(self._filling)) if i == key[1]]
        fill(shard)
        self._come.add(key)
        if self._come == self._wanted:
            self._put(self._values(self._filling))
            self.drop()

    def drop(self) -> None:
        """Forget what a filling that has failed has brought."""
        self._filling = None
        self._come.clear()


@dataclass(frozen=True)
class RefillingShard(Shard):
    """A tensor that fills a part of an `Origin`.

    Attributes:
        origin: the original.
        shards_of, key: its place among the shards of a weight like the original, see
            `Origin.refilling`.
        without_memory: shard of the original itself.
    """

    origin: Origin
    shards_of: Callable[[Any], Shards]
    key: tuple[Hashable, int]
    without_memory: Shard

    @property
    def targets(self) -> tuple[torch.Tensor, ...]:
        return ()

    @cached_property
    def wanted(self) -> Wanted:
        return self.without_memory.wanted

    def check(self, name: str, source: Any) -> None:
        self.without_memory.check(name, source)

    def fill(self, source: Any) -> None:
        self.origin.fill(self.shards_of, self.key, lambda shard: shard.fill(source))

    def put(self, numbers: torch.Tensor) -> None:
        self.origin.fill(self.shards_of, self.key, lambda shard: shard.put(numbers))
