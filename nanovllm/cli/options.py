"""Flags for the fields of `Config` and `SamplingParams`. Their names, types, defaults and help text
come from these classes, so a new field becomes a flag without a change here.

A flag has its field's name, with dashes. `seed` and `logprobs_mode` are in both classes: `--seed`
is the one of `SamplingParams`, `--engine-seed` the one of `Config`.
"""

import argparse
import dataclasses
import inspect
import json
import re
import types
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from nanovllm.config import Config, Options
from nanovllm.requests.json_params import from_json
from nanovllm.sampling_params import SamplingParams

PATH = "PATH"
ENGINE, SAMPLING = "engine", "sampling"  # prefixes of names in the namespace
FLAGS = {
    (ENGINE, "seed"): "engine-seed",
    (ENGINE, "logprobs_mode"): "engine-logprobs-mode",
}


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add flags for all options of an engine that commands use; each adds `model` itself."""
    hints = get_type_hints(Options)
    del hints["enable_sleep_mode"]  # no command sleeps
    _add(parser, ENGINE, Config, hints)


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The engine options that were given, as keyword arguments of `LLM`."""
    return _given(args, ENGINE)


def add_sampling_options(
    parser: argparse.ArgumentParser, *, leave_out: Container[str] = ()
) -> None:
    """Add flags for the fields of `SamplingParams`."""
    hints = get_type_hints(SamplingParams)
    hints = {name: hint for name, hint in hints.items() if name not in leave_out}
    _add(parser, SAMPLING, SamplingParams, hints)


def sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    """The parameters that were given, as keyword arguments of `SamplingParams`."""
    return from_json(_given(args, SAMPLING))


def _given(args: argparse.Namespace, kind: str) -> dict[str, Any]:
    prefix = f"{kind}."
    named = vars(args).items()
    return {key.removeprefix(prefix): value for key, value in named if key.startswith(prefix)}


def _add(parser: argparse.ArgumentParser, kind: str, cls: Any, hints: Mapping[str, Any]) -> None:
    group = parser.add_argument_group(
        f"{kind} options", f"as in nanovllm.{cls.__name__}; `none` is Python's None"
    )
    texts = field_texts(cls)
    for field in dataclasses.fields(cls):
        if field.name not in hints or field.default is dataclasses.MISSING:
            continue
        is_word = field.default is None or isinstance(field.default, bool)
        default = str(field.default).lower() if is_word else field.default
        read, metavar = _reader(hints[field.name])
        options: dict[str, Any] = {
            "dest": f"{kind}.{field.name}",
            "default": argparse.SUPPRESS,
            "help": f"{texts.get(field.name, '')} (default: {default})".replace("%", "%%"),
        }
        if read is None:
            options["action"] = argparse.BooleanOptionalAction
        elif read is new_file:
            options |= {"type": read, "metavar": metavar, "nargs": "?", "const": True}
        elif metavar == PATH:
            options |= {"action": "append", "metavar": metavar}
        else:
            options |= {"type": read, "metavar": metavar}
        flag = FLAGS.get((kind, field.name), field.name).replace("_", "-")
        group.add_argument(f"--{flag}", **options)


def field_texts(cls: type) -> dict[str, str]:
    """The notes under "Attributes" in a class's docstring, by name, each on one line."""
    section = inspect.cleandoc(cls.__doc__ or "").partition("Attributes:\n")[2]
    found = re.findall(r"^ {4}(\w+): (.*(?:\n {5,}.*)*)", section.partition("\n\n")[0], re.M)
    return {name: " ".join(text.split()) for name, text in found}


def _reader(hint: Any) -> tuple[Callable[[str], Any] | None, str]:
    """The reader of a value of this type from text, and its name in help; None for a bool."""
    is_union = get_origin(hint) in (Union, types.UnionType)
    kinds = [kind for kind in (get_args(hint) if is_union else (hint,)) if kind is not type(None)]
    if {bool, str} <= {*kinds}:  # True if the flag stands alone
        return new_file, PATH
    if {Path, str} <= {*kinds}:  # given again for each of several
        return str, PATH
    [kind] = kinds
    if kind is bool:
        return None, ""
    read, metavar = READERS.get(kind) or (json_value, "JSON")

    def read_or_none(text: str) -> Any:
        return None if is_union and text.lower() == "none" else read(text)

    return read_or_none, metavar


def integer(text: str) -> int:
    """An integer, with an error in our form."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be an integer, got {text!r}") from None


def number(text: str) -> float:
    """A float, with an error in our form."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, got {text!r}") from None


def json_value(text: str) -> Any:
    """The value of a flag for a list or an object."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be JSON, got {text!r}: {error}") from None


def _refuse(name: str) -> None:
    """Refuse NaN and Infinity, which Python reads and which are not JSON; NaN also differs from
    itself.
    """
    raise ValueError(f"{name} is not a JSON number")


def object_value(text: str) -> dict[str, Any]:
    """The value of a flag for an object."""
    value = json_value(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be an object, got {text!r}")
    return value


def positive(text: str) -> int:
    """An integer from 1 up."""
    value = integer(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def rate(text: str) -> float:
    """A number above 0."""
    value = number(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be more than 0, got {text}")
    return value


def new_file(text: str) -> str:
    """A path that can be written: its directory exists."""
    if not Path(text).absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"must be in a directory that exists, got {text!r}")
    return text


def _strings(text: str) -> Any:
    """A list, or a single string as a list."""
    return json_value(text) if text.startswith("[") else [text]


READERS: dict[Any, tuple[Callable[[str], Any], str]] = {
    int: (integer, "N"),
    float: (number, "X"),
    str: (str, "NAME"),
    Sequence[str]: (_strings, "JSON"),
}
