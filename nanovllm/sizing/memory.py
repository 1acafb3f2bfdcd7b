"""The number of KV blocks that fit: plain arithmetic on bytes, without a device."""

from nanovllm.utils.cgroup import memory_left

GIB = 1 << 30
CPU_LIMIT = 4 * GIB  # size of the default KV cache on a CPU
CPU_TOKENS = 2**17  # the same in tokens, for small models: a larger pool would keep prefixes only
RESERVE = GIB // 4  # left free on a GPU, for CUDA graphs and libraries' workspaces


def num_blocks_for_cuda(
    block_bytes: int, total: int, free: int, own_now: int, own_peak: int, utilization: float
) -> int:
    """The number of blocks for a GPU. Only this engine's own use counts against its share.

    Args:
        block_bytes: bytes per block.
        total: bytes of the GPU.
        free: bytes that are not in use now.
        own_now: bytes that this engine holds now: its weights.
        own_peak: maximum bytes that this engine has in use: weights and activations.
        utilization: option `gpu_memory_utilization`.

    Raises:
        ValueError: if not one block fits.
    """
    share = int(total * utilization) - own_peak
    available = available_for_cuda(total, free, own_now, own_peak, utilization)
    num_blocks = available // block_bytes
    if num_blocks < 1:
        if share <= available:
            remedy = f"raise gpu_memory_utilization ({utilization}) or use a smaller model"
        else:
            remedy = "free memory that other processes hold, or lower gpu_memory_utilization"
        raise ValueError(
            f"no memory for a KV cache: the engine uses {own_peak / GIB:.2f} GiB of its share of "
            f"{total * utilization / GIB:.2f} GiB, {free / GIB:.2f} GiB are free, and a block "
            f"takes {block_bytes / GIB:.3f} GiB; {remedy}, or lower max_num_batched_tokens"
        )
    return num_blocks


def available_for_cuda(
    total: int, free: int, own_now: int, own_peak: int, utilization: float
) -> int:
    """The bytes of a GPU that this engine may still use, see `num_blocks_for_cuda`."""
    return min(int(total * utilization) - own_peak, free + own_now - own_peak - RESERVE)


def num_blocks_for_cpu(block_bytes: int, available: int, max_blocks: int) -> int:
    """The number of blocks for a CPU: at most 4 GiB, half of the free memory, and `max_blocks`.

    Raises:
        ValueError: if not one block fits.
    """
    num_blocks = min(min(CPU_LIMIT, available // 2) // block_bytes, max_blocks)
    if num_blocks < 1:
        raise ValueError(
            f"no memory for a KV cache: a block takes {block_bytes / GIB:.3f} GiB and half of "
            f"the free memory is {available / 2 / GIB:.2f} GiB; lower kvcache_block_size or set "
            "num_kvcache_blocks"
        )
    return num_blocks


def num_blocks_for_limit(block_bytes: int, limit: int) -> int:
    """The number of blocks for `kv_cache_memory_bytes=limit`.

    Raises:
        ValueError: if not one block fits.
    """
    if limit < block_bytes:
        raise ValueError(
            f"`kv_cache_memory_bytes` must hold at least one block of {block_bytes} bytes, "
            f"got {limit}"
        )
    return limit // block_bytes


def available_cpu_memory() -> int:
    """The bytes of memory that are free or can be freed, within the limit of a container."""
    free = 2 * CPU_LIMIT
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    free = int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux
    return int(min(free, memory_left()))
