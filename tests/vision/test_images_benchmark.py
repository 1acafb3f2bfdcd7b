"""`benchmarks/images.py` at tiny size on a CPU."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks import images


def test_images_per_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "results"
    options = {"device": "cpu", "num_kvcache_blocks": 16, "max_num_seqs": 4, "max_model_len": 256}
    options["max_num_batched_tokens"] = 256
    args = ["--shape", "tiny", "--images", "3x320x240", "2x240x320", "--tokens", "2"]
    args += ["--memory", "21x64x64"]
    args += ["--options", json.dumps(options), "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["images", *args])
    images.main()
    result = json.loads(output.read_text())
    first, second = result["results"]
    assert [first["size"], second["size"]] == ["320 x 240", "240 x 320"]
    # 320 x 256 pixels, 8 + 3 + 24 tokens of text.
    assert first["prompt_tokens_per_image"] == second["prompt_tokens_per_image"] == 114
    for found in (first, second):
        assert found["images_per_second"] == pytest.approx(found["images"] / found["seconds"])
        assert found["encode_ms_per_image"] > 0 and found["preparation_alone"] > 0
        assert found["gpu_busy"] == found["gpu_in_steps"] == 0
    memory = result["memory"]
    assert 100 < memory["resident_after_a_tenth"] <= memory["resident_at_most"] < 20_000


def test_time_in_which_kernels_run() -> None:
    """What runs side by side counts once, and what is between two does not."""
    assert images.union([(5, 7), (0, 2), (1, 3), (10, 20), (12, 15), (20, 21)]) == 3 + 2 + 11
    assert images.union([]) == 0


def test_no_two_photographs_are_alike() -> None:
    files = images.photographs(images.Images(20, 64, 48), 5)
    assert len({*files}) == 20 and files[1:] == images.photographs(images.Images(19, 64, 48), 6)
