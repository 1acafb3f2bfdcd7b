"""`Memory`: the memory of all ranks, which updates fill and sleep gives back; `RankMemory`: that of
ranks in this process.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from nanovllm.adapters.adapter import Given
from nanovllm.updates.ledger import Expected
from nanovllm.updates.parcel import Named, Parcel, parcels
from nanovllm.updates.sleeper import Sleeper
from nanovllm.updates.weights import Weights
from nanovllm.utils.modes import without_modes


class Ranks(Protocol):
    """Runs a method on all ranks, see `Executor`."""

    def on_all_ranks(self, method: str, *args: Any) -> AbstractContextManager[Any]: ...
    def all_could(self, method: str, *args: Any) -> bool: ...


class Built(Protocol):
    """The parts of this process's rank, see `startup.build.Built`."""

    @property
    def weights(self) -> Weights: ...
    @property
    def sleeper(self) -> Sleeper | None: ...
    @property
    def device(self) -> torch.device: ...


class Runner(Protocol):
    """The owner of a `Built` until it exits, see `ModelRunner`. Nothing else may keep it."""

    @property
    def built(self) -> Built: ...


class Memory(Protocol):
    """The memory of all ranks, in this process's engine or in replicas."""

    def expected(self) -> Expected:
        """The tensors of the model."""

    def fill(self, tensors: Iterable[Named], begin: Callable[[], None]) -> None:
        """Fill the weights from tensors, which have the model's names: of a list all at once, of
        others each when it comes. `begin` is called before any of them is written.
        """

    def check_parcel(self, parcel: Parcel) -> None:
        """Refuse what `fill_parcel` would refuse before anything is written."""

    def fill_parcel(self, parcel: Parcel, begin: Callable[[], None]) -> None:
        """Fill the weights from another process's tensors."""

    def end_update(self) -> None:
        """Fill what comes last, and wait for the devices."""

    def give_up_update(self) -> None:
        """Forget what an update that has failed has left half done."""

    def reload(self, adapters: Sequence[Given]) -> None:
        """Fill the weights from the checkpoint again, with these adapters."""

    def sleep(self, level: int) -> None:
        """Give the memory back, see `Sleeper.sleep`."""

    def wake(self, tags: list[str]) -> None:
        """Take it again, with what was kept.

        Raises:
            torch.OutOfMemoryError: if it is not there. No rank of an engine has taken any then.
        """


class RankMemory:
    """The memory of the ranks, each of which takes its part of whole tensors.

    Args:
        ranks: all ranks.
        runner: runner of this process's rank.
        size: number of ranks.
    """

    def __init__(self, ranks: Ranks, runner: Runner, size: int) -> None:
        self._ranks, self._runner, self._size = ranks, runner, size

    @property
    def _weights(self) -> Weights:
        return self._runner.built.weights

    @property
    def _sleeper(self) -> Sleeper:
        sleeper = self._runner.built.sleeper
        assert sleeper is not None  # without the option nobody gets here
        return sleeper

    def expected(self) -> Expected:
        """The tensors of the model."""
        return self._weights.expected

    def fill(self, tensors: Iterable[Named], begin: Callable[[], None]) -> None:
        """Fill the weights from tensors, which have the model's names.

        Args:
            tensors: tensors; of a list all are checked before any is written.
            begin: function that is called in between.

        Raises:
            ValueError: naming one whose values contradict the model.
            WorkerError: if a worker has died.
        """
        if isinstance(tensors, list):
            self._check(tensors)
        begin()
        if self._size > 1:
            for parcel, own in parcels(tensors):
                if not isinstance(tensors, list):
                    self._check(own)
                self._fill_all(parcel, own)
        elif isinstance(tensors, list):
            self._fill(tensors)
        else:
            for named in tensors:
                self._check([named])
                self._fill([named])

    def fill_parcel(self, parcel: Parcel, begin: Callable[[], None]) -> None:
        """Fill them from another process's tensors. Raises as `fill`, and RuntimeError if the
        parcel cannot be opened.
        """
        with parcel.opened(self._runner.built.device) as own:
            self._check(own)
            begin()
            self._fill_all(parcel, own)

    def check_parcel(self, parcel: Parcel) -> None:
        """Refuse what `fill_parcel` would refuse before anything is written."""
        with parcel.opened(self._runner.built.device) as own:
            self._check(own)

    def _check(self, tensors: list[Named]) -> None:
        with without_modes():
            self._weights.check(tensors)

    def _fill(self, tensors: list[Named]) -> None:
        with without_modes():
            self._weights.fill(tensors)

    def _fill_all(self, parcel: Parcel, own: list[Named]) -> None:
        """Fill all ranks' weights: this one's from `own`, its view of the parcel's tensors."""
        with self._ranks.on_all_ranks("built.weights.fill_parcel", parcel):
            self._fill(own)
            self._weights.wait()

    def end_update(self) -> None:
        """Fill what comes last, and wait for the devices."""
        with self._ranks.on_all_ranks("built.weights.end"):
            self._weights.end()

    def give_up_update(self) -> None:
        """Forget what an update that has failed has left half done."""
        with self._ranks.on_all_ranks("built.weights.give_up"):
            self._weights.give_up()

    def reload(self, adapters: Sequence[Given]) -> None:
        """Fill the weights from the checkpoint again. Each rank reads its part."""
        with self._ranks.on_all_ranks("built.weights.reload", adapters):
            self._weights.reload(adapters)

    def sleep(self, level: int) -> None:
        """Give the memory back."""
        with self._ranks.on_all_ranks("built.sleeper.sleep", level):
            self._sleeper.sleep(level)

    def wake(self, tags: list[str]) -> None:
        """Take it again: all ranks or none, as each must be able to do what the others do."""
        if not self._ranks.all_could("built.sleeper.take", tags):
            with self._ranks.on_all_ranks("built.sleeper.give_back"):
                self._sleeper.give_back()
            raise torch.OutOfMemoryError(
                f"there is not enough memory for {' and '.join(tags)}, which sleep on: free some "
                "on all GPUs of this engine, and call wake_up() again"
            )
        with self._ranks.on_all_ranks("built.sleeper.restore", tags):
            self._sleeper.restore(tags)
