"""`CpuWait`: a warning when threads wait for CPUs that others use (Linux). Imports no torch.

PyTorch's threads meet after each operation, so one that waits holds up all. PyTorch's threads
cannot be told from others, so all threads of the process count.
"""

import logging
import math
import time
from contextlib import suppress
from pathlib import Path

logger = logging.getLogger(__name__)

TASKS = Path("/proc/self/task")
PERIOD = 5.0  # seconds
PAUSE = 1.0  # seconds without a step, after which a new period begins
SHARE = 0.25  # of a period, for which one thread waits


class CpuWait:
    """A watch for waiting threads, which warns once per engine."""

    def __init__(self) -> None:
        self._has_warned = False
        self._since = self._looked_at = -math.inf  # seconds of time.perf_counter
        self._waited: dict[str, float] = {}  # at `_since`

    def look(self, began: float) -> None:
        """Warn if a thread has waited for much of the last `PERIOD`. To be called after each step,
        with the time when it began, in seconds of time.perf_counter.
        """
        now = time.perf_counter()
        has_paused, self._looked_at = began - self._looked_at > PAUSE, now
        seconds = now - self._since
        if self._has_warned or (seconds < PERIOD and not has_paused):
            return
        before, self._waited, self._since = self._waited, seconds_waited(), now
        if has_paused:
            return
        most = max((self._waited[i] - before[i] for i in self._waited.keys() & before), default=0.0)
        if most > SHARE * seconds:
            self._has_warned = True
            logger.warning(
                "CPU contention: a thread of this process waited %.1f s for a CPU in the last "
                "%.1f s, and PyTorch's threads wait for each other; pass the number of free CPUs "
                "to torch.set_num_threads before building the engine, or set OMP_NUM_THREADS to it "
                "before starting Python",
                most,
                seconds,
            )


def seconds_waited() -> dict[str, float]:
    """The time in seconds for which each thread could have run but had no CPU; empty on other
    systems.

    It is the second number in /proc/PID/schedstat, in nanoseconds there:
    https://docs.kernel.org/scheduler/sched-stats.html
    """
    found = {}
    for file in TASKS.glob("*/schedstat"):
        with suppress(OSError, IndexError, ValueError):  # it has ended, or has no statistics
            found[file.parent.name] = int(file.read_text().split()[1]) / 1e9
    return found
