"""Results as a directory of Parquet files, each whole.

A file is written under a name that readers skip, synced, and renamed when it is complete. Its rows
are those of the last minute, or some thousands: rows that are not in a file yet are computed again
after a kill. `pyarrow.parquet.read_table`, pandas, DuckDB, Spark and others read the directory as a
table.

So all files have the same columns. Lists and objects are JSON text. Other columns keep a type of
their own as long as it holds every value exactly; otherwise (a text after numbers, 2.5 after
integers) the column becomes text, in which texts stand as they are and other values as JSON. For
such a column, and for one that appears later, the earlier files are rewritten.
"""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from nanovllm.batch.lines import lock, sync_directory
from nanovllm.batch.reading import import_pyarrow
from nanovllm.batch.results import Result
from nanovllm.utils.as_json import as_json

PART_ROWS, PART_SECONDS = 4096, 60.0
TEMPORARY = ".part.nanovllm.tmp"
TYPES = {  # types of our own columns, which may have no values in the first rows
    **dict.fromkeys(("_key", "generated_text", "finish_reason", "error"), "string"),
    **dict.fromkeys(("_row", "num_prompt_tokens", "num_generated_tokens"), "int64"),
}


class Parts:
    """A directory of results.

    The columns are the fields of `Result.to_dict`. Requests in OpenAI's format have `_key`, too,
    and `error` is text as for other rows.

    Args:
        path: path of the directory, which is made if it does not exist.

    Raises:
        BlockingIOError: if another process writes to it.
        ValueError: if it is not a directory, or pyarrow is missing.
    """

    def __init__(self, path: Path) -> None:
        self._pyarrow, self._parquet = import_pyarrow()
        if path.exists() and not path.is_dir():
            raise ValueError(f"{path} must be a directory of Parquet files, got a file")
        path.mkdir(exist_ok=True)
        self.path = path
        self._fd = os.open(path, os.O_RDONLY)
        try:
            lock(self._fd, path)
        except BaseException:
            os.close(self._fd)
            raise
        (path / TEMPORARY).unlink(missing_ok=True)  # left by a process that was killed
        self._schema: Any = None  # schema of the last file, which all files get
        self._waiting: list[dict[str, Any]] = []
        self._due = 0.0

    def _files(self) -> list[Path]:
        return sorted(self.path.glob("part-*.parquet"))

    def is_empty(self) -> bool:
        """Whether the directory has no files."""
        return not any(self.path.iterdir())

    def recover(self) -> Iterator[tuple[bytes, bool]]:
        """The id of each result (`Row.result_id`), and whether it carries an error.

        Raises:
            ValueError: for a file that does not belong to this job.
        """
        self._schema = None
        for file in self._files():
            try:
                with self._parquet.ParquetFile(file) as part:
                    self._schema = part.schema_arrow
                    for batch in part.iter_batches(columns=["_key", "error"]):
                        keys, errors = batch.column("_key"), batch.column("error")
                        for key, error in zip(keys, errors, strict=True):
                            yield bytes.fromhex(key.as_py()), error.is_valid
            except (self._pyarrow.ArrowInvalid, KeyError) as error:
                raise ValueError(
                    f"{file} must hold results of this job: {error}; delete it, and its rows are "
                    "computed again"
                ) from None
        self._conform()  # a kill may have interrupted it

    def append(self, result: Result) -> None:
        """Keep a result for the next file.

        Raises:
            OSError: if the file cannot be written.
        """
        if not self._waiting:
            self._due = time.monotonic() + PART_SECONDS
        values = {"_key": result.row.result_id.hex(), **result.to_dict(), "error": result.error}
        self._waiting.append({_text(name): value for name, value in values.items()})
        if len(self._waiting) >= PART_ROWS:
            self.flush()

    def tick(self) -> None:
        """Write a file if results have waited for a minute."""
        if self._waiting and time.monotonic() >= self._due:
            self.flush()

    def flush(self) -> None:
        """Write the waiting results to a file."""
        waiting, self._waiting = self._waiting, []  # never written twice, whatever interrupts it
        if not waiting:
            return
        files, before = self._files(), self._schema
        number = int(files[-1].stem.removeprefix("part-")) + 1 if files else 0
        kinds = kinds_of(before)
        names = dict.fromkeys([*kinds, *(name for row in waiting for name in row)])
        kinds = {n: self._pyarrow.type_for_alias(kind) for n, kind in TYPES.items()} | kinds
        table = self._table({name: [row.get(name) for row in waiting] for name in names}, kinds)
        self._write(table, self.path / f"part-{number:06}.parquet")
        self._schema = table.schema
        if before is not None and before != self._schema:
            self._conform()

    def _table(self, columns: dict[str, list[Any]], kinds: dict[str, Any]) -> Any:
        """A table of these values, with these types as far as they fit."""
        arrays = {n: make_column(self._pyarrow, columns[n], kinds.get(n)) for n in columns}
        return self._pyarrow.table(arrays)

    def _conform(self) -> None:
        """Give all files the columns and types of the last one."""
        for file in self._files():
            with self._parquet.ParquetFile(file) as part:
                if part.schema_arrow == self._schema:
                    continue
                values = part.read().to_pydict()
                empty = [None] * part.metadata.num_rows
            kinds = kinds_of(self._schema)
            self._write(self._table({n: values.get(n, empty) for n in kinds}, kinds), file)

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

    def drop(self, is_wanted: Callable[[bytes, bool], bool]) -> None:
        """Remove results, file by file, so that their rows are unfinished; see `Lines.drop`."""
        for file in self._files():
            table = self._parquet.ParquetFile(file).read()
            known = zip(table.column("_key"), table.column("error"), strict=True)
            wanted = [is_wanted(bytes.fromhex(key.as_py()), e.is_valid) for key, e in known]
            if all(wanted):
                continue
            kept = table.filter(self._pyarrow.array(wanted))
            if kept.num_rows:
                self._write(kept, file)
            else:
                file.unlink()
                sync_directory(self.path)

    def close(self) -> None:
        """Write the waiting results, and let others write."""
        try:
            self.flush()
        finally:
            os.close(self._fd)


def kinds_of(schema: Any) -> dict[str, Any]:
    """The types of columns by name; empty for None."""
    return {} if schema is None else {field.name: field.type for field in schema}


def make_column(pyarrow: Any, values: list[Any], kind: Any) -> Any:
    """Values as an array from which they come back equal; as texts if no type holds them, or if
    lists or objects are among them.

    Args:
        pyarrow: module.
        values: values of the column; None: there is none.
        kind: wanted type; None, or the type of nulls: the type of the values.
    """
    types = pyarrow.types
    # Any error here means that no type holds them.
    with suppress(pyarrow.ArrowException, ValueError, TypeError, ArithmeticError):
        array = pyarrow.array(values)
        if kind is not None and not types.is_null(kind):
            array = array.cast(kind)
        if not types.is_nested(array.type) and all(map(_is_same, array.to_pylist(), values)):
            return array
    texts = [None if value is None else _text(value) for value in values]
    return pyarrow.array(texts, pyarrow.string())


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, bool) is not isinstance(other, bool):
        return False
    return bool(one == other or (one != one and other != other))  # noqa: PLR0124 (nan)


def _text(value: Any) -> str:
    """Text as it is, another value as JSON, and NaN by its name. Half characters (lone surrogates),
    which UTF-8 cannot encode, become escapes such as `\\ud800`.
    """
    if isinstance(value, str):
        text = value
    else:
        text = json.dumps(value) if isinstance(value, float) else as_json(value, ensure_ascii=False)
    return text.encode(errors="backslashreplace").decode()
