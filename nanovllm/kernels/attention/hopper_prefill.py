"""Attention of prompts on Hopper, with specialised warps.

A warp copies keys and values into rings of shared memory (TMA). Two groups of four warps attend,
each for half of a tile of queries: tensor cores multiply a group's weights by the values of a tile,
and its queries by the keys of the next, while the group computes the softmax of the previous
product (FlashAttention-3, Shah et al., 2024). There is one program per multiprocessor. It gets
tiles of queries from a counter until none is left, so that all programs end together, and the
copies for a tile begin while the one before is computed.

It is written in Gluon (see `rings.py`): in the order that Triton itself gives a kernel, tensor
cores wait for softmax. `paged_prefill` computes all other cases.
"""

from collections.abc import Hashable
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from nanovllm.kernels.attention.common import LOG2E, LOWEST
from nanovllm.kernels.rings import async_load, leave, make_ring, tiles_of, wait_full, wait_left
from nanovllm.tensors.kv_cache import KVCache
from nanovllm.tensors.scoring import Scoring
from nanovllm.utils.device import num_multiprocessors

ROWS, KEYS = 128, 128  # per tile; its rows: a few queries in all heads that share a KV head
_HALF, _KEYS = gl.constexpr(ROWS // 2), gl.constexpr(KEYS)
_STAGES = gl.constexpr(2)  # buffers of a ring
_FACTS = gl.constexpr(8)  # room for the facts of a tile


@gluon.jit
def _fill(desc, row, column, ring, n, SIZE: gl.constexpr):
    """Copy a tile of SIZE bytes when there is room for the n-th."""
    i = wait_left(ring, n)
    mbarrier.expect(ring[1].index(i), SIZE)
    async_load(desc, [row, column], ring[1].index(i), ring[0].index(i))


@gluon.jit
def _post(work, n, facts):
    """Post the facts of the n-th tile of queries, integers, to the groups."""
    place = wait_left(work, n)
    for i in gl.static_range(len(facts)):
        fact = gl.full([1], facts[i], gl.int32, gl.BlockedLayout([1], [32], [1], [0]))
        work[0].index(place * _FACTS + i).store(fact)
    mbarrier.arrive(work[1].index(place))


@gluon.jit
def _number(numbers, i):
    return gl.max(numbers.index(i).load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def _posted(work, n):
    """The n-th facts that were posted."""
    numbers, i = work[0], wait_full(work, n) * _FACTS
    kv_head, query, end = _number(numbers, i), _number(numbers, i + 1), _number(numbers, i + 2)
    position, k_len = _number(numbers, i + 3), _number(numbers, i + 4)
    facts = kv_head, query, end, position, k_len, _number(numbers, i + 5), _number(numbers, i + 6)
    leave(work, n)
    return facts


@gluon.jit
def _facts_of(
    item, cu_q_ptr, cu_k_ptr, num_seqs, HKV, G: gl.constexpr, WINDOW: gl.constexpr
):  # fmt: skip
    """The facts of an item: a KV head of one of T // QUERIES + P slots. Sequence s has the slots
    from cu_q[s] // QUERIES + s on, at most one more than it has tiles; late queries see more keys,
    so they come first.

    Returns the sequence, and the facts: KV head, the tile's first query, the end of the sequence's
    queries, the first query's position, the context's length, and the begin and end of the tiles of
    keys that any of the queries sees; these are equal if the slot has no tile.
    """
    QUERIES: gl.constexpr = 2 * _HALF // G
    slot = item // HKV
    seq, end = 0, num_seqs
    while end - seq > 1:  # the last sequence that begins at the slot, or before it
        middle = (seq + end) // 2
        if gl.load(cu_q_ptr + middle) // QUERIES + middle <= slot:
            seq = middle
        else:
            end = middle
    q_start, q_end = gl.load(cu_q_ptr + seq), gl.load(cu_q_ptr + seq + 1)
    k_len = gl.load(cu_k_ptr + seq + 1) - gl.load(cu_k_ptr + seq)
    first = (q_end // QUERIES + seq - slot) * QUERIES
    position = k_len - (q_end - q_start) + first
    begin = 0
    if WINDOW:
        begin = gl.maximum(position - WINDOW + 1, 0) // _KEYS
    tiles = (gl.minimum(position + QUERIES, k_len) + _KEYS - 1) // _KEYS
    tiles = gl.where((first >= 0) & (q_start + first < q_end), tiles, begin)
    return seq, (item % HKV, q_start + first, q_end, position, k_len, begin, tiles)


@gluon.jit
def _copy(
    rings, k_desc, v_desc, counter_ptr, tables_ptr, cu_q_ptr, cu_k_ptr, num_items, num_seqs,
    HKV, stride_table,
    G: gl.constexpr, D: gl.constexpr, S: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """The work of the copying warp. Without tables, the keys of a sequence begin at its cu_k."""
    keys, values, work = rings
    item, following = gl.atomic_add(counter_ptr, 1), gl.atomic_add(counter_ptr, 1)
    n, k_n = 0, 0
    while item < num_items:
        seq, facts = _facts_of(item, cu_q_ptr, cu_k_ptr, num_seqs, HKV, G, WINDOW)
        item, following = following, gl.atomic_add(counter_ptr, 1)  # ahead, as it is slow
        kv_head, _, _, _, _, begin, tiles = facts
        first_row = 0
        if tables_ptr is None:
            first_row = gl.load(cu_k_ptr + seq)
        if begin < tiles:
            _post(work, n, facts)
            n += 1
        for i in range(begin, tiles):
            start = (tiles - 1 + begin - i) * _KEYS
            row = first_row + start
            if tables_ptr is not None:
                row = gl.load(tables_ptr + seq * stride_table + start // S) * S + start % S
            _fill(k_desc, row, kv_head * D, keys, k_n, 2 * _KEYS * D)
            _fill(v_desc, row, kv_head * D, values, k_n, 2 * _KEYS * D)
            k_n += 1
    _post(work, n, (0, 0, 0, 0, 0, 0, 0))  # the end
    # Each program has asked for two items beyond the end; the last to do so resets the counter.
    if following == num_items + 2 * gl.num_programs(0) - 1:
        gl.store(counter_ptr, 0)


@gluon.jit
def _places(
    query, end, kv_head, stride,
    GROUP: gl.constexpr, G: gl.constexpr, D: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """The offsets of a group's rows [HALF, D] of a tile, and the mask [HALF, 1] of those that
    exist.
    """
    row = GROUP * _HALF + gl.arange(0, _HALF, gl.SliceLayout(1, LAYOUT))
    t, head = query + row // G, kv_head * G + row % G
    place = gl.expand_dims(t.to(gl.int64) * stride + head * D, 1)
    place += gl.expand_dims(gl.arange(0, D, gl.SliceLayout(0, LAYOUT)), 0)
    return place, gl.expand_dims((t < end) & (row < 2 * _HALF // G * G), 1)


@gluon.jit
def _load_queries(
    q_ptr, facts, stride,
    GROUP: gl.constexpr, G: gl.constexpr, D: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    kv_head, query, end = facts[0], facts[1], facts[2]
    place, there = _places(query, end, kv_head, stride, GROUP, G, D, LAYOUT)
    return gl.load(q_ptr + place, there, 0.0)


@gluon.jit
def _before_keys(sinks_ptr, kv_head, row, G: gl.constexpr):
    """See `common.before_keys`."""
    m = gl.full([_HALF], float("-inf"), gl.float32, row.type.layout)
    l = gl.full([_HALF], 0.0, gl.float32, row.type.layout)
    if sinks_ptr is not None:
        m = gl.load(sinks_ptr + kv_head * G + row % G).to(gl.float32) * LOG2E
        l += 1.0
    return m, l


@gluon.jit
def _weigh(
    s, m, l, scale, position, row, k_len, start,
    GROUP: gl.constexpr, G: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """See `common.weigh`; for keys from `start` on, and rows of a tile at `position`."""
    if SOFTCAP > 0:
        CAP: gl.constexpr = SOFTCAP * LOG2E
        s = CAP - 2 * CAP / (gl.exp2(s * (scale * 2 / SOFTCAP)) + 1)  # CAP * tanh
        scale = 1.0
    masked = start + _KEYS - 1 > position + GROUP * _HALF // G  # the first row does not see all
    if WINDOW:
        masked |= start <= position + (GROUP * _HALF + _HALF - 1) // G - WINDOW  # or the last row
    if masked:
        positions = position + row // G
        key = gl.expand_dims(start + gl.arange(0, _KEYS, gl.SliceLayout(0, LAYOUT)), 0)
        visible = key <= gl.expand_dims(gl.minimum(positions, k_len - 1), 1)
        if WINDOW:
            visible &= key > gl.expand_dims(positions - WINDOW, 1)
        s = gl.where(visible, s, float("-inf"))
    m_new = gl.maximum(gl.maximum(m, gl.max(s, 1) * scale), LOWEST)  # a row may have seen no key
    p = gl.exp2(s * scale - gl.expand_dims(m_new, 1))
    correction = gl.exp2(m - m_new)
    return m_new, l * correction + gl.sum(p, 1), p, correction


@gluon.jit
def _clear(values, start, k_len, D: gl.constexpr):
    """Zero the values after a sequence's last: they may be NaN. Each group does so for itself; both
    write the value that is there already, or 0.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    key = start + gl.arange(0, _KEYS, gl.SliceLayout(1, LAYOUT))
    values.store(gl.where(gl.expand_dims(key < k_len, 1), values.load(LAYOUT), 0.0))
    fence_async_shared()


@gluon.jit
def _attend(
    rings, q_ptr, out_ptr, sinks_ptr, scale, stride_qt, stride_ot,
    GROUP: gl.constexpr, G: gl.constexpr, D: gl.constexpr, WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr,
):  # fmt: skip
    """The work of a group of warps. Queries and weights are in registers, as left operands."""
    keys, values, work = rings
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _KEYS, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    QUERIES: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, SUMS)
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    zeros = gl.zeros([_HALF, _KEYS], gl.float32, SCORES)
    row = GROUP * _HALF + gl.arange(0, _HALF, gl.SliceLayout(1, SCORES))
    n, k_n = 0, 0
    facts = _posted(work, n)
    q = _load_queries(q_ptr, facts, stride_qt, GROUP, G, D, QUERIES)
    while facts[6] > 0:
        kv_head, query, end, position, k_len, begin, tiles = facts
        start = (tiles - 1) * _KEYS
        k = keys[0].index(wait_full(keys, k_n))
        s = warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False)
        leave(keys, k_n)
        m, l = _before_keys(sinks_ptr, kv_head, row, G)
        m, l, p, _ = _weigh(
            s, m, l, scale, position, row, k_len, start, GROUP, G, WINDOW, SOFTCAP, SCORES
        )
        p = gl.convert_layout(p.to(dtype), WEIGHTS)
        acc = gl.zeros([_HALF, D], gl.float32, SUMS)
        v = values[0].index(wait_full(values, k_n))
        if start + _KEYS > k_len:
            _clear(v, start, k_len, D)
        for _ in range(begin + 1, tiles):
            start -= _KEYS
            k = keys[0].index(wait_full(keys, k_n + 1))
            s_later = warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
            v = values[0].index(wait_full(values, k_n))
            acc_later = warpgroup_mma(p, v, acc, is_async=True)
            s = warpgroup_mma_wait(1, [s_later])
            leave(keys, k_n + 1)
            m, l, p_new, correction = _weigh(
                s, m, l, scale, position, row, k_len, start, GROUP, G, WINDOW, SOFTCAP, SCORES
            )
            acc, p = warpgroup_mma_wait(0, [acc_later, p])
            leave(values, k_n)
            acc *= gl.expand_dims(gl.convert_layout(correction, OF_ROWS), 1)
            p = gl.convert_layout(p_new.to(dtype), WEIGHTS)
            k_n += 1
        v = values[0].index(wait_full(values, k_n))
        acc_later = warpgroup_mma(p, v, acc, is_async=True)
        n, k_n = n + 1, k_n + 1
        facts = _posted(work, n)
        q = _load_queries(q_ptr, facts, stride_qt, GROUP, G, D, QUERIES)
        acc, p = warpgroup_mma_wait(0, [acc_later, p])
        leave(values, k_n - 1)
        place, there = _places(query, end, kv_head, stride_ot, GROUP, G, D, SUMS)
        acc /= gl.expand_dims(gl.convert_layout(l, OF_ROWS), 1)
        gl.store(out_ptr + place, acc.to(dtype), there)


@gluon.jit(
    do_not_specialize=["num_items", "num_seqs", "HKV", "stride_table"],
    do_not_specialize_on_alignment=["tables_ptr", "cu_q_ptr", "cu_k_ptr"],
)
def _hopper_prefill_kernel(
    q_ptr, k_desc, v_desc, out_ptr, counter_ptr, tables_ptr, cu_q_ptr, cu_k_ptr, sinks_ptr,
    num_items, num_seqs, HKV, scale, stride_qt, stride_ot, stride_table,
    G: gl.constexpr, D: gl.constexpr, S: gl.constexpr, WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    ONE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    keys = make_ring(gl.allocate_shared_memory(dtype, [_STAGES, _KEYS, D], k_desc.layout), _STAGES)
    values = make_ring(
        gl.allocate_shared_memory(dtype, [_STAGES, _KEYS, D], v_desc.layout), _STAGES
    )
    work = make_ring(gl.allocate_shared_memory(gl.int32, [_STAGES * _FACTS, 1], ONE), _STAGES)
    fence_async_shared()
    rings = keys, values, work
    gl.warp_specialize(
        [
            (_attend, (rings, q_ptr, out_ptr, sinks_ptr, scale, stride_qt, stride_ot,
                0, G, D, WINDOW, SOFTCAP)),
            (_attend, (rings, q_ptr, out_ptr, sinks_ptr, scale, stride_qt, stride_ot,
                1, G, D, WINDOW, SOFTCAP)),
            (_copy, (rings, k_desc, v_desc, counter_ptr, tables_ptr, cu_q_ptr, cu_k_ptr, num_items,
                num_seqs, HKV, stride_table, G, D, S, WINDOW)),
        ],
        [4, 1],  # warps, beside the first four
        [240, 24],  # registers of a thread; the first have 240, too
    )  # fmt: skip


def hopper_prefill(
    q: torch.Tensor,
    keys: KVCache,
    block_tables: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    scoring: Scoring,
    shared: dict[Hashable, Any],
    out: torch.Tensor,
) -> None:
    """`prefill._attend`, if `takes_hopper_kernel`."""
    (T, Hq, D), Hkv, P = q.shape, keys.k.shape[-2], len(cu_seqlens_q) - 1
    G, S = Hq // Hkv, KEYS if block_tables is None else keys.k.shape[1]
    k, v = (tiles_of(x.view(-1, Hkv * D), KEYS, D) for x in keys[:2])
    if "tiles" not in shared:  # the counter of tiles: 0 before and after each kernel
        shared["tiles"] = torch.zeros(1, dtype=torch.int32, device=q.device)
    num_items = Hkv * (T // (ROWS // G) + P)
    _hopper_prefill_kernel[(min(num_multiprocessors(q.device.index), num_items),)](
        q, k, v, out, shared["tiles"],
        block_tables, cu_seqlens_q, cu_seqlens_k, scoring.sinks, num_items, P, Hkv,
        scoring.scale * LOG2E.value, q.stride(0), out.stride(0),
        0 if block_tables is None else block_tables.stride(0),
        G=G, D=D, S=S, WINDOW=scoring.window, SOFTCAP=scoring.softcap, num_warps=4,
    )  # fmt: skip
