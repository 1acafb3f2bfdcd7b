"""`StepUnderWay`: a step that the device has been given, until its tokens are booked."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceABC
from typing import TYPE_CHECKING, NamedTuple

from nanovllm.engine.controls import KnownTokens
from nanovllm.engine.scheduler import ScheduledSequence
from nanovllm.engine.sequence import Sequence

if TYPE_CHECKING:
    from nanovllm.engine.step_inputs import PendingTokens


class StepUnderWay(NamedTuple):
    """A step that has been launched and not been booked yet.

    Attributes:
        scheduled: the step.
        tokens: what it samples, and what comes with that.
        launched_at: seconds of time.perf_counter.
    """

    scheduled: list[ScheduledSequence]
    tokens: PendingTokens
    launched_at: float

    def sampled(self) -> list[Sequence]:
        """The sequences that get its tokens, in their order."""
        return [item.seq for item in self.scheduled if item.samples]

    def take_results(self) -> None:
        """Give the sequences what comes with their tokens, which are there but not booked."""
        sampled = self.sampled()
        for row, token_ids, values, rank in self.tokens.logprobs():
            logprobs = sampled[row].logprobs
            if logprobs is not None and not sampled[row].is_finished:
                logprobs.append(token_ids, values, rank)
        for i, position, token_ids, values, rank in self.tokens.prompt_logprobs():
            logprobs = self.scheduled[i].seq.prompt_logprobs
            assert logprobs is not None, "nobody asked"
            if position == len(logprobs):  # not again after a preemption
                logprobs.append(token_ids, values, rank)
        for i, vector in self.tokens.pooled():
            self.scheduled[i].seq.embedding = vector


def known_tokens(
    steps: SequenceABC[StepUnderWay], wait: Callable[[PendingTokens], list[int]]
) -> KnownTokens:
    """For controls that depend on the last tokens.

    Args:
        steps: under way, the newest last.
        wait: for the tokens of one of them.
    """
    pending: dict[Sequence, int] = {}

    def known(seq: Sequence, start: int) -> list[int]:
        token_ids = seq.token_ids[seq.num_prompt_tokens + start :]
        if seq.num_pending:
            assert seq.num_pending == 1, f"{seq!r} has more than one pending token"
            if not pending:
                newest = steps[-1]
                pending.update(zip(newest.sampled(), wait(newest.tokens), strict=True))
            token_ids[-1] = pending[seq]
        return token_ids

    return known
