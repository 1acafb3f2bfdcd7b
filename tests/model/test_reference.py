"""The engine against transformers' own Qwen3, on the embedded checkpoint, float32, CPU.

Whatever the engine does to run faster or in less memory (blocks, chunks, preemption, prefix hits,
batches, backends), greedy tokens are those of the reference.
"""

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import train_tiny
from draws import chi_square_p
from invariants import check_scheduler
from tiny_reference import GREEDY, SEED, assert_greedy, make_prompts
from transformers import Qwen3ForCausalLM

from checkpoints import make_checkpoint, rare, tokens, with_rare
from nanovllm import LLM, RequestOutput, SamplingParams


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return make_prompts()


def run(tiny: str, prompts: list[list[int]], **options: Any) -> tuple[list[RequestOutput], dict]:
    with LLM(tiny, **options) as llm:
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        check_scheduler(llm.scheduler)
        metrics = llm.metrics()
        assert metrics["num_used_kvcache_blocks"] == 0
        return outputs, metrics


class RecordingSampler:
    """Greedy, and keeps the logits it saw."""

    def __init__(self) -> None:
        self.logits: list[torch.Tensor] = []

    def __call__(self, logits: torch.Tensor, *_: Any) -> torch.Tensor:
        self.logits.append(logits.float())
        return logits.argmax(-1).to(torch.int32)


@pytest.mark.parametrize("block_size", [16, rare(256)])
@pytest.mark.parametrize("chunk", [None, 24], ids=["whole", "chunked"])
def test_logits_are_those_of_the_reference(
    tiny: str, reference: Any, block_size: int, chunk: int | None
) -> None:
    """Prompts of 1 to 3 blocks, and the decode steps that follow, within 1e-4."""
    blocks = range(1, 3 * block_size + 1, 1 if block_size == 16 else 85)
    options: dict[str, Any] = {"kvcache_block_size": block_size, "num_kvcache_blocks": 64}
    if chunk:
        options |= {"max_num_batched_tokens": chunk, "max_num_seqs": 4}
    rng = random.Random(SEED)
    with LLM(tiny, enable_prefix_caching=False, **options) as llm:
        for length in blocks:
            prompt = [rng.randrange(256) for _ in range(length)]
            sampler = llm.model_runner.built.step.sampler = RecordingSampler()
            params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
            output = llm.generate([prompt], params, use_tqdm=False)[0]
            with torch.no_grad():
                ids = torch.tensor([prompt + output["token_ids"][:-1]])
                want = reference(ids).logits[0, length - 1 :]
            torch.testing.assert_close(torch.cat(sampler.logits), want, atol=1e-4, rtol=0)


MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "block-16": {"kvcache_block_size": 16},
    "one-sequence": {"max_num_seqs": 1},
    "overlap": {"overlap": True},
    "no-prefix-cache": {"enable_prefix_caching": False},
    "chunks-of-one": {"max_num_batched_tokens": 12, "max_num_seqs": 12},
    "chunked-overlap": {"max_num_batched_tokens": 40, "max_num_seqs": 12, "overlap": True},
    "prefill-first": {"mixed_steps": False},
}
USUAL_MODES = ("block-16", "chunked-overlap")


@pytest.mark.parametrize("mode", with_rare(MODES, *MODES.keys() - USUAL_MODES))
def test_greedy_tokens_are_those_of_the_reference(
    tiny: str, prompts: list[list[int]], reference: Any, mode: str
) -> None:
    outputs, metrics = run(tiny, prompts, num_kvcache_blocks=256, **MODES[mode])
    assert_greedy(reference, prompts, tokens(outputs))
    budget = MODES[mode].get("max_num_batched_tokens", 16384)
    assert metrics["num_steps"] >= sum(map(len, prompts)) / budget


def test_order_does_not_matter(tiny: str, prompts: list[list[int]], reference: Any) -> None:
    shuffled = random.Random(SEED).sample(prompts, len(prompts))
    outputs, _ = run(tiny, shuffled, num_kvcache_blocks=64)
    assert_greedy(reference, shuffled, tokens(outputs))


def test_the_last_layer_computes_no_rows_that_nobody_wants(tiny: str) -> None:
    """Rows of prompts whose next token is known, unless their hidden states are asked for."""
    prompts = [[1] * 9, [2] * 5]
    steps: list[list[int]] = []
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 8, "num_kvcache_blocks": 4}
    with LLM(tiny, dtype="float32", device="cpu", **limits) as llm:
        layers = llm.model_runner.model.model.layers
        layers[0].mlp.register_forward_pre_hook(lambda _, args: steps.append([len(args[0])]))
        layers[-1].mlp.register_forward_pre_hook(lambda _, args: steps[-1].append(len(args[0])))
        llm.generate(prompts, SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
        # 8 of the first prompt, all since none is wanted; its last and the second whole; decodes.
        assert steps == [[8, 8], [6, 2], [2, 2], [2, 2]]
        for ask in (llm.embed, llm.score):
            steps.clear()
            ask([[3] * 6, [4] * 2], use_tqdm=False)
            assert steps == [[8, 8]]


@pytest.mark.parametrize("mixed", [True, rare(False)], ids=["mixed", "prefill-first"])
@pytest.mark.parametrize("overlap", [rare(False), True], ids=["synchronous", "overlap"])
@pytest.mark.parametrize(
    "caching",
    [
        pytest.param(True, id="prefix-cache"),
        pytest.param(False, id="no-prefix-cache", marks=pytest.mark.slow),
    ],
)
@pytest.mark.usefixtures("low_guesses")
def test_preemption_does_not_change_tokens(
    tiny: str,
    prompts: list[list[int]],
    reference: Any,
    caching: bool,
    overlap: bool,
    mixed: bool,
) -> None:
    """Admission that expects one token of everybody overfills the pool."""
    short = [prompt for prompt in prompts if len(prompt) < 200]
    assert len(short) >= 64
    outputs, metrics = run(
        tiny,
        short,
        kvcache_block_size=16,
        num_kvcache_blocks=14,
        enable_prefix_caching=caching,
        overlap=overlap,
        mixed_steps=mixed,
    )
    assert metrics["overlap"] == overlap
    assert metrics["num_preemptions"] > 5
    assert_greedy(reference, short, tokens(outputs))


@pytest.mark.parametrize("block_size", [16, rare(256)])
def test_prefix_hits_do_not_change_tokens(
    tiny: str, prompts: list[list[int]], reference: Any, block_size: int
) -> None:
    """The same prompts twice: the second time all but the last, partial block is cached."""
    with LLM(tiny, kvcache_block_size=block_size, num_kvcache_blocks=1024) as llm:
        for cached in (False, True):
            outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
            assert_greedy(reference, prompts, tokens(outputs))
            for prompt, output in zip(prompts, outputs, strict=True):
                most = (len(prompt) - 1) // block_size * block_size
                assert output.num_cached_tokens == (most if cached else 0)


@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_shared_prefixes_and_whole_blocks(tiny: str, reference: Any, blocks: int) -> None:
    """Prompts that share `blocks` blocks, one of them exactly those, in one batch and later."""
    rng = random.Random(SEED + blocks)
    shared = [rng.randrange(256) for _ in range(16 * blocks)]
    prompts = [shared, *([*shared, *(rng.randrange(256) for _ in range(n))] for n in (1, 15, 40))]
    with LLM(tiny, kvcache_block_size=16, num_kvcache_blocks=64) as llm:
        first = llm.generate(prompts, GREEDY, use_tqdm=False)
        again = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert_greedy(reference, prompts, tokens(first))
    assert tokens(first) == tokens(again)
    # Within the batch the first computes the prefix and the others wait for it.
    assert [o.num_cached_tokens for o in first] == [0] + [16 * blocks] * 3
    assert [o.num_cached_tokens for o in again] == [
        (len(prompt) - 1) // 16 * 16 for prompt in prompts
    ]


@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="kernels are compiled for the GPU here"
)
def test_triton_backend_under_the_interpreter(
    tiny: str, prompts: list[list[int]], reference: Any
) -> None:
    """Our kernels, chunked prefill with cached context and mixed steps included."""
    few = [prompts[i] for i in (0, 30, 44, 47, 50)]
    with LLM(
        tiny,
        device="cpu",
        attention_backend="triton",
        kvcache_block_size=16,
        num_kvcache_blocks=64,
        max_num_batched_tokens=24,
        max_num_seqs=4,
    ) as llm:
        params = SamplingParams(temperature=0, max_tokens=5)
        outputs = llm.generate(few, params, use_tqdm=False)
        assert llm.metrics()["attention_backend"] == "triton"
    assert_greedy(reference, few, tokens(outputs), 5)


@pytest.mark.slow
def test_held_out_additions(tiny: str) -> None:
    """The embedded checkpoint adds numbers it has never seen, in at least 99 % of 1,000 cases."""
    rng = random.Random(SEED)
    pairs = [(rng.randint(100, 999), rng.randint(100, 999)) for _ in range(40_000)]
    pairs = [pair for pair in pairs if train_tiny.is_held_out(*pair)][:1000]
    assert len(pairs) == 1000
    with LLM(tiny) as llm:
        outputs = llm.generate(
            [train_tiny.addition_prompt(a, b) for a, b in pairs], GREEDY, use_tqdm=False
        )
    right = [o["text"] == str(a + b) for (a, b), o in zip(pairs, outputs, strict=True)]
    print("right:", sum(right))
    assert sum(right) >= 990
    assert {o.outputs[0].finish_reason for o in outputs} == {"stop"}


@pytest.mark.slow  # test_generation_controls.py compares each draw with an oracle
def test_samples_follow_the_reference_distribution(tmp_path: Path) -> None:
    """Chi-square over 4,000 draws for each temperature, with greedy requests in the batch."""
    model = str(make_checkpoint(tmp_path, initializer_range=0.2))
    reference = Qwen3ForCausalLM.from_pretrained(model, torch_dtype=torch.float32)
    prompt = [3, 1, 4, 1, 5]
    with torch.no_grad():
        logits = reference(torch.tensor([prompt])).logits[0, -1].double()
    temperatures = [0.7, 1.5, 0.0]
    params = [SamplingParams(temperature=t, max_tokens=1) for t in temperatures] * 4_000
    with LLM(model, seed=SEED) as llm:
        drawn = tokens(llm.generate([prompt] * len(params), params, use_tqdm=False))
    flat = [token for (token,) in drawn]
    assert set(flat[2::3]) == {int(logits.argmax())}
    for i, temperature in enumerate(temperatures[:2]):
        probs = (logits / temperature).softmax(-1).numpy()
        p = chi_square_p(flat[i::3], probs)
        print("temperature", temperature, "p", p, "distinct", len(set(flat[i::3])))
        assert p > 1e-3
        wrong = chi_square_p(flat[i::3], (logits / (temperature * 1.2)).softmax(-1).numpy())
        assert wrong < 1e-6, "the test cannot tell distributions apart"


@pytest.fixture
def make_llm(tiny: str) -> Callable[..., LLM]:
    return lambda **options: LLM(tiny, **options)


def test_bfloat16_on_the_cpu(make_llm: Callable[..., LLM]) -> None:
    with make_llm(device="cpu", dtype="bfloat16") as llm:
        assert llm.metrics()["dtype"] == "bfloat16"
        assert llm.generate("127+345=", GREEDY, use_tqdm=False)[0]["text"] == "472"
