"""Admission: a small pool neither thrashes nor stands half empty."""

import random
from functools import cache
from typing import NamedTuple

import pytest
from host import (
    Chunk,
    FakeModel,
    ScriptedModel,
    bench_workload,
    make_scheduler,
    make_seq,
    run_to_end,
    step,
)

from checkpoints import rare
from nanovllm.scheduling.admission import LengthEstimator


class Result(NamedTuple):
    num_steps: int
    num_preemptions: int
    prefill_ratio: float  # tokens computed over prompt tokens
    concurrency: float  # mean number of running sequences, while others wait
    occupancy: float  # mean share of the pool in use, while others wait


@cache
def run_bench(num_blocks: int, max_tokens: int | None = None, seed: int = 0) -> Result:
    """Half of bench.py's workload; with `max_tokens`, nobody is told when sequences end: by EOS."""
    print(f"seed {seed}")
    requests = bench_workload(128, seed, 100, 1024)
    scheduler = make_scheduler(
        num_blocks, 256, max_num_seqs=512, max_num_batched_tokens=16384, max_model_len=4096
    )
    told = max_tokens is None
    seqs = [
        make_seq(prompt, max_tokens=length if told else max_tokens, ignore_eos=told, block_size=256)
        for prompt, length in requests
    ]
    lengths = {seq.seq_id: length for seq, (_, length) in zip(seqs, requests, strict=True)}
    running: list[int] = []
    used: list[int] = []

    def on_step(chunks: list[Chunk]) -> None:
        if scheduler.waiting:
            running.append(len(chunks))
            used.append(scheduler.block_manager.num_used_blocks)

    steps = run_to_end(
        scheduler,
        seqs,
        ScriptedModel({} if told else lengths),
        on_step,
    )
    assert [seq.num_completion_tokens for seq in seqs] == list(lengths.values())
    prefilled = sum(c.num_tokens for chunks in steps for c in chunks if c.was_prefill)
    result = Result(
        len(steps),
        scheduler.num_preemptions,
        prefilled / sum(len(prompt) for prompt, _ in requests),
        sum(running) / len(running),
        sum(used) / len(used) / num_blocks,
    )
    print(result)
    return result


@pytest.mark.parametrize("max_tokens", [1024, rare(3072)])
@pytest.mark.parametrize("num_blocks", [rare(300), 150])
def test_small_pool_does_not_thrash(num_blocks, max_tokens):
    """Known defect 22: of twice as much, 1.37 and 1.40 times the prompts' tokens were computed.
    Lengths are told, or sequences stop early at EOS, with a large max_tokens.
    """
    told, guessed = run_bench(num_blocks), run_bench(num_blocks, max_tokens)
    assert told.prefill_ratio <= 1.05
    assert told.num_preemptions == 0
    assert told.occupancy >= 0.9
    assert guessed.prefill_ratio <= 1.15
    assert guessed.num_steps <= 1.25 * told.num_steps
    assert guessed.concurrency >= 0.7 * told.concurrency


@pytest.mark.parametrize("seed", [*range(8), *map(rare, range(8, 20))])
def test_known_lengths_and_whole_prompts_never_preempt(seed):
    """The predicted peak is an upper bound, with shared prefixes too."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    block_size = rng.choice([1, 2, 4, 8])
    scheduler = make_scheduler(
        rng.randint(4, 20), block_size, max_num_batched_tokens=1000, max_model_len=60
    )
    model = FakeModel(scheduler)
    for _ in range(100):
        if rng.random() < 0.4 and len(scheduler.waiting) < 10:
            prompt = ([1, 2, 3] * 6)[: rng.randint(0, 18)] + [rng.randint(1, 4)] * rng.randint(1, 8)
            prompt = prompt[: scheduler.max_model_len - 1]
            scheduler.add(make_seq(prompt, max_tokens=rng.randint(1, 25), block_size=block_size))
        step(scheduler, model)
    run_to_end(scheduler, model=model)
    assert scheduler.num_preemptions == 0


def test_sequence_that_outgrows_the_pool_when_others_end_is_admitted():
    """Not the sum of the final lengths counts, but what is held at once."""
    scheduler = make_scheduler(6)
    short, long = make_seq(4, max_tokens=9), make_seq(4, max_tokens=17)  # 3 + 5 blocks
    running: list[int] = []
    run_to_end(scheduler, [short, long], on_step=lambda chunks: running.append(len(chunks)))
    assert running[0] == 2
    assert scheduler.num_preemptions == 0


def test_length_estimator():
    """Exact where the length is known; else the mean so far, and then half as long again."""
    lengths = LengthEstimator(max_model_len=100)

    def remaining(
        done: int, max_tokens: int = 60, ignore_eos: bool = False, prompt: int = 8
    ) -> int:
        seq = make_seq(8, max_tokens=max_tokens, ignore_eos=ignore_eos)
        seq.token_ids += [1] * done
        return lengths.remaining(seq)

    assert remaining(0) == 60
    assert remaining(0, max_tokens=99) == 92  # max_model_len
    for length, told in ((10, False), (30, False), (1000, True)):
        ended = make_seq(1, ignore_eos=told)
        ended.token_ids += [1] * length
        lengths.observe(ended)
    assert [remaining(done) for done in (0, 5, 19)] == [20, 15, 1]
    assert [remaining(done) for done in (20, 30, 58)] == [10, 15, 2]
    assert remaining(0, max_tokens=7) == 7
    assert remaining(5, ignore_eos=True) == 55


@pytest.mark.parametrize(("num_blocks", "max_tokens"), [(100, 30), (300, 100)])
def test_a_shared_prefix_in_use_costs_nothing(num_blocks, max_tokens):
    """Blocks that all share were charged to each: one ran at a time, 24 x 30 steps for all."""
    scheduler = make_scheduler(num_blocks, max_num_seqs=24, max_num_batched_tokens=512)
    prefix, running = list(range(1, 201)), []
    seqs = [make_seq([*prefix, 300 + i, 400 + i], max_tokens=max_tokens) for i in range(24)]
    steps = run_to_end(scheduler, seqs, ScriptedModel(), lambda c: running.append(len(c)))
    own_blocks = -(-(202 + max_tokens - 1) // 4) - 50
    at_once = (num_blocks - 50) // own_blocks  # so many in lockstep
    print(len(steps), "steps, running", sum(running) / len(running), at_once)
    assert scheduler.num_preemptions == 0
    assert sum(seq.num_cached_tokens for seq in seqs) == 23 * 200
    assert sum(running) / len(running) >= 0.8 * at_once > 4
    assert len(steps) <= 24 / at_once * max_tokens * 1.25
