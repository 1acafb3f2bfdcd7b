"""The files of a checkpoint's directory. A faulty file raises a ValueError that names it."""

import json
import os
import stat
from pathlib import Path
from typing import Any, TypeVar

from nanovllm.utils.checks import check_bool, check_float, check_int

T = TypeVar("T", int, float, bool)

INDEX = "model.safetensors.index.json"  # maps each tensor to its shard
PROCESSORS = "processor_config.json", "preprocessor_config.json"  # of images
ADAPTER, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # as PEFT names them
MOST = 2**31 - 1  # tokens and positions are int32
MAX_DEPTH = 50  # levels of nesting in JSON; real files have fewer than ten


def has_file(path: Path) -> bool:
    """Whether there is a file, or a link to one: Hugging Face's cache is made of such links.

    Raises:
        ValueError: if something else is there, such as a directory or a link that leads nowhere.
    """
    try:
        if stat.S_ISREG(path.stat().st_mode):
            return True
        found = "something else"
    except (OSError, ValueError) as error:  # ValueError: no file can have this name
        if not os.path.lexists(path):
            return False
        found = f"a dangling link ({error})"
    raise ValueError(f"{path} must be a file, got {found}: download the checkpoint again")


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; ValueError if the file is missing or holds anything else."""
    if not has_file(path):
        raise ValueError(f"{path.parent} has no {path.name}: is it the directory of a checkpoint?")
    try:
        value = _parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def _parse(text: str) -> Any:
    """Parse JSON. RecursionError if it nests so deep that `repr` in a message might raise one."""
    value = json.loads(text)
    level = [value]
    for _ in range(MAX_DEPTH):
        inner = [list(v.values()) if isinstance(v, dict) else v for v in level]
        level = [child for values in inner if isinstance(values, list) for child in values]
    if level:
        raise RecursionError(f"it nests deeper than {MAX_DEPTH} levels")
    return value


def read_value(
    raw: dict[str, Any],
    key: str,
    kind: type[T],
    default: T | None = None,
    minimum: float = 1,
    maximum: float = MOST,
) -> T:
    """`raw[key]` of config.json, an int or float in `minimum`..`maximum`, or a bool. Without a
    default the key is required.
    """
    value = raw.get(key)
    if value is None:
        if default is None:
            raise ValueError(f"config.json: `{key}` is missing")
        return default
    try:
        if kind is bool:
            check_bool(key, value)
        elif kind is int:
            check_int(key, value, int(minimum), int(maximum))
        else:
            check_float(key, value, minimum, maximum)
    except (TypeError, ValueError) as error:
        raise ValueError(f"config.json: {error}") from None
    return kind(value)
