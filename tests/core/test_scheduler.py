"""The scheduler: order, bounds, chunks, mixed steps, preemption, admission and endings."""

import pytest
from host import (
    BLOCK_SIZE,
    EOS,
    Chunk,
    FakeModel,
    ScriptedModel,
    computed,
    decodes_and_arriving_prompts,
    make_scheduler,
    make_seq,
    reference,
    run_to_end,
    step,
)
from invariants import check_scheduler

from nanovllm.engine.sequence import Sequence, SequenceStatus
from nanovllm.windows.pages import BlockKind

SHARED = list(range(1, 9))  # two blocks


def first_steps(steps: list[list[Chunk]]) -> dict[int, int]:
    """The step in which each sequence started."""
    starts: dict[int, int] = {}
    for i, chunks in enumerate(steps):
        for chunk in chunks:
            starts.setdefault(chunk.seq_id, i)
    return starts


def crowd(num_seqs: int = 4, **options) -> list[Sequence]:
    """Sequences with one common block that end by length."""
    options.setdefault("max_tokens", 12)
    return [make_seq([1, 2, 3, 4, *range(9, 9 + i)], **options) for i in range(num_seqs)]


def test_first_come_first_served():
    seqs = [make_seq(n) for n in (5, 16, 1, 9, 2, 13)]
    starts = first_steps(run_to_end(make_scheduler(max_num_seqs=2), seqs))
    assert list(starts) == [seq.seq_id for seq in seqs]
    assert list(starts.values()) == sorted(starts.values())


def test_head_of_the_queue_is_not_starved():
    """Small requests that would fit do not pass a large one that has to wait for room."""
    scheduler = make_scheduler()
    first, large = make_seq(9, max_tokens=6), make_seq(17, max_tokens=4)
    small = [make_seq(1, max_tokens=1) for _ in range(20)]
    starts = first_steps(run_to_end(scheduler, [first, large, *small]))
    assert 0 < starts[large.seq_id] <= min(starts[seq.seq_id] for seq in small)


@pytest.mark.parametrize("bound", [1, 2, 3])
def test_max_num_seqs_bounds_the_running(bound):
    scheduler, running = make_scheduler(max_num_seqs=bound), []
    seqs = [make_seq(1, max_tokens=3) for _ in range(6)]
    run_to_end(scheduler, seqs, on_step=lambda chunks: running.append(len(chunks)))
    assert max(running) == bound


@pytest.mark.parametrize("budget", [1, 3, 8])
def test_max_num_batched_tokens_bounds_the_step(budget):
    scheduler = make_scheduler(max_num_seqs=min(budget, 3), max_num_batched_tokens=budget)
    steps = run_to_end(scheduler, [make_seq(n, max_tokens=3) for n in (7, 3, 5)])
    assert max(sum(chunk.num_tokens for chunk in chunks) for chunks in steps) == budget


def test_long_prompt_is_computed_in_contiguous_chunks():
    scheduler = make_scheduler(max_num_seqs=4, max_num_batched_tokens=6)
    seq = make_seq(15, max_tokens=3)
    steps = run_to_end(scheduler, [seq])
    chunks = [(chunk.start, chunk.num_tokens) for [chunk] in steps]
    assert chunks == [(0, 6), (6, 6), (12, 3), (15, 1), (16, 1)]


def test_decodes_get_a_token_in_every_step_while_prompts_arrive():
    """Known defect 23: a long prompt stalled all running decodes."""
    scheduler, model, decoding = decodes_and_arriving_prompts()
    mixed = 0
    while not all(seq.is_finished for seq in decoding):
        chunks = step(scheduler, model)
        assert {seq.seq_id for seq in decoding} <= {c.seq_id for c in chunks if c.num_tokens == 1}
        assert chunks == sorted(chunks, key=lambda c: c.was_prefill), "decodes come first"
        mixed += any(chunk.was_prefill for chunk in chunks)
    assert mixed >= 7  # 4 tokens of 29 a step


@pytest.mark.parametrize("budget", [8, 64])
def test_every_token_is_computed_exactly_once(budget):
    scheduler = make_scheduler(40, max_num_batched_tokens=budget)
    seqs = [*crowd(6), make_seq([*SHARED, 50]), make_seq([*SHARED, 60]), make_seq(21)]
    steps = run_to_end(scheduler, seqs)
    assert scheduler.num_preemptions == 0
    for seq in seqs:  # the last token is never fed back
        assert computed(steps, seq) == list(range(seq.num_cached_tokens, len(seq) - 1))
    assert any(seq.num_cached_tokens for seq in seqs)


def test_step_that_failed_can_be_repeated():
    """The model raised (out of memory, say): the same work is scheduled again."""
    scheduler = make_scheduler(max_num_batched_tokens=8)
    seqs = [make_seq(n, max_tokens=6) for n in (3, 7)]
    for seq in seqs:
        scheduler.add(seq)
    model = FakeModel(scheduler)
    while not scheduler.is_finished():
        scheduler.schedule()
        check_scheduler(scheduler)
        step(scheduler, model)
    for seq in seqs:
        assert (seq.completion_token_ids, seq.finish_reason) == reference(seq, 24)


@pytest.mark.parametrize(
    ("num_seqs", "shared", "own", "block_size", "budget"),
    [(4, 8, 3, 4, 64), (4, 8, 3, 4, 5), (3, 9, 4, 4, 64), (128, 1024, 64, 256, 16384)],
)
def test_identical_prefixes_admitted_together_are_computed_once(
    num_seqs, shared, own, block_size, budget
):
    """Known defect 21: 128 x 1024 shared tokens took 23,552 instead of 9,216 tokens."""
    scheduler = make_scheduler(
        4 * num_seqs + 8,
        block_size,
        max_num_seqs=min(num_seqs, budget),
        max_num_batched_tokens=budget,
    )
    seqs = [
        make_seq([*range(shared), *range(10_000 + 100 * i, 10_000 + 100 * i + own)],
                 max_tokens=1, block_size=block_size)
        for i in range(num_seqs)
    ]  # fmt: skip
    steps = run_to_end(scheduler, seqs, ScriptedModel())
    hit = shared // block_size * block_size
    assert sum(len(computed(steps, seq)) for seq in seqs) == hit + num_seqs * (shared - hit + own)
    assert [seq.num_cached_tokens for seq in seqs] == [0] + [hit] * (num_seqs - 1)


def test_others_pass_those_that_wait_for_their_prefix():
    """The waiting ones keep their places: they start before all that could not pass at once."""
    scheduler = make_scheduler(20, max_num_seqs=2)
    first, second, third = (make_seq([*SHARED, i], max_tokens=4 + i) for i in range(3))
    others = [make_seq(3, max_tokens=3), make_seq(3)]
    starts = first_steps(run_to_end(scheduler, [first, second, third, *others]))
    order = [first, others[0], second, third, others[1]]
    assert list(starts) == [seq.seq_id for seq in order]
    assert starts[others[0].seq_id] == 0


def test_abort_of_the_one_that_computes_the_prefix_frees_those_that_wait():
    scheduler = make_scheduler(20, max_num_batched_tokens=8)
    first, second = make_seq(SHARED + [50] * 8), make_seq([*SHARED, 60])
    for seq in (first, second):
        scheduler.add(seq)
    model = FakeModel(scheduler)
    scheduler.schedule()  # and the step fails
    scheduler.abort([first])
    assert [chunk.seq_id for chunk in step(scheduler, model)] == [second.seq_id]


def test_num_cached_tokens_tells_the_first_admission_only():
    """A preempted sequence finds its own blocks again; that is no saving to report."""
    scheduler = make_scheduler()
    model = FakeModel(scheduler)
    seqs = [make_seq([1, 2, 3, 4, 5]), make_seq([1, 2, 3, 4, 6])]
    for seq in seqs:
        scheduler.add(seq)
    for _ in range(5):
        step(scheduler, model)
    assert [seq.num_cached_tokens for seq in seqs] == [0, 4]
    scheduler.preempt(seqs[1])
    scheduler.preempt(seqs[0])
    step(scheduler, model)
    assert [seq.num_computed_tokens for seq in seqs] == [10, 9]  # all but the newest tokens
    assert [seq.num_cached_tokens for seq in seqs] == [0, 4]


def test_victims_are_the_youngest_and_resume_before_those_that_never_started():
    scheduler = make_scheduler(8, max_num_batched_tokens=64)
    scheduler.lengths.remaining = lambda seq: 1  # guesses too low: preemption is the backstop
    seqs = [make_seq(7, max_tokens=9) for _ in range(4)]
    late = make_seq(1)
    steps = []

    def on_step(chunks: list[Chunk]) -> None:
        steps.append(chunks)
        running = [seq.seq_id for seq in scheduler.running]
        preempted = [s.seq_id for s in scheduler.waiting if s.num_preemptions]
        assert not running or not preempted or max(running) < min(preempted)
        assert [seq.seq_id for seq in scheduler.waiting][: len(preempted)] == sorted(preempted)

    run_to_end(scheduler, [*seqs, late], on_step=on_step)
    assert scheduler.num_preemptions > 0
    assert seqs[0].num_preemptions == 0
    victims = {seq.seq_id for seq in seqs if seq.num_preemptions}
    starts = first_steps(steps)
    last_resume = max(
        i for i, cs in enumerate(steps) for c in cs if c.was_prefill and c.seq_id in victims
    )
    assert starts[late.seq_id] >= last_resume


def test_preempted_sequence_hits_its_own_prefix_on_readmission():
    """#207, #210, #211, #233: this indexed out of range."""
    scheduler = make_scheduler()
    model = FakeModel(scheduler)
    seq = make_seq(6, max_tokens=10)
    scheduler.add(seq)
    for _ in range(4):
        step(scheduler, model)
    assert (len(seq), seq.num_computed_tokens) == (10, 9)
    scheduler.preempt(seq)
    assert step(scheduler, model) == [Chunk(seq.seq_id, 8, 2, True)]
    run_to_end(scheduler, model=model)
    assert (seq.completion_token_ids, seq.finish_reason) == reference(seq, 24)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("budget", [5, 64])
@pytest.mark.parametrize(("num_blocks", "block_size"), [(5, 4), (18, 1), (3, 8), (64, 4)])
def test_outputs_do_not_depend_on_pool_budget_or_cache(num_blocks, block_size, budget, caching):
    """Preempted, chunked and cached runs give what an unconstrained run gives (#217)."""
    scheduler = make_scheduler(
        num_blocks,
        block_size,
        max_num_seqs=5,
        max_num_batched_tokens=budget,
        max_model_len=18,
        enable_prefix_caching=caching,
    )
    scheduler.lengths.remaining = lambda seq: 1  # provokes preemption
    seqs = crowd(6, max_tokens=9, block_size=block_size) + crowd(6, block_size=block_size)
    run_to_end(scheduler, seqs)
    for seq in seqs:
        assert (seq.completion_token_ids, seq.finish_reason) == reference(seq, 18)
    assert (scheduler.num_preemptions > 0) == (num_blocks < 64)
    assert any(seq.num_cached_tokens for seq in seqs) == caching


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("window", [1, 4, 6, 13])
def test_blocks_behind_the_window_are_given_back(window, lookahead, caching):
    """Sequences of 40 tokens, 10 blocks each, run side by side in a pool of 15; such as see all of
    their tokens run nearly alone.
    """
    num_steps, max_held = run_through_window(window, lookahead, caching)
    num_steps_without, max_held_without = run_through_window(0, lookahead, caching)
    assert num_steps <= 40 + lookahead < num_steps_without
    # The window, the token after it and one in flight reach into so many blocks; one more is kept.
    assert max_held <= -(-(window + 2) // BLOCK_SIZE) + 2 < max_held_without


def run_through_window(window: int, lookahead: int, caching: bool) -> tuple[int, int]:
    """Steps of three sequences, and the most blocks that one of them held after a step."""
    scheduler = make_scheduler(
        15,
        max_num_seqs=3,
        enable_prefix_caching=caching,
        max_model_len=40,
        kinds=(BlockKind(window),),
    )
    seqs = [make_seq(prompt, max_tokens=99) for prompt in (5, 9, 3)]
    held: list[int] = []

    def observe(_: list[Chunk]) -> None:
        held.extend(len(seq.block_table) - seq.kv.num_dropped for seq in scheduler.running)

    steps = run_to_end(scheduler, seqs, on_step=observe, lookahead=lookahead)
    for seq in seqs:
        assert (seq.completion_token_ids, seq.finish_reason) == reference(
            seq, 40, (BlockKind(window),)
        )
    assert scheduler.num_preemptions == 0
    return len(steps), max(held)


def test_pool_of_one_block():
    scheduler = make_scheduler(1)
    seqs = [make_seq(n, max_tokens=9) for n in (1, 3, 2)]
    run_to_end(scheduler, seqs)
    assert [len(seq) for seq in seqs] == [4, 4, 4]
    assert {seq.finish_reason for seq in seqs} == {"length"}
    assert scheduler.num_preemptions == 0


@pytest.mark.parametrize(
    ("max_tokens", "eos_at", "ignore_eos", "length", "reason"),
    [
        (4, None, False, 4, "length"),
        (1, None, False, 1, "length"),
        (99, None, False, 7, "length"),  # at max_model_len: 3 + 7 = 10
        (7, 3, False, 3, "stop"),
        (3, 3, False, 3, "stop"),
        (7, 3, True, 7, "length"),
    ],
)
def test_endings(max_tokens, eos_at, ignore_eos, length, reason):
    scheduler = make_scheduler(max_model_len=10)
    seq = make_seq(3, max_tokens=max_tokens, ignore_eos=ignore_eos)
    run_to_end(scheduler, [seq], ScriptedModel({seq.seq_id: eos_at} if eos_at else {}))
    assert (seq.num_completion_tokens, seq.finish_reason) == (length, reason)
    assert (seq.last_token == EOS) == (reason == "stop")
    assert seq.is_finished and not seq.block_table


def test_abort_of_many():
    """Abort some that run, some that wait and one that has gone; the others go on."""
    scheduler = make_scheduler(40, max_num_seqs=4)
    model, seqs = FakeModel(scheduler), [make_seq(4, max_tokens=8) for _ in range(14)]
    for seq in seqs:
        scheduler.add(seq)
    step(scheduler, model)
    assert len(scheduler.running) == 4
    scheduler.abort(seqs[2:3])
    scheduler.abort(seqs[1:11])
    check_scheduler(scheduler)
    assert scheduler.running == seqs[:1] and list(scheduler.waiting) == seqs[11:]
    run_to_end(scheduler, model=model)
    for seq in (seqs[0], *seqs[11:]):
        assert (seq.completion_token_ids, seq.finish_reason) == reference(seq, 48)


@pytest.mark.parametrize("when", ["waiting", "prefill", "decode", "preempted"])
def test_abort_gives_the_blocks_back(when):
    scheduler = make_scheduler(12, max_num_batched_tokens=8)
    model, other, seq = FakeModel(scheduler), make_seq(2, max_tokens=8), make_seq(10)
    scheduler.add(other)
    scheduler.add(seq)
    for _ in range({"waiting": 0, "prefill": 1}.get(when, 4)):
        step(scheduler, model)
    if when == "preempted":
        scheduler.preempt(seq)
    scheduler.abort([seq])
    check_scheduler(scheduler)
    assert seq.status is SequenceStatus.FINISHED and not seq.block_table
    scheduler.abort([seq])  # it is gone: nothing happens
    check_scheduler(scheduler)
    run_to_end(scheduler, model=model)
    assert (other.completion_token_ids, other.finish_reason) == reference(other, 48)
