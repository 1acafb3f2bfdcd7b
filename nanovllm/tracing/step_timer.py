"""`StepTimer`: the device's time for each step, by CUDA events on its stream.

Nothing waits for the events: they are read when a step's tokens have arrived, and then the events
have, too.
"""

from collections import deque

import torch

NUM_SPANS = 8  # more than the steps in flight


class Span:
    """A step on the device.

    Attributes:
        end: event after its tokens have been copied to the host.
        is_whole: whether both events have been recorded.
    """

    def __init__(self) -> None:
        self._begin = torch.cuda.Event(enable_timing=True)
        self.end = torch.cuda.Event(enable_timing=True)
        self.is_whole = False
        self._before: Span | None = None
        self._encoded = torch.cuda.Event(enable_timing=True)
        self._encodes = False

    def begin(self, before: "Span") -> None:
        """Record the begin: the step's work follows on the current stream."""
        self.is_whole, self._before = False, before if before.is_whole else None
        self._encodes = False
        self._begin.record()

    def end_images(self) -> None:
        """Record that what came since the begin encodes images."""
        self._encodes = True
        self._encoded.record()

    def finish(self) -> None:
        """Record the end: all of the step's work has been launched."""
        self.end.record()
        self.is_whole = True

    def seconds(self) -> tuple[float, float]:
        """The device's idle time before the step, and its time for the step, once its end has been
        waited for.
        """
        idle = 0.0 if self._before is None else self._before.end.elapsed_time(self._begin)  # ms
        return max(0.0, idle) / 1e3, self._begin.elapsed_time(self.end) / 1e3

    def encoding_seconds(self) -> float:
        """The device's time for images, once the end of the step has been waited for."""
        return self._begin.elapsed_time(self._encoded) / 1e3 if self._encodes else 0.0


class StepTimer:
    """A timer that gives each step a `Span`, one of a few that it reuses.

    Attributes:
        span: span of the newest step.
    """

    def __init__(self) -> None:
        self._spans = deque(Span() for _ in range(NUM_SPANS))
        self.span = self._spans[0]
        self._has_begun = False

    def begin_with_images(self) -> None:
        """Begin a step's span with the encoding of its images, before the step itself."""
        self._has_begun = False
        self.begin()
        self._has_begun = True

    def begin(self) -> None:
        """Begin a step's span. The host's work before this call is not counted."""
        if self._has_begun:
            self._has_begun = False
            self.span.end_images()
            return
        before = self.span
        self._spans.rotate(-1)
        self.span = self._spans[0]
        self.span.begin(before)
