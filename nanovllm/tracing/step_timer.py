"""`StepTimer`: how long the device works on each step, by CUDA events on its stream.

Nothing waits for them: they are read when a step's tokens are there, and so they are.
"""

from collections import deque

import torch

NUM_SPANS = 8  # more than there are steps in flight


class Span:
    """A step on the device.

    Attributes:
        end: when its tokens are on the host.
        is_whole: both events have been recorded.
    """

    def __init__(self) -> None:
        self._begin = torch.cuda.Event(enable_timing=True)
        self.end = torch.cuda.Event(enable_timing=True)
        self.is_whole = False
        self._before: Span | None = None

    def begin(self, before: "Span") -> None:
        """The step's work follows, on the current stream."""
        self.is_whole, self._before = False, before if before.is_whole else None
        self._begin.record()

    def finish(self) -> None:
        """That was all of it."""
        self.end.record()
        self.is_whole = True

    def seconds(self) -> tuple[float, float]:
        """How long the device had nothing to do before the step, and how long the step took, when
        its end has been waited for.
        """
        idle = 0.0 if self._before is None else self._before.end.elapsed_time(self._begin)  # ms
        return max(0.0, idle) / 1e3, self._begin.elapsed_time(self.end) / 1e3


class StepTimer:
    """Gives each step a `Span`, of a few that are used again and again.

    Attributes:
        span: of the newest step.
    """

    def __init__(self) -> None:
        self._spans = deque(Span() for _ in range(NUM_SPANS))
        self.span = self._spans[0]

    def begin(self) -> None:
        """The work of a new step follows. What the host does before it is no time of the device."""
        before = self.span
        self._spans.rotate(-1)
        self.span = self._spans[0]
        self.span.begin(before)
