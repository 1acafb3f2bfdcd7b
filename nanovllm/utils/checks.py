"""Checks of what users pass in: one sentence that names the argument, the rule and the value."""

import dataclasses
import difflib
import functools
import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


def check_int(name: str, value: Any, minimum: int, maximum: int | None = None) -> None:
    """Raise unless `value` is an integer (not a bool) in `minimum`..`maximum`."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"`{name}` must be an integer, got {value!r}")
    number = int(value)
    if number < minimum or (maximum is not None and number > maximum):
        rule = f"at least {minimum}" if maximum is None else f"between {minimum} and {maximum}"
        raise ValueError(f"`{name}` must be {rule}, got {value!r}")


def check_float(
    name: str, value: Any, minimum: float, maximum: float = math.inf, rule: str | None = None
) -> None:
    """Raise unless `value` is a finite real number (not a bool) in `minimum`..`maximum`.

    `rule` is the rule in words, where those of the numbers would say too little.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"`{name}` must be a number, got {value!r}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or not minimum <= number <= maximum:
        bounds = f" and {minimum:g} to {maximum:g}"
        if maximum == math.inf:
            bounds = "" if minimum == -math.inf else f" and at least {minimum:g}"
        raise ValueError(f"`{name}` must be {rule or 'finite' + bounds}, got {value!r}")


def check_bool(name: str, value: Any) -> None:
    """Raise unless `value` is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"`{name}` must be True or False, got {value!r}")


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raise unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"`{name}` must be one of {', '.join(choices)}, got {value!r}")


def check_names(
    owner: str, names: Iterable[str], known: Sequence[str], remedies: Mapping[str, str]
) -> None:
    """TypeError for a name that `owner` does not know, with its remedy or the nearest name."""
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean `{close[0]}`?" if close else f"options: {', '.join(known)}"
            raise TypeError(f"{owner}() has no option `{name}`; {remedies.get(name, hint)}")


def with_remedies(remedies: Mapping[str, str]) -> Callable[[type[T]], type[T]]:
    """Decorates a frozen dataclass: its refusals of names and of changes say what to do instead."""

    def decorate(cls: Any) -> Any:
        known = [field.name for field in dataclasses.fields(cls)]
        init, set_field = cls.__init__, cls.__setattr__

        @functools.wraps(init)
        def checked_init(self: Any, *args: Any, **options: Any) -> None:
            check_names(cls.__name__, options, known, remedies)
            init(self, *args, **options)

        @functools.wraps(set_field)
        def refuse(self: Any, name: str, value: Any) -> None:
            try:
                set_field(self, name, value)
            except dataclasses.FrozenInstanceError:
                check_names(cls.__name__, [name], known, remedies)
                raise dataclasses.FrozenInstanceError(
                    f"{cls.__name__} cannot be changed: use dataclasses.replace(params, {name}=...)"
                ) from None

        cls.__init__, cls.__setattr__ = checked_init, refuse
        return cls

    return decorate


def plain_numbers(instance: Any) -> None:
    """Make the numbers of a frozen dataclass Python's own: numpy's overflow in products."""
    for field in dataclasses.fields(instance):
        value = getattr(instance, field.name)
        if isinstance(value, numbers.Real) and not isinstance(value, bool):
            number = int(value) if isinstance(value, numbers.Integral) else float(value)
            object.__setattr__(instance, field.name, number)
