"""Attention of single tokens over the paged KV cache, their keys split over programs."""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.hopper import has_room, launch_dependents, pdl_options, spare_rows, wait
from nanovllm.kernels.paged_attention import (
    LOG2E,
    attend_tile,
    before_keys,
    load_tile,
    metadata,
    slots_of,
)

MIN_ROWS = 16  # of an operand of tl.dot


@metadata
def _decode_kernel(
    q_ptr, k_cache_ptr, v_cache_ptr, out_ptr, part_acc_ptr, part_lse_ptr, tables_ptr, lens_ptr,
    sinks_ptr, scale, stride_qt, stride_slot, stride_table,
    G: tl.constexpr, G_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, S: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # One program: all G queries that share a KV head of one sequence, over one split of its keys.
    launch_dependents(PDL)
    kv_head, seq, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lens_ptr + seq)
    lowest = 0  # of the positions to see
    if WINDOW:
        lowest = tl.maximum(length - WINDOW, 0)
    first_tile = lowest // BLOCK_N
    tiles_per_split = tl.cdiv(tl.cdiv(length, BLOCK_N) - first_tile, SPLITS)
    begin = (first_tile + split * tiles_per_split) * BLOCK_N
    end = tl.minimum(begin + tiles_per_split * BLOCK_N, length)
    g, d = tl.arange(0, G_PAD), tl.arange(0, D_PAD)
    used = g[:, None] < G
    if D < D_PAD:
        used &= d[None, :] < D
    row = seq.to(tl.int64) * tl.num_programs(0) * G + kv_head * G + g  # of [B * Hq]
    wait(PDL)
    if begin >= end:  # nothing to see: padding, or more splits than tiles
        if SPLITS > 1:
            lse_ptrs = part_lse_ptr + row * SPLITS + split
            tl.store(lse_ptrs, tl.full([G_PAD], float("-inf"), tl.float32), mask=g < G)
        return
    q_ptrs = q_ptr + seq.to(tl.int64) * stride_qt + (kv_head * G + g[:, None]) * D + d[None, :]
    q = tl.load(q_ptrs, mask=used, other=0.0)

    table_ptr = tables_ptr + seq.to(tl.int64) * stride_table
    k_ptr, v_ptr = k_cache_ptr + kv_head * D, v_cache_ptr + kv_head * D
    unmasked_end = begin + (end - begin) // BLOCK_N * BLOCK_N
    m, l = before_keys(sinks_ptr, kv_head * G + g, g < tl.where(split == 0, G, 0), G_PAD)
    acc = tl.zeros([G_PAD, D_PAD], tl.float32)
    for start in range(begin, unmasked_end, BLOCK_N):
        slots = slots_of(table_ptr, start, BLOCK_N, S, end)
        seen = slots >= 0
        if WINDOW:
            seen = start + tl.arange(0, BLOCK_N) >= lowest
        k, v = load_tile(k_ptr, v_ptr, slots, seen, stride_slot, D, D_PAD, WINDOW > 0)
        m, l, acc = attend_tile(
            q, m, l, acc, k, v, scale, seen[None, :], WINDOW > 0, WINDOW, SOFTCAP
        )
    if unmasked_end < end:
        slots = slots_of(table_ptr, unmasked_end, BLOCK_N, S, end)
        keys = unmasked_end + tl.arange(0, BLOCK_N)
        seen = (keys < end) & (keys >= lowest)
        k, v = load_tile(k_ptr, v_ptr, slots, seen, stride_slot, D, D_PAD, True)
        m, l, acc = attend_tile(q, m, l, acc, k, v, scale, seen[None, :], True, WINDOW, SOFTCAP)
    acc = acc / l[:, None]
    if SPLITS == 1:
        out_ptrs = out_ptr + row[:, None] * D + d[None, :]
        tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=used)
    else:
        part = row * SPLITS + split
        tl.store(part_acc_ptr + part[:, None] * D + d[None, :], acc, mask=used)
        tl.store(part_lse_ptr + part, m + tl.log2(l), mask=g < G)


@triton.jit
def _combine_kernel(
    out_ptr, part_acc_ptr, part_lse_ptr,
    D: tl.constexpr, D_PAD: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # One program: one query head. Splits weigh by the sum of their exponentials, 2^lse.
    launch_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, SPLITS)
    d = tl.arange(0, D_PAD)
    wait(PDL)
    lse = tl.load(part_lse_ptr + row * SPLITS + s)
    top = tl.max(lse, 0)
    if top == float("-inf"):  # padding
        return
    weight = tl.exp2(lse - top)
    ptrs = part_acc_ptr + (row * SPLITS + s[:, None]) * D + d[None, :]
    used = lse[:, None] > float("-inf")
    if D < D_PAD:
        used &= d[None, :] < D
    acc = tl.load(ptrs, mask=used, other=0.0)
    out = tl.sum(acc * weight[:, None], 0) / tl.sum(weight, 0)
    out = out.to(out_ptr.dtype.element_ty)
    if D < D_PAD:
        tl.store(out_ptr + row * D + d, out, mask=d < D)
    else:
        tl.store(out_ptr + row * D + d, out)


def decode_tiles(q: torch.Tensor) -> tuple[int, int]:
    """BLOCK_N and warps for queries q: [B, Hq, D]."""
    wide, large = q.element_size() == 4, q.shape[-1] > 128
    if large and not has_room(q):
        return (16 if wide else 32), 4
    return 32 if wide else 64, 4 if large else 2


def choose_num_splits(batch_size: int, num_kv_heads: int, head_dim: int, max_context: int) -> int:
    """Splits of the keys for which the programs fill the GPU a few times over, a power of two.

    1024 programs are about eight for each multiprocessor of an H100 or H200, smaller heads want
    more; measured by benchmarks/decode_attention.py. Long contexts gain from more than 16 splits.
    """
    programs = 1024 * max(1, 128 // head_dim)
    wanted = triton.cdiv(programs, batch_size * num_kv_heads)
    most = max(1, min(16 if max_context <= 16384 else 32, max_context // 64))
    return min(triton.next_power_of_2(wanted), 1 << (most.bit_length() - 1))


def paged_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> torch.Tensor:
    """Attention of one token per sequence to its tokens, all in the cache.

    Args:
        q: [B, Hq, D], the heads of a token adjacent.
        k_cache, v_cache: [N, S, Hkv, D].
        block_tables: [B, W] int32.
        context_lens: [B] int32; rows with 0 are padding, their output is undefined.
        scale, window, softcap, sinks: see `Scoring`.
        num_splits: parts into which a sequence's keys are split, a power of two; None chooses.

    Returns:
        [B, Hq, D]
    """
    B, Hq, D = q.shape
    S, Hkv = k_cache.shape[1:3]
    G, D_PAD = Hq // Hkv, triton.next_power_of_2(D)
    assert q.stride()[1:] == (D, 1), "the heads of a token must be adjacent"
    if num_splits is None:
        longest = block_tables.shape[1] * S
        num_splits = choose_num_splits(B, Hkv, D, min(longest, window or longest))
    out = spare_rows(B, Hq, D, like=q)
    part_acc = part_lse = out
    if num_splits > 1:
        part_acc = torch.empty(B, Hq, num_splits, D, dtype=torch.float32, device=q.device)
        part_lse = torch.empty(B, Hq, num_splits, dtype=torch.float32, device=q.device)
    G_PAD = max(MIN_ROWS, triton.next_power_of_2(G))
    BLOCK_N, num_warps = decode_tiles(q)
    _decode_kernel[(Hkv, B, num_splits)](
        q, k_cache, v_cache, out, part_acc, part_lse, block_tables, context_lens,
        sinks, scale * LOG2E.value, q.stride(0), Hkv * D, block_tables.stride(0),
        G=G, G_PAD=G_PAD, D=D, D_PAD=D_PAD, S=S, WINDOW=window, SOFTCAP=softcap,
        BLOCK_N=BLOCK_N, SPLITS=num_splits,
        num_warps=num_warps, num_stages=3, **pdl_options(q),
    )  # fmt: skip
    if num_splits > 1:
        _combine_kernel[(B * Hq,)](
            out, part_acc, part_lse, D=D, D_PAD=D_PAD, SPLITS=num_splits,
            num_warps=max(1, num_splits * D // 4096), **pdl_options(q),
        )  # fmt: skip
    return out
