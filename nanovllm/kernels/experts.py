"""Products of a mixture of experts: each token's row with the weights of the experts it takes.

Pairs of a token and one of its experts are numbered n = token * k + j. They are sorted by expert on
the device (a counting sort, one program for each expert), so that a tile of rows meets the weights
of one expert. How many tiles there are, the host need not know: the grid is what there can be.

Letters: T tokens, k experts of each, E experts, M hidden size, I inner size.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.activation import activate
from nanovllm.kernels.hopper import launch_dependents, pdl_options, wait


@triton.jit
def _sort_kernel(
    ids_ptr, order_ptr, starts_ptr, N, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    # One program: the pairs of one expert, in their order, behind those of all before it.
    launch_dependents(PDL)
    expert = tl.program_id(0)
    offsets = tl.arange(0, BLOCK)
    wait(PDL)
    start = 0
    for begin in range(0, N, BLOCK):
        ids = tl.load(ids_ptr + begin + offsets, mask=begin + offsets < N, other=1 << 30)
        start += tl.sum((ids < expert).to(tl.int32), 0)
    tl.store(starts_ptr + expert, start)
    for begin in range(0, N, BLOCK):
        ids = tl.load(ids_ptr + begin + offsets, mask=begin + offsets < N, other=1 << 30)
        own = (ids == expert).to(tl.int32)
        tl.store(order_ptr + start + tl.cumsum(own, 0) - 1, begin + offsets, mask=own > 0)
        start += tl.sum(own, 0)
    if expert == tl.num_programs(0) - 1:
        tl.store(starts_ptr + expert + 1, start)


@triton.jit
def _tile(starts_ptr, tile, E: tl.constexpr, E_PAD: tl.constexpr, BLOCK_T: tl.constexpr):
    """The expert of a tile, and the first and the end of its sorted pairs; E if there is none."""
    e = tl.arange(0, E_PAD)
    first = tl.load(starts_ptr + e, mask=e < E, other=0)
    behind = tl.load(starts_ptr + e + 1, mask=e < E, other=0)
    ends = tl.cumsum(tl.cdiv(behind - first, BLOCK_T), 0)  # of each expert's tiles
    expert = tl.sum(((ends <= tile) & (e < E)).to(tl.int32), 0)
    before = tl.max(tl.where((e < E) & (ends <= tile), ends, 0), 0)
    begin = tl.sum(tl.where(e == expert, first, 0), 0) + (tile - before) * BLOCK_T
    end = tl.sum(tl.where(e == expert, behind, 0), 0)
    return expert, begin, end


@triton.jit
def _gate_up_kernel(
    x_ptr, weight_ptr, order_ptr, starts_ptr, out_ptr, K, I,
    M: tl.constexpr, E: tl.constexpr, E_PAD: tl.constexpr, GELU: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_M: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # One program: act(gate) * up of BLOCK_T pairs of one expert, BLOCK_I of its inner numbers.
    launch_dependents(PDL)
    wait(PDL)
    expert, begin, end = _tile(starts_ptr, tl.program_id(1), E, E_PAD, BLOCK_T)
    if expert >= E:
        return
    t = begin + tl.arange(0, BLOCK_T)
    pairs = tl.load(order_ptr + t, mask=t < end, other=0)
    i = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I)
    m = tl.arange(0, BLOCK_M)
    x_ptrs = x_ptr + (pairs // K).to(tl.int64)[:, None] * M + m[None, :]
    gate_ptrs = weight_ptr + expert.to(tl.int64) * 2 * I * M + i[None, :] * M + m[:, None]
    gate = tl.zeros([BLOCK_T, BLOCK_I], tl.float32)
    up = gate
    for first in range(0, M, BLOCK_M):
        inside = first + m < M
        x = tl.load(x_ptrs + first, mask=(t < end)[:, None] & inside[None, :], other=0.0)
        mask = (i < I)[None, :] & inside[:, None]
        gate_weight = tl.load(gate_ptrs + first, mask=mask, other=0.0)
        up_weight = tl.load(gate_ptrs + I * M + first, mask=mask, other=0.0)
        gate = tl.dot(x, gate_weight, gate, input_precision="ieee")
        up = tl.dot(x, up_weight, up, input_precision="ieee")
    dtype = out_ptr.dtype.element_ty
    out = activate(gate.to(dtype).to(tl.float32), GELU).to(dtype) * up.to(dtype)
    ptrs = out_ptr + t.to(tl.int64)[:, None] * I + i[None, :]  # in the sorted order
    tl.store(ptrs, out, mask=(t < end)[:, None] & (i < I)[None, :])


@triton.jit
def _down_kernel(
    x_ptr, weight_ptr, order_ptr, starts_ptr, scale_ptr, out_ptr, T, K, I,
    M: tl.constexpr, E: tl.constexpr, E_PAD: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_I: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # One program: BLOCK_M numbers of the weighted results of BLOCK_T pairs of one expert.
    launch_dependents(PDL)
    wait(PDL)
    expert, begin, end = _tile(starts_ptr, tl.program_id(1), E, E_PAD, BLOCK_T)
    if expert >= E:
        return
    t = begin + tl.arange(0, BLOCK_T)
    pairs = tl.load(order_ptr + t, mask=t < end, other=0)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    i = tl.arange(0, BLOCK_I)
    x_ptrs = x_ptr + t.to(tl.int64)[:, None] * I + i[None, :]
    weight_ptrs = weight_ptr + expert.to(tl.int64) * M * I + m[None, :] * I + i[:, None]
    acc = tl.zeros([BLOCK_T, BLOCK_M], tl.float32)
    for first in range(0, I, BLOCK_I):
        inside = first + i < I
        x = tl.load(x_ptrs + first, mask=(t < end)[:, None] & inside[None, :], other=0.0)
        weight = tl.load(weight_ptrs + first, mask=(m < M)[None, :] & inside[:, None], other=0.0)
        acc = tl.dot(x, weight, acc, input_precision="ieee")
    scale = tl.load(scale_ptr + pairs, mask=t < end, other=0.0)
    row = (pairs % K).to(tl.int64) * T + pairs // K
    out = (acc * scale[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(
        out_ptr + row[:, None] * M + m[None, :], out, mask=(t < end)[:, None] & (m < M)[None, :]
    )


def gated_experts(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    gelu: bool = False,
) -> torch.Tensor:
    """`weight * down(act(gate(x)) * up(x))` of each expert that a token takes.

    Args:
        x: [T, M]
        gate_up: [E, 2 I, M], gate first.
        down: [E, M, I]
        experts: [T, k] int32.
        weights: [T, k] float32.

    Returns:
        [k, T, M], partial results, to be summed over k.
    """
    (T, M), (E, _, I), k = x.shape, down.shape, experts.shape[1]
    N = T * k
    order = torch.empty(N, dtype=torch.int32, device=x.device)
    starts = torch.empty(E + 1, dtype=torch.int32, device=x.device)
    _sort_kernel[(E,)](
        experts.contiguous(), order, starts, N,
        BLOCK=min(2048, max(16, triton.next_power_of_2(N))), **pdl_options(x),
    )  # fmt: skip
    BLOCK_T = 16 if N <= 16 * E else 64
    num_tiles = min(N, E) + N // BLOCK_T  # at most: each expert's last tile may not be full
    shape = {"M": M, "E": E, "E_PAD": triton.next_power_of_2(E), "BLOCK_T": BLOCK_T}
    inner = torch.empty(N, I, dtype=x.dtype, device=x.device)
    _gate_up_kernel[(triton.cdiv(I, 64), num_tiles)](
        x.contiguous(), gate_up, order, starts, inner, k, I,
        GELU=gelu, BLOCK_I=64, BLOCK_M=64, num_warps=4, num_stages=3, **shape, **pdl_options(x),
    )  # fmt: skip
    out = torch.empty(k, T, M, dtype=torch.float32, device=x.device)
    _down_kernel[(triton.cdiv(M, 128), num_tiles)](
        inner, down, order, starts, weights.contiguous(), out, T, k, I,
        BLOCK_M=128, BLOCK_I=64, num_warps=4, num_stages=3, **shape, **pdl_options(x),
    )  # fmt: skip
    return out
