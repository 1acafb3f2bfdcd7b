"""`WeightUpdates`: the updates of an engine's weights, one after another, and what they refuse."""

import numbers
from collections.abc import AsyncIterable, ItemsView, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import torch

from nanovllm.adapters.adapter import Given
from nanovllm.tensors.source import check_plain
from nanovllm.threads.interrupts import uninterrupted
from nanovllm.updates.hold import Hold, Version
from nanovllm.updates.ledger import Ledger, Piece
from nanovllm.updates.memory import Memory
from nanovllm.updates.parcel import Named, Parcel, describe, in_pieces
from nanovllm.updates.sleeping import WEIGHTS

Tensors: TypeAlias = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]
ALL_THERE = (Mapping, ItemsView, Sequence)  # types of tensors that can be checked before any comes

NO_ADAPTER = "none"
UPDATE = "update"  # name of a reason to hold the engine
OPEN = "the weights are being updated: end that with finish_weight_update()"
BUSY = (
    "the weights are being updated: leave the engine alone until the call that does it has returned"
)
LOST = (
    "the weights have been dropped by sleep(level=2): bring new ones, all of them, with "
    "update_weights(), or, if they came from a checkpoint, fill them from it with load_adapter() "
    "or unload_adapter()"
)


class WeightUpdates:
    """The updates of an engine.

    Args:
        memory: weights of all ranks.
        hold: reasons for which the engine computes nothing.
        adapter: names of the adapters that were merged at the start.

    Attributes:
        adapter: names of the adapters that the weights have, or "none".
        has_started: whether an update of several calls goes on.
    """

    def __init__(self, memory: Memory, hold: Hold, adapter: str = NO_ADAPTER) -> None:
        self._memory, self._hold, self.adapter = memory, hold, adapter
        self._last_number = 0  # of versions
        self._ledger: Ledger | None = None  # of the update that goes on
        self.has_started = False
        self._is_filling = False  # a caller's iterable may call the engine meanwhile

    def lose(self) -> None:
        """The weights have no values any more."""
        self._ledger, self.has_started = None, False
        self._hold.add(UPDATE, LOST)

    def update(self, tensors: Tensors, version: Version | None) -> None:
        """A whole update; see `LLM.update_weights`."""
        version = _read_version(version)
        ledger = Ledger(self._memory.expected())
        if not isinstance(tensors, ALL_THERE):
            with self._whole(ledger):
                self.add(tensors)
                self.finish(version)
            return
        own, pieces = _own_tensors(tensors, ledger, are_all=True)
        with self._whole(ledger):
            self._memory.fill(own, lambda: ledger.book(pieces))
            self.finish(version)

    def update_by(self, parcel: Parcel, version: Version | None) -> None:
        """A whole update by one parcel of another process."""
        version = _read_version(version)
        ledger = Ledger(self._memory.expected())
        pieces = ledger.all_pieces(parcel.tensors, are_all=True)
        with self._whole(ledger):
            self._memory.fill_parcel(
                parcel._replace(pieces=pieces), lambda: ledger.book(chain(*pieces))
            )
            self.finish(version)

    @contextmanager
    def _whole(self, ledger: Ledger, *, since: int = 0) -> Iterator[None]:
        """An update that ends with the block. An error fails it, if more tensors than `since` have
        come then: else it has not been.
        """
        before = self._hold[UPDATE]
        try:
            self._begin(ledger, in_parts=False)
            yield
        except BaseException as error:
            if self._ledger is ledger:  # it has begun, and not failed
                if ledger.num_come > since:
                    self._fail(error)
                else:
                    self._end(before)
            raise

    def start(self) -> None:
        """Begin an update of several calls. One that has begun and not ended is forgotten."""
        self._begin(Ledger(self._memory.expected()), in_parts=True)

    def _begin(self, ledger: Ledger, *, in_parts: bool) -> None:
        self._check_ready()
        self._hold.prepare()
        with uninterrupted():
            self._hold.add(UPDATE, OPEN if in_parts else BUSY)
            self._memory.give_up_update()
            self._ledger, self.has_started = ledger, in_parts

    def check_idle(self) -> None:
        """Refuse to change anything inside an update: its tensors may come from the caller's code.

        Raises:
            RuntimeError: if weights are being filled.
        """
        if self._is_filling:
            raise RuntimeError(BUSY)

    def _check_ready(self) -> None:
        self.check_idle()
        if self._hold[WEIGHTS] is not None:
            raise RuntimeError('the weights have no memory: call wake_up(tags=["weights"]) first')

    def _end(self, reason: str | None = None) -> None:
        """No update goes on. The engine may, unless there is still a reason."""
        with uninterrupted():
            self._ledger, self.has_started = None, False
            if reason is None:
                self._hold.drop(UPDATE)
            else:
                self._hold.add(UPDATE, reason)

    def add(self, tensors: Tensors) -> None:
        """Write some of the tensors. What is refused before anything is written changes nothing."""
        ledger = self._open_ledger()
        if not isinstance(tensors, ALL_THERE):
            with self._failing(since=ledger.num_come):
                self._memory.fill(_booked(named_tensors(tensors), ledger), lambda: None)
            return
        own, pieces = _own_tensors(tensors, ledger)
        with self._failing(since=ledger.num_come):
            self._memory.fill(own, lambda: ledger.book(pieces))

    def add_parcel(self, parcel: Parcel) -> None:
        """Write the tensors of another process's parcel, see `add`."""
        ledger = self._open_ledger()
        pieces = ledger.all_pieces(parcel.tensors)
        with self._failing(since=ledger.num_come):
            self._memory.fill_parcel(
                parcel._replace(pieces=pieces), lambda: ledger.book(chain(*pieces))
            )

    def reload(self, adapters: Sequence[Given], name: str) -> None:
        """Fill the weights from the checkpoint again.

        Args:
            adapters: adapters to merge into it.
            name: name of these adapters.
        """
        with self._whole(Ledger(self._memory.expected()), since=-1):
            with self._failing():
                self._memory.reload(adapters)
            self._count(None, name)

    def finish(self, version: Version | None) -> None:
        """End the update."""
        version = _read_version(version)
        ledger = self._open_ledger()
        ledger.check_complete()
        with self._failing():
            self._memory.end_update()
        self._count(version, NO_ADAPTER)

    def _count(self, version: Version | None, adapter: str) -> None:
        """An update has ended."""
        self._last_number += 1
        if isinstance(version, int):  # the next number is another
            self._last_number = max(self._last_number, version)
        self._hold.version = self._last_number if version is None else version
        self.adapter = adapter
        self._end()

    def _open_ledger(self) -> Ledger:
        if self._ledger is None:
            raise RuntimeError("no update of the weights has begun: call start_weight_update()")
        self._check_ready()
        return self._ledger

    @contextmanager
    def _failing(self, since: int = -1) -> Iterator[None]:
        """An error in the block fails the update, if more tensors than `since` have come then: they
        may be written in part.
        """
        try:
            self._is_filling = True
            yield
        except BaseException as error:
            if self._ledger is not None and self._ledger.num_come > since:
                self._fail(error)
            raise
        finally:
            self._is_filling = False

    def _fail(self, error: BaseException) -> None:
        if self._ledger is not None:  # not yet
            how = f"has failed ({type(error).__name__}: {error})"
            if isinstance(error, (KeyboardInterrupt, GeneratorExit)):  # Ctrl-C in a block or before
                how = "was interrupted"
            with uninterrupted():
                self._end(
                    f"the weights are those of two versions, because an update {how}: update all "
                    "of them again, or fill them from the checkpoint, if they came from one, with "
                    "unload_adapter()"
                )
                self.adapter = NO_ADAPTER
                self._memory.give_up_update()


def _read_version(version: object) -> Version | None:
    """A version as outputs have it: a number is Python's own."""
    if version is None or isinstance(version, str):
        return version
    if isinstance(version, bool) or not isinstance(version, numbers.Integral):
        raise TypeError(f"`version` must be an integer or a string, got {version!r}")
    return int(version)


def _own_tensors(
    tensors: Tensors, ledger: Ledger, *, are_all: bool = False
) -> tuple[list[Named], list[Piece]]:
    """The model's tensors, by its names, in tensors that are all there; and what they are."""
    named = list(named_tensors(tensors))
    described = [describe(name, tensor) for name, tensor in named]
    pieces = ledger.all_pieces(described, are_all=are_all)
    own = [
        each
        for (_, tensor), some in zip(named, pieces, strict=True)
        for each in in_pieces(tensor, some)
    ]
    return own, list(chain(*pieces))


def _booked(tensors: Iterable[Named], ledger: Ledger) -> Iterator[Named]:
    """The tensors that fill something, by the model's names, each counted when it is asked for."""
    for name, tensor in tensors:
        pieces = ledger.pieces(describe(name, tensor))
        for piece, own in zip(pieces, in_pieces(tensor, pieces), strict=True):
            ledger.book([piece])
            yield own


def check_tensors(tensors: object) -> None:
    """Refuse what has no tensors with names.

    Raises:
        TypeError: with the remedy.
    """
    if isinstance(tensors, torch.nn.Module):
        raise TypeError("`tensors` must be pairs of a name and a tensor: pass model.state_dict()")
    if isinstance(tensors, Mapping) and "memory" in tensors:
        raise TypeError(
            "`tensors` must be the tensors themselves: pass a message of share_weights() to "
            "update_weights_ipc()"
        )
    if not isinstance(tensors, (Mapping, Iterable)):
        is_async = isinstance(tensors, AsyncIterable)
        hint = ": pass [pair async for pair in tensors]" if is_async else ""
        raise TypeError(
            "`tensors` must be pairs of a name and a tensor, or a dictionary, got "
            f"{type(tensors).__name__}{hint}"
        )


def named_tensors(tensors: Any) -> Iterator[Named]:
    """The tensors of an update with their names, detached. TypeError for what is neither."""
    for item in tensors.items() if isinstance(tensors, Mapping) else tensors:
        if not isinstance(item, (tuple, list)) or len(item) != 2:
            found = type(item).__name__
            if isinstance(item, (tuple, list)):
                found += f" of {len(item)} values"
            raise TypeError(f"`tensors` must be pairs of a name and a tensor, got {found}")
        name, tensor = item
        if name == "update_info":  # vLLM's
            raise TypeError(
                "`tensors` must be the tensors themselves; of another process pass what "
                "share_weights() has given there to update_weights_ipc()"
            )
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            first = repr(name) if isinstance(name, str) else type(name).__name__
            hint = ": pass torch.from_numpy(array)" if isinstance(tensor, np.ndarray) else ""
            raise TypeError(
                "`tensors` must be pairs of a name and a torch.Tensor, got "
                f"{first} and {type(tensor).__name__}{hint}"
            )
        check_plain(name, tensor)
        yield name, tensor.detach()
