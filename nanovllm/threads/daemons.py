"""`Daemons`: threads for calls that may take long, whose end nobody waits for."""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from typing_extensions import Self

T = TypeVar("T")


class Daemons:
    """A few threads, each while there are calls for it. The process may end before their calls do,
    unlike with those of `concurrent.futures` and `asyncio.to_thread`. At the end of a `with` block
    calls that have not begun are dropped.

    Args:
        name: name of the threads.
        max_threads: largest number of calls at once.
    """

    def __init__(self, name: str, max_threads: int) -> None:
        self._name, self._max_threads, self._num_threads = name, max_threads, 0
        self._calls: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._lock = threading.Lock()  # guards the number of threads, and the calls

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            left = [future for future, _ in self._calls]
            self._calls.clear()
        for future in left:
            future.cancel()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Have a function called. Cancelling the future drops a call that has not begun."""
        future: Future[T] = Future()
        with self._lock:
            self._calls.append((future, call))
            begins = self._num_threads < self._max_threads
            self._num_threads += begins
        if begins:
            threading.Thread(target=self._work, name=self._name, daemon=True).start()
        return future

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._calls:
                    self._num_threads -= 1
                    return
                future, call = self._calls.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call())
            except BaseException as error:  # for whoever waits
                future.set_exception(error)
            del future, call  # and with them what the caller passed
