"""Weights that change under CUDA graphs, and memory that is lent, on a GPU."""

import gc
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from new_weights import results, two_checkpoints, with_other_values
from safetensors.torch import load_file

from checkpoints import make_checkpoint
from nanovllm import LLM

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
OPTIONS: dict[str, Any] = {
    "max_model_len": 256,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 512,
    "num_kvcache_blocks": 64,
    "dtype": "bfloat16",
}
SHAPE = {"hidden_size": 512, "intermediate_size": 1024, "head_dim": 64, "vocab_size": 4096}
EXPERTS: dict[str, dict[str, int]] = {
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 256},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 4},
}
FREE = 1 << 29  # bytes that an engine which sleeps may leave on the card


@pytest.fixture(scope="module", params=[False, True], ids=["own head", "tied"])
def paths(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """Two checkpoints of one shape."""
    directory = tmp_path_factory.mktemp("updates")
    return two_checkpoints(directory, tie_word_embeddings=request.param, **SHAPE)


def tensors_of(path: Path, device: str) -> dict[str, torch.Tensor]:
    return load_file(path / "model.safetensors", device=device)


FORMATS: list[dict[str, Any]] = [
    {},
    {"quantization": "fp8"},
    {"quantization": "fp8", "kv_cache_dtype": "fp8"},
    {"enforce_eager": True},
    {"fused_kernels": False},
]


@pytest.mark.parametrize("options", FORMATS, ids=str)
@pytest.mark.parametrize("sleep", [False, True])
def test_new_weights_are_those_of_a_fresh_engine(
    options: dict[str, Any], sleep: bool, paths: tuple[Path, Path]
) -> None:
    """Bit for bit, from tensors of the CPU and of the GPU, with a sleep in between or without."""
    options = {**OPTIONS, **options}
    found = []
    for path in paths:
        with LLM(path, **options) as fresh:
            found.append(results(fresh))
    before, wanted = found
    assert before != wanted
    with LLM(paths[0], **options, enable_sleep_mode=sleep) as llm:
        assert results(llm) == before
        replays = llm.metrics()["num_graph_replays"]
        assert (replays > 0) == (llm.metrics()["cuda_graphs"] > 0)
        for device in ("cpu", "cuda"):
            if sleep:
                llm.sleep(level=2)
                llm.wake_up(tags=["weights"])
            llm.update_weights(tensors_of(paths[1], device))
            llm.wake_up()
            assert results(llm) == wanted
            if sleep:
                llm.sleep(level=1)
                llm.wake_up()
                assert results(llm) == wanted
            llm.update_weights(tensors_of(paths[0], device))
            assert results(llm) == before
        assert (llm.metrics()["num_graph_replays"] > replays) == (replays > 0)


SENDER = """
import json, sys
from transformers import AutoModelForCausalLM
from safetensors.torch import load_file
from nanovllm import share_weights

path, is_model = sys.argv[1], sys.argv[2] == "model"
if is_model:
    tensors = AutoModelForCausalLM.from_pretrained(path, dtype="float32").cuda().state_dict()
else:
    tensors = load_file(f"{path}/model.safetensors", device="cuda")
with share_weights(tensors) as message:
    print(json.dumps(message), flush=True)
    sys.stdin.readline()
"""


TWO_GPUS: list[dict[str, int]] = [{"tensor_parallel_size": 2}, {"data_parallel_size": 2}]


@contextmanager
def shared(path: Path, kind: str) -> Iterator[dict[str, Any]]:
    """The message of another process that shares a checkpoint's tensors, or those of its model in
    transformers.
    """
    command = [sys.executable, "-c", SENDER, str(path), kind]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as sender:
        assert sender.stdin is not None and sender.stdout is not None
        message = json.loads(sender.stdout.readline())
        assert len(message["memory"]["handle"]) == 128
        yield message
        print(file=sender.stdin, flush=True)


@pytest.mark.parametrize(
    "options", [{}, *(pytest.param(way, marks=pytest.mark.multi_gpu) for way in TWO_GPUS)], ids=str
)
def test_tensors_of_another_process_by_cuda_ipc(
    options: dict[str, int], paths: tuple[Path, Path]
) -> None:
    options = {**OPTIONS, **options}
    with LLM(paths[1], **options) as fresh:
        wanted = results(fresh)
    with LLM(paths[0], **options) as llm, shared(paths[1], "checkpoint") as message:
        for _ in range(3):
            llm.update_weights(tensors_of(paths[0], "cuda"))
            llm.update_weights_ipc(message)
            assert results(llm) == wanted


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"quantization": "fp8"},
        *(pytest.param(way, marks=pytest.mark.multi_gpu) for way in TWO_GPUS),
    ],
    ids=str,
)
def test_experts_that_a_model_of_transformers_stacks(
    options: dict[str, Any], family: str, tmp_path: Path
) -> None:
    """One tensor has many of the engine's: views of memory on the GPU, and of another process."""
    options = {**OPTIONS, **options}
    path = make_checkpoint(tmp_path / "old", family, **SHAPE, **EXPERTS[family])
    other = with_other_values(path, tmp_path / "new")
    with LLM(other, **options) as fresh:
        wanted = results(fresh)
    model = transformers.AutoModelForCausalLM.from_pretrained(other, dtype=torch.float32)
    new = model.to(DEVICE).state_dict()
    stacked = [name for name in new if ".experts." in name]
    assert stacked and all(new[name].dim() == 3 for name in stacked)
    old = tensors_of(path, DEVICE)
    with LLM(path, **options) as llm:
        before = results(llm)
        assert before != wanted
        for tensors in (new, iter(new.items())):
            llm.update_weights(tensors)
            assert results(llm) == wanted
            llm.update_weights(old)
            assert results(llm) == before
        with shared(other, "model") as message:
            llm.update_weights_ipc(message)
            assert results(llm) == wanted


def test_memory_goes_and_comes(paths: tuple[Path, Path]) -> None:
    """Of a KV cache of 4 GiB, again and again."""
    torch.zeros(1, device="cuda")
    gc.collect()
    torch.cuda.empty_cache()  # of tests before this
    options = {**OPTIONS, "num_kvcache_blocks": -1, "kv_cache_memory_bytes": 4 << 30}
    before = torch.cuda.mem_get_info()[0]
    tensors = [tensors_of(path, "cpu") for path in paths]
    with LLM(paths[0], **options, enable_sleep_mode=True) as llm:
        wanted = [results(llm)]
        llm.update_weights(tensors[1])
        wanted.append(results(llm))
        awake = torch.cuda.mem_get_info()[0]
        assert before - awake > 3.9 * 2**30  # in whole blocks
        left = []
        for i in range(100):
            llm.sleep(level=2)
            left.append(before - torch.cuda.mem_get_info()[0])
            llm.wake_up(tags=["weights"])
            llm.update_weights(tensors[i % 2])
            llm.wake_up(tags=["kv_cache"])
            if i % 10 < 2:
                assert results(llm) == wanted[i % 2]
        print(f"asleep: {left[0] / 2**20:.0f} MiB, at last {left[-1] / 2**20:.0f} MiB")
        assert left[-1] <= left[2] < FREE
    assert before - torch.cuda.mem_get_info()[0] < FREE


@pytest.mark.multi_gpu
@pytest.mark.parametrize("options", TWO_GPUS, ids=str)
def test_two_gpus(options: dict[str, int], paths: tuple[Path, Path]) -> None:
    options = {**OPTIONS, **options}
    found = []
    for path in paths:
        with LLM(path, **options) as fresh:
            found.append(results(fresh))
    with LLM(paths[0], **options, enable_sleep_mode=True) as llm:
        assert results(llm) == found[0]
        for device in ("cpu", "cuda"):
            llm.sleep(level=2)
            llm.wake_up(tags=["weights"])
            llm.update_weights(tensors_of(paths[1], device))
            llm.wake_up()
            assert results(llm) == found[1]
            llm.update_weights(tensors_of(paths[0], device))
            assert results(llm) == found[0]
