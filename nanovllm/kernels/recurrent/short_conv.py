"""The gated convolution of LFM2: C * conv(B * x), in one kernel for decodes and in two for prompts.

Letters: M channels of this rank, J taps, T tokens of P prompts, D decodes, R rows of states.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.attention.common import metadata
from nanovllm.kernels.device_features import launch_dependents, pdl_options, wait
from nanovllm.kernels.recurrent.chunks import CHUNK
from nanovllm.utils.integers import cdiv, next_power_of_2

BLOCK = 256  # channels of a program
ROWS = 16  # tokens of a program


@triton.jit
def _inputs(bcx_ptr, c, mask, M):
    """B * x of some channels, rounded as they are stored."""
    b, x = tl.load(bcx_ptr + c, mask, 0.0), tl.load(bcx_ptr + 2 * M + c, mask, 0.0)
    return (b.to(tl.float32) * x.to(tl.float32)).to(b.dtype)


@triton.jit
def _result(total, bcx_ptr, bias_ptr, c, mask, channels_mask, M):
    """The gated sum of taps, with the bias if there is one."""
    if bias_ptr is not None:
        total += tl.load(bias_ptr + c, channels_mask, 0.0).to(tl.float32)
    gate = tl.load(bcx_ptr + M + c, mask, 0.0)
    return (total.to(gate.dtype).to(tl.float32) * gate.to(tl.float32)).to(gate.dtype)


@metadata
def _short_conv_decode_kernel(
    bcx_ptr, weight_ptr, bias_ptr, tail_ptr, slots_ptr, lens_ptr, out_ptr, M, stride,
    J: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # One program: BLOCK channels of a decode. Nobody else reads their tail.
    launch_dependents(PDL)
    seq, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    length, mask = tl.load(lens_ptr + seq), c < M
    row = tl.where(length > 0, tl.load(slots_ptr + seq), 0).to(tl.int64)
    has_past = c < tl.where(length > 1, M, 0)
    tail_ptr += row * (J - 1) * M + c
    wait(PDL)
    bcx_ptr += seq * stride
    new = _inputs(bcx_ptr, c, mask, M)
    total = new.to(tl.float32) * tl.load(weight_ptr + c * J + J - 1, mask, 0.0).to(tl.float32)
    for j in tl.static_range(J - 1):
        old = tl.load(tail_ptr + j * M, has_past, 0.0)
        total += old.to(tl.float32) * tl.load(weight_ptr + c * J + j, mask, 0.0).to(tl.float32)
        if j > 0:
            tl.store(tail_ptr + (j - 1) * M, old, mask)
    tl.store(tail_ptr + (J - 2) * M, new, mask)
    tl.store(out_ptr + seq * M + c, _result(total, bcx_ptr, bias_ptr, c, mask, mask, M), mask)


@metadata
def _short_conv_prompt_kernel(
    bcx_ptr, weight_ptr, bias_ptr, tail_ptr, slots_ptr, cu_q_ptr, cu_k_ptr, chunks_ptr, out_ptr,
    M, stride, J: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # One program: BLOCK channels of ROWS tokens of a prompt.
    launch_dependents(PDL)
    part, chunk = tl.program_id(0), tl.program_id(1)
    c = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)[None, :]
    wait(PDL)
    seq = tl.load(chunks_ptr + 2 * chunk)
    if seq < 0:
        return
    begin, end = tl.load(cu_q_ptr + seq), tl.load(cu_q_ptr + seq + 1)
    first = tl.load(chunks_ptr + 2 * chunk + 1) + part * ROWS
    row = (first + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    mask = (row < end) & (c < M)
    length = tl.load(cu_k_ptr + seq + 1) - tl.load(cu_k_ptr + seq)
    stored = tl.where(length > end - begin, J - 1, 0)  # inputs of the tail that count
    tail_ptr += tl.load(slots_ptr + seq).to(tl.int64) * (J - 1) * M + c
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for j in tl.static_range(J):
        source = row + (j - J + 1)
        x = _inputs(bcx_ptr + source * stride, c, mask & (source >= begin), M)
        if j < J - 1:
            before = source - begin + (J - 1)  # place in the tail
            is_old = (source < begin) & (source >= begin - stored)
            old = tl.load(tail_ptr + before * M, mask & is_old, 0.0)
            x = tl.where(source < begin, old, x)
        total += x.to(tl.float32) * tl.load(weight_ptr + c * J + j, c < M, 0.0).to(tl.float32)
    y = _result(total, bcx_ptr + row * stride, bias_ptr, c, mask, c < M, M)
    tl.store(out_ptr + row * M + c, y, mask)


@metadata
def _short_conv_tail_kernel(
    bcx_ptr, tail_ptr, slots_ptr, cu_q_ptr, cu_k_ptr, M, stride,
    J: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # One program: BLOCK channels of a prompt's new tail, from the oldest on: no input of the
    # old one is overwritten before it is read. Nobody else has these channels.
    launch_dependents(PDL)
    seq, c = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = c < M
    begin, end = tl.load(cu_q_ptr + seq), tl.load(cu_q_ptr + seq + 1)
    length = tl.load(cu_k_ptr + seq + 1) - tl.load(cu_k_ptr + seq)
    tail_ptr += tl.load(slots_ptr + seq).to(tl.int64) * (J - 1) * M + c
    wait(PDL)
    if begin >= end:  # padding
        return
    for j in tl.static_range(J - 1):
        source = end + (j - J + 1)
        is_new = c < tl.where(source >= begin, M, 0)
        new = _inputs(bcx_ptr + source.to(tl.int64) * stride, c, is_new, M)
        place = source - begin + (J - 1)
        is_old = c < tl.where((source < begin) & (length > end - begin), M, 0)
        old = tl.load(tail_ptr + place * M, is_old, 0.0)
        tl.store(tail_ptr + j * M, tl.where(is_new, new, old), mask)


def decode(
    bcx: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tail: torch.Tensor,
    slots: torch.Tensor,
    context_lens: torch.Tensor,
) -> torch.Tensor:
    """`C * conv(B * x)` at one token of each of D sequences; their tails move on by it.

    Args:
        bcx: [D, 3 M], B, C and x; rows may lie apart.
        weight: [M, J]
        bias: [M]
        tail: [R, J - 1, M], see `nanovllm.recurrent.causal_conv`.
        slots, context_lens: [D] int32, see there.

    Returns:
        [D, M]
    """
    D, M = len(bcx), bcx.shape[1] // 3
    out = torch.empty(D, M, dtype=bcx.dtype, device=bcx.device)
    size = min(BLOCK, next_power_of_2(M))
    _short_conv_decode_kernel[(D, cdiv(M, size))](
        bcx, weight, bias, tail, slots, context_lens, out, M, bcx.stride(0),
        J=weight.shape[1], BLOCK=size, num_warps=max(1, size // 64), **pdl_options(bcx),
    )  # fmt: skip
    return out


def prompts(
    bcx: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tail: torch.Tensor,
    slots: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    chunks: torch.Tensor,
) -> torch.Tensor:
    """`C * conv(B * x)` at the tokens of P prompts, or of chunks of them; their tails move on.

    Args:
        bcx: [T, 3 M], as of `decode`.
        weight, bias, tail: as of `decode`.
        slots: [P] int32.
        cu_seqlens_q, cu_seqlens_k: [P + 1] int32, see `Context`.
        chunks: see `nanovllm.kernels.recurrent.delta_prompt.chunks_of`.

    Returns:
        [T, M]; 0 in rows beyond those of the prompts.
    """
    T, M, J = len(bcx), bcx.shape[1] // 3, weight.shape[1]
    out = torch.zeros(T, M, dtype=bcx.dtype, device=bcx.device)
    size = min(BLOCK, next_power_of_2(M))
    bounds = slots, cu_seqlens_q, cu_seqlens_k
    options = {"J": J, "BLOCK": size, "num_warps": max(1, size // 64), **pdl_options(bcx)}
    _short_conv_prompt_kernel[(CHUNK.value // ROWS, len(chunks), cdiv(M, size))](
        bcx, weight, bias, tail, *bounds, chunks, out, M, bcx.stride(0), ROWS=ROWS, **options
    )
    _short_conv_tail_kernel[(len(slots), cdiv(M, size))](
        bcx, tail, *bounds, M, bcx.stride(0), **options
    )
    return out
