"""`TraceFile`: a file of events in Chrome's trace format, readable whenever its process is killed.

It is a JSON array with an event on each line; Chrome and Perfetto do without its end. Imports no
torch.
"""

import contextlib
import logging
import os
import stat
import threading

from nanovllm.tracing.trace_events import ENDED, FULL, recording_event

logger = logging.getLogger(__name__)

MAX_BYTES = 256 << 20  # viewers hold all of a file in memory, in several times its size
HEAD_BYTES, MARK = 4096, b'"cat":"recording"'  # the first event of this kind is in a trace's head


class TraceFile:
    """A new file of events. Threads may share it. It overwrites an earlier trace, and nothing else.

    An error of the disk ends the recording with a warning, but not the engine.

    Args:
        path: path of the file.
        max_bytes: maximum size of the file; later events are left out.

    Raises:
        ValueError: if it cannot be written, is not a trace, or another engine is writing it.
    """

    def __init__(self, path: str, max_bytes: int = MAX_BYTES) -> None:
        self.path = path
        self._left, self._is_empty, self._lock = max_bytes, True, threading.Lock()
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                _lock(fd)
                if stat.S_ISREG(os.fstat(fd).st_mode):
                    _check_replaceable(fd, path)
                    os.ftruncate(fd, 0)
            except BaseException:
                os.close(fd)
                raise
        except OSError as error:
            is_taken = isinstance(error, BlockingIOError)
            reason = "another engine is writing it" if is_taken else error.strerror
            raise ValueError(
                f"`trace` must be a file that can be written, got {path!r}: {reason}"
            ) from None
        self._fd: int | None = fd

    def write(self, lines: list[str]) -> None:
        """Add events, each a JSON object."""
        with self._lock:
            if self._fd is None or self._left <= 0 or not lines:
                return
            data = self._joined(lines)
            self._left -= len(data)
            if self._left <= 0:
                data += self._joined([recording_event(FULL, {})])
                logger.warning(
                    "%s is full: later events are left out. `with llm.trace(path):` records a part "
                    "of a long run",
                    self.path,
                )
            self._append(data)

    def _joined(self, lines: list[str]) -> bytes:
        first, self._is_empty = self._is_empty, False
        return (("[\n" if first else ",\n") + ",\n".join(lines)).encode()

    def _append(self, data: bytes) -> None:
        assert self._fd is not None, "closed"
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError as error:
            logger.warning("%s can no longer be written: %s", self.path, error)
            self._close()

    def end(self) -> None:
        """End the array, and close the file. May be called again."""
        with self._lock:
            if self._fd is not None:
                end = self._joined([recording_event(ENDED, {})]) + b"\n]\n"
                self._append(end)
                self._close()

    def _close(self) -> None:
        if self._fd is not None:
            with contextlib.suppress(OSError):
                _unlock(self._fd)
                os.close(self._fd)
            self._fd = None


def _check_replaceable(fd: int, path: str) -> None:
    head = os.read(fd, HEAD_BYTES)
    os.lseek(fd, 0, os.SEEK_SET)
    if head and MARK not in head:
        raise ValueError(
            f"`trace` must be a new file or an earlier trace, got {path!r}, which holds something "
            "else: pass another path, or delete it"
        )


def _lock(fd: int) -> None:
    """Lock the file against other engines as long as it is open, if the system has such locks."""
    try:
        import fcntl
    except ImportError:
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:  # on a network file system, say
        pass


def _unlock(fd: int) -> None:
    """Unlock the file: closing it would not, while a forked process has it open, too."""
    with contextlib.suppress(ImportError, OSError):
        import fcntl

        fcntl.flock(fd, fcntl.LOCK_UN)
