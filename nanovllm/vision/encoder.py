"""`Encoder`: encodes images on the device, and keeps what it has encoded in a store."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray

from nanovllm.checkpoint.vision import VisionConfig
from nanovllm.engine.plan import BatchImages
from nanovllm.engine.step_inputs import StepInputs
from nanovllm.images.processor import ImageProcessor
from nanovllm.layers.base import Build
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.scheduling.encoder_cache import ImageFacts
from nanovllm.tensors.image_rows import ImageRows
from nanovllm.utils.arrays import Int32
from nanovllm.utils.device import wait_for_device
from nanovllm.utils.integers import cdiv
from nanovllm.vision.layers import Alike, Tower, stack_on_device, to_device
from nanovllm.vision.patches import normalise, of_bytes

MAX_PATCHES = 32_768  # to encode at once, unless an image has more


def axes_of_pairs(section: tuple[int, ...], num_pairs: int) -> list[int]:
    """The axis of each pair of a head's numbers: 0 time, 1 height, 2 width.

    They take turns, as long as height and width have not had as many as `section` says; the rest is
    by time (interleaved M-RoPE of Qwen3-VL).
    """
    axes = [0] * num_pairs
    for axis in (1, 2):
        for pair in range(axis, min(3 * section[axis], num_pairs), 3):
            axes[pair] = axis
    return axes


def limits_of(images: BatchImages) -> Int32:
    """`ImageRows.limits` of a step."""
    limits = images.positions[0] + 1
    for span in images.spans:
        limits[span.row : span.row + span.num_tokens] = span.position + span.num_tokens
    return limits


class Encoder:
    """The tower of a model, and the store of embeddings.

    Letters: T embeddings, K states of deepstack's blocks, M hidden size of the language model.

    Args:
        tower: tower on its device.
        config: facts of the tower.
        processor: processor by which pixels are normalised.
        rope: rotary embedding of the language model, if tokens have positions of three axes.
        build: options of the model.
        capacity: number of embeddings that the store holds.
        device: torch.device of both.

    Attributes:
        store: [capacity, 1 + K, M], rows of images that the host assigns.
    """

    def __init__(
        self,
        tower: Tower,
        config: VisionConfig,
        processor: ImageProcessor,
        rope: RotaryEmbedding | None,
        build: Build,
        capacity: int,
        device: torch.device,
    ) -> None:
        self._tower, self._config, self._device = tower, config, device
        self._processor, self._rope = processor, rope
        # On the device from now on: a copy from there to here would wait for all that is launched.
        self._mean, self._std = (of_bytes(x, device) for x in (processor.mean, processor.std))
        if rope is not None:
            half = rope.cos_sin.shape[1] // 2
            self._axes = torch.tensor(axes_of_pairs(config.mrope_section, half), device=device)
        # A product's results may depend on the number of its rows.
        self._max_patches = 0 if build.batch_invariant else MAX_PATCHES
        shape = capacity, 1 + len(config.deepstack), config.out_hidden_size
        self.store = torch.zeros(shape, dtype=build.dtype, device=device)

    @property
    def facts(self) -> ImageFacts:
        """The facts that scheduling needs."""
        config = self._config
        three_axes = bool(config.mrope_section)
        return ImageFacts(len(self.store), config.merge, three_axes, config.are_whole)

    @property
    def max_bytes_of_step(self) -> int:
        """Bytes for each token of a step beside its other activations, at most."""
        of_rotations = 0 if self._rope is None else 3 * self._rope.cos_sin[0].nbytes
        return self.store[0].nbytes + of_rotations

    def measure(self) -> int:
        """Bytes of activations of a GPU that encoding takes at most: those of some images, as many
        times as the largest batch has their patches. Attention's memory grows like the rest.
        """
        config, device = self._config, self._device
        size, of_token = config.patch_size, config.merge**2
        largest = min(self._processor.max_tokens, len(self.store)) * of_token
        most = max(largest, min(len(self.store) * of_token, MAX_PATCHES))
        side = config.fixed_side or 32 * config.merge  # patches
        count = min(most, MAX_PATCHES) // side**2 or 1
        pixels = np.zeros((side * size, side * size, 3), np.uint8)
        if not config.fixed_side:  # several sizes have a kernel: it is compiled now, and not later
            self.encode([pixels, pixels[: side * size // 2]])
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        self.encode([pixels] * count)
        wait_for_device(device)
        peak = torch.cuda.max_memory_allocated(device) - before
        return peak * cdiv(most, count * side**2)

    def encode_into(self, images: Sequence[NDArray[np.uint8]], rows: Sequence[Int32]) -> None:
        """Encode images into rows of the store.

        Args:
            images: [H, W, 3] each.
            rows: [T of the image] each.
        """
        for batch in self._batches([image.shape[:2] for image in images]):
            encoded = self.encode([images[i] for i in batch])
            places = to_device(np.concatenate([rows[i] for i in batch]), self._device)
            self.store.index_copy_(0, places.long(), encoded)

    def give(self, inputs: StepInputs, images: BatchImages) -> StepInputs:
        """The inputs of a step with what the store has for it, and the rotations of its tokens if
        they have several positions.
        """
        n, T = len(images.rows), len(inputs.positions)
        limits = limits_of(images) if self._config.are_whole else images.rows[:0]
        arrays = images.rows, images.stored, images.positions.ravel(), limits
        on_device = to_device(np.concatenate(arrays), self._device)
        rows, stored, axes, seen = on_device.split([n, n, 3 * T, len(limits)])
        found = ImageRows(rows.long(), self.store.index_select(0, stored))
        if self._config.are_whole:
            found = found._replace(spans=images.spans, limits=seen)
        context = replace(inputs.context, images=found)
        if self._rope is None:
            return inputs._replace(context=context)
        rotations = self._rope.by_axes(axes.view(3, T), self._axes)
        indices = torch.arange(T, dtype=torch.int32, device=self._device)
        return inputs._replace(context=replace(context, rotations=rotations), positions=indices)

    def _batches(self, sizes: Sequence[tuple[int, ...]]) -> Iterator[list[int]]:
        """The numbers of images, those of equal size together, to encode at once."""
        batch: list[int] = []
        num_patches = 0
        for i in sorted(range(len(sizes)), key=sizes.__getitem__):
            height, width = sizes[i]
            count = height * width // self._config.patch_size**2
            if batch and num_patches + count > self._max_patches:
                yield batch
                batch, num_patches = [], 0
            batch.append(i)
            num_patches += count
        if batch:
            yield batch

    def encode(self, pictures: Sequence[NDArray[np.uint8]]) -> torch.Tensor:
        """Encode images, those of equal size next to each other: [T, 1 + K, M]."""
        size, patches, alike = self._config.patch_size, [], []
        for (height, width, _), group in groupby(pictures, key=np.shape):
            pixels = stack_on_device([*group], self._device)
            alike.append(Alike(height // size, width // size, len(pixels)))
            patches.append(self._tower.cut(normalise(pixels, self._mean, self._std)))
        return self._tower(torch.cat(patches) if len(patches) > 1 else patches[0], alike)
