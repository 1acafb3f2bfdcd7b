"""Attention of several decodes to a prefix that they share, whose KV is read once.

`paged_decode` continues from the results: maximum, sum and weighted values of each decode.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from nanovllm.kernels.attention.common import LOG2E, LOWEST, across, before_keys, metadata
from nanovllm.kernels.attention.prefill import describe_tiles, prefill_span
from nanovllm.kernels.device_features import has_room, launch_dependents, pdl_options, wait
from nanovllm.tensors.fp8 import FP8
from nanovllm.tensors.kv_cache import KVCache
from nanovllm.tensors.scoring import Scoring
from nanovllm.utils.context import Prefixes
from nanovllm.utils.integers import cdiv, next_power_of_2

ROWS = 64  # per tile: queries times heads that share a KV head
PROGRAMS = 512  # to run at once
MAX_SPLITS = 8


class Seen(NamedTuple):
    """The partial results of decodes over their prefixes.

    Attributes:
        lens: [B] int32, length of each decode's prefix in tokens; 0: its results are undefined.
        acc: [B, Hq, splits, D] float32, weighted sums of values.
        m, l: [B, Hq, splits] float32, maxima (in units of log 2) and sums of weights.
    """

    lens: torch.Tensor
    acc: torch.Tensor
    m: torch.Tensor
    l: torch.Tensor


def members_of_tile(num_heads: int, num_kv_heads: int) -> int:
    """The number of decodes whose queries make a tile."""
    return max(1, ROWS // (num_heads // num_kv_heads))


@metadata
def _prefix_kernel(
    q_ptr, k_source, v_source, k_exponents_ptr, v_exponents_ptr, acc_ptr, m_ptr, l_ptr, tables_ptr,
    lens_ptr, rows_ptr, begins_ptr, ends_ptr, sinks_ptr, scale, stride_qt, stride_row, stride_table,
    num_splits,
    G: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, S: tl.constexpr,
    SOFTCAP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    DESCRIBED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # One program: the queries of a tile's decodes in all G heads that share a KV head, over one
    # split of the prefix that the decodes share.
    launch_dependents(PDL)
    kv_head, tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin, end = tl.load(begins_ptr + tile), tl.load(ends_ptr + tile)
    wait(PDL)
    if begin >= end:  # padding
        return
    i, d = tl.arange(0, BLOCK_M), tl.arange(0, D_PAD)
    used = (begin + i // G < end) & (i < BLOCK_M // G * G)
    row = tl.load(rows_ptr + begin + i // G, mask=used, other=0).to(tl.int64)
    head = kv_head * G + i % G
    inside = used[:, None]
    if D < D_PAD:
        inside &= d[None, :] < D
    q_ptrs = q_ptr + row[:, None] * stride_qt + head[:, None] * D + d[None, :]
    q = tl.load(q_ptrs, mask=inside, other=0.0)
    first = tl.load(rows_ptr + begin).to(tl.int64)
    length, table_ptr = tl.load(lens_ptr + first), tables_ptr + first * stride_table
    span = tl.cdiv(tl.cdiv(length, BLOCK_N), num_splits) * BLOCK_N
    start, stop = split * span, tl.minimum((split + 1) * span, length)
    m, l = before_keys(sinks_ptr, head, used & (i < tl.where(split == 0, BLOCK_M, 0)), BLOCK_M)
    acc = tl.zeros([BLOCK_M, D_PAD], tl.float32)
    positions = i * 0 + length  # all keys are visible
    whole = start + tl.maximum(stop - start, 0) // BLOCK_N * BLOCK_N
    m, l, acc = prefill_span(
        q, m, l, acc, k_source, v_source, k_exponents_ptr, v_exponents_ptr, table_ptr, 0, kv_head,
        start, whole, stop, positions, None, stride_row, scale, D, D_PAD, S, BLOCK_N, 0, SOFTCAP,
        DESCRIBED, False,
    )  # fmt: skip
    m, l, acc = prefill_span(
        q, m, l, acc, k_source, v_source, k_exponents_ptr, v_exponents_ptr, table_ptr, 0, kv_head,
        whole, stop, stop, positions, None, stride_row, scale, D, D_PAD, S, BLOCK_N, 0, SOFTCAP,
        DESCRIBED, True,
    )  # fmt: skip
    part = (row * tl.num_programs(0) * G + head) * num_splits + split
    tl.store(acc_ptr + part[:, None] * D + d[None, :], acc, mask=inside)
    tl.store(m_ptr + part, m, mask=used)
    tl.store(l_ptr + part, l, mask=used)


@triton.jit
def go_on(
    m, l, acc, acc_odd, acc_ptr, m_ptr, l_ptr, row, d, used, there,
    num_splits, D: tl.constexpr, PAIR: tl.constexpr, LEFT: tl.constexpr,
):  # fmt: skip
    """Continue after a prefix. Returns m, l: [M], and acc: [M, D], with `LEFT` [D, M]; with `PAIR`
    2, acc is for even columns d, and acc_odd for odd ones.

    row: [M], rows of [B * Hq]. d: [D], columns. used: [M, D] bool. there: [M] bool, whether a row
    has a prefix.
    """
    used &= there[:, None]
    used, d = (tl.trans(used), d[:, None]) if LEFT else (used, d[None, :])
    for split in range(num_splits):
        part = row * num_splits + split
        m_part = tl.load(m_ptr + part, mask=there, other=float("-inf"))
        l_part = tl.load(l_ptr + part, mask=there, other=0.0)
        m_new = tl.maximum(tl.maximum(m, m_part), LOWEST)
        before, now = tl.exp2(m - m_new), tl.exp2(m_part - m_new)
        ptrs = acc_ptr + across(part, LEFT) * D + d
        earlier, later = across(before, LEFT), across(now, LEFT)
        acc = acc * earlier + tl.load(ptrs, mask=used, other=0.0) * later
        if PAIR == 2:
            odd = tl.load(ptrs + 1, mask=used, other=0.0)
            acc_odd = acc_odd * earlier + odd * later
        l = l * before + l_part * now
        m = m_new
    return m, l, acc, acc_odd


def paged_prefix(
    q: torch.Tensor,
    cache: KVCache,
    block_tables: torch.Tensor,
    prefixes: Prefixes,
    scoring: Scoring,
) -> Seen:
    """Attend to the prefixes that decodes share.

    Args:
        q: [B, Hq, D], the heads of a token adjacent.
        cache: KV cache of the layer.
        block_tables: [B, W] int32.
        prefixes: prefixes of these decodes, in tiles of `members_of_tile`.
        scoring: parameters of the scores, without a window; a sink counts as seen.
    """
    B, Hq, D = q.shape
    S, Hkv = cache.k.shape[1:3]
    G, D_PAD = Hq // Hkv, next_power_of_2(D)
    fp8, float32, large = cache.k.dtype == FP8, q.element_size() == 4, D > 128
    # float32 uses no tensor cores; without room, these read operands from registers.
    wide, spills = float32 or large, float32 or (large and not has_room(q))
    num_warps = 4 * (2 if float32 else 1) * (2 if D_PAD >= 128 and not has_room(q) else 1)
    members, num_tiles = members_of_tile(Hq, Hkv), len(prefixes.begins)
    programs = Hkv * cdiv(B, members)
    splits = min(MAX_SPLITS, next_power_of_2(max(1, PROGRAMS // programs)))
    acc = torch.empty(B, Hq, splits, D, dtype=torch.float32, device=q.device)
    m, l = torch.empty(2, B, Hq, splits, dtype=torch.float32, device=q.device)
    BLOCK_M, BLOCK_N = max(16, next_power_of_2(members * G)), 32 if wide else 64
    if float32 and large and not has_room(q):  # 96 of 99 KiB of shared memory
        BLOCK_N = 16
    k_source, v_source = (x.view(-1, Hkv * D) for x in (cache.k, cache.v))
    tiles = None
    if not fp8 and S >= BLOCK_N:
        tiles = describe_tiles(k_source, v_source, BLOCK_N, D)
    _prefix_kernel[(Hkv, num_tiles, splits)](
        q, *(tiles or (k_source, v_source)), *cache[2:], acc, m, l, block_tables, *prefixes,
        scoring.sinks, scoring.scale * LOG2E.value, q.stride(0), Hkv * D, block_tables.stride(0),
        splits,
        G=G, D=D, D_PAD=D_PAD, S=S, SOFTCAP=scoring.softcap, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N,
        DESCRIBED=tiles is not None, num_warps=num_warps,
        num_stages=1 if spills else 2 if wide or fp8 else 3, **pdl_options(q),
    )  # fmt: skip
    return Seen(prefixes.lens, acc, m, l)
