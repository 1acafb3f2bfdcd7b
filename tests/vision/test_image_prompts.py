"""Prompts with images against transformers' `generate`, with the pixels of its own processor:
tiny random checkpoints, float32, CPU.
"""

from pathlib import Path
from typing import Any

import pytest
from modes import Mode, engine_in, in_every_mode
from vision_checkpoints import VISION, picture, reference, run

from checkpoints import greedy, tokens

FLAT, TALL = picture(32, 256, 1), picture(192, 64, 2)
LARGE, OTHER = picture(160, 192, 3), picture(160, 192, 4)  # of equal size
SMALL_ONE = picture(32, 32, 5)
CHANGED = LARGE.copy()
CHANGED[100, 7, 1] ^= 1  # one bit of one pixel
# One image and two, wide and tall, at the beginning, between text and at the end, equal twice;
# prefixes with an equal image, with another of its size, and with one that differs in a bit.
PROMPTS: list[list[Any]] = [
    [[1, 2, 3], FLAT, [4, 5, 6]],
    [[7] * 20],
    [FLAT, [9], TALL],
    [[5], LARGE, [3] * 12],
    [[5], OTHER, [3] * 12],
    [[5], LARGE, [3] * 12, [1]],
    [[5], CHANGED, [3] * 12],
    [LARGE, [4], LARGE, [6]],
    [[8] * 40, SMALL_ONE, [2], TALL, [2]],
]
LENGTHS = [12, 25, 9, 24, 19, 22, 17, 18, 20]
PARAMS = [greedy(n) for n in LENGTHS]
MODELS = ["qwen3-vl"]


@pytest.fixture(scope="module", params=MODELS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return VISION[request.param](tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def wanted(path: Path) -> list[list[int]]:
    """What transformers says; something else of each large picture."""
    found = [reference(path, *request) for request in zip(PROMPTS, LENGTHS, strict=True)]
    assert found[3][:9] != found[4]
    return found


@in_every_mode("chunks-overlap", "chunks-of-7", "small-pool-overlap", "no-cache")
def test_tokens_are_those_of_transformers(mode: Mode, path: Path, wanted: list[list[int]]) -> None:
    with engine_in(mode, path) as llm:
        assert tokens(run(llm, PROMPTS, PARAMS)) == wanted
        metrics = llm.metrics()
        assert metrics["num_images_encoded"] >= 6, "different images"
        if mode.caches:
            assert metrics["num_image_hits"] > 0
