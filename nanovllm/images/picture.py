"""`Picture`: an image as callers pass it, before it is prepared; with its size, and with its place.

Imports no numpy: command lines show their help without.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# Bytes for a pixel of a picture that is read, which Pillow has several times: measured are 10 for
# JPEG, 14 for transparent PNG or turned JPEG, 18 for WebP and 19 for transparent palettes.
READING = 20
OF_ROW = "image"  # the argument in errors that come later, of one picture for several prompts


class NoPillowError(ImportError):
    """Pillow is missing, which all images need: an error of the installation, of no single row."""

    def __init__(self) -> None:
        super().__init__('images need Pillow: pip install "pillow>=10"', name="PIL")


@dataclass(frozen=True, eq=False)
class Picture:
    """An image of a caller.

    Attributes:
        height, width: size as it will be read.
        source: value that is equal for pictures of the same content; it holds on to the caller's.
        read: function that returns the pixels, [height, width, 3] uint8.
        source_bytes: memory of encoded data in `source`, which are there as long as the picture,
            and of the data URL that they come from.
    """

    height: int
    width: int
    source: Hashable
    read: Callable[[], NDArray[np.uint8]]
    source_bytes: int = 0


@dataclass(frozen=True, eq=False)
class SizedPicture:
    """A picture, and the size that it gets.

    Attributes:
        picture: the picture.
        height, width: size when it is resized.
        num_tokens: number of its placeholders.
        least_tokens: number of them at the lowest `max_pixels`.
    """

    picture: Picture
    height: int
    width: int
    num_tokens: int
    least_tokens: int

    @property
    def num_bytes(self) -> int:
        """Memory of the prepared image, and of the data that it came in."""
        return 3 * self.height * self.width + self.picture.source_bytes

    @property
    def cost(self) -> int:
        """Memory while it is prepared."""
        return self.num_bytes + READING * self.picture.height * self.picture.width


class PlacedPicture(NamedTuple):
    """A picture in a prompt.

    Attributes:
        offset: index of its first placeholder among the prompt's tokens.
        sized: the picture.
    """

    offset: int
    sized: SizedPicture


@dataclass(frozen=True)
class PartImage:
    """An image of a message's part, as it stands in `multi_modal_data` of the prompt made of it.

    Attributes:
        image: image that the caller passed.
        name: place of it in the conversation, for errors.
        part: place of the part, for errors.
        limits: `max_pixels` and `min_pixels` of the part.
    """

    image: Any
    name: str
    part: str
    limits: Mapping[str, int]


def unwrap(given: Mapping[str, Any], name: str) -> tuple[Any, str]:
    """The bytes or the path in a dictionary of Hugging Face's datasets, and its name in errors.

    Only these two kinds come out, so the value for an image is looked at once.

    Args:
        given: dictionary with `bytes`, which have priority, or `path`.
        name: name of the dictionary in errors.

    Raises:
        TypeError, ValueError: if it has neither, or something else in their place.
    """
    data, path = given.get("bytes"), given.get("path")
    if data is not None:
        if not isinstance(data, (bytes, bytearray, memoryview)):
            raise TypeError(
                f'`{name}["bytes"]` must be the bytes of a file, got {type(data).__name__}'
            )
        return data, f'{name}["bytes"]'
    if path is None:
        raise ValueError(
            f"`{name}` must have `bytes` or `path`, got the keys {sorted(map(str, given))}"
        )
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f'`{name}["path"]` must be a path, got {type(path).__name__}')
    return path, f'{name}["path"]'
