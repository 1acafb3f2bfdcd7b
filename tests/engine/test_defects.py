"""Wrong results that users of other engines met, one test each, end to end on the CPU.

The other defects have their tests beside what they concern; list all with
`grep -riE "defect[ _][0-9]+" tests`. The same paths run under CUDA graphs in test_gpu.py.
"""

import random
from typing import Any

import pytest
import torch
import train_tiny
from tiny_reference import GREEDY, assert_greedy, likeliest

from checkpoints import rare, tokens
from nanovllm import LLM, SamplingParams

SEED = 5


def random_prompt(n: int, seed: int = SEED) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(n)]


@pytest.mark.parametrize("prompt_len", [1, 15, 16, rare(17), rare(31), rare(32), rare(46), 47])
def test_defect_1_output_ends_at_max_model_len(tiny: str, prompt_len: int) -> None:
    """Prompt and output beyond max_model_len ran off the end of the block table."""
    params = SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True)
    with LLM(tiny, max_model_len=48, kvcache_block_size=16, num_kvcache_blocks=12) as llm:
        prompts = [random_prompt(prompt_len), random_prompt(5), random_prompt(prompt_len, 1)]
        for output, prompt in zip(llm.generate(prompts, params, False), prompts, strict=True):
            assert len(prompt) + len(output["token_ids"]) == 48
            assert output.outputs[0].finish_reason == "length"
        with pytest.raises(ValueError, match="max_model_len 48"):
            llm.generate([random_prompt(48)], params)


@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_defect_8_prompt_of_whole_blocks_fully_cached(
    tiny: str, reference: Any, blocks: int
) -> None:
    """Nothing was left to compute, so there were no logits to sample from."""
    prompt = random_prompt(16 * blocks)
    with LLM(tiny, kvcache_block_size=16, num_kvcache_blocks=16) as llm:
        outputs = [llm.generate([prompt], GREEDY, False)[0] for _ in range(2)]
    assert outputs[1].num_cached_tokens == 16 * (blocks - 1)
    assert_greedy(reference, [prompt] * 2, tokens(outputs))


@pytest.mark.usefixtures("low_guesses")
def test_defect_8_prefix_hit_when_a_preempted_sequence_resumes(
    tiny: str, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resumed sequence finds its own blocks; positions and tokens must not shift."""
    prompts = [random_prompt(60 + i, seed=i) for i in range(6)]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with LLM(tiny, kvcache_block_size=16, num_kvcache_blocks=64) as llm:
        expected = tokens(llm.generate(prompts, params, False))
        assert llm.metrics()["num_preemptions"] == 0
    hits = 0
    with LLM(tiny, kvcache_block_size=16, num_kvcache_blocks=27) as llm:
        start = llm.scheduler._start

        def count_hits(seq: Any, found: Any, end: int) -> Any:
            nonlocal hits
            item = start(seq, found, end)
            hits += bool(seq.num_preemptions and seq.num_computed_tokens)
            return item

        monkeypatch.setattr(llm.scheduler, "_start", count_hits)
        outputs = llm.generate(prompts, params, False)
        assert llm.metrics()["num_preemptions"] > 0
    assert hits > 0
    assert tokens(outputs) == expected
    whole = (*prompts[0], *expected[0])
    assert likeliest(reference, whole)[len(prompts[0]) - 1 : -1] == expected[0]


def test_defect_8_a_reused_block_is_not_found_by_its_old_hash(tiny: str, reference: Any) -> None:
    """A stale entry served the keys and values of whatever the block held by then."""
    first, second = random_prompt(40, 1), random_prompt(90, 2)
    with LLM(tiny, kvcache_block_size=16, num_kvcache_blocks=7) as llm:
        for prompt in (first, second, first, second):  # each run evicts the other's blocks
            output = llm.generate([prompt], GREEDY, False)[0]
            assert_greedy(reference, [prompt], [output["token_ids"]])


def test_defect_8_a_chunk_attends_to_what_is_computed_only(tiny: str, reference: Any) -> None:
    """A chunk saw keys up to the end of the whole prompt, which were not there yet."""
    prompt = random_prompt(150)
    options: dict[str, Any] = {"max_num_batched_tokens": 32, "max_num_seqs": 2}
    with LLM(tiny, kvcache_block_size=16, num_kvcache_blocks=32, **options) as llm:
        with torch.inference_mode():
            for layer in llm.model_runner.model.model.layers:  # what is not written yet would show
                for part in layer.self_attn.attn.cache[:2]:
                    part.fill_(1e4)
        output = llm.generate([prompt], GREEDY, False)[0]
        assert llm.metrics()["num_steps"] >= 150 // 32 + len(output["token_ids"])
    assert_greedy(reference, [prompt], [output["token_ids"]])


def test_defect_8_shared_blocks_are_computed_before_they_are_read(
    tiny: str, reference: Any
) -> None:
    """A hit on a block whose owner, in the same batch, was still being prefilled in chunks."""
    shared = random_prompt(64)
    prompts = [[*shared, *random_prompt(10 + i, seed=i)] for i in range(4)]
    options: dict[str, Any] = {"max_num_batched_tokens": 24, "max_num_seqs": 4}
    with LLM(tiny, kvcache_block_size=16, num_kvcache_blocks=64, **options) as llm:
        outputs = llm.generate(prompts, GREEDY, False)
        assert llm.metrics()["num_cached_tokens"] == 3 * 64
    assert_greedy(reference, prompts, tokens(outputs))


def test_defect_23_a_long_prompt_does_not_stall_decodes(tiny: str) -> None:
    """Every step that prefills the long prompt also gives the running request its token."""
    options: dict[str, Any] = {"max_num_batched_tokens": 64, "max_num_seqs": 2}
    with LLM(tiny, max_model_len=1024, num_kvcache_blocks=16, **options) as llm:
        llm.add_request(random_prompt(8), SamplingParams(max_tokens=40, ignore_eos=True))
        llm.step()
        (running,) = llm.scheduler.running
        llm.add_request(random_prompt(1000), SamplingParams(max_tokens=1))
        for _ in range(15):  # 1000 tokens take 16 steps of 63
            before = running.num_completion_tokens
            assert llm.step() == []
            assert running.num_completion_tokens == before + 1
        assert llm.metrics()["num_prefill_tokens"] == 8 + 15 * 63


def test_the_embedded_tasks_read_well(tiny: str) -> None:
    """The output of `python example.py`."""
    answers = {
        "127+345=": "472",
        train_tiny.reverse_prompt("hello"): "olleh",
        train_tiny.count_prompt(17): train_tiny.count_answer(17),
        train_tiny.PRIMES_PROMPT: train_tiny.PRIMES_ANSWER,
        train_tiny.INTRO_PROMPT: train_tiny.INTRO_ANSWER,
    }
    with LLM(tiny) as llm:
        params = SamplingParams(temperature=0, max_tokens=200)
        outputs = llm.generate(list(answers), params, use_tqdm=False)
    assert [output["text"] for output in outputs] == list(answers.values())
