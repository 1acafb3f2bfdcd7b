"""Results as lines of a file: whole ones, whatever moment the process or the machine stops at.

A line is written behind the others by one call as soon as it is there: killing the process then
loses none. What a call has written in part (a full disk, a kill), or a power cut has left, is cut
off at once, or when the file is opened again.
"""

import errno
import fcntl
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path

from nanovllm.batch.results import Result

logger = logging.getLogger(__name__)

HEAD = re.compile(rb'\{"(?:_key|id)": "(?:batch_req_)?([0-9a-f]{32})", ')
ANSWERED, FAILED = b', "error": null}\n', b"}\n"
NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}  # of a network's file system, say


class Lines:
    """A file of results in JSON.

    Args:
        path: of the file, which is made if it is not there.

    Raises:
        BlockingIOError: if another process writes to it.
    """

    ordered = False
    can_retry = True

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = _open_locked(path)
        self._new_path = path.with_name(f"{path.name}.tmp")
        self._new_path.unlink(missing_ok=True)  # of a process that was killed
        self._size = os.fstat(self._fd).st_size
        self._is_synced = True

    def is_empty(self) -> bool:
        """Whether there is nothing in it."""
        return self._size == 0

    def recover(self) -> Iterator[tuple[bytes, bool]]:
        """The keys of its results, and whether they carry an error; cuts off a torn end.

        Raises:
            ValueError: for a line that is no result.
        """
        size, torn = 0, False
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                # Where a file system lost what was not synced, there are zeros.
                is_whole = line.endswith(b"\n") and b"\0" not in line
                head = HEAD.match(line) if is_whole and line.endswith(FAILED) else None
                if torn or (is_whole and head is None):
                    raise ValueError(
                        f"line {number - torn} of {self.path} must be a result of this job: delete "
                        "it, and its row is computed again"
                    )
                if head is None:
                    torn = True  # if more comes behind it, the file was changed
                    continue
                size += len(line)
                yield bytes.fromhex(head[1].decode()), not line.endswith(ANSWERED)
        self._cut(size)

    def _cut(self, size: int) -> None:
        if os.fstat(self._fd).st_size != size:
            os.ftruncate(self._fd, size)
        self._size = size

    def append(self, result: Result) -> None:
        """Write a result; killing the process loses it no more.

        Raises:
            OSError: if it cannot be written; the file is as it was before.
        """
        self._append(result.to_line())

    def _append(self, line: bytes) -> None:
        self._is_synced = False
        try:
            rest = memoryview(line)
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except BaseException:
            self._cut(self._size)
            raise
        self._size += len(line)

    def sync(self) -> None:
        """Have the disk hold what was written."""
        if not self._is_synced:
            os.fsync(self._fd)
            self._is_synced = True

    def drop_failed(self) -> None:
        """Take out the results that carry an error, all at once, so that their rows are left."""
        fd = _open_locked(self._new_path)  # before it takes the other's place
        try:
            with self.path.open("rb") as old, open(fd, "wb", closefd=False) as new:
                new.writelines(line for line in old if line.endswith(ANSWERED))
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
        """Sync it, and let others write."""
        try:
            self.sync()
        finally:
            os.close(self._fd)


class Texts(Lines):
    """A file of generated texts, a line for each row, in the order of the rows.

    Line breaks in a text are written as `\\n` and `\\r`, a backslash as two. A row that failed has
    an empty line. As many rows are finished as there are lines.
    """

    ordered = True
    can_retry = False

    def recover(self) -> Iterator[tuple[bytes, bool]]:
        """Nothing by keys: `num_lines` says how many rows are finished."""
        self.num_lines, size = 0, 0
        with self.path.open("rb") as file:
            for line in file:
                if line.endswith(b"\n"):
                    self.num_lines, size = self.num_lines + 1, size + len(line)
        self._cut(size)
        return iter(())

    def append(self, result: Result) -> None:
        """Write the text of a result; see `Lines.append`."""
        self._append(text_line(result))


def text_line(result: Result) -> bytes:
    """The generated text of a result on one line."""
    text = result.answer()["generated_text"] or ""
    for plain, escaped in (("\\", "\\\\"), ("\n", "\\n"), ("\r", "\\r")):
        text = text.replace(plain, escaped)
    return text.encode(errors="replace") + b"\n"


def _open_locked(path: Path) -> int:
    """The file for appending, which nobody else may open so until it is closed."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        try:
            lock(fd, path)
            if os.path.samestat(os.fstat(fd), os.stat(path)):
                return fd
        except FileNotFoundError:  # it has been replaced in between
            pass
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def lock(fd: int, path: Path) -> None:
    """Keep others from an output as long as `fd` is open.

    Raises:
        BlockingIOError: if another process has it.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise BlockingIOError(
            f"{path} is being written by another process: wait for it, or choose another output"
        ) from error
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        logger.warning("%s cannot be locked (%s): start no other job on it", path, error)


def sync_directory(path: Path) -> None:
    """Have the disk hold the names of a directory."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
