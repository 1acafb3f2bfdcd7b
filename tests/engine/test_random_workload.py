"""Random workloads over tiny pools, against references that know neither blocks nor steps."""

import random
from collections import Counter

import pytest
from host import (
    BLOCK_SIZE,
    EOS,
    HASHES,
    NUM_BLOCKS,
    FakeModel,
    Loop,
    kinds_of,
    make_scheduler,
    make_seq,
    manager_state,
    reference,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from invariants import check_blocks, check_scheduler

from checkpoints import rare
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.windows.pages import ALL_LAYERS, BlockKind

# Layers that all see all tokens, or all slide, or of both kinds: as many of each, or more of one.
KINDS = (
    ALL_LAYERS,
    (BlockKind(6),),
    (BlockKind(), BlockKind(6)),
    (BlockKind(), BlockKind(6, pages=3)),
    (BlockKind(pages=2), BlockKind(3)),
)
NUM_STEPS = 400  # of each engine
# pool, block size, budget, max_num_seqs
ENGINES = [(1, 4, 4, 2), (2, 8, 8, 8), (6, 4, 9, 3), (6, 4, 16, 16), (12, 2, 5, 5), (20, 1, 7, 4),
           (9, 4, 64, 8), (30, 4, 12, 12)]  # fmt: skip


def random_request(rng: random.Random, room: int) -> Sequence:
    """A prompt that often begins like others, ends in a few to many tokens, maybe at EOS."""
    families = [[1, 1, 2, 1] * 8, [1, 1, 2, 1, 3] * 7, [2] * 32]
    shared = rng.choice(families)[: rng.randint(0, 30)]
    tokens = shared + [rng.randint(1, 4) for _ in range(rng.randint(1, 12))]
    return make_seq(
        tokens[: rng.randint(1, room - 1)],
        max_tokens=rng.choice([1, 2, 5, 10, 30]),
        ignore_eos=rng.random() < 0.5,
    )


def num_cached(manager: BlockManager) -> int:
    """Number of blocks that prompts can begin with."""
    return len(manager.hash_to_block_id)


class Workload:
    """Requests that come and go at random; counts what happened."""

    def __init__(
        self, rng: random.Random, scheduler: Scheduler, guess_low: bool, lookahead: int
    ) -> None:
        self.rng, self.scheduler = rng, scheduler
        self.loop = Loop(scheduler, FakeModel(scheduler), lookahead)
        self.seqs: list[Sequence] = []
        self.aborted: set[int] = set()
        self.prefills: set[int] = set()  # of the last step
        self.counts: Counter[str] = Counter()
        if guess_low:  # admit whatever fits now, so that preemption has work
            scheduler.lengths.remaining = lambda seq: 1

    def arrive(self) -> None:
        seq = random_request(self.rng, self.scheduler.max_model_len)
        seq.block_size = self.scheduler.block_manager.block_size
        self.seqs.append(seq)
        self.scheduler.add(seq)

    def abort(self) -> None:
        seq = self.rng.choice(self.seqs)
        if not seq.is_finished:
            self.scheduler.abort([seq])
            assert seq.is_finished
            self.counts["abort"] += 1
            self.aborted.add(seq.seq_id)
            check_scheduler(self.scheduler)

    def step(self) -> None:
        drains = bool(self.loop.under_way)
        chunks = self.loop.step()
        assert chunks or drains or self.scheduler.is_finished()
        self.counts["drain"] += drains and not chunks and not self.scheduler.is_finished()
        assert len(chunks) <= self.scheduler.max_num_seqs
        self.counts["step"] += bool(chunks)
        self.counts["mixed"] += len({chunk.was_prefill for chunk in chunks}) == 2
        self.counts["chunked"] += len({c.seq_id for c in chunks if c.was_prefill} & self.prefills)
        self.prefills = {c.seq_id for c in chunks if c.was_prefill}

    def fail(self) -> None:
        """A step runs and is not booked: a launch that failed late."""
        scheduler = self.scheduler
        while self.loop.under_way:
            scheduler.postprocess(*self.loop.under_way.pop(0))
        if scheduled := scheduler.schedule():
            self.loop.model.run(scheduled)
            scheduler.compute_again()
            check_scheduler(scheduler)
            self.counts["failure"] += 1

    def crash(self) -> None:
        """An error leaves the books inconsistent: all unfinished requests are dropped."""
        scheduler = self.scheduler
        self.counts["crash"] += scheduler.block_manager.num_used_blocks > 0
        self.seqs = [seq for seq in self.seqs if seq.is_finished]
        self.loop.under_way.clear()
        scheduler.reset()
        self.begin_again()

    def begin_again(self) -> None:
        """Verify that the books are empty, and spoil the KV and the states: nobody reads them."""
        scheduler, model = self.scheduler, self.loop.model
        check_scheduler(scheduler)
        assert scheduler.block_manager.num_used_blocks == 0
        assert num_cached(scheduler.block_manager) == 0
        model.kv = [-3] * len(model.kv)
        model.rows = [-5] * len(model.rows)

    def change_weights(self) -> None:
        """All KV and states are of old weights."""
        scheduler = self.scheduler
        while self.loop.under_way:
            scheduler.postprocess(*self.loop.under_way.pop(0))
        cached = num_cached(scheduler.block_manager)
        scheduler.compute_all_again()
        self.begin_again()
        self.counts["change"] += bool(cached)

    def finish(self) -> None:
        """Run what is left, then check every output."""
        while not self.scheduler.is_finished():
            self.step()
        assert self.scheduler.block_manager.num_used_blocks == 0
        for seq in self.seqs:
            kinds = kinds_of(self.scheduler.block_manager)
            expected, reason = reference(
                seq, self.scheduler.max_model_len, kinds, self.scheduler.keeps_states
            )
            if seq.seq_id in self.aborted:
                assert seq.completion_token_ids == expected[: seq.num_completion_tokens]
            else:
                assert (seq.completion_token_ids, seq.finish_reason) == (expected, reason)
            self.counts["hit"] += seq.num_cached_tokens
            self.counts["eos"] += seq.last_token == EOS
        self.counts["preempt"] += self.scheduler.num_preemptions
        self.counts.update(self.scheduler.block_manager.describe())


@pytest.mark.parametrize("mixed", [True, rare(False)], ids=["mixed", "prefill-first"])
@pytest.mark.parametrize("lookahead", [rare(0), 1], ids=["synchronous", "overlap"])
@pytest.mark.parametrize("guess_low", [False, rare(True)], ids=["admission", "no-admission"])
@pytest.mark.parametrize("caching", [True, rare(False)], ids=["cache", "no-cache"])
def test_random_workload(caching, guess_low, lookahead, mixed):
    """3,200 steps in all, in eight engines with layers of one kind or two; bounds and invariants
    are checked in every step.
    """
    total: Counter[str] = Counter()
    for seed, (num_blocks, block_size, budget, max_num_seqs) in enumerate(ENGINES):
        print(f"seed {seed}: {num_blocks} x {block_size}, budget {budget}, {max_num_seqs} seqs")
        rng = random.Random(seed)
        scheduler = make_scheduler(
            num_blocks,
            block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=40,
            enable_prefix_caching=caching,
            mixed_steps=mixed,
            kinds=KINDS[seed % len(KINDS)],
        )
        workload = Workload(rng, scheduler, guess_low, lookahead)
        for _ in range(NUM_STEPS):
            if len(scheduler.waiting) < 12 and rng.random() < 0.4:
                workload.arrive()
            if workload.seqs and rng.random() < 0.02:
                workload.abort()
            if rng.random() < 0.01:
                rng.choice([workload.change_weights, workload.crash])()
            workload.step()
        workload.finish()
        total += workload.counts
    print(dict(total))
    names = "step", "chunked", "abort", "eos", "preempt", "crash"
    assert all(total[name] > 0 for name in names), total
    assert bool(total["hit"]) == bool(total["change"]) == caching
    assert not mixed or total["mixed"]  # the loop checks that steps are not mixed if they must not
    assert bool(total["drain"]) == bool(lookahead), "preempting waits for the step under way"


@pytest.mark.parametrize("lookahead", [rare(0), 1], ids=["synchronous", "overlap"])
def test_random_workload_of_a_model_with_states(lookahead):
    """Snapshots of states are taken, used and given up; steps run and are not booked."""
    total: Counter[str] = Counter()
    for seed, (num_blocks, block_size, budget, max_num_seqs) in enumerate(ENGINES):
        num_snapshots = (0, 1, 2, 5)[seed % 4]
        print(f"seed {seed}: {num_blocks} x {block_size}, {num_snapshots} snapshots")
        scheduler = make_scheduler(
            num_blocks,
            block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=40,
            num_snapshots=num_snapshots,
        )
        workload = Workload(random.Random(seed), scheduler, seed % 2 == 0, lookahead)
        for _ in range(NUM_STEPS):
            if len(scheduler.waiting) < 12 and workload.rng.random() < 0.4:
                workload.arrive()
            if workload.seqs and workload.rng.random() < 0.02:
                workload.abort()
            if workload.rng.random() < 0.02:
                workload.fail()
            if workload.rng.random() < 0.01:
                workload.rng.choice([workload.change_weights, workload.crash])()
            workload.step()
        workload.finish()
        total += workload.counts
    print(dict(total))
    names = "chunked", "abort", "preempt", "failure", "hit", "change", "crash"
    names += "num_snapshots", "num_snapshot_hits", "num_snapshot_tokens"
    assert all(total[name] > 0 for name in names), total
    # More than there are rows, and some were used again and again.
    assert total["num_snapshot_hits"] > total["num_snapshots"] / 2


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32),
    pool=st.tuples(st.integers(1, 12), st.integers(1, 5)).filter(lambda p: p[0] * p[1] > 1),
    max_num_seqs=st.integers(1, 6),
    spare_budget=st.integers(0, 12),
    caching=st.booleans(),
    lookahead=st.integers(0, 1),
    mixed=st.booleans(),
    window=st.integers(0, 9),
    sizes=st.sampled_from([(), (1, 1), (1, 2), (1, 5), (3, 1)]),  # pages of blocks, of two kinds
)
def test_any_engine_gives_the_reference_outputs(
    seed, pool, max_num_seqs, spare_budget, caching, lookahead, mixed, window, sizes
):
    kinds: tuple[BlockKind, ...] = (BlockKind(window),)
    if sizes and window:
        kinds = BlockKind(0, sizes[0]), BlockKind(window, sizes[1])
    scheduler = make_scheduler(
        *pool,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + spare_budget,
        enable_prefix_caching=caching,
        mixed_steps=mixed,
        kinds=kinds,
    )
    workload = Workload(random.Random(seed), scheduler, seed % 2 == 0, lookahead)
    for _ in range(12):
        workload.arrive()
        workload.step()
    workload.finish()


class Books(RuleBasedStateMachine):
    """Random use against an oracle that knows the content of every slot."""

    @initialize(name=st.sampled_from(["xxhash", *HASHES]), num_blocks=st.integers(1, NUM_BLOCKS))
    def build(self, name, num_blocks):
        self.manager = BlockManager(num_blocks, BLOCK_SIZE)
        self.manager.compute_hash = HASHES[name]
        self.exact = name == "xxhash"  # no collisions, and no twins yet
        self.seqs: list[Sequence] = []
        self.slots: dict[tuple[int, int], tuple[int, ...]] = {}  # (block, offset) -> prefix
        self.published: dict[int, tuple[int, ...]] = {}  # block -> chain

    @rule(tokens=st.lists(st.integers(1, 2), min_size=1, max_size=4 * BLOCK_SIZE))
    def allocate(self, tokens):
        seq, known = make_seq(tokens), set(self.published.values())
        hits = [block.block_id for block in self.manager.find_prefix(seq)]
        most = next(
            k
            for k in range((len(tokens) - 1) // BLOCK_SIZE + 1)
            if k == (len(tokens) - 1) // BLOCK_SIZE
            or tuple(tokens[: (k + 1) * BLOCK_SIZE]) not in known
        )
        assert len(hits) == most if self.exact else len(hits) <= most
        for p in range(len(hits) * BLOCK_SIZE):
            key = (hits[p // BLOCK_SIZE], p % BLOCK_SIZE)
            assert self.slots[key] == tuple(tokens[: p + 1]), "another prefix's KV"
        usable = self.manager.num_free_blocks + len(hits)
        usable -= sum(not any(i in s.block_table for s in self.seqs) for i in hits)
        before = manager_state(self.manager)
        try:
            seq.num_computed_tokens = self.manager.allocate(seq)
        except RuntimeError:
            assert seq.num_blocks > usable
            assert manager_state(self.manager) == before
            return
        assert seq.num_blocks <= usable
        assert seq.block_table[: len(hits)] == hits
        self.forget(seq.block_table[len(hits) :])
        self.seqs.append(seq)

    def forget(self, block_ids: list[int]) -> None:
        for block_id in block_ids:
            self.published.pop(block_id, None)

    @precondition(lambda self: getattr(self, "seqs", None))
    @rule(pick=st.integers(0, 99), num_tokens=st.integers(1, 6), token=st.integers(1, 2))
    def compute(self, pick, num_tokens, token):
        seq = self.seqs[pick % len(self.seqs)]
        first = seq.num_computed_tokens
        last = first + min(num_tokens, seq.num_uncomputed_tokens)
        for p in range(first, last):
            block_id = seq.block_table[p // BLOCK_SIZE]
            self.slots[block_id, p % BLOCK_SIZE] = tuple(seq.token_ids[: p + 1])
        seq.num_computed_tokens = last
        self.manager.publish(seq, first, last)
        for i in range(first // BLOCK_SIZE, last // BLOCK_SIZE):
            chain = tuple(seq.token_ids[: (i + 1) * BLOCK_SIZE])
            if chain in self.published.values():
                self.exact = False
            else:
                self.published[seq.block_table[i]] = chain
        if not seq.num_uncomputed_tokens:
            seq.append_token(token)
            if self.manager.can_append(seq):
                held = len(seq.block_table)
                self.manager.may_append(seq)
                self.forget(seq.block_table[held:])
            else:
                self.free(pick)

    @precondition(lambda self: getattr(self, "seqs", None))
    @rule(pick=st.integers(0, 99))
    def free(self, pick):
        self.manager.deallocate(self.seqs.pop(pick % len(self.seqs)))

    @invariant()
    def books_are_right(self):
        if hasattr(self, "manager"):
            check_blocks(self.manager, self.seqs)


def test_random_use_agrees_with_an_oracle():
    options = settings(max_examples=80, stateful_step_count=40, deadline=None, derandomize=True)
    run_state_machine_as_test(Books, settings=options)
