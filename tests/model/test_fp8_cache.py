"""Keys and values in 8 bits against transformers with a cache that rounds them on its own."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks_in_threads import ranks_of
from transformers import DynamicCache

from checkpoints import (
    PROMPTS,
    SMALL,
    greedy,
    make_checkpoint,
    reference_model,
    tokens,
)
from nanovllm import LLM, RequestOutput

# All numbers of e4m3, by its definition.
NUMBERS = [m / 8 * 2.0**-6 for m in range(8)]
NUMBERS += [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)][:-1]
E4M3 = np.array(sorted({-x for x in NUMBERS} | {*NUMBERS}))
NUM_TOKENS = 20


def nearest(x: torch.Tensor) -> torch.Tensor:
    """The 8-bit values nearest to vectors x: [..., D], by a search in the table of numbers."""
    values = x.double().numpy()
    most = np.abs(values).max(-1, keepdims=True)
    power = 2.0 ** np.ceil(np.log2(np.maximum(most, 1e-18) / 448))
    scaled = values / power
    above = np.searchsorted(E4M3, scaled).clip(1, len(E4M3) - 1)
    lower, upper = E4M3[above - 1], E4M3[above]
    return torch.from_numpy(np.where(scaled - lower < upper - scaled, lower, upper) * power).to(x)


class RoundingCache(DynamicCache):
    """A cache of transformers that holds, and attends to, `nearest` keys and values."""

    def update(self, key: torch.Tensor, value: torch.Tensor, *args: Any, **options: Any) -> Any:
        return super().update(nearest(key), nearest(value), *args, **options)


def reference_logits(path: Path, ids: list[int], rounds: bool = True) -> torch.Tensor:
    """[n, V] of transformers in float32."""
    cache = RoundingCache() if rounds else DynamicCache()
    with torch.inference_mode():
        return reference_model(path)(torch.tensor([ids]), past_key_values=cache).logits[0]


def assert_greedy(path: Path, outputs: list[RequestOutput]) -> None:
    """Check that each of NUM_TOKENS tokens is the likeliest after those before it."""
    for prompt, found in zip(PROMPTS, tokens(outputs), strict=True):
        likeliest = reference_logits(path, [*prompt, *found])[len(prompt) - 1 : -1].argmax(-1)
        assert len(found) == NUM_TOKENS and found == likeliest.tolist()


FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen 3": ("qwen3", {}),
    "gemma 2": (
        "gemma2",
        {"head_dim": 48, "sliding_window": 21, "attn_logit_softcapping": 3.0},
    ),
    "gpt oss": (
        "gpt_oss",
        {"head_dim": 16, "num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": 21},
    ),
}


@pytest.fixture(scope="module", params=FAMILIES)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, options = FAMILIES[request.param]
    return make_checkpoint(tmp_path_factory.mktemp("fp8") / "model", family, **options)


MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks, preemption": {"max_num_batched_tokens": 12, "num_kvcache_blocks": 8},
    "one block": {"kvcache_block_size": 256, "max_model_len": 200},
}


@pytest.mark.usefixtures("low_guesses")
def test_tokens_are_those_of_rounded_keys_and_values(path: Path) -> None:
    """In chunks, after preemptions, with prefix hits: what a step computes changes nothing."""
    seen = dict.fromkeys(("num_preemptions", "num_cached_tokens"), 0)
    for mode, options in MODES.items():
        with LLM(path, kv_cache_dtype="fp8", **{**SMALL, **options}) as llm:
            print(mode)
            assert_greedy(path, llm.generate(PROMPTS, greedy(NUM_TOKENS), use_tqdm=False))
            metrics = llm.metrics()
            assert metrics["kv_cache_dtype"] == "float8_e4m3fn"
        seen = {key: count + metrics[key] for key, count in seen.items()}
    assert min(seen.values()) > 0, seen


def test_logprobs_are_those_of_rounded_keys_and_values(path: Path) -> None:
    """A number that lies between two of the 8 bits may be rounded to either: an element of one key
    in some thousand then differs by a step of 1/16.
    """
    text = [(7 * i) % 127 for i in range(100)]
    following = torch.tensor(text[1:])[:, None]
    rounded, exact = (
        reference_logits(path, text, rounds)[:-1].log_softmax(-1).gather(1, following)[:, 0]
        for rounds in (True, False)
    )
    with LLM(path, kv_cache_dtype="fp8", **SMALL) as llm:
        [score] = llm.score([text], use_tqdm=False)
    error = (torch.tensor(score.logprobs) - rounded).abs()
    print(
        f"median error {error.median():.2g}, most {error.max():.2g}; of rounding "
        f"{(exact - rounded).abs().mean():.2g}"
    )
    assert error.median() < 1e-4
    assert error.mean() < 0.02 * (exact - rounded).abs().mean()


@pytest.mark.usefixtures("threads")
def test_two_ranks(path: Path) -> None:
    with LLM(path, kv_cache_dtype="fp8", tensor_parallel_size=2, **SMALL) as llm:
        assert len(ranks_of(llm).runners) == 2
        assert_greedy(path, llm.generate(PROMPTS, greedy(NUM_TOKENS), use_tqdm=False))


def test_a_pool_holds_nearly_twice_the_tokens(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "model", head_dim=128, dtype="bfloat16")
    counts = {}
    options = {key: value for key, value in SMALL.items() if key != "num_kvcache_blocks"}
    for dtype in ("auto", "fp8"):
        with LLM(
            path, dtype="bfloat16", kv_cache_dtype=dtype, kv_cache_memory_bytes=2**20, **options
        ) as llm:
            counts[dtype] = llm.metrics()["num_kvcache_blocks"]
            pool = llm.model_runner.built.pool
            assert (
                counts[dtype] * pool.block_bytes <= 2**20 < (counts[dtype] + 1) * pool.block_bytes
            )
    assert counts["fp8"] == 2 * counts["auto"] * 128 // 129
