"""Positions of a prompt with images on three axes: time, height and width. No torch here.

Qwen2-VL calls them multimodal rotary positions (M-RoPE, arXiv 2409.12191, section 2.1).
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from nanovllm.images.image import PlacedImage


def three_positions(
    num_tokens: int, images: Sequence[PlacedImage], merge: int
) -> tuple[NDArray[np.int32], int]:
    """The positions of a prompt's tokens, and the shift of all tokens after it.

    Text counts on, alike on all axes. At position p, an image of R x C merged patches has time p,
    heights p to p + R - 1 and widths p to p + C - 1; the text after it goes on at p + max(R, C).

    Args:
        num_tokens: length of the prompt.
        images: its images, in order.
        merge: number of patches on each side of a merged patch.

    Returns:
        Positions [3, num_tokens] int32, and the delta: token i after the prompt has position
        i + delta on all axes.
    """
    positions = np.empty((3, num_tokens), np.int32)
    index = position = 0
    for placed in images:
        assert index <= placed.offset and placed.end <= num_tokens, f"an image at {placed.offset}"
        count = placed.offset - index
        positions[:, index : placed.offset] = np.arange(position, position + count, dtype=np.int32)
        position += count
        rows, columns = placed.image.rows // merge, placed.image.columns // merge
        assert rows * columns == placed.image.num_tokens, "a placeholder for each merged patch"
        grid = positions[:, placed.offset : placed.end]  # a view
        grid[0] = position
        grid[1] = position + np.repeat(np.arange(rows, dtype=np.int32), columns)
        grid[2] = position + np.tile(np.arange(columns, dtype=np.int32), rows)
        position += max(rows, columns)
        index = placed.end
    count = num_tokens - index
    positions[:, index:] = np.arange(position, position + count, dtype=np.int32)
    return positions, position + count - num_tokens
