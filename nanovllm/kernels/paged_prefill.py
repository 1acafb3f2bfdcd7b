"""Attention of prompts, of any lengths, over the paged KV cache.

Long ones on Hopper have a kernel of their own, `paged_hopper.py`, where it can take them.
"""

from collections.abc import Hashable
from typing import Any

import torch
import triton
import triton.language as tl

from nanovllm.kernels.hopper import (
    can_describe,
    describe,
    has_own_kernels,
    has_room,
    launch_dependents,
    pdl_options,
    wait,
)
from nanovllm.kernels.kv_cache import numbers_of
from nanovllm.kernels.paged_attention import (
    LOG2E,
    before_keys,
    exponents_ahead,
    load_tile,
    metadata,
    slots_of,
    weigh,
)
from nanovllm.utils.fp8 import FP8
from nanovllm.utils.integers import cdiv, next_power_of_2
from nanovllm.utils.kv_cache import KVCache
from nanovllm.utils.scoring import Scoring

FEW_QUERIES = 256  # of a sequence; for no more the kernel for Hopper is no faster


@triton.jit
def _prefill_tile(
    q, m, l, acc, k_source, v_source, k_exponents, v_exponents, table_ptr, first_row,
    kv_head, start, k_len, positions, stride_row, scale,
    D: tl.constexpr, D_PAD: tl.constexpr, S: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, DESCRIBED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """`weigh` a tile of keys from `start` and add their values. The sources are descriptors or
    pointers, of the cache by a table or, without one, of this step's tokens, whose position 0 would
    be in `first_row`.
    """
    keys = start + tl.arange(0, BLOCK_N)
    seen = keys < k_len
    if table_ptr is None:
        row = first_row + start
        rows = (row + tl.arange(0, BLOCK_N)).to(tl.int64)
    elif DESCRIBED:
        row = tl.load(table_ptr + start // S) * S + start % S
        rows = row.to(tl.int64) + tl.arange(0, BLOCK_N)
    else:
        rows = slots_of(table_ptr, start, BLOCK_N, S, k_len)
    if DESCRIBED:
        k = k_source.load([row, kv_head * D]).T
        v = v_source.load([row, kv_head * D])
        if MASKED:
            v = tl.where(seen[:, None], v, 0.0)
    else:
        offset = kv_head * D
        k, v = load_tile(
            k_source + offset, v_source + offset, rows, seen, stride_row, D, D_PAD, MASKED
        )
    if k_exponents is not None:
        if MASKED:  # beyond the last key they are anything
            k_exponents = tl.where(seen, k_exponents, 0)
            v_exponents = tl.where(seen, v_exponents, 0)
        k = numbers_of(k, k_exponents[None, :], q.dtype)
        v = numbers_of(v, v_exponents[:, None], q.dtype)
    visible = keys[None, :] <= tl.minimum(positions, k_len - 1)[:, None]
    if WINDOW:
        visible &= keys[None, :] > positions[:, None] - WINDOW
    s = tl.dot(q, k, input_precision="ieee")
    m, l, p, correction = weigh(
        s, m, l, None, None, None, scale, visible, MASKED, WINDOW, SOFTCAP
    )  # fmt: skip
    acc = acc * correction[:, None]
    return m, l, tl.dot(p.to(q.dtype), v, acc, input_precision="ieee")


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
def prefill_span(
    q, m, l, acc, k_source, v_source, k_exponents_ptr, v_exponents_ptr, table_ptr, first_row,
    kv_head, begin, end, k_len, positions, stride_row, scale,
    D: tl.constexpr, D_PAD: tl.constexpr, S: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, DESCRIBED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """`_prefill_tile` of each tile from `begin` to `end`. Those with masks that are not a cache's
    are few, and not worth a pipeline.
    """
    if k_exponents_ptr is not None:
        if begin < end:
            exponents = exponents_ahead(
                k_exponents_ptr, v_exponents_ptr, table_ptr, begin, end, BLOCK_N, S
            )
            for start in range(begin, end, BLOCK_N):
                following = exponents_ahead(
                    k_exponents_ptr, v_exponents_ptr, table_ptr, start + BLOCK_N, end, BLOCK_N, S
                )
                m, l, acc = _prefill_tile(
                    q, m, l, acc, k_source, v_source, exponents[0], exponents[1], table_ptr,
                    first_row, kv_head, start, k_len, positions, stride_row, scale,
                    D, D_PAD, S, BLOCK_N, WINDOW, SOFTCAP, DESCRIBED, MASKED,
                )  # fmt: skip
                exponents = following
    else:
        for start in tl.range(begin, end, BLOCK_N, num_stages=1 if MASKED else None):
            m, l, acc = _prefill_tile(
                q, m, l, acc, k_source, v_source, None, None, table_ptr,
                first_row, kv_head, start, k_len, positions, stride_row, scale,
                D, D_PAD, S, BLOCK_N, WINDOW, SOFTCAP, DESCRIBED, MASKED,
            )  # fmt: skip
    return m, l, acc


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
    DESCRIBED: tl.constexpr, FRESH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # One program: BLOCK_M rows, which are a few queries in all G heads that share a KV head of one
    # sequence. Late queries see more keys, so they start first. The sources have all keys and
    # values or, if `FRESH`, those of this step's tokens; an FP8 cache has the others, if any.
    launch_dependents(PDL)
    kv_head, seq = tl.program_id(0), tl.program_id(2)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    QUERIES: tl.constexpr = BLOCK_M // G
    q_start = tl.load(cu_q_ptr + seq)
    q_len = tl.load(cu_q_ptr + seq + 1) - q_start
    wait(PDL)
    if tile * QUERIES >= q_len:
        return
    k_len = tl.load(cu_k_ptr + seq + 1) - tl.load(cu_k_ptr + seq)
    row = tl.arange(0, BLOCK_M)
    head = kv_head * G + row % G
    t, column, used = _places(tile * QUERIES, q_start, q_len, head, G, D, D_PAD, BLOCK_M)
    q = tl.load(q_ptr + t * stride_qt + column, mask=used, other=0.0)
    table_ptr = tables_ptr + seq * stride_table
    # A query sees the positions up to its own; the first of them is at `first`.
    first = k_len - q_len + tile * QUERIES
    positions = first + row // G
    end = tl.minimum(first + QUERIES, k_len)
    m, l = before_keys(sinks_ptr, head, row >= 0, BLOCK_M)
    acc = tl.zeros([BLOCK_M, D_PAD], tl.float32)
    origin = k_len - q_len if FRESH else 0
    source_table = None if FRESH else table_ptr
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
            q, m, l, acc, k_source, v_source, None, None, source_table, q_start - origin, kv_head,
            bounds[i], bounds[i + 1], k_len, positions, stride_row, scale,
            D, D_PAD, S, BLOCK_N, WINDOW, SOFTCAP, DESCRIBED, i != 1,
        )  # fmt: skip
    out = (acc / l[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + t * stride_ot + column, out, mask=used)


def describe_tiles(k: torch.Tensor, v: torch.Tensor, rows: int, D: int) -> tuple[Any, Any] | None:
    """Descriptors of tiles of `rows` keys or values of a head, of matrices [n, Hkv D]; None where
    the hardware takes none.
    """
    if next_power_of_2(D) != D or not (can_describe(k) and can_describe(v)):
        return None
    return describe(k, rows, D), describe(v, rows, D)


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
        few = max_seqlen_q * G <= 64 or (converts and not has_room(q))
        return (64, 64, 4) if few else (128, 64, 8)
    if wide and large:
        rows, keys, warps = 16, 16, 8
    elif has_room(q):
        rows, keys, warps = 64, 32, 4
    else:
        rows, keys, warps = 32, 32, 8 if wide else 4
    return max(rows, next_power_of_2(G)), keys, warps


def takes_hopper_kernel(
    q: torch.Tensor, cache: KVCache, max_seqlen_q: int, has_cached_context: bool
) -> bool:
    """Whether `hopper_prefill` attends to this, in whole tiles of keys that nobody converts."""
    (_, Hq, D), (_, S, Hkv, _) = q.shape, cache.k.shape
    lies = not has_cached_context if cache.k.dtype == FP8 else S % 128 == 0
    fits = q.element_size() == 2 and D in (64, 128) and Hq // Hkv <= 64
    return has_own_kernels(q) and lies and fits and max_seqlen_q > FEW_QUERIES


def paged_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cache: KVCache,
    block_tables: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    has_cached_context: bool,
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
        has_cached_context: whether a sequence has more tokens than these queries.
        shared: what the layers of a step share, see `Context`.

    Returns:
        [T, Hq, D]
    """
    assert q.stride()[1:] == (q.shape[2], 1), "the heads of a token must be adjacent"
    if takes_hopper_kernel(q, cache, max_seqlen_q, has_cached_context):
        from nanovllm.kernels.paged_hopper import hopper_prefill

        return hopper_prefill(
            q, k, v, cache, block_tables, cu_seqlens_q, cu_seqlens_k, scoring,
            {} if shared is None else shared,
        )  # fmt: skip
    return _prefill(
        q, k, v, cache, block_tables, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, has_cached_context,
        scoring,
    )  # fmt: skip


def _prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cache: KVCache,
    block_tables: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    has_cached_context: bool,
    scoring: Scoring,
) -> torch.Tensor:
    """By the kernel that all GPUs have."""
    (_, Hq, D), (S, Hkv) = q.shape, cache.k.shape[1:3]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    G, D_PAD = Hq // Hkv, next_power_of_2(D)
    # The cache as a matrix, of which a tile of keys is a tile where it lies inside a block. Where
    # it is FP8, the step's own keys and values have that part.
    fp8 = cache.k.dtype == FP8
    from_cache = cache if fp8 and has_cached_context else (None,) * 4
    converts = from_cache[0] is not None
    BLOCK_M, BLOCK_N, num_warps = prefill_tiles(q, G, max_seqlen_q, converts)
    grid = (Hkv, cdiv(max_seqlen_q, BLOCK_M // G), block_tables.shape[0])
    k_source, v_source = (x.view(-1, Hkv * D) for x in ((k, v) if fp8 else (cache.k, cache.v)))
    stride_row = k_source.stride(0)
    tiles = describe_tiles(k_source, v_source, BLOCK_N, D) if fp8 or S >= BLOCK_N else None
    if tiles is not None:
        (k_source, v_source), num_warps = tiles, 4
    # Two tiles are loaded ahead; one stage more looks up their blocks.
    num_stages = 2 if D > 128 or fp8 else 3
    _prefill_kernel[grid](
        q, k_source, v_source, *from_cache, out, block_tables, cu_seqlens_q,
        cu_seqlens_k, scoring.sinks, scoring.scale * LOG2E.value,
        q.stride(0), out.stride(0), stride_row, Hkv * D, block_tables.stride(0),
        G=G, D=D, D_PAD=D_PAD, S=S, WINDOW=scoring.window, SOFTCAP=scoring.softcap,
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, DESCRIBED=tiles is not None, FRESH=fp8,
        num_warps=num_warps, num_stages=num_stages, **pdl_options(q),
    )  # fmt: skip
    return out
