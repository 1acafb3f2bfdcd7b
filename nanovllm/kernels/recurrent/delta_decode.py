"""Gated DeltaNet for one token of each of many sequences: all of it, in one kernel.

The state of a value head is V x K float32, 64 KiB for V = K = 128: the time of a step is that of
reading and writing states once. A program has a key head of a sequence with all of its G value
heads, which lie side by side in the state, and takes BLOCK_V rows at a time; the next rows are on
their way while it computes.

Whoever shifts the convolution's tail must know that nobody will read the old one. As a program has
the channels of q and k that its value heads share, and those of its v, nobody else does, so there
is no race. Splitting value heads, or their rows, over programs would need a count of those that
have read, and, for the norm over V, one more of those that have results: a fence and a round trip
to memory or two at the end of each program. That costs what it would save even for one sequence,
whose programs (one per key head) read their first rows before the product that gives q, k and v has
ended.

Both products with the state are taken before it changes, together:

    o = S' q = (exp(g) S + d k^T) q = exp(g) S q + d (k.q)

Letters: see `nanovllm.tensors.delta_net`; D decodes, G = Hv / Hk.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.activation import activate
from nanovllm.kernels.attention.common import metadata
from nanovllm.kernels.device_features import launch_dependents, pdl_options, wait
from nanovllm.kernels.recurrent.formulas import gated, log_decay, normalised
from nanovllm.tensors.delta_net import DeltaNet, DeltaState
from nanovllm.utils.integers import next_power_of_2

# Numbers of a state that a program takes at once: of few programs (up to one for each
# multiprocessor of an H100) whole heads; of more so many that several run on a multiprocessor.
FEW_PROGRAMS, FEW_NUMBERS, MANY_NUMBERS = 132, 2**14, 2**12
NUMBERS_PER_THREAD = 32


@triton.jit
def _convolve_and_shift(
    mixed_ptr, tail_ptr, conv_ptr, channels, stored,
    C: tl.constexpr, J: tl.constexpr, J_PAD: tl.constexpr,
):  # fmt: skip
    """SiLU of the convolution of some channels at the newest token, which enters their tail, of
    which `stored` inputs count.
    """
    j, c = tl.arange(0, J_PAD)[:, None], channels[None, :]
    x = tl.load(tail_ptr + j * C + c, mask=j < stored, other=0.0)
    x = tl.where(j == J - 1, tl.load(mixed_ptr + c), x)
    weight = tl.load(conv_ptr + c * J + j, mask=j < J, other=0.0)
    total = tl.sum(x.to(tl.float32) * weight.to(tl.float32), 0)
    tl.debug_barrier()  # all threads have read the tail
    tl.store(tail_ptr + (j - 1) * C + c, x, mask=(j > 0) & (j < J))
    return activate(total, False)


@metadata
def _delta_decode_kernel(
    mixed_ptr, ba_ptr, conv_ptr, A_log_ptr, dt_bias_ptr, norm_ptr, tail_ptr, memory_ptr,
    slots_ptr, lens_ptr, out_ptr, eps, stride_mixed, stride_ba,
    Hk: tl.constexpr, Hv: tl.constexpr, K: tl.constexpr, V: tl.constexpr, J: tl.constexpr,
    J_PAD: tl.constexpr, BLOCK_V: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # One program: a key head of one sequence, and its G value heads, in G * PARTS tiles.
    G: tl.constexpr = Hv // Hk
    PARTS: tl.constexpr = V // BLOCK_V
    C: tl.constexpr = 2 * Hk * K + Hv * V
    launch_dependents(PDL)
    key_head, seq = tl.program_id(0), tl.program_id(1).to(tl.int64)
    length = tl.load(lens_ptr + seq)
    stored = tl.where(length > 1, J - 1, 0)
    row = tl.load(slots_ptr + seq).to(tl.int64)
    k_col, v_col, part_of = tl.arange(0, K), tl.arange(0, BLOCK_V), tl.arange(0, PARTS)
    columns = part_of[:, None] * BLOCK_V + v_col[None, :]
    first = key_head * G
    tiles_ptr = memory_ptr + (row * Hv + first) * V * K + v_col[:, None] * K + k_col[None, :]
    mask = k_col[None, :] < tl.where(length > 1, K, 0)
    coming = tl.load(tiles_ptr, mask=mask, other=0.0)
    wait(PDL)
    mixed_ptr += seq * stride_mixed
    ba_ptr += seq * stride_ba
    tail_ptr += row * (J - 1) * C
    out_ptr += seq * Hv * V
    if length == 0:  # padding
        for head in range(first, first + G):
            tl.store(out_ptr + head * V + columns, tl.zeros([PARTS, BLOCK_V], tl.float32))
        return
    q = _convolve_and_shift(
        mixed_ptr, tail_ptr, conv_ptr, key_head * K + k_col, stored, C, J, J_PAD
    )  # fmt: skip
    k = _convolve_and_shift(
        mixed_ptr, tail_ptr, conv_ptr, (Hk + key_head) * K + k_col, stored, C, J, J_PAD
    )  # fmt: skip
    q, k = normalised(q, 0) * K**-0.5, normalised(k, 0)
    k_q = tl.sum(k * q, 0)
    for g in range(G):
        head = first + g
        beta = tl.sigmoid(tl.load(ba_ptr + head).to(tl.float32))
        a, A_log = tl.load(ba_ptr + Hv + head), tl.load(A_log_ptr + head)
        decay = tl.exp(log_decay(a, A_log, tl.load(dt_bias_ptr + head)))
        outputs = tl.zeros([PARTS, BLOCK_V], tl.float32)
        for part in range(PARTS):
            S, tile = coming, g * PARTS + part
            there = mask & (k_col[None, :] < tl.where(tile + 1 < G * PARTS, K, 0))
            coming = tl.load(tiles_ptr + (tile + 1) * BLOCK_V * K, mask=there, other=0.0)
            channels = 2 * Hk * K + head * V + part * BLOCK_V + v_col
            v = _convolve_and_shift(
                mixed_ptr, tail_ptr, conv_ptr, channels, stored, C, J, J_PAD
            )  # fmt: skip
            S_k, S_q = tl.sum(S * k[None, :], 1), tl.sum(S * q[None, :], 1)
            d = beta * (v - decay * S_k)
            tl.store(tiles_ptr + tile * BLOCK_V * K, decay * S + d[:, None] * k[None, :])
            o = decay * S_q + d * k_q
            outputs = tl.where(part_of[:, None] == part, o[None, :], outputs)
        z = tl.load(mixed_ptr + C + head * V + columns)
        y = gated(outputs, tl.sum(outputs * outputs), z, tl.load(norm_ptr + columns), eps, V)
        tl.store(out_ptr + head * V + columns, y.to(out_ptr.dtype.element_ty))


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
    D, (Hv, V, K), (C, J) = len(mixed), state.memory.shape[1:], layer.conv.shape
    assert mixed.stride(1) == ba.stride(1) == 1 and mixed.shape[1] == C + Hv * V
    assert state.tail.is_contiguous() and state.memory.is_contiguous()
    out = torch.empty(D, Hv * V, dtype=mixed.dtype, device=mixed.device)
    few = D * layer.num_key_heads <= FEW_PROGRAMS
    numbers = min(FEW_NUMBERS if few else MANY_NUMBERS, V * K)
    _delta_decode_kernel[(layer.num_key_heads, D)](
        mixed, ba, *layer[:4], *state, slots, context_lens, out, layer.eps,
        mixed.stride(0), ba.stride(0),
        Hk=layer.num_key_heads, Hv=Hv, K=K, V=V, J=J, J_PAD=next_power_of_2(J),
        BLOCK_V=numbers // K, num_warps=max(1, numbers // (32 * NUMBERS_PER_THREAD)),
        num_stages=1, **pdl_options(mixed),
    )  # fmt: skip
    return out
