"""An image's key is its content's."""

import numpy as np

from nanovllm.images.image import Image

RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (8, 12, 3), dtype=np.uint8)


def test_keys_differ_where_pixels_or_shapes_do():
    first = Image.of(PIXELS, 4, 6)
    assert (first.rows, first.columns, first.num_tokens) == (2, 3, 6) and len(first.key) == 32
    assert Image.of(PIXELS.copy(order="F"), 4, 6).key == first.key
    changed = PIXELS.copy()
    changed[7, 11, 2] ^= 1
    others = [changed, PIXELS[::-1], PIXELS[..., ::-1], PIXELS.reshape(12, 8, 3)]
    keys = {Image.of(pixels, 4, 6).key for pixels in others}
    assert len(keys) == 4 and first.key not in keys
