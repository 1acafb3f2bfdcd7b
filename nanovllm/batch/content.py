"""`as_content`: bytes that tell a row of any Python objects from others.

They are JSON, in which a digest stands for what JSON lacks: the same in each process for the same
content, and another for any other. Imports no numpy and no Pillow, unless a row has an array or an
image.
"""

import json
import os
import re
import sys
from collections.abc import Mapping
from typing import Any

from xxhash import xxh3_128_hexdigest

ADDRESS = re.compile(r"\bat 0x[0-9A-Fa-f]+")  # in the text of an object


def as_content(values: Any, *, sort_keys: bool = False) -> bytes:
    """The fields of a row as bytes.

    Raises:
        TypeError, ValueError, RecursionError: if they have no such form.
    """
    return json.dumps(values, sort_keys=sort_keys, default=_content).encode()


def _content(value: Any) -> Any:
    """A form of a value that JSON lacks."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return f"bytes {xxh3_128_hexdigest(bytes(value))}"
    if isinstance(value, os.PathLike):
        return str(value)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (set, frozenset)):
        return sorted(as_content(each).decode() for each in value)
    if callable(value) and hasattr(value, "__qualname__"):  # a tool: the model sees these
        types = getattr(value, "__annotations__", {})
        return [value.__qualname__, value.__doc__, {name: str(types[name]) for name in types}]
    pillow = sys.modules.get("PIL.Image")
    if pillow is not None and isinstance(value, pillow.Image):
        return _image(value)
    if hasattr(value, "__array__") or hasattr(value, "__array_interface__"):
        return _array(value)
    return _text(value)


def _image(image: Any) -> Any:
    """An image by its file, if it has not been read from there or not been changed since, else by
    its pixels: those of rows to come would take memory, and time.
    """
    from PIL import Image

    from nanovllm.images.reading import BROKEN, lock_of

    with lock_of(image):
        try:
            if getattr(image, "tile", None):
                return _file(image) or _pixels(image)
            if getattr(image, "filename", ""):
                with Image.open(image.filename) as again:
                    again.seek(image.tell())
                    file = _file(again)
                    if file is not None and _pixels(again) == _pixels(image):
                        return file
            return _pixels(image)
        except BROKEN as error:  # the row's own, once its picture is read
            return ["image", image.mode, image.size, str(error)]


def _file(image: Any) -> Any:
    """An image by the file that it waits in; None if that can be read only once."""
    file = getattr(image, "fp", None)
    if file is None or not file.seekable():
        return None
    place = file.tell()
    file.seek(0)
    digest = xxh3_128_hexdigest(file.read())
    file.seek(place)
    facts = image.mode, image.size, image.info.get("transparency")
    return ["image file", image.tell(), *facts, digest]


def _pixels(image: Any) -> Any:
    image.load()  # before its size is asked for: it may turn
    palette, digest = image.getpalette(None), xxh3_128_hexdigest(image.tobytes())
    return ["image", image.mode, image.size, palette, image.info.get("transparency"), digest]


def _array(value: Any) -> Any:
    import numpy as np

    try:
        array = np.asarray(value)
    except Exception:  # of the object's own: a tensor of bfloat16, of a GPU or with gradients
        return ["array", value.tolist()] if hasattr(value, "tolist") else _text(value)
    if not array.ndim:  # a number of numpy
        return _text(value)
    if array.dtype.hasobject:
        return ["array", array.shape, array.tolist()]
    return ["array", str(array.dtype), array.shape, xxh3_128_hexdigest(array.tobytes())]


def _text(value: Any) -> str:
    """The text of any other object, without its address, which each process changes."""
    return ADDRESS.sub("", str(value))
