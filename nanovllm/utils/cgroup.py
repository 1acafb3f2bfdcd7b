"""The limits of this process's control group, such as a container's (Linux)."""

import math
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")  # lines of id:controllers:path


def memory_left() -> float:
    """Bytes until the nearest limit, of version 2 or 1; infinite if there is none."""
    left = math.inf
    for group, version in _groups("memory"):
        if version == 2:
            names = "memory.max", "memory.current", ""
        else:
            names = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"
        left = min(left, _left_in(group, *names))
    return left


def cpus() -> float:
    """CPUs whose time this process may use, by quotas of version 2 or 1; infinite if there are
    none.
    """
    return min((_quota_in(group, version) for group, version in _groups("cpu")), default=math.inf)


def _groups(controller: str) -> Iterator[tuple[Path, int]]:
    """The group of a controller and those around it, whose limits hold, too, with their version. In
    a container, our path may be one of the host, which does not exist there; then the group mounted
    at the top is ours.
    """
    try:
        lines = OWN.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            top, version = ROOT, 2
        elif controller in controllers.split(","):
            top, version = ROOT / controller, 1
        else:
            continue
        group = top / path.strip("/")
        for directory in (group, *group.parents):
            yield directory, version


def _quota_in(group: Path, version: int) -> float:
    try:
        if version == 2:
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota, period = (
                (group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period")
            )
        return int(quota) / int(period) if int(quota) > 0 else math.inf
    except (OSError, ValueError):  # no such group, or "max": no quota
        return math.inf


def _left_in(group: Path, limit_name: str, usage_name: str, stat_prefix: str) -> float:
    try:
        limit = int((group / limit_name).read_text())
        usage = int((group / usage_name).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        # The file cache, of checkpoints say, counts as used but can be reclaimed.
        cache = sum(int(stat[f"{stat_prefix}{kind}_file"]) for kind in ("active", "inactive"))
    except (OSError, ValueError, KeyError):  # no such group, or "max": no limit
        return math.inf
    return max(0, limit - usage + cache)
