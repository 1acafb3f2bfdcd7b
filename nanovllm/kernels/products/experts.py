"""Products of a mixture of experts: each token's row by the weights of its experts.

Pairs of a token and one of its experts are sorted by expert (`routing.py`), so that a tile of rows
needs the weights of one expert. The host need not know the number of tiles: the grid has the
maximum. A single token needs no sorting (`row.one_row`). FP8 weights are converted to 16 bits on
their way to tensor cores.

Letters: T tokens, k experts of each, E experts, M hidden size, I inner size.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from nanovllm.kernels.activation import activate_and_mul
from nanovllm.kernels.device_features import (
    can_describe,
    describe,
    has_room,
    launch_dependents,
    load_tile,
    pdl_options,
    spare_rows,
    wait,
)
from nanovllm.kernels.products.linear import HALF
from nanovllm.kernels.products.routing import sort_pairs
from nanovllm.kernels.products.row import one_row, stored
from nanovllm.tensors.fp8 import Codes
from nanovllm.utils.integers import cdiv, next_power_of_2


class Tiles(NamedTuple):
    """The tiles of the products: `block_t` rows by `block_i` inner columns, or by `block_m`
    outputs, summed over `block_k` inputs at a time. If `left`, the weights are the left operand: it
    has the 64 rows that tensor cores need, however few the other has.
    """

    block_t: int
    block_i: int
    block_m: int
    block_k: int
    warps: int
    stages: int
    left: bool


# Measured on an H200, with the shapes of Qwen3-30B-A3B and gpt-oss-20b.
FEW = Tiles(16, 64, 128, 128, warps=4, stages=3, left=True)
SOME = Tiles(32, 128, 128, 64, warps=4, stages=3, left=True)
MORE = Tiles(64, 64, 128, 64, warps=4, stages=4, left=False)
MANY = Tiles(128, 128, 256, 64, warps=8, stages=4, left=False)
MOST = {8: FEW, 16: SOME, 48: MORE}  # pairs per expert up to which these tiles are the fastest
# The same for codes, which are converted for each tile of rows, so larger tiles pay earlier.
MAX_OF_CODES = {
    8: FEW._replace(stages=4),
    24: SOME._replace(block_i=64, block_k=128),
    96: MORE._replace(left=True),
}
MANY_OF_CODES = MANY._replace(block_m=128)
# For 64 KiB of shared memory: for few pairs, and for many.
LITTLE_ROOM = (
    Tiles(16, 64, 64, 64, warps=4, stages=2, left=True),
    Tiles(64, 64, 64, 64, warps=4, stages=2, left=False),
)
LARGE_STEP = 1024  # rows from which partial results are rounded, to write fewer bytes


@triton.jit
def _tile(starts_ptr, tile, E: tl.constexpr, E_PAD: tl.constexpr, BLOCK_T: tl.constexpr):
    """The expert of a tile, E if there is none, and the begin and end of its sorted pairs."""
    e = tl.arange(0, E_PAD)
    first = tl.load(starts_ptr + e, mask=e < E, other=0)
    behind = tl.load(starts_ptr + e + 1, mask=e < E, other=0)
    ends = tl.cumsum(tl.cdiv(behind - first, BLOCK_T), 0)  # end of each expert's tiles
    expert = tl.sum(((ends <= tile) & (e < E)).to(tl.int32), 0)
    before = tl.max(tl.where((e < E) & (ends <= tile), ends, 0), 0)
    begin = tl.sum(tl.where(e == expert, first, 0), 0) + (tile - before) * BLOCK_T
    end = tl.sum(tl.where(e == expert, behind, 0), 0)
    return expert, begin, end


@triton.jit
def _no_sum(OUTPUTS: tl.constexpr, ROWS: tl.constexpr, LEFT: tl.constexpr):
    if LEFT:
        return tl.zeros([OUTPUTS, ROWS], tl.float32)
    else:
        return tl.zeros([ROWS, OUTPUTS], tl.float32)


@triton.jit
def _add_product(acc, weight, x, LEFT: tl.constexpr):
    """acc + x @ weight.T: [ROWS, OUTPUTS], or transposed."""
    if LEFT:
        return tl.dot(weight, x.T, acc, input_precision="ieee")
    else:
        return tl.dot(x, weight.T, acc, input_precision="ieee")


@triton.jit
def _load_weights(
    weight, codes_scales_ptr, row, end, k, COLS: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, SCALE_ROWS: tl.constexpr, SCALE_COLS: tl.constexpr,
    TMA: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """`load_tile`; codes are dequantised and rounded to DTYPE. A tile lies within one scale block
    of columns.
    """
    tile = load_tile(weight, row, end, k, COLS, ROWS, WIDTH, TMA)
    if codes_scales_ptr is None:
        return tile
    else:
        rows = row + tl.arange(0, ROWS)
        blocks = rows // SCALE_ROWS * tl.cdiv(COLS, SCALE_COLS) + k // SCALE_COLS
        scales = tl.load(codes_scales_ptr + blocks, mask=rows < end, other=0.0)
        return (tile.to(tl.float32) * scales[:, None]).to(DTYPE)


@triton.jit
def _gate_up_kernel(
    x_ptr, weight, codes_scales_ptr, bias_ptr, order_ptr, starts_ptr, out_ptr,
    K: tl.constexpr, I: tl.constexpr, M: tl.constexpr, E: tl.constexpr, E_PAD: tl.constexpr,
    SCALE_ROWS: tl.constexpr, SCALE_COLS: tl.constexpr, GELU: tl.constexpr, LIMIT: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_K: tl.constexpr, LEFT: tl.constexpr,
    TMA: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # One program: BLOCK_I inner columns of BLOCK_T pairs of one expert.
    launch_dependents(PDL)
    wait(PDL)
    expert, begin, end = _tile(starts_ptr, tl.program_id(1), E, E_PAD, BLOCK_T)
    if expert >= E:
        return
    t = begin + tl.arange(0, BLOCK_T)
    pairs = tl.load(order_ptr + t, mask=t < end, other=0)
    first = tl.program_id(0) * BLOCK_I
    m = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + (pairs // K).to(tl.int64)[:, None] * M + m[None, :]
    row = expert * 2 * I + first
    end_row = expert * 2 * I + I
    gate = _no_sum(BLOCK_I, BLOCK_T, LEFT)
    up = _no_sum(BLOCK_I, BLOCK_T, LEFT)
    for k in range(0, M, BLOCK_K):
        gate_weight = _load_weights(
            weight, codes_scales_ptr, row, end_row, k, M, BLOCK_I, BLOCK_K, SCALE_ROWS, SCALE_COLS,
            TMA, x_ptr.dtype.element_ty,
        )  # fmt: skip
        up_weight = _load_weights(
            weight, codes_scales_ptr, row + I, end_row + I, k, M, BLOCK_I, BLOCK_K, SCALE_ROWS,
            SCALE_COLS, TMA, x_ptr.dtype.element_ty,
        )  # fmt: skip
        x = tl.load(x_ptrs + k, mask=(t < end)[:, None] & (k + m < M)[None, :], other=0.0)
        gate = _add_product(gate, gate_weight, x, LEFT)
        up = _add_product(up, up_weight, x, LEFT)
    if LEFT:
        gate, up = gate.T, up.T
    i = first + tl.arange(0, BLOCK_I)
    if bias_ptr is not None:
        bias_ptrs = bias_ptr + expert * 2 * I + i
        gate += tl.load(bias_ptrs, mask=i < I, other=0.0).to(tl.float32)[None, :]
        up += tl.load(bias_ptrs + I, mask=i < I, other=0.0).to(tl.float32)[None, :]
    out = activate_and_mul(gate, up, GELU, LIMIT).to(out_ptr.dtype.element_ty)
    ptrs = out_ptr + t.to(tl.int64)[:, None] * I + i[None, :]  # in the sorted order
    tl.store(ptrs, out, mask=(t < end)[:, None] & (i < I)[None, :])


@triton.jit(do_not_specialize=["T"])
def _down_kernel(
    x, weight, codes_scales_ptr, bias_ptr, order_ptr, starts_ptr, scale_ptr, out_ptr, T,
    K: tl.constexpr, I: tl.constexpr, M: tl.constexpr, E: tl.constexpr, E_PAD: tl.constexpr,
    SCALE_ROWS: tl.constexpr, SCALE_COLS: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, LEFT: tl.constexpr, TMA: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    # One program: BLOCK_M columns of the weighted results of BLOCK_T pairs of one expert.
    launch_dependents(PDL)
    wait(PDL)
    expert, begin, end = _tile(starts_ptr, tl.program_id(1), E, E_PAD, BLOCK_T)
    if expert >= E:
        return
    first = tl.program_id(0) * BLOCK_M
    row = expert * M + first
    acc = _no_sum(BLOCK_M, BLOCK_T, LEFT)
    for k in range(0, I, BLOCK_K):
        inner = load_tile(x, begin, end, k, I, BLOCK_T, BLOCK_K, TMA)
        weights = _load_weights(
            weight, codes_scales_ptr, row, expert * M + M, k, I, BLOCK_M, BLOCK_K, SCALE_ROWS,
            SCALE_COLS, TMA, inner.dtype,
        )  # fmt: skip
        acc = _add_product(acc, weights, inner, LEFT)
    if LEFT:
        acc = acc.T
    m = first + tl.arange(0, BLOCK_M)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + expert * M + m, mask=m < M, other=0.0)
        acc += bias.to(tl.float32)[None, :]
    t = begin + tl.arange(0, BLOCK_T)
    pairs = tl.load(order_ptr + t, mask=t < end, other=0)
    scale = tl.load(scale_ptr + pairs, mask=t < end, other=0.0)
    rows = (pairs % K).to(tl.int64) * T + pairs // K
    out = (acc * scale[:, None]).to(out_ptr.dtype.element_ty)
    ptrs = out_ptr + rows[:, None] * M + m[None, :]
    tl.store(ptrs, out, mask=(t < end)[:, None] & (m < M)[None, :])


class ExpertWeights(NamedTuple):
    """The experts of a layer.

    Attributes:
        gate_up: [E * 2 I, M], for each expert gate first; `Codes` are FP8.
        down: [E * M, I]
        gate_up_bias: [E, 2 I]; None: 0.
        down_bias: [E, M]; None: 0.
        gelu: whether to activate by GELU (tanh), not SiLU.
        limit: bound of gate and up in gpt-oss (see `activate_and_mul`); 0: none.
    """

    gate_up: torch.Tensor | Codes
    down: torch.Tensor | Codes
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    gelu: bool = False
    limit: float = 0.0

    @property
    def num_experts(self) -> int:
        """E"""
        return len(self.down) // stored(self.gate_up)[0].shape[1]


def choose_tiles(N: int, E: int, x: torch.Tensor, of_codes: bool = False) -> Tiles:
    """Choose tiles for N pairs of E experts, in x's dtype and on its device; `of_codes`: for FP8
    weights.
    """
    if x.dtype not in HALF or not has_room(x):
        tiles = LITTLE_ROOM[N > 8 * E]
        return tiles if x.dtype in HALF else tiles._replace(block_k=32, warps=8)
    most, many = (MAX_OF_CODES, MANY_OF_CODES) if of_codes else (MOST, MANY)
    return next((tiles for pairs, tiles in most.items() if pairs * E >= N), many)


def gated_experts(
    x: torch.Tensor,
    weights: ExpertWeights,
    experts: torch.Tensor,
    scales: torch.Tensor,
    tiles: Tiles | None = None,
) -> torch.Tensor:
    """`scale * down(act(gate(x)) * up(x))` for each of a token's experts.

    Args:
        x: [T, M]
        weights: experts of the layer.
        experts: [T, k] int32, see `route`.
        scales: [T, k] float32.
        tiles: tiles of the products; None: chosen here.

    Returns:
        [k, T, M], partial results to be summed over k: float32, or x's dtype in large steps.
    """
    (gate_up, gate_up_scales, gate_up_block), gelu = stored(weights.gate_up), weights.gelu
    (down, down_scales, down_block), limit = stored(weights.down), weights.limit
    (T, M), I, k = x.shape, down.shape[1], experts.shape[1]
    E = weights.num_experts
    if T == 1 and x.dtype in HALF:
        inner = one_row(
            x, weights.gate_up, weights.gate_up_bias, gated=True, gelu=gelu, limit=limit,
            num_experts=E, experts=experts,
        )  # fmt: skip
        return one_row(
            inner, weights.down, weights.down_bias, num_experts=E, experts=experts, scales=scales
        )
    N = T * k
    order, starts = sort_pairs(experts, E)
    tiles = tiles or choose_tiles(N, E, x, gate_up_scales is not None)
    num_tiles = min(N, E) + N // tiles.block_t  # at most: the last tile of an expert may be partial
    shape = {"K": k, "M": M, "I": I, "E": E, "E_PAD": next_power_of_2(E)}
    how = {"LEFT": tiles.left, "num_warps": tiles.warps, "num_stages": tiles.stages}
    inner = spare_rows(N, I, like=x)
    tma = x.dtype in HALF and all(map(can_describe, (gate_up, down, inner)))
    width = tiles.block_k
    _gate_up_kernel[(cdiv(I, tiles.block_i), num_tiles)](
        x.contiguous(), describe(gate_up, tiles.block_i, width) if tma else gate_up,
        gate_up_scales, weights.gate_up_bias, order, starts, inner, GELU=gelu, LIMIT=limit,
        SCALE_ROWS=gate_up_block[0], SCALE_COLS=gate_up_block[1],
        BLOCK_T=tiles.block_t, BLOCK_I=tiles.block_i, BLOCK_K=width, TMA=tma,
        **shape, **how, **pdl_options(x),
    )  # fmt: skip
    dtype = torch.float32 if T < LARGE_STEP else x.dtype
    out = torch.empty(k, T, M, dtype=dtype, device=x.device)
    _down_kernel[(cdiv(M, tiles.block_m), num_tiles)](
        describe(inner, tiles.block_t, width) if tma else inner,
        describe(down, tiles.block_m, width) if tma else down,
        down_scales, weights.down_bias, order, starts, scales, out, T,
        SCALE_ROWS=down_block[0], SCALE_COLS=down_block[1],
        BLOCK_T=tiles.block_t, BLOCK_M=tiles.block_m, BLOCK_K=width, TMA=tma,
        **shape, **how, **pdl_options(x),
    )  # fmt: skip
    return out
