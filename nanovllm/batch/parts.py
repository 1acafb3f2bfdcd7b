"""Results as a directory of Parquet files, each whole.

A file is written under a name that readers skip, synced, and renamed when it is complete. Its rows
are those of the last minute, or some thousands: what is not in a file yet is computed again after a
kill. `pyarrow.parquet.read_table`, pandas, DuckDB, Spark and others read the directory as a table.
"""

import json
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nanovllm.batch.lines import lock, sync_directory
from nanovllm.batch.reading import import_pyarrow
from nanovllm.batch.results import Result

logger = logging.getLogger(__name__)

PART_ROWS, PART_SECONDS = 4096, 60.0
TEMPORARY = ".part.tmp"


class Parts:
    """A directory of results.

    Args:
        path: of the directory, which is made if it is not there.

    Raises:
        BlockingIOError: if another process writes to it.
        ValueError: if it is something else, or pyarrow is missing.
    """

    ordered = False
    can_retry = True

    def __init__(self, path: Path) -> None:
        self._pyarrow, self._parquet = import_pyarrow()
        if path.exists() and not path.is_dir():
            raise ValueError(f"{path} must be a directory, of Parquet files, got a file")
        path.mkdir(exist_ok=True)
        self.path = path
        self._fd = os.open(path, os.O_RDONLY)
        try:
            lock(self._fd, path)
        except BaseException:
            os.close(self._fd)
            raise
        (path / TEMPORARY).unlink(missing_ok=True)  # of a process that was killed
        self._schema: Any = None  # of the first part
        self._waiting: list[dict[str, Any]] = []
        self._due = 0.0

    def _files(self) -> list[Path]:
        return sorted(self.path.glob("part-*.parquet"))

    def is_empty(self) -> bool:
        """Whether there is no file in it."""
        return not any(self.path.iterdir())

    def recover(self) -> Iterator[tuple[bytes, bool]]:
        """The keys of its results, and whether they carry an error.

        Raises:
            ValueError: for a file that is none of this job.
        """
        for file in self._files():
            try:
                with self._parquet.ParquetFile(file) as part:
                    self._schema = self._schema or part.schema_arrow
                    for batch in part.iter_batches(columns=["_key", "error"]):
                        keys, errors = batch.column("_key"), batch.column("error")
                        for key, error in zip(keys, errors, strict=True):
                            yield bytes.fromhex(key.as_py()), error.is_valid
            except (self._pyarrow.ArrowInvalid, KeyError) as error:
                raise ValueError(
                    f"{file} must hold results of this job: {error}; delete it, and its rows are "
                    "computed again"
                ) from error

    def append(self, result: Result) -> None:
        """Keep a result for the next file.

        Raises:
            OSError: if the file cannot be written.
        """
        if not self._waiting:
            self._due = time.monotonic() + PART_SECONDS
        self._waiting.append(result.to_dict())
        if len(self._waiting) >= PART_ROWS or time.monotonic() >= self._due:
            self.flush()

    def sync(self) -> None:
        """Files are synced when they are complete."""

    def flush(self) -> None:
        """Write a file of what waits for one."""
        waiting, self._waiting = self._waiting, []  # never twice, whatever interrupts it
        if not waiting:
            return
        files = self._files()
        number = int(files[-1].stem.removeprefix("part-")) + 1 if files else 0
        table = make_table(self._pyarrow, waiting, self._schema)
        self._schema = self._schema or table.schema
        self._write(table, self.path / f"part-{number:06}.parquet")

    def _write(self, table: Any, path: Path) -> None:
        new = self.path / TEMPORARY
        try:
            with new.open("wb") as file:
                self._parquet.write_table(table, file, compression="zstd")
                file.flush()
                os.fsync(file.fileno())
            os.replace(new, path)
        except BaseException:
            new.unlink(missing_ok=True)
            raise
        sync_directory(self.path)

    def drop_failed(self) -> None:
        """Take out the results that carry an error, file by file, so that their rows are left."""
        for file in self._files():
            table = self._parquet.ParquetFile(file).read()
            errors = table.column("error")
            if errors.null_count == table.num_rows:
                continue
            kept = table.filter(errors.is_null())
            if kept.num_rows:
                self._write(kept, file)
            else:
                file.unlink()
                sync_directory(self.path)

    def close(self) -> None:
        """Write what waits, and let others write."""
        try:
            self.flush()
        finally:
            os.close(self._fd)


def make_table(pyarrow: Any, rows: list[dict[str, Any]], schema: Any) -> Any:
    """A table of these rows.

    Columns have the types of the first file where the values allow it, else those of the values,
    and values of mixed types are written as JSON.
    """
    known = {} if schema is None else {name: schema.field(name).type for name in schema.names}
    columns = [*dict.fromkeys([*known, *(name for row in rows for name in row)])]
    known |= {name: pyarrow.string() for name in ("generated_text", "finish_reason", "error")}
    known |= {name: pyarrow.int64() for name in ("num_prompt_tokens", "num_generated_tokens")}
    arrays = {}
    for name in columns:
        values = [row.get(name) for row in rows]
        arrays[name] = _array(pyarrow, name, values, known.get(name))
    return pyarrow.table(arrays)


def _array(pyarrow: Any, name: str, values: list[Any], kind: Any) -> Any:
    wrong = (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError, pyarrow.ArrowNotImplementedError)
    if kind is not None:
        try:
            return pyarrow.array(values, kind)
        except (*wrong, OverflowError):
            logger.warning("values of `%s` are of another type than before: %s", name, kind)
    try:
        array = pyarrow.array(values)
        # Nothing but nulls: most columns that have no values yet are texts.
        return array.cast(pyarrow.string()) if pyarrow.types.is_null(array.type) else array
    except (*wrong, OverflowError, UnicodeEncodeError):
        texts = [None if value is None else json.dumps(value, default=str) for value in values]
        return pyarrow.array(texts, pyarrow.string())
