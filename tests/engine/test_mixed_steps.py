"""`mixed_steps`: prompts beside decodes, or before them. The tokens are the same."""

from collections import Counter

import pytest
from host import (
    FakeModel,
    ScriptedModel,
    decodes_and_arriving_prompts,
    make_scheduler,
    make_seq,
    reference,
    run_to_end,
    step,
)
from modes import MODES, SMALL_POOLS, in_every_mode, run_in

from checkpoints import SMALL, greedy, references, tokens
from nanovllm import LLM
from nanovllm.engine import model_runner, scheduler
from nanovllm.engine.plan import build_batch
from nanovllm.layers.base import Build
from nanovllm.startup import build as choices

both = pytest.mark.parametrize("mixed", [True, False], ids=["mixed", "prefill-first"])


def test_arriving_prompts_stall_decodes_only_if_steps_are_not_mixed():
    """29 prompt tokens: beside two decodes four a step, alone six."""
    stalls = {}
    for mixed in (True, False):
        scheduler, model, decoding = decodes_and_arriving_prompts(mixed_steps=mixed)
        steps = []
        while not scheduler.is_finished():
            steps.append(step(scheduler, model))
        ids = {seq.seq_id for seq in decoding}
        prefills = [chunks for chunks in steps if any(c.was_prefill for c in chunks)]
        stalls[mixed] = sum(not ids & {c.seq_id for c in chunks} for chunks in prefills)
        assert len(prefills) == (8 if mixed else 5)
        assert steps[: len(prefills)] == prefills, "prompts do not wait either"
    assert stalls == {True: 0, False: 5}


@both
def test_single_tokens_of_prompts_go_with_the_prompts(mixed):
    """A chunk of one, and prompts of one, which look like decodes."""
    scheduler = make_scheduler(20, max_num_batched_tokens=8, mixed_steps=mixed)
    old, one_over = make_seq(1, max_tokens=20), make_seq(9)
    model = FakeModel(scheduler)
    scheduler.add(old)
    step(scheduler, model)
    for seq in (one_over, make_seq(1), make_seq(5)):
        scheduler.add(seq)
    kinds = [[(c.seq_id == old.seq_id, c.num_tokens) for c in step(scheduler, model)]
             for _ in range(3)]  # fmt: skip
    if mixed:
        assert kinds[0] == [(True, 1), (False, 7)]
        assert kinds[1] == [(True, 1), (False, 2), (False, 1), (False, 4)]
    else:
        assert kinds[0] == [(False, 8)]
        assert kinds[1] == [(False, 5), (False, 1), (False, 1)]
        assert sorted(kinds[2]) == [(False, 1)] * 3 + [(True, 1)]
    run_to_end(scheduler, model=model)


@pytest.mark.parametrize("lookahead", [0, 1], ids=["synchronous", "overlap"])
def test_a_preempted_sequence_and_the_older_ones_take_turns(lookahead):
    """Readmitted first and preempted by the next decode, it must not keep the others from it."""
    scheduler = make_scheduler(6, max_num_batched_tokens=64, mixed_steps=False)
    scheduler.lengths.remaining = lambda seq: 1  # guesses too low: preemption is the backstop
    seqs = [make_seq(7, max_tokens=9) for _ in range(4)]
    run_to_end(scheduler, seqs, lookahead=lookahead)
    assert scheduler.num_preemptions > 2
    assert seqs[0].num_preemptions == 0
    for seq in seqs:
        assert (seq.completion_token_ids, seq.finish_reason) == reference(seq, 24)


def test_decodes_wait_for_every_prompt_that_can_start_and_for_no_other():
    """Two places: the third prompt waits for the first to end, and decodes do not wait for it."""
    scheduler = make_scheduler(40, max_num_seqs=2, mixed_steps=False)
    seqs = [make_seq(5, max_tokens=n) for n in (2, 9, 3)]
    steps = run_to_end(scheduler, seqs, ScriptedModel())
    first, second, third = (seq.seq_id for seq in seqs)
    ids = [[chunk.seq_id for chunk in chunks] for chunks in steps]
    assert ids[:4] == [[first, second], [first, second], [third], [second, third]]


@in_every_mode(
    *(f"{name}-overlap" for name in (*MODES, *SMALL_POOLS)),
    *("small-pool", "small-pool-prefill-first"),
)
def test_greedy_tokens_are_the_same(mode, checkpoint, monkeypatch):
    """Under chunks, prefix hits and, with a small pool and a wrong guess, preemption."""
    kinds = set()

    def build(*args):
        batch = build_batch(*args)
        kinds.add((batch.num_decodes > 0, batch.num_decodes < len(batch.context_lens)))
        return batch

    monkeypatch.setattr(model_runner, "build_batch", build)
    shared = list(range(33))
    prompts = [[*shared, 50 + i] for i in range(3)] + [[i + 1] * (11 * i + 1) for i in range(5)]
    lengths = [20, 9, 30, 30, 1, 25, 12, 6]
    outputs, metrics = run_in(mode, checkpoint, prompts, [greedy(n) for n in lengths])
    assert tokens(outputs) == references(checkpoint, prompts, lengths)
    assert (metrics["num_cached_tokens"] > 0) == mode.caches
    if mode.name == "chunks-of-1":  # which look like decodes
        assert kinds == {(True, False)}
    else:
        mixed = {(True, True)} if mode.options.get("mixed_steps", True) else set()
        assert kinds == {(True, False), (False, True)} | mixed


@pytest.mark.parametrize("most", [3, 5])
@pytest.mark.usefixtures("low_guesses")
def test_a_sequence_may_decode_several_tokens_in_a_step(most, checkpoint, monkeypatch):
    """The scheduler alone knows: what is left of chunks and after preemptions takes several rows.
    Nine sequences share twelve rows, so that some get fewer than they could use.
    """
    monkeypatch.setattr(scheduler, "DECODE_TOKENS", most)
    widest, rows = 0, 0

    def build(*args):
        nonlocal widest, rows
        batch = build_batch(*args)
        of_each = Counter(batch.slots[: batch.num_decodes].tolist())
        widest, rows = max([widest, *of_each.values()]), max(rows, batch.num_decodes)
        return batch

    built = []
    monkeypatch.setattr(choices, "Build", lambda **how: built.append(how) or Build(**how))
    monkeypatch.setattr(model_runner, "build_batch", build)
    prompts = [[50] * (12 + most), *([i + 1] * (5 * i + 2) for i in range(8))]
    options = {**SMALL, "max_num_batched_tokens": 12, "max_num_seqs": 12, "num_kvcache_blocks": 9}
    with LLM(checkpoint, **options) as llm:
        outputs = llm.generate(prompts, greedy(18), use_tqdm=False)
        assert llm.metrics()["num_preemptions"] > 0
    assert tokens(outputs) == references(checkpoint, prompts, [18] * len(prompts))
    assert widest == most and rows <= 12
    assert [how["decode_tokens"] for how in built] == [most], "kernels know"
