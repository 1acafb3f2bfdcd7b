"""`ResumableSink`: an output to which the same job returns until all of its rows are finished.

Beside the output stands `OUTPUT.job.json`, which identifies the job that made it: a job with
another model or other parameters is refused. It is a file of its own so that the output has results
only, for readers that expect a row on each line. It is written under another name, and renamed,
before the first result. Beside texts stands `OUTPUT.job.rows`, too: the rows that they belong to,
and which of them failed. A row that has changed under its `custom_id` is refused as well: a result
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

from nanovllm.batch.identity import differences
from nanovllm.batch.keys import KEY_BYTES, KeySet
from nanovllm.batch.lines import Lines, Texts, sync_directory, temporary_path, text_line
from nanovllm.batch.parts import Parts
from nanovllm.batch.reading import format_of
from nanovllm.batch.results import Result
from nanovllm.batch.rows import CONTENT_BYTES, Row, as_rows
from nanovllm.utils.checks import check_choice

UNKNOWN = bytes(CONTENT_BYTES)  # content of a row whose key covers it, or of an older result
OUTPUT_FORMATS = ("jsonl", "parquet", "text")
STORES: dict[str, Callable[[Path], Lines | Parts]] = {
    "jsonl": Lines,
    "parquet": Parts,
    "text": Texts,
}


class ResumableSink:
    """A file or directory of results. Use it as a context manager, or call `close`.

    Args:
        path: path of the output; for Parquet a directory of files. A symbolic link is followed.
        job: all that the results depend on beside the rows, in JSON's types, from `describe_job`.
            An output that was begun with another job is refused.
        output_format: "jsonl", "parquet" or "text"; None: by the name.
        retry_errors: whether to remove results that carry an error from the output, so that their
            rows are computed again.

    Attributes:
        num_finished: number of results in the output.
        num_errors: number of those that carry an error.
        ordered: whether results must come in the order of the rows.

    Raises:
        ValueError: if the output is not one of a job, or belongs to another job.
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
        self._store = STORES[kind](self.path)
        self.ordered = self._store.ordered
        self._order: deque[bytes] = deque()  # keys of rows, if results must come in their order
        try:
            if retry_errors and self.ordered:
                raise ValueError(
                    "`retry_errors` must be False for a text output, whose lines have fixed "
                    "places, got True: write JSON lines"
                )
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
                f"{self.path} already exists and is not the output of such a job (there is no "
                f"{file}): choose another output, or remove it"
            )
        try:
            old = json.loads(file.read_text("utf-8"))
        except ValueError as error:
            raise ValueError(
                f"{file} must be JSON: {error}; remove it with its output, or choose another output"
            ) from None
        if changes := [*differences(old, job)]:
            raise ValueError(
                f"{self.path} was begun by another job: {'; '.join(changes)}; choose another "
                "output, or pass the same again"
            )

    def _recover(self) -> None:
        """Read back which rows are finished."""
        self._found, self._written = KeySet(CONTENT_BYTES), KeySet()
        self.num_finished = self.num_errors = self._num_met = 0
        self._knows_contents = False
        for result_id, has_failed in self._store.recover():
            key, content = result_id[:KEY_BYTES], result_id[KEY_BYTES:] or UNKNOWN
            if not self._found.add(key, content):
                raise ValueError(f"{self.path} must have a row once, got {key.hex()} twice")
            self.num_finished += 1
            self.num_errors += has_failed
            self._knows_contents |= content != UNKNOWN

    def unfinished(self, rows: Iterable[Row | Mapping[str, Any] | str]) -> Iterator[Row]:
        """The rows of a job, in the form for `run`, without those that are finished.

        Raises:
            ValueError: at a finished row that has changed under its `custom_id`; for a text output,
                if the input has changed before its end.
        """
        self._num_met = 0
        self._order.clear()
        rows = as_rows(rows)
        if self.ordered:
            for number, (result_id, _) in enumerate(self._store.recover()):
                row = next(rows, None)
                if row is None or row.key != result_id[:KEY_BYTES]:
                    raise ValueError(
                        f"row {number} of the input must be that of line {number + 1} of "
                        f"{self.path}, got {'another' if row else 'none'}: choose another output"
                    )
                self._check_content(row)
            self._num_met = len(self._found)
        for row in rows:
            if row.key in self._found:
                self._check_content(row)
                self._num_met += 1
            elif row.key not in self._written:
                if self.ordered:
                    self._order.append(row.key)
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

        Raises:
            ValueError: for a text output.
        """
        if self.ordered:
            raise ValueError(
                "results cannot be removed from a text output, whose lines have fixed places: "
                "write JSON lines, or choose another output"
            )
        changed = KeySet()
        if self._knows_contents:
            for row in filter(self._has_changed, as_rows(rows)):
                changed.add(row.key)
        if len(changed):
            self._store.drop(lambda result_id, _: result_id[:KEY_BYTES] not in changed)
            self._recover()
        return len(changed)

    def _has_changed(self, row: Row) -> bool:
        """Whether a row has changed since its result. False for a result without a content hash."""
        if not row.content or row.key not in self._found:
            return False
        return self._found.value(row.key) not in (UNKNOWN, row.content)

    def _check_content(self, row: Row) -> None:
        if self._has_changed(row):
            remedy = "choose another output"
            if not self.ordered:
                remedy += ", or have such rows computed again: --recompute-changed, `drop_changed`"
            raise ValueError(
                f"row {row.number} (the first is 0) must be as it was when its result in "
                f"{self.path} was computed, got another under the `custom_id` {row.custom_id!r}: "
                f"{remedy}"
            )

    @property
    def num_strangers(self) -> int:
        """Number of results whose rows `unfinished` has not met: the input has changed."""
        return len(self._found) - self._num_met

    def write(self, result: Result) -> None:
        """Add a result.

        Raises:
            OSError: if it cannot be written. The results before it are kept.
            ValueError: if the output has one for this row; for a text output, if another row is
                next.
        """
        key = result.row.key
        if key in self._found or key in self._written:
            raise ValueError(f"row {result.row.number} must be written once, got it again")
        if self._order and key != self._order[0]:
            raise ValueError(
                f"results must come in the order of the rows in a text output, got row "
                f"{result.row.number} too early: call `run` with ordered=True"
            )
        self._store.append(result)
        if self._order:
            self._order.popleft()
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
        output_format: "jsonl" or "text".

    Attributes:
        num_finished, num_errors, num_strangers, ordered: counts and order, as in `ResumableSink`.
    """

    num_strangers = 0

    def __init__(self, file: IO[bytes], output_format: str = "jsonl") -> None:
        check_choice("output_format", output_format, ("jsonl", "text"))
        self._file, self.ordered = file, output_format == "text"
        self.num_finished = self.num_errors = 0

    def unfinished(self, rows: Iterable[Row | Mapping[str, Any] | str]) -> Iterator[Row]:
        """All rows."""
        return as_rows(rows)

    def write(self, result: Result) -> None:
        """Write a line at once: a reader may wait for it."""
        self._file.write(text_line(result) if self.ordered else result.to_line())
        self._file.flush()
        self.num_finished += 1
        self.num_errors += result.error is not None

    def tick(self) -> None:
        """Do nothing: no result waits."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass
