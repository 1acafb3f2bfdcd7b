"""The two kernels of `delta_prompt.py` with products: of chunks, all at once; and of prompts, a
chunk after another.

The formulas are those of `nanovllm/recurrent/delta_rule.py`, except that U and W never exist: as
U - W S^T = (I + A)^-1 diag(beta) (V - diag(exp(G)) K S^T), the second kernel needs the inverse, of
CHUNK columns, in the place of both, of V + K.

**The inverse** is put together from those of blocks on the diagonal, of sizes 1, 2, 4, ...: two
neighbours, T1 and T2, and the block B of A below the first and left of the second give

    [T1 0; -T2 B T1  T2]

All pairs of a size at once are T - T A' T, with A' the blocks B of A. Each number of it is, like
those of T itself, beta_i times a product of k_i with what is left of k_j after tokens that each
shorten it, so none is above 1 and rounding errors stay as they are. (Powers of A, by which the
inverse could be had as well, reach 1e17 where a text repeats itself.)

**Numbers in 16 bits are float16**, also of a bfloat16 model: all are at most 1, but for values and
states, which are held in units of UNIT, so that they can reach a million. Emulated over 8,192
tokens in four mixes of decays and repeated keys, the results of the gated norm are 3e-4 to 1.1e-3
(root of the mean square) from a float64 recurrence, the same at the end as in the middle; in TF32,
as tensor cores cut it off, 5e-4 to 1.8e-3 at twice the bytes, in bfloat16 2.6e-3 to 8.4e-3.
Rounding of the results to bfloat16 is 1.6e-3. Sums, gates and the state between chunks are float32.
A model in float32 has all in float32, and a product is three of TF32: where it is exact, it has no
tensor cores, and many kibibytes of a thread's registers lie in memory.

Letters: see `nanovllm.tensors.delta_net`; T tokens of P prompts, N chunks.
"""

import triton
import triton.language as tl

from nanovllm.kernels.attention.common import metadata
from nanovllm.kernels.device_features import launch_dependents, wait
from nanovllm.kernels.recurrent.formulas import log_decay
from nanovllm.kernels.recurrent.rows import move_tail

CHUNK = tl.constexpr(64)
UNIT = tl.constexpr(16.0)
LOWEST_G = tl.constexpr(-128.0)  # exp of it is 0


@triton.jit
def _sums(g):
    """Running sums [CHUNK] of g in two parts, whose own differences are exact and near exact: where
    some of g are -100, those of one sum would have few digits.
    """
    coarse = tl.floor(g * 1024.0) / 1024.0
    return tl.cumsum(coarse, 0), tl.cumsum(g - coarse, 0)


@triton.jit
def _join(T, A, SIZE: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    """The inverses of blocks of I + A of twice the SIZE on the diagonal, from those of the SIZE."""
    i, j = tl.arange(0, CHUNK)[:, None] // SIZE, tl.arange(0, CHUNK)[None, :] // SIZE
    below, T_rounded = tl.where((i % 2 == 1) & (j == i - 1), A, 0.0).to(DTYPE), T.to(DTYPE)
    product = tl.dot(below, T_rounded, input_precision=PRECISION).to(DTYPE)
    return T - tl.dot(T_rounded, product, input_precision=PRECISION)


@triton.jit
def _inverse(A, DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    """The inverse of I + A [CHUNK, CHUNK] float32, of which what is below the diagonal is read."""
    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    T = tl.where(i == j, 1.0, tl.where((i % 2 == 1) & (j == i - 1), -A, 0.0))
    for level in tl.static_range(1, 6):
        T = _join(T, A, 1 << level, DTYPE, PRECISION)
    return T


@metadata
def _delta_chunk_kernel(
    ba_ptr, A_log_ptr, dt_bias_ptr, cu_q_ptr, chunks_ptr, qk_ptr, inverses_ptr, scores_ptr,
    factors_ptr, stride_ba, num_rows,
    Hk: tl.constexpr, Hv: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # One program: a chunk's value head.
    DTYPE: tl.constexpr = qk_ptr.dtype.element_ty
    launch_dependents(PDL)
    head, chunk = tl.program_id(0), tl.program_id(1)
    A_log, dt_bias = tl.load(A_log_ptr + head), tl.load(dt_bias_ptr + head)
    wait(PDL)
    seq, first = tl.load(chunks_ptr + 2 * chunk), tl.load(chunks_ptr + 2 * chunk + 1)
    if seq < 0:
        return
    i = tl.arange(0, CHUNK)
    row, used = (first + i).to(tl.int64), i < tl.load(cu_q_ptr + seq + 1) - first
    ba_ptrs = ba_ptr + row * stride_ba + head
    beta = tl.sigmoid(tl.load(ba_ptrs, mask=used, other=0.0).to(tl.float32))
    g = log_decay(tl.load(ba_ptrs + Hv, mask=used, other=0.0), A_log, dt_bias)
    sums, rest = _sums(tl.where(used, tl.maximum(g, LOWEST_G), 0.0))
    from_start = tl.exp(sums + rest)
    factor_ptrs = factors_ptr + head * num_rows + row
    tl.store(factor_ptrs, from_start, mask=used)
    tl.store(factor_ptrs + Hv * num_rows, beta * from_start, mask=used)
    to_end = tl.exp((tl.min(sums, 0) - sums) + (tl.max(rest, 0) - rest))
    tl.store(factor_ptrs + 2 * Hv * num_rows, to_end, mask=used)
    since = (sums[:, None] - sums[None, :]) + (rest[:, None] - rest[None, :])
    decay = tl.exp(tl.where(i[:, None] >= i[None, :], since, float("-inf")))
    q_ptrs = qk_ptr + (row * Hk + head // (Hv // Hk))[:, None] * K + tl.arange(0, BLOCK_K)[None, :]
    keys = num_rows.to(tl.int64) * (Hk * K)
    q_k = tl.zeros([CHUNK, CHUNK], tl.float32)
    k_k = q_k
    for start in range(0, K, BLOCK_K):
        q = tl.load(q_ptrs + start, mask=used[:, None], other=0.0)
        k = tl.load(q_ptrs + keys + start, mask=used[:, None], other=0.0)
        q_k = tl.dot(q, k.T, q_k, input_precision=PRECISION)
        k_k = tl.dot(k, k.T, k_k, input_precision=PRECISION)
    squares = (row * Hv + head)[:, None] * CHUNK + i[None, :]
    tl.store(scores_ptr + squares, (decay * q_k).to(DTYPE), mask=used[:, None])
    inverse = _inverse(beta[:, None] * decay * k_k, DTYPE, PRECISION)
    tl.store(inverses_ptr + squares, inverse.to(DTYPE), mask=used[:, None])


@metadata
def _delta_scan_kernel(
    mixed_ptr, tail_ptr, memory_ptr, slots_ptr, cu_q_ptr, cu_k_ptr, qk_ptr, v_ptr,
    inverses_ptr, scores_ptr, factors_ptr, stride_mixed, num_rows,
    Hk: tl.constexpr, Hv: tl.constexpr, K: tl.constexpr, V: tl.constexpr, J: tl.constexpr,
    J_PAD: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_C: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    # One program: BLOCK_V rows of the state of a prompt's value head, held as [K, BLOCK_V]. Its
    # values become its outputs, in the same place. The new tail is written here, too, as the kernel
    # before reads the old one: each program has some channels.
    C: tl.constexpr = 2 * Hk * K + Hv * V
    DTYPE: tl.constexpr = qk_ptr.dtype.element_ty
    launch_dependents(PDL)
    part, head, seq = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin, end = tl.load(cu_q_ptr + seq), tl.load(cu_q_ptr + seq + 1)
    length = tl.load(cu_k_ptr + seq + 1) - tl.load(cu_k_ptr + seq)
    has_past = (length > end - begin) & (begin < end)
    slot = tl.load(slots_ptr + seq).to(tl.int64)
    i, k_col, v_col = tl.arange(0, CHUNK), tl.arange(0, K), part * BLOCK_V + tl.arange(0, BLOCK_V)
    memory_ptrs = memory_ptr + (slot * Hv + head) * V * K + v_col[:, None] * K + k_col[None, :]
    mask = k_col[None, :] < tl.where(has_past, K, 0)
    S = tl.load(memory_ptrs, mask=mask, other=0.0).T * (1.0 / UNIT)
    wait(PDL)
    if begin >= end:  # padding
        return
    factors_ptr += head * num_rows
    keys = num_rows.to(tl.int64) * (Hk * K)
    for first in range(begin, end, CHUNK):
        row, used = (first + i).to(tl.int64), i < end - first
        q_ptrs = qk_ptr + (row * Hk + head // (Hv // Hk))[:, None] * K + k_col[None, :]
        head_row = (row * Hv + head)[:, None]
        squares = head_row * CHUNK + i[None, :]
        q = tl.load(q_ptrs, mask=used[:, None], other=0.0)
        k = tl.load(q_ptrs + keys, mask=used[:, None], other=0.0)
        inverse = tl.load(inverses_ptr + squares, mask=used[:, None], other=0.0)
        scores = tl.load(scores_ptr + squares, mask=used[:, None], other=0.0)
        v_ptrs = v_ptr + head_row * V + v_col[None, :]
        v = tl.load(v_ptrs, mask=used[:, None], other=0.0)
        from_start = tl.load(factors_ptr + row, mask=used, other=0.0)
        of_keys = tl.load(factors_ptr + Hv * num_rows + row, mask=used, other=0.0)
        to_end = tl.load(factors_ptr + 2 * Hv * num_rows + row, mask=used, other=0.0)
        whole = tl.load(factors_ptr + tl.minimum(first + CHUNK, end) - 1)
        rounded = S.to(DTYPE)
        seen = v - of_keys[:, None] * tl.dot(k, rounded, input_precision=PRECISION)
        d = tl.dot(inverse, seen.to(DTYPE), input_precision=PRECISION)
        o = from_start[:, None] * tl.dot(q, rounded, input_precision=PRECISION)
        o = tl.dot(scores, d.to(DTYPE), o, input_precision=PRECISION) * K**-0.5
        tl.store(v_ptrs, o.to(DTYPE), mask=used[:, None])
        left = (to_end[:, None] * d).to(DTYPE)
        S = tl.dot(k.T, left, S * whole, input_precision=PRECISION)
    tl.store(memory_ptrs, S.T * UNIT)
    channels = (head * tl.num_programs(0) + part) * BLOCK_C + tl.arange(0, BLOCK_C)
    move_tail(
        mixed_ptr + begin.to(tl.int64) * stride_mixed, tail_ptr + slot * (J - 1) * C, end - begin,
        tl.where(has_past, J - 1, 0), channels, stride_mixed, C, J, J_PAD,
    )  # fmt: skip
