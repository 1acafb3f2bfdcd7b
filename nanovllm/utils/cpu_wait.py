"""`CpuWait` says when PyTorch's threads wait for CPUs that others have (Linux). No torch here.

They meet after each operation, so one that waits holds up all: on two cores, beside one process
that computed, two threads ran at a thirtieth of their speed alone, and one thread as fast as ever.
"""

import logging
import time
from pathlib import Path

logger = logging.getLogger(__name__)

TASKS = Path("/proc/self/task")
PERIOD = 5.0  # seconds
SHARE = 0.25  # of them that threads wait, all together


class CpuWait:
    """Warns once."""

    def __init__(self) -> None:
        self._has_warned = False
        self._looked_at, self._waited = time.perf_counter(), seconds_waited()

    def look(self) -> None:
        """See whether they have waited since `PERIOD` or longer. Call it again and again."""
        seconds = time.perf_counter() - self._looked_at
        if self._has_warned or seconds < PERIOD:
            return
        waited = seconds_waited() - self._waited
        if waited > SHARE * seconds:
            self._has_warned = True
            logger.warning(
                "threads of this process waited %.1f s for a CPU in the last %.1f s, and others "
                "waited for them: more threads want to run than there are CPUs; set "
                "OMP_NUM_THREADS to the cores that are free, before Python starts",
                waited,
                seconds,
            )
        self._looked_at, self._waited = self._looked_at + seconds, self._waited + waited


def seconds_waited() -> float:
    """How long the threads that there are could have run and had no CPU; 0 on other systems.

    The second number of /proc/PID/schedstat, in nanoseconds:
    https://docs.kernel.org/scheduler/sched-stats.html
    """
    nanoseconds = 0
    for file in TASKS.glob("*/schedstat"):
        try:
            nanoseconds += int(file.read_text().split()[1])
        except (OSError, IndexError, ValueError):  # it has ended, or nothing is counted
            continue
    return nanoseconds / 1e9
