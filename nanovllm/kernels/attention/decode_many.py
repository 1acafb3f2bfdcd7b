"""Attention of single tokens over the paged KV cache, their keys split over programs."""

from collections.abc import Hashable
from functools import partial
from typing import Any

import torch
import triton.language as tl

from nanovllm.kernels.attention.common import LOG2E, before_keys, metadata
from nanovllm.kernels.attention.kv_cache import load_queries
from nanovllm.kernels.attention.prefix import Seen, go_on, paged_prefix
from nanovllm.kernels.attention.splits import (
    PROGRAMS,
    choose_num_splits,
    combining,
    empty_outputs,
    finish,
    span,
)
from nanovllm.kernels.attention.tiles import decode_span
from nanovllm.kernels.device_features import (
    VERSION,
    has_ptx,
    has_room,
    launch_dependents,
    pdl_options,
    wait,
)
from nanovllm.tensors.fp8 import FP8
from nanovllm.tensors.kv_cache import KVCache
from nanovllm.tensors.scoring import Scoring
from nanovllm.utils.context import Prefixes
from nanovllm.utils.integers import next_power_of_2

# Up to these sizes of heads and of groups of queries, keys and values are the left operands of
# products, as they have the 16 rows that tensor cores need. Sums of larger groups spill. Larger
# heads use four warps, and so Hopper's WGMMA, which Triton 3.6 got wrong with queries as the right
# operand (docs/experiments.md, 35).
LARGEST_LEFT, MAX_LEFT = 128, 16
MIN_COLUMNS = 8 if VERSION >= (3, 5) and torch.version.hip is None else 16  # in right operands
LONG_TILES, LONG_PROGRAMS = (128, 4, 3), 640  # result of `decode_tiles`, and its `PROGRAMS`
MANY_PROGRAMS = 1536  # without splits: enough for many per multiprocessor


@metadata
def _decode_kernel(
    q_ptr, k_cache_ptr, v_cache_ptr, k_exponents_ptr, v_exponents_ptr, out_ptr, part_acc_ptr,
    part_lse_ptr, arrived_ptr, tables_ptr, lens_ptr, sinks_ptr, prefix_lens_ptr, prefix_acc_ptr,
    prefix_m_ptr, prefix_l_ptr, prefix_splits, scale, stride_qt, stride_slot, stride_table,
    G: tl.constexpr, G_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, S: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS_PAD: tl.constexpr,
    AT_ONCE: tl.constexpr, PAIR: tl.constexpr, LEFT: tl.constexpr,
    CVT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # One program: all G queries that share a KV head of one sequence, over one split of its keys,
    # except those of a prefix shared with others: the first split continues from the results of
    # that. An FP8 cache has columns in pairs, as int16. LEFT: see LARGEST_LEFT.
    W: tl.constexpr = D // PAIR
    W_PAD: tl.constexpr = D_PAD // PAIR
    launch_dependents(PDL)
    kv_head, seq, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    splits = tl.num_programs(2) if SPLITS_PAD > 1 else 1
    prefix = split * 0
    if prefix_lens_ptr is not None:
        prefix = tl.load(prefix_lens_ptr + seq)
    length = tl.load(lens_ptr + seq)
    lowest, begin, end, parts = span(length, length, split, splits, prefix, WINDOW, BLOCK_N)
    g, d = tl.arange(0, G_PAD), tl.arange(0, W_PAD) * PAIR
    used = (g[:, None] < G) & (d[None, :] < D) if D < D_PAD else g[:, None] < G
    group = seq.to(tl.int64) * tl.num_programs(0) + kv_head
    row = group * G + g  # rows of [B * Hq]
    wait(PDL)
    if begin >= end:  # no keys: padding, or more splits than tiles
        return
    q_ptrs = q_ptr + seq.to(tl.int64) * stride_qt + (kv_head * G + g[:, None]) * D + d[None, :]
    q, q_odd = load_queries(q_ptrs, used, PAIR)
    table_ptr = tables_ptr + seq.to(tl.int64) * stride_table
    k_ptr, v_ptr = k_cache_ptr + kv_head * W, v_cache_ptr + kv_head * W
    m, l = before_keys(
        sinks_ptr, kv_head * G + g, g < tl.where((split == 0) & (prefix == 0), G, 0), G_PAD
    )
    acc = tl.zeros([W_PAD, G_PAD] if LEFT else [G_PAD, W_PAD], tl.float32)
    acc_odd = acc if PAIR == 2 else 0.0
    if prefix_lens_ptr is not None:
        m, l, acc, acc_odd = go_on(
            m, l, acc, acc_odd, prefix_acc_ptr, prefix_m_ptr, prefix_l_ptr, row, d, used,
            g < tl.where((split == 0) & (prefix > 0), G, 0), prefix_splits, D, PAIR, LEFT,
        )  # fmt: skip
    m, l, acc, acc_odd = decode_span(
        q, q_odd, m, l, acc, acc_odd, k_ptr, v_ptr, k_exponents_ptr, v_exponents_ptr, table_ptr,
        lowest, begin, end, stride_slot, scale, W, W_PAD, S, WINDOW, SOFTCAP, BLOCK_N, PAIR, LEFT,
        CVT,
    )  # fmt: skip
    finish(
        m, l, acc, acc_odd, row, g < G, out_ptr, part_acc_ptr, part_lse_ptr, arrived_ptr + group,
        group * G, split, splits, parts, G, D, SPLITS_PAD, AT_ONCE, PAIR, LEFT,
    )  # fmt: skip


def decode_tiles(
    q: torch.Tensor, fp8: bool = False, columns: int = 8, many: bool = False
) -> tuple[int, int, int]:
    """BLOCK_N, warps and stages for queries q: [B, Hq, D], and keys like q or in FP8. `columns`:
    padded number of a KV head's queries if keys are the left operand; 0 if they are the right one.
    `many`: whether there are MANY_PROGRAMS. Measured: docs/experiments.md, 35 and 45.
    """
    wide, large = q.element_size() == 4, q.shape[-1] > LARGEST_LEFT
    if large and not has_room(q):
        return (16 if wide else 32), 4, 3
    if not fp8 or wide or large:
        return 32 if wide else 64, 4 if large else 2, 3
    if not columns:
        return 128, 4, 5
    if many:
        return 64, 2, 3
    # With 16 columns, four warps would use WGMMA. With heads of 64, neither is always faster.
    return LONG_TILES if columns == 8 and q.shape[-1] > 64 else (64, 2, 5)


def paged_decode(
    q: torch.Tensor,
    cache: KVCache,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scoring: Scoring,
    prefixes: Prefixes | None = None,
    num_splits: int | None = None,
    max_context: int | None = None,
    shared: dict[Hashable, Any] | None = None,
) -> torch.Tensor:
    """Attention of one token per sequence to its tokens, all in the cache.

    Args:
        q: [B, Hq, D], the heads of a token adjacent.
        cache: KV cache of the layer.
        block_tables: [B, W] int32.
        context_lens: [B] int32; rows with 0 are padding, their output is undefined.
        scoring: parameters of the scores.
        prefixes: prefixes that several decodes share, to be read once; not with a window.
        num_splits: number of parts into which a sequence's keys are split, a power of two; None:
            chosen here.
        max_context: maximum length of a sequence in tokens, for that choice; None: the width of the
            tables.
        shared: results that the layers of a step share, see `Context`.

    Returns:
        [B, Hq, D]
    """
    (B, Hq, D), (S, Hkv) = q.shape, cache.k.shape[1:3]
    G, D_PAD = Hq // Hkv, next_power_of_2(D)
    assert q.stride()[1:] == (D, 1), "the heads of a token must be adjacent"
    fp8, left = cache.k.dtype == FP8, D <= LARGEST_LEFT and G <= MAX_LEFT
    G_PAD = max(MIN_COLUMNS if left else 16, next_power_of_2(G))
    tiles = partial(decode_tiles, q, fp8, G_PAD if left else 0)
    if num_splits is None:
        programs = LONG_PROGRAMS if tiles() == LONG_TILES else PROGRAMS
        longest = max_context or block_tables.shape[1] * S
        num_splits = choose_num_splits(B, Hkv, D, longest, scoring.window, programs)
    many = num_splits == 1 and B * Hkv >= MANY_PROGRAMS
    BLOCK_N, num_warps, num_stages = tiles(many=many)
    outputs = empty_outputs(q, Hq, Hkv, num_splits, shared)
    k_cache, v_cache, pair = cache.k, cache.v, 1
    if fp8:
        k_cache, v_cache, pair = k_cache.view(torch.int16), v_cache.view(torch.int16), 2
    seen: Seen | tuple[None, ...] = (None,) * 4
    if prefixes is not None:
        seen = paged_prefix(q, cache, block_tables, prefixes, scoring)
    _decode_kernel[(Hkv, B, num_splits)](
        q, k_cache, v_cache, *cache[2:], *outputs, block_tables, context_lens, scoring.sinks, *seen,
        1 if seen[1] is None else seen[1].shape[2],
        scoring.scale * LOG2E.value, q.stride(0), Hkv * D // pair, block_tables.stride(0),
        G=G, G_PAD=G_PAD, D=D, D_PAD=D_PAD, S=S, WINDOW=scoring.window, SOFTCAP=scoring.softcap,
        BLOCK_N=BLOCK_N, **combining(num_splits, G), PAIR=pair, LEFT=left, CVT=has_ptx(q),
        num_warps=num_warps, num_stages=num_stages, **pdl_options(q),
    )  # fmt: skip
    return outputs[0]
