"""Attention of prompts, of any lengths, over the paged KV cache.

Long ones on Hopper have a kernel of their own, `paged_hopper.py`, where it can take them.
"""

from collections.abc import Hashable
from typing import Any

import torch
import triton
import triton.language as tl

from nanovllm.kernels.hopper import (
    has_own_kernels,
    has_room,
    launch_dependents,
    pdl_options,
    wait,
)
from nanovllm.kernels.paged_attention import LOG2E, before_keys, metadata
from nanovllm.kernels.paged_gather import gather_keys
from nanovllm.kernels.paged_span import describe_tiles, prefill_span
from nanovllm.utils.fp8 import FP8
from nanovllm.utils.integers import cdiv, next_power_of_2
from nanovllm.utils.kv_cache import KVCache
from nanovllm.utils.scoring import Scoring

FEW_QUERIES = 256  # of a sequence; for no more neither the kernel for Hopper nor gathering pays
MOST_GATHERED = 2**28  # bytes at once; beyond, some of the heads


@triton.jit
def _places(
    first, q_start, q_len, head,
    G: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Tokens [BLOCK_M, 1] and columns [BLOCK_M, D_PAD] of the rows of a tile, whose first query is
    `first`, and which are there.
    """
    row, d = tl.arange(0, BLOCK_M), tl.arange(0, D_PAD)
    query = first + row // G
    used = ((query < q_len) & (row < BLOCK_M // G * G))[:, None]
    if D < D_PAD:
        used &= d[None, :] < D
    return (q_start + query).to(tl.int64)[:, None], head[:, None] * D + d[None, :], used


@triton.jit
def _bounds(first, end, origin, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """The lowest position that one of the queries (from `first` to `end`) sees, and of the tiles
    from `origin` the first that some see, the first that all see whole, and the end of those.
    """
    lowest = 0
    begin, unmasked = origin, origin
    unmasked_end = origin + (first + 1 - origin) // BLOCK_N * BLOCK_N
    if WINDOW:
        lowest = tl.maximum(first - WINDOW + 1, 0)
        begin += tl.maximum(lowest - origin, 0) // BLOCK_N * BLOCK_N
        unmasked += tl.cdiv(tl.maximum(end - WINDOW - origin, 0), BLOCK_N) * BLOCK_N
        unmasked_end = tl.maximum(unmasked, unmasked_end)
    return lowest, begin, unmasked, unmasked_end


@triton.jit
def _cached_span(
    q, m, l, acc, k_ptr, v_ptr, k_exponents_ptr, v_exponents_ptr, table_ptr,
    kv_head, lowest, end, positions, stride_slot, scale,
    D: tl.constexpr, D_PAD: tl.constexpr, S: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """`prefill_span` of the tokens of an FP8 cache that lie before all queries, up to `end`."""
    begin = lowest // BLOCK_N * BLOCK_N
    if not WINDOW:
        begin = end // BLOCK_N * BLOCK_N
        m, l, acc = prefill_span(
            q, m, l, acc, k_ptr, v_ptr, k_exponents_ptr, v_exponents_ptr, table_ptr, 0, kv_head,
            0, begin, end, positions, stride_slot, scale,
            D, D_PAD, S, BLOCK_N, WINDOW, SOFTCAP, False, False,
        )  # fmt: skip
    return prefill_span(
        q, m, l, acc, k_ptr, v_ptr, k_exponents_ptr, v_exponents_ptr, table_ptr, 0, kv_head,
        begin, end, end, positions, stride_slot, scale,
        D, D_PAD, S, BLOCK_N, WINDOW, SOFTCAP, False, True,
    )  # fmt: skip


@metadata
def _prefill_kernel(
    q_ptr, k_source, v_source, k_fp8_ptr, v_fp8_ptr, k_exponents_ptr, v_exponents_ptr, out_ptr,
    tables_ptr, cu_q_ptr, cu_k_ptr, sinks_ptr, scale, stride_qt, stride_ot, stride_row, stride_slot,
    stride_table,
    G: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, S: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    DESCRIBED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # One program: BLOCK_M rows, which are a few queries in all G heads that share a KV head of one
    # sequence. Late queries see more keys, so they start first. The sources have all keys and
    # values, in blocks or one sequence after another, or the step's own beside an FP8 cache.
    launch_dependents(PDL)
    kv_head, seq = tl.program_id(0), tl.program_id(2)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    QUERIES: tl.constexpr = BLOCK_M // G
    q_start = tl.load(cu_q_ptr + seq)
    q_len = tl.load(cu_q_ptr + seq + 1) - q_start
    wait(PDL)
    if tile * QUERIES >= q_len:
        return
    first_row = tl.load(cu_k_ptr + seq)
    k_len = tl.load(cu_k_ptr + seq + 1) - first_row
    row = tl.arange(0, BLOCK_M)
    head = kv_head * G + row % G
    t, column, used = _places(tile * QUERIES, q_start, q_len, head, G, D, D_PAD, BLOCK_M)
    q = tl.load(q_ptr + t * stride_qt + column, mask=used, other=0.0)
    table_ptr = None if tables_ptr is None else tables_ptr + seq * stride_table
    # A query sees the positions up to its own; the first of them is at `first`.
    first = k_len - q_len + tile * QUERIES
    positions = first + row // G
    end = tl.minimum(first + QUERIES, k_len)
    m, l = before_keys(sinks_ptr, head, row >= 0, BLOCK_M)
    acc = tl.zeros([BLOCK_M, D_PAD], tl.float32)
    origin = 0
    if k_fp8_ptr is not None:
        origin = k_len - q_len
        first_row = q_start - origin
    source_table = table_ptr if k_fp8_ptr is None else None
    lowest, begin, unmasked, unmasked_end = _bounds(first, end, origin, WINDOW, BLOCK_N)
    if k_fp8_ptr is not None:
        m, l, acc = _cached_span(
            q, m, l, acc, k_fp8_ptr, v_fp8_ptr, k_exponents_ptr, v_exponents_ptr, table_ptr,
            kv_head, lowest, origin, positions, stride_slot, scale,
            D, D_PAD, S, BLOCK_N, WINDOW, SOFTCAP,
        )  # fmt: skip
    bounds = begin, unmasked, unmasked_end, end
    for i in tl.static_range(0 if WINDOW else 1, 3):
        m, l, acc = prefill_span(
            q, m, l, acc, k_source, v_source, None, None, source_table, first_row, kv_head,
            bounds[i], bounds[i + 1], k_len, positions, stride_row, scale,
            D, D_PAD, S, BLOCK_N, WINDOW, SOFTCAP, DESCRIBED, i != 1,
        )  # fmt: skip
    out = (acc / l[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + t * stride_ot + column, out, mask=used)


def prefill_tiles(
    q: torch.Tensor, G: int, max_seqlen_q: int, converts: bool = False
) -> tuple[int, int, int]:
    """BLOCK_M, BLOCK_N and warps for queries q: [T, Hq, D], up to `max_seqlen_q` of a sequence, and
    keys that are read as they are, or converted.

    What is too large for a GPU does not fit its shared memory, or keeps so many of a thread's
    registers in memory that it is slow (tests/kernels/test_other_gpus.py).
    """
    wide, large = q.element_size() == 4, q.shape[-1] > 128  # each takes twice the shared memory
    if not wide and not large:
        if max_seqlen_q * G <= 64 or (converts and not has_room(q)):
            return 64, 64, 4
        return 128, 128 if converts else 64, 8
    if wide and large:
        rows, keys, warps = 16, 16, 8
    elif has_room(q):
        rows, keys, warps = 64, 32, 4
    else:
        rows, keys, warps = 32, 32, 8 if wide else 4
    return max(rows, next_power_of_2(G)), keys, warps


def takes_hopper_kernel(q: torch.Tensor, Hkv: int, S: int, max_seqlen_q: int) -> bool:
    """Whether `hopper_prefill` attends to this, in whole tiles of keys. S: of the blocks; 0: keys
    are not in blocks.
    """
    _, Hq, D = q.shape
    fits = q.element_size() == 2 and D in (64, 128) and Hq // Hkv <= 64 and S % 128 == 0
    return has_own_kernels(q) and fits and max_seqlen_q > FEW_QUERIES


def heads_at_once(
    cache: KVCache, max_seqlen_q: int, num_keys: int, scoring: Scoring, dtype: torch.dtype
) -> int:
    """Of how many heads so many keys and values are gathered at once. 0: of none, as there is no
    room for one, or as few queries or a window read too little of them.
    """
    Hkv, D = cache.k.shape[2:]
    most = MOST_GATHERED // (2 * num_keys * D * dtype.itemsize)
    if not most or scoring.window or max_seqlen_q <= FEW_QUERIES:
        return 0
    return cdiv(Hkv, cdiv(Hkv, most))


def paged_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cache: KVCache,
    block_tables: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    num_keys: int | None,
    scoring: Scoring,
    shared: dict[Hashable, Any] | None = None,
) -> torch.Tensor:
    """Causal attention of the last tokens of each sequence to its tokens, all in the cache.

    Args:
        q: [T, Hq, D], the heads of a token adjacent.
        k, v: [T, Hkv, D], those of the same tokens, the heads of a token adjacent.
        block_tables: [P, W] int32.
        cu_seqlens_q: [P + 1] int32, where each sequence's queries begin.
        cu_seqlens_k: [P + 1] int32, running sum of the context lengths.
        max_seqlen_q: most queries of a sequence.
        num_keys: the last of cu_seqlens_k; None if a CUDA graph is to serve several.
        shared: what the layers of a step share, see `Context`.

    Returns:
        [T, Hq, D]
    """
    assert q.stride()[1:] == (q.shape[2], 1), "the heads of a token must be adjacent"
    out, Hkv = torch.empty(q.shape, dtype=q.dtype, device=q.device), k.shape[1]
    where = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, {} if shared is None else shared
    if cache.k.dtype != FP8:
        attend(q, cache.k, cache.v, block_tables, *where, scoring, out)
    elif num_keys == len(q):  # there are no others
        attend(q, k, v, None, *where, scoring, out)
    elif num_keys and (n := heads_at_once(cache, max_seqlen_q, num_keys, scoring, q.dtype)):
        G = q.shape[1] // Hkv
        for first in range(0, Hkv, n):
            some = slice(first, min(first + n, Hkv))
            keys, values = gather_keys(cache, block_tables, cu_seqlens_k, num_keys, some, q)
            own = slice(some.start * G, some.stop * G)
            sinks = None if scoring.sinks is None else scoring.sinks[own]
            some_scoring = scoring._replace(sinks=sinks)
            attend(q[:, own], keys, values, None, *where, some_scoring, out[:, own])
    else:
        attend(q, k, v, block_tables, *where, scoring, out, cache)
    return out


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_tables: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    shared: dict[Hashable, Any],
    scoring: Scoring,
    out: torch.Tensor,
    fp8_cache: KVCache | None = None,
) -> None:
    """`paged_prefill` with keys and values of q's dtype, into out: [T, Hq, D].

    Args:
        k, v: [N, S, Hkv, D], blocks; without tables [n, Hkv, D], one sequence after another.
        fp8_cache: its blocks have what is before k and v: [T, Hkv, D], which are the step's then.
    """
    S = 0 if block_tables is None else k.shape[1]
    if fp8_cache is None and takes_hopper_kernel(q, k.shape[-2], S, max_seqlen_q):
        from nanovllm.kernels.paged_hopper import hopper_prefill

        hopper_prefill(q, k, v, block_tables, cu_seqlens_q, cu_seqlens_k, scoring, shared, out)
    else:
        _prefill(
            q, k, v, block_tables, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, scoring, out, fp8_cache
        )


def _prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_tables: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    scoring: Scoring,
    out: torch.Tensor,
    fp8_cache: KVCache | None,
) -> None:
    """By the kernel that all GPUs have."""
    (_, Hq, D), Hkv = q.shape, k.shape[-2]
    G, D_PAD = Hq // Hkv, next_power_of_2(D)
    converts = fp8_cache is not None
    paged = block_tables is not None and not converts
    S = (k if fp8_cache is None else fp8_cache.k).shape[1] if block_tables is not None else 0
    BLOCK_M, BLOCK_N, num_warps = prefill_tiles(q, G, max_seqlen_q, converts)
    grid = (Hkv, cdiv(max_seqlen_q, BLOCK_M // G), len(cu_seqlens_q) - 1)
    # Keys and values as matrices, of which a tile of keys is a tile where it lies inside a block.
    k_source, v_source = (x.view(-1, Hkv * D) for x in (k, v))
    stride_row = k_source.stride(0)
    tiles = describe_tiles(k_source, v_source, BLOCK_N, D) if not paged or S >= BLOCK_N else None
    if tiles is not None:
        (k_source, v_source), num_warps = tiles, num_warps if converts else 4
    # Two tiles are loaded ahead; of blocks, one stage more looks them up.
    num_stages = 3 if paged and D <= 128 else 2
    _prefill_kernel[grid](
        q, k_source, v_source, *(fp8_cache or (None,) * 4), out, block_tables, cu_seqlens_q,
        cu_seqlens_k, scoring.sinks, scoring.scale * LOG2E.value,
        q.stride(0), out.stride(0), stride_row, Hkv * D,
        0 if block_tables is None else block_tables.stride(0),
        G=G, D=D, D_PAD=D_PAD, S=S, WINDOW=scoring.window, SOFTCAP=scoring.softcap,
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, DESCRIBED=tiles is not None,
        num_warps=num_warps, num_stages=num_stages, **pdl_options(q),
    )  # fmt: skip
