"""A step on the host: from the scheduler's choice, through the ranks' orders, to flat arrays.

`plan_step` makes the `StepPlan` that all ranks receive, with the changes since the last alone; on
each of them a `SlotTable` keeps what they were told, and `build_batch` lays the step out as the
arrays of a `Batch`. Facts of a sequence that hold as long as it runs are declared once, in `FACTS`.
numpy only: knows no device.

Letters: T tokens of the step, B sequences, P those of them that prefill, W blocks of the longest,
S block size.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nanovllm.engine.sequence import ScheduledSequence, Sent, Sequence
from nanovllm.images.stored import Span
from nanovllm.scheduling.encoder_cache import placed_rows
from nanovllm.scheduling.prefixes import SharedPrefixes, find_shared_prefixes
from nanovllm.utils.arrays import Int32


class Fact(NamedTuple):
    """A fact of a sequence that does not change while it runs. Each rank is told once, and the
    device has it in every step, in an array of its own (see `step_layout.LAYOUT`).

    Attributes:
        dtype: numpy dtype of 4 bytes, or of such words with their number: `(np.uint32, 2)`.
        of: reader of the fact.
        rows: rows of a step that have it. Those that sample have it as a field of
            `SamplingMetadata`; all tokens, or all sequences, in `Context.facts`.
    """

    dtype: Any
    of: Callable[[Sequence], Any]
    rows: Literal["tokens", "sequences", "samples"] = "sequences"


FACTS = {
    "temperatures": Fact(np.float32, lambda seq: seq.sampling_params.temperature, "samples"),
    # With a position, the noise of a token.
    "random_keys": Fact((np.uint32, 2), lambda seq: seq.random_key, "samples"),
    # Of the logits, for the log-probability of the token alone; 0: it is not wanted.
    "logprob_divisors": Fact(
        np.float32, lambda seq: 0.0 if seq.controls is None else seq.controls.own_divisor, "samples"
    ),
    # Positions of tokens after a prompt, less their indices: images have fewer than tokens.
    "position_deltas": Fact(np.int32, lambda seq: seq.position_delta),
}


@functools.cache
def fact_dtype() -> np.dtype[np.void]:
    """The dtype of a sequence's facts, a field for each."""
    return np.dtype([(name, fact.dtype) for name, fact in FACTS.items()])


class StepPlan(NamedTuple):
    """The orders of a step for all ranks. Its size depends on the step, never on prompts' lengths.

    B counts the items of `Scheduler.schedule`: a sequence that decodes several tokens has as many.
    """

    slots: Int32  # [B], the sequences' rows in what the ranks remember, decodes first
    starts: Int32  # [B], position of the first token
    num_tokens: Int32  # [B]
    samples: NDArray[np.bool_]  # [B], whether the next token is sampled
    controlled: NDArray[np.bool_]  # [B], whether rank 0 needs the logits, for `RequestControls`
    prompt_logprobs: Int32  # [4, p]: index in B, how many tokens, the next prompt token, how many
    # of the most likely ones, where log-probabilities of the prompt are wanted
    pooling: Int32  # [2, k]: index in B, and 1 for the mean of all, 0 for the last hidden state
    token_ids: Int32  # [T], -1 where a decode's token is known to the device only
    # [4, n]: additions to block tables: 1 for that of layers that slide, else 0; slot, column and
    # block id
    new_blocks: Int32
    loads: Int32  # [2, l]: rows of snapshots, and slots whose states begin with these
    # [6, n]: rows up to the last image of their prompts, see `placed_rows`
    placed: Int32
    saves: Int32  # [2, s]: slots, and rows that take a snapshot of their states after this step
    joined: Int32  # [J], slots whose sequence the ranks do not know yet
    facts: NDArray[np.void]  # [J] of `fact_dtype`

    @property
    def has_extras(self) -> bool:
        """Whether anybody wants more than tokens without controls, and their log-probabilities
        (`Batch.scored`); see `Extras`.
        """
        return bool(self.controlled.any() or self.prompt_logprobs.size or self.pooling.size)


def plan_step(scheduled: list[ScheduledSequence]) -> StepPlan:
    """The plan for `scheduled`, in which the decodes come first (as `Scheduler.schedule` returns).

    Its contents count as known to the ranks once `mark_sent` has been called.
    """
    seqs = [item.seq for item in scheduled]
    num_tokens = np.array([item.num_tokens for item in scheduled], np.int32)
    tokens = chain.from_iterable(
        seq.token_ids[start : start + count] for seq, start, count, *_ in scheduled
    )
    grown = dict.fromkeys([seq for seq in seqs if seq.sent.version != seq.kv.version])
    added = [block for seq in grown for block in _new_blocks(seq)]
    asked = [
        _prompt_logprobs(i, item)
        for i, item in enumerate(scheduled)
        if item.seq.results.prompt_logprobs is not None
        and item.start < item.seq.num_prompt_tokens - 1
    ]
    pooled = [
        (i, item.seq.pooling == "mean") for i, item in enumerate(scheduled) if item.seq.pooling
    ]
    joined = [seq for seq in grown if not seq.sent.table]
    return StepPlan(
        slots=np.array([seq.slot for seq in seqs], np.int32),
        starts=np.array([item.start for item in scheduled], np.int32),
        num_tokens=num_tokens,
        samples=np.array([item.samples for item in scheduled]),
        controlled=np.array([_is_controlled(item) for item in scheduled]),
        prompt_logprobs=np.array(asked, np.int32).reshape(-1, 4).T,
        pooling=np.array(pooled, np.int32).reshape(-1, 2).T,
        token_ids=np.fromiter(tokens, dtype=np.int32, count=int(num_tokens.sum())),
        new_blocks=np.array(added, np.int32).reshape(-1, 4).T,
        loads=_pairs([(seq.kv.row, seq.slot) for seq in joined if seq.kv.row]),
        placed=placed_rows(scheduled),
        saves=_pairs([(item.seq.slot, item.save) for item in scheduled if item.save]),
        joined=np.array([seq.slot for seq in joined], np.int32),
        facts=np.array(
            [tuple(fact.of(seq) for fact in FACTS.values()) for seq in joined], fact_dtype()
        ),
    )


def _pairs(of_each: list[tuple[int, int]]) -> Int32:
    """[2, n]"""
    return np.array(of_each, np.int32).reshape(-1, 2).T


def _new_blocks(seq: Sequence) -> Iterator[tuple[int, int, int, int]]:
    """The `StepPlan.new_blocks` of a sequence."""
    sent, kv = seq.sent, seq.kv
    for column in range(sent.table, len(kv.table)):
        yield 0, seq.slot, column, kv.table[column]
    for column in range(sent.window_table, len(kv.window_table)):
        yield 1, seq.slot, column, kv.window_table[column]


def _is_controlled(item: ScheduledSequence) -> bool:
    seq, controls = item.seq, item.seq.controls
    if controls is None or not item.samples:
        return False
    return controls.act_on(item.end - seq.num_prompt_tokens)


def _prompt_logprobs(i: int, item: ScheduledSequence) -> tuple[int, int, int, int]:
    seq = item.seq
    count = min(item.end, seq.num_prompt_tokens - 1) - item.start  # none for the last prompt token
    assert seq.sampling_params.prompt_logprobs is not None
    following = seq.token_ids[item.start + count]
    return i, count, following, seq.sampling_params.prompt_logprobs


def mark_sent(scheduled: Iterable[ScheduledSequence]) -> None:
    """The ranks have the plan of `scheduled`."""
    for seq in [item.seq for item in scheduled]:
        if seq.sent.version != seq.kv.version:
            seq.sent = Sent(seq.kv.version, len(seq.kv.table), len(seq.kv.window_table))


def max_plan_bytes(
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_blocks: int,
    num_tables: int = 1,
    has_images: bool = False,
) -> int:
    """Bytes that no plan exceeds: a row of each array for all sequences, all their blocks new.

    Args:
        max_blocks: blocks of the longest sequence.
        num_tables: number of tables of a sequence, see `SlotTable`.
        has_images: whether prompts may have images.
    """
    words = max_num_batched_tokens * (7 if has_images else 1) + max_num_seqs * (
        11 + 4 * max_blocks * num_tables
    )
    return 4 * words + max_num_seqs * fact_dtype().itemsize


class BatchImages(NamedTuple):
    """The images of a step.

    Attributes:
        rows: [n], rows of [T] that have an embedding of an image.
        stored: [n], rows of the store that have these.
        positions: [3, T], positions of all tokens on the axes of time, height and width.
        spans: images of the step.
    """

    rows: Int32
    stored: Int32
    positions: Int32
    spans: tuple[Span, ...]


NO_SLOTS, NO_TABLES = np.zeros(0, np.int32), np.zeros((0, 0), np.int32)


class Batch(NamedTuple):
    """The arrays of `nanovllm.utils.context.Context`, and what goes into the model.

    Rows are ordered: the decodes' tokens first, each of them one of B, then those of the prefills.
    """

    num_decodes: int
    input_ids: Int32  # [T], -1 where a decode's token is known to the device only
    positions: Int32  # [T], for rotation: after images they are less than the token's index
    slot_mapping: Int32  # [T]
    context_lens: Int32  # [B]
    block_tables: Int32  # [B, W], zeros past a sequence's blocks
    cu_seqlens_q: Int32  # [P + 1]
    cu_seqlens_k: Int32  # [P + 1]
    slots: Int32  # [B], the sequences' rows in what the device keeps of them
    samples: NDArray[np.bool_]  # [B], whether the sequence's next token is sampled
    sample_rows: Int32  # [n], rows of [T] of those n sequences
    facts: NDArray[np.void]  # [B] of `fact_dtype`
    token_rows: Int32  # [T], the row of each token's sequence in the arrays of [B]
    prefixes: SharedPrefixes | None = None  # of the decodes
    # Those of layers that slide, where others see all tokens; [0] and [0, 0]: of all layers alike.
    window_slot_mapping: Int32 = NO_SLOTS  # [T]
    window_tables: Int32 = NO_TABLES  # [B, W]
    images: BatchImages | None = None  # where prompts compute placeholders

    @property
    def scored(self) -> NDArray[np.bool_]:
        """Whether the log-probability of the token alone is wanted, of rows that sample: [n]."""
        return self.facts["logprob_divisors"][self.samples] > 0

    @property
    def all_sample(self) -> bool:
        """Whether every sequence samples its next token, so no prompt has a rest."""
        return len(self.context_lens) == len(self.sample_rows)


class SlotTable:
    """A rank's memory of the running sequences from step to step, by their slot.

    Args:
        num_slots: number of slots, with the one of padding.
        max_blocks: blocks of the longest sequence.
        num_tables: number of tables of a sequence: 2 where layers that slide have blocks of their
            own.
    """

    def __init__(self, num_slots: int, max_blocks: int, num_tables: int = 1) -> None:
        self.block_tables = np.zeros((num_tables, num_slots, max_blocks), np.int32)
        self.facts = np.zeros(num_slots, fact_dtype())

    def update(self, plan: StepPlan) -> None:
        """Take in what has changed. Doing it twice does no harm."""
        which, slots, columns, blocks = plan.new_blocks
        self.block_tables[which, slots, columns] = blocks
        self.facts[plan.joined] = plan.facts


def build_batch(plan: StepPlan, table: SlotTable, block_size: int, members: int = 0) -> Batch:
    """Arrays for a step, whose changes are in `table` already.

    Args:
        members: decodes that a tile of shared prefixes has at most; 0: none are looked for.
    """
    counts, starts, samples = plan.num_tokens, plan.starts, plan.samples  # [B]
    is_prefill = counts > 1
    num_decodes = int(is_prefill.argmax()) if is_prefill.any() else len(counts)
    ends = np.cumsum(counts)  # [B], row after each sequence's last
    rows = np.repeat(np.arange(len(counts)), counts)  # [T], the sequence of each token
    indices = np.arange(len(rows)) - np.repeat(ends - counts - starts, counts)
    context_lens = starts + counts
    width = -(-int(context_lens.max()) // block_size)
    used = np.arange(width) * block_size < context_lens[:, None]
    tables = [np.where(used, each[plan.slots, :width], np.int32(0)) for each in table.block_tables]
    block_tables = tables[0]
    prefixes, n = None, num_decodes
    if members:
        prefixes = find_shared_prefixes(block_tables[:n], context_lens[:n], block_size, members)
    columns, offsets = indices // block_size, indices % block_size
    facts = table.facts[plan.slots]
    positions = (indices + facts["position_deltas"][rows]).astype(np.int32)
    input_ids, images = plan.token_ids, None
    if plan.placed.size:
        images = _place_images(positions, plan.placed, rows, indices)
    if images is not None:  # the placeholder may be none of the vocabulary
        input_ids = input_ids.copy()
        input_ids[images.rows] = 0
    slots = [(each[rows, columns] * block_size + offsets).astype(np.int32) for each in tables]
    return Batch(
        num_decodes=num_decodes,
        input_ids=input_ids,
        positions=positions,
        slot_mapping=slots[0],
        context_lens=context_lens,
        block_tables=block_tables,
        cu_seqlens_q=running_sum(counts[num_decodes:]),
        cu_seqlens_k=running_sum(context_lens[num_decodes:]),
        slots=plan.slots,
        samples=samples,
        sample_rows=(ends[samples] - 1).astype(np.int32),
        facts=facts,
        token_rows=rows.astype(np.int32),
        prefixes=prefixes,
        window_slot_mapping=slots[1] if len(tables) > 1 else NO_SLOTS,
        window_tables=tables[1] if len(tables) > 1 else NO_TABLES,
        images=images,
    )


def _place_images(
    positions: Int32, placed: Int32, sequences: NDArray[np.int64], indices: NDArray[np.int64]
) -> BatchImages | None:
    """The images of a step; None: it has no placeholder. Positions of text among images, alike on
    all axes, are written to `positions`: [T].

    Args:
        positions: [T], for rotation.
        placed: see `placed_rows`.
        sequences, indices: [T], row and index of each token's sequence.
    """
    rows, stored, numbers, *axes = placed
    positions[rows] = axes[0]
    has_image = stored >= 0
    if not has_image.any():
        return None
    of_all = np.stack([positions] * 3)
    of_all[:, rows] = axes
    _, firsts, counts = np.unique(numbers[has_image], return_index=True, return_counts=True)
    begins = rows[has_image][firsts]
    facts = begins, counts, sequences[begins], indices[begins]
    spans = tuple(map(Span, *(fact.tolist() for fact in facts)))
    return BatchImages(rows[has_image], stored[has_image], of_all, spans)


def running_sum(lens: NDArray[np.integer]) -> Int32:
    """[n] -> [n + 1], from 0."""
    out = np.zeros(len(lens) + 1, np.int32)
    np.cumsum(lens, out=out[1:])
    return out
