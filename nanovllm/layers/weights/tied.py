"""`TiedWeight`: the weight of an embedding, beside an LM head that has the same values in another
format.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from nanovllm.layers.weights.shard import Part, Shard
from nanovllm.layers.weights.weight import PlainWeight, Weight


class TiedWeight(PlainWeight):
    """The weight of an embedding whose values fill the LM head's weight, too.

    Args:
        embedding: weight of the embedding; its memory is used.
        head: weight of the LM head.
    """

    def __init__(self, embedding: Weight, head: Weight) -> None:
        super().__init__(embedding.data, fused=False)
        self._shards_of_head = head.shards

    def shards(
        self, module: str, begin: int, rows: Part, cols: Part
    ) -> Iterator[tuple[str, Shard]]:
        of_embedding = super().shards(module, begin, rows, cols)
        of_head = self._shards_of_head(module, begin, rows, cols)
        for (name, shard), (_, head) in zip(of_embedding, of_head, strict=True):
            yield name, _TiedShard(shard.target, shard.parts, head)


@dataclass(frozen=True)
class _TiedShard(Shard):
    head: Shard

    @property
    def targets(self) -> tuple[torch.Tensor, ...]:
        return self.target, *self.head.targets

    def put(self, numbers: torch.Tensor) -> None:
        super().put(numbers)
        self.head.put(numbers)
