"""Functions of attention over the paged KV cache, shared by prefill and decode kernels.

Online softmax in base 2 (Milakov and Gimelshein, 2018; Dao et al., 2022). A tile of keys is found
through the block table: with one look-up if the tile lies inside a block, else one per key. Blocks
beyond a sequence's context are never read.

Letters: B sequences, Hq/Hkv heads, G = Hq / Hkv, D head size, S block size, W table width.
"""

import triton
import triton.language as tl

from nanovllm.kernels.attention.kv_cache import exponents_at, power_of_two

LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1e30)  # value of a maximum of scores


@triton.jit
def slots_of(table_ptr, start, BLOCK_N: tl.constexpr, S: tl.constexpr, end):
    """The cache slots [BLOCK_N] int64 of positions from `start` on, a multiple of BLOCK_N; from
    `end` on, arbitrary ones in the cache.
    """
    n = tl.arange(0, BLOCK_N)
    if S >= BLOCK_N:
        block = tl.load(table_ptr + start // S).to(tl.int64)
        return block * S + (start % S) + n
    else:
        pos = start + n
        block = tl.load(table_ptr + pos // S, mask=pos < end, other=0).to(tl.int64)
        return block * S + pos % S


@triton.jit
def exponents_ahead(
    k_ptr, v_ptr, table_ptr, start, end, BLOCK_N: tl.constexpr, S: tl.constexpr
):  # fmt: skip
    """The exponents of keys and values [BLOCK_N] of the tile from `start` on, arbitrary from `end`
    on; 0 if there are none. They should be read a tile ahead of their use: Triton's pipeline does
    not move loads of single bytes.
    """
    if k_ptr is None:
        return 0, 0
    else:
        start = tl.where(start < end, start, (end - 1) // BLOCK_N * BLOCK_N)
        slots = slots_of(table_ptr, start, BLOCK_N, S, end)
        where = exponents_at(slots, tl.program_id(0), tl.num_programs(0), S)
        return tl.load(k_ptr + where), tl.load(v_ptr + where)


@triton.jit
def across(x, LEFT: tl.constexpr):
    """Broadcast x: [M] of queries over the columns of [M, D]; with `LEFT`, the rows of [D, M]."""
    return x[None, :] if LEFT else x[:, None]


@triton.jit
def before_keys(sinks_ptr, head, used, ROWS: tl.constexpr):
    """The running maximum and sum [ROWS] before the first key: the head's sink, if it has one."""
    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    if sinks_ptr is not None:
        m = tl.load(sinks_ptr + head, mask=used, other=float("-inf")).to(tl.float32) * LOG2E
        l = tl.where(used, 1.0, l)
    return m, l


@triton.jit
def weigh(
    s, m, l, k_exponents, v_exponents, seen, scale, visible,
    MASKED: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax, over products s [M, BLOCK_N] of queries and keys.

    m, l: [M] running maximum and sum. The exponents [BLOCK_N] int8, if keys and values are FP8, are
    arbitrary where not `seen`. visible: [M or 1, BLOCK_N] bool. Maxima are of scaled scores, in
    units of log 2; the exponents of values are added to these, so that their codes have weights of
    at most 1.

    Returns the new m and l, the weights [M, BLOCK_N], and the factor [M] on earlier sums.
    """
    if k_exponents is not None:
        s *= power_of_two(k_exponents)[None, :]
    if SOFTCAP > 0:
        CAP: tl.constexpr = SOFTCAP * LOG2E
        s = CAP - 2 * CAP / (tl.exp2(s * (scale * 2 / SOFTCAP)) + 1)  # CAP * tanh
        scale = 1.0
    if MASKED:
        s = tl.where(visible, s, float("-inf"))
    if v_exponents is not None:
        exponents = v_exponents.to(tl.float32)
        if MASKED:
            exponents = tl.where(seen, exponents, 0.0)
        s = s * scale + exponents[None, :]
        scale = 1.0
    m_new = tl.maximum(m, tl.max(s, 1) * scale)
    if WINDOW:  # a row may have seen no key yet
        m_new = tl.maximum(m_new, LOWEST)
    p = tl.exp2(s * scale - m_new[:, None])
    correction = tl.exp2(m - m_new)
    if v_exponents is not None:
        l = l * correction + tl.sum(p * power_of_two(-exponents)[None, :], 1)
    else:
        l = l * correction + tl.sum(p, 1)
    return m_new, l, p, correction


@triton.jit
def load_tile(
    k_ptr, v_ptr, slots, seen, stride_slot,
    D: tl.constexpr, D_PAD: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Load keys [D_PAD, BLOCK_N] and values [BLOCK_N, D_PAD] from the slots. Those not `seen` are
    not read: they may have any content, NaN included.
    """
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


# Widths and slices of the step's metadata change from step to step: no variant per alignment.
metadata = triton.jit(
    do_not_specialize=[
        *("stride_table", "stride_part", "num_rows", "num_seqs", "first_head", "step"),
        *("num_splits", "prefix_splits"),
    ],
    do_not_specialize_on_alignment=[
        *("tables_ptr", "lens_ptr", "cu_q_ptr", "cu_k_ptr", "positions_ptr", "slots_ptr"),
        "limits_ptr",
    ],
)
