"""What memory the control group of this process still allows: a container's limit (Linux)."""

import math
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")  # lines of id:controllers:path


def memory_left() -> float:
    """Bytes until the nearest limit, of version 2 or 1; infinite where there is none."""
    try:
        lines = OWN.read_text().splitlines()
    except OSError:
        return math.inf
    left = math.inf
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            top, names = ROOT, ("memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            top, names = (
                ROOT / "memory",
                ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
            )
        else:
            continue
        group = top / path.strip("/")
        # The limits of all groups around ours hold too. In a container our own path may be that of
        # the host, which is not there, and the group mounted at the top is ours.
        for directory in (group, *group.parents):
            left = min(left, _left_in(directory, *names))
    return left


def _left_in(group: Path, limit_name: str, usage_name: str, stat_prefix: str) -> float:
    try:
        limit = int((group / limit_name).read_text())
        usage = int((group / usage_name).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        # The cache of files, checkpoints say, counts as used but gives way.
        cache = sum(int(stat[f"{stat_prefix}{kind}_file"]) for kind in ("active", "inactive"))
    except (OSError, ValueError, KeyError):  # no such group, or "max": no limit
        return math.inf
    return max(0, limit - usage + cache)
