"""`open_picture`: images as callers pass them, of which the size is read, and the pixels later.

Pixels are those that transformers' processors on torchvision see. A file, bytes or a data URL is
turned as its EXIF data say, and its transparency is left out but for a colour's (`load_image`); a
PIL image is taken as it lies, on white. Imports no torch, and Pillow only once there is an image.
"""

import io
import os
import stat
import struct
import threading
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nanovllm.images.picture import OF_ROW, NoPillowError, Picture, unwrap
from nanovllm.images.urls import data_of_url, path_of_url, scheme, short

MAX_PIXELS = 178_956_970  # of a picture: Pillow's own bound, twice its MAX_IMAGE_PIXELS
EXIF_ORIENTATION = 0x0112
TIFF_WIDTH, TIFF_HEIGHT = 256, 257  # tags
SWAPPED = (5, 6, 7, 8)  # orientations that exchange height and width
RESIZED = ("TIFF", "ICO")  # formats of which Pillow may find another size while it reads the pixels
DEEP = ("I", "F")  # beginnings of Pillow's modes with more than 8 bits, cut off by a conversion
CHANNELS = (1, 3, 4)
BROKEN = (
    OSError,
    SyntaxError,
    EOFError,
    ValueError,
    struct.error,
    zlib.error,
    IndexError,
    KeyError,
    RuntimeError,  # of AVIF
)
# Formats that Pillow reads by itself; for EPS and WMF it starts other programs or asks the system.
FORMATS = (
    *("JPEG", "PNG", "WEBP", "GIF", "BMP", "DIB", "TIFF", "AVIF", "JPEG2000"),
    *("ICO", "PPM", "TGA"),
)
_LOCKS = [threading.Lock() for _ in range(64)]  # each for some images, by chance


class RefusedError(ValueError):
    """A picture that can be read, and is not."""


class _Same:
    """An object of the caller's, equal to itself alone."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def open_picture(given: Any, name: str) -> Picture:
    """The picture that a caller means, of which only the size is read.

    Args:
        given: PIL image; path; bytes of a file; data URL; array [H, W], [H, W, C] or [C, H, W] of
            uint8 with 1, 3 or 4 channels; or dictionary with `bytes` or `path`.
        name: name of the argument in errors.

    Raises:
        TypeError: for anything else.
        ValueError: if it is no picture, or none that can be read.
        NoPillowError: if Pillow is missing.
    """
    try:
        from PIL import Image
    except ImportError:
        raise NoPillowError from None
    if isinstance(given, Mapping):
        given, name = unwrap(given, name)
    if isinstance(given, Image.Image):
        return _pillow(given, name)
    if isinstance(given, (bytes, bytearray, memoryview)):
        return _encoded(bytes(given), name)
    kind = scheme(given) if isinstance(given, str) else ""
    if kind == "data":
        return _encoded(data_of_url(given, name), name, len(given))
    if kind == "file":
        return _file(path_of_url(given, name), name)
    if kind and given.startswith("://", len(kind)):
        raise ValueError(
            f"`{name}` must be a picture, a path or a data URL, got {short(given)}: download it"
        )
    if isinstance(given, (str, os.PathLike)):
        return _file(os.fspath(given), name)
    if hasattr(given, "__array__") or hasattr(given, "__array_interface__"):
        return _array(_as_array(given, name), given, name)
    raise TypeError(
        f"`{name}` must be a PIL image, a path, bytes of a file, a data URL or an array, got "
        f"{type(given).__name__}"
    )


def _file(given: str | bytes, name: str) -> Picture:
    path = Path(os.fsdecode(given))
    what = short(str(path))
    try:
        status = path.stat()
    except (OSError, ValueError) as error:  # ValueError: no file can have this name
        raise ValueError(f"`{name}` cannot be read: {what}: {_reason(error)}") from None
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"`{name}` must be a file, got {what}, which is something else")
    if not status.st_size:
        raise ValueError(f"`{name}` must be a picture, got {what}, which is empty")
    size = _peek(path, name, what)
    source = str(path.absolute()), status.st_mtime_ns, status.st_size
    return Picture(*size, source, lambda: _load(path, size, OF_ROW, what))


def _reason(error: Exception) -> str:
    """An error's text, without the path that the system's own repeat."""
    return (isinstance(error, OSError) and error.strerror) or str(error)


def _encoded(data: bytes, name: str, beside: int = 0) -> Picture:
    """The picture in a file's bytes; `beside` is the memory of the text that these come from."""
    what = f"{len(data)} bytes"
    size = _peek(io.BytesIO(data), name, what)
    num_bytes = len(data) + beside
    return Picture(*size, data, lambda: _load(io.BytesIO(data), size, OF_ROW, what), num_bytes)


def _pillow(image: Any, name: str) -> Picture:
    _check_mode(image, name, "the image")
    _check_area(image.height, image.width, name)
    if image.format in RESIZED:
        try:
            with lock_of(image):
                image.load()
        except BROKEN as error:
            raise ValueError(f"`{name}` cannot be read: {error}") from None

    def read() -> NDArray[np.uint8]:
        try:
            with lock_of(image):
                image.load()  # reads its file, if it has not been read
            return _on_white(image)
        except BROKEN as error:
            raise ValueError(f"`{OF_ROW}` cannot be read: {error}") from None

    return Picture(image.height, image.width, _Same(image), read)


def lock_of(image: Any) -> threading.Lock:
    """A lock for an image that threads may read at once, in two sizes: Pillow has none."""
    return _LOCKS[(id(image) >> 4) % len(_LOCKS)]


def _as_array(given: object, name: str) -> NDArray[Any]:
    try:
        return np.asarray(given)
    except Exception as error:  # of the object's own
        raise TypeError(
            f"`{name}` cannot be read as an array: {type(error).__name__}: {error}"
        ) from None


def _array(array: NDArray[Any], given: object, name: str) -> Picture:
    if array.dtype != np.uint8:
        raise TypeError(
            f"`{name}` must be an array of uint8, from 0 to 255, got {array.dtype}: convert it"
        )
    shape = list(array.shape)
    if array.ndim == 2:
        array = array[None]
    if array.ndim != 3 or not (array.shape[0] in CHANNELS or array.shape[2] in CHANNELS):
        raise ValueError(
            f"`{name}` must have the shape [height, width] or [height, width, channels] with "
            f"{', '.join(map(str, CHANNELS))} channels, got {shape}"
        )
    if array.shape[0] in CHANNELS:  # which has precedence in transformers, too
        array = array.transpose(1, 2, 0)
    height, width = array.shape[:2]
    _check_area(height, width, name)
    return Picture(height, width, _Same(given), lambda: _three_channels(array))


def _three_channels(array: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """An array [H, W, 1, 3 or 4] with three channels; transparent pixels lie on white."""
    channels = array.shape[2]
    if channels == 1:
        return np.repeat(array, 3, axis=2)
    if channels == 3:
        return array
    # As torchvision converts bytes to floats and back (`to_dtype` with scaling), in 32 bits.
    parts = array.astype(np.float32) * np.float32(1 / 255)
    colour, alpha = parts[..., :3], parts[..., 3:]
    mixed = colour * alpha + (np.float32(1) - alpha)
    return (mixed * np.float32(256 - 1e-3)).astype(np.uint8)


# -- what Pillow reads --------------------------------------------------------------------------


@contextmanager
def _opened(file: Any, name: str, what: str) -> Iterator[Any]:
    """A file that Pillow has opened. Its errors become sentences, also during the block."""
    from PIL import Image, UnidentifiedImageError

    try:
        Image.init()  # all plugins: at first it knows the five most frequent formats
        formats = [each for each in FORMATS if each in Image.OPEN]
        with Image.open(file, formats=formats) as image:
            yield image
    # Pillow warns of half as many pixels as it refuses; the warning comes where it is an error.
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ValueError(
            f"`{name}` must have at most {MAX_PIXELS} pixels, got {what}: scale it down ({error})"
        ) from None
    except UnidentifiedImageError:
        raise ValueError(
            f"`{name}` must be a picture that Pillow can read, of {', '.join(FORMATS)}, got {what}"
        ) from None
    except RefusedError:
        raise
    except BROKEN as error:
        raise ValueError(f"`{name}` cannot be read: {what}: {_reason(error)}") from None


def _peek(file: Any, name: str, what: str) -> tuple[int, int]:
    """The height and width of a file, as it will be read."""
    from PIL import Image

    with _opened(file, name, what) as image:
        _check_mode(image, name, what)
        _check_area(image.height, image.width, name)
        # The method of the base class: a PNG's own would decode it, for EXIF data after pixels.
        turned = Image.Image.getexif(image).get(EXIF_ORIENTATION) in SWAPPED
        width, height = image.size
        if image.format == "TIFF":  # of which Pillow says the turned size, where it turns it itself
            width, height = image.tag_v2[TIFF_WIDTH], image.tag_v2[TIFF_HEIGHT]
        return (width, height) if turned else (height, width)


def _load(file: Any, size: tuple[int, int], name: str, what: str) -> NDArray[np.uint8]:
    """The pixels of a file whose size was read before."""
    from PIL import ImageOps

    with _opened(file, name, what) as image:
        image.load()
        if image.getexif().get(EXIF_ORIENTATION, 1) != 1:
            pixels = _on_white(_as_rgb(ImageOps.exif_transpose(image)))
        else:  # without the copy that would be made
            pixels = _on_white(_as_rgb(image))
        if pixels.shape[:2] != size:
            raise RefusedError(
                f"`{name}` must keep its size, and {what} has changed, or has its orientation "
                "after its pixels: save it again"
            )
        return pixels


def _on_white(image: Any) -> NDArray[np.uint8]:
    """The pixels of an image, on white where it is transparent."""
    from PIL import Image

    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, image)
    return np.asarray(_as_rgb(image))


def _as_rgb(image: Any) -> Any:
    return image if image.mode == "RGB" else image.convert("RGB")


def _check_mode(image: Any, name: str, what: str) -> None:
    if image.mode.startswith(DEEP):
        raise RefusedError(
            f"`{name}` must have 8 bits for each colour, got {what} with more (mode "
            f"{image.mode}), which a conversion would cut off: scale it to 0..255 first"
        )


def _check_area(height: int, width: int, name: str) -> None:
    if not height or not width:
        raise RefusedError(f"`{name}` must have pixels, got {width} x {height}")
    if height * width > MAX_PIXELS:
        raise RefusedError(
            f"`{name}` must have at most {MAX_PIXELS} pixels, got {width} x {height}: scale it down"
        )
