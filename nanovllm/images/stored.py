"""`Stored`: an image in the store of embeddings; `ImageState`: the images of a sequence there;
`Span`: an image in a step.

`scheduling.encoder_cache` keeps these books. No torch here.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from nanovllm.images.image import Image
from nanovllm.utils.arrays import Int32


@dataclass(eq=False, slots=True)
class Stored:
    """An image in the store.

    Attributes:
        image: the image.
        rows: [num_tokens] its rows.
        num_holders: number of sequences that hold it.
        is_encoded: whether a step that encodes it has been launched.
    """

    image: Image
    rows: Int32
    num_holders: int = 0
    is_encoded: bool = False


@dataclass(slots=True)
class ImageState:
    """The cache's knowledge of a sequence with images.

    Attributes:
        stand_ins: number of each image, negative, which stands for its placeholders in hashes of
            blocks.
        positions: [3, prompt tokens] positions on three axes; None: those of text.
        are_whole: whether no prefix of the cache may end inside an image.
        held: images that it holds, by their index in the prompt.
    """

    stand_ins: list[int]
    positions: Int32 | None
    are_whole: bool
    held: dict[int, Stored] = field(default_factory=dict)

    def positions_of(self, start: int, end: int) -> Int32:
        """[3, end - start] positions of tokens of the prompt."""
        if self.positions is not None:
            return self.positions[:, start:end]
        return np.broadcast_to(np.arange(start, end, dtype=np.int32), (3, end - start))


class Span(NamedTuple):
    """The tokens of an image, all in one step.

    Attributes:
        row: row of the first in the step.
        num_tokens: number of them.
        sequence: row of their sequence among those of the step.
        position: index of the first in its sequence.
    """

    row: int
    num_tokens: int
    sequence: int
    position: int
