"""Batches of rows in the forms of data frames: columns of numpy arrays, pandas, Arrow.

A library is imported here only if the caller has imported it: without that, a batch cannot be one
of its objects.
"""

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any, TypeVar

Batch = TypeVar("Batch")  # dict[str, np.ndarray], pandas.DataFrame, pyarrow.Table or RecordBatch
INTEGERS = ("num_prompt_tokens", "num_generated_tokens")  # added columns; the others are strings


def columns_of(batch: Any) -> list[str]:
    """The names of a batch's columns.

    Raises:
        TypeError: if it is not a batch.
    """
    if isinstance(batch, Mapping):
        return list(batch)
    if _is_of(batch, "pandas", "DataFrame"):
        return list(batch.columns)
    if _is_of(batch, "pyarrow", "Table") or _is_of(batch, "pyarrow", "RecordBatch"):
        return list(batch.schema.names)
    raise TypeError(
        "a batch must be a dictionary of columns, a pandas.DataFrame, a pyarrow.Table or a "
        f"pyarrow.RecordBatch, got {type(batch).__name__}"
    )


def read_column(batch: Any, name: str) -> list[Any]:
    """A column as Python's objects, with None for missing values."""
    column = batch[name]
    if _is_of(batch, "pandas", "DataFrame"):
        column = column.astype(object).where(column.notna(), None)
    return _plain(column.to_pylist() if hasattr(column, "to_pylist") else column)


def read_images(batch: Any, name: str) -> list[Any]:
    """A column of images, or of lists of them, with None for missing ones. Arrays stay arrays.

    Raises:
        TypeError: if it has lists of numbers.
    """
    column = batch[name]
    chunks = getattr(column, "chunks", [column])  # of Arrow
    items = [item for chunk in chunks for item in _items(chunk)]
    if any(map(_is_of_numbers, items)):
        kind = f" ({column.type})" if hasattr(column, "type") else ""
        raise TypeError(
            f"`image_column` must hold paths, bytes, arrays or PIL images, got lists of numbers in "
            f"{name!r}{kind}: pass arrays of uint8, in Arrow a FixedShapeTensorArray"
        )
    return [_image(item) for item in items]


def _items(chunk: Any) -> Iterable[Any]:
    """The values of a column, or of a part of one."""
    if hasattr(chunk, "to_numpy_ndarray"):  # tensors of Arrow
        arrays = iter(chunk.drop_null().to_numpy_ndarray())
        return [next(arrays) if is_valid else None for is_valid in chunk.is_valid().to_pylist()]
    return chunk.to_pylist() if hasattr(chunk, "to_pylist") else chunk


def _is_of_numbers(value: Any) -> bool:
    is_list = isinstance(value, list | tuple)
    while isinstance(value, list | tuple) and value:
        value = value[0]
    return is_list and isinstance(value, Real) and not math.isnan(value)  # that of pandas


def _image(value: Any) -> Any:
    is_of_objects = getattr(getattr(value, "dtype", None), "kind", "") == "O"
    if isinstance(value, list | tuple) or is_of_objects:
        return [_image(item) for item in value]
    is_missing = isinstance(value, float)  # NaN of pandas
    return None if is_missing or type(value).__name__ in ("NAType", "NaTType") else value


def with_columns(batch: Batch, added: Mapping[str, Sequence[Any]]) -> Batch:
    """A batch of the same kind with columns added, or replaced.

    In pandas and Arrow their types do not depend on the values: strings, and integers, that may
    be missing. In numpy, columns of strings, or with missing values, are arrays of objects.
    """
    table: Any = batch
    if isinstance(table, Mapping):
        arrays = {name: _array(name, values) for name, values in added.items()}
        return {**table, **arrays}  # type: ignore[return-value]
    if _is_of(table, "pandas", "DataFrame"):
        pandas = sys.modules["pandas"]
        types = {name: "Int64" if name in INTEGERS else "string" for name in added}
        return table.assign(**{n: pandas.array(added[n], dtype=types[n]) for n in added})
    pyarrow: Any = sys.modules["pyarrow"]
    columns = {field: table.column(field.name) for field in table.schema if field.name not in added}
    for name, values in added.items():
        kind = pyarrow.int64() if name in INTEGERS else pyarrow.string()
        columns[pyarrow.field(name, kind)] = pyarrow.array(values, type=kind)
    schema = pyarrow.schema(list(columns), metadata=table.schema.metadata)
    return type(table).from_arrays(list(columns.values()), schema=schema)


def _is_of(value: Any, module: str, name: str) -> bool:
    return module in sys.modules and isinstance(value, getattr(sys.modules[module], name))


def _plain(value: Any) -> Any:
    """Python's own lists, dictionaries and numbers in place of numpy's."""
    if hasattr(value, "tolist"):  # arrays and numbers of numpy
        value = value.tolist()
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, str | bytes):
        return [_plain(item) for item in value]
    return value


def _array(name: str, values: Sequence[Any]) -> Any:
    import numpy as np

    is_whole = name in INTEGERS and None not in values
    return np.array(values, dtype=np.int64 if is_whole else object)
