"""What attention needs done to a projection first, in one kernel: query and key normalisation,
rotary embedding, and storing keys and values in the paged cache.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.hopper import launch_dependents, pdl_options, wait


@triton.jit
def _qk_norm_rope_store_kernel(
    qkv_ptr, q_weight_ptr, k_weight_ptr, cos_sin_ptr, positions_ptr,
    k_cache_ptr, v_cache_ptr, slots_ptr, eps, stride_t,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    # One program: HEADS of the Hq + 2 Hkv heads of a token, in two halves of D/2.
    launch_dependents(PDL)
    HALF: tl.constexpr = D // 2
    t = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    i = tl.arange(0, HALF)[None, :]
    is_q = head < HQ
    w1 = tl.where(is_q, tl.load(q_weight_ptr + i), tl.load(k_weight_ptr + i))
    w2 = tl.where(is_q, tl.load(q_weight_ptr + HALF + i), tl.load(k_weight_ptr + HALF + i))
    slot = tl.load(slots_ptr + t).to(tl.int64)
    cos_sin = cos_sin_ptr + tl.load(positions_ptr + t).to(tl.int64) * D + i
    cos = tl.load(cos_sin)
    sin = tl.load(cos_sin + HALF)

    wait(PDL)
    ptr = qkv_ptr + t * stride_t + head * D + i
    raw1 = tl.load(ptr)
    raw2 = tl.load(ptr + HALF)
    dtype = raw1.dtype
    x1, x2 = raw1.to(tl.float32), raw2.to(tl.float32)
    scale = tl.rsqrt((tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)) / D + eps)[:, None]
    x1 = ((x1 * scale).to(dtype) * w1).to(tl.float32)
    x2 = ((x2 * scale).to(dtype) * w2).to(tl.float32)
    y1 = (x1 * cos - x2 * sin).to(dtype)
    y2 = (x2 * cos + x1 * sin).to(dtype)
    tl.store(ptr, y1, mask=head < HQ + HKV)
    tl.store(ptr + HALF, y2, mask=head < HQ + HKV)

    if slot >= 0:  # -1: padding
        k_ptr = k_cache_ptr + (slot * HKV + head - HQ) * D + i
        is_k = (head >= HQ) & (head < HQ + HKV)
        tl.store(k_ptr, y1, mask=is_k)
        tl.store(k_ptr + HALF, y2, mask=is_k)
        v_ptr = v_cache_ptr + (slot * HKV + head - HQ - HKV) * D + i
        is_v = head >= HQ + HKV
        tl.store(v_ptr, raw1, mask=is_v)
        tl.store(v_ptr + HALF, raw2, mask=is_v)


def qk_norm_rope_store_(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """RMS-normalise the query and key heads and rotate them to their positions, in place; write
    keys and values to their slots, but for rows with slot -1.

    Args:
        qkv: [T, Hq + 2 Hkv, D], the heads of a token adjacent.
        q_weight, k_weight: [D].
        cos_sin: [max_position, D] float32, see `RotaryEmbedding`.
        positions: [T] int32.
        k_cache, v_cache: [N, S, Hkv, D].
        slot_mapping: [T] int32.
    """
    T, H, D = qkv.shape
    HKV = k_cache.shape[2]
    assert qkv.stride()[1:] == (D, 1), "the heads of a token must be adjacent"
    assert k_cache.is_contiguous() and v_cache.is_contiguous(), "the caches must be contiguous"
    # Few tokens: more programs. In both cases a power of two that divides the number of heads.
    HEADS = min(H & -H, 4 if T <= 256 else 16)
    _qk_norm_rope_store_kernel[(T, H // HEADS)](
        qkv, q_weight, k_weight, cos_sin, positions, k_cache, v_cache, slot_mapping, eps,
        qkv.stride(0), HQ=H - 2 * HKV, HKV=HKV, D=D, HEADS=HEADS,
        num_warps=max(1, HEADS * D // 1024), **pdl_options(qkv),
    )  # fmt: skip
