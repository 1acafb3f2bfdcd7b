"""The loops of decode kernels over tiles of keys and values.

Letters: G queries of a KV head, in G_PAD rows; for others see `common.py`.
"""

import triton
import triton.language as tl

from nanovllm.kernels.attention.common import across, exponents_ahead, load_tile, slots_of, weigh
from nanovllm.kernels.attention.kv_cache import from_fp8


@triton.jit
def _multiply(few, many, LEFT: tl.constexpr):
    """few: [G_PAD, K] @ many: [K, N]; with `LEFT`, `many` and the product are transposed."""
    if LEFT:
        return tl.dot(many, tl.trans(few), input_precision="ieee")
    else:
        return tl.dot(few, many, input_precision="ieee")


@triton.jit
def _load_keys(
    k_ptr, v_ptr, slots, seen, stride_slot,
    D: tl.constexpr, D_PAD: tl.constexpr, MASKED: tl.constexpr, LEFT: tl.constexpr,
):  # fmt: skip
    """Load keys [D, BLOCK_N] and values [BLOCK_N, D]; with `LEFT`, transposed."""
    if LEFT:
        v, k = load_tile(v_ptr, k_ptr, slots, seen, stride_slot, D, D_PAD, MASKED)
        return k, v
    else:
        return load_tile(k_ptr, v_ptr, slots, seen, stride_slot, D, D_PAD, MASKED)


@triton.jit
def decode_tile(
    q, q_odd, m, l, acc, acc_odd, k, v, exponents, seen, scale, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, MASKED: tl.constexpr, PAIR: tl.constexpr, LEFT: tl.constexpr,
    CVT: tl.constexpr,
):  # fmt: skip
    """`weigh` the keys of a tile and add their values to acc: [G_PAD, D], with `LEFT` [D, G_PAD].
    FP8 codes come in pairs, as int16: then queries and sums for even columns d are separate from
    those for odd ones.
    """
    k_exponents, v_exponents = exponents
    if PAIR == 2:
        k, k_odd = from_fp8(k, CVT)
        s = _multiply(q, k.to(q.dtype), LEFT) + _multiply(q_odd, k_odd.to(q.dtype), LEFT)
    else:
        s = _multiply(q, k, LEFT)
    m, l, p, correction = weigh(
        tl.trans(s) if LEFT else s, m, l, k_exponents if PAIR == 2 else None,
        v_exponents if PAIR == 2 else None, seen, scale, seen[None, :], MASKED, WINDOW, SOFTCAP,
    )  # fmt: skip
    p, correction = p.to(q.dtype), across(correction, LEFT)
    if PAIR == 2:
        v, v_odd = from_fp8(v, CVT)
        acc_odd = acc_odd * correction + _multiply(p, v_odd.to(q.dtype), LEFT)
    return m, l, acc * correction + _multiply(p, v.to(q.dtype), LEFT), acc_odd


@triton.jit
def masked_tile(
    k_ptr, v_ptr, table_ptr, lowest, start, end, stride_slot,
    D: tl.constexpr, D_PAD: tl.constexpr, S: tl.constexpr, BLOCK_N: tl.constexpr,
    LEFT: tl.constexpr,
):  # fmt: skip
    """`_load_keys` from `start` to `end`, except below `lowest`. Returns keys, values, their slots,
    and the mask of those that are seen.
    """
    slots = slots_of(table_ptr, start, BLOCK_N, S, end)
    keys = start + tl.arange(0, BLOCK_N)
    seen = (keys < end) & (keys >= lowest)
    k, v = _load_keys(k_ptr, v_ptr, slots, seen, stride_slot, D, D_PAD, True, LEFT)
    return k, v, slots, seen


@triton.jit
def decode_span(
    q, q_odd, m, l, acc, acc_odd, k_ptr, v_ptr, k_exponents_ptr, v_exponents_ptr, table_ptr,
    lowest, begin, end, stride_slot, scale,
    D: tl.constexpr, D_PAD: tl.constexpr, S: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, BLOCK_N: tl.constexpr, PAIR: tl.constexpr, LEFT: tl.constexpr,
    CVT: tl.constexpr,
):  # fmt: skip
    """`decode_tile` for all keys from `begin` to `end`. Returns m, l, and the sums."""
    unmasked_end = begin + (end - begin) // BLOCK_N * BLOCK_N
    exponents = exponents_ahead(k_exponents_ptr, v_exponents_ptr, table_ptr, begin, end, BLOCK_N, S)
    for start in range(begin, unmasked_end, BLOCK_N):
        slots = slots_of(table_ptr, start, BLOCK_N, S, end)
        following = exponents_ahead(
            k_exponents_ptr, v_exponents_ptr, table_ptr, start + BLOCK_N, end, BLOCK_N, S
        )
        seen = slots >= 0
        if WINDOW:
            seen = start + tl.arange(0, BLOCK_N) >= lowest
        k, v = _load_keys(k_ptr, v_ptr, slots, seen, stride_slot, D, D_PAD, WINDOW > 0, LEFT)
        m, l, acc, acc_odd = decode_tile(
            q, q_odd, m, l, acc, acc_odd, k, v, exponents, seen, scale, WINDOW, SOFTCAP, WINDOW > 0,
            PAIR, LEFT, CVT,
        )  # fmt: skip
        exponents = following
    if unmasked_end < end:
        k, v, _, seen = masked_tile(
            k_ptr, v_ptr, table_ptr, lowest, unmasked_end, end, stride_slot, D, D_PAD, S, BLOCK_N,
            LEFT,
        )  # fmt: skip
        m, l, acc, acc_odd = decode_tile(
            q, q_odd, m, l, acc, acc_odd, k, v, exponents, seen, scale, WINDOW, SOFTCAP, True, PAIR,
            LEFT, CVT,
        )  # fmt: skip
    return m, l, acc, acc_odd
