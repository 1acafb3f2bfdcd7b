"""Admission: may one more sequence start without pushing a running one out of the KV pool later?

Starting every prompt that fits *now* thrashes a small pool: the running sequences grow, the
youngest are preempted, recomputed, and preempted again. So a prompt is admitted only while the
blocks that all running sequences are expected to hold at once, at any later step, fit the pool.
Lengths are known exactly for requests that end by length. For the others, the estimate is the mean
length of recently ended ones; if that is too low, preemption is the backstop.
"""

from collections.abc import Callable
from typing import Protocol

import numpy as np

from nanovllm.engine.block_manager import Block, BlockManager
from nanovllm.engine.sequence import Sequence
from nanovllm.sampling_params import SamplingParams

WINDOW = 64


class Growing(Protocol):
    """The part of a `Sequence` that concerns its length."""

    @property
    def sampling_params(self) -> SamplingParams: ...
    @property
    def max_tokens(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_completion_tokens(self) -> int: ...


class LengthEstimator:
    """An estimate of the number of tokens that a sequence will still generate."""

    def __init__(self, max_model_len: int) -> None:
        self.max_model_len = max_model_len
        self._num_ended = 0
        self._mean = 0.0  # tokens of ended requests, of which the last WINDOW weigh most

    def observe(self, seq: Growing) -> None:
        """Count the length of a finished sequence."""
        if not seq.sampling_params.ignore_eos:
            self._num_ended += 1
            step = 1 / min(self._num_ended, WINDOW)
            self._mean += step * (seq.num_completion_tokens - self._mean)

    def remaining(self, seq: Growing) -> int:
        """The expected number of tokens still to come, at least 1."""
        params, done = seq.sampling_params, seq.num_completion_tokens
        most = max(1, min(seq.max_tokens - done, self.max_model_len - seq.num_tokens))
        if params.ignore_eos or not self._num_ended:
            return most
        mean = int(self._mean)
        # A sequence longer than the mean is expected to go on for half as long again.
        return max(1, min(most, mean - done if done < mean else done // 2))


class AdmissionControl:
    """The admission checks of one step, for the sequences that run in it."""

    def __init__(
        self,
        block_manager: BlockManager,
        remaining: Callable[[Sequence], int],
        running: list[Sequence],
    ) -> None:
        self._blocks = block_manager
        self._remaining = remaining
        self._running = running
        self._growth = sum(self._final_growth(seq) for seq in running)

    def _final_pages(self, seq: Sequence) -> int:
        # The last token's KV is never needed: nothing follows that token.
        return int(self._blocks.pages_at(seq.num_tokens + self._remaining(seq) - 1))

    def _final_growth(self, seq: Sequence) -> int:
        return max(0, self._final_pages(seq) - self._blocks.pages_of(seq))

    def fits(self, seq: Sequence, hits: list[Block], end: int) -> bool:
        """Whether `seq`, with the `hits` of `find_prefix`, fits now, and later on beside everything
        that runs. Its first step computes the tokens before `end`.
        """
        if not self._blocks.can_allocate(seq, hits, end):
            return False
        # Blocks of the prefix that others hold cost nothing.
        shared = {block.block_id for block in hits if block.ref_count}
        num_shared = len(shared) * self._blocks.block_pages
        need = max(self._blocks.pages_at_start(seq, end), self._final_pages(seq)) - num_shared
        if self._growth + need <= self._blocks.num_free_pages:
            return True  # even if none finished before the others (so always, if none runs)
        return self._peak_pages(seq, shared, num_shared) <= self._blocks.num_pages

    def admitted(self, seq: Sequence) -> None:
        """Count a sequence that has just got its blocks (and is in `running`)."""
        self._growth += self._final_growth(seq)

    def _peak_pages(self, new: Sequence, shared: set[int], num_shared: int) -> int:
        """The most pages held at once if every sequence runs to its expected end.

        Usage peaks just before a sequence ends and frees its blocks, so it is enough to look at
        those moments: row k of the matrices is the step in which the k-th sequence ends. The
        `shared` blocks of the new sequence are held already, and count as staying.
        """
        seqs, manager = [*self._running, new], self._blocks
        # [K] int64 each
        tokens = np.array([seq.num_tokens for seq in seqs])
        ends = np.array([self._remaining(seq) for seq in seqs]) - 1
        held = np.array([*map(manager.pages_of, self._running), num_shared])
        private = np.array([manager.pages_of_alone(seq, shared) for seq in seqs])
        alive = ends[None, :] >= ends[:, None]  # [K, K] bool
        at_end = manager.pages_at(tokens[None, :] + ends[:, None])  # [K, K]
        change = np.where(alive, at_end - held, -private)
        return manager.num_pages - manager.num_free_pages + int(change.sum(axis=1).max())
