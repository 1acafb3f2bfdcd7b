"""`FairLock`: a lock that threads get in the order in which they ask for it."""

import os
import threading
from collections.abc import Callable
from typing import Any


class FairLock:
    """A re-entrant lock for `with` statements that serves threads first come, first served.

    Python's own may go again and again to the thread that has just released it, past waiting ones.
    Here an `RLock` has a queue before it: a thread asks for the lock once the thread ahead in the
    queue has got it.

    It belongs to the process that built it: in a fork, the holder may be a thread that does not
    exist there. `with` raises RuntimeError there.
    """

    # Python raises KeyboardInterrupt between any two lines, so also in a method `__exit__` before
    # it has released anything. As properties, these two give `with` functions in C, which cannot be
    # interrupted so; only `_take_turn` is Python, and undoes what it has done.

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._last = _Place()
        self._moving_up = threading.RLock()  # guards `_last`
        self._queued: set[int] = set()  # ids of threads

    @property
    def __enter__(self) -> Callable[[], Any]:
        if self.is_forked:
            raise RuntimeError(
                "a forked process cannot use its parent's engine: start the process by "
                'multiprocessing\'s "spawn", and build an engine there'
            )
        # A queued thread that asks again is in a signal handler, or in garbage collection: it
        # cannot wait for the call that it interrupts.
        if self._lock._is_owned() or threading.get_ident() in self._queued:  # type: ignore[attr-defined]
            return self._lock.__enter__
        return self._take_turn

    @property
    def __exit__(self) -> Callable[..., None]:  # noqa: PLE0302
        return self._lock.__exit__

    @property
    def is_forked(self) -> bool:
        """Whether this process is a fork of the one that built the lock."""
        return os.getpid() != self._pid

    def _take_turn(self) -> None:
        thread = threading.get_ident()
        try:
            if not self._queued and self._lock.acquire(blocking=False):
                return
            place = _Place()
            with place.is_waiting:
                self._queued.add(thread)
                with self._moving_up:
                    place.ahead, self._last = self._last, place
                while (ahead := place.ahead) is not None:
                    with ahead.is_waiting:  # until that thread has the lock, or has given up
                        place.ahead = ahead.ahead
                self._lock.acquire()
            self._queued.discard(thread)
        except BaseException:
            self._queued.discard(thread)
            if self._lock._is_owned():  # type: ignore[attr-defined]
                self._lock.release()
            raise


class _Place:
    """A place in the queue of a `FairLock`.

    Attributes:
        is_waiting: lock held by the thread in this place.
        ahead: place before it; None if it need not be waited for any more. A thread that gives up
            leaves its `ahead` to the next place, whose thread then waits for that instead.
    """

    __slots__ = ("ahead", "is_waiting")

    def __init__(self) -> None:
        self.is_waiting = threading.Lock()
        self.ahead: _Place | None = None
