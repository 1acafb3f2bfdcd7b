"""Layers of vision towers, which every rank has whole.

Letters: P patches, H heads, D head size. Images of equal size stand next to each other.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.layers.base import Build, Layer


class Linear(Layer):
    """x W^T + b: [..., inputs] -> [..., outputs]"""

    def __init__(self, inputs: int, outputs: int, build: Build) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=build.dtype), False)
        self.bias = nn.Parameter(torch.empty(outputs, dtype=build.dtype), False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


class LayerNorm(Layer):
    """(x - mean) / sqrt(variance + eps) * weight + bias of rows (Ba et al., 2016)."""

    def __init__(self, size: int, eps: float, build: Build) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=build.dtype), False)
        self.bias = nn.Parameter(torch.empty(size, dtype=build.dtype), False)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)


class Table(Layer):
    """Learned vectors: `weight` is [num_rows, size]."""

    def __init__(self, num_rows: int, size: int, build: Build) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_rows, size, dtype=build.dtype), False)


class PatchProduct(Layer):
    """The product with flattened patches, which checkpoints have as a convolution.

    Args:
        shape: shape of the weight there, outputs first.
    """

    def __init__(self, shape: tuple[int, ...], build: Build) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, dtype=build.dtype), False)
        self.bias = nn.Parameter(torch.empty(shape[0], dtype=build.dtype), False)

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        return F.linear(patches.to(self.weight.dtype), self.weight.flatten(1), self.bias)


class MLP(nn.Module):
    """fc2(gelu(fc1(x))), with GELU's tanh approximation.

    Args:
        names: names of the two products in the checkpoint.
    """

    def __init__(self, size: int, intermediate_size: int, names: tuple[str, str], build: Build):
        super().__init__()
        self._names = names
        self.add_module(names[0], Linear(size, intermediate_size, build))
        self.add_module(names[1], Linear(intermediate_size, size, build))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = (getattr(self, name) for name in self._names)
        return second(F.gelu(first(x), approximate="tanh"))


class Alike(NamedTuple):
    """Images of equal size, next to each other.

    Attributes:
        rows, columns: grid of each in patches.
        num_images: number of them.
    """

    rows: int
    columns: int
    num_images: int

    @property
    def num_patches(self) -> int:
        """Patches of each."""
        return self.rows * self.columns


class Tower(nn.Module):
    """An encoder of images.

    Letters: T embeddings, K states of deepstack's blocks, M hidden size of the language model.
    """

    def cut(self, images: torch.Tensor) -> torch.Tensor:
        """The patches of normalised images of equal size, [n, 3, height, width]: [P, ...]."""
        raise NotImplementedError

    def forward(self, patches: torch.Tensor, images: list[Alike]) -> torch.Tensor:
        """Encode images.

        Args:
            patches: [P, ...], as `cut` makes them.
            images: sizes of the images, in the same order.

        Returns:
            [T, 1 + K, M]: embeddings, and the states of deepstack's blocks.
        """
        raise NotImplementedError


def attend_within_images(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, images: Iterable[Alike]
) -> torch.Tensor:
    """Attention of each patch to all patches of its image, with scale D^-0.5: [P, H, D] each,
    and the result.
    """
    out, begin = torch.empty_like(q), 0
    for each in images:
        end = begin + each.num_images * each.num_patches
        # [n, H, P of an image, D]
        heads = [
            x[begin:end].unflatten(0, (each.num_images, each.num_patches)).transpose(1, 2)
            for x in (q, k, v)
        ]
        found = F.scaled_dot_product_attention(*heads)
        out[begin:end] = found.transpose(1, 2).flatten(0, 1)
        begin = end
    return out
