"""`Scheduler`: the choice of each step's sequences, and of their token counts. No tensors here.

A sequence is a list of tokens of which the first `num_computed_tokens` have their KV in the
cache; scheduling it means computing some of the rest. Up to `DECODE_TOKENS` uncomputed tokens are
a decode, more are a prefill, whole or in chunks, and a step may mix both (unless `mixed_steps` is
off). Nobody else knows how many tokens a sequence decodes at once: each of them is an item of one
token, so a row for plans, kernels and CUDA graphs.

A step passes through three calls: `schedule` chooses it, `advance` counts it as in flight once it
has been launched, `postprocess` books its tokens once they are read. The next step may be chosen
and launched between the last two: its needs are known without the tokens, except whether one of
them ends its sequence; that is noticed a step late, and the superfluous token is dropped.
"""

import bisect
import logging
import time
from collections import OrderedDict
from collections.abc import Collection, Iterable
from itertools import takewhile
from operator import attrgetter

from nanovllm.engine.block_manager import Block, BlockManager
from nanovllm.engine.sequence import (
    PENDING,
    ScheduledSequence,
    Sent,
    Sequence,
    SequenceStatus,
)
from nanovllm.sampling_params import NO_TOKEN
from nanovllm.scheduling.admission import AdmissionControl, LengthEstimator
from nanovllm.scheduling.encoder_cache import EncoderCache
from nanovllm.scheduling.stopping import NOT_NUMBERS, end_of, failure_of

logger = logging.getLogger(__name__)

DECODE_TOKENS = 1  # the most of a sequence in a step

_arrival = attrgetter("seq_id")


class Scheduler:
    """Continuous batching over a `BlockManager`.

    Args:
        block_manager: the KV pool.
        max_num_seqs: bound on the running sequences.
        max_num_batched_tokens: bound on the tokens of a step, at least `max_num_seqs`.
        max_model_len: a sequence of this many tokens ends with "length".
        eos_token_ids: tokens that end a sequence with "stop", unless it ignores them.
        mixed_steps: prefills run beside decodes; without, they run alone and before them.
        keeps_states: the model has a state for each sequence, so no step may run twice.
        images: books of encoded images; None: prompts have no images.
    """

    def __init__(
        self,
        block_manager: BlockManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        eos_token_ids: Collection[int],
        mixed_steps: bool = True,
        keeps_states: bool = False,
        images: EncoderCache | None = None,
    ) -> None:
        assert max_num_batched_tokens >= max_num_seqs, "a step must have room for every decode"
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.eos_token_ids = frozenset(eos_token_ids)
        self.mixed_steps, self.keeps_states = mixed_steps, keeps_states
        self.images = images or EncoderCache()
        self.lengths = LengthEstimator(max_model_len)
        self.num_preemptions = self.num_failures = 0
        self.block_manager = block_manager
        self._begin()

    def _begin(self) -> None:
        # A queue, the preempted first, then in order of arrival. Any of them may be aborted at the
        # cost of one.
        self.waiting: OrderedDict[Sequence, None] = OrderedDict()
        self.running: list[Sequence] = []  # in order of arrival
        self._refused: Sequence | None = None  # the head, since no blocks came back meanwhile
        self._num_in_flight = 0  # steps between `advance` and `postprocess`
        self._free_slots = list(range(1, self.max_num_seqs + 1))  # 0 is for padding

    def reset(self) -> None:
        """Drop every request and every cached block, in any state of the books."""
        self._begin()
        self.block_manager.reset()
        self.images.forget()

    def add(self, seq: Sequence) -> None:
        self.images.join(seq)
        self.waiting[seq] = None

    def is_finished(self) -> bool:
        """Whether no request is left."""
        return not self.waiting and not self.running

    @property
    def waits_for_blocks(self) -> bool:
        """Whether the pool has no room for the first that waits, by the last look at it."""
        return bool(self.waiting) and self._head() is self._refused

    def schedule(self) -> list[ScheduledSequence]:
        """Choose the next step: running decodes, then running prefills, then new sequences.

        - Every running sequence that decodes gets its token in every step; arriving prompts take
          only what is left of the token budget, so decodes never wait for them.
        - Where the pool has no block for a decode, the youngest running sequences are preempted:
          they return to the head of the waiting queue, and nothing is admitted in that step.
        - Blocks for all tokens of a sequence are taken when it is admitted, so a prefill in
          chunks cannot run dry half-way. Layers that slide over a window beside others that do not
          get theirs chunk by chunk: a prefill waits where there are none, and the youngest is
          preempted where all wait.
        - Waiting sequences start in their order. One exception: while a running sequence computes
          a block that a waiting one shares, that one waits for it, and others may pass.
        - Without `mixed_steps`, prefills and new sequences make a step of their own while there
          are any, and the decodes wait. Preempting is left to the steps that decode.

        Returns:
            The step, decodes first. Empty if no request is left, or if nothing can be chosen
            before the step in flight is booked.
        """
        budget = self.max_num_batched_tokens
        self.images.begin_step()
        if not self._num_in_flight:  # steps that were dropped book nothing
            self.block_manager.drop_all_saves()
        if not self.mixed_steps and (prefills := self._schedule_prefills(budget, admits=True)):
            # Single tokens last, so that none is taken for a decode.
            return sorted(prefills, key=lambda item: item.num_tokens, reverse=True)
        num_preemptions = self.num_preemptions
        scheduled = self._schedule_decodes()
        if scheduled is None:
            return []
        if self.mixed_steps:
            admits = num_preemptions == self.num_preemptions
            scheduled += self._schedule_prefills(budget - len(scheduled), admits)
        if not scheduled and not self._num_in_flight:
            scheduled = self._schedule_oldest(budget)
        assert scheduled or self._num_in_flight or self.is_finished(), "nothing can run"
        return scheduled

    def _schedule_decodes(self) -> list[ScheduledSequence] | None:
        """The next decodes; None if a step in flight writes blocks that preemption must free."""
        decoding = [
            seq
            for seq in self.running
            if seq.num_uncomputed_tokens <= DECODE_TOKENS
            and seq.num_computed_tokens >= seq.images_end
            and not self._reaches_its_end(seq)
        ]
        short = [seq for seq in decoding if self.block_manager.is_short(seq)]
        if self._num_in_flight and not self.block_manager.can_append(*short):
            return None
        for seq in short:
            # Victims are the youngest, and we go from old to young: none has got a block here.
            while seq.status is SequenceStatus.RUNNING and not self.block_manager.can_append(seq):
                self.preempt(self.running[-1])
            if seq.status is SequenceStatus.RUNNING:
                self.block_manager.may_append(seq)
        # Longest context first: a kernel that starts long rows late waits for them at its end.
        decoding.sort(key=lambda seq: len(seq.token_ids), reverse=True)
        scheduled = []
        room = self.max_num_seqs - len(decoding)  # for more than one token each
        for seq in decoding:
            if seq.status is SequenceStatus.RUNNING:
                first, num_tokens = seq.num_computed_tokens, seq.num_tokens
                for start in range(first, min(first + 1 + room, num_tokens)):
                    scheduled.append(ScheduledSequence(seq, start, 1, start == num_tokens - 1))
                room -= start - first
        return scheduled

    def _schedule_prefills(self, budget: int, admits: bool) -> list[ScheduledSequence]:
        scheduled = []
        for seq in self.running:
            if budget and self._is_prefilling(seq):
                item = self._next_tokens(seq, budget)
                if item is None or not self.block_manager.can_append(seq, end=item.end):
                    admits = False  # others would take what it waits for
                    continue
                self.block_manager.may_append(seq, item.end)
                self.images.take(item)
                scheduled.append(item)
                budget -= item.num_tokens
        if admits:
            scheduled += self._admit(budget)
        return self.block_manager.cut(scheduled, self.waiting)

    def _next_tokens(self, seq: Sequence, budget: int) -> ScheduledSequence | None:
        """The uncomputed tokens of a running sequence, at most `budget`, and none of an image that
        the step cannot encode; None: there is nothing before it.
        """
        start = seq.num_computed_tokens
        end = self.images.reach(seq, start, min(seq.num_tokens, start + budget))
        if end == start:
            self.images.close()
            return None
        return ScheduledSequence.of(seq, end - start)

    def _schedule_oldest(self, budget: int) -> list[ScheduledSequence]:
        """The step where all wait for blocks: the oldest that runs gets those of the youngest.

        Blocks of two sizes may leave no room between them. A sequence that runs alone starts again
        then, and one that starts alone does so without what the cache has.
        """
        self.images.begin_step()
        while self.running:
            item = self._next_tokens(self.running[0], budget)
            if item is not None and self.block_manager.can_append(item.seq, end=item.end):
                self.block_manager.may_append(item.seq, item.end)
                self.images.take(item)
                return self.block_manager.cut([item], self.waiting)
            self.preempt(self.running[-1])
            self.images.begin_step()
        if not self.waiting:
            return []
        seq, _ = self.waiting.popitem(last=False)
        self._refused = None
        end = self.images.reach(seq, 0, min(seq.num_tokens, budget))
        return [self._start(seq, [], end)]

    def _is_prefilling(self, seq: Sequence) -> bool:
        # A single token left of a prompt is computed as a decode, but belongs with the prompts
        # where those come first.
        in_prompt = seq.num_computed_tokens < seq.num_prompt_tokens
        return (
            seq.num_uncomputed_tokens > DECODE_TOKENS
            or seq.num_computed_tokens < seq.images_end
            or (in_prompt and not self.mixed_steps)
        )

    def _reaches_its_end(self, seq: Sequence) -> bool:
        """Whether the pending token is the last, so that nothing is left to compute."""
        return seq.num_pending > 0 and (
            seq.num_completion_tokens == seq.max_tokens or seq.num_tokens == self.max_model_len
        )

    def _admit(self, budget: int) -> list[ScheduledSequence]:
        admitted: list[ScheduledSequence] = []
        if not self.waiting or self._head() is self._refused:
            return admitted
        if not budget or len(self.running) == self.max_num_seqs:
            return admitted
        admission = AdmissionControl(self.block_manager, self.lengths.remaining, self.running)
        postponed: list[Sequence] = []
        while self.waiting and budget and len(self.running) < self.max_num_seqs:
            seq = self._head()
            hits = self.block_manager.find_prefix(seq)
            if self.block_manager.postpones(seq, hits):
                del self.waiting[seq]
                postponed.append(seq)
                continue
            start = len(hits) * self.block_manager.block_size
            end = self.images.reach(seq, start, min(seq.num_tokens, start + budget))
            if end == start:  # others hold what it needs, and will have done with it
                break
            if not admission.fits(seq, hits, end):
                self._refused = seq
                break
            del self.waiting[seq]
            admitted.append(self._start(seq, hits, end))
            admission.admitted(seq)
            budget -= admitted[-1].num_tokens
        self._put_at_head(postponed)
        return admitted

    def _head(self) -> Sequence:
        return next(iter(self.waiting))

    def _put_at_head(self, seqs: list[Sequence]) -> None:
        """Let these wait before all others, in their order."""
        for seq in reversed(seqs):
            self.waiting[seq] = None
            self.waiting.move_to_end(seq, last=False)

    def _start(self, seq: Sequence, hits: list[Block], end: int) -> ScheduledSequence:
        """Let a sequence run. Returns its tokens after the `hits`, up to `end`."""
        seq.num_computed_tokens = self.block_manager.allocate(seq, hits, end)
        if not seq.num_preemptions:  # one that resumes finds its own blocks
            seq.num_cached_tokens = seq.num_computed_tokens
            self.images.started(seq)
        seq.status = SequenceStatus.RUNNING
        seq.slot = self._free_slots.pop()
        seq.started_at = seq.started_at or time.perf_counter()
        seq.sent = Sent()
        bisect.insort(self.running, seq, key=_arrival)
        item = ScheduledSequence.of(seq, end - seq.num_computed_tokens)
        self.images.take(item)
        return item

    def preempt(self, seq: Sequence) -> None:
        """Take the blocks of a running sequence, for others."""
        self._take_back(seq)
        self.num_preemptions += 1
        if self.num_preemptions == 1:
            logger.warning(
                "the KV cache is full: sequences are preempted and recomputed (counted in "
                "metrics()); a larger cache or a smaller max_num_seqs avoids it"
            )

    def _take_back(self, seq: Sequence) -> None:
        """Let a running sequence wait: it resumes before all that have not started."""
        assert not self._num_in_flight, "a step that writes these blocks is in flight"
        self._stop_running(seq)
        self._release(seq)
        seq.status = SequenceStatus.WAITING
        # In order of arrival among the preempted, which come before those never started.
        ahead = takewhile(lambda s: s.num_preemptions and s.seq_id < seq.seq_id, self.waiting)
        self._put_at_head([*ahead, seq])
        seq.num_preemptions += 1

    def compute_again(self) -> None:
        """A step may have run, and will not be booked. Where a state has moved on with it, its
        sequences begin again; elsewhere the step does when it is repeated.
        """
        if not self.keeps_states:
            return
        while self.running:
            self._take_back(self.running[-1])

    def compute_all_again(self) -> None:
        """All sequences begin again, and no block is cached: their contents are of old weights."""
        while self.running:
            self._take_back(self.running[-1])
        for seq in self.waiting:
            seq.forget_prompt_logprobs()
        self.images.forget()
        self.block_manager.reset()
        self._refused = None

    def advance(self, scheduled: list[ScheduledSequence]) -> None:
        """Count the tokens of a step that has been launched; those it samples are pending."""
        self._num_in_flight += 1
        self.images.launched(scheduled)
        for seq, _, num_tokens, samples, _ in scheduled:
            seq.num_computed_tokens += num_tokens
            if samples:
                seq.append_token(PENDING)

    def postprocess(
        self, scheduled: Iterable[ScheduledSequence], token_ids: Iterable[int]
    ) -> list[Sequence]:
        """Book a step that ran: publish its blocks, fill in its tokens, finish sequences.

        Args:
            scheduled: items that `schedule` returned.
            token_ids: one sampled token for each of them that `samples`, in their order, or
                `NO_TOKEN`, which ends the sequence with an error.

        Returns:
            The sequences that this step finished; they hold no blocks any more.
        """
        self._num_in_flight -= 1
        tokens, manager = iter(token_ids), self.block_manager
        finished: list[Sequence] = []
        for item in scheduled:
            seq, start, num_tokens, samples, save = item
            token_id = next(tokens) if samples else None
            if seq.is_finished:  # it ended, or was aborted, while this step was in flight
                if save:
                    manager.dropped(item)
                continue
            manager.publish(seq, start, start + num_tokens)
            if save:
                manager.booked(item)
            if manager.window and manager.drop_before_window(seq, start + num_tokens):
                self._refused = None
            if token_id is not None:
                self._resolve(seq, token_id)
                if seq.is_finished:
                    finished.append(seq)
        assert next(tokens, None) is None, "more tokens than sequences that sample"
        if finished:
            self.running = [seq for seq in self.running if not seq.is_finished]
        return finished

    def _resolve(self, seq: Sequence, token_id: int) -> None:
        if not seq.first_token_at:
            seq.first_token_at = time.perf_counter()
        if seq.results.has_nan or token_id == NO_TOKEN:
            seq.end = failure_of(seq)
            self._count_failure(seq)
        else:
            seq.resolve_pending(token_id)
            seq.end = end_of(seq, token_id, self.eos_token_ids, self.max_model_len)
            if seq.end is None:
                return
        seq.finished_at = time.perf_counter()
        seq.drop_pending()
        seq.status = SequenceStatus.FINISHED
        self.lengths.observe(seq)
        self._release(seq)

    def _count_failure(self, seq: Sequence) -> None:
        self.num_failures += 1
        if self.num_failures == 1:
            logger.warning(
                "request %d ends with an error: %s (further ones are only counted, see metrics())",
                seq.request_id,
                NOT_NUMBERS,
            )

    def _release(self, seq: Sequence) -> None:
        # A step in flight may still write the sequence's last block and its slot. The next
        # owner writes them in a later step, and reads only its own tokens.
        self.block_manager.deallocate(seq)
        self.images.release(seq)
        seq.num_computed_tokens = 0
        if seq.slot >= 0:
            self._free_slots.append(seq.slot)
            seq.slot = -1
        self._refused = None

    def abort(self, seqs: Iterable[Sequence]) -> None:
        """Drop those of the sequences that are left, and give their blocks back."""
        for seq in seqs:
            if seq.is_finished:
                continue
            if seq.status is SequenceStatus.RUNNING:
                self._stop_running(seq)
            else:
                del self.waiting[seq]
            seq.drop_pending()
            self._release(seq)
            seq.status = SequenceStatus.FINISHED

    def _stop_running(self, seq: Sequence) -> None:
        index = bisect.bisect_left(self.running, _arrival(seq), key=_arrival)
        assert self.running[index] is seq, f"{seq!r} does not run"
        del self.running[index]

    def forget_steps(self) -> None:
        """The steps in flight will not be booked."""
        assert self.is_finished(), "sequences are left that need their tokens"
        self._num_in_flight = 0

    def describe(self) -> dict[str, int | float]:
        """The queues and the pool, for `LLMEngine.metrics`."""
        num_blocks = self.block_manager.num_blocks
        num_used = self.block_manager.num_used_blocks
        return {
            "num_kvcache_blocks": num_blocks,
            "num_used_kvcache_blocks": num_used,
            "kvcache_usage": num_used / num_blocks,
            "num_waiting": len(self.waiting),
            "num_running": len(self.running),
            "num_preemptions": self.num_preemptions,
            **self.block_manager.describe(),
            **self.images.describe(),
        }
