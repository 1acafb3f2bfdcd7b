"""Results as lines of a file: whole ones, whatever moment the process or the machine stops at.

A line is written behind the others by one call as soon as it is there: killing the process then
loses none. What a call has written in part (a full disk, a kill), or a power cut has left, is cut
off at once, or when the file is opened again. The disk is made to hold lines when they are ten
seconds old, or at the next `tick` behind that.
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
FAILED_ROW = b', "error": true}\n'
SYNC_SECONDS = 10.0
NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}  # of a network's file system, say


class Lines:
    """A file of results in JSON.

    Args:
        path: of the file, which is made if it is not there.

    Raises:
        BlockingIOError: if another process writes to it.
    """

    ordered = False

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = _open_locked(path)
        self._new_path = temporary_path(path)
        self._new_path.unlink(missing_ok=True)  # of a process that was killed
        self._size = os.fstat(self._fd).st_size
        self._due: float | None = None  # when the disk is to hold it; None: it does

    def is_empty(self) -> bool:
        """Whether there is nothing in it."""
        return self._size == 0

    def recover(self) -> Iterator[tuple[bytes, bool]]:
        """What its results are known by (`Row.result_id`), and whether they carry an error; cuts
        off a torn end.

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
        """Have the disk hold what was written if that is due."""
        if self._due is not None and time.monotonic() >= self._due:
            self.sync()

    def sync(self) -> None:
        """Have the disk hold what was written."""
        if self._due is not None:
            os.fsync(self._fd)
            self._due = None

    def drop(self, is_wanted: Callable[[bytes, bool], bool]) -> None:
        """Take out results, all at once, so that their rows are left.

        Args:
            is_wanted: says of what `recover` gives whether it stays.
        """
        fd = _open_locked(self._new_path)  # before it takes the other's place
        try:
            with self.path.open("rb") as old, open(fd, "wb", closefd=False) as new:
                lines = zip(old, self.recover(), strict=True)
                new.writelines(line for line, known in lines if is_wanted(*known))
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
        """Sync it, and let others write."""
        try:
            self.sync()
        finally:
            os.close(self._fd)


class Texts(Lines):
    """A file of generated texts, a line for each row, in the order of the rows.

    Line breaks in a text are written as `\\n` and `\\r`, a backslash as two. A row that failed has
    an empty line. What a text cannot say, the row's key and whether it failed, is in lines of
    `OUTPUT.job.rows`, which are written first: as many rows are finished as both files have lines.
    """

    ordered = True

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        rows = path.with_name(f"{path.name}.job.rows")
        try:
            if self._size and not rows.exists():
                raise ValueError(
                    f"{path} is there already and is no output of such a job (there is no {rows}): "
                    "choose another output, or remove it"
                )
            self._rows = Lines(rows)
        except BaseException:
            os.close(self._fd)
            raise

    def recover(self) -> Iterator[tuple[bytes, bool]]:
        """As of `Lines`; cuts off what only one file has.

        Raises:
            ValueError: for a line of `OUTPUT.job.rows` that is none of this job.
        """
        size = size_of_rows = 0
        with self.path.open("rb") as file:
            for line, row in zip(file, self._rows.recover(), strict=False):
                if not line.endswith(b"\n"):
                    break
                size, size_of_rows = size + len(line), size_of_rows + len(_row_line(*row))
                yield row
        self._cut(size)
        self._rows._cut(size_of_rows)

    def append(self, result: Result) -> None:
        """Write the text of a result; see `Lines.append`."""
        size = self._rows._size
        self._rows._append(_row_line(result.row.result_id, result.error is not None))
        try:
            self._append(text_line(result))
        except BaseException:
            self._rows._cut(size)
            raise

    def sync(self) -> None:
        """Have the disk hold what was written."""
        self._rows.sync()
        super().sync()

    def close(self) -> None:
        """Sync it, and let others write."""
        try:
            self._rows.close()
        finally:
            super().close()


def _row_line(result_id: bytes, has_failed: bool) -> bytes:
    """What `Lines.recover` reads back as the same."""
    error = FAILED_ROW if has_failed else ANSWERED
    return b'{"_key": "%b"%b' % (result_id.hex().encode(), error)


def text_line(result: Result) -> bytes:
    """The generated text of a result on one line."""
    text = result.answer()["generated_text"] or ""
    for plain, escaped in (("\\", "\\\\"), ("\n", "\\n"), ("\r", "\\r")):
        text = text.replace(plain, escaped)
    return text.encode(errors="replace") + b"\n"


def temporary_path(path: Path) -> Path:
    """Where a file is written that is to take the place of another: under a name of ours."""
    return path.with_name(f".{path.name}.nanovllm.tmp")


def _open_locked(path: Path) -> int:
    """The file for appending, which nobody else may open so until it is closed."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
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
        ValueError: if the system has no such locks.
    """
    try:
        import fcntl
    except ImportError:
        raise ValueError(
            f"{path} must be written on Linux or macOS, got a system without file locks (fcntl): "
            "leave the output out, and keep what the command prints"
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
        logger.warning("%s cannot be locked (%s): start no other job on it", path, error)


def sync_directory(path: Path) -> None:
    """Have the disk hold the names of a directory."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
