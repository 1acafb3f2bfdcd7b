"""Gated DeltaNet token by token, for prompts and decodes alike: a program goes through the tokens
of a key head of one sequence, each as `delta_decode.py` computes one.

Chunks, by which prompts are several times as fast, have other roundings than the recurrence, and
begin where a step does.

Letters: see `nanovllm.tensors.delta_net`; T tokens of P prompts, G = Hv / Hk.
"""

import torch
import triton.language as tl

from nanovllm.kernels.attention.common import metadata
from nanovllm.kernels.device_features import launch_dependents, pdl_options, wait
from nanovllm.kernels.recurrent.delta_decode import (
    MANY_NUMBERS,
    NUMBERS_PER_THREAD,
    _convolve_and_shift,
    _stored,
    _value_heads,
)
from nanovllm.kernels.recurrent.formulas import check_layout, log_decay, normalised
from nanovllm.tensors.delta_net import DeltaNet, DeltaState
from nanovllm.utils.integers import next_power_of_2


@metadata
def _delta_tokens_kernel(
    mixed_ptr, ba_ptr, conv_ptr, A_log_ptr, dt_bias_ptr, norm_ptr, tail_ptr, memory_ptr,
    slots_ptr, cu_q_ptr, cu_k_ptr, out_ptr, eps, stride_mixed, stride_ba,
    Hk: tl.constexpr, Hv: tl.constexpr, K: tl.constexpr, V: tl.constexpr, J: tl.constexpr,
    J_PAD: tl.constexpr, G_PAD: tl.constexpr, BLOCK_V: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # One program: a key head of one sequence, and its G value heads, a token after another.
    G: tl.constexpr = Hv // Hk
    C: tl.constexpr = 2 * Hk * K + Hv * V
    launch_dependents(PDL)
    key_head, seq = tl.program_id(0), tl.program_id(1)
    first, k_of, v_of = key_head * G, tl.arange(0, K), tl.arange(0, BLOCK_V)
    head = first + tl.arange(0, G_PAD)
    A_log = tl.load(A_log_ptr + head, mask=head < first + G, other=0.0)
    dt_bias = tl.load(dt_bias_ptr + head, mask=head < first + G, other=0.0)
    columns = tl.arange(0, V // BLOCK_V)[:, None] * BLOCK_V + v_of[None, :]
    norm = tl.load(norm_ptr + columns)
    q_col, k_col = key_head * K + k_of, (Hk + key_head) * K + k_of
    v_col = 2 * Hk * K + first * V + v_of
    wait(PDL)  # kernels of the step may have written the bounds, too
    begin, end = tl.load(cu_q_ptr + seq), tl.load(cu_q_ptr + seq + 1)
    before = tl.load(cu_k_ptr + seq + 1) - tl.load(cu_k_ptr + seq) - (end - begin)  # tokens
    row = tl.load(slots_ptr + seq).to(tl.int64)
    tiles_ptr = memory_ptr + (row * Hv + first) * V * K + v_of[:, None] * K + k_of[None, :]
    tail_ptr += row * (J - 1) * C
    for t in range(begin, tl.where(before < 0, begin, end)):  # none in padding
        num_stored = tl.where(before + t > begin, J - 1, 0)
        mask = k_of[None, :] < tl.where(before + t > begin, K, 0)
        S = tl.load(tiles_ptr, mask=mask, other=0.0)
        q_tail, q_weight = _stored(tail_ptr, conv_ptr, q_col, num_stored, C, J, J_PAD)
        k_tail, k_weight = _stored(tail_ptr, conv_ptr, k_col, num_stored, C, J, J_PAD)
        v_tail, v_weight = _stored(tail_ptr, conv_ptr, v_col, num_stored, C, J, J_PAD)
        at = tl.cast(t, tl.int64)
        token_ptr, ba_ptrs = mixed_ptr + at * stride_mixed, ba_ptr + at * stride_ba + head
        q_new, k_new = tl.load(token_ptr + q_col), tl.load(token_ptr + k_col)
        v_new = tl.load(token_ptr + v_col)
        betas = tl.sigmoid(tl.load(ba_ptrs, mask=head < first + G, other=0.0).to(tl.float32))
        a = tl.load(ba_ptrs + Hv, mask=head < first + G, other=0.0)
        decays = tl.exp(log_decay(a, A_log, dt_bias))
        q = _convolve_and_shift(q_new, q_tail, q_weight, tail_ptr, q_col, C, J, J_PAD)
        k = _convolve_and_shift(k_new, k_tail, k_weight, tail_ptr, k_col, C, J, J_PAD)
        _value_heads(
            normalised(q, 0) * K**-0.5, normalised(k, 0), betas, decays, norm, S, mask, v_tail,
            v_weight, v_new, token_ptr, token_ptr + C + first * V, conv_ptr, tail_ptr, tiles_ptr,
            out_ptr + (at * Hv + first) * V, v_col, columns, num_stored, eps,
            G, G_PAD, K, V, C, J, J_PAD, BLOCK_V,
        )  # fmt: skip
        tl.debug_barrier()  # all threads have written the states that the next token reads


def tokens(
    mixed: torch.Tensor,
    ba: torch.Tensor,
    layer: DeltaNet,
    state: DeltaState,
    slots: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
) -> torch.Tensor:
    """Tokens of P prompts, or of parts of them, see `nanovllm.recurrent.delta_rule.prompts`. A
    sequence that is shorter than its rows is padding.

    Args:
        mixed: [T, C + Hv V], rows may lie apart.
        ba: [T, 2 Hv], likewise.
        slots: [P] int32.
        cu_seqlens_q, cu_seqlens_k: [P + 1] int32.

    Returns:
        [T, Hv V], 0 in padding.
    """
    T, P, (Hv, V, K), J = len(mixed), len(slots), state.memory.shape[1:], layer.conv.shape[1]
    check_layout(mixed, ba, layer, state)
    out = torch.zeros(T, Hv * V, dtype=mixed.dtype, device=mixed.device)
    numbers = min(MANY_NUMBERS, V * K)
    _delta_tokens_kernel[(layer.num_key_heads, P)](
        mixed, ba, *layer[:4], *state, slots, cu_seqlens_q, cu_seqlens_k, out, layer.eps,
        mixed.stride(0), ba.stride(0),
        Hk=layer.num_key_heads, Hv=Hv, K=K, V=V, J=J, J_PAD=next_power_of_2(J),
        G_PAD=next_power_of_2(Hv // layer.num_key_heads),
        BLOCK_V=numbers // K, num_warps=max(1, numbers // (32 * NUMBERS_PER_THREAD)),
        num_stages=1, **pdl_options(mixed),
    )  # fmt: skip
    return out
