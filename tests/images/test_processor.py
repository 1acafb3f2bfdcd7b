"""The size of a resized image, and its number of tokens, as transformers' processors have them."""

import json
import random

import numpy as np
import pytest
from oracle import GEMMA, QWEN, processor
from PIL import Image as Pillow

from nanovllm.images.processor import read_processor

VISION = {"image_size": 48, "patch_size": 8}


def read(directory, raw, nested=False, **limits):
    if nested:
        (directory / "processor_config.json").write_text(json.dumps({"image_processor": raw}))
    else:
        (directory / "preprocessor_config.json").write_text(json.dumps(raw))
    return read_processor(directory, VISION, 4).with_limits(limits, "mm_processor_kwargs")


@pytest.mark.parametrize("limits", [{}, {"max_pixels": 3000}, {"min_pixels": 30_000}])
def test_sizes_are_those_of_transformers(tmp_path, limits):
    theirs, ours = processor(QWEN), read(tmp_path, QWEN, **limits)
    rng = random.Random(0)
    sizes = [(rng.randint(1, 500), rng.randint(1, 500)) for _ in range(300)]
    sizes += [(1, 200), (200, 1), (16, 16), (8, 24), (24, 8), (40, 56), (1000, 5)]
    edges = {"shortest_edge": ours.min_pixels, "longest_edge": ours.max_pixels}
    bounded = 0
    for height, width in sizes:
        if max(height, width) > 200 * min(height, width):
            continue
        kwargs = {"min_pixels": ours.min_pixels, "max_pixels": ours.max_pixels}
        patches = theirs.get_number_of_image_patches(height, width, kwargs)
        found = ours.resized(height, width)
        assert ours.num_tokens(*found) * 4 == patches, (height, width)
        bounded += found[0] * found[1] != round(height / 16) * round(width / 16) * 256
    assert bounded > 20, "bounds applied"
    image = Pillow.new("RGB", (333, 77))
    made = theirs(image, size=edges, return_tensors="pt")
    assert made["image_grid_thw"].tolist() == [[1, *(x // 8 for x in ours.resized(77, 333))]]


def test_no_side_is_200_times_the_other(tmp_path):
    ours = read(tmp_path, QWEN)
    assert ours.resized(10, 2000)
    with pytest.raises(ValueError, match=r"at most 200 times the other, got 2001 x 10 pixels"):
        ours.resized(10, 2001)
    with pytest.raises(ValueError, match="200"):
        processor(QWEN)(np.zeros((10, 2001, 3), np.uint8))


def test_fixed_sizes(tmp_path):
    ours = read(tmp_path, GEMMA, nested=True)
    assert ours.resized(1, 999) == (48, 48) and ours.num_tokens(48, 48) == 4
    assert ours.resample == "bilinear" and ours.max_tokens == 4
    made = processor(GEMMA)(Pillow.new("RGB", (30, 99)), return_tensors="pt")
    assert made["pixel_values"].shape == (1, 3, 48, 48)


def test_limits_have_three_spellings(tmp_path):
    by_name = read(tmp_path, QWEN, max_pixels=5000, min_pixels=3000)
    size = {"longest_edge": 5000, "shortest_edge": 3000}
    assert by_name == read(tmp_path, QWEN, size=size)
    assert by_name == read(tmp_path, {**QWEN, "max_pixels": 5000, "min_pixels": 3000})
    assert by_name.max_tokens == 5000 // 256
    # A bound below the checkpoint's own minimum lowers that, too.
    assert read(tmp_path, QWEN, max_pixels=1000).min_pixels == 1000


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_pixel": 9}, "`mm_processor_kwargs` must have the keys max_pixels, .* 'max_pixel'"),
        ({"max_pixels": 0}, "`mm_processor_kwargs.max_pixels` must be at least 1, got 0"),
        ({"max_pixels": 255}, "must allow an image of 256 pixels, got at most 255"),
        ({"min_pixels": 99_999}, "must allow an image of 99999 pixels, got at most 40000"),
        ({"size": {"height": 9}}, r"`mm_processor_kwargs\[\"size\"\]` must have the keys longest"),
        ({"max_pixels": 999, "size": {"longest_edge": 999}}, "got both: leave one out"),
    ],
)
def test_wrong_limits(tmp_path, limits, message):
    with pytest.raises(ValueError, match=message):
        read(tmp_path, QWEN, **limits)


def test_a_fixed_size_has_no_limits(tmp_path):
    with pytest.raises(ValueError, match="all 48 x 48 pixels and 4 tokens: leave it out"):
        read(tmp_path, GEMMA, max_pixels=9)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"image_processor_type": "CLIPImageProcessor"},
            "'CLIPImageProcessor' is not supported: pass language_model_only=True for text",
        ),
        ({"do_resize": False}, "`do_resize` must be True, got False"),
        ({"do_pan_and_scan": True}, "`do_pan_and_scan` must be False, got True"),
        ({"rescale_factor": 1}, "`rescale_factor` must be"),
        ({"image_std": [0, 1, 1]}, "`image_std` must be three numbers"),
        ({"image_mean": None}, "`image_mean` must be three numbers"),
        ({"resample": 0}, "`resample` must be 2"),
        ({"patch_size": "8"}, "`patch_size` must be an integer"),
        ({"size": {"longest_edge": -1}}, "`longest_edge` must be an integer"),
    ],
)
def test_what_a_checkpoint_must_not_want(tmp_path, change, message):
    with pytest.raises(ValueError, match=r"preprocessor_config.json: .*" + message):
        read(tmp_path, {**QWEN, **change})


def test_no_file(tmp_path):
    with pytest.raises(ValueError, match=r"has no preprocessor_config.json.*download"):
        read_processor(tmp_path, VISION, 4)
