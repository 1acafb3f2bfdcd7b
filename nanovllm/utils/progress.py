"""Progress bars, on stderr or in the notebook. `TQDM_DISABLE=1` turns them off."""

import os
import warnings
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", "IProgress not found")  # without ipywidgets bars are text
    from tqdm.auto import tqdm

T = TypeVar("T")
DELAY = 1.0  # seconds of silence: shorter work needs no bar
# Options of tqdm, which heeds its variable in terminals only. `disable=False` would overrule it.
SILENT: dict[str, Any] = {"disable": True}
SHOWN: dict[str, Any] = SILENT if os.environ.get("TQDM_DISABLE") else {}


def startup_bar(items: Sequence[T], desc: str, unit: str) -> AbstractContextManager[Iterable[T]]:
    """Context with `items` to iterate over, which shows how many are done. Where bars are off there
    is none: even a silent one creates a semaphore in /dev/shm, and workers may be killed meanwhile.
    """
    if SHOWN is SILENT:
        return nullcontext(items)
    return tqdm(items, desc=desc, unit=unit, delay=DELAY, **SHOWN)
