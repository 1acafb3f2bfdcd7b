"""Progress bars of the start-up, on stderr or in the notebook. `TQDM_DISABLE=1` turns them off."""

from collections.abc import Sequence
from typing import TypeVar

from tqdm.auto import tqdm

T = TypeVar("T")
DELAY = 1.0  # seconds of silence: what takes no longer needs no bar


def startup_bar(items: Sequence[T], desc: str, unit: str) -> "tqdm[T]":
    """Iterates over `items`, showing how many are done. Close it, best by `with`."""
    return tqdm(items, desc=desc, unit=unit, delay=DELAY)
