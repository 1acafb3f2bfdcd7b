"""`Image`: one picture as a model sees it; `PlacedImage`: its place in a prompt. No torch here."""

import hashlib
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self


@dataclass(frozen=True, slots=True, eq=False)
class Image:
    """A picture, resized for the tower of a model.

    Attributes:
        key: SHA-256 of `pixels` and their shape. An engine prepares all images alike, so equal keys
            have equal embeddings, however their files differ; and nobody can make two pictures of
            one key, of which one would be answered as the other.
        rows: height in patches.
        columns: width in patches.
        num_tokens: number of its placeholders in a prompt, known from the size alone.
        pixels: RGB of the resized picture, [rows * patch size, columns * patch size, 3] uint8.
            Normalisation and cutting into patches happen on the device.
    """

    key: bytes
    rows: int
    columns: int
    num_tokens: int
    pixels: NDArray[np.uint8]

    @classmethod
    def of(cls, pixels: NDArray[np.uint8], patch_size: int, num_tokens: int) -> Self:
        """The image of resized pixels, [H, W, 3] uint8, whose sides are multiples of the patch."""
        height, width, channels = pixels.shape
        assert pixels.dtype == np.uint8 and channels == 3, f"pixels of {pixels.dtype}, {channels}"
        assert height % patch_size == 0 == width % patch_size, f"patches of {height} x {width}"
        pixels = np.ascontiguousarray(pixels)
        # The shape comes first, with a fixed length: no two pictures are the same bytes.
        key = hashlib.sha256(height.to_bytes(8, "little") + width.to_bytes(8, "little"))
        key.update(pixels.data)
        return cls(key.digest(), height // patch_size, width // patch_size, num_tokens, pixels)

    @property
    def num_bytes(self) -> int:
        """Memory of the pixels."""
        return self.pixels.nbytes


class PlacedImage(NamedTuple):
    """An image in a prompt.

    Attributes:
        offset: index of its first placeholder among the prompt's tokens.
        image: the image.
    """

    offset: int
    image: Image

    @property
    def end(self) -> int:
        """The index after its last placeholder."""
        return self.offset + self.image.num_tokens
