"""`WeightUpdates`: the updates of an engine's weights, one after another, and what they refuse."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeAlias

import torch

from nanovllm.checkpoint.names import EMBEDDING, HEAD
from nanovllm.updates.ledger import Expected, Ledger
from nanovllm.updates.parcel import Named, Parcel, describe
from nanovllm.updates.weights import check_tied

Tensors: TypeAlias = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]
Version: TypeAlias = int | str


class Filler(Protocol):
    """What holds the weights: the ranks of this process's engine, or replicas."""

    def expected(self) -> Expected:
        """The tensors of the model."""

    def fill(self, tensors: Iterable[Named]) -> None:
        """Fill the weights from tensors, which have the model's names."""

    def fill_parcel(self, parcel: Parcel) -> None:
        """Fill the weights from another process's tensors."""

    def end_update(self) -> None:
        """Fill what comes last, and wait for the devices."""

    def give_up_update(self) -> None:
        """Forget what an update that has failed has left half done."""


class Holder(Protocol):
    """What computes requests."""

    def hold(self) -> None:
        """Compute nothing until `release`, and then all requests again from their beginning."""

    def release(self, version: Version) -> None:
        """Go on, with weights of this version."""


class WeightUpdates:
    """The updates of an engine.

    Args:
        filler: what holds the weights.
        holder: what computes with them.

    Attributes:
        version: version of the weights: 0, then what the last update says, or their number.
        has_started: whether an update of several calls goes on.
    """

    def __init__(self, filler: Filler, holder: Holder) -> None:
        self._filler, self._holder = filler, holder
        self.version: Version = 0
        self._num_updates = 0
        self._ledger: Ledger | None = None  # of the update that has begun and not ended
        self._failure = ""  # why that cannot end
        self.has_started = False
        self._ends: list[torch.Tensor] = []  # of a tied model, the embedding or head that has come

    @property
    def refusal(self) -> str | None:
        """The reason why the engine cannot compute; None if it can."""
        if self._ledger is None:
            return None
        if self._failure:
            return (
                "the weights are those of two versions, because an update has failed "
                f"({self._failure}): update all of them again"
            )
        return "the weights are being updated: end that with finish_weight_update()"

    def update(self, tensors: Tensors, version: Version | None) -> None:
        """A whole update; see `LLM.update_weights`."""
        _check_version(version)
        ledger = Ledger(self._filler.expected())
        if isinstance(tensors, (Mapping, Sequence)):
            tensors = list(named_tensors(tensors))
            ledger.check_all(describe(name, tensor) for name, tensor in tensors)
        with self._whole(ledger):
            self.add(tensors)
            self.finish(version)

    def update_by(self, parcel: Parcel, version: Version | None) -> None:
        """A whole update by one parcel of another process."""
        _check_version(version)
        ledger = Ledger(self._filler.expected())
        ledger.check_all(parcel.tensors)
        with self._whole(ledger):
            self.add_parcel(parcel)
            self.finish(version)

    @contextmanager
    def _whole(self, ledger: Ledger) -> Iterator[None]:
        """An update that ends with the block. One that has written nothing has not been."""
        before = self._ledger, self._failure
        self._begin(ledger)
        try:
            yield
        except BaseException as error:
            if ledger.has_come:
                self._fail(error)
            else:
                self._ledger, self._failure = before
                if self._ledger is None:
                    self._holder.release(self.version)
            raise

    def start(self) -> None:
        """Begin an update of several calls. One that has begun and not ended is forgotten."""
        self._begin(Ledger(self._filler.expected()))
        self.has_started = True

    def _begin(self, ledger: Ledger) -> None:
        self._holder.hold()
        self._filler.give_up_update()
        self._ledger, self._failure, self._ends = ledger, "", []

    def add(self, tensors: Tensors) -> None:
        """Write some of the tensors."""
        ledger = self._open_ledger()
        with self._failing(ledger):
            self._filler.fill(self._booked(named_tensors(tensors), ledger))

    def _booked(self, tensors: Iterable[Named], ledger: Ledger) -> Iterator[Named]:
        """The tensors that fill something, by the model's names, each counted when it is asked
        for.
        """
        for name, tensor in tensors:
            own = ledger.own_name(describe(name, tensor))
            if own is None:
                continue
            if ledger.is_tied and own in (EMBEDDING, HEAD):
                for other in self._ends:
                    check_tied(tensor, other)
                self._ends = [tensor]
            yield own, tensor

    def add_parcel(self, parcel: Parcel) -> None:
        """Write the tensors of another process's parcel."""
        ledger = self._open_ledger()
        with self._failing(ledger):
            own = [ledger.own_name(described) for described in parcel.tensors]
            self._filler.fill_parcel(parcel.renamed(own))

    def finish(self, version: Version | None) -> None:
        """End the update."""
        _check_version(version)
        ledger = self._open_ledger()
        ledger.check_complete()
        with self._failing(ledger):
            self._filler.end_update()
        self._num_updates += 1
        self.version = self._num_updates if version is None else version
        self._ledger, self._ends, self.has_started = None, [], False
        self._holder.release(self.version)

    def _open_ledger(self) -> Ledger:
        if self._ledger is None or self._failure:
            raise RuntimeError("no update of the weights has begun: call start_weight_update()")
        return self._ledger

    @contextmanager
    def _failing(self, ledger: Ledger) -> Iterator[None]:
        """An error in the block leaves the weights half written, if any tensor has come."""
        try:
            yield
        except BaseException as error:
            if ledger.has_come:
                self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or f"{type(error).__name__}: {error}"
        self.has_started = False
        self._filler.give_up_update()


def _check_version(version: object) -> None:
    if version is not None and (not isinstance(version, (int, str)) or isinstance(version, bool)):
        raise TypeError(f"`version` must be a number or a string, got {version!r}")


def named_tensors(tensors: Any) -> Iterator[Named]:
    """The tensors of an update with their names, detached. TypeError for what is neither."""
    for item in tensors.items() if isinstance(tensors, Mapping) else tensors:
        if not isinstance(item, (tuple, list)) or len(item) != 2:
            raise TypeError(f"`tensors` must be pairs of a name and a tensor, got {item!r}")
        name, tensor = item
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise TypeError(
                "`tensors` must be pairs of a name and a torch.Tensor, got "
                f"{name!r} and {type(tensor).__name__}"
            )
        yield name, tensor.detach()
