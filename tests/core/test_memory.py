"""The arithmetic of the KV pool's size, and what its errors advise."""

import math

import pytest

from nanovllm.sizing import memory
from nanovllm.sizing.memory import (
    GIB,
    RESERVE,
    num_blocks_for_cpu,
    num_blocks_for_cuda,
    num_blocks_for_limit,
)
from nanovllm.utils import cgroup

MIB = GIB // 1024


def test_share_of_an_empty_gpu():
    """(0.9 x 80 - 12) GiB of 1 GiB blocks."""
    assert num_blocks_for_cuda(GIB, 80 * GIB, 70 * GIB, 4 * GIB, 12 * GIB, 0.9) == 60


def test_memory_of_other_processes_does_not_count_as_ours():
    """Known defect 16: with 50 GiB held by others, half of the GPU is still ours."""
    alone = num_blocks_for_cuda(GIB, 100 * GIB, 90 * GIB, 8 * GIB, 10 * GIB, 0.5)
    shared = num_blocks_for_cuda(GIB, 100 * GIB, 43 * GIB, 8 * GIB, 10 * GIB, 0.5)
    assert alone == shared == 40


def test_no_more_than_what_is_free_less_the_reserve_and_the_activations():
    """Weights of 4 GiB stay; the 1 GiB of activations of a peak of 5 GiB must find room again."""
    free = 11 * GIB + RESERVE
    assert num_blocks_for_cuda(MIB, 100 * GIB, free, 4 * GIB, 5 * GIB, 0.9) == 10 * 1024
    assert num_blocks_for_cuda(MIB, 100 * GIB, free - 1, 4 * GIB, 5 * GIB, 0.9) == 10 * 1024 - 1


@pytest.mark.parametrize(
    ("free", "own_peak", "remedy"),
    [
        (70, 41, r"raise gpu_memory_utilization \(0.5\) or use a smaller model"),
        (70, 40, "raise gpu_memory_utilization"),
        (0.3, 10, "free memory that other processes hold, or lower gpu_memory_utilization"),
    ],
)
def test_too_small_a_gpu_names_the_remedy(free, own_peak, remedy):
    with pytest.raises(ValueError, match=remedy) as error:
        num_blocks_for_cuda(GIB, 80 * GIB, int(free * GIB), own_peak * GIB, own_peak * GIB, 0.5)
    message = str(error.value)
    assert f"uses {own_peak:.2f} GiB of its share of 40.00 GiB, {free:.2f} GiB are free" in message
    assert message.endswith("or lower max_num_batched_tokens")


@pytest.mark.parametrize(
    ("available", "max_useful", "blocks"),
    [
        (64 * GIB, 10**6, 4 * 1024),  # 4 GiB
        (2 * GIB, 10**6, 1024),  # half of what is free
        (64 * GIB, 100, 100),  # what can ever be in use
        (2 * MIB, 100, 1),
    ],
)
def test_cpu_pool(available, max_useful, blocks):
    assert num_blocks_for_cpu(MIB, available, max_useful) == blocks


def test_too_little_cpu_memory_names_the_remedy():
    with pytest.raises(ValueError, match="lower kvcache_block_size or set num_kvcache_blocks"):
        num_blocks_for_cpu(MIB, 2 * MIB - 1, 100)


def test_limit_in_bytes():
    assert num_blocks_for_limit(100, 1050) == 10
    assert num_blocks_for_limit(100, 100) == 1
    with pytest.raises(ValueError, match=r"`kv_cache_memory_bytes` must .* 100 bytes, got 99"):
        num_blocks_for_limit(100, 99)


def test_available_cpu_memory_without_proc(monkeypatch):
    """Not on Linux: a guess that gives the default limit."""

    def missing(*args, **kwargs):
        raise FileNotFoundError

    assert memory.available_cpu_memory() > 0
    monkeypatch.setattr("builtins.open", missing)
    monkeypatch.setattr("pathlib.Path.read_text", missing)
    assert num_blocks_for_cpu(GIB, memory.available_cpu_memory(), 100) == 4


V1_UNLIMITED = 2**43 - 1
LAYOUTS = {
    "container": ("0::/", {"": ("max", 3, 1)}, None),
    "limited container": ("0::/", {"": (8, 3, 1)}, 6),
    "service": ("0::/a/b", {"a": ("max", 5, 0), "a/b": (7, 5, 2)}, 4),
    "limit around the group": ("0::/a/b", {"a": (9, 7, 0), "a/b": (8, 1, 0)}, 2),
    "limit of a neighbour": ("0::/a/b", {"a": ("max", 7, 0), "b": (8, 7, 0)}, None),
    "path of the host": ("0::/../../system/pod", {"": (8, 3, 0)}, 5),
    "above the limit": ("0::/", {"": (8, 9, 0)}, 0),
    "v1 container": ("5:cpu:/c\n4:hugetlb,memory:/docker/1", {"memory": (8, 3, 1)}, 6),
    "v1 service": ("4:memory:/a", {"memory": (V1_UNLIMITED, 9, 0), "memory/a": (8, 3, 0)}, 5),
    "v1 without limit": ("4:memory:/\n0::/", {"memory": (V1_UNLIMITED, 3, 1)}, None),
    "none": (None, {}, None),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_containers_limit_bounds_the_cpu_pool(name, tmp_path, monkeypatch):
    """/proc/meminfo tells of the whole machine.

    Of each control group, in MiB: the limit, what is used, and how much of that is cached files.
    """
    own, groups, left = LAYOUTS[name]
    if own:
        (tmp_path / "own").write_text(own)
    for group, (limit, used, cached) in groups.items():
        v1 = group.startswith("memory")
        limit_in_bytes = limit if limit == "max" else limit * MIB
        prefix, inactive = "total_" if v1 else "", cached * MIB // 4
        stat = {"active_file": 0, "inactive_file": 0, "anon": 5}  # v1: without groups inside
        stat[f"{prefix}active_file"] = cached * MIB - inactive
        stat[f"{prefix}inactive_file"] = inactive
        files = {
            "memory.limit_in_bytes" if v1 else "memory.max": limit_in_bytes,
            "memory.usage_in_bytes" if v1 else "memory.current": used * MIB,
            "memory.stat": "\n".join(f"{key} {value}" for key, value in stat.items()),
        }
        (tmp_path / group).mkdir(parents=True, exist_ok=True)
        for file, content in files.items():
            (tmp_path / group / file).write_text(f"{content}\n")
    monkeypatch.setattr(cgroup, "ROOT", tmp_path)
    monkeypatch.setattr(cgroup, "OWN", tmp_path / "own")
    if left is None:
        assert cgroup.memory_left() > 2**60
        assert memory.available_cpu_memory() > 0
    else:
        assert cgroup.memory_left() == memory.available_cpu_memory() == left * MIB
    if left == 0:
        with pytest.raises(ValueError, match=r"half of the free memory is 0\.00 GiB"):
            num_blocks_for_cpu(MIB, memory.available_cpu_memory(), 100)


@pytest.mark.parametrize(
    ("own", "files", "quota"),
    [
        ("0::/", {"cpu.max": "250000 100000"}, 2.5),
        ("0::/", {"cpu.max": "max 100000"}, math.inf),
        ("0::/a/b", {"a/cpu.max": "300000 100000", "a/b/cpu.max": "400000 100000"}, 3),
        ("0::/../../pod", {"cpu.max": "100000 50000"}, 2),
        ("3:cpu,cpuacct:/c", {"cpu/cpu.cfs_quota_us": 50000, "cpu/cpu.cfs_period_us": 100000}, 0.5),
        ("3:cpu:/", {"cpu/cpu.cfs_quota_us": -1, "cpu/cpu.cfs_period_us": 100000}, math.inf),
        ("0::/", {}, math.inf),
        (None, {}, math.inf),
    ],
)
def test_a_containers_quota_of_cpus(own, files, quota, tmp_path, monkeypatch):
    if own:
        (tmp_path / "own").write_text(own)
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    monkeypatch.setattr(cgroup, "ROOT", tmp_path)
    monkeypatch.setattr(cgroup, "OWN", tmp_path / "own")
    assert cgroup.cpus() == quota
