"""`InFlightStep`: a step that the device computes, until its tokens are booked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from nanovllm.engine.sequence import ScheduledSequence, Sequence

if TYPE_CHECKING:
    from nanovllm.engine.step_inputs import PendingTokens


class InFlightStep(NamedTuple):
    """A step that has been launched and not been booked yet.

    Attributes:
        scheduled: the step.
        tokens: what it samples, and what comes with that.
        launched_at: seconds of time.perf_counter.
        noted: what a `Timeline` has noted of its launch; None without one.
    """

    scheduled: list[ScheduledSequence]
    tokens: PendingTokens
    launched_at: float
    noted: Any = None

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
