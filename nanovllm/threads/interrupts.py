"""Ctrl-C, held back while something half done must not remain."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, TypeAlias

Handler: TypeAlias = Callable[[int, FrameType | None], Any]

PATIENCE = 3.0  # seconds between a Ctrl-C that is held back and the next that is not


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold Ctrl-C back until the end of the block, which must not end half done.

    A second Ctrl-C, at least `PATIENCE` later, ends a hanging block.
    """
    handler = signal.getsignal(signal.SIGINT)
    in_main = threading.current_thread() is threading.main_thread()
    if not callable(handler) or isinstance(handler, _HoldBack) or not in_main:
        yield  # no Python handler would run in here, or a block around this one holds it back
        return
    hold_back = _HoldBack(handler)
    signal.signal(signal.SIGINT, hold_back)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if hold_back.first is not None:
        handler(*hold_back.first)


@dataclass
class _HoldBack:
    """A handler of signals that holds them back.

    Attributes:
        handler: handler that they are for.
        first: arguments of the first signal.
        came_at: time of its arrival, by `time.monotonic`.
    """

    handler: Handler
    first: tuple[int, FrameType | None] | None = None
    came_at: float = 0.0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Keep the first signal; pass a late one on."""
        if self.first is None:
            self.first, self.came_at = (number, frame), time.monotonic()
        elif time.monotonic() - self.came_at >= PATIENCE:
            self.handler(number, frame)
