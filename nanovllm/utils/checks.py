"""Checks of what users pass in: one sentence that names the argument, the rule and the value."""

import dataclasses
import math
import numbers
from typing import Any


def check_int(name: str, value: Any, minimum: int, maximum: int | None = None) -> None:
    """Raise unless `value` is an integer (not a bool) in `minimum`..`maximum`."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"`{name}` must be an integer, got {value!r}")
    number = int(value)
    if number < minimum or (maximum is not None and number > maximum):
        rule = f"at least {minimum}" if maximum is None else f"between {minimum} and {maximum}"
        raise ValueError(f"`{name}` must be {rule}, got {value!r}")


def check_float(name: str, value: Any, minimum: float, maximum: float = math.inf) -> None:
    """Raise unless `value` is a finite real number (not a bool) in `minimum`..`maximum`."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"`{name}` must be a number, got {value!r}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or not minimum <= number <= maximum:
        rule = f" and {minimum:g} to {maximum:g}"
        if maximum == math.inf:
            rule = "" if minimum == -math.inf else f" and at least {minimum:g}"
        raise ValueError(f"`{name}` must be finite{rule}, got {value!r}")


def check_bool(name: str, value: Any) -> None:
    """Raise unless `value` is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"`{name}` must be True or False, got {value!r}")


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raise unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"`{name}` must be one of {', '.join(choices)}, got {value!r}")


def plain_numbers(instance: Any) -> None:
    """Make the numbers of a frozen dataclass Python's own: numpy's overflow in products."""
    for field in dataclasses.fields(instance):
        value = getattr(instance, field.name)
        if isinstance(value, numbers.Real) and not isinstance(value, bool):
            number = int(value) if isinstance(value, numbers.Integral) else float(value)
            object.__setattr__(instance, field.name, number)
