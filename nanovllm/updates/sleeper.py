"""`Sleeper`: gives the memory of one rank back while its engine stays, and takes it again.

CUDA graphs, and all that was built at the start, stay: weights, KV cache and logits are in pieces
of memory whose addresses remain.
"""

import torch
from torch import nn

from nanovllm.device_memory.pieces import Piece
from nanovllm.layers.weights.onednn import OneDnnWeight
from nanovllm.updates.sleeping import KV_CACHE, WEIGHTS
from nanovllm.utils.device import capturing, computing_on, wait_for_device


class Sleeper:
    """The memory of a rank.

    Args:
        model: model on its device, filled.
        weights: pieces that have its parameters.
        device: torch.device of the model.
    """

    def __init__(self, model: nn.Module, weights: list[Piece], device: torch.device) -> None:
        self._model, self._weights, self._device = model, weights, device
        self._others: list[Piece] = []
        self._copies: list[torch.Tensor] = []  # of the weights, in host memory
        self._has_copies = False
        self._taken: list[Piece] = []  # by the last `take`

    def add(self, piece: Piece) -> None:
        """Give this piece back, too, whose contents nobody needs between two steps."""
        self._others.append(piece)

    def sleep(self, level: int) -> None:
        """Give the memory back.

        Args:
            level: 1 keeps a copy of the weights in host memory, 2 drops them.
        """
        on_gpu = self._device.type == "cuda"
        if on_gpu:
            wait_for_device(self._device)
        with computing_on(self._device):
            if level == 1:
                self._keep_copies()
            if level == 2 or on_gpu:
                self._drop_weights()
        for piece in self._others:
            piece.give_back()
        if on_gpu:
            with capturing:
                torch.cuda.empty_cache()

    def _keep_copies(self) -> None:
        """Copy the weights to host memory, unless that is where they are. The copies' memory is
        kept for the next time: it takes seconds to be pinned.
        """
        if self._device.type == "cpu" or not self._weights[0].is_there:
            return
        if not self._copies:
            self._copies = [
                torch.empty(piece.num_bytes, dtype=torch.uint8, pin_memory=True)
                for piece in self._weights
            ]
        for copy, piece in zip(self._copies, self._weights, strict=True):
            copy.copy_(piece.bytes, non_blocking=True)
        wait_for_device(self._device)
        self._has_copies = True

    def _drop_weights(self) -> None:
        for piece in self._weights:
            piece.give_back()
        for module in self._model.modules():
            if isinstance(module, OneDnnWeight):
                module.drop()

    def take(self, tags: list[str]) -> bool:
        """Take the memory again, of arbitrary contents. Returns whether it was there: if not, none
        is taken.
        """
        by_tag = {WEIGHTS: self._weights, KV_CACHE: self._others}
        self._taken = [piece for tag in tags for piece in by_tag[tag] if not piece.is_there]
        try:
            with computing_on(self._device):
                for piece in self._taken:
                    piece.take()
        except torch.OutOfMemoryError:
            self.give_back()
            return False
        return True

    def give_back(self) -> None:
        """Give back what the last `take` has taken."""
        for piece in self._taken:
            piece.give_back()

    def restore(self, tags: list[str]) -> None:
        """Fill the memory that was taken: weights with their values, if these were kept; the rest
        with zeros.
        """
        with computing_on(self._device):
            if WEIGHTS in tags and self._has_copies:
                for copy, piece in zip(self._copies, self._weights, strict=True):
                    piece.bytes.copy_(copy, non_blocking=True)
                self._has_copies = False
            if KV_CACHE in tags:
                for piece in self._others:
                    piece.zero()
        if self._device.type == "cuda":
            wait_for_device(self._device)
