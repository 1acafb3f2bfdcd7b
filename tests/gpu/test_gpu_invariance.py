"""`batch_invariant` on CUDA devices: bits of log-probabilities depend on nothing else in a step, by
kernels and CUDA graphs.
"""

import json
import random
from pathlib import Path
from typing import Any

import calls
import pytest
from invariance import CHECKPOINTS, Workload, differences, preempt_each, was_preempted

from checkpoints import make_checkpoint
from nanovllm import LLM, RequestOutput
from nanovllm.benchmark.shapes import SHAPES

pytestmark = pytest.mark.gpu
SEED = 41
FP8 = {"quantization": "fp8", "kv_cache_dtype": "fp8"}
# Chunks end within blocks, and within tiles of queries and keys.
WAYS: dict[str, dict[str, Any]] = {
    "batch": {"max_num_batched_tokens": 16384},
    "chunks": {"max_num_batched_tokens": 201, "max_num_seqs": 100},
    "eager": {"enforce_eager": True, "overlap": False, "max_num_batched_tokens": 3001},
    "preempted": {"num_kvcache_blocks": 300, "max_num_batched_tokens": 5000, "overlap": False},
    "hits": {"max_num_batched_tokens": 1999},
}
SMALL: dict[str, Any] = {
    "batch_invariant": True,
    "dtype": "bfloat16",
    "kvcache_block_size": 16,
    "num_kvcache_blocks": 256,
    "max_num_seqs": 16,
    "max_model_len": 256,
}
FEW_WAYS: dict[str, dict[str, Any]] = {
    "batch": {"max_num_batched_tokens": 2048},
    "chunks": {"max_num_batched_tokens": 19, "max_num_seqs": 5},
    "hits": {"max_num_batched_tokens": 149},
}


def generate(llm: LLM, prompts: Any, params: Any) -> list[RequestOutput]:
    """Without a look at the books after each step."""
    return llm.generate(prompts, params, use_tqdm=False)


def dummy(directory: Path, shape: str) -> Path:
    """A config.json; `load_format="dummy"` draws the weights."""
    (directory / "config.json").write_text(json.dumps(SHAPES[shape]))
    return directory


@pytest.mark.parametrize("options", [{}, FP8], ids=["bf16", "fp8"])
def test_a_thousand_prompts(options: dict[str, Any], tmp_path: Path) -> None:
    """Alone, in a batch of 256 with a second completion of each, in chunks, without graphs, each
    preempted once, and with its prefix in the cache.
    """
    rng = random.Random(SEED)
    lengths = [rng.choice((1, 2, rng.randrange(3, 700))) for _ in range(1000)]
    work = Workload(SEED, lengths, max_tokens=5, vocab_size=150000, shared=260)
    options = {
        **{"batch_invariant": True, "load_format": "dummy", "num_kvcache_blocks": 1200},
        **{"max_num_seqs": 256, "max_model_len": 1024, **options},
    }
    path = dummy(tmp_path, "qwen3-0.6b")
    assert differences(path, work, options, WAYS, generate, each=True) == []


@pytest.mark.parametrize("options", [{}, FP8], ids=["bf16", "fp8"])
def test_without_it_bits_differ(options: dict[str, Any], tmp_path: Path) -> None:
    work = Workload(SEED, range(1, 300, 10), max_tokens=4, vocab_size=150000, shared=260)
    options = {"load_format": "dummy", "num_kvcache_blocks": 256, "max_model_len": 1024, **options}
    path, ways = dummy(tmp_path, "qwen3-0.6b"), {way: WAYS[way] for way in ("batch", "chunks")}
    assert differences(path, work, options, ways, generate) == ["batch", "chunks"]


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_families(name: str, tmp_path: Path) -> None:
    family, shape = CHECKPOINTS[name]
    path = make_checkpoint(tmp_path / "model", family, **shape)
    work = Workload(SEED, range(1, 100, 9), max_tokens=9, shared=64)
    assert differences(path, work, SMALL, FEW_WAYS, generate) == []


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "float32"},
        {"dtype": "float16"},
        {"kv_cache_dtype": "fp8"},
        {"fused_kernels": False},
        {"attention_backend": "torch"},
        {"kvcache_block_size": 256, "num_kvcache_blocks": 32},
    ],
    ids=str,
)
def test_options(options: dict[str, Any], checkpoint: Path) -> None:
    work = Workload(SEED, range(1, 100, 9), max_tokens=9, shared=64)
    ways = FEW_WAYS
    if "kvcache_block_size" in options:  # no prompt fills a block
        ways = {way: FEW_WAYS[way] for way in ("batch", "chunks")}
    assert differences(checkpoint, work, SMALL | options, ways, generate) == []


@pytest.mark.parametrize("shape", ["qwen3-30b-a3b", "gpt-oss-20b", "qwen3.5-35b-a3b", "gemma-3-4b"])
def test_shapes(shape: str, tmp_path: Path) -> None:
    """Four layers of published shapes, whose products and heads have other tiles."""
    config = SHAPES[shape] | {"num_hidden_layers": 4}
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:4]
    (tmp_path / "config.json").write_text(json.dumps(config))
    work = Workload(SEED, range(1, 400, 13), max_tokens=6, vocab_size=100000, shared=260)
    options = {"batch_invariant": True, "load_format": "dummy", "max_num_seqs": 32}
    options |= {"num_kvcache_blocks": 512, "max_model_len": 2048}
    ways = {way: WAYS[way] for way in ("batch", "chunks", "hits")}
    ways["chunks"] = {"max_num_batched_tokens": 201}
    assert differences(tmp_path, work, options, ways, generate) == []


@pytest.mark.parametrize("way", ["graphs", "preempted"])
def test_calls(way: str) -> None:
    """Requests of all kinds beside each other, scores, vectors and beams, as
    `test_invariant_calls.py` has them.
    """
    pytest.importorskip("llguidance")
    options = {"device": "cuda", "dtype": "bfloat16"}
    wanted = calls.alone(**options)
    options |= calls.CHUNKS | ({} if way == "graphs" else {"enforce_eager": True, "overlap": False})
    with LLM(calls.TINY, **{**calls.OPTIONS, **options}) as llm:
        with pytest.MonkeyPatch.context() as patch:
            if way == "preempted":
                preempt_each(patch, 4)
            outputs = calls.run(llm)
        assert any(map(was_preempted, outputs)) == (way == "preempted")
        assert llm.metrics()["num_graph_replays"] > 0 or way == "preempted"
        assert ([*map(calls.shown, outputs)], calls.of_texts(llm, calls.TEXTS)) == wanted


def test_reports_of_a_large_vocabulary(tmp_path: Path) -> None:
    """Controls, labels and masks: of each request alone, and beside all others."""
    rng = random.Random(SEED)
    prompts = [[rng.randrange(150000) for _ in range(n)] for n in (1, 30, 300)]
    requests = calls.requests_of(prompts, "form")
    options = {"batch_invariant": True, "load_format": "dummy", "num_kvcache_blocks": 64}
    options |= {"max_num_seqs": 32, "max_model_len": 1024}
    with LLM(dummy(tmp_path, "qwen3-0.6b"), **options) as llm:
        beside = [*map(calls.shown, calls.run(llm, requests))]
        assert beside == [calls.shown(calls.run(llm, [each])[0]) for each in requests]


@pytest.mark.multi_gpu
@pytest.mark.parametrize("options", [{}, FP8], ids=["bf16", "fp8"])
def test_two_ranks_agree_with_themselves(options: dict[str, Any], tmp_path: Path) -> None:
    work = Workload(SEED, range(1, 600, 7), max_tokens=6, vocab_size=150000, shared=260)
    options = {
        **{"batch_invariant": True, "load_format": "dummy", "num_kvcache_blocks": 400},
        **{"max_num_seqs": 64, "max_model_len": 1024, "tensor_parallel_size": 2, **options},
    }
    ways = {way: WAYS[way] for way in ("batch", "eager", "hits")}
    assert differences(dummy(tmp_path, "qwen3-0.6b"), work, options, ways, generate) == []
