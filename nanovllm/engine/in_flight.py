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
        tokens: its sampled tokens, and what comes with them.
        launched_at: seconds of time.perf_counter.
        noted: notes of a `Timeline` on its launch; None without one.
    """

    scheduled: list[ScheduledSequence]
    tokens: PendingTokens
    launched_at: float
    noted: Any = None

    def sampled(self) -> list[Sequence]:
        """The sequences that get its tokens, in their order."""
        return [item.seq for item in self.scheduled if item.samples]
