"""Groups of processes, as Linux shows them."""

import contextlib
from pathlib import Path


def num_running(group: int) -> int:
    """Processes of a group that have not ended, whether somebody has asked how or not."""
    count = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, owner = stat.read_text().rpartition(")")[2].split()[:3]
            count += int(owner) == group and state != "Z"
    return count
