"""Results as lines of a file, all of them whole, whenever the process or the machine stops.

Each line is appended by one call as soon as there is a result: killing the process after that loses
nothing. A partial line of a failed call (a full disk, a kill) or of a power cut is cut off at once,
or when the file is opened again. Lines are synced to disk when they are ten seconds old, or at the
next `tick` after that.
"""

import errno
import logging
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from nanovllm.batch.results import Result

logger = logging.getLogger(__name__)

HEAD = re.compile(rb'\{"(?:_key|id)": "(?:batch_req_)?((?:[0-9a-f]{16}){2,3})", ')
ANSWERED, FAILED = b', "error": null}\n', b"}\n"
SYNC_SECONDS = 10.0
NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}  # on a network file system, say


class Lines:
    """A file of results in JSON.

    Args:
        path: path of the file, which is made if it does not exist.

    Raises:
        BlockingIOError: if another process writes to it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = _open_locked(path)
        self._new_path = temporary_path(path)
        self._new_path.unlink(missing_ok=True)  # left by a process that was killed
        self._size = os.fstat(self._fd).st_size
        self._due: float | None = None  # time of the next sync; None: all is synced

    def is_empty(self) -> bool:
        """Whether the file has no results."""
        return self._size == 0

    def recover(self) -> Iterator[tuple[bytes, bool]]:
        """The id of each result (`Row.result_id`), and whether it carries an error. Cuts off a
        partial line at the end.

        Raises:
            ValueError: for a line that is not a result.
        """
        size, torn = 0, False
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                # A file system may have lost data that was not synced, and leaves zeros there.
                is_whole = line.endswith(b"\n") and b"\0" not in line
                head = HEAD.match(line) if is_whole and line.endswith(FAILED) else None
                if torn or (is_whole and head is None):
                    raise ValueError(
                        f"line {number - torn} of {self.path} must be a result of this job: delete "
                        "it, and its row is computed again"
                    )
                if head is None:
                    torn = True  # if more lines follow, somebody has changed the file
                    continue
                size += len(line)
                yield bytes.fromhex(head[1].decode()), not line.endswith(ANSWERED)
        self._cut(size)

    def _cut(self, size: int) -> None:
        if os.fstat(self._fd).st_size != size:
            os.ftruncate(self._fd, size)
        self._size = size

    def append(self, result: Result) -> None:
        """Write a result, which killing the process can then no longer lose.

        Raises:
            OSError: if it cannot be written; the file is as it was before.
        """
        line = result.to_line()
        if self._due is None:
            self._due = time.monotonic() + SYNC_SECONDS
        try:
            rest = memoryview(line)
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except BaseException:
            self._cut(self._size)
            raise
        self._size += len(line)

    def tick(self) -> None:
        """Sync to disk if that is due."""
        if self._due is not None and time.monotonic() >= self._due:
            self.sync()

    def sync(self) -> None:
        """Sync to disk."""
        if self._due is not None:
            os.fsync(self._fd)
            self._due = None

    def drop(self, is_wanted: Callable[[bytes, bool], bool]) -> None:
        """Remove results, all at once, so that their rows are unfinished again.

        Args:
            is_wanted: function of a result's id and whether it carries an error; True: it stays.
        """
        fd = _open_locked(self._new_path)  # before it replaces the other file
        try:
            with self.path.open("rb") as old, open(fd, "wb", closefd=False) as new:
                lines = zip(old, self.recover(), strict=True)
                new.writelines(line for line, (key, failed) in lines if is_wanted(key, failed))
            os.fchmod(fd, stat.S_IMODE(os.fstat(self._fd).st_mode))
            os.fsync(fd)
            os.replace(self._new_path, self.path)
        except BaseException:
            os.close(fd)
            self._new_path.unlink(missing_ok=True)
            raise
        os.close(self._fd)
        self._fd, self._size = fd, os.fstat(fd).st_size
        sync_directory(self.path.parent)

    def close(self) -> None:
        """Sync the file, and let others write to it."""
        try:
            self.sync()
        finally:
            os.close(self._fd)


def temporary_path(path: Path) -> Path:
    """A path of ours for a file that will then replace another."""
    return path.with_name(f".{path.name}.nanovllm.tmp")


def _open_locked(path: Path) -> int:
    """Open a file for appending, under a lock that nobody else can take until it is closed."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            lock(fd, path)
            if os.path.samestat(os.fstat(fd), os.stat(path)):
                return fd
        except FileNotFoundError:  # it was replaced in between
            pass
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def lock(fd: int, path: Path) -> None:
    """Lock an output against other processes as long as `fd` is open.

    Raises:
        BlockingIOError: if another process has it.
        ValueError: if the system has no such locks.
    """
    try:
        import fcntl
    except ImportError:
        raise ValueError(
            f"{path} must be written on Linux or macOS, got a system without file locks (fcntl): "
            "leave out the output, and redirect the command's standard output"
        ) from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BlockingIOError(
            f"{path} is being written by another process: wait for it, or choose another output"
        ) from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        logger.warning("%s cannot be locked (%s): do not start another job on it", path, error)


def sync_directory(path: Path) -> None:
    """Sync the names in a directory to disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
