"""`Weights`: the weights of one rank's model, which can be filled again at their addresses.

CUDA graphs keep what they know: parameters stay where they are, and each tensor of the checkpoint
goes through the `Shard` that loaded it.
"""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import torch
from torch import nn

from nanovllm.adapters.adapter import Given, open_adapters
from nanovllm.checkpoint.names import EMBEDDING, HEAD
from nanovllm.layers.weights.shard import Shard
from nanovllm.models.loader import checkpoint_shards, fill
from nanovllm.tensors.source import TensorSource
from nanovllm.updates.ledger import Expected
from nanovllm.updates.parcel import Named, Parcel
from nanovllm.utils.device import computing_on, wait_for_device


class Weights:
    """The weights of a model.

    Args:
        model: model on its device, filled.
        device: torch.device of the model.
        directory: directory of its checkpoint.
        is_part: whether that may have other parts, such as one for images.
    """

    def __init__(
        self, model: nn.Module, device: torch.device, directory: Path, is_part: bool
    ) -> None:
        self._model, self._device = model, device
        self._directory, self._is_part = directory, is_part
        self._last: dict[str, torch.Tensor] = {}

    @cached_property
    def _shards(self) -> dict[str, Shard]:
        return checkpoint_shards(self._model)

    def expected(self) -> Expected:
        """The tensors of the model."""
        wanted = {name: shard.wanted for name, shard in self._shards.items()}
        return Expected(wanted, self._is_part)

    def _shard(self, name: str) -> Shard:
        """The shard of a tensor; a tied head's is that of the embedding."""
        is_tied_head = name == HEAD and HEAD not in self._shards
        return self._shards[EMBEDDING if is_tied_head else name]

    def check(self, tensors: list[Named]) -> None:
        """Refuse tensors whose values contradict the model, before any of them is written.

        Raises:
            ValueError: naming one.
        """
        found = dict(tensors)
        with computing_on(self._device):
            for name, tensor in tensors:
                self._shard(name).check(name, TensorSource(tensor))
            if HEAD not in self._shards and HEAD in found and EMBEDDING in found:
                check_tied(found[HEAD], found[EMBEDDING])

    def fill(self, name: str, tensor: torch.Tensor) -> None:
        """Fill what a tensor fills.

        Args:
            name: model's name of it.
            tensor: whole tensor, on any device.
        """
        shard = self._shard(name)
        with computing_on(self._device):
            if shard.comes_last:
                self._last[name] = tensor.clone()
            else:
                shard.fill(TensorSource(tensor))

    def fill_parcel(self, parcel: Parcel) -> None:
        """Fill what the tensors of another process's parcel fill, which have the model's names."""
        with parcel.opened(self._device) as tensors:
            for name, tensor in tensors:
                self.fill(name, tensor)
            self.wait()

    def reload(self, adapters: Sequence[Given]) -> None:
        """Fill all from the checkpoint again, with these adapters merged into it."""
        with computing_on(self._device):
            fill(
                self._shards,
                self._directory,
                self._device,
                is_part=self._is_part,
                adapters=open_adapters(adapters),
            )
        self.wait()

    def end(self) -> None:
        """Fill what comes last, and wait for the device: the tensors may be written to."""
        with computing_on(self._device):
            for name, tensor in self._last.items():
                self._shards[name].fill(TensorSource(tensor))
        self._last.clear()
        self.wait()

    def wait(self) -> None:
        """Wait until the device has filled what it was told to."""
        if self._device.type == "cuda":
            wait_for_device(self._device)

    def give_up(self) -> None:
        """Forget what an update that has failed has left half done."""
        self._last.clear()
        for module in self._model.modules():
            origin = getattr(module, "origin", None)
            if origin is not None:
                origin.drop()


def check_tied(one: torch.Tensor, other: torch.Tensor) -> None:
    """Refuse an embedding and an LM head that differ, for a model that ties them."""
    if not torch.equal(one, other.to(one.device, one.dtype)):
        raise ValueError(
            f"{HEAD} differs from {EMBEDDING}, but the model ties them: save its checkpoint with "
            "`tie_word_embeddings` false, and build the engine from that"
        )
