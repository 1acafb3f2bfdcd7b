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
        assert found["encode_ms_per_image"] > 0 and found["preparation_bound"] > 0
        assert found["gpu_busy"] == 0
