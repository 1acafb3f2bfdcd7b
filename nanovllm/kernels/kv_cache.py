"""Stores the keys and values of a step's tokens into the paged cache."""

import torch
import triton
import triton.language as tl


@triton.jit
def _store_kvcache_kernel(
    k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, slots_ptr, stride_kt, stride_vt,
    ROW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + t).to(tl.int64)
    if slot >= 0:  # -1: padding
        cols = tl.arange(0, BLOCK)
        mask = cols < ROW
        k = tl.load(k_ptr + t * stride_kt + cols, mask=mask)
        tl.store(k_cache_ptr + slot * ROW + cols, k, mask=mask)
        v = tl.load(v_ptr + t * stride_vt + cols, mask=mask)
        tl.store(v_cache_ptr + slot * ROW + cols, v, mask=mask)


def store_kvcache(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Write row t of k and v into slot `slot_mapping[t]`; rows with slot -1 go nowhere.

    Args:
        k, v: [T, Hkv, D], the heads of a token adjacent in memory.
        k_cache, v_cache: [N, S, Hkv, D].
        slot_mapping: [T] int32.
    """
    T, H, D = k.shape
    assert k.stride()[1:] == v.stride()[1:] == (D, 1), "the heads of a token must be adjacent"
    assert k_cache.is_contiguous() and v_cache.is_contiguous(), "the caches must be contiguous"
    _store_kvcache_kernel[(T,)](
        k, v, k_cache, v_cache, slot_mapping, k.stride(0), v.stride(0),
        ROW=H * D, BLOCK=triton.next_power_of_2(H * D), num_warps=4,
    )  # fmt: skip
