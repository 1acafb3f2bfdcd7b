"""`StepPlan`: a scheduled step as all ranks receive it, with only what has changed since the last.

numpy only: knows no device. Letters: T tokens of the step, B sequences, W blocks of the longest.
"""

from collections.abc import Iterable
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nanovllm.engine.scheduler import ScheduledSequence

Int32 = NDArray[np.int32]


class StepPlan(NamedTuple):
    """What the ranks do in a step. Its size depends on the step, never on how long prompts are."""

    slots: Int32  # [B], the sequences' rows in what the ranks remember, decodes first
    starts: Int32  # [B], position of the first token
    num_tokens: Int32  # [B], how many
    samples: NDArray[np.bool_]  # [B], whether the next token is sampled
    controlled: NDArray[np.bool_]  # [B], whether rank 0 needs the logits, to sample it by controls
    prompt_logprobs: Int32  # [4, p]: index in B, how many tokens, the next prompt token, how many
    # of the most likely ones, where log-probabilities of the prompt are wanted
    pooling: Int32  # [2, k]: index in B, and 1 for the mean of all, 0 for the last hidden state
    token_ids: Int32  # [T], -1 where a decode's token is known to the device only
    new_blocks: Int32  # [3, n]: slot, column and block id of what was added to block tables
    joined: Int32  # [J], slots whose sequence the ranks do not know yet
    temperatures: NDArray[np.float32]  # [J]
    random_keys: Int32  # [2, J], two words for each sequence (uint32 in the bits of int32)


def plan_step(scheduled: list[ScheduledSequence]) -> StepPlan:
    """The plan for `scheduled`, in which the decodes come first (as `Scheduler.schedule` returns).

    What it contains counts as known to the ranks once `mark_sent` has been called.
    """
    seqs = [item.seq for item in scheduled]
    num_tokens = np.array([item.num_tokens for item in scheduled], np.int32)
    tokens = chain.from_iterable(
        seq.token_ids[start : start + count] for seq, start, count, _ in scheduled
    )
    added = [
        (seq.slot, column, seq.block_table[column])
        for seq in seqs
        for column in range(seq.num_sent_blocks, len(seq.block_table))
    ]
    asked = [
        _prompt_logprobs(i, item)
        for i, item in enumerate(scheduled)
        if item.seq.prompt_logprobs is not None and item.start < item.seq.num_prompt_tokens - 1
    ]
    pooled = [
        (i, item.seq.pooling == "mean") for i, item in enumerate(scheduled) if item.seq.pooling
    ]
    joined = [seq for seq in seqs if not seq.num_sent_blocks]
    return StepPlan(
        slots=np.array([seq.slot for seq in seqs], np.int32),
        starts=np.array([item.start for item in scheduled], np.int32),
        num_tokens=num_tokens,
        samples=np.array([item.samples for item in scheduled]),
        controlled=np.array([_is_controlled(item) for item in scheduled]),
        prompt_logprobs=np.array(asked, np.int32).reshape(-1, 4).T,
        pooling=np.array(pooled, np.int32).reshape(-1, 2).T,
        token_ids=np.fromiter(tokens, dtype=np.int32, count=int(num_tokens.sum())),
        new_blocks=np.array(added, np.int32).reshape(-1, 3).T,
        joined=np.array([seq.slot for seq in joined], np.int32),
        temperatures=np.array([seq.sampling_params.temperature for seq in joined], np.float32),
        random_keys=_words([seq.random_key for seq in joined]),
    )


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


def _words(keys: list[tuple[int, int]]) -> Int32:
    return np.array(keys, np.uint32).reshape(-1, 2).T.view(np.int32)


def mark_sent(scheduled: Iterable[ScheduledSequence]) -> None:
    """The ranks have the plan of `scheduled`."""
    for item in scheduled:
        item.seq.num_sent_blocks = len(item.seq.block_table)


def max_plan_bytes(max_num_seqs: int, max_num_batched_tokens: int, max_blocks: int) -> int:
    """Bytes that no plan exceeds: a row of each array for all sequences, all their blocks new."""
    words = max_num_batched_tokens + max_num_seqs * (14 + 3 * max_blocks)
    return 4 * words
