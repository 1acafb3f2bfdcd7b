"""`RankFiller`: fills the weights of the ranks of this process's engine."""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from nanovllm.updates.ledger import Expected
from nanovllm.updates.parcel import Named, Parcel, parcels
from nanovllm.updates.weights import Weights
from nanovllm.utils.modes import without_modes


class Ranks(Protocol):
    """Runs a method on all ranks, see `Executor`."""

    def on_all_ranks(self, method: str, *args: Any) -> AbstractContextManager[Any]: ...


class RankFiller:
    """A `Filler` of the weights of all ranks, each of which takes its part of whole tensors.

    Args:
        ranks: all ranks.
        weights: the weights of this process's rank.
        device: torch.device of this rank.
        size: number of ranks.
    """

    def __init__(self, ranks: Ranks, weights: Weights, device: torch.device, size: int) -> None:
        self._ranks, self._weights, self._device, self._size = ranks, weights, device, size

    def expected(self) -> Expected:
        """The tensors of the model."""
        return self._weights.expected()

    def fill(self, tensors: Iterable[Named]) -> None:
        """Fill the weights from tensors, which have the model's names.

        Raises:
            ValueError: naming one whose values contradict the model.
            WorkerError: if a worker has died.
        """
        if self._size == 1:
            for name, tensor in tensors:
                with without_modes():
                    self._weights.check([(name, tensor)])
                    self._weights.fill(name, tensor)
            return
        for parcel, own in parcels(tensors):
            self._fill_all(parcel, own)

    def fill_parcel(self, parcel: Parcel) -> None:
        """Fill them from another process's tensors. Raises as `fill`, and RuntimeError if the
        parcel cannot be opened.
        """
        with parcel.opened(self._device) as own:
            self._fill_all(parcel, own)

    def _fill_all(self, parcel: Parcel, own: list[Named]) -> None:
        """Fill all ranks' weights: this one's from `own`, its view of the parcel's tensors."""
        with without_modes():
            self._weights.check(own)
        with self._ranks.on_all_ranks("built.weights.fill_parcel", parcel):
            for name, tensor in own:
                self._weights.fill(name, tensor)
            self._weights.wait()

    def end_update(self) -> None:
        """Fill what comes last, and wait for the devices."""
        with self._ranks.on_all_ranks("built.weights.end"):
            self._weights.end()

    def give_up_update(self) -> None:
        """Forget what an update that has failed has left half done."""
        with self._ranks.on_all_ranks("built.weights.give_up"):
            self._weights.give_up()
