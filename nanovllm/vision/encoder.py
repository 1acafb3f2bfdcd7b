"""`Encoder`: encodes images on the device, and keeps what it has encoded in a store."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from nanovllm.checkpoint.vision import VisionConfig
from nanovllm.layers.base import Build
from nanovllm.utils.arrays import Int32
from nanovllm.vision.layers import Alike, Tower
from nanovllm.vision.patches import normalise

MAX_PATCHES = 32_768  # to encode at once, unless an image has more


class Encoder:
    """The tower of a model, and the store of embeddings.

    Letters: T embeddings, K states of deepstack's blocks, M hidden size of the language model.

    Args:
        tower: tower on its device.
        config: facts of the tower.
        build: options of the model.
        capacity: number of embeddings that the store holds.
        device: torch.device of both.

    Attributes:
        store: [capacity, 1 + K, M], rows of images that the host assigns.
    """

    def __init__(
        self, tower: Tower, config: VisionConfig, build: Build, capacity: int, device: torch.device
    ) -> None:
        self._tower, self._config, self._device = tower, config, device
        # A product's results may depend on the number of its rows.
        self._max_patches = 0 if build.batch_invariant else MAX_PATCHES
        shape = capacity, 1 + len(config.deepstack), config.out_hidden_size
        self.store = torch.zeros(shape, dtype=build.dtype, device=device)

    def encode_into(self, images: Sequence[NDArray[np.uint8]], rows: Sequence[Int32]) -> None:
        """Encode images into rows of the store.

        Args:
            images: [H, W, 3] each.
            rows: [T of the image] each.
        """
        for batch in self._batches([image.shape[:2] for image in images]):
            encoded = self.encode([images[i] for i in batch])
            places = np.concatenate([rows[i] for i in batch]).astype(np.int64)
            self.store.index_copy_(0, torch.from_numpy(places).to(self._device), encoded)

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

    def encode(self, images: Sequence[NDArray[np.uint8]]) -> torch.Tensor:
        """Encode images, those of equal size next to each other: [T, 1 + K, M]."""
        size, patches, alike = self._config.patch_size, [], []
        for (height, width, _), group in groupby(images, key=np.shape):
            pixels = torch.from_numpy(np.stack([*group]))
            if self._device.type == "cuda":
                pixels = pixels.pin_memory()
            pixels = pixels.to(self._device, non_blocking=True)
            alike.append(Alike(height // size, width // size, len(pixels)))
            patches.append(self._tower.cut(normalise(pixels, self._config.mean, self._config.std)))
        return self._tower(torch.cat(patches), alike)
