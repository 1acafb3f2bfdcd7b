"""Checks of callers' arguments: one sentence that names the argument, the rule and the value."""

import dataclasses
import math
import numbers
import reprlib
from collections.abc import Sequence
from typing import Any, TypeGuard, TypeVar

T = TypeVar("T")
SHOWN = 8  # names listed in an error
PLAIN = {int, float, bool, str, tuple, dict, type(None)}  # most values, and checked fast

_SHORT = reprlib.Repr()
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxset = _SHORT.maxdict = SHOWN
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 500  # characters
_SHORT.maxlevel = 4
shown = _SHORT.repr  # a value for an error, in part if it is large


def check_int(name: str, value: Any, minimum: int, maximum: int | None = None) -> None:
    """Raise unless `value` is an integer (not a bool) in `minimum`..`maximum`."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"`{name}` must be an integer, got {shown(value)}")
    number = int(value)
    if number < minimum or (maximum is not None and number > maximum):
        rule = f"at least {minimum}" if maximum is None else f"between {minimum} and {maximum}"
        raise ValueError(f"`{name}` must be {rule}, got {shown(value)}")


def check_float(
    name: str, value: Any, minimum: float, maximum: float = math.inf, rule: str | None = None
) -> None:
    """Raise unless `value` is a finite real number (not a bool) in `minimum`..`maximum`.

    `rule` is the rule in words, if the bounds alone would say too little.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"`{name}` must be a number, got {shown(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or not minimum <= number <= maximum:
        bounds = f" and {minimum:g} to {maximum:g}"
        if maximum == math.inf:
            bounds = "" if minimum == -math.inf else f" and at least {minimum:g}"
        raise ValueError(f"`{name}` must be {rule or 'finite' + bounds}, got {shown(value)}")


def check_bool(name: str, value: Any) -> None:
    """Raise unless `value` is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"`{name}` must be True or False, got {shown(value)}")


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raise unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"`{name}` must be one of {', '.join(choices)}, got {shown(value)}")


def listed(names: Sequence[str]) -> str:
    """Names for an error, the first of many."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def is_list(value: Any) -> TypeGuard[Sequence[Any]]:
    """Whether a caller's value is a list, or may stand for one."""
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray))


def is_number_or_none(value: Any) -> bool:
    """Whether a value is a number or None."""
    return isinstance(value, (numbers.Real, type(None)))


def plain_numbers(instance: Any) -> None:
    """Turn the numbers of a frozen dataclass into Python's own: numpy's overflow in products."""
    for field in dataclasses.fields(instance):
        value = getattr(instance, field.name)
        if type(value) in PLAIN:
            continue
        if isinstance(value, numbers.Real) and not isinstance(value, bool):
            number = int(value) if isinstance(value, numbers.Integral) else float(value)
            object.__setattr__(instance, field.name, number)
