"""`Picture`: an image as callers pass it, before it is prepared; with its size, and with its place.

Imports no numpy: command lines show their help without.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

READING = 8  # bytes for a pixel of a picture that is read


@dataclass(frozen=True, eq=False)
class Picture:
    """An image of a caller.

    Attributes:
        height, width: size as it will be read.
        source: equal for pictures of the same content; it holds on to what the caller passed.
        read: function that returns the pixels, [height, width, 3] uint8.
    """

    height: int
    width: int
    source: Hashable
    read: Callable[[], NDArray[np.uint8]]


@dataclass(frozen=True, eq=False)
class SizedPicture:
    """A picture, and the size that it gets.

    Attributes:
        picture: the picture.
        height, width: size when it is resized.
        num_tokens: number of its placeholders.
    """

    picture: Picture
    height: int
    width: int
    num_tokens: int

    @property
    def num_bytes(self) -> int:
        """Memory of the prepared image."""
        return 3 * self.height * self.width

    @property
    def cost(self) -> int:
        """Memory while it is prepared: Pillow has four bytes for a pixel, and makes copies."""
        return self.num_bytes + READING * self.picture.height * self.picture.width


class PlacedPicture(NamedTuple):
    """A picture in a prompt.

    Attributes:
        offset: index of its first placeholder among the prompt's tokens.
        sized: the picture.
    """

    offset: int
    sized: SizedPicture
