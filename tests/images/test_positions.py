"""Positions on three axes, as Qwen3-VL of transformers counts them."""

import numpy as np
import pytest

from nanovllm.images.image import Image, PlacedImage
from nanovllm.images.positions import three_positions


def placed(offset, rows, columns, merge=2):
    """An image of a grid of `rows` x `columns` patches."""
    pixels = np.zeros((rows * 4, columns * 4, 3), np.uint8)
    return PlacedImage(offset, Image.of(pixels, 4, rows * columns // merge**2))


def test_the_example_of_two_images():
    """Three tokens, 2 x 3 merged patches, three tokens, one merged patch, two tokens."""
    positions, delta = three_positions(15, [placed(3, 4, 6), placed(12, 2, 2)], 2)
    after = [6, 7, 8, 9, 10, 11]
    assert positions.tolist() == [
        [0, 1, 2, 3, 3, 3, 3, 3, 3, *after],
        [0, 1, 2, 3, 3, 3, 4, 4, 4, *after],
        [0, 1, 2, 3, 4, 5, 3, 4, 5, *after],
    ]
    assert positions.dtype == np.int32 and delta == -3


def test_text_alone_counts():
    positions, delta = three_positions(5, [], 2)
    assert positions.tolist() == [[0, 1, 2, 3, 4]] * 3 and delta == 0


@pytest.mark.parametrize("merge", [1, 2, 3])
def test_positions_are_those_of_transformers(merge):
    torch = pytest.importorskip("torch")
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLConfig, Qwen3VLModel

    config = Qwen3VLConfig()
    config.vision_config.spatial_merge_size = merge
    theirs = Qwen3VLModel.__new__(Qwen3VLModel)  # no weights: it counts by its configuration alone
    torch.nn.Module.__init__(theirs)
    theirs.config = config
    rng = np.random.default_rng(merge)
    print(f"seed {merge}")
    for _ in range(20):
        images, length = [], 0
        for _ in range(rng.integers(1, 5)):
            length += int(rng.integers(len(images) > 0, 4))  # text between images; none before
            images.append(placed(length, *(merge * rng.integers(1, 9, size=2)), merge))
            length = images[-1].end
        length += int(rng.integers(0, 4))
        kinds = torch.zeros(1, length, dtype=torch.int64)
        for image in images:
            kinds[0, image.offset : image.end] = 1
        grid = torch.tensor([[1, image.image.rows, image.image.columns] for image in images])
        expected, delta = theirs.get_rope_index(kinds, kinds.int(), grid)
        found = three_positions(length, images, merge)
        np.testing.assert_array_equal(found[0], expected[:, 0].numpy())
        assert found[1] == delta.item()
