"""`bounded`: one bound on the pixels of pictures, in the place of Pillow's own two.

Pillow warns of a picture above `Image.MAX_IMAGE_PIXELS` and refuses one above twice that. The
number is the process's, and so are filters of warnings: whoever changes either in a thread changes
it for the caller's threads, too. So the function by which Pillow compares is replaced by one that
asks whose reading this is.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

MAX_PIXELS = 178_956_970  # of a picture: what Pillow refuses by itself, above which none is read
CHECK = "_decompression_bomb_check"  # Pillow's function of a size

_is_ours = ContextVar("_is_ours", default=False)
_lock = threading.Lock()


@contextmanager
def bounded() -> Iterator[None]:
    """Have Pillow raise `Image.DecompressionBombError` in this thread for pictures of more than
    `MAX_PIXELS` pixels, and say nothing of others, whatever its own limit is. Other threads see
    nothing of it.
    """
    _replace_check()
    token = _is_ours.set(True)
    try:
        yield
    finally:
        _is_ours.reset(token)


def _replace_check() -> None:
    """Replace Pillow's function, once."""
    from PIL import Image

    with _lock:
        own = getattr(Image, CHECK, None)  # None: a Pillow to come, whose own limits hold then
        if own is None or hasattr(own, "asks_whose"):
            return

        def check(size: tuple[int, int], *args: Any, **kwargs: Any) -> None:
            if not _is_ours.get():
                own(size, *args, **kwargs)
            elif size[0] * size[1] > MAX_PIXELS:
                raise Image.DecompressionBombError(f"{size[0]} x {size[1]} pixels")

        check.asks_whose = True  # type: ignore[attr-defined]
        setattr(Image, CHECK, check)
