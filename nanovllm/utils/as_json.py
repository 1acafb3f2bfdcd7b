"""`as_json`: JSON that any reader accepts."""

import json
import math
from collections.abc import Mapping
from typing import Any


def as_json(value: Any, **how: Any) -> str:
    """The value as JSON. NaN and infinity, which JSON lacks, become null; other values that it
    lacks, such as those of tables, are written by `str`. `how` is for `json.dumps`.
    """
    how |= {"default": str, "allow_nan": False}
    try:
        return json.dumps(value, **how)
    except ValueError:  # Python reads NaN and infinity where others have written them
        return json.dumps(_without_nan(value), **how)


def _without_nan(value: Any) -> Any:
    """Lists and objects with null for NaN and infinity."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(item) for item in value]
    return value
