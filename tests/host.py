"""Helpers for tests of the host logic: a fake model with a fake KV cache, and short constructors.

No torch. The fake model reads and writes its KV through the batch's slots and block tables, as
the real one does, so a wrong table, a block overwritten or a false prefix hit changes its tokens.
"""

import itertools
import random
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceABC
from typing import Any, NamedTuple, Protocol

from invariants import check_scheduler

from nanovllm.engine.block_manager import NO_HASH, BlockManager
from nanovllm.engine.plan import Batch, SlotTable, build_batch, mark_sent, plan_step
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import PENDING, ScheduledSequence, Sequence
from nanovllm.images.image import PlacedImage
from nanovllm.recurrent.snapshots import SnapshotBlockManager
from nanovllm.sampling_params import SamplingParams
from nanovllm.windows.pages import ALL_LAYERS, BlockKind, max_blocks_of_one
from nanovllm.windows.sliding_blocks import SlidingBlockManager, make_block_manager

BLOCK_SIZE = 4
NUM_BLOCKS = 6
VOCAB_SIZE = 23
EOS = 0
MASK = (1 << 61) - 1

HASHES = {
    "xxhash": BlockManager.compute_hash,
    "constant": lambda token_ids, prefix=NO_HASH: 42,
    "own-tokens-only": lambda token_ids, prefix=NO_HASH: hash(tuple(token_ids)) & (2**63 - 1),
    "prefix-only": lambda token_ids, prefix=NO_HASH: (prefix * 3 + 5) & (2**63 - 1),
}

_seq_ids = itertools.count()


def make_seq(
    tokens: SequenceABC[int] | int,
    *,
    max_tokens: int = 8,
    ignore_eos: bool = True,
    block_size: int = BLOCK_SIZE,
    images: tuple[PlacedImage, ...] = (),
) -> Sequence:
    """A sequence with these prompt tokens, or with so many (that no other sequence has)."""
    seq_id = next(_seq_ids)
    if isinstance(tokens, int):
        tokens = [1000 * (seq_id + 1) + i for i in range(tokens)]
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos)
    return Sequence(seq_id, list(tokens), params, block_size=block_size, images=images)


def make_scheduler(
    num_blocks: int = NUM_BLOCKS,
    block_size: int = BLOCK_SIZE,
    *,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 16,
    max_model_len: int | None = None,
    enable_prefix_caching: bool = True,
    mixed_steps: bool = True,
    kinds: tuple[BlockKind, ...] = ALL_LAYERS,
    num_snapshots: int | None = None,
) -> Scheduler:
    """A scheduler over a fresh pool; with so many rows for snapshots, at the end of any block, of a
    model with states.
    """
    manager = make_block_manager(num_blocks, block_size, enable_prefix_caching, kinds)
    if num_snapshots is not None:
        rows = range(max_num_seqs + 1, max_num_seqs + 1 + num_snapshots)
        manager = SnapshotBlockManager(num_blocks, block_size, rows, unit=1, distance=1)
    most = -(-(kinds[-1].window + max_num_batched_tokens) // block_size) + 2
    pool_tokens = max_blocks_of_one(num_blocks, kinds, most) * block_size
    return Scheduler(
        manager,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=min(max_model_len or pool_tokens, pool_tokens),
        eos_token_ids=[EOS],
        mixed_steps=mixed_steps,
        keeps_states=num_snapshots is not None,
    )


def manager_state(manager: BlockManager) -> object:
    """Everything the manager knows, comparable."""
    fields = ("ref_count", "hash", "token_ids", "chain_id", "parent_chain_id")
    return (
        list(manager.free_block_ids),
        list(manager.cached_block_ids),
        dict(manager.hash_to_block_id),
        dict(manager._computing),
        manager._last_chain_id,
        [[getattr(block, name) for name in fields] for block in manager.blocks],
    )


class Model(Protocol):
    """Samples one token for each scheduled sequence that `samples`."""

    def run(self, scheduled: list[ScheduledSequence]) -> list[int]: ...


def _extend(state: int, token: int) -> int:
    """The "KV" of `token`: depends on everything before it."""
    return (state * 6364136223846793005 + token * 1442695040888963407 + 12345) & MASK


def _sample(state: int) -> int:
    return (state >> 20) % VOCAB_SIZE


def first_seen(position: int, window: int) -> int:
    """The first position that a token sees."""
    return max(0, position - window + 1) if window else 0


def layers_of(kinds: Iterable[BlockKind]) -> list[tuple[int, int, int]]:
    """The fake model's layers: as many of each kind as pages in a block. Of each the kind, the page
    of the block, and the window.
    """
    return [(i, page, k.window) for i, k in enumerate(kinds) for page in range(k.pages)]


def kinds_of(manager: BlockManager) -> tuple[BlockKind, ...]:
    """The kinds that a manager was made with."""
    if isinstance(manager, SlidingBlockManager):
        return manager.whole, manager.sliding
    return (BlockKind(manager.window),)


class FakeModel:
    """Deterministic: the state of a token is the sum of all KV up to it that each layer sees, read
    from the slots. All layers' KV lies in the same pages. One more layer may keep a state for each
    sequence, a number that moves on with each token.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        manager = scheduler.block_manager
        self.block_size, self.layers = manager.block_size, layers_of(kinds_of(manager))
        self.kv = [0] * (manager.num_pages * self.block_size)
        self.last_tokens = [0] * (scheduler.max_num_seqs + 1)
        self.has_rows = scheduler.keeps_states
        num_snapshots = len(manager.rows) if isinstance(manager, SnapshotBlockManager) else 0
        self.rows = [-7] * (scheduler.max_num_seqs + 1 + num_snapshots)
        self.table = SlotTable(
            scheduler.max_num_seqs + 1, len(manager.blocks), num_tables=len(kinds_of(manager))
        )

    def lay_out(self, scheduled: list[ScheduledSequence]) -> Batch:
        """The step as a rank sees it, which knows what the plans so far have told it."""
        self.plan = plan = plan_step(scheduled)
        self.table.update(plan)
        mark_sent(scheduled)
        return build_batch(plan, self.table, self.block_size)

    def copy_rows(self, pairs: Any) -> None:
        """As `StateRows.copy`."""
        self.rows = self.rows.copy()
        for source, target in pairs.T.tolist():
            self.rows[target] = self.rows[source]

    def run(self, scheduled: list[ScheduledSequence]) -> list[int]:
        batch = self.lay_out(scheduled)
        self.copy_rows(self.plan.loads)
        ids = batch.input_ids.tolist()
        slots = [batch.slot_mapping.tolist(), batch.window_slot_mapping.tolist()]
        for row in range(batch.num_decodes):
            if ids[row] == PENDING:
                ids[row] = self.last_tokens[batch.slots[row]]
        assert PENDING not in ids, "a token that nobody knows is to be computed"
        states, row = [0] * len(ids), 0
        counts = [1] * batch.num_decodes + (
            batch.cu_seqlens_q[1:] - batch.cu_seqlens_q[:-1]
        ).tolist()
        for i, count in enumerate(counts):
            start, slot = int(batch.context_lens[i]) - count, int(batch.slots[i])
            kept = self.rows[slot] if start else 0
            tables = [batch.block_tables[i].tolist()]
            if len(batch.window_tables):
                tables.append(batch.window_tables[i].tolist())
            for position in range(start, start + count):
                state = 0
                for kind, page, window in self.layers:
                    for seen in range(first_seen(position, window), position):
                        block, offset = divmod(seen, self.block_size)
                        place = (tables[kind][block] + page) * self.block_size + offset
                        state += self.kv[place]
                states[row] = state
                for number, (kind, page, _) in enumerate(self.layers):
                    place = slots[kind][row] + page * self.block_size
                    self.kv[place] = _extend(state & MASK, ids[row] + 31 * number)
                    states[row] += self.kv[place]
                if self.has_rows:
                    self.rows[slot] = kept = _extend(kept, ids[row])
                    states[row] += kept
                states[row] &= MASK
                row += 1
        self.copy_rows(self.plan.saves)
        tokens = [_sample(states[row]) for row in batch.sample_rows.tolist()]
        for slot, token in zip(batch.slots[batch.samples].tolist(), tokens, strict=True):
            self.last_tokens[slot] = token
        return tokens


class ScriptedModel:
    """Ends each sequence after a given number of tokens; fast, for large workloads."""

    def __init__(self, lengths: dict[int, int] | None = None) -> None:
        self.lengths = lengths or {}

    def run(self, scheduled: list[ScheduledSequence]) -> list[int]:
        seqs = [item.seq for item in scheduled if item.samples]
        return [
            EOS if seq.num_completion_tokens + 1 == self.lengths.get(seq.seq_id) else 1
            for seq in seqs
        ]


def reference(
    seq: Sequence,
    max_model_len: int,
    kinds: Iterable[BlockKind] = ALL_LAYERS,
    has_rows: bool = False,
) -> tuple[list[int], str]:
    """Completion and finish reason of the fake model for a prompt, without any cache."""
    tokens, params = list(seq.prompt_token_ids), seq.sampling_params
    windows = [window for _, _, window in layers_of(kinds)]
    kvs: list[list[int]] = [[] for _ in windows]
    completion: list[int] = []
    kept = 0

    def seen_by_all(position: int) -> int:
        parts = zip(kvs, windows, strict=True)
        return sum(sum(kv[first_seen(position, window) :]) for kv, window in parts) & MASK

    while True:
        for token in [*tokens, *completion][len(kvs[0]) :]:
            state = seen_by_all(len(kvs[0]))
            for number, kv in enumerate(kvs):
                kv.append(_extend(state, token + 31 * number))
            kept = _extend(kept, token) if has_rows else 0
        token = _sample((seen_by_all(len(kvs[0]) - 1) + kept) & MASK)
        completion.append(token)
        if token == EOS and not params.ignore_eos:
            return completion, "stop"
        if len(completion) == params.max_tokens or len(tokens) + len(completion) == max_model_len:
            return completion, "length"


class Chunk(NamedTuple):
    """Tokens of one sequence in one step."""

    seq_id: int
    start: int
    num_tokens: int
    was_prefill: bool


def is_prefilling(seq: Sequence) -> bool:
    """Whether more than the newest of its own tokens is left to compute."""
    return seq.num_computed_tokens < max(seq.num_prompt_tokens, seq.num_tokens - 1)


class Loop:
    """The engine's loop: with `lookahead` 1 a step is chosen before the one before it is booked."""

    def __init__(self, scheduler: Scheduler, model: Model, lookahead: int = 0) -> None:
        self.scheduler, self.model, self.lookahead = scheduler, model, lookahead
        self.under_way: list[tuple[list[ScheduledSequence], list[int]]] = []

    def step(self) -> list[Chunk]:
        """One step, with every bound and invariant checked."""
        scheduler = self.scheduler
        running = {seq.seq_id for seq in scheduler.running}
        prefilling = {seq.seq_id for seq in scheduler.running if is_prefilling(seq)}
        num_preemptions = scheduler.num_preemptions
        scheduled = scheduler.schedule()
        chunks = [
            Chunk(item.seq.seq_id, item.start, item.num_tokens, item.num_tokens > 1)
            for item in scheduled
        ]
        assert sum(chunk.num_tokens for chunk in chunks) <= scheduler.max_num_batched_tokens
        assert all(chunk.num_tokens > 0 for chunk in chunks)
        assert len({chunk.seq_id for chunk in chunks}) == len(chunks)
        if scheduler.num_preemptions > num_preemptions:
            assert running >= {chunk.seq_id for chunk in chunks}, "admitted as well"
        if scheduled and not scheduler.mixed_steps:
            self.check_unmixed(scheduled, running, prefilling)
        if scheduled:
            check_scheduler(scheduler)
            self.under_way.append((scheduled, self.model.run(scheduled)))
            scheduler.advance(scheduled)
            check_scheduler(scheduler)
        while len(self.under_way) > (self.lookahead if scheduled else 0):
            scheduler.postprocess(*self.under_way.pop(0))
        check_scheduler(scheduler)
        return chunks

    def check_unmixed(
        self, scheduled: list[ScheduledSequence], running: set[int], prefilling: set[int]
    ) -> None:
        """Prompts alone, or decodes alone if there are no prompts, for the kernels too."""
        ids = {item.seq.seq_id for item in scheduled}
        decodes = ids & (running - prefilling)
        assert decodes in (set(), ids), "mixed"
        # Layers that slide may have no block for a prompt.
        may_wait = isinstance(self.scheduler.block_manager, SlidingBlockManager)
        assert may_wait or not (decodes and prefilling), "decodes before a prompt"
        plan = plan_step(scheduled)  # the model's table is left alone
        table = FakeModel(self.scheduler).table
        batch = build_batch(plan, table, self.scheduler.block_manager.block_size)
        assert batch.num_decodes in (0, len(ids)), "mixed for the kernels"


def step(scheduler: Scheduler, model: Model) -> list[Chunk]:
    """One step of the synchronous loop."""
    return Loop(scheduler, model).step()


def decodes_and_arriving_prompts(
    **options: Any,
) -> tuple[Scheduler, FakeModel, list[Sequence]]:
    """Two sequences that decode, in steps of six tokens, and prompts of 20 and 9 that wait."""
    scheduler = make_scheduler(20, max_num_seqs=4, max_num_batched_tokens=6, **options)
    model, decoding = FakeModel(scheduler), [make_seq(2, max_tokens=16) for _ in range(2)]
    for seq in decoding:
        scheduler.add(seq)
    step(scheduler, model)
    scheduler.add(make_seq(20, max_tokens=2))
    scheduler.add(make_seq(9, max_tokens=2))
    return scheduler, model, decoding


def run_to_end(
    scheduler: Scheduler,
    seqs: SequenceABC[Sequence] = (),
    model: Model | None = None,
    on_step: Callable[[list[Chunk]], Any] = lambda chunks: None,
    lookahead: int = 0,
) -> list[list[Chunk]]:
    """Add `seqs` and run until nothing is left, all blocks given back. Returns all steps."""
    model = model or FakeModel(scheduler)
    for seq in seqs:
        scheduler.add(seq)
    steps = []
    loop = Loop(scheduler, model, lookahead)
    while not scheduler.is_finished():
        steps.append(loop.step())
        on_step(steps[-1])
        assert len(steps) < 100_000, "the requests never end"
    assert scheduler.block_manager.num_used_blocks == 0
    return steps


def computed(steps: list[list[Chunk]], seq: Sequence) -> list[int]:
    """The positions of `seq` that the steps computed, in order."""
    chunks = [chunk for chunks in steps for chunk in chunks if chunk.seq_id == seq.seq_id]
    return [p for chunk in chunks for p in range(chunk.start, chunk.start + chunk.num_tokens)]


def bench_workload(
    num_seqs: int, seed: int, shortest: int, longest: int
) -> list[tuple[list[int], int]]:
    """Random prompts and output lengths, as in bench.py."""
    rng = random.Random(seed)
    return [
        (
            [rng.randint(1, 10_000) for _ in range(rng.randint(shortest, longest))],
            rng.randint(shortest, longest),
        )
        for _ in range(num_seqs)
    ]
