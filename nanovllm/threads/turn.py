"""`Turn`: a sign by which other threads let the engine's go first."""

import threading


class Turn:
    """The turn in Python: the engine's thread's, or that of all others.

    Python runs one thread at a time, and the engine's lets go of Python's lock at each operator, of
    which a step has hundreds. Where others want the lock, it comes back after milliseconds, while
    the device has nothing to compute. So a thread that has much to do, which is not urgent, waits
    before each piece of it. The engine's waits for nobody.

    Attributes:
        take: function that makes it the engine's.
        give: function that makes it the others', as at first.
        wait: function that waits until it is the others', or so many seconds.
    """

    def __init__(self) -> None:
        is_free = threading.Event()
        is_free.set()
        self.take = is_free.clear
        self.give = is_free.set
        self.wait = is_free.wait
