"""Attention over the paged KV cache: variable-length prefill and split-KV decode.

Online softmax in base 2 (Milakov and Gimelshein, 2018; Dao et al., 2022). A tile of keys is found
through the block table: one lookup where a tile lies inside a block, one per key otherwise. Blocks
beyond a sequence's context are never read.

Letters: B sequences, Hq/Hkv heads, G = Hq / Hkv, D head size, S block size, W table width.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.hopper import (
    can_describe,
    describe,
    has_room,
    launch_dependents,
    pdl_options,
    spare_rows,
    wait,
)

LOG2E = tl.constexpr(1.4426950408889634)
MIN_ROWS = 16  # of an operand of tl.dot
LOWEST = tl.constexpr(-1e30)  # of a maximum of scores


@triton.jit
def _slots(table_ptr, start, BLOCK_N: tl.constexpr, S: tl.constexpr, end):
    """Cache slots [BLOCK_N] int64 of positions start.. (a multiple of BLOCK_N); those >= end: 0."""
    n = tl.arange(0, BLOCK_N)
    if S >= BLOCK_N:
        block = tl.load(table_ptr + start // S).to(tl.int64)
        return block * S + (start % S) + n
    else:
        pos = start + n
        block = tl.load(table_ptr + pos // S, mask=pos < end, other=0).to(tl.int64)
        return block * S + pos % S


@triton.jit
def _before_keys(sinks_ptr, head, used, ROWS: tl.constexpr):
    """Running maximum and sum [ROWS] before the first key: a head's sink, if it has one."""
    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    if sinks_ptr is not None:
        m = tl.load(sinks_ptr + head, mask=used, other=float("-inf")).to(tl.float32) * LOG2E
        l = tl.where(used, 1.0, l)
    return m, l


@triton.jit
def _attend_tile(
    q, m, l, acc, k, v, scale, visible,
    MASKED: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax over a tile of keys.

    q: [M, D]; m, l: [M] running maximum and sum; acc: [M, D]; k: [D, BLOCK_N]; v: [BLOCK_N, D];
    visible: [M or 1, BLOCK_N] bool. Maxima are of scaled scores, in units of log 2.
    """
    s = tl.dot(q, k, input_precision="ieee")  # [M, BLOCK_N] float32
    if SOFTCAP > 0:
        CAP: tl.constexpr = SOFTCAP * LOG2E
        s = CAP - 2 * CAP / (tl.exp2(s * (scale * 2 / SOFTCAP)) + 1)  # CAP * tanh
        scale = 1.0
    if MASKED:
        s = tl.where(visible, s, float("-inf"))
    m_new = tl.maximum(m, tl.max(s, 1) * scale)
    if WINDOW:  # a row may have seen no key yet
        m_new = tl.maximum(m_new, LOWEST)
    p = tl.exp2(s * scale - m_new[:, None])
    correction = tl.exp2(m - m_new)
    l = l * correction + tl.sum(p, 1)
    acc = acc * correction[:, None]
    acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
    return m_new, l, acc


@triton.jit
def _load_tile(
    k_ptr, v_ptr, slots, seen, stride_slot,
    D: tl.constexpr, D_PAD: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Keys [D_PAD, BLOCK_N] and values [BLOCK_N, D_PAD] of the slots. Those not `seen` are not
    read: what lies there may be anything, NaN included."""
    d = tl.arange(0, D_PAD)
    k_ptrs = k_ptr + slots[None, :] * stride_slot + d[:, None]
    v_ptrs = v_ptr + slots[:, None] * stride_slot + d[None, :]
    if D < D_PAD:
        k = tl.load(k_ptrs, mask=seen[None, :] & (d[:, None] < D), other=0.0)
        v = tl.load(v_ptrs, mask=seen[:, None] & (d[None, :] < D), other=0.0)
    elif MASKED:
        k = tl.load(k_ptrs, mask=seen[None, :], other=0.0)
        v = tl.load(v_ptrs, mask=seen[:, None], other=0.0)
    else:
        k = tl.load(k_ptrs)
        v = tl.load(v_ptrs)
    return k, v


# Widths and slices of the step's metadata change from step to step: no variant for each alignment.
_metadata = triton.jit(
    do_not_specialize=["stride_table"],
    do_not_specialize_on_alignment=["tables_ptr", "lens_ptr", "cu_q_ptr", "cu_k_ptr"],
)


@triton.jit
def _prefill_tile(
    q, m, l, acc, k_source, v_source, table_ptr, kv_head, start, k_len, positions, stride_slot,
    scale,
    D: tl.constexpr, D_PAD: tl.constexpr, S: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, DESCRIBED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """`_attend_tile` of the keys from `start`; the sources are descriptors or pointers."""
    keys = start + tl.arange(0, BLOCK_N)
    seen = keys < k_len
    if DESCRIBED:
        slot = tl.load(table_ptr + start // S) * S + start % S
        k = k_source.load([slot, kv_head * D]).T
        v = v_source.load([slot, kv_head * D])
        if MASKED:
            v = tl.where(seen[:, None], v, 0.0)
    else:
        slots = _slots(table_ptr, start, BLOCK_N, S, k_len)
        offset = kv_head * D
        k, v = _load_tile(
            k_source + offset, v_source + offset, slots, seen, stride_slot, D, D_PAD, MASKED
        )
    visible = (keys[None, :] <= positions[:, None]) & seen[None, :]
    if WINDOW:
        visible &= keys[None, :] > positions[:, None] - WINDOW
    return _attend_tile(q, m, l, acc, k, v, scale, visible, MASKED, WINDOW, SOFTCAP)


@_metadata
def _prefill_kernel(
    q_ptr, k_source, v_source, out_ptr, tables_ptr, cu_q_ptr, cu_k_ptr, sinks_ptr, scale,
    stride_qt, stride_ot, stride_slot, stride_table,
    G: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, S: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DESCRIBED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # One program: BLOCK_M rows, which are a few queries in all G heads that share a KV head of one
    # sequence. Late queries see more keys, so they start first.
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
    query, g = tile * QUERIES + row // G, row % G
    d = tl.arange(0, D_PAD)
    used = ((query < q_len) & (row < QUERIES * G))[:, None]
    if D < D_PAD:
        used &= d[None, :] < D
    t = (q_start + query).to(tl.int64)[:, None]
    column = (kv_head * G + g)[:, None] * D + d[None, :]
    q = tl.load(q_ptr + t * stride_qt + column, mask=used, other=0.0)

    table_ptr = tables_ptr + seq * stride_table
    # A query sees the positions up to its own; the first of them is at `first`.
    first = k_len - q_len + tile * QUERIES
    positions = first + row // G
    end = tl.minimum(first + QUERIES, k_len)
    unmasked_end = (first + 1) // BLOCK_N * BLOCK_N
    m, l = _before_keys(sinks_ptr, kv_head * G + g, row >= 0, BLOCK_M)
    acc = tl.zeros([BLOCK_M, D_PAD], tl.float32)
    unmasked_begin = 0
    if WINDOW:  # tiles that no query sees are left out, those that some do not see are masked
        begin = tl.maximum(first - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
        unmasked_begin = tl.cdiv(tl.maximum(end - WINDOW, 0), BLOCK_N) * BLOCK_N
        for start in tl.range(begin, unmasked_begin, BLOCK_N, num_stages=1):
            m, l, acc = _prefill_tile(
                q, m, l, acc, k_source, v_source, table_ptr, kv_head, start, k_len, positions,
                stride_slot, scale, D, D_PAD, S, BLOCK_N, WINDOW, SOFTCAP, DESCRIBED, True,
            )  # fmt: skip
        unmasked_end = tl.maximum(unmasked_begin, unmasked_end)
    for start in range(unmasked_begin, unmasked_end, BLOCK_N):
        m, l, acc = _prefill_tile(
            q, m, l, acc, k_source, v_source, table_ptr, kv_head, start, k_len, positions,
            stride_slot, scale, D, D_PAD, S, BLOCK_N, WINDOW, SOFTCAP, DESCRIBED, False,
        )  # fmt: skip
    for start in tl.range(unmasked_end, end, BLOCK_N, num_stages=1):
        m, l, acc = _prefill_tile(
            q, m, l, acc, k_source, v_source, table_ptr, kv_head, start, k_len, positions,
            stride_slot, scale, D, D_PAD, S, BLOCK_N, WINDOW, SOFTCAP, DESCRIBED, True,
        )  # fmt: skip
    out = (acc / l[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + t * stride_ot + column, out, mask=used)


@_metadata
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
    num_kv_heads = tl.num_programs(0)
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
    row = seq.to(tl.int64) * num_kv_heads * G + kv_head * G + g  # of [B * Hq]
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
    m, l = _before_keys(sinks_ptr, kv_head * G + g, g < tl.where(split == 0, G, 0), G_PAD)
    acc = tl.zeros([G_PAD, D_PAD], tl.float32)
    for start in range(begin, unmasked_end, BLOCK_N):
        slots = _slots(table_ptr, start, BLOCK_N, S, end)
        seen = slots >= 0
        if WINDOW:
            seen = start + tl.arange(0, BLOCK_N) >= lowest
        k, v = _load_tile(k_ptr, v_ptr, slots, seen, stride_slot, D, D_PAD, WINDOW > 0)
        m, l, acc = _attend_tile(
            q, m, l, acc, k, v, scale, seen[None, :], WINDOW > 0, WINDOW, SOFTCAP
        )
    if unmasked_end < end:
        slots = _slots(table_ptr, unmasked_end, BLOCK_N, S, end)
        keys = unmasked_end + tl.arange(0, BLOCK_N)
        seen = (keys < end) & (keys >= lowest)
        k, v = _load_tile(k_ptr, v_ptr, slots, seen, stride_slot, D, D_PAD, True)
        m, l, acc = _attend_tile(q, m, l, acc, k, v, scale, seen[None, :], True, WINDOW, SOFTCAP)
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


def prefill_tiles(q: torch.Tensor, G: int, max_seqlen_q: int) -> tuple[int, int, int]:
    """BLOCK_M, BLOCK_N and warps for queries q: [T, Hq, D], up to `max_seqlen_q` of a sequence.

    What is too large for a GPU does not fit its shared memory, or keeps so many of a thread's
    registers in memory that it is slow (tests/kernels/test_other_gpus.py).
    """
    wide, large = q.element_size() == 4, q.shape[-1] > 128  # each takes twice the shared memory
    if not wide and not large:
        return (64, 64, 4) if max_seqlen_q * G <= 64 else (128, 64, 8)
    if wide and large:
        rows, keys, warps = 16, 16, 8
    elif has_room(q):
        rows, keys, warps = 64, 32, 4
    else:
        rows, keys, warps = 32, 32, 8 if wide else 4
    return max(rows, triton.next_power_of_2(G)), keys, warps


def decode_tiles(q: torch.Tensor) -> tuple[int, int]:
    """BLOCK_N and warps for queries q: [B, Hq, D]."""
    wide, large = q.element_size() == 4, q.shape[-1] > 128
    if large and not has_room(q):
        return (16 if wide else 32), 4
    return 32 if wide else 64, 4 if large else 2


def paged_prefill(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of the last tokens of each sequence to its tokens, all in the cache.

    Args:
        q: [T, Hq, D], the heads of a token adjacent.
        k_cache, v_cache: [N, S, Hkv, D].
        block_tables: [P, W] int32.
        cu_seqlens_q: [P + 1] int32, where each sequence's queries begin.
        cu_seqlens_k: [P + 1] int32, running sum of the context lengths.
        max_seqlen_q: most queries of a sequence.
        scale, window, softcap, sinks: see `Scoring`.

    Returns:
        [T, Hq, D]
    """
    _, Hq, D = q.shape
    S, Hkv = k_cache.shape[1:3]
    assert q.stride()[1:] == (D, 1), "the heads of a token must be adjacent"
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    G, D_PAD = Hq // Hkv, triton.next_power_of_2(D)
    BLOCK_M, BLOCK_N, num_warps = prefill_tiles(q, G, max_seqlen_q)
    grid = (Hkv, triton.cdiv(max_seqlen_q, BLOCK_M // G), block_tables.shape[0])
    # The cache as a matrix, of which a tile of keys is a tile where it lies inside a block.
    k_source, v_source = k_cache.view(-1, Hkv * D), v_cache.view(-1, Hkv * D)
    described = S >= BLOCK_N and D == D_PAD and can_describe(k_source) and can_describe(v_source)
    if described:
        k_source, v_source = describe(k_source, BLOCK_N, D), describe(v_source, BLOCK_N, D)
    _prefill_kernel[grid](
        q, k_source, v_source, out, block_tables, cu_seqlens_q, cu_seqlens_k,
        sinks, scale * LOG2E.value,
        q.stride(0), out.stride(0), Hkv * D, block_tables.stride(0),
        G=G, D=D, D_PAD=D_PAD, S=S, WINDOW=window, SOFTCAP=softcap,
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, DESCRIBED=described,
        num_warps=4 if described else num_warps, num_stages=3 if D <= 128 else 2, **pdl_options(q),
    )  # fmt: skip
    return out


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
