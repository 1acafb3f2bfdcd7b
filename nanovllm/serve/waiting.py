"""`Waiting`: the sequences that wait for their first token, of which there may be so many."""

from types import TracebackType

from typing_extensions import Self

from nanovllm.serve.errors import RefusedError


class Waiting:
    """A count of sequences.

    A request is admitted while fewer wait than may, and waits with all its sequences: so those of
    one request at most are beyond the bound, and none has too many ever to be admitted.

    Args:
        most: number of sequences that may wait.

    Attributes:
        count: sequences that wait.
        num_refused: requests that were refused.
    """

    def __init__(self, most: int) -> None:
        self.count = self.num_refused = 0
        self._most = most

    def admit(self) -> "Place":
        """Admit a request, as one sequence until its body is read.

        Raises:
            RefusedError: too many others wait.
        """
        place = Place(self)
        place.hold(1)
        return place

    def check(self, others: int) -> None:
        """RefusedError if so many others are too many."""
        if others >= self._most:
            self.num_refused += 1
            raise RefusedError(429, f"{others} sequences wait already: try again later")


class Place:
    """A request's place among those that wait; it ends with the `with` block."""

    def __init__(self, waiting: Waiting) -> None:
        self._waiting, self._count = waiting, 0

    def hold(self, count: int) -> None:
        """Wait with so many sequences.

        Raises:
            RefusedError: too many others wait.
        """
        others = self._waiting.count - self._count
        self._waiting.check(others)
        self._waiting.count, self._count = others + count, count

    def release(self, count: int) -> None:
        """Wait with fewer: so many have their first tokens."""
        self._waiting.count -= count
        self._count -= count

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        frames: TracebackType | None,
    ) -> None:
        self.release(self._count)
