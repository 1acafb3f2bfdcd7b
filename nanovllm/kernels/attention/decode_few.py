"""Attention of few decodes, a single one above all, straight from their projection: the work of
`rope.py` and `decode_many.py` in one kernel.

It reads keys and values of its first tile before it waits for the projection: no kernel of the step
writes them, as each token is of another sequence. The first split has the token's own key, and, of
more than two splits, no other (docs/experiments.md, 37).
"""

from collections.abc import Hashable
from typing import Any

import torch
import triton
import triton.language as tl

from nanovllm.kernels.attention.common import LOG2E, before_keys, metadata, weigh
from nanovllm.kernels.attention.decode_many import LARGEST_LEFT, MAX_LEFT, MIN_COLUMNS
from nanovllm.kernels.attention.kv_cache import (
    exponents_at,
    halves_to_fp8,
    load_heads,
    store_halves,
    to_queries,
)
from nanovllm.kernels.attention.rope import norm_rope, turned_places
from nanovllm.kernels.attention.splits import (
    choose_num_splits,
    combining,
    empty_outputs,
    finish,
    span,
)
from nanovllm.kernels.attention.tiles import decode_span, decode_tile, masked_tile
from nanovllm.kernels.device_features import has_ptx, launch_dependents, pdl_options, wait
from nanovllm.tensors.fp8 import FP8
from nanovllm.tensors.kv_cache import KVCache
from nanovllm.tensors.qk_norm_rope import QKNormRope
from nanovllm.tensors.scoring import Scoring
from nanovllm.utils.integers import next_power_of_2

MAX_ROWS = 16  # up to which this is faster (measured on an H200)
FEW_PROGRAMS = 32  # per split, up to which larger tiles are


@triton.jit
def _columns(x1, x2, PAIR: tl.constexpr):
    """Join two halves [M, D / 2] to [M, D], twice; with `PAIR` 2, to the even and odd columns."""
    M: tl.constexpr = x1.shape[0]
    HALF: tl.constexpr = x1.shape[1]
    x = tl.permute(tl.join(x1, x2), (0, 2, 1))  # [M, 2, HALF]
    if PAIR == 1:
        x = tl.reshape(x, [M, 2 * HALF])
        return x, x
    else:
        return tl.split(tl.reshape(x, [M, HALF, 2]))


@triton.jit
def _load_turn(
    q_weight_ptr, k_weight_ptr, cos_sin_ptr, position,
    D: tl.constexpr, R: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Load cosines and sines of a position, and norm weights of queries and of keys, by halves."""
    HALF: tl.constexpr = D // 2
    i = tl.arange(0, HALF)[None, :]
    cos_sin, of_q, of_k = cos_sin_ptr + position.to(tl.int64) * D + i, (0.0, 0.0), (0.0, 0.0)
    if q_weight_ptr is not None:
        first, second = turned_places(i, D, R, INTERLEAVED)
        of_q = tl.load(q_weight_ptr + first), tl.load(q_weight_ptr + second)
        of_k = tl.load(k_weight_ptr + first), tl.load(k_weight_ptr + second)
    return (tl.load(cos_sin), tl.load(cos_sin + HALF)), of_q, of_k


@triton.jit
def _exponents(k_ptr, v_ptr, slots, seen, S: tl.constexpr):
    """The exponents of the keys and values in these slots that are `seen`; 0 if there are none."""
    if k_ptr is None:
        return 0, 0
    else:
        where = exponents_at(slots, tl.program_id(0), tl.num_programs(0), S)
        return tl.load(k_ptr + where, seen, other=0), tl.load(v_ptr + where, seen, other=0)


@triton.jit
def _own_key(
    token_ptr, turn, slot, eps, stride_part, q1, q2, m, l, scale,
    k_cache_ptr, v_cache_ptr, k_exponents_ptr, v_exponents_ptr,
    G: tl.constexpr, D: tl.constexpr, S: tl.constexpr, NORM: tl.constexpr, PLUS_ONE: tl.constexpr,
    SOFTCAP: tl.constexpr, PAIR: tl.constexpr, LEFT: tl.constexpr, PARTS: tl.constexpr,
    R: tl.constexpr, INTERLEAVED: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Store the token's key and value, and attend to them. Returns m, l, acc, and acc_odd for
    `decode_tile`.

    Args:
        q1, q2: queries, in two halves [G_PAD, D / 2].
        m, l: [G_PAD], see `before_keys`.
    """
    HALF: tl.constexpr = D // 2
    cos_sin, _, weight = turn
    head, HKV = tl.zeros([1, 1], tl.int32) + tl.program_id(0), tl.num_programs(0)
    i = tl.arange(0, HALF)[None, :]
    ptr, places = token_ptr + (HKV * G + head) * D, turned_places(i, D, R, INTERLEAVED)
    k1, k2 = load_heads(ptr, places, None, stride_part, PARTS, DTYPE)
    v1, v2 = load_heads(ptr + HKV * D, (i, HALF + i), None, stride_part, PARTS, DTYPE)
    k1, k2 = norm_rope(k1, k2, weight, cos_sin, eps, D, NORM, PLUS_ONE)
    keys, values, k_exponent, v_exponent = (k1, k2), (v1, v2), None, None
    if k_exponents_ptr is not None:
        c1, c2, k1, k2, k_exponent = halves_to_fp8(k1, k2, None)
        d1, d2, v1, v2, v_exponent = halves_to_fp8(v1, v2, None)
        keys, values = (c1, c2), (d1, d2)
    store_halves(
        k_cache_ptr, k_exponents_ptr, keys[0], keys[1], k_exponent, slot, head, i, head >= 0, None,
        HKV, D, S,
    )  # fmt: skip
    store_halves(
        v_cache_ptr, v_exponents_ptr, values[0], values[1], v_exponent, slot, head, i, head >= 0,
        None, HKV, D, S,
    )  # fmt: skip
    products = q1.to(tl.float32) * k1.to(tl.float32) + q2.to(tl.float32) * k2.to(tl.float32)
    s = tl.sum(products, 1)[:, None]
    m, l, p, _ = weigh(s, m, l, None, None, True, scale, True, False, 0, SOFTCAP)
    v, v_odd = _columns(v1.to(tl.float32), v2.to(tl.float32), PAIR)
    if LEFT:
        p, v, v_odd = tl.trans(p), tl.trans(v), tl.trans(v_odd)
    return m, l, p * v, p * v_odd if PAIR == 2 else 0.0


@triton.jit
def _own_token(
    token_ptr, turn, slot, eps, stride_part, sinks_ptr, is_own, scale,
    k_cache_ptr, v_cache_ptr, k_exponents_ptr, v_exponents_ptr,
    G: tl.constexpr, G_PAD: tl.constexpr, D: tl.constexpr, S: tl.constexpr, NORM: tl.constexpr,
    PLUS_ONE: tl.constexpr, SOFTCAP: tl.constexpr, PAIR: tl.constexpr, LEFT: tl.constexpr,
    PARTS: tl.constexpr, R: tl.constexpr, INTERLEAVED: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """The queries of this program's KV head, in the form of `load_queries`; and m, l, acc and
    acc_odd, after the token's own key if `is_own`.

    Args:
        token_ptr: pointer to the heads [Hq + 2 Hkv, D] of the token.
        turn: rotation and norm weights, see `_load_turn`.
    """
    HALF: tl.constexpr = D // 2
    cos_sin, weight, _ = turn
    kv_head, i, g = tl.program_id(0), tl.arange(0, HALF)[None, :], tl.arange(0, G_PAD)
    ptrs, places = token_ptr + (kv_head * G + g)[:, None] * D, turned_places(i, D, R, INTERLEAVED)
    q1, q2 = load_heads(ptrs, places, (g < G)[:, None], stride_part, PARTS, DTYPE)
    q1, q2 = norm_rope(q1, q2, weight, cos_sin, eps, D, NORM, PLUS_ONE)
    m, l = before_keys(sinks_ptr, kv_head * G + g, g < tl.where(is_own, G, 0), G_PAD)
    acc = tl.zeros([D // PAIR, G_PAD] if LEFT else [G_PAD, D // PAIR], tl.float32)
    acc_odd = acc if PAIR == 2 else 0.0
    if is_own:
        m, l, acc, acc_odd = _own_key(
            token_ptr, turn, slot, eps, stride_part, q1, q2, m, l, scale, k_cache_ptr, v_cache_ptr,
            k_exponents_ptr, v_exponents_ptr, G, D, S, NORM, PLUS_ONE, SOFTCAP, PAIR, LEFT, PARTS,
            R, INTERLEAVED, DTYPE,
        )  # fmt: skip
    q, q_odd = _columns(q1, q2, PAIR)
    if PAIR == 2:
        q, q_odd = to_queries(q), to_queries(q_odd)
    return q, q_odd, m, l, acc, acc_odd


@metadata
def _own_decode_kernel(
    qkv_ptr, k_cache_ptr, v_cache_ptr, k_codes_ptr, v_codes_ptr, k_exponents_ptr, v_exponents_ptr,
    out_ptr, part_acc_ptr, part_lse_ptr, arrived_ptr, tables_ptr, lens_ptr, sinks_ptr,
    q_weight_ptr, k_weight_ptr, cos_sin_ptr, positions_ptr, slots_ptr, eps, scale, stride_part,
    stride_qt, stride_slot, stride_table,
    G: tl.constexpr, G_PAD: tl.constexpr, D: tl.constexpr, S: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS_PAD: tl.constexpr, AT_ONCE: tl.constexpr,
    PAIR: tl.constexpr, LEFT: tl.constexpr, PARTS: tl.constexpr, PLUS_ONE: tl.constexpr,
    R: tl.constexpr, INTERLEAVED: tl.constexpr, CVT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # One program: all G queries that share a KV head of one token, over one split of the keys. An
    # FP8 cache is passed twice: as FP8, and with its columns in pairs, as int16.
    W: tl.constexpr = D // PAIR
    launch_dependents(PDL)
    kv_head, seq, split = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    splits = tl.num_programs(2) if SPLITS_PAD > 1 else 1
    apart = tl.where(splits > 2, 1, 0)  # the first split has only the own key
    length, is_own = tl.load(lens_ptr + seq), split == 0
    lowest, begin, end, parts = span(
        length, length - 1, tl.maximum(split - apart, 0), splits - apart, 0, WINDOW, BLOCK_N
    )
    # A split without tiles is from 0 to 0: tables may end where it would begin.
    has_tiles = (begin < end) & ~(is_own & (apart > 0))
    begin, end = tl.where(has_tiles, begin, 0), tl.where(has_tiles, end, 0)
    g, group = tl.arange(0, G_PAD), seq * tl.num_programs(0) + kv_head
    table_ptr = tables_ptr + seq * stride_table
    k_ptr, v_ptr = k_cache_ptr + kv_head * W, v_cache_ptr + kv_head * W
    position = tl.load(positions_ptr + seq)
    turn = _load_turn(q_weight_ptr, k_weight_ptr, cos_sin_ptr, position, D, R, INTERLEAVED)
    slot = tl.load(slots_ptr + seq).to(tl.int64)
    k, v, slots, seen = masked_tile(
        k_ptr, v_ptr, table_ptr, lowest, begin, end, stride_slot, W, W, S, BLOCK_N, LEFT
    )
    exponents = _exponents(k_exponents_ptr, v_exponents_ptr, slots, seen, S)
    wait(PDL)
    if length == 0 or (begin >= end and not is_own):  # padding, or more splits than tiles
        return
    token_ptr = qkv_ptr + seq * stride_qt
    q, q_odd, m, l, acc, acc_odd = _own_token(
        token_ptr, turn, slot, eps, stride_part, sinks_ptr, is_own, scale, k_codes_ptr, v_codes_ptr,
        k_exponents_ptr, v_exponents_ptr, G, G_PAD, D, S, q_weight_ptr is not None, PLUS_ONE,
        SOFTCAP, PAIR, LEFT, PARTS, R, INTERLEAVED, out_ptr.dtype.element_ty,
    )  # fmt: skip
    if begin < end:
        m, l, acc, acc_odd = decode_tile(
            q, q_odd, m, l, acc, acc_odd, k, v, exponents, seen, scale, WINDOW, SOFTCAP, True,
            PAIR, LEFT, CVT,
        )  # fmt: skip
    begin += BLOCK_N
    if begin < end:
        m, l, acc, acc_odd = decode_span(
            q, q_odd, m, l, acc, acc_odd, k_ptr, v_ptr, k_exponents_ptr, v_exponents_ptr,
            table_ptr, lowest, begin, end, stride_slot, scale, W, W, S, WINDOW, SOFTCAP, BLOCK_N,
            PAIR, LEFT, CVT,
        )  # fmt: skip
    finish(
        m, l, acc, acc_odd, group * G + g, g < G, out_ptr, part_acc_ptr, part_lse_ptr,
        arrived_ptr + group, group * G, split, splits, tl.maximum(parts + apart, 1), G, D,
        SPLITS_PAD, AT_ONCE, PAIR, LEFT,
    )  # fmt: skip


def own_tiles(dtype: torch.dtype, fp8: bool, left: bool, few: bool) -> tuple[int, int, int]:
    """BLOCK_N, warps and stages, as `decode_tiles`; `few`: whether there are FEW_PROGRAMS."""
    if dtype == torch.float32:
        return 32, 4, 3
    # The registers of two warps cannot hold a tile in 16 bits, nor more than 16 queries.
    return (128 if fp8 and few else 64), 2 if fp8 and left and not few else 4, 3


def takes_heads(D: int) -> bool:
    """Whether the head size is a power of two, and small enough for the registers."""
    return D <= LARGEST_LEFT and D & (D - 1) == 0


def own_decode(
    qkv: torch.Tensor,
    how: QKNormRope,
    cache: KVCache,
    dtype: torch.dtype,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    max_context: int,
    scoring: Scoring,
    num_splits: int | None = None,
    shared: dict[Hashable, Any] | None = None,
) -> torch.Tensor:
    """`qk_norm_rope_store` and `paged_decode` for tokens of B different sequences.

    Args:
        qkv: [B, Hq + 2 Hkv, D], the heads of a token adjacent; or S > 1 partial results
            [S, B, Hq + 2 Hkv, D], which are summed. `takes_heads` must accept D.
        how: norms, rotation and slots.
        dtype: torch.dtype of the result.
        max_context: maximum length of a sequence in tokens, for the number of splits.
        block_tables, ..., shared: see `paged_decode`.

    Returns:
        [B, Hq, D]
    """
    (B, H, D), (S, Hkv) = qkv.shape[-3:], cache.k.shape[1:3]
    parts = len(qkv) if qkv.dim() == 4 else 1
    G = (H - 2 * Hkv) // Hkv
    assert qkv.stride()[-2:] == (D, 1), "the heads of a token must be adjacent"
    assert cache.k.is_contiguous() and cache.v.is_contiguous(), "the caches must be contiguous"
    fp8, left = cache.k.dtype == FP8, G <= MAX_LEFT
    if num_splits is None:
        num_splits = choose_num_splits(B, Hkv, D, max_context, scoring.window)
    outputs = empty_outputs(qkv, Hkv * G, Hkv, num_splits, shared, dtype)
    BLOCK_N, num_warps, num_stages = own_tiles(dtype, fp8, left, B * Hkv <= FEW_PROGRAMS)
    k_cache, v_cache, pair = cache.k, cache.v, 1
    if fp8:
        k_cache, v_cache, pair = k_cache.view(torch.int16), v_cache.view(torch.int16), 2
    q_weight, k_weight, eps = how.norms or (None, None, 0.0)
    _own_decode_kernel[(Hkv, B, num_splits)](
        qkv, k_cache, v_cache, *cache, *outputs, block_tables, context_lens, scoring.sinks,
        q_weight, k_weight, how.turn.cos_sin, how.positions, how.slot_mapping, eps,
        scoring.scale * LOG2E.value, qkv.stride(0), qkv.stride(-3), Hkv * D // pair,
        block_tables.stride(0),
        G=G, G_PAD=max(MIN_COLUMNS if left else 16, next_power_of_2(G)), D=D, S=S,
        WINDOW=scoring.window, SOFTCAP=scoring.softcap, BLOCK_N=BLOCK_N,
        **combining(num_splits, G), PAIR=pair, LEFT=left, PARTS=parts, PLUS_ONE=how.plus_one,
        R=how.turn.rotary_dim, INTERLEAVED=how.turn.interleaved, CVT=has_ptx(qkv),
        num_warps=num_warps, num_stages=num_stages, **pdl_options(qkv),
    )  # fmt: skip
    return outputs[0]
