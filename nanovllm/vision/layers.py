"""Layers of vision towers, which every rank has whole.

Letters: P patches, H heads, D head size. Images of equal size stand next to each other.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
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

    def with_gelu(self, x: torch.Tensor, fused: bool) -> torch.Tensor:
        """GELU's tanh approximation of the result, [P, inputs] -> [P, outputs]. If `fused`, the
        product does that on a GPU, before it rounds and writes.
        """
        if fused and x.is_cuda:
            return torch._addmm_activation(self.bias, x, self.weight.t(), use_gelu=True)
        return F.gelu(self(x), approximate="tanh")


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
        self._names, self._fused = names, build.fused
        self.add_module(names[0], Linear(size, intermediate_size, build))
        self.add_module(names[1], Linear(intermediate_size, size, build))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = (getattr(self, name) for name in self._names)
        return second(first.with_gelu(x, self._fused))


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


class Spans(NamedTuple):
    """The patches of each image, for attention.

    Attributes:
        images: sizes of the images.
        begins: [n + 1] int32, first patch of each of n images, and the number of all; None where
            `limits` is.
        limits: [P] int32, number of patches of each patch's image; None: attention goes from one
            size to the next.
    """

    images: list[Alike]
    begins: torch.Tensor | None = None
    limits: torch.Tensor | None = None


def find_spans(images: list[Alike], fused: bool, device: torch.device) -> Spans:
    """The spans of images. If `fused`, our kernel computes those of several sizes at once; PyTorch
    has a kernel for one size.
    """
    if not fused or len(images) == 1:
        return Spans(images)
    counts = np.repeat(
        [each.num_patches for each in images], [each.num_images for each in images]
    ).astype(np.int32)
    lens = to_device(counts, device)
    begins = F.pad(lens.cumsum(0, dtype=torch.int32), (1, 0))
    return Spans(images, begins, lens.repeat_interleave(lens, output_size=int(counts.sum())))


def attend_within_images(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spans: Spans
) -> torch.Tensor:
    """Attention of each patch to all patches of its image, with scale D^-0.5: [P, H, D] each,
    and the result.
    """
    if spans.begins is not None and spans.limits is not None:
        from nanovllm.kernels.attention.prefill import attend_to_limits

        most = max(each.num_patches for each in spans.images)
        return attend_to_limits(q, k, v, spans.begins, most, spans.limits)
    found, begin = [], 0
    for each in spans.images:
        end = begin + each.num_images * each.num_patches
        # [n, H, P of an image, D]
        shape = each.num_images, each.num_patches, *q.shape[1:]
        queries, keys, values = (x[begin:end].view(shape).transpose(1, 2) for x in (q, k, v))
        attended = F.scaled_dot_product_attention(queries, keys, values)
        found.append(attended.transpose(1, 2).flatten(0, 1))
        begin = end
    return torch.cat(found) if len(found) > 1 else found[0]


def to_device(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """The array on the device, without waiting for what is launched."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def stack_on_device(images: list[NDArray[np.uint8]], device: torch.device) -> torch.Tensor:
    """Images of equal size [H, W, 3] on the device, [n, H, W, 3], likewise; they are copied once on
    this side.
    """
    shape = len(images), *images[0].shape
    stacked = torch.empty(shape, dtype=torch.uint8, pin_memory=device.type == "cuda")
    np.stack(images, out=stacked.numpy())
    return stacked.to(device, non_blocking=True)
