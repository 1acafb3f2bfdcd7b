"""Checks of callers' arguments: one sentence that names the argument, the rule and the value."""

import dataclasses
import difflib
import functools
import inspect
import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

T = TypeVar("T")
CLOSE = 0.75  # similarity of names: slips of the pen, but not two names that share a word
PLAIN = {int, float, bool, str, tuple, dict, type(None)}  # most values, and checked fast
Call = TypeVar("Call", bound=Callable[..., Any])
# Names of vLLM that are not ours. For each: a test for values that ask for nothing that is missing
# here, and the remedy for all others.
Foreign: TypeAlias = Mapping[str, tuple[Callable[[Any], bool], str]]


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

    `rule` is the rule in words, if the bounds alone would say too little.
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


def only(*values: Any) -> Callable[[Any], bool]:
    """A test whether a value is one of these, in type and value: True is not 1."""
    return lambda value: any(type(value) is type(known) and value == known for known in values)


def is_number_or_none(value: Any) -> bool:
    """Whether a value is a number or None."""
    return isinstance(value, (numbers.Real, type(None)))


def nearest(name: str, known: Iterable[str], cutoff: float = CLOSE) -> str:
    """The known name that `name` is most likely a slip of the pen for; "" if there is none."""
    return next(iter(difflib.get_close_matches(name, known, 1, cutoff)), "")


def own_options(
    owner: str, options: Mapping[str, Any], known: Sequence[str], foreign: Foreign
) -> dict[str, Any]:
    """The options that `owner` knows, without foreign ones whose value asks for nothing.

    Raises:
        TypeError: for any other, with its remedy or the nearest name.
    """
    own = {}
    for name, value in options.items():
        is_nothing, remedy = foreign.get(name, (None, None))
        if is_nothing is not None and is_nothing(value):
            continue
        if name not in known:
            near = nearest(name, [*known, *foreign])
            hint = f"did you mean `{near}`?" if near else f"options: {', '.join(known)}"
            if near and near not in known:
                hint = f"{hint} {foreign[near][1]}"
            raise TypeError(f"{owner}() has no option `{name}`; {remedy or hint}")
        own[name] = value
    return own


def takes_foreign(foreign: Foreign) -> Callable[[Call], Call]:
    """Decorate a method: its keyword arguments are treated as by `own_options`."""

    def decorate(call: Any) -> Any:
        known = list(inspect.signature(call).parameters)[1:]

        @functools.wraps(call)
        def checked(self: Any, *args: Any, **options: Any) -> Any:
            return call(self, *args, **own_options(call.__name__, options, known, foreign))

        return checked

    return decorate


def takes_foreign_fields(foreign: Foreign) -> Callable[[type[T]], type[T]]:
    """Decorate a frozen dataclass: its arguments are treated as by `own_options`, and its refusal
    of a change names the remedy.
    """

    def decorate(cls: Any) -> Any:
        known = [field.name for field in dataclasses.fields(cls)]
        init, set_field = cls.__init__, cls.__setattr__

        @functools.wraps(init)
        def checked_init(self: Any, *args: Any, **options: Any) -> None:
            init(self, *args, **own_options(cls.__name__, options, known, foreign))

        @functools.wraps(set_field)
        def refuse(self: Any, name: str, value: Any) -> None:
            try:
                set_field(self, name, value)
            except dataclasses.FrozenInstanceError:
                own_options(cls.__name__, {name: value}, known, foreign)
                raise dataclasses.FrozenInstanceError(
                    f"{cls.__name__} cannot be changed: use dataclasses.replace(params, {name}=...)"
                ) from None

        cls.__init__, cls.__setattr__ = checked_init, refuse
        return cls

    return decorate


def missing_name(module: str, name: str, replaced: Mapping[str, str]) -> Exception:
    """The error of a module's `__getattr__`. `replaced` has remedies for names of vLLM.

    Such names raise ImportError, in hasattr(), too, because `from module import name` would replace
    the text of an AttributeError by its own.
    """
    if name in replaced:
        return ImportError(f"{module} has no `{name}`: {replaced[name]}", name=name)
    return AttributeError(f"module {module!r} has no attribute {name!r}")


def plain_numbers(instance: Any) -> None:
    """Turn the numbers of a frozen dataclass into Python's own: numpy's overflow in products."""
    for field in dataclasses.fields(instance):
        value = getattr(instance, field.name)
        if type(value) in PLAIN:
            continue
        if isinstance(value, numbers.Real) and not isinstance(value, bool):
            number = int(value) if isinstance(value, numbers.Integral) else float(value)
            object.__setattr__(instance, field.name, number)
