"""`Ahead`: rows that a thread reads, so that a slow source does not keep the engine waiting."""

import queue
import threading
from collections.abc import Iterator

from nanovllm.batch.rows import Row

MOST = 256  # rows in the queue


class Ahead(Iterator[Row]):
    """Rows as they arrive, from a pipe, say: while there is none, `run` goes on with those it has.

    The thread ends with the rows, or with the process.

    Args:
        rows: iterator, read in the thread. An error that it raises is raised where the next row is
            asked for.
    """

    def __init__(self, rows: Iterator[Row]) -> None:
        self._queue: queue.Queue[Row | BaseException] = queue.Queue(MOST)
        self._next: Row | BaseException | None = None
        threading.Thread(target=self._read, args=(rows,), daemon=True).start()

    def _read(self, rows: Iterator[Row]) -> None:
        try:
            for row in rows:
                self._queue.put(row)
            self._queue.put(StopIteration())
        except BaseException as error:
            self._queue.put(error)

    def wait(self, seconds: float) -> bool:
        """Wait up to `seconds` for the next row, or the end. Returns whether it has arrived."""
        if self._next is None:
            try:
                self._next = self._queue.get(timeout=seconds) if seconds else self._queue.get(False)
            except queue.Empty:
                return False
        return True

    def __next__(self) -> Row:
        item = self._queue.get() if self._next is None else self._next
        if isinstance(item, BaseException):
            self._next = item  # raised again if the caller asks again
            raise item
        self._next = None
        return item
