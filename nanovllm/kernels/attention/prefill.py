"""Attention of prompts, of any lengths, over the paged KV cache.

Long ones on Hopper have a kernel of their own, `hopper_prefill.py`, if it can compute them.
"""

from collections.abc import Hashable
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

from nanovllm.kernels.attention.common import (
    LOG2E,
    before_keys,
    exponents_ahead,
    load_tile,
    metadata,
    slots_of,
    weigh,
)
from nanovllm.kernels.attention.gather import gather_keys
from nanovllm.kernels.attention.kv_cache import numbers_of
from nanovllm.kernels.device_features import (
    can_describe,
    describe,
    has_own_kernels,
    has_room,
    launch_dependents,
    pdl_options,
    wait,
)
from nanovllm.tensors.fp8 import FP8
from nanovllm.tensors.kv_cache import KVCache
from nanovllm.tensors.scoring import Scoring
from nanovllm.utils.integers import cdiv, next_power_of_2

FEW_QUERIES = 256  # per sequence; up to this, neither the kernel for Hopper nor gathering pays
FEW_SCORES = 2**22  # queries times keys; up to this, one launch takes less time than two
MAX_GATHERED = 2**28  # bytes at once; beyond, heads are gathered in several parts


@triton.jit
def _prefill_tile(
    q, m, l, acc, k_source, v_source, k_exponents, v_exponents, table_ptr, first_row,
    kv_head, start, k_len, positions, limits, stride_row, scale,
    D: tl.constexpr, D_PAD: tl.constexpr, S: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, DESCRIBED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """`weigh` a tile of keys from `start` on, and add their values. The sources are descriptors or
    pointers: of the cache with a table; without one, of rows, with position 0 (even if it is
    absent) in row `first_row`. A query sees keys below its limit; None: up to its position.
    """
    keys = start + tl.arange(0, BLOCK_N)
    seen = keys < k_len
    if WINDOW and MASKED:  # older ones may lie in blocks that are another sequence's now
        seen &= keys > tl.min(positions) - WINDOW
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
        if MASKED:  # beyond the last key they are arbitrary
            k_exponents = tl.where(seen, k_exponents, 0)
            v_exponents = tl.where(seen, v_exponents, 0)
        k = numbers_of(k, k_exponents[None, :], q.dtype)
        v = numbers_of(v, v_exponents[:, None], q.dtype)
    if limits is None:
        visible = keys[None, :] <= tl.minimum(positions, k_len - 1)[:, None]
    else:
        visible = keys[None, :] < limits[:, None]
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
    `first`, and the mask of those that exist.
    """
    row, d = tl.arange(0, BLOCK_M), tl.arange(0, D_PAD)
    query = first + row // G
    used = ((query < q_len) & (row < BLOCK_M // G * G))[:, None]
    if D < D_PAD:
        used &= d[None, :] < D
    return (q_start + query).to(tl.int64)[:, None], head[:, None] * D + d[None, :], used


@triton.jit
def _bounds(first, end, least, most, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """The bounds of the tiles of keys that the queries from `first` to `end` see, with limits from
    `least` to `most`: the first tile that any sees, the first that all see whole, the end of those,
    and the end of all.
    """
    begin, unmasked, unmasked_end = 0, 0, least // BLOCK_N * BLOCK_N
    if WINDOW:
        begin = tl.maximum(first - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
        unmasked = tl.minimum(tl.cdiv(tl.maximum(end - WINDOW, 0), BLOCK_N) * BLOCK_N, most)
        unmasked_end = tl.maximum(unmasked, unmasked_end)
    return begin, unmasked, unmasked_end, most


@triton.jit
def prefill_span(
    q, m, l, acc, k_source, v_source, k_exponents_ptr, v_exponents_ptr, table_ptr, first_row,
    kv_head, begin, end, k_len, positions, limits, stride_row, scale,
    D: tl.constexpr, D_PAD: tl.constexpr, S: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, DESCRIBED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """`_prefill_tile` for each tile from `begin` to `end`. Masked tiles of 16 bits are few, and not
    worth a pipeline.
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
                    first_row, kv_head, start, k_len, positions, limits, stride_row, scale,
                    D, D_PAD, S, BLOCK_N, WINDOW, SOFTCAP, DESCRIBED, MASKED,
                )  # fmt: skip
                exponents = following
    else:
        for start in tl.range(begin, end, BLOCK_N, num_stages=1 if MASKED else None):
            m, l, acc = _prefill_tile(
                q, m, l, acc, k_source, v_source, None, None, table_ptr,
                first_row, kv_head, start, k_len, positions, limits, stride_row, scale,
                D, D_PAD, S, BLOCK_N, WINDOW, SOFTCAP, DESCRIBED, MASKED,
            )  # fmt: skip
    return m, l, acc


@metadata
def _prefill_kernel(
    q_ptr, k_source, v_source, k_exponents_ptr, v_exponents_ptr, out_ptr, tables_ptr, cu_q_ptr,
    cu_k_ptr, limits_ptr, sinks_ptr, scale, stride_qt, stride_ot, stride_row, stride_table,
    G: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, S: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    DESCRIBED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # One program: BLOCK_M rows, i.e. a few queries in all G heads that share a KV head of one
    # sequence. Late queries see more keys, so they start first. Without tables, the keys of
    # sequences follow each other.
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
    # A query sees the positions up to its own; the first query's position is `first`.
    first = k_len - q_len + tile * QUERIES
    positions = first + row // G
    end = tl.minimum(first + QUERIES, k_len)
    least, most, limits = first + 1, end, None
    if limits_ptr is not None:  # or those below its limit
        query = tile * QUERIES + row // G
        limits = tl.load(limits_ptr + q_start + query, mask=query < q_len, other=1)
        least, most = tl.min(tl.where(query < q_len, limits, k_len)), tl.max(limits)
    m, l = before_keys(sinks_ptr, head, row >= 0, BLOCK_M)
    acc = tl.zeros([BLOCK_M, D_PAD], tl.float32)
    bounds = _bounds(first, end, least, most, WINDOW, BLOCK_N)
    for i in tl.static_range(0 if WINDOW else 1, 3):
        m, l, acc = prefill_span(
            q, m, l, acc, k_source, v_source, k_exponents_ptr, v_exponents_ptr, table_ptr,
            first_row, kv_head, bounds[i], bounds[i + 1], most, positions, limits, stride_row,
            scale, D, D_PAD, S, BLOCK_N, WINDOW, SOFTCAP, DESCRIBED, i != 1,
        )  # fmt: skip
    out = (acc / l[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + t * stride_ot + column, out, mask=used)


def describe_tiles(k: torch.Tensor, v: torch.Tensor, rows: int, D: int) -> tuple[Any, Any] | None:
    """Descriptors for tiles of `rows` keys or values of a head, in matrices [n, Hkv D]; None if the
    hardware cannot use them.
    """
    if next_power_of_2(D) != D or not (can_describe(k) and can_describe(v)):
        return None
    return describe(k, rows, D), describe(v, rows, D)


def prefill_tiles(
    q: torch.Tensor, G: int, max_seqlen_q: int, converts: bool = False
) -> tuple[int, int, int]:
    """BLOCK_M, BLOCK_N and warps for queries q: [T, Hq, D], at most `max_seqlen_q` of a sequence.
    `converts`: whether keys are converted from FP8.

    Tiles that are too large for a GPU do not fit its shared memory, or spill so many registers that
    they are slow (tests/kernels/test_other_gpus.py).
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


def takes_hopper_kernel(q: torch.Tensor, keys: KVCache, S: int, max_seqlen_q: int) -> bool:
    """Whether `hopper_prefill` can attend to these keys: it needs whole tiles of 16-bit keys, which
    it does not convert. S: size of their blocks; 0: they are not in blocks.
    """
    (_, Hq, D), Hkv = q.shape, keys.k.shape[-2]
    fits = D in (64, 128) and Hq // Hkv <= 64 and S % 128 == 0 and keys.k.element_size() == 2
    return has_own_kernels(q) and fits and max_seqlen_q > FEW_QUERIES


def heads_at_once(
    q: torch.Tensor, cache: KVCache, num_seqs: int, num_keys: int, scoring: Scoring
) -> int:
    """The number of KV heads for which `num_keys` keys and values are gathered at once. 0: gather
    none, as there is no room for one head, or too few queries see them.
    """
    n, (Hkv, D) = len(q), cache.k.shape[2:]
    few = n <= FEW_QUERIES * num_seqs or n * num_keys <= FEW_SCORES * num_seqs
    if few or (scoring.window and n * scoring.window <= FEW_QUERIES * num_keys):
        return 0
    most = MAX_GATHERED // (2 * num_keys * D * q.element_size())
    return cdiv(Hkv, cdiv(Hkv, most)) if most else 0


def paged_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cache: KVCache,
    block_tables: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    num_keys: int,
    scoring: Scoring,
    shared: dict[Hashable, Any] | None = None,
    limits: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of the last tokens of each sequence to its tokens, all in the cache.

    Args:
        q: [T, Hq, D], queries, the heads of a token adjacent.
        k, v: [T, Hkv, D], keys and values of these tokens, the heads of a token adjacent.
        cache: KV cache of the layer.
        block_tables: [P, W] int32.
        cu_seqlens_q: [P + 1] int32, first query of each sequence.
        cu_seqlens_k: [P + 1] int32, running sum of the context lengths.
        max_seqlen_q: largest number of queries of a sequence.
        num_keys: last value of `cu_seqlens_k`; 0 in a CUDA graph, where it changes.
        scoring: parameters of the scores.
        shared: results that the layers of a step share, see `Context`.
        limits: [T] int32, number of the sequence's first tokens that each query sees, in the place
            of those up to itself, and at least as many; None: these.

    Returns:
        [T, Hq, D]
    """
    assert q.stride()[1:] == (q.shape[2], 1), "the heads of a token must be adjacent"
    (_, Hq, _), Hkv = q.shape, k.shape[1]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    attend = partial(
        _attend,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        shared={} if shared is None else shared,
        limits=limits,
    )
    is_fp8 = cache.k.dtype == FP8
    if is_fp8 and num_keys == len(q):  # all keys are of this step
        attend(q, KVCache(k, v), None, scoring=scoring, out=out)
    elif is_fp8 and (n := heads_at_once(q, cache, len(block_tables), num_keys, scoring)):
        for first in range(0, Hkv, n):
            some = slice(first, min(first + n, Hkv))
            own = slice(some.start * Hq // Hkv, some.stop * Hq // Hkv)
            sinks = None if scoring.sinks is None else scoring.sinks[own]
            # Freed before the next are gathered.
            keys = gather_keys(cache, block_tables, cu_seqlens_k, num_keys, some, q.dtype)
            attend(q[:, own], keys, None, scoring=scoring._replace(sinks=sinks), out=out[:, own])
            del keys
    else:
        attend(q, cache, block_tables, scoring=scoring, out=out)
    return out


def attend_to_limits(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    limits: torch.Tensor,
) -> torch.Tensor:
    """Attention of tokens to the first ones of their sequences, with scale D^-0.5 and no cache.

    Args:
        q, k, v: [T, H, D] each, one sequence after another, the heads of a token adjacent.
        cu_seqlens: [n + 1] int32, first token of each sequence.
        max_seqlen: number of tokens of the longest.
        limits: [T] int32, see `paged_prefill`.

    Returns:
        [T, H, D]
    """
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    scoring, bounds = Scoring(q.shape[2] ** -0.5), (cu_seqlens, cu_seqlens, max_seqlen)
    _attend(q, KVCache(k, v), None, *bounds, {}, scoring, out, limits)
    return out


def _attend(
    q: torch.Tensor,
    keys: KVCache,
    block_tables: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    shared: dict[Hashable, Any],
    scoring: Scoring,
    out: torch.Tensor,
    limits: torch.Tensor | None = None,
) -> None:
    """`paged_prefill` into out: [T, Hq, D].

    Args:
        keys: keys and values; without tables [n, Hkv, D] of q's dtype, one sequence after another.
    """
    S = 0 if block_tables is None else keys.k.shape[1]
    if limits is None and takes_hopper_kernel(q, keys, S, max_seqlen_q):
        from nanovllm.kernels.attention.hopper_prefill import hopper_prefill

        hopper_prefill(q, keys, block_tables, cu_seqlens_q, cu_seqlens_k, scoring, shared, out)
        return
    (_, Hq, D), Hkv, fp8 = q.shape, keys.k.shape[-2], keys.k.dtype == FP8
    G = Hq // Hkv
    BLOCK_M, BLOCK_N, num_warps = prefill_tiles(q, G, max_seqlen_q, fp8)
    grid = (Hkv, cdiv(max_seqlen_q, BLOCK_M // G), len(cu_seqlens_q) - 1)
    # View keys and values as matrices: a tile of keys inside a block is a tile of the matrix.
    k_source, v_source = (x.view(-1, Hkv * D) for x in keys[:2])
    stride_row = k_source.stride(0)
    tiles = None
    if not fp8 and (block_tables is None or S >= BLOCK_N):
        tiles = describe_tiles(k_source, v_source, BLOCK_N, D)
    if tiles is not None:
        k_source, v_source = tiles
        if limits is None or D < 128:  # with limits, too, four warps would have registers in memory
            num_warps = 4
    # Two tiles are loaded ahead; with blocks, one more stage looks them up.
    num_stages = 2 if block_tables is None or D > 128 or fp8 else 3
    _prefill_kernel[grid](
        q, k_source, v_source, *keys[2:], out, block_tables, cu_seqlens_q, cu_seqlens_k, limits,
        scoring.sinks, scoring.scale * LOG2E.value, q.stride(0), out.stride(0), stride_row,
        0 if block_tables is None else block_tables.stride(0),
        G=G, D=D, D_PAD=next_power_of_2(D), S=S, WINDOW=scoring.window, SOFTCAP=scoring.softcap,
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, DESCRIBED=tiles is not None,
        num_warps=num_warps, num_stages=num_stages, **pdl_options(q),
    )  # fmt: skip
