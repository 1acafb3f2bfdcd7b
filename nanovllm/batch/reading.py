"""`read_rows`: the rows of a file, one after another, in bounded memory.

Formats: "jsonl" (an object on each line; the first one shows whether all are requests in OpenAI's
batch format, and "openai" says so), "parquet" (a file, or a directory of them in the order of their
names) and "text" (a prompt on each line). Blank lines are not rows, and a byte order mark is
skipped. A line that is not UTF-8, not JSON or not an object is a row that carries an error.
"""

import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from nanovllm.batch import openai_batch
from nanovllm.batch.rows import Row, make_row, refuse_doubles, row_of_values
from nanovllm.utils.checks import check_choice

INPUT_FORMATS = ("jsonl", "openai", "parquet", "text")
SUFFIXES = {
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "jsonl"),
    **dict.fromkeys((".parquet", ".pq"), "parquet"),
    **dict.fromkeys((".txt", ".text"), "text"),
}
STANDARD = "-"  # standard input or output
BOM = b"\xef\xbb\xbf"
COUNTED_BYTES = 1 << 30  # lines of a longer file are not counted ahead


def format_of(path: str | Path, given: str | None, name: str, formats: tuple[str, ...]) -> str:
    """The format of a file: the one given, else by its name; JSON lines for standard input/output.

    Args:
        path: path of the file.
        given: name of the format, or None.
        name: name of the option in errors.
        formats: names of all formats.
    """
    if given is not None:
        check_choice(name, given, formats)
        return given
    if str(path) == STANDARD:
        return "jsonl"
    found = SUFFIXES.get(Path(path).suffix.lower())
    if Path(path).is_dir():
        if found not in (None, "parquet"):
            raise ValueError(
                f"`{name}` must be given for {str(path)!r}, a directory with the name of a file: "
                "pass parquet, or another path"
            )
        return "parquet"
    if found is None:
        raise ValueError(
            f"`{name}` must be given for a file with a suffix other than {', '.join(SUFFIXES)}, "
            f"got {str(path)!r}: pass one of {', '.join(formats)}"
        )
    return found


def check_shard(shard: tuple[int, int]) -> None:
    """ValueError unless `shard` is the number of a part, from 1, and the number of parts."""
    part, parts = shard
    if not 1 <= part <= parts:
        raise ValueError(f"`shard` must be I/N with I in 1..N, got {part}/{parts}")


def read_rows(
    source: str | Path | IO[bytes],
    input_format: str | None = None,
    *,
    shard: tuple[int, int] = (1, 1),
) -> Iterator[Row]:
    """The rows of a file.

    Args:
        source: path of the file, "-" for standard input, or a file open for reading bytes.
        input_format: one of `INPUT_FORMATS`; None: by the name.
        shard: pair (i, n) that selects each n-th row, beginning with the i-th, counted from 1.

    Yields:
        The rows in their order.

    Raises:
        ValueError: at once, for an unknown format.
        OSError: at once, if the file cannot be opened, and later, if it cannot be read.
    """
    check_shard(shard)
    if isinstance(source, (str, Path)):
        kind = format_of(source, input_format, "input_format", INPUT_FORMATS)
    else:
        kind = input_format or "jsonl"
        check_choice("input_format", kind, INPUT_FORMATS)
    if kind == "parquet":
        rows = _parquet_rows(open_parquet(source), shard)
    else:
        if isinstance(source, (str, Path)):
            is_standard = str(source) == STANDARD
            source = _standard_input() if is_standard else open(source, "rb")  # noqa: SIM115
        rows = _text_rows(source, shard) if kind == "text" else _json_rows(source, shard, kind)
    return refuse_doubles(rows)


def _standard_input() -> IO[bytes]:
    """Standard input with its own buffer: with `sys.stdin`'s, a waiting thread would block exit."""
    return open(0, "rb", closefd=False)


def _lines(file: IO[bytes], shard: tuple[int, int]) -> Iterator[tuple[int, bytes]]:
    """The lines of a shard that are not blank, with their numbers among all such lines."""
    part, parts = shard
    number = 0
    with file:
        for i, line in enumerate(file):
            content = (line.removeprefix(BOM) if i == 0 else line).rstrip(b"\r\n")
            if not content.strip():
                continue
            if number % parts == part - 1:
                yield number, content
            number += 1


def _text_rows(file: IO[bytes], shard: tuple[int, int]) -> Iterator[Row]:
    for number, content in _lines(file, shard):
        try:
            yield make_row(number, content, {"prompt": content.decode()})
        except UnicodeDecodeError as error:
            yield make_row(number, content, None, f"line must be UTF-8, got {_shown(error)}")


def _json_rows(file: IO[bytes], shard: tuple[int, int], kind: str) -> Iterator[Row]:
    is_openai = True if kind == "openai" else None  # None: the first object decides
    for number, content in _lines(file, shard):
        values, problem = None, None
        try:
            values = json.loads(content.decode())
        except UnicodeDecodeError as error:
            problem = f"line must be UTF-8, got {_shown(error)}"
        except (ValueError, RecursionError) as error:
            problem = f"line must be JSON: {error}"
            if is_openai is None:
                problem += " (for lines of text pass the input format text)"
        if is_openai is None and isinstance(values, dict):
            is_openai = openai_batch.is_request(values)
        yield make_row(number, content, values, problem, bool(is_openai))


def _shown(error: UnicodeDecodeError) -> str:
    return f"byte 0x{error.object[error.start]:02x} at position {error.start}"


# -- Parquet ------------------------------------------------------------------------------------


def import_pyarrow() -> tuple[Any, Any]:
    """pyarrow and its module for Parquet; ValueError if it is not installed."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ValueError(
            'Parquet needs pyarrow, which is not installed: pip install "pyarrow>=14"'
        ) from None
    return pyarrow, pyarrow.parquet


def parquet_files(path: Path) -> list[Path]:
    """The file itself, or the files of a directory."""
    if not path.is_dir():
        return [path]
    files = sorted(file for file in path.glob("*.parquet") if not file.name.startswith((".", "_")))
    if not files:
        raise ValueError(f"{path} must have *.parquet files, got none")
    return files


def open_parquet(source: str | Path | IO[bytes]) -> list[Any]:
    """The files, opened by pyarrow."""
    pyarrow, parquet = import_pyarrow()
    files: list[Any] = [source]
    if isinstance(source, (str, Path)):
        if str(source) == STANDARD:  # Parquet is read from its end
            files = [tempfile.TemporaryFile()]  # noqa: SIM115
            shutil.copyfileobj(_standard_input(), files[0])
        else:
            files = [*map(str, parquet_files(Path(source)))]
    try:
        return [parquet.ParquetFile(file) for file in files]
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{source} cannot be read as Parquet: {error}") from None


def _parquet_rows(files: Iterable[Any], shard: tuple[int, int]) -> Iterator[Row]:
    part, parts = shard
    number = 0
    for batch in _batches(files):
        for place in range((part - 1 - number) % parts, batch.num_rows, parts):
            [values] = batch.slice(place, 1).to_pylist()
            yield row_of_values(number + place, values)
        number += batch.num_rows


def _batches(files: Iterable[Any]) -> Iterator[Any]:
    pyarrow, _ = import_pyarrow()
    for file in files:
        with file:
            try:
                yield from file.iter_batches(batch_size=1024)
            except pyarrow.ArrowInvalid as error:
                raise OSError(f"the input cannot be read as Parquet: {error}") from None


def count_rows(path: str | Path, input_format: str, shard: tuple[int, int]) -> int | None:
    """The number of rows that `read_rows` yields; None if it is unknown before they are read."""
    if str(path) == STANDARD or not (Path(path).is_file() or Path(path).is_dir()):
        return None
    part, parts = shard
    if input_format == "parquet":
        total = sum(file.metadata.num_rows for file in open_parquet(path))
    elif Path(path).stat().st_size > COUNTED_BYTES:
        return None
    else:
        with Path(path).open("rb") as file:
            total = sum(1 for line in file if line.strip())
    return len(range(part - 1, total, parts))
