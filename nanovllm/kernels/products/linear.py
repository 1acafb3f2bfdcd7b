"""Matrix products of few rows, whose time is that of reading the weights.

A library's product of a few rows leaves much of the GPU idle. Two kernels are faster
(docs/experiments.md): that of a single row (`row.py`), and one that may split the sum (split-K)
into partial results, which the next kernel adds. Everything else goes to `F.linear`. A third kernel
multiplies any number of rows alike (`Build.fixed_order`).

Letters: T rows, N outputs, K inputs.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from nanovllm.kernels.device_features import (
    TILE_ROWS,
    adjacent_rows,
    can_describe,
    describe,
    has_own_kernels,
    has_room,
    launch_dependents,
    load_tile,
    pdl_options,
    prefetch_weights,
    wait,
)
from nanovllm.kernels.products.row import one_row
from nanovllm.kernels.products.tiles import Tiles, empty_parts
from nanovllm.utils.integers import cdiv, next_power_of_2

HALF = (torch.bfloat16, torch.float16)
BLOCK_N = 64
SMALL = 2**23  # elements of a weight so small that the library leaves the GPU idle
PROGRAMS = 128  # to run at once
MAX_ROWS = 256  # for products by tiles
PART = 2**24  # elements of a part in `multiply_parts`, which stays in the L2 cache
NEIGHBOURS = 32  # tiles of rows that the programs of the same weights compute, in `in_fixed_order`
# Tiles on Hopper, all by WGMMA: the largest that fill the GPU are the fastest (measured: H200).
WGMMA_TILES = (
    Tiles(256, 128, 64, warps=8, stages=3),
    Tiles(128, 128, 64, warps=8),
    Tiles(128, 64, 128, stages=3),
    Tiles(64, 128, 64, warps=8),
    Tiles(64, 64, 128),
    Tiles(32, 64, 256, stages=3),
    Tiles(16, 64, 128),
)
ENOUGH_PROGRAMS = 96  # that they fill it


@triton.jit(do_not_specialize=["T"])
def _tiles_kernel(
    x_desc, weight_desc, weight_ptr, bias_ptr, out_ptr, T, N, K, SPAN,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # One program: BLOCK_N outputs of BLOCK_T rows, summed over SPAN of the inputs. The weights are
    # the left operand: its tile has the 64 rows that tensor cores need, however small T is.
    launch_dependents(PDL)
    n, t, split = tl.program_id(0) * BLOCK_N, tl.program_id(1) * BLOCK_T, tl.program_id(2)
    acc = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    if bias_ptr is not None:  # a summand of the first part
        bias = tl.load(bias_ptr + n + tl.arange(0, BLOCK_N)).to(tl.float32)
        acc += tl.where(split == 0, bias, 0.0)[:, None]
    if t == 0:
        prefetch_weights(weight_ptr, n, split * SPAN, K, SPAN, BLOCK_N, PDL)
    wait(PDL)
    for k in range(split * SPAN, (split + 1) * SPAN, BLOCK_K):
        acc = tl.dot(weight_desc.load([n, k]), x_desc.load([t, k]).T, acc)
    t += tl.arange(0, BLOCK_T)[None, :]
    out_ptrs = out_ptr + (split * T + t) * N + n + tl.arange(0, BLOCK_N)[:, None]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=t < T)


def choose_tiles(T: int, N: int, K: int, partial: bool) -> Tiles | None:
    """Choose tiles for T rows; None if the library is faster (measured on an H200).

    Args:
        N: rows of the weight.
        K: columns of the weight.
        partial: whether results may be partial.
    """
    small = N * K <= SMALL
    most = MAX_ROWS if small and partial else 128
    if most < T or N % BLOCK_N or K % 512:
        return None
    block_t = max(16, min(64 if N <= 1024 else TILE_ROWS, next_power_of_2(T)))
    block_k = 256 if partial and block_t <= 32 and K % 1024 == 0 else 128
    tiles = Tiles(block_t, BLOCK_N, block_k, stages=3 if block_k == 256 else 4)
    if partial:  # about one program per multiprocessor: more would wait for the first to end
        tiles = tiles.split(T, N, PROGRAMS)
    programs = N // BLOCK_N * cdiv(T, block_t)
    if tiles.splits == 1 and not (small and PROGRAMS // 2 <= programs <= PROGRAMS):
        return None
    return tiles


def _by_tiles(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tiles: Tiles
) -> torch.Tensor:
    (T, K), N, S = x.shape, weight.shape[0], tiles.splits
    out = empty_parts(S, T, N, x.dtype, x.device)
    row_tiles, output_tiles, _ = tiles.grid(T, N)
    _tiles_kernel[(output_tiles, row_tiles, S)](
        describe(x, tiles.block_t, tiles.block_k), describe(weight, BLOCK_N, tiles.block_k),
        weight, bias, out, T, N, K, K // S,
        BLOCK_T=tiles.block_t, BLOCK_N=BLOCK_N, BLOCK_K=tiles.block_k, num_warps=4,
        num_stages=tiles.stages, **pdl_options(x),
    )  # fmt: skip
    return out


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, partial: bool = False
) -> torch.Tensor:
    """`x @ weight.T + bias`.

    Args:
        x: [T, K]
        weight: [N, K], contiguous.
        bias: [N]; None: 0.
        partial: whether the result may be partial, its sum left to the caller.

    Returns:
        [T, N]; or [S, T, N] float32, to be summed over S, if `partial` and that is faster.
    """
    (T, K), N = x.shape, weight.shape[0]
    if x.dtype in HALF:
        if T == 1:
            return one_row(x, weight, bias)
        tiles = choose_tiles(T, N, K, partial)
        if tiles is not None and can_describe(x) and can_describe(weight):
            return _by_tiles(x, weight, bias, tiles)
    return F.linear(x, weight, bias)


@triton.jit(do_not_specialize=["T"])
def _fixed_order_kernel(
    x, weight, bias_ptr, out_ptr, T, N, K: tl.constexpr, NEIGHBOURS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    # One program: BLOCK_N outputs of BLOCK_T rows, over all inputs. The weights are the left
    # operand. Programs of the same weights are neighbours, for NEIGHBOURS tiles of rows: more would
    # not stay in the L2 cache until the next weights.
    launch_dependents(PDL)
    in_group = NEIGHBOURS * tl.cdiv(N, BLOCK_N)
    first, i = tl.program_id(0) // in_group * NEIGHBOURS, tl.program_id(0) % in_group
    size = tl.minimum(tl.cdiv(T, BLOCK_T) - first, NEIGHBOURS)
    t, n = (first + i % size) * BLOCK_T, i // size * BLOCK_N
    rows, outputs = t + tl.arange(0, BLOCK_T), n + tl.arange(0, BLOCK_N)
    acc = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    wait(PDL)
    for k in range(0, K, BLOCK_K):
        left = load_tile(weight, n, N, k, K, BLOCK_N, BLOCK_K, TMA)
        right = load_tile(x, t, T, k, K, BLOCK_T, BLOCK_K, TMA).T
        acc = tl.dot(left, right, acc, input_precision="ieee")
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + outputs, mask=outputs < N, other=0.0).to(tl.float32)[:, None]
    out_ptrs = out_ptr + rows.to(tl.int64)[None, :] * N + outputs[:, None]
    mask = (rows < T)[None, :] & (outputs < N)[:, None]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=mask)


def fixed_order_tiles(weight: torch.Tensor, T: int) -> Tiles:
    """Tiles for T rows of a weight [N, K], of which every row has the same bits by all that any T
    gets. On Hopper these follow T, as its WGMMA adds up the inputs of an output in one order,
    whatever the size of the tile (measured: docs/experiments.md, 55); elsewhere they do not.
    """
    N = len(weight)
    if weight.dtype not in HALF:
        return Tiles(32, 32, 32, stages=2)
    if not has_room(weight):
        return Tiles(64, 64, 64, stages=2)
    if has_own_kernels(weight):
        rows = max(16, next_power_of_2(T))
        fitting = [tiles for tiles in WGMMA_TILES if tiles.block_t <= rows]
        filling = (tiles for tiles in fitting if math.prod(tiles.grid(T, N)) >= ENOUGH_PROGRAMS)
        return next(filling, fitting[-1])
    if N <= 2048:
        return Tiles(64, 32, 128)
    return Tiles(64, 64, 128) if N <= 8192 else Tiles(64, 128, 64, warps=8)


def in_fixed_order(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`x @ weight.T + bias`: [T, N], each row alike, whatever their number.

    Args:
        x: [T, K]
        weight: [N, K], contiguous.
        bias: [N]; None: 0.
        out: [T, N], contiguous, output buffer; None: a new one.
    """
    (T, K), N, tile = x.shape, len(weight), fixed_order_tiles(weight, len(x))
    if out is None:
        out = torch.empty(T, N, dtype=x.dtype, device=x.device)
    assert out.is_contiguous(), "rows are written whole"
    x = adjacent_rows(x)  # rows that lie apart may have another kernel
    tma = x.dtype in HALF and can_describe(x) and can_describe(weight)
    row_tiles, output_tiles, _ = tile.grid(T, N)
    _fixed_order_kernel[(row_tiles * output_tiles,)](
        describe(x, tile.block_t, tile.block_k) if tma else x,
        describe(weight, tile.block_n, tile.block_k) if tma else weight, bias, out, T, N, K=K,
        NEIGHBOURS=NEIGHBOURS, BLOCK_T=tile.block_t, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
        TMA=tma, num_warps=tile.warps, num_stages=tile.stages, **pdl_options(x),
    )  # fmt: skip
    return out


def multiply_parts(
    out: torch.Tensor,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    numbers: Callable[[int, int], torch.Tensor],
    multiple: int,
) -> None:
    """`x @ weight.T + bias` into `out`: [T, N], by the library, a part of the weight at a time.

    Args:
        numbers: function that gives the values of the weight's rows, from the first to the end.
        multiple: divisor of the number of rows in a part.
    """
    N, K = out.shape[1], x.shape[1]
    step = max(multiple, PART // K // multiple * multiple)
    for begin in range(0, N, step):
        end = min(begin + step, N)
        part, into = numbers(begin, end).T, out[:, begin:end]
        if bias is None:
            torch.mm(x, part, out=into)
        else:
            torch.addmm(bias[begin:end], x, part, out=into)
