"""Preparation of a projection for attention, in one kernel: the sum of partial results, query and
key normalisation, rotary embedding, and storage of keys and values in the paged cache.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.attention.kv_cache import halves_to_fp8, load_heads, store_halves
from nanovllm.kernels.device_features import launch_dependents, pdl_options, wait
from nanovllm.kernels.norm import weighted
from nanovllm.tensors.kv_cache import KVCache
from nanovllm.tensors.qk_norm_rope import QKNormRope
from nanovllm.utils.integers import next_power_of_2


@triton.jit
def turned_places(i, D: tl.constexpr, R: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The places in a projection's head of both halves of the head as it is rotated, see
    `RotaryEmbedding.order`. The first R elements are rotated.
    """
    HALF: tl.constexpr = D // 2
    if R == D and not INTERLEAVED:
        return i, HALF + i
    elif INTERLEAVED:
        return tl.where(i < R // 2, 2 * i, i + R // 2), tl.where(i < R // 2, 2 * i + 1, HALF + i)
    else:
        return tl.where(i < R // 2, i, i + R // 2), tl.where(i < R // 2, i + R // 2, HALF + i)


@triton.jit
def norm_rope(
    x1, x2, weight, cos_sin, eps, D: tl.constexpr, NORM: tl.constexpr, PLUS_ONE: tl.constexpr
):  # fmt: skip
    """Normalise heads, in two halves [HEADS, D / 2], if `NORM`, and rotate them. `weight` is a pair
    of halves, `cos_sin` of cosines and sines.
    """
    dtype: tl.constexpr = x1.dtype
    cos, sin = cos_sin
    x1, x2 = x1.to(tl.float32), x2.to(tl.float32)
    if NORM:
        scale = tl.rsqrt((tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)) / D + eps)[:, None]
        x1 = weighted(x1 * scale, weight[0], PLUS_ONE).to(tl.float32)
        x2 = weighted(x2 * scale, weight[1], PLUS_ONE).to(tl.float32)
    return (x1 * cos - x2 * sin).to(dtype), (x2 * cos + x1 * sin).to(dtype)


@triton.jit
def _norm_weights(q_weight_ptr, k_weight_ptr, is_q, places, inside):
    """The norm weights of query or key heads, in two halves."""
    first, second = places
    q1, q2 = tl.load(q_weight_ptr + first, inside), tl.load(q_weight_ptr + second, inside)
    k1, k2 = tl.load(k_weight_ptr + first, inside), tl.load(k_weight_ptr + second, inside)
    return tl.where(is_q, q1, k1), tl.where(is_q, q2, k2)


@triton.jit(do_not_specialize=["stride_part"])
def _qk_norm_rope_store_kernel(
    qkv_ptr, out_ptr, q_weight_ptr, k_weight_ptr, cos_sin_ptr, positions_ptr,
    k_cache_ptr, v_cache_ptr, k_exponents_ptr, v_exponents_ptr, slots_ptr, eps,
    stride_part, stride_t, stride_out,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, HALF_PAD: tl.constexpr, S: tl.constexpr,
    HEADS: tl.constexpr, PARTS: tl.constexpr, PLUS_ONE: tl.constexpr, R: tl.constexpr,
    INTERLEAVED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # One program: HEADS of the Hq + 2 Hkv heads of a token, in two halves of D/2.
    launch_dependents(PDL)
    HALF: tl.constexpr = D // 2
    t = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    i = tl.arange(0, HALF_PAD)[None, :]
    inside = None
    if HALF < HALF_PAD:
        inside = i < HALF
    NORM: tl.constexpr = q_weight_ptr is not None
    weight = 0.0, 0.0
    if NORM:
        places = turned_places(i, D, R, INTERLEAVED)
        weight = _norm_weights(q_weight_ptr, k_weight_ptr, head < HQ, places, inside)
    slot = tl.load(slots_ptr + t).to(tl.int64)
    cos_sin = cos_sin_ptr + tl.load(positions_ptr + t).to(tl.int64) * D + i
    cos_sin = tl.load(cos_sin, inside), tl.load(cos_sin + HALF, inside)
    wait(PDL)
    ptr = qkv_ptr + t * stride_t + head * D
    REORDERS: tl.constexpr = R < D or INTERLEAVED
    places = i, HALF + i
    if REORDERS:  # but no values
        first, second = turned_places(i, D, R, INTERLEAVED)
        turns = head < HQ + HKV
        places = tl.where(turns, first, i), tl.where(turns, second, HALF + i)
    raw1, raw2 = load_heads(ptr, places, inside, stride_part, PARTS, out_ptr.dtype.element_ty)
    y1, y2 = norm_rope(raw1, raw2, weight, cos_sin, eps, D, NORM, PLUS_ONE)
    out = out_ptr + t * stride_out + head * D + i
    if (tl.program_id(1) + 1) * HEADS <= HQ:  # only queries, which are not cached
        tl.store(out, y1, mask=inside)
        tl.store(out + HALF, y2, mask=inside)
    else:
        is_k, is_v, kv = (head >= HQ) & (head < HQ + HKV), head >= HQ + HKV, head - HQ
        GOES_ON: tl.constexpr = PARTS > 1 or REORDERS or k_exponents_ptr is not None
        if GOES_ON:  # backends read values here, too
            y1, y2 = tl.where(is_v, raw1, y1), tl.where(is_v, raw2, y2)
        k1, k2, v1, v2, exponent = y1, y2, raw1, raw2, None
        if k_exponents_ptr is not None:  # later kernels use the values as stored
            k1, k2, rounded1, rounded2, exponent = halves_to_fp8(y1, y2, inside)
            y1, y2 = tl.where(head < HQ, y1, rounded1), tl.where(head < HQ, y2, rounded2)
            v1, v2 = k1, k2
        changed = ~is_v | GOES_ON
        changed = changed if inside is None else changed & inside
        tl.store(out, y1, mask=changed)
        tl.store(out + HALF, y2, mask=changed)
        store_halves(
            k_cache_ptr, k_exponents_ptr, k1, k2, exponent, slot, kv, i, is_k, inside, HKV, D, S
        )
        store_halves(
            v_cache_ptr, v_exponents_ptr, v1, v2, exponent, slot, kv - HKV, i, is_v, inside, HKV, D,
            S,
        )  # fmt: skip


def qk_norm_rope_store(
    qkv: torch.Tensor,
    how: QKNormRope,
    cache: KVCache,
    dtype: torch.dtype,
    fixed_order: bool = False,
) -> torch.Tensor:
    """Normalise the query and key heads and rotate them to their positions; write keys and values
    to their slots, except rows with slot -1.

    Args:
        qkv: [T, H, D] with H = Hq + 2 Hkv, the heads of a token adjacent, overwritten where heads
            keep their order; or S > 1 partial results [S, T, H, D], which are summed first.
        how: norms, rotation and slots.
        cache: KV cache of the layer.
        dtype: torch.dtype of the result.
        fixed_order: whether tokens are computed alike, whatever their number.

    Returns:
        [T, H, D] of `dtype`, with keys and values as the cache has them, and the elements of
        queries and keys in the order in which they are rotated.
    """
    T, H, D = qkv.shape[-3:]
    parts = len(qkv) if qkv.dim() == 4 else 1
    assert qkv.dim() == 3 or parts > 1, "one result is not partial"
    S, HKV = cache.k.shape[1:3]
    assert qkv.stride()[-2:] == (D, 1), "the heads of a token must be adjacent"
    assert cache.k.is_contiguous() and cache.v.is_contiguous(), "the caches must be contiguous"
    # Few tokens need more programs. HEADS is a power of two that divides the number of heads.
    HEADS = min(H & -H, 4 if T <= 256 or fixed_order else 16)
    in_place = parts == 1 and not how.turn.reorders  # a thread would overwrite inputs of others
    out = qkv if in_place else torch.empty(T, H, D, dtype=dtype, device=qkv.device)
    q_weight, k_weight, eps = how.norms or (None, None, 0.0)
    _qk_norm_rope_store_kernel[(T, H // HEADS)](
        qkv, out, q_weight, k_weight, how.turn.cos_sin, how.positions, *cache, how.slot_mapping,
        eps, qkv.stride(0), qkv.stride(-3), out.stride(0),
        HQ=H - 2 * HKV, HKV=HKV, D=D, HALF_PAD=next_power_of_2(D // 2), S=S,
        HEADS=HEADS, PARTS=parts, PLUS_ONE=how.plus_one, R=how.turn.rotary_dim,
        INTERLEAVED=how.turn.interleaved,
        num_warps=max(1, HEADS * D // 1024), **pdl_options(qkv),
    )  # fmt: skip
    return out
