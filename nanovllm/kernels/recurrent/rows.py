"""The two kernels of `delta_prompt.py` without products: convolutions before, the gated norm after
those of `chunks.py`.

Letters: see `nanovllm.tensors.delta_net`; T tokens of P prompts.
"""

import triton
import triton.language as tl

from nanovllm.kernels.activation import activate
from nanovllm.kernels.attention.common import metadata
from nanovllm.kernels.device_features import launch_dependents, wait
from nanovllm.kernels.recurrent.formulas import gated, normalised


@triton.jit
def _convolve(
    mixed_ptr, tail_ptr, conv_ptr, position, used, stored, channels, stride_mixed,
    C: tl.constexpr, J: tl.constexpr,
):  # fmt: skip
    """SiLU of the convolution of some channels at positions of a prompt, 0 where they are not used.
    `mixed_ptr` is at its first row, and `tail_ptr` at its tail, of which `stored` inputs count.
    """
    total = tl.zeros([position.shape[0], channels.shape[0]], tl.float32)
    for j in tl.static_range(J):
        source = position + (j - J + 1)
        now = mixed_ptr + source.to(tl.int64) * stride_mixed
        ptrs = tl.where(source < 0, tail_ptr + (source + J - 1) * C, now)
        there = used & (source >= -stored)
        x = tl.load(ptrs[:, None] + channels[None, :], mask=there[:, None], other=0.0)
        weight = tl.load(conv_ptr + channels * J + j).to(tl.float32)
        total += x.to(tl.float32) * weight[None, :]
    return activate(total, False)


@metadata
def _delta_convolve_kernel(
    mixed_ptr, ba_ptr, conv_ptr, tail_ptr, slots_ptr, cu_q_ptr, cu_k_ptr, chunks_ptr, qk_ptr,
    v_ptr, unit, stride_mixed, stride_ba, num_rows,
    Hk: tl.constexpr, Hv: tl.constexpr, K: tl.constexpr, V: tl.constexpr, J: tl.constexpr,
    ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # One program: ROWS rows of a chunk and of a head of q, k or v. Values are beta v / unit.
    C: tl.constexpr = 2 * Hk * K + Hv * V
    launch_dependents(PDL)
    head, part, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    wait(PDL)
    seq = tl.load(chunks_ptr + 2 * chunk)
    if seq < 0:
        return
    begin, end = tl.load(cu_q_ptr + seq), tl.load(cu_q_ptr + seq + 1)
    row = tl.load(chunks_ptr + 2 * chunk + 1) + part * ROWS + tl.arange(0, ROWS)
    position, used, row = row - begin, row < end, row.to(tl.int64)
    length = tl.load(cu_k_ptr + seq + 1) - tl.load(cu_k_ptr + seq)
    stored = tl.where(length > end - begin, J - 1, 0)
    tail_ptr += tl.load(slots_ptr + seq).to(tl.int64) * (J - 1) * C
    mixed_ptr += begin.to(tl.int64) * stride_mixed
    if head < 2 * Hk:
        k_col = tl.arange(0, K)
        key = _convolve(
            mixed_ptr, tail_ptr, conv_ptr, position, used, stored, head * K + k_col, stride_mixed,
            C, J,
        )  # fmt: skip
        own = (head // Hk * num_rows.to(tl.int64) + row) * Hk + head % Hk
        ptrs = qk_ptr + own[:, None] * K + k_col[None, :]
        tl.store(ptrs, normalised(key, 1).to(qk_ptr.dtype.element_ty), mask=used[:, None])
    else:
        v_col = (head - 2 * Hk) * V + tl.arange(0, V)
        value = _convolve(
            mixed_ptr, tail_ptr, conv_ptr, position, used, stored, 2 * Hk * K + v_col, stride_mixed,
            C, J,
        )  # fmt: skip
        b = tl.load(ba_ptr + row * stride_ba + head - 2 * Hk, mask=used, other=0.0)
        value *= (tl.sigmoid(b.to(tl.float32)) / unit)[:, None]
        v_ptrs = v_ptr + row[:, None] * (Hv * V) + v_col[None, :]
        tl.store(v_ptrs, value.to(v_ptr.dtype.element_ty), mask=used[:, None])


@triton.jit
def move_tail(
    mixed_ptr, tail_ptr, num, stored, channels, stride_mixed,
    C: tl.constexpr, J: tl.constexpr, J_PAD: tl.constexpr,
):  # fmt: skip
    """Make the last J - 1 inputs of some channels the tail: of `num` rows, if they are fewer, and
    of the old tail, of which `stored` count.
    """
    j = tl.arange(0, J_PAD)
    source = num + (j - J + 1)
    now = mixed_ptr + source.to(tl.int64) * stride_mixed
    ptrs = tl.where(source < 0, tail_ptr + (source + J - 1) * C, now)
    mask = (j < J - 1)[:, None] & (channels < C)[None, :]
    there = mask & (source >= -stored)[:, None]
    x = tl.load(ptrs[:, None] + channels[None, :], mask=there, other=0.0)
    tl.debug_barrier()  # all threads have read the tail
    tl.store(tail_ptr + j[:, None] * C + channels[None, :], x, mask=mask)


@metadata
def _delta_norm_kernel(
    o_ptr, mixed_ptr, norm_ptr, cu_q_ptr, out_ptr, unit, eps, stride_mixed, num_seqs, num_rows,
    Hv: tl.constexpr, V: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # One program: ROWS rows of a value head, whose outputs are o unit. Padding becomes 0.
    launch_dependents(PDL)
    head, row = tl.program_id(0), tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    used, there = row < tl.load(cu_q_ptr + num_seqs), row < num_rows
    row, col = row.to(tl.int64)[:, None], (head * V + tl.arange(0, V))[None, :]
    weight = tl.load(norm_ptr + tl.arange(0, V))[None, :]
    wait(PDL)
    own = row * (Hv * V) + col
    o = tl.load(o_ptr + own, mask=used[:, None], other=0.0).to(tl.float32) * unit
    z = tl.load(mixed_ptr + row * stride_mixed + C + col, mask=used[:, None], other=0.0)
    y = gated(o, tl.sum(o * o, 1, keep_dims=True), z, weight, eps, V)
    tl.store(out_ptr + own, y.to(out_ptr.dtype.element_ty), mask=there[:, None])
