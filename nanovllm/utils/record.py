"""`Record` and `Row`: the common abilities of all outputs, beside their fields."""

import math
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from typing import Any, ClassVar, TypeVar

from typing_extensions import dataclass_transform

R = TypeVar("R", bound="Record")
SHORT = reprlib.Repr()
SHORT.maxstring = 60
MAX_RECORDS = 3  # records of a list shown in a repr


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def record(cls: type[R]) -> type[R]:
    """Make a frozen dataclass of a subclass of `Record`."""
    made: Any = dataclass(frozen=True, repr=False)(cls)
    made._fields = fields(made)
    if issubclass(cls, Row):
        # By this mark pandas before 3.1 recognises dataclasses, and makes columns of their fields.
        # The functions `replace` and `asdict` of dataclasses need it, too: use `to_dict`.
        del made.__dataclass_fields__
    return made


class Record:
    """A base class with `to_dict` and a short repr. The decorator `record` makes its subclasses."""

    _fields: ClassVar[tuple[Field[Any], ...]]

    @classmethod
    def of(cls: type[R], values: dict[str, Any]) -> R:
        """Make a record of its fields by name; those with a default may be left out.

        For records made by the thousand each second: the constructor of a frozen dataclass is three
        times as slow.
        """
        made = object.__new__(cls)
        vars(made).update(values)
        return made

    def to_dict(self) -> dict[str, Any]:
        """All fields as dictionaries, lists, strings, numbers and None, the types of JSON, which
        lacks infinity: the log-probability -inf, of a token that could not come, is None.

        A place of `TokenLogprobs` becomes a list of its tokens, each a dictionary with its
        `token_id`: keys in JSON are strings. `json.dumps` accepts the result, but not the output
        itself, since it knows no mapping other than `dict`; for outputs inside something else,
        pass it `default=lambda output: output.to_dict()`.
        """
        return {each.name: _plain(getattr(self, each.name)) for each in self._fields}

    def __repr__(self) -> str:
        values = {each.name: getattr(self, each.name, None) for each in self._fields if each.repr}
        shown = [f"{name}={_short(value)}" for name, value in values.items() if value is not None]
        return f"{type(self).__name__}({', '.join(shown)})"


class Row(Record, Mapping[str, Any]):
    """A record that is a row of a table: `pandas.DataFrame(outputs)` has its keys as columns."""

    def _row(self) -> dict[str, Any]:
        """The values by key."""
        raise NotImplementedError

    def __getitem__(self, key: str) -> Any:
        row = self._row()
        if key not in row:
            raise KeyError(f"{key!r}; the keys are {', '.join(row)}")
        return row[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._row())

    def __len__(self) -> int:
        return len(self._row())


def _plain(value: Any) -> Any:
    """The value of a field in JSON's types."""
    if isinstance(value, Record):
        return value.to_dict()
    if isinstance(value, dict):  # a place of TokenLogprobs
        return [{"token_id": token, **item.to_dict()} for token, item in value.items()]
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _short(value: Any) -> str:
    """A shortened text, the first records of a list, or the length of another list."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        records = [repr(item) for item in value[:MAX_RECORDS] if isinstance(item, Record)]
        if not records:
            return f"<{len(value)} items>"
        if len(value) > len(records):
            records.append(f"<{len(value) - len(records)} more>")
        return f"[{', '.join(records)}]"
    if isinstance(value, Record):
        return repr(value)
    return SHORT.repr(str(value) if isinstance(value, str) else value)  # it goes by exact types
