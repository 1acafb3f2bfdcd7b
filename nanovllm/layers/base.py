"""What layers are told when they are built, and what they tell the loader and the runner."""

from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch
from torch import nn

from nanovllm.distributed.group import Group


class Build(NamedTuple):
    """What all layers of a model are built with.

    Attributes:
        dtype: of the parameters.
        fused: take our kernels where they are faster.
        group: the ranks that the model is split over.
    """

    dtype: torch.dtype
    fused: bool
    group: Group


class Shard(NamedTuple):
    """A tensor of the checkpoint, or the part of it that this rank holds.

    Attributes:
        target: the parameter, or rows of a packed one, that it fills.
        dim: the dimension along which ranks divide the tensor.
        start: where our part begins along it; the shape of `target` says where it ends.
        total: the size of the whole tensor along it.
    """

    target: torch.Tensor
    dim: int
    start: int
    total: int

    @classmethod
    def whole(cls, target: torch.Tensor) -> "Shard":
        """A tensor that every rank holds."""
        return cls(target, 0, 0, len(target))

    @property
    def full_shape(self) -> list[int]:
        """The shape of the tensor in the checkpoint."""
        shape = list(self.target.shape)
        shape[self.dim] = self.total
        return shape


class Layer(nn.Module):
    """A layer with parameters."""

    def shards(self, param: nn.Parameter) -> list[Shard]:
        """What fills a parameter of this layer: one tensor of the checkpoint, or several if it is
        a packed one.
        """
        return [Shard.whole(param.data)]

    def variants(self) -> dict[Hashable, Callable[[], object]]:
        """A call for each of our kernels that small steps take here, by what tells kernels apart:
        those of other layers may be the same. The weights may hold anything.
        """
        return {}


def kernel_variants(model: nn.Module) -> list[Callable[[], object]]:
    """The calls that compile a model's kernels ahead of its first small step."""
    calls: dict[Hashable, Callable[[], object]] = {}
    for layer in model.modules():
        if isinstance(layer, Layer):
            calls |= layer.variants()
    return list(calls.values())
