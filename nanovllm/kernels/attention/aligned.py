"""Attention that computes a token alike in a prompt, in a chunk of one and as a decode.

A tile has the queries from one multiple of its size to the next, whichever of them a step has. So
a position has one place in tiles, and meets the tiles of its keys in one order: those that all
queries of the tile see whole, without masks, then the others. Keys that it does not see change
nothing: a masked tile multiplies sums by 1, and adds 0.

On Hopper single queries have smaller tiles than prompts, of as many keys: a warp has 16 rows of
either, whose products MMA and WGMMA add up in one order (measured: docs/experiments.md, 55).

Keys and values are read from the cache alone, those of the step as well, and are not split: a
program goes through all keys of its queries.

Letters: see `common.py`; T tokens of P sequences.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.attention.common import LOG2E, before_keys, metadata
from nanovllm.kernels.attention.prefill import describe_tiles, prefill_span, prefill_tiles
from nanovllm.kernels.device_features import (
    has_own_kernels,
    launch_dependents,
    pdl_options,
    wait,
)
from nanovllm.tensors.fp8 import FP8
from nanovllm.tensors.kv_cache import KVCache
from nanovllm.tensors.scoring import Scoring
from nanovllm.utils.integers import cdiv, next_power_of_2

FEW_ROWS = 16  # of a tile of single queries: as many as tensor cores need


@triton.jit
def _bounds(first, start, stop, end, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """The bounds of the tiles of keys that queries see: the first tile, the first that all queries
    of positions `first` to `stop` see whole, the end of those, and the end of all. Only the first
    and the last depend on the queries that there are, from `start` to `end`.
    """
    begin, whole, whole_end = 0, 0, (first + 1) // BLOCK_N * BLOCK_N
    if WINDOW:
        begin = tl.maximum(start - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
        whole = tl.cdiv(tl.maximum(stop - WINDOW, 0), BLOCK_N) * BLOCK_N
        whole_end = tl.maximum(whole, whole_end)
    return begin, tl.minimum(whole, end), tl.minimum(whole_end, end), end


@metadata
def _aligned_kernel(
    q_ptr, k_source, v_source, k_exponents_ptr, v_exponents_ptr, out_ptr, tables_ptr, cu_q_ptr,
    cu_k_ptr, sinks_ptr, scale, stride_qt, stride_ot, stride_row, stride_table,
    G: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, S: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    DESCRIBED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # One program: BLOCK_M rows, i.e. a few positions in all G heads that share a KV head of one
    # sequence. Late queries see more keys, so they start first.
    launch_dependents(PDL)
    kv_head, seq = tl.program_id(0), tl.program_id(2)
    QUERIES: tl.constexpr = BLOCK_M // G
    wait(PDL)  # kernels of the step may have written the bounds, too
    q_start = tl.load(cu_q_ptr + seq)
    q_len = tl.load(cu_q_ptr + seq + 1) - q_start
    end = tl.load(cu_k_ptr + seq + 1) - tl.load(cu_k_ptr + seq)
    start = end - q_len  # position of the first query
    first = (start // QUERIES + tl.num_programs(1) - 1 - tl.program_id(1)) * QUERIES
    if (q_len <= 0) | (start < 0) | (first >= end):  # padding, or more tiles than queries
        return
    stop = first + QUERIES
    row, d = tl.arange(0, BLOCK_M), tl.arange(0, D_PAD)
    position, head = first + row // G, kv_head * G + row % G
    used = ((position >= start) & (position < end) & (row < QUERIES * G))[:, None]
    if D < D_PAD:
        used &= d[None, :] < D
    t, column = (q_start + position - start).to(tl.int64)[:, None], head[:, None] * D + d[None, :]
    q = tl.load(q_ptr + t * stride_qt + column, mask=used, other=0.0)
    # Rows of positions that are computed already see no older keys than those that are not, as the
    # blocks of such keys may be another sequence's now.
    position = tl.maximum(position, start)
    start, end = tl.maximum(first, start), tl.minimum(stop, end)
    m, l = before_keys(sinks_ptr, head, row >= 0, BLOCK_M)
    acc = tl.zeros([BLOCK_M, D_PAD], tl.float32)
    bounds = _bounds(first, start, stop, end, WINDOW, BLOCK_N)
    for i in tl.static_range(0 if WINDOW else 1, 3):
        m, l, acc = prefill_span(
            q, m, l, acc, k_source, v_source, k_exponents_ptr, v_exponents_ptr,
            tables_ptr + seq * stride_table, 0, kv_head, bounds[i], bounds[i + 1], end, position,
            None, stride_row, scale, D, D_PAD, S, BLOCK_N, WINDOW, SOFTCAP, DESCRIBED, i != 1,
        )  # fmt: skip
    out = (acc / l[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + t * stride_ot + column, out, mask=used)


def aligned_tiles(q: torch.Tensor, G: int, max_seqlen_q: int, fp8: bool) -> dict[str, int]:
    """The tiles of queries q: [T, Hq, D], of G heads for a KV head, at most `max_seqlen_q` of a
    sequence, and keys like q or in FP8: BLOCK_M, BLOCK_N, and Triton's options.
    """
    D = q.shape[2]
    if has_own_kernels(q) and q.element_size() == 2 and D <= 128 and G <= FEW_ROWS and not fp8:
        if max_seqlen_q == 1:
            return {"BLOCK_M": FEW_ROWS, "BLOCK_N": 32, "num_warps": 1, "num_stages": 5}
        return {"BLOCK_M": 64, "BLOCK_N": 32, "num_warps": 4, "num_stages": 5}
    rows, keys, warps = prefill_tiles(q, G, 1, fp8)  # those of few queries, for all
    stages = 2 if D > 128 or fp8 else 3
    return {"BLOCK_M": rows, "BLOCK_N": keys, "num_warps": warps, "num_stages": stages}


def aligned_attention(
    q: torch.Tensor,
    cache: KVCache,
    block_tables: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    scoring: Scoring,
) -> torch.Tensor:
    """Causal attention of the last tokens of each sequence to its tokens, all in the cache. Each
    token's result depends on these and its position alone.

    Args:
        q: [T, Hq, D], queries, the heads of a token adjacent.
        cache: KV cache of the layer.
        block_tables: [P, W] int32.
        cu_seqlens_q: [P + 1] int32, first query of each sequence.
        cu_seqlens_k: [P + 1] int32, running sum of the context lengths. A sequence that is shorter
            than its queries is padding.
        max_seqlen_q: largest number of queries of a sequence.
        scoring: parameters of the scores.

    Returns:
        [T, Hq, D]; undefined in padding.
    """
    (_, Hq, D), (S, Hkv) = q.shape, cache.k.shape[1:3]
    assert q.stride()[1:] == (D, 1), "the heads of a token must be adjacent"
    G, fp8 = Hq // Hkv, cache.k.dtype == FP8
    tile = aligned_tiles(q, G, max_seqlen_q, fp8)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    k_source, v_source = (x.view(-1, Hkv * D) for x in cache[:2])
    stride_row, tiles = k_source.stride(0), None
    if not fp8 and tile["BLOCK_N"] <= S:
        tiles = describe_tiles(k_source, v_source, tile["BLOCK_N"], D)
    if tiles is not None:
        k_source, v_source = tiles
        tile["num_warps"] = min(tile["num_warps"], 4)
    # The first tile of a sequence may have fewer of its queries than fit.
    grid = (Hkv, cdiv(max_seqlen_q - 1, tile["BLOCK_M"] // G) + 1, len(cu_seqlens_q) - 1)
    _aligned_kernel[grid](
        q, k_source, v_source, *cache[2:], out, block_tables, cu_seqlens_q, cu_seqlens_k,
        scoring.sinks, scoring.scale * LOG2E.value, q.stride(0), out.stride(0), stride_row,
        block_tables.stride(0),
        G=G, D=D, D_PAD=next_power_of_2(D), S=S, WINDOW=scoring.window, SOFTCAP=scoring.softcap,
        DESCRIBED=tiles is not None, **tile, **pdl_options(q),
    )  # fmt: skip
    return out
