"""Storage of keys and values in the paged cache, and their conversion to and from 8 bits."""

import torch
import triton
import triton.language as tl

from nanovllm.tensors.fp8 import LARGEST
from nanovllm.tensors.kv_cache import FLOAT16_MAX, LEAST_EXPONENT, KVCache
from nanovllm.utils.integers import next_power_of_2

_LARGEST = tl.constexpr(LARGEST)
_LEAST_EXPONENT = tl.constexpr(LEAST_EXPONENT)
_FLOAT16_MAX = tl.constexpr(FLOAT16_MAX)


@triton.jit
def power_of_two(exponent):
    """2 ** exponent, exactly, float32."""
    return ((exponent.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def exponent_of(most):
    """The exponents of vectors with these largest magnitudes, float32. See `tensors.kv_cache`."""
    bits = (most / _LARGEST).to(tl.int32, bitcast=True)
    exponent = ((bits + 0x7FFFFF) >> 23) - 127
    return tl.minimum(tl.maximum(exponent, _LEAST_EXPONENT), 127)  # 127 for infinity


@triton.jit
def exponents_at(slots, kv_head, HKV, S: tl.constexpr):
    """The indices in exponents [N, Hkv, S] of a head in these slots."""
    return (slots // S * HKV + kv_head) * S + slots % S


@triton.jit
def _as(x, dtype: tl.constexpr):
    """Convert float32 values to another dtype; beyond the largest of float16, they become that."""
    if dtype == tl.float16:
        x = tl.clamp(x, -_FLOAT16_MAX, _FLOAT16_MAX, propagate_nan=tl.PropagateNan.ALL)
    return x.to(dtype)


@triton.jit
def numbers_of(codes, exponents, dtype: tl.constexpr):
    """The values of FP8 codes, the same as those of `halves_to_fp8`. `exponents` must broadcast."""
    # An instruction converts two codes to float16; to bfloat16 it would be one at a time.
    return _as(codes.to(tl.float16).to(tl.float32) * power_of_two(exponents), dtype)


@triton.jit
def load_heads(ptr, places, mask, stride_part, PARTS: tl.constexpr, DTYPE: tl.constexpr):
    """Load heads of a projection in two halves, from these places of each head, as the sums of
    PARTS; 0 beyond the mask, if any.
    """
    other = None if mask is None else 0.0
    x1, x2 = tl.load(ptr + places[0], mask, other), tl.load(ptr + places[1], mask, other)
    for _ in tl.static_range(1, PARTS):
        ptr += stride_part
        x1 += tl.load(ptr + places[0], mask, other)
        x2 += tl.load(ptr + places[1], mask, other)
    return x1.to(DTYPE), x2.to(DTYPE)


@triton.jit
def halves_to_fp8(y1, y2, inside):
    """Quantise heads in two halves [HEADS, HALF]. Returns FP8 codes, the values of these codes, and
    exponents [HEADS, 1].
    """
    x1, x2 = y1.to(tl.float32), y2.to(tl.float32)
    if inside is not None:
        x1, x2 = tl.where(inside, x1, 0.0), tl.where(inside, x2, 0.0)
    exponent = exponent_of(tl.max(tl.maximum(tl.abs(x1), tl.abs(x2)), 1))[:, None]
    down, up = power_of_two(-exponent), power_of_two(exponent)
    x1, x2 = (x1 * down).to(tl.float8e4nv), (x2 * down).to(tl.float8e4nv)
    y1 = _as(x1.to(tl.float32) * up, y1.dtype)
    y2 = _as(x2.to(tl.float32) * up, y2.dtype)
    return x1, x2, y1, y2, exponent


@triton.jit
def store_halves(
    cache_ptr, exponents_ptr, y1, y2, exponent, slot, head, i, mask, inside,
    HKV, D: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """Store heads [HEADS, 1] of a token, in two halves [HEADS, HALF], in their slot; -1: none."""
    there = mask if inside is None else mask & inside
    if slot >= 0:
        if exponents_ptr is not None:
            tl.store(exponents_ptr + exponents_at(slot, head, HKV, S), exponent, mask=mask)
        ptr = cache_ptr + (slot * HKV + head) * D + i
        tl.store(ptr, y1.to(cache_ptr.dtype.element_ty), mask=there)
        tl.store(ptr + D // 2, y2.to(cache_ptr.dtype.element_ty), mask=there)


@triton.jit
def from_fp8(pairs, CVT: tl.constexpr):
    """The two codes (e4m3) in each int16, the lower first, as float16; with `CVT`, by the
    instruction of NVIDIA GPUs from 8.9 on. The layout in which 16-bit loads reach tensor cores
    stays the same.
    """
    if CVT:
        return tl.inline_asm_elementwise(
            """
            {
                .reg .b32 codes;
                .reg .b16 lower, upper;
                prmt.b32 codes, $2, 0, 0x3120;
                mov.b32 {lower, upper}, codes;
                cvt.rn.f16x2.e4m3x2 $0, lower;
                cvt.rn.f16x2.e4m3x2 $1, upper;
            }
            """,
            "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        pairs = pairs.to(tl.uint16, bitcast=True)
        lower, upper = (pairs & 0xFF).to(tl.uint8), (pairs >> 8).to(tl.uint8)
        lower = lower.to(tl.float8e4nv, bitcast=True).to(tl.float16)
        return lower, upper.to(tl.float8e4nv, bitcast=True).to(tl.float16)


@triton.jit
def to_queries(q):
    """Convert queries to float16, like FP8 keys; float32 stays."""
    return q if q.dtype == tl.float32 else _as(q.to(tl.float32), tl.float16)


@triton.jit
def load_queries(ptrs, used, PAIR: tl.constexpr):
    """Load queries, twice; with `PAIR` 2, their even and odd columns, by `to_queries`."""
    q = tl.load(ptrs, mask=used, other=0.0)
    if PAIR == 1:
        return q, q
    else:
        return to_queries(q), to_queries(tl.load(ptrs + 1, mask=used, other=0.0))


@triton.jit
def _store_heads(
    x, cache_ptr, exponents_ptr, slot, head, d, mask,
    HKV: tl.constexpr, D: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    ptrs = cache_ptr + (slot * HKV + head[:, None]) * D + d[None, :]
    if exponents_ptr is not None:
        x = x.to(tl.float32)
        exponent = exponent_of(tl.max(tl.abs(x), 1))
        x *= power_of_two(-exponent)[:, None]
        tl.store(exponents_ptr + exponents_at(slot, head, HKV, S), exponent, mask=head < HKV)
    tl.store(ptrs, x.to(cache_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _store_kvcache_kernel(
    k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, k_exponents_ptr, v_exponents_ptr, slots_ptr,
    stride_kt, stride_vt,
    HKV: tl.constexpr, HKV_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    S: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + t).to(tl.int64)
    if slot >= 0:  # -1: padding
        head, d = tl.arange(0, HKV_PAD), tl.arange(0, D_PAD)
        mask = (head < HKV)[:, None] & (d < D)[None, :]
        column = head[:, None] * D + d[None, :]
        k = tl.load(k_ptr + t * stride_kt + column, mask=mask, other=0.0)
        _store_heads(k, k_cache_ptr, k_exponents_ptr, slot, head, d, mask, HKV, D, S)
        v = tl.load(v_ptr + t * stride_vt + column, mask=mask, other=0.0)
        _store_heads(v, v_cache_ptr, v_exponents_ptr, slot, head, d, mask, HKV, D, S)


def store_kvcache(
    k: torch.Tensor, v: torch.Tensor, cache: KVCache, slot_mapping: torch.Tensor
) -> None:
    """Write row t of k and v to slot `slot_mapping[t]`; rows with slot -1 are skipped.

    Args:
        k, v: [T, Hkv, D], the heads of a token adjacent in memory.
        slot_mapping: [T] int32.
    """
    T, H, D = k.shape
    assert k.stride()[1:] == v.stride()[1:] == (D, 1), "the heads of a token must be adjacent"
    assert cache.k.is_contiguous() and cache.v.is_contiguous(), "the caches must be contiguous"
    _store_kvcache_kernel[(T,)](
        k, v, *cache, slot_mapping, k.stride(0), v.stride(0),
        HKV=H, HKV_PAD=next_power_of_2(H), D=D, D_PAD=next_power_of_2(D),
        S=cache.k.shape[1], num_warps=4,
    )  # fmt: skip
