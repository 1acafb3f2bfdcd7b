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
from nanovllm.layers.weights.converted import Origin
from nanovllm.layers.weights.shard import Shard
from nanovllm.models.loader import checkpoint_shards, fill
from nanovllm.tensors.source import TensorSource
from nanovllm.updates.ends import NOT_TIED, check_ends
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
        self._tied_end: str | None = None  # of a tied model, the embedding or head that has come

    @cached_property
    def _shards(self) -> dict[str, Shard]:
        return checkpoint_shards(self._model)

    @cached_property
    def _origins(self) -> list[Origin]:
        """The origins that must forget the tensors of an update that has failed."""
        origins = (getattr(module, "origin", None) for module in self._model.modules())
        return [origin for origin in origins if origin is not None]

    @cached_property
    def expected(self) -> Expected:
        """The tensors of the model."""
        wanted = {name: shard.wanted for name, shard in self._shards.items()}
        return Expected(wanted, self._is_part)

    def _shard(self, name: str) -> Shard:
        """The shard of a tensor; a tied head's is that of the embedding."""
        is_tied_head = name == HEAD and self.expected.is_tied
        return self._shards[EMBEDDING if is_tied_head else name]

    def check(self, tensors: list[Named]) -> None:
        """Refuse tensors whose values contradict the model, before any of them is written.

        Raises:
            ValueError: naming one.
        """
        with computing_on(self._device):
            for name, tensor in tensors:
                self._shard(name).check(name, TensorSource(tensor))
            check_ends(self.expected, tensors)

    def fill(self, tensors: list[Named]) -> None:
        """Fill what tensors fill: whole ones, on any device, by the model's names."""
        with computing_on(self._device):
            for name, tensor in tensors:
                shard, source = self._shard(name), TensorSource(tensor)
                if self._is_second_end(name):
                    if not shard.holds(source):
                        raise ValueError(NOT_TIED)
                elif shard.comes_last:
                    self._last[name] = tensor.clone()
                else:
                    shard.fill(source)

    def _is_second_end(self, name: str) -> bool:
        """Whether a tensor fills what another has filled: a tied embedding and its head."""
        if not self.expected.is_tied or name not in (EMBEDDING, HEAD):
            return False
        before, self._tied_end = self._tied_end, name
        return before is not None

    def fill_parcel(self, parcel: Parcel) -> None:
        """Fill what the tensors of another process's parcel fill, which have the model's names."""
        with parcel.opened(self._device) as tensors:
            self.fill(tensors)
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
        self._tied_end = None
        self.wait()

    def wait(self) -> None:
        """Wait until the device has filled what it was told to."""
        if self._device.type == "cuda":
            wait_for_device(self._device)

    def give_up(self) -> None:
        """Forget what an update that has failed has left half done."""
        self._last.clear()
        self._tied_end = None
        for origin in self._origins:
            origin.drop()
