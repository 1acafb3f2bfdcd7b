"""`Store`: the values that the ranks exchange while they meet.

Rank 0's `Workers` keep the values, and the other ranks ask for them through the socket pairs that
they have in any case: the store does not listen, so no other process of the machine can read or
change the values. Once the ranks have met, the sockets have other uses.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

from torch import distributed as dist

POLL_SECONDS = 0.01


class Store(dist.Store):
    """One rank's access to the values. Gloo calls `set`, `wait` and `get` from C++.

    No method has a time limit: a rank that waits for one that has died is ended by rank 0, whose
    own `ask` raises then.

    Args:
        ask: function that sets the value of a key, if given one, and returns the value, or None if
            there is none.
    """

    def __init__(self, ask: Callable[[str, bytes | None], bytes | None]) -> None:
        super().__init__()
        self._ask = ask

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        """Publish a value to all ranks."""
        self._ask(key, value)

    def get(self, key: str) -> bytes:
        """The value of a key, as soon as it has one."""
        while (value := self._ask(key, None)) is None:
            time.sleep(POLL_SECONDS)
        return value

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:  # type: ignore[override]
        """Return when all keys have a value."""
        for key in keys:
            self.get(key)


def arrival(rank: int) -> str:
    """The key that a rank sets when it is ready to meet the others."""
    return f"rank {rank} is there"
