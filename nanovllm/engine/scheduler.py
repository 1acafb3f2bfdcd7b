"""`Scheduler`: which sequences run in the next step, with how many tokens each. No tensors here.

A sequence is a list of tokens of which the first `num_computed_tokens` have their KV in the
cache; scheduling it means computing some of the rest. One uncomputed token is a decode, more are
a prefill, whole or in chunks, and a step may mix both.
"""

import bisect
import logging
from collections import deque
from collections.abc import Collection, Iterable
from typing import NamedTuple

from nanovllm.engine.admission import AdmissionControl, LengthEstimator
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.sequence import Sequence, SequenceStatus

logger = logging.getLogger(__name__)


class ScheduledSequence(NamedTuple):
    """`num_tokens` tokens of `seq` to compute, from `seq.num_computed_tokens` on."""

    seq: Sequence
    num_tokens: int

    @property
    def samples(self) -> bool:
        """Whether the step reaches the sequence's last token, so that a new one is sampled."""
        return self.num_tokens == self.seq.num_uncomputed_tokens

    @property
    def is_decode(self) -> bool:
        """Whether the token is one that the sequence generated (the last of them, alone)."""
        return self.num_tokens == 1 and self.seq.num_computed_tokens >= self.seq.num_prompt_tokens


def _arrival(seq: Sequence) -> int:
    return seq.seq_id


class Scheduler:
    """Continuous batching over a `BlockManager`.

    Args:
        block_manager: the KV pool.
        max_num_seqs: bound on the running sequences.
        max_num_batched_tokens: bound on the tokens of a step, at least `max_num_seqs`.
        max_model_len: a sequence of this many tokens ends with "length".
        eos_token_ids: tokens that end a sequence with "stop", unless it ignores them.
    """

    def __init__(
        self,
        block_manager: BlockManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        eos_token_ids: Collection[int],
    ) -> None:
        assert max_num_batched_tokens >= max_num_seqs, "a step must have room for every decode"
        self.block_manager = block_manager
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.eos_token_ids = frozenset(eos_token_ids)
        self.waiting: deque[Sequence] = deque()  # the preempted first, then in order of arrival
        self.running: list[Sequence] = []  # in order of arrival
        self.lengths = LengthEstimator(max_model_len)
        self.num_preemptions = 0
        self._refused: Sequence | None = None  # the head, since no blocks came back meanwhile

    def add(self, seq: Sequence) -> None:
        self.waiting.append(seq)

    def is_finished(self) -> bool:
        """Whether no request is left."""
        return not self.waiting and not self.running

    def schedule(self) -> list[ScheduledSequence]:
        """Choose the next step: running decodes, then running prefills, then new sequences.

        - Every running sequence that decodes gets its token in every step; arriving prompts take
          only what is left of the token budget, so decodes never wait for them.
        - Where the pool has no block for a decode, the youngest running sequences are preempted:
          they return to the head of the waiting queue, and nothing is admitted in that step.
        - Blocks for all tokens of a sequence are taken when it is admitted, so a prefill in
          chunks cannot run dry half-way.
        - Waiting sequences start in their order. One exception: while a running sequence computes
          a block that a waiting one shares, that one waits for it, and others may pass.
        """
        num_preemptions = self.num_preemptions
        scheduled = self._schedule_decodes()
        budget = self.max_num_batched_tokens - len(scheduled)
        for seq in self.running:
            if budget and seq.num_uncomputed_tokens > 1:
                scheduled.append(ScheduledSequence(seq, min(seq.num_uncomputed_tokens, budget)))
                budget -= scheduled[-1].num_tokens
        if num_preemptions == self.num_preemptions:
            scheduled += self._admit(budget)
        assert scheduled or self.is_finished(), "requests are left, but none can run"
        return scheduled

    def _schedule_decodes(self) -> list[ScheduledSequence]:
        scheduled = []
        for seq in [seq for seq in self.running if seq.num_uncomputed_tokens == 1]:
            # Victims are the youngest, and we go from old to young: none is scheduled yet.
            while seq.status is SequenceStatus.RUNNING and not self.block_manager.can_append(seq):
                self.preempt(self.running[-1])
            if seq.status is SequenceStatus.RUNNING:
                self.block_manager.may_append(seq)
                scheduled.append(ScheduledSequence(seq, 1))
        return scheduled

    def _admit(self, budget: int) -> list[ScheduledSequence]:
        admitted: list[ScheduledSequence] = []
        if not self.waiting or self.waiting[0] is self._refused:
            return admitted
        if not budget or len(self.running) == self.max_num_seqs:
            return admitted
        admission = AdmissionControl(self.block_manager, self.lengths.remaining, self.running)
        postponed: list[Sequence] = []
        while self.waiting and budget and len(self.running) < self.max_num_seqs:
            seq = self.waiting[0]
            if self.block_manager.is_being_computed(seq):
                postponed.append(self.waiting.popleft())
                continue
            if not admission.fits(seq):
                self._refused = seq
                break
            self.waiting.popleft()
            self._start(seq)
            admission.admitted(seq)
            admitted.append(ScheduledSequence(seq, min(seq.num_uncomputed_tokens, budget)))
            budget -= admitted[-1].num_tokens
        self.waiting.extendleft(reversed(postponed))
        return admitted

    def _start(self, seq: Sequence) -> None:
        self.block_manager.allocate(seq)
        if not seq.num_preemptions:  # one that resumes finds its own blocks
            seq.num_cached_tokens = seq.num_computed_tokens
        seq.status = SequenceStatus.RUNNING
        bisect.insort(self.running, seq, key=_arrival)

    def preempt(self, seq: Sequence) -> None:
        """Take the blocks of a running sequence; it resumes before all that have not started."""
        self.running.remove(seq)
        self._release(seq)
        seq.status = SequenceStatus.WAITING
        # In order of arrival among the preempted, which come before those never started.
        ahead = (s for s in self.waiting if s.num_preemptions and s.seq_id < seq.seq_id)
        self.waiting.insert(sum(1 for _ in ahead), seq)
        seq.num_preemptions += 1
        self.num_preemptions += 1
        if self.num_preemptions == 1:
            logger.warning(
                "the KV cache is full: sequences are preempted and computed again (counted in "
                "metrics()); a larger cache or a smaller max_num_seqs avoids it"
            )

    def postprocess(
        self, scheduled: Iterable[ScheduledSequence], token_ids: Iterable[int]
    ) -> list[Sequence]:
        """Book a step that ran: publish its blocks, append its tokens, finish sequences.

        Args:
            scheduled: what `schedule` returned.
            token_ids: one sampled token for each of them that `samples`, in their order.

        Returns:
            The sequences that this step finished; they hold no blocks any more.
        """
        tokens = iter(token_ids)
        finished = []
        for item in scheduled:
            samples = item.samples
            self.block_manager.publish(item.seq, item.num_tokens)
            if samples:
                self._append(item.seq, next(tokens))
                if item.seq.is_finished:
                    finished.append(item.seq)
        assert next(tokens, None) is None, "more tokens than sequences that sample"
        if finished:
            self.running = [seq for seq in self.running if not seq.is_finished]
        return finished

    def _append(self, seq: Sequence, token_id: int) -> None:
        seq.append_token(token_id)
        params = seq.sampling_params
        if token_id in self.eos_token_ids and not params.ignore_eos:
            seq.finish_reason = "stop"
        elif seq.num_completion_tokens == params.max_tokens or seq.num_tokens == self.max_model_len:
            seq.finish_reason = "length"
        else:
            return
        seq.status = SequenceStatus.FINISHED
        self.lengths.observe(seq)
        self._release(seq)

    def _release(self, seq: Sequence) -> None:
        self.block_manager.deallocate(seq)
        self._refused = None

    def abort(self, seq_id: int) -> bool:
        """Drop a request and give its blocks back. False if there is none with this id."""
        for queue in (self.running, self.waiting):
            for seq in queue:
                if seq.seq_id == seq_id:
                    queue.remove(seq)
                    self._release(seq)
                    seq.status = SequenceStatus.FINISHED
                    return True
        return False

    def check_invariants(self) -> None:
        """Verify the queues and the block manager's books. For tests."""
        assert len(self.running) <= self.max_num_seqs, "too many running sequences"
        assert self.running == sorted(self.running, key=_arrival), "running is out of order"
        for seq in self.running:
            assert seq.status is SequenceStatus.RUNNING, repr(seq)
            assert len(seq.block_table) * seq.block_size >= seq.num_tokens - 1, repr(seq)
        for seq in self.waiting:
            assert seq.status is SequenceStatus.WAITING, repr(seq)
            assert not seq.block_table, f"{seq!r} waits and holds blocks"
        self.block_manager.check_invariants(self.running)
