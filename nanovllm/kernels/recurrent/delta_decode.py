"""Gated DeltaNet for one token of each of many sequences: all of it, in one kernel.

The state of a value head is V x K float32, 64 KiB for V = K = 128: the time of a step is that of
reading and writing states, once each. A program has a key head of a sequence with all of its G
value heads, whose states are adjacent, and takes BLOCK_V rows at a time; the next rows are on their
way while it computes.

The convolution's tail may be shifted only if nobody will read the old one. A program has the
channels of q and k, which its value heads share, and those of their v; nobody else reads or writes
these, so there is no race. If value heads, or their rows, were split over programs, these would
count who has read, and, for the norm over V, who has a result: a fence that waits for all that was
written, and a round trip to memory or two, at the end of each program. For one sequence, which has
a program for each key head only, that would cost about what it saves (an estimate: 1 us to read 64
KiB, 2 to 3 us to count), as the first rows are read before the product that gives q, k and v ends.

States and tails may be read that early as no other kernel of the step writes these rows: sequences
that decode have no prompt in it.

Both products with a state are taken before it changes, together:

    o = S' q = (exp(g) S + d k^T) q = exp(g) S q + d (k.q)

Letters: see `nanovllm.tensors.delta_net`; D decodes, G = Hv / Hk.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.activation import activate
from nanovllm.kernels.attention.common import metadata
from nanovllm.kernels.device_features import launch_dependents, pdl_options, wait
from nanovllm.kernels.recurrent.formulas import check_layout, gated, log_decay, normalised
from nanovllm.tensors.delta_net import DeltaNet, DeltaState
from nanovllm.utils.integers import next_power_of_2

FEW_PROGRAMS = 132  # one for each multiprocessor of an H100
# Numbers of a state that a program takes at once: of few programs whole heads; of more so many that
# several run on a multiprocessor (measured on an H200: of 256 sequences 3.8 TB/s, of 32 numbers for
# a thread 3.0).
FEW_NUMBERS, MANY_NUMBERS, NUMBERS_PER_THREAD = 2**14, 2**13, 64


@triton.jit
def _stored(
    tail_ptr, conv_ptr, channel, num_stored, C: tl.constexpr, J: tl.constexpr, J_PAD: tl.constexpr
):  # fmt: skip
    """The tail of some channels, of which `num_stored` inputs count, and the weights of these."""
    j, c = tl.arange(0, J_PAD)[:, None], channel[None, :]
    x = tl.load(tail_ptr + j * C + c, mask=j < num_stored, other=0.0)
    return x, tl.load(conv_ptr + c * J + j, mask=j < J, other=0.0)


@triton.jit
def _convolve_and_shift(
    new, x, weight, tail_ptr, channel, C: tl.constexpr, J: tl.constexpr, J_PAD: tl.constexpr
):  # fmt: skip
    """SiLU of the convolution of some channels at the newest token, which enters their tail."""
    j = tl.arange(0, J_PAD)[:, None]
    x = tl.where(j == J - 1, new[None, :], x)
    total = tl.sum(x.to(tl.float32) * weight.to(tl.float32), 0)
    tl.debug_barrier()  # all threads have read the tail
    tl.store(tail_ptr + (j - 1) * C + channel[None, :], x, mask=(j > 0) & (j < J))
    return activate(total, False)


@triton.jit
def _of_head(x, g_of, g):
    """One of the numbers x of value heads."""
    return tl.sum(tl.where(g_of == g, x, 0.0), 0)


@triton.jit
def _value_heads(
    q, k, betas, decays, norm, S, mask, v_tail, v_weight, v_new, mixed_ptr, z_ptr, conv_ptr,
    tail_ptr, tiles_ptr, out_ptr, v_col, columns, num_stored, eps,
    G: tl.constexpr, G_PAD: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    J: tl.constexpr, J_PAD: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Change the states of the G value heads of a key head, and write their outputs. The first tile
    S and what belongs to the convolution of its channels, v_col, have been read.
    """
    PARTS: tl.constexpr = V // BLOCK_V
    g_of, part_of, k_q = tl.arange(0, G_PAD), tl.arange(0, PARTS)[:, None], tl.sum(k * q, 0)
    q, k = q[None, :], k[None, :]
    for g in range(G):
        z = tl.load(z_ptr + g * V + columns)
        beta, decay = _of_head(betas, g_of, g), _of_head(decays, g_of, g)
        outputs = tl.zeros([PARTS, BLOCK_V], tl.float32)
        for part in range(PARTS):
            now, tail, weight, new = S, v_tail, v_weight, v_new
            row = (g * PARTS + part) * BLOCK_V
            if row + BLOCK_V < G * V:  # on its way while this tile is computed
                S = tl.load(tiles_ptr + (row + BLOCK_V) * K, mask=mask, other=0.0)
                col = v_col + (row + BLOCK_V)
                v_tail, v_weight = _stored(tail_ptr, conv_ptr, col, num_stored, C, J, J_PAD)
                v_new = tl.load(mixed_ptr + col)
            v = _convolve_and_shift(new, tail, weight, tail_ptr, v_col + row, C, J, J_PAD)
            S_k, S_q = tl.sum(now * k, 1), tl.sum(now * q, 1)
            d = beta * (v - decay * S_k)
            tl.store(tiles_ptr + row * K, decay * now + d[:, None] * k)
            outputs = tl.where(part_of == part, (decay * S_q + d * k_q)[None, :], outputs)
        y = gated(outputs, tl.sum(outputs * outputs), z, norm, eps, V)
        tl.store(out_ptr + g * V + columns, y.to(out_ptr.dtype.element_ty))


@metadata
def _delta_decode_kernel(
    mixed_ptr, ba_ptr, conv_ptr, A_log_ptr, dt_bias_ptr, norm_ptr, tail_ptr, memory_ptr,
    slots_ptr, lens_ptr, out_ptr, eps, stride_mixed, stride_ba,
    Hk: tl.constexpr, Hv: tl.constexpr, K: tl.constexpr, V: tl.constexpr, J: tl.constexpr,
    J_PAD: tl.constexpr, G_PAD: tl.constexpr, BLOCK_V: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # One program: a key head of one sequence, and its G value heads, a tile of BLOCK_V rows of a
    # state after another. All that can be is read before the wait.
    G: tl.constexpr = Hv // Hk
    C: tl.constexpr = 2 * Hk * K + Hv * V
    launch_dependents(PDL)
    key_head, seq = tl.program_id(0), tl.program_id(1).to(tl.int64)
    length, row = tl.load(lens_ptr + seq), tl.load(slots_ptr + seq).to(tl.int64)
    num_stored = tl.where(length > 1, J - 1, 0)
    first, k_of, v_of = key_head * G, tl.arange(0, K), tl.arange(0, BLOCK_V)
    tiles_ptr = memory_ptr + (row * Hv + first) * V * K + v_of[:, None] * K + k_of[None, :]
    mask = k_of[None, :] < tl.where(length > 1, K, 0)
    S = tl.load(tiles_ptr, mask=mask, other=0.0)
    tail_ptr += row * (J - 1) * C
    q_col, k_col = key_head * K + k_of, (Hk + key_head) * K + k_of
    v_col = 2 * Hk * K + first * V + v_of
    q_tail, q_weight = _stored(tail_ptr, conv_ptr, q_col, num_stored, C, J, J_PAD)
    k_tail, k_weight = _stored(tail_ptr, conv_ptr, k_col, num_stored, C, J, J_PAD)
    v_tail, v_weight = _stored(tail_ptr, conv_ptr, v_col, num_stored, C, J, J_PAD)
    head = first + tl.arange(0, G_PAD)
    A_log = tl.load(A_log_ptr + head, mask=head < first + G, other=0.0)
    dt_bias = tl.load(dt_bias_ptr + head, mask=head < first + G, other=0.0)
    columns = tl.arange(0, V // BLOCK_V)[:, None] * BLOCK_V + v_of[None, :]
    norm = tl.load(norm_ptr + columns)
    wait(PDL)
    mixed_ptr += seq * stride_mixed
    ba_ptrs = ba_ptr + seq * stride_ba + head
    out_ptr += (seq * Hv + first) * V
    if length == 0:  # padding
        for g in range(G):
            tl.store(out_ptr + g * V + columns, tl.zeros_like(norm).to(out_ptr.dtype.element_ty))
        return
    q_new, k_new = tl.load(mixed_ptr + q_col), tl.load(mixed_ptr + k_col)
    v_new = tl.load(mixed_ptr + v_col)
    betas = tl.sigmoid(tl.load(ba_ptrs, mask=head < first + G, other=0.0).to(tl.float32))
    a = tl.load(ba_ptrs + Hv, mask=head < first + G, other=0.0)
    decays = tl.exp(log_decay(a, A_log, dt_bias))
    q = _convolve_and_shift(q_new, q_tail, q_weight, tail_ptr, q_col, C, J, J_PAD)
    k = _convolve_and_shift(k_new, k_tail, k_weight, tail_ptr, k_col, C, J, J_PAD)
    _value_heads(
        normalised(q, 0) * K**-0.5, normalised(k, 0), betas, decays, norm, S, mask, v_tail,
        v_weight, v_new, mixed_ptr, mixed_ptr + C + first * V, conv_ptr, tail_ptr, tiles_ptr,
        out_ptr, v_col, columns, num_stored, eps, G, G_PAD, K, V, C, J, J_PAD, BLOCK_V,
    )  # fmt: skip


def decode(
    mixed: torch.Tensor,
    ba: torch.Tensor,
    layer: DeltaNet,
    state: DeltaState,
    slots: torch.Tensor,
    context_lens: torch.Tensor,
) -> torch.Tensor:
    """One token of each of D sequences, see `nanovllm.recurrent.delta_rule.decode`.

    Args:
        mixed: [D, C + Hv V], rows may lie apart.
        ba: [D, 2 Hv], likewise.
        slots, context_lens: [D] int32.

    Returns:
        [D, Hv V]
    """
    D, (Hv, V, K), J = len(mixed), state.memory.shape[1:], layer.conv.shape[1]
    check_layout(mixed, ba, layer, state)
    out = torch.empty(D, Hv * V, dtype=mixed.dtype, device=mixed.device)
    few = D * layer.num_key_heads <= FEW_PROGRAMS
    numbers = min(FEW_NUMBERS if few else MANY_NUMBERS, V * K)
    _delta_decode_kernel[(layer.num_key_heads, D)](
        mixed, ba, *layer[:4], *state, slots, context_lens, out, layer.eps,
        mixed.stride(0), ba.stride(0),
        Hk=layer.num_key_heads, Hv=Hv, K=K, V=V, J=J, J_PAD=next_power_of_2(J),
        G_PAD=next_power_of_2(Hv // layer.num_key_heads),
        BLOCK_V=numbers // K, num_warps=max(1, numbers // (32 * NUMBERS_PER_THREAD)),
        num_stages=1, **pdl_options(mixed),
    )  # fmt: skip
    return out
