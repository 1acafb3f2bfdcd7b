"""The arithmetic of the KV pool's size, and what its errors advise."""

import pytest

from nanovllm.engine import memory
from nanovllm.engine.memory import (
    GIB,
    RESERVE,
    kv_block_bytes,
    num_blocks_for_cpu,
    num_blocks_for_cuda,
    num_blocks_for_limit,
)

MIB = GIB // 1024


def test_kv_block_bytes():
    """Qwen3-0.6B: 28 layers x 8 heads x 128, bf16: 112 KiB per token."""
    assert kv_block_bytes(28, 256, 8, 128, 2) == 256 * 112 * 1024
    assert kv_block_bytes(1, 1, 1, 1, 1) == 2


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
    assert f"uses {own_peak:.2f} GiB of a share of 40.00 GiB, {free:.2f} GiB are free" in message
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
    assert num_blocks_for_cpu(GIB, memory.available_cpu_memory(), 100) == 4
