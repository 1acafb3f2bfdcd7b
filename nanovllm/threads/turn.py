"""`Turn`: a sign by which other threads let the engine's go first."""

import threading


class Turn:
    """Whose turn it is in Python: the engine's thread's, or that of all others.

    Python runs one thread at a time, and the engine's lets go of Python's lock at each operator, of
    which a step has hundreds. Where others want the lock, it comes back after milliseconds, while
    the device has nothing to compute. So threads that have much to do, which is not urgent, `wait`
    before each piece of it. The engine's waits for nobody.
    """

    def __init__(self) -> None:
        self._is_free = threading.Event()
        self._is_free.set()

    def take(self) -> None:
        """It is the engine's."""
        self._is_free.clear()

    def give(self) -> None:
        """It is the others'."""
        self._is_free.set()

    def wait(self, seconds: float) -> None:
        """Wait until it is not the engine's, or this time has passed."""
        self._is_free.wait(seconds)
