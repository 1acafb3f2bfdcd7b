"""Attention of prompts, of any lengths, over the paged KV cache."""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.hopper import (
    can_describe,
    describe,
    has_room,
    launch_dependents,
    pdl_options,
    wait,
)
from nanovllm.kernels.paged_attention import (
    LOG2E,
    attend_tile,
    before_keys,
    load_tile,
    metadata,
    slots_of,
)


@triton.jit
def _prefill_tile(
    q, m, l, acc, k_source, v_source, table_ptr, kv_head, start, k_len, positions, stride_slot,
    scale,
    D: tl.constexpr, D_PAD: tl.constexpr, S: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, DESCRIBED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """`attend_tile` of the keys from `start`; the sources are descriptors or pointers."""
    keys = start + tl.arange(0, BLOCK_N)
    seen = keys < k_len
    if DESCRIBED:
        slot = tl.load(table_ptr + start // S) * S + start % S
        k = k_source.load([slot, kv_head * D]).T
        v = v_source.load([slot, kv_head * D])
        if MASKED:
            v = tl.where(seen[:, None], v, 0.0)
    else:
        slots = slots_of(table_ptr, start, BLOCK_N, S, k_len)
        offset = kv_head * D
        k, v = load_tile(
            k_source + offset, v_source + offset, slots, seen, stride_slot, D, D_PAD, MASKED
        )
    visible = (keys[None, :] <= positions[:, None]) & seen[None, :]
    if WINDOW:
        visible &= keys[None, :] > positions[:, None] - WINDOW
    return attend_tile(q, m, l, acc, k, v, scale, visible, MASKED, WINDOW, SOFTCAP)


@metadata
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
    m, l = before_keys(sinks_ptr, kv_head * G + g, row >= 0, BLOCK_M)
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
