"""Numbers of kernels that models need on an H100, all of them rehearsed. Nothing is compiled.

A kernel more is compiled by each user once; whoever adds one changes the table.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

triton = pytest.importorskip("triton")
TRITON = tuple(map(int, triton.__version__.split(".")[:2]))

STAND_IN = Path(__file__).parents[1] / "stand_in.py"
SOME = ["plain", "one prompt", "prefix of a group", "all controls"]  # kinds of work


class Model(NamedTuple):
    """An engine of a model that is cut to a few layers, and its kernels.

    Attributes:
        start: kernels that the engine launches during its start.
        later: kernels that only some requests need.
        shape: name of the model's shape; "": its own.
    """

    options: dict[str, Any]
    start: int
    later: int
    kinds: list[str] | None = SOME
    num_layers: int = 2
    num_seqs: int = 64
    shape: str = ""


# Layers in FP8, in 16 bits, in FP8 twice, in 16 bits: what follows each other is other kernels.
PARTLY = {
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["model.layers.1", "model.layers.4"],
}
MODELS = {
    "qwen3-0.6b": Model({"max_model_len": 4096}, 27, 21, kinds=None, num_seqs=256),
    "qwen3-8b": Model({"max_model_len": 16384, "quantization": "fp8"}, 45, 22),
    "qwen3-30b-a3b": Model({"max_model_len": 4096}, 32, 24),
    "gpt-oss-20b": Model({"max_model_len": 40960}, 37, 28),
    "partly in fp8": Model(
        {"max_model_len": 4096, "quantization_config": PARTLY},
        48
        + (TRITON >= (3, 9)),  # seen: a product in FP8 is one kernel there with 3.8, two with 3.9
        21,
        num_layers=5,
        shape="qwen3-0.6b",
    ),
    # Whose keys are gathered for prompts that follow others.
    "fp8 cache": Model(
        {"max_model_len": 32768, "kv_cache_dtype": "fp8", "max_num_batched_tokens": 1024},
        29,
        27,
        kinds=["plain", "one prompt", "long prompts", "prefix of all prompts"],
        num_seqs=16,
        shape="qwen3-0.6b",
    ),
    "qwen3.5-35b-a3b": Model({"max_model_len": 4096}, 35, 29, num_layers=4),
    "gemma-3-4b": Model({"max_model_len": 16384}, 25, 20, num_layers=7),  # one of them is global
}


@pytest.mark.slow
def test_all_kernels_are_rehearsed_and_so_many() -> None:
    jobs = [
        {
            "kind": "kernel counts",
            "shape": model.shape or name,
            "num_layers": model.num_layers,
            "num_seqs": model.num_seqs,
            "kinds": model.kinds,
            **model.options,
        }
        for name, model in MODELS.items()
    ]
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, STAND_IN, "9.0", json.dumps(jobs)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    counts = {}
    for name, found in zip(MODELS, json.loads(done.stdout.splitlines()[-1]), strict=True):
        start, later = found.pop("start"), found.pop("later")
        counts[name] = sum(start.values()), sum(later.values())
        assert len(found) > len(SOME) and {what: of for what, of in found.items() if of} == {}, name
    assert counts == {name: (model.start, model.later) for name, model in MODELS.items()}
