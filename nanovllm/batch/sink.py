"""`ResumableSink`: an output to which the same job returns until all of its rows are finished.

Beside the output stands `OUTPUT.job.json`, which identifies the job that made it: a job with
another model or other parameters is refused. It is a file of its own so that the output has results
only, for readers that expect a row on each line. It is written under another name, and renamed,
before the first result. A row that has changed under its `custom_id` is refused as well: a result
carries a hash of the row that it was made of.

Whenever the process is killed, the output holds whole results, each row at most once, and the rows
without one are computed next time. Lines are written as they come, and synced to disk after ten
seconds; Parquet files are written when they are full, or after a minute. No clock does either:
`write` and `tick` look whether it is time, so a loop that may wait long for the next result calls
`tick` in between.
"""

import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from typing_extensions import Self

from nanovllm.batch.identity import differences, with_defaults
from nanovllm.batch.lines import Lines, sync_directory, temporary_path
from nanovllm.batch.parts import Parts
from nanovllm.batch.reading import format_of
from nanovllm.batch.results import Result
from nanovllm.batch.rows import CONTENT_BYTES, KEY_BYTES, Row, as_rows
from nanovllm.utils.checks import check_choice

UNKNOWN = bytes(CONTENT_BYTES)  # content of a row whose key covers it, or of an older result
OUTPUT_FORMATS = ("jsonl", "parquet", "text")  # text: in a stream only
STORES: dict[str, Callable[[Path], Lines | Parts]] = {"jsonl": Lines, "parquet": Parts}


class ResumableSink:
    """A file or directory of results. Use it as a context manager, or call `close`.

    Args:
        path: path of the output; for Parquet a directory of files. A symbolic link is followed.
        job: values that the results depend on beside the rows, in JSON's types, from
            `describe_job`. An output that was begun with another job is refused.
        output_format: "jsonl" or "parquet"; None: by the name.
        retry_errors: whether to remove results that carry an error from the output, so that their
            rows are computed again.

    Attributes:
        num_finished: number of results in the output.
        num_errors: number of those that carry an error.

    Raises:
        ValueError: if the output is text, not one of a job, or belongs to another job.
        BlockingIOError: if another process writes to it.
        OSError: if it cannot be read or written.
    """

    def __init__(
        self,
        path: str | Path,
        job: Mapping[str, Any] | None = None,
        *,
        output_format: str | None = None,
        retry_errors: bool = False,
    ) -> None:
        self.path = Path(os.path.realpath(path))
        kind = format_of(path, output_format, "output_format", OUTPUT_FORMATS)
        if kind == "text":
            raise ValueError(
                f"`output_format` must be jsonl or parquet for a file, got text for {str(path)!r}: "
                "write JSON lines, with the text in `generated_text`, or leave out the output and "
                "redirect the standard output of --output-format text"
            )
        self._store = STORES[kind](self.path)
        try:
            self._check_job({**(job or {}), "output_format": kind})
            self._recover()
            if retry_errors and self.num_errors:
                self._store.drop(lambda _, has_failed: not has_failed)
                self._recover()
        except BaseException:
            self._store.close()
            raise

    def _check_job(self, job: dict[str, Any]) -> None:
        try:
            job = json.loads(json.dumps(job, allow_nan=False))  # NaN would differ from itself
        except (TypeError, ValueError) as error:
            raise ValueError(f"`job` must be representable in JSON, got {job!r}: {error}") from None
        file = self.path.with_name(f"{self.path.name}.job.json")
        if self._store.is_empty():
            new = temporary_path(file)
            with new.open("w", encoding="utf-8") as stream:
                json.dump(job, stream, indent=1)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(new, file)
            sync_directory(file.parent)
            return
        if not file.exists():
            raise ValueError(
                f"{self.path} already exists and is not the output of a job (there is no "
                f"{file}): choose another output, or remove it"
            )
        try:
            old = json.loads(file.read_text("utf-8"))
        except ValueError as error:
            raise ValueError(
                f"{file} must be JSON: {error}; remove it with its output, or choose another output"
            ) from None
        if changes := [*differences(with_defaults(old, job), job)]:
            raise ValueError(
                f"{self.path} was begun by another job: {'; '.join(changes)}; choose another "
                "output, or pass the same values again"
            )

    def _recover(self) -> None:
        """Read back which rows are finished."""
        self._found: dict[bytes, bytes] = {}  # contents by the keys of rows
        self._written: set[bytes] = set()  # keys of rows
        self.num_finished = self.num_errors = self._num_met = 0
        self._knows_contents = False
        for result_id, has_failed in self._store.recover():
            key, content = result_id[:KEY_BYTES], result_id[KEY_BYTES:] or UNKNOWN
            if key in self._found:
                raise ValueError(f"{self.path} must have a row once, got {key.hex()} twice")
            self._found[key] = content
            self.num_finished += 1
            self.num_errors += has_failed
            self._knows_contents |= content != UNKNOWN

    def unfinished(self, rows: Iterable[Row | Mapping[str, Any] | str]) -> Iterator[Row]:
        """The rows of a job, in the form for `run`, without those that are finished.

        Raises:
            ValueError: at a finished row that has changed under its `custom_id`.
        """
        self._num_met = 0
        for row in as_rows(rows):
            if row.key in self._found:
                self._check_content(row)
                self._num_met += 1
            elif row.key not in self._written:
                yield row

    def check(self, rows: Iterable[Row | Mapping[str, Any] | str]) -> None:
        """Look for changed rows before any row is computed: `unfinished` meets them only in their
        order. Reads the rows to their end, if there may be changed ones.

        Raises:
            ValueError: as `unfinished`.
        """
        if self._knows_contents:
            deque(self.unfinished(rows), maxlen=0)

    def drop_changed(self, rows: Iterable[Row | Mapping[str, Any] | str]) -> int:
        """Remove the results of rows that have changed under their `custom_id` from the output, so
        that they are computed again. Returns their number. To be called before `write`.
        """
        changed: set[bytes] = set()
        if self._knows_contents:
            changed = {row.key for row in as_rows(rows) if self._has_changed(row)}
        if changed:
            self._store.drop(lambda result_id, _: result_id[:KEY_BYTES] not in changed)
            self._recover()
        return len(changed)

    def _has_changed(self, row: Row) -> bool:
        """Whether a row has changed since its result. False for a result without a content hash."""
        if not row.content or row.key not in self._found:
            return False
        return self._found[row.key] not in (UNKNOWN, row.content)

    def _check_content(self, row: Row) -> None:
        if self._has_changed(row):
            raise ValueError(
                f"row {row.number} (counting from 0) must be unchanged since its result in "
                f"{self.path}, got a changed one under the `custom_id` {row.custom_id!r}: choose "
                "another output, or recompute changed rows: --recompute-changed, `drop_changed`"
            )

    @property
    def num_strangers(self) -> int:
        """Number of results whose rows `unfinished` has not met: the input has changed."""
        return len(self._found) - self._num_met

    def write(self, result: Result) -> None:
        """Add a result.

        Raises:
            OSError: if it cannot be written. The results before it are kept.
            ValueError: if the output has one for this row.
        """
        key = result.row.key
        if key in self._found or key in self._written:
            raise ValueError(f"row {result.row.number} must be written once, got it again")
        self._store.append(result)
        self._written.add(key)
        self.num_finished += 1
        self.num_errors += result.error is not None
        self.tick()

    def tick(self) -> None:
        """Sync to disk, or write, whatever has waited long enough.

        Raises:
            OSError: if it cannot be written.
        """
        self._store.tick()

    def close(self) -> None:
        """Write and sync everything, and let others write."""
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class StreamSink:
    """A stream of results that no later run returns to: standard output, say.

    Args:
        file: file open for writing bytes, which stays open.
        output_format: "jsonl" or "text", a line for each text; only `ordered` results show whose.

    Attributes:
        num_finished, num_errors, num_strangers: counts, as in `ResumableSink`.
    """

    num_strangers = 0

    def __init__(self, file: IO[bytes], output_format: str = "jsonl") -> None:
        check_choice("output_format", output_format, ("jsonl", "text"))
        self._file, self._is_text = file, output_format == "text"
        self.num_finished = self.num_errors = 0

    def unfinished(self, rows: Iterable[Row | Mapping[str, Any] | str]) -> Iterator[Row]:
        """All rows."""
        return as_rows(rows)

    def write(self, result: Result) -> None:
        """Write a line at once: a reader may wait for it."""
        self._file.write(result.to_text_line() if self._is_text else result.to_line())
        self._file.flush()
        self.num_finished += 1
        self.num_errors += result.error is not None

    def tick(self) -> None:
        """Do nothing: no result waits."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass
