"""Products of experts: tiles of rows, each by the weights of one expert.

Pairs of a token and one of its experts are sorted by expert (`routing.py`), so that a tile of rows
needs the weights of one expert. The host need not know the number of tiles: the grid has the
maximum.

Letters: T tokens, k experts of each, E experts, M hidden size, I inner size.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from nanovllm.kernels.activation import activate_and_mul
from nanovllm.kernels.device_features import (
    can_describe,
    describe,
    has_ptx,
    launch_dependents,
    load_tile,
    pdl_options,
    spare_rows,
    wait,
)
from nanovllm.kernels.experts.tiles import Tiles, choose_tiles
from nanovllm.kernels.experts.weights import AnyWeight, ExpertWeights, act_block, shape_of
from nanovllm.kernels.fp8 import empty_codes, quantize, scale_of
from nanovllm.kernels.products import int4, mxfp4
from nanovllm.kernels.products.linear import HALF
from nanovllm.kernels.products.row import stored
from nanovllm.tensors.fp8 import Codes
from nanovllm.tensors.int4 import Int4Codes
from nanovllm.tensors.mxfp4 import BLOCK as MXFP4_BLOCK
from nanovllm.tensors.mxfp4 import CHUNK, Mxfp4Codes
from nanovllm.utils.integers import cdiv, next_power_of_2


@triton.jit
def _tile(
    order_ptr, starts_ptr, tile, E: tl.constexpr, E_PAD: tl.constexpr, BLOCK_T: tl.constexpr
):  # fmt: skip
    """The expert of a tile, E if there is none, and the begin and end of its sorted pairs. Those of
    a single token are not sorted: each is a tile, and `starts_ptr` has their experts.
    """
    if order_ptr is None:
        return tl.load(starts_ptr + tile), tile, tile + 1
    else:
        return _sorted_tile(starts_ptr, tile, E, E_PAD, BLOCK_T)


@triton.jit
def _sorted_tile(starts_ptr, tile, E: tl.constexpr, E_PAD: tl.constexpr, BLOCK_T: tl.constexpr):
    e = tl.arange(0, E_PAD)
    first = tl.load(starts_ptr + e, mask=e < E, other=0)
    after = tl.load(starts_ptr + e + 1, mask=e < E, other=0)
    ends = tl.cumsum(tl.cdiv(after - first, BLOCK_T), 0)  # end of each expert's tiles
    expert = tl.sum(((ends <= tile) & (e < E)).to(tl.int32), 0)
    before = tl.max(tl.where((e < E) & (ends <= tile), ends, 0), 0)
    begin = tl.sum(tl.where(e == expert, first, 0), 0) + (tile - before) * BLOCK_T
    end = tl.sum(tl.where(e == expert, after, 0), 0)
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
def _add_tile(
    acc, x, x_scale, weight, codes_scales_ptr, row, end, k, COLS: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr, SCALE_ROWS: tl.constexpr, SCALE_COLS: tl.constexpr,
    X_BLOCK: tl.constexpr, LEFT: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """acc + x @ tile.T, for a tile of weights, which lies within one scale block of columns.

    Codes by 16 bits are dequantised, and rounded. Products of codes by codes are scaled, but by
    scales of whole rows, which are left to the caller.
    """
    tile = load_tile(weight, row, end, k, COLS, ROWS, WIDTH, TMA)
    if codes_scales_ptr is None:
        return _add_product(acc, tile, x, LEFT)
    elif x.dtype != tile.dtype:
        rows = row + tl.arange(0, ROWS)
        blocks = rows // SCALE_ROWS * tl.cdiv(COLS, SCALE_COLS) + k // SCALE_COLS
        scales = tl.load(codes_scales_ptr + blocks, mask=rows < end, other=0.0)
        return _add_product(acc, (tile.to(tl.float32) * scales[:, None]).to(x.dtype), x, LEFT)
    elif X_BLOCK == 0:
        return _add_product(acc, tile, x, LEFT)
    else:
        product = _add_product(tl.zeros_like(acc), tile, x, LEFT)
        if SCALE_ROWS > 1:  # the rows of a tile share a block
            block = row // SCALE_ROWS * tl.cdiv(COLS, SCALE_COLS) + k // SCALE_COLS
            x_scale *= tl.load(codes_scales_ptr + block)
        return acc + product * (x_scale[None, :] if LEFT else x_scale[:, None])


@triton.jit
def _add_chunks(
    gate, up, x_ptr, rows, used, weight, scales_ptr, row, end, UP: tl.constexpr,
    COLS: tl.constexpr, NUM_ROWS: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr,
    P: tl.constexpr, ROW_STEP: tl.constexpr, CHUNK_STEP: tl.constexpr, E2M1: tl.constexpr,
    LEFT: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """gate + x @ weight.T of packed rows from `row` on, and the same of `up`, whose rows are UP
    further on; with UP 0, only the first.
    """
    for chunk in range(0, tl.cdiv(COLS, 4 * P)):
        gates = _load_packed(weight, chunk, row, end, ROWS, P, ROW_STEP, CHUNK_STEP)
        if UP > 0:
            ups = _load_packed(weight, chunk, row + UP, end + UP, ROWS, P, ROW_STEP, CHUNK_STEP)
        for half in tl.static_range(2):
            k = (4 * chunk + 2 * half) * P
            x1 = _load_rows(x_ptr, rows, used, k, COLS, P)
            x2 = _load_rows(x_ptr, rows, used, k + P, COLS, P)
            gate = _add_planes(
                gate, gates, scales_ptr, row, end, k, x1, x2, NUM_ROWS, ROWS, GROUP, E2M1,
                half == 1, LEFT, ASM,
            )  # fmt: skip
            if UP > 0:
                up = _add_planes(
                    up, ups, scales_ptr, row + UP, end + UP, k, x1, x2, NUM_ROWS, ROWS, GROUP,
                    E2M1, half == 1, LEFT, ASM,
                )  # fmt: skip
    return gate, up


@triton.jit
def _block_scale(x_scales_ptr, row, k, mask, COLS: tl.constexpr, X_BLOCK: tl.constexpr):
    """The scales of rows of x: [T, COLS] in the block of column k; 1 if blocks are whole rows."""
    if X_BLOCK == 0:
        return 1.0
    else:
        return tl.load(x_scales_ptr + row * tl.cdiv(COLS, X_BLOCK) + k // X_BLOCK, mask, 0.0)


@triton.jit
def _row_scales(codes_scales_ptr, row, columns, mask, SCALE_ROWS: tl.constexpr):
    """The scales [1, columns] of weights with one for each row; 1 of others."""
    if SCALE_ROWS == 1:
        return tl.load(codes_scales_ptr + row + columns, mask=mask, other=0.0)[None, :]
    else:
        return 1.0


@triton.jit
def _load_rows(x_ptr, rows, used, k, COLS: tl.constexpr, WIDTH: tl.constexpr):
    """WIDTH columns of some rows of a matrix, from column k on; 0 where it has none."""
    cols = k + tl.arange(0, WIDTH)
    ptrs = x_ptr + rows[:, None] * COLS + cols[None, :]
    return tl.load(ptrs, mask=used[:, None] & (cols < COLS)[None, :], other=0.0)


@triton.jit
def _load_packed(
    weight, chunk, row, end, ROWS: tl.constexpr, P: tl.constexpr, ROW_STEP: tl.constexpr,
    CHUNK_STEP: tl.constexpr,
):  # fmt: skip
    """The int16s [ROWS, P] of a chunk of columns, of rows from `row` on; 0 from `end` on."""
    rows = row + tl.arange(0, ROWS)
    ptrs = weight + chunk * CHUNK_STEP + rows.to(tl.int64)[:, None] * ROW_STEP
    ptrs += tl.arange(0, P)[None, :]
    return tl.load(ptrs, mask=(rows < end)[:, None], other=0)


@triton.jit
def _add_planes(
    acc, packed, scales_ptr, row, end, k, x1, x2, NUM_ROWS: tl.constexpr, ROWS: tl.constexpr,
    GROUP: tl.constexpr, E2M1: tl.constexpr, UPPER: tl.constexpr, LEFT: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """acc + the products of two planes of packed weights, which are from column k on, with their
    columns of x.
    """
    rows = row + tl.arange(0, ROWS)
    ptrs = scales_ptr + k // GROUP * NUM_ROWS + rows
    words = tl.load(ptrs, mask=rows < end, other=0)
    if E2M1:
        first, second = mxfp4.unpack_pair(packed, words, UPPER, ASM)
    else:
        first, second = int4.unpack_pair(packed, words, UPPER, x1.dtype, ASM)
    acc = _add_product(acc, first.to(x1.dtype), x1, LEFT)
    return _add_product(acc, second.to(x2.dtype), x2, LEFT)


@triton.jit
def _scaled(x, scales_ptr, places, used):
    """Rows of x: [T, columns] divided by scales for 8 bits, which are stored."""
    scale = scale_of(tl.max(tl.abs(x), 1))
    tl.store(scales_ptr + places, scale, mask=used)
    return x * (1.0 / scale)[:, None]


@triton.jit
def _gate_up_kernel(
    x_ptr, x_scales_ptr, weight, codes_scales_ptr, bias_ptr, order_ptr, starts_ptr, out_ptr,
    out_scales_ptr,
    K: tl.constexpr, I: tl.constexpr, M: tl.constexpr, E: tl.constexpr, E_PAD: tl.constexpr,
    SCALE_ROWS: tl.constexpr, SCALE_COLS: tl.constexpr, X_BLOCK: tl.constexpr, GELU: tl.constexpr,
    LIMIT: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_K: tl.constexpr,
    PLANE: tl.constexpr, ROW_STEP: tl.constexpr, CHUNK_STEP: tl.constexpr, E2M1: tl.constexpr,
    LEFT: tl.constexpr, TMA: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # One program: BLOCK_I inner columns of BLOCK_T pairs of one expert. Results in 8 bits share a
    # scale. Weights in 4 bits have a PLANE.
    launch_dependents(PDL)
    wait(PDL)
    expert, begin, end = _tile(order_ptr, starts_ptr, tl.program_id(1), E, E_PAD, BLOCK_T)
    if expert >= E:
        return
    t = begin + tl.arange(0, BLOCK_T)
    pairs = t if order_ptr is None else tl.load(order_ptr + t, mask=t < end, other=0)
    first = tl.program_id(0) * BLOCK_I
    token, used = (pairs // K).to(tl.int64), t < end
    row = expert * 2 * I + first
    end_row = expert * 2 * I + I
    gate = _no_sum(BLOCK_I, BLOCK_T, LEFT)
    up = _no_sum(BLOCK_I, BLOCK_T, LEFT)
    if PLANE > 0:
        gate, up = _add_chunks(
            gate, up, x_ptr, token, used, weight, codes_scales_ptr, row, end_row, I, M, E * 2 * I,
            BLOCK_I, SCALE_COLS, PLANE, ROW_STEP, CHUNK_STEP, E2M1, LEFT, ASM,
        )  # fmt: skip
    else:
        for k in range(0, M, BLOCK_K):
            x = _load_rows(x_ptr, token, used, k, M, BLOCK_K)
            x_scale = _block_scale(x_scales_ptr, token, k, used, M, X_BLOCK)
            gate = _add_tile(
                gate, x, x_scale, weight, codes_scales_ptr, row, end_row, k, M, BLOCK_I, BLOCK_K,
                SCALE_ROWS, SCALE_COLS, X_BLOCK, LEFT, TMA,
            )  # fmt: skip
            up = _add_tile(
                up, x, x_scale, weight, codes_scales_ptr, row + I, end_row + I, k, M, BLOCK_I,
                BLOCK_K, SCALE_ROWS, SCALE_COLS, X_BLOCK, LEFT, TMA,
            )  # fmt: skip
    if LEFT:
        gate, up = gate.T, up.T
    i = first + tl.arange(0, BLOCK_I)
    if x_scales_ptr is not None:
        of_rows = 1.0
        if X_BLOCK == 0:
            of_rows = tl.load(x_scales_ptr + token, mask=used, other=0.0)[:, None]
        gate *= of_rows * _row_scales(codes_scales_ptr, row - first, i, i < I, SCALE_ROWS)
        up *= of_rows * _row_scales(codes_scales_ptr, row - first + I, i, i < I, SCALE_ROWS)
    if bias_ptr is not None:
        bias_ptrs = bias_ptr + expert * 2 * I + i
        gate += tl.load(bias_ptrs, mask=i < I, other=0.0).to(tl.float32)[None, :]
        up += tl.load(bias_ptrs + I, mask=i < I, other=0.0).to(tl.float32)[None, :]
    out = activate_and_mul(gate, up, GELU, LIMIT)
    if out_scales_ptr is not None:
        out = _scaled(out, out_scales_ptr + tl.program_id(0), t * tl.cdiv(I, BLOCK_I), used)
    ptrs = out_ptr + t.to(tl.int64)[:, None] * I + i[None, :]  # in the sorted order
    out = out.to(out_ptr.dtype.element_ty)
    tl.store(ptrs, out, mask=used[:, None] & (i < I)[None, :])


@triton.jit(do_not_specialize=["T"])
def _down_kernel(
    x, x_scales_ptr, weight, codes_scales_ptr, bias_ptr, order_ptr, starts_ptr, scale_ptr, out_ptr,
    T,
    K: tl.constexpr, I: tl.constexpr, M: tl.constexpr, E: tl.constexpr, E_PAD: tl.constexpr,
    SCALE_ROWS: tl.constexpr, SCALE_COLS: tl.constexpr, X_BLOCK: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, PLANE: tl.constexpr,
    ROW_STEP: tl.constexpr, CHUNK_STEP: tl.constexpr, E2M1: tl.constexpr, LEFT: tl.constexpr,
    TMA: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # One program: BLOCK_M columns of the weighted results of BLOCK_T pairs of one expert.
    launch_dependents(PDL)
    wait(PDL)
    expert, begin, end = _tile(order_ptr, starts_ptr, tl.program_id(1), E, E_PAD, BLOCK_T)
    if expert >= E:
        return
    first = tl.program_id(0) * BLOCK_M
    row = expert * M + first
    t = begin + tl.arange(0, BLOCK_T)
    acc, used, end_row = _no_sum(BLOCK_M, BLOCK_T, LEFT), t < end, expert * M + M
    if PLANE > 0:
        acc, _ = _add_chunks(
            acc, acc, x, t.to(tl.int64), used, weight, codes_scales_ptr, row, end_row, 0, I, E * M,
            BLOCK_M, SCALE_COLS, PLANE, ROW_STEP, CHUNK_STEP, E2M1, LEFT, ASM,
        )  # fmt: skip
    else:
        for k in range(0, I, BLOCK_K):
            inner = load_tile(x, begin, end, k, I, BLOCK_T, BLOCK_K, TMA)
            x_scale = _block_scale(x_scales_ptr, t.to(tl.int64), k, used, I, X_BLOCK)
            acc = _add_tile(
                acc, inner, x_scale, weight, codes_scales_ptr, row, end_row, k, I, BLOCK_M,
                BLOCK_K, SCALE_ROWS, SCALE_COLS, X_BLOCK, LEFT, TMA,
            )  # fmt: skip
    if LEFT:
        acc = acc.T
    m = first + tl.arange(0, BLOCK_M)
    if x_scales_ptr is not None:
        acc *= _row_scales(codes_scales_ptr, expert * M, m, m < M, SCALE_ROWS)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + expert * M + m, mask=m < M, other=0.0)
        acc += bias.to(tl.float32)[None, :]
    pairs = t if order_ptr is None else tl.load(order_ptr + t, mask=t < end, other=0)
    scale = tl.load(scale_ptr + pairs, mask=t < end, other=0.0)
    rows = (pairs % K).to(tl.int64) * T + pairs // K
    out = (acc * scale[:, None]).to(out_ptr.dtype.element_ty)
    ptrs = out_ptr + rows[:, None] * M + m[None, :]
    tl.store(ptrs, out, mask=(t < end)[:, None] & (m < M)[None, :])


class Operand(NamedTuple):
    """A weight as the kernels take it.

    Attributes:
        data: values or codes.
        scales: scales of codes; None: values.
        bits: bits of a value.
        constants: constants of the kernels that are about its format.
    """

    data: torch.Tensor
    scales: torch.Tensor | None
    bits: int
    constants: dict[str, int]


def operand(weight: AnyWeight) -> Operand:
    """A weight in any format as the kernels take it."""
    if isinstance(weight, Mxfp4Codes):
        sizes = {"PLANE": MXFP4_BLOCK, "ROW_STEP": MXFP4_BLOCK}
        sizes |= {"CHUNK_STEP": MXFP4_BLOCK * len(weight), "E2M1": True}
        assert weight.data.numel() < 2**31, "the kernels count in 32 bits"
        words = weight.exponents.view(torch.int32)
        return Operand(weight.data, words, 4, _scale_block(1, CHUNK) | sizes)
    if isinstance(weight, Int4Codes):
        plane, words = weight.plane, weight.scales.view(torch.int32)
        sizes = {"PLANE": plane, "ROW_STEP": weight.data.shape[1], "CHUNK_STEP": plane}
        sizes |= {"E2M1": False}
        return Operand(weight.data, words, 4, _scale_block(1, weight.group) | sizes)
    data, scales, block = stored(weight)
    none = {"PLANE": 0, "ROW_STEP": 0, "CHUNK_STEP": 0, "E2M1": False}
    return Operand(data, scales, 8 * data.element_size(), _scale_block(*block) | none)


def _scale_block(rows: int, columns: int) -> dict[str, int]:
    return {"SCALE_ROWS": rows, "SCALE_COLS": columns}


def grouped(
    x: torch.Tensor,
    weights: ExpertWeights,
    order: torch.Tensor | None,
    starts: torch.Tensor,
    scales: torch.Tensor,
    out: torch.Tensor,
    tiles: Tiles | None = None,
    pairs_per_expert: int | None = None,
) -> None:
    """`gated_experts` of sorted pairs, or those of a single token.

    Args:
        x: [T, M]
        weights: experts of the layer.
        order, starts: see `sort_pairs`; of a single token None, and [1, k] its experts.
        scales: [T, k] float32.
        out: [k, T, M], buffer for the results.
        tiles: tiles of the products; None: chosen here.
        pairs_per_expert: number of pairs for which they are chosen; None: those that there are.
    """
    gate_up, down = operand(weights.gate_up), operand(weights.down)
    (k, T, M), E, I = out.shape, weights.num_experts, shape_of(weights.down)[1]
    x_block = act_block(weights, x.dtype)
    bits, by_blocks = 16 if x_block is None else 8, bool(x_block)
    plane = gate_up.constants["PLANE"]
    count = T * k if pairs_per_expert is None else E * pairs_per_expert
    tiles = tiles or choose_tiles(count, E, x, gate_up.bits, bits, by_blocks, plane)
    common = {
        **{"K": k, "M": M, "I": I, "E": E, "E_PAD": next_power_of_2(E), "ASM": has_ptx(x)},
        **{"BLOCK_T": tiles.block_t, "LEFT": tiles.left},
        **{"num_warps": tiles.warps, "num_stages": tiles.stages, **pdl_options(x)},
    }
    of_pairs = _gate_up(x, x_block, weights, gate_up, order, starts, tiles, common)
    values, inner_scales, _ = stored(of_pairs)
    width = tiles.block_k if inner_scales is None else min(tiles.block_k, tiles.block_i)
    tma = _has_tma(x.dtype, down, values)
    _down_kernel[(cdiv(M, tiles.block_m), _num_tiles(T * k, E, tiles))](
        describe(values, tiles.block_t, width) if tma else values, inner_scales,
        describe(down.data, tiles.block_m, width) if tma else down.data,
        down.scales, weights.down_bias, order, starts, scales, out, T,
        X_BLOCK=0 if inner_scales is None else tiles.block_i, BLOCK_M=tiles.block_m,
        BLOCK_K=width, TMA=tma, **down.constants, **common,
    )  # fmt: skip


def _gate_up(
    x: torch.Tensor,
    x_block: int | None,
    weights: ExpertWeights,
    gate_up: Operand,
    order: torch.Tensor | None,
    starts: torch.Tensor,
    tiles: Tiles,
    common: dict[str, Any],
) -> torch.Tensor | Codes:
    """The inner values of all pairs, in the order of their experts: [T * k, I]."""
    N, E, I = len(x) * common["K"], weights.num_experts, shape_of(weights.down)[1]
    inner: torch.Tensor | Codes
    if x_block is None:
        tokens, x_scales, inner = x.contiguous(), None, spare_rows(N, I, like=x)
    else:
        tokens, x_scales, _ = stored(quantize(x, x_block))
        inner = empty_codes(N, I, tiles.block_i, x.device)
    values, inner_scales, _ = stored(inner)
    tma, width = _has_tma(x.dtype, gate_up, values), tiles.block_k
    _gate_up_kernel[(cdiv(I, tiles.block_i), _num_tiles(N, E, tiles))](
        tokens, x_scales, describe(gate_up.data, tiles.block_i, width) if tma else gate_up.data,
        gate_up.scales, weights.gate_up_bias, order, starts, values, inner_scales,
        X_BLOCK=x_block or 0, GELU=weights.gelu, LIMIT=weights.limit, BLOCK_I=tiles.block_i,
        BLOCK_K=width, TMA=tma, **gate_up.constants, **common,
    )  # fmt: skip
    return inner


def _num_tiles(N: int, E: int, tiles: Tiles) -> int:
    """The maximum number of tiles of N pairs: the last of each expert may be partial."""
    return min(N, E) + N // tiles.block_t


def _has_tma(dtype: torch.dtype, weight: Operand, inner: torch.Tensor) -> bool:
    """Whether a product's matrices are copied by hardware."""
    described = can_describe(weight.data) and can_describe(inner) if weight.bits > 4 else False
    return dtype in HALF and described
