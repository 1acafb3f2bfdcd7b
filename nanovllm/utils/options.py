"""Names of options: those of vLLM that are not ours, slips of the pen, and their remedies."""

import dataclasses
import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

T = TypeVar("T")
CLOSE = 0.75  # similarity of names: slips of the pen, but not two names that share a word
Call = TypeVar("Call", bound=Callable[..., Any])
# Names of vLLM that are not ours. For each: a test for values that ask for nothing that is missing
# here, and the remedy for all others.
Foreign: TypeAlias = Mapping[str, tuple[Callable[[Any], bool], str]]


def only(*values: Any) -> Callable[[Any], bool]:
    """A test whether a value is one of these, in type and value: True is not 1."""
    return lambda value: any(type(value) is type(known) and value == known for known in values)


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
            hint = f"did you mean `{near}`?" if near else f"options: {', '.join(known) or 'none'}"
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


class Absent:
    """A method of vLLM's that a class has not: an instance has no such attribute, and says so with
    the remedy.

    Args:
        remedy: advice for its users.
    """

    def __init__(self, remedy: str) -> None:
        self._remedy, self._name = remedy, ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> Any:
        if instance is None:  # help() asks the class
            return self
        raise AttributeError(f"{owner.__name__} has no `{self._name}`: {self._remedy}")
