"""Matrix products with weights in INT4 (`tensors.int4`) and activations in 16 bits.

The product of a single row is in `int4_row.py`. Those of more have a kernel of their own on Hopper
(`hopper_int4.py`), unless few rows have few outputs. Where they have none, few rows use tiles,
whose weights are unpacked on their way from shared memory to tensor cores. Many rows, on Hopper
very many, use the library, with weights that are unpacked a part at a time (docs/experiments.md).

Letters: T rows, N outputs, K inputs, P columns of a plane.
"""

import functools
import itertools
import math

import torch
import triton
import triton.language as tl

from nanovllm.kernels.device_features import (
    TILE_ROWS,
    adjacent_rows,
    can_describe,
    describe,
    has_own_kernels,
    has_ptx,
    has_room,
    launch_dependents,
    load_tile,
    pdl_options,
    wait,
)
from nanovllm.kernels.products.int4 import ROWS, numbers_of, unpack_pair
from nanovllm.kernels.products.int4_row import one_row
from nanovllm.kernels.products.linear import HALF, multiply_parts
from nanovllm.kernels.products.tiles import COLUMNS, OUTPUTS, SPLITS, Tiles, empty_parts
from nanovllm.tensors.int4 import PLANES, Int4Codes
from nanovllm.utils.device import MIN_CAPABILITY, capability, num_multiprocessors
from nanovllm.utils.integers import cdiv, next_power_of_2

MAX_ROWS = 256  # for products by tiles
FEW_ROWS = 64  # up to which tiles have 64 outputs, and are loaded by TMA
PROGRAMS = 128  # to run at once, with large tiles
MIN_TILES = 64  # of few rows, from which the kernel on Hopper is faster than that of all GPUs
# Cycles, for `choose_hopper_tiles`, from times on an H100: of unpacking OUTPUTS rows of a stage, of
# its waits, and of the first inputs and the results of a tile; and the share of the product that
# adds to unpacking.
UNPACKING, WAITS, EDGES, SHARE = 600, 800, 6000, 0.3
MANY_ROWS = 128  # of a tile
ROOMY = 512  # rows above which all multiprocessors have the largest tiles
LIBRARY_ROWS = 8192  # from which the library is faster, with weights that are unpacked before
ONE_TILE = 64, 64  # rows and outputs of the tile of any number of rows, see `in_fixed_order`


def can_multiply(weight: Int4Codes, dtype: torch.dtype) -> bool:
    """Whether products of `dtype` with this weight run on its device."""
    device, (N, _) = weight.data.device, weight.shape
    if device.type == "cuda" and capability(device.index) < MIN_CAPABILITY:
        return False
    return dtype in HALF and weight.plane >= 16 and N % ROWS == 0


@triton.jit(do_not_specialize=["T", "SPAN"])
def _int4_tiles_kernel(
    x, weight, words_ptr, bias_ptr, out_ptr, T, N, K: tl.constexpr, SPAN,
    GROUP: tl.constexpr, P: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
    BF16: tl.constexpr, TMA: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # One program: BLOCK_N outputs of BLOCK_T rows, summed over SPAN chunks of 4 P inputs. The
    # weights are the left operand, which tensor cores read from registers. Programs of the same
    # weights are neighbours, so one of them reads these from memory.
    launch_dependents(PDL)
    DTYPE: tl.constexpr = tl.bfloat16 if BF16 else tl.float16
    t, n, split = tl.program_id(0) * BLOCK_T, tl.program_id(1) * BLOCK_N, tl.program_id(2)
    rows, outputs = t + tl.arange(0, BLOCK_T), n + tl.arange(0, BLOCK_N)
    acc = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    wait(PDL)
    for chunk in range(split * SPAN, (split + 1) * SPAN):
        packed = load_tile(weight, n, None, chunk * P, K // 4, BLOCK_N, P, TMA)
        for half in tl.static_range(2):
            k = chunk * (4 * P) + half * 2 * P
            word = tl.load(words_ptr + k // GROUP * N + outputs)
            first, second = unpack_pair(packed, word, half == 1, DTYPE, ASM)
            acc = tl.dot(first, load_tile(x, t, T, k, K, BLOCK_T, P, TMA).T, acc)
            acc = tl.dot(second, load_tile(x, t, T, k + P, K, BLOCK_T, P, TMA).T, acc)
    if bias_ptr is not None:  # a summand of the first part
        bias = tl.load(bias_ptr + outputs).to(tl.float32)
        acc += tl.where(split == 0, bias, 0.0)[:, None]
    out_ptrs = out_ptr + (split * T + rows[None, :]).to(tl.int64) * N + outputs[:, None]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=rows[None, :] < T)


def choose_tiles(T: int, N: int, K: int, P: int, partial: bool, room: bool) -> Tiles | None:
    """Choose tiles for T rows; None if the library is faster (measured on an H200) or tiles do not
    fit.

    Args:
        N, K, P: rows, columns and columns of a plane of the weight.
        partial: whether results may be partial.
        room: see `has_room`.
    """
    if T <= FEW_ROWS or not room or N % 128:
        block_t = max(16, min(FEW_ROWS, next_power_of_2(T)))
        stages = {16: 4, 32: 3}.get(block_t, 2) if room else 2
        tiles, at_once = Tiles(block_t, 64, PLANES * P, stages=stages), 4 * PROGRAMS
    else:
        tiles, at_once = Tiles(TILE_ROWS, 128, PLANES * P, warps=8, stages=3), PROGRAMS
    if T > MAX_ROWS or N % tiles.block_n:
        return None
    return tiles.split(T, N, at_once, K // tiles.block_k) if partial else tiles


def _by_tiles(
    x: torch.Tensor, weight: Int4Codes, bias: torch.Tensor | None, tiles: Tiles
) -> torch.Tensor:
    T, (N, K), P, S = len(x), weight.shape, weight.plane, tiles.splits
    out = empty_parts(S, T, N, x.dtype, x.device)
    tma = tiles.block_n == 64 and can_describe(x) and can_describe(weight.data)
    _int4_tiles_kernel[tiles.grid(T, N)](
        describe(x, tiles.block_t, P) if tma else x.contiguous(),
        describe(weight.data, tiles.block_n, P) if tma else weight.data,
        weight.scales.view(torch.int32), bias, out, T, N, K, K // (PLANES * P) // S,
        GROUP=weight.group, P=P, BLOCK_T=tiles.block_t, BLOCK_N=tiles.block_n,
        BF16=x.dtype == torch.bfloat16, TMA=tma, ASM=has_ptx(x),
        num_warps=tiles.warps, num_stages=tiles.stages, **pdl_options(x),
    )  # fmt: skip
    return out


def choose_hopper_tiles(
    T: int, N: int, K: int, num_processors: int, partial: bool = False, gated: bool = False
) -> Tiles:
    """Choose the tiles of a product of T rows by `hopper_int4`: those whose last ends first, where
    every multiprocessor computes as many as its share, rounded up.

    Args:
        N, K: rows and columns of the weight.
        num_processors: multiprocessors of the GPU.
        partial: whether results may be partial.
        gated: whether the weight has gates and the values that these multiply.
    """
    stages, widest = cdiv(K, COLUMNS), 2 * OUTPUTS if gated or N % (2 * OUTPUTS) == 0 else OUTPUTS
    if T > ROOMY:
        return Tiles(MANY_ROWS, widest, COLUMNS)

    def cycles(tiles: Tiles) -> float:
        product = tiles.block_n * tiles.block_t * COLUMNS / 2048  # multiplications per cycle
        unpacking = SHARE * product + tiles.block_n // OUTPUTS * UNPACKING + WAITS
        of_item = stages // tiles.splits * max(product, unpacking) + EDGES
        return cdiv(math.prod(tiles.grid(T, N)), num_processors) * of_item

    rows, splits = [MANY_ROWS], [1]
    if T <= MAX_ROWS:
        rows = [FEW_ROWS, MANY_ROWS] if T > FEW_ROWS else [max(16, next_power_of_2(T))]
        splits += [S for S in SPLITS if partial and stages % S == 0]
    widths = {2 * OUTPUTS if gated else OUTPUTS, widest}
    sizes = itertools.product(rows, widths, [COLUMNS], splits)
    return min(itertools.starmap(Tiles, sizes), key=cycles)


def takes_hopper_kernel(
    x: torch.Tensor, weight: Int4Codes, partial: bool = False, gated: bool = False
) -> bool:
    """Whether `hopper_int4` multiplies x: [T, K] by this weight, rather than the kernel of all GPUs
    or the library.

    Args:
        partial: whether results may be partial.
        gated: whether the weight has gates and the values that these multiply.
    """
    whole = len(weight) % OUTPUTS == 0 and weight.plane in (32, 64)
    whole &= 1 < len(x) < LIBRARY_ROWS and x.dtype in HALF and weight.scales.dtype == x.dtype
    if not whole or not has_own_kernels(x) or not can_describe(x):
        return False
    processors = num_multiprocessors(x.device.index)
    return has_tiles(len(x), *weight.shape, processors, partial, gated)


def has_tiles(T: int, N: int, K: int, num_processors: int, partial: bool, gated: bool) -> bool:
    """Whether there are many rows, or most multiprocessors have a tile of `hopper_int4`. For the
    parameters, see `choose_hopper_tiles`.
    """
    tiles = choose_hopper_tiles(T, N, K, num_processors, partial, gated)
    return T > FEW_ROWS or math.prod(tiles.grid(T, N)) >= MIN_TILES


def _by_hopper(
    x: torch.Tensor,
    weight: Int4Codes,
    bias: torch.Tensor | None,
    partial: bool = False,
    gelu: bool | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    from nanovllm.kernels.products.hopper_int4 import hopper_int4

    processors = num_multiprocessors(x.device.index)
    tiles = choose_hopper_tiles(len(x), *weight.shape, processors, partial, gelu is not None)
    return hopper_int4(x, weight, bias, gelu=gelu, out=out, tiles=tiles)


def gated(
    x: torch.Tensor,
    weight: Int4Codes,
    bias: torch.Tensor | None,
    gelu: bool,
    out: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """See `gated.gated_product`."""
    if not takes_hopper_kernel(x, weight, gated=True) or len(weight) % 256:
        return None
    return _by_hopper(x, weight, bias, gelu=gelu, out=out)


def linear(
    x: torch.Tensor,
    weight: Int4Codes,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    partial: bool = False,
) -> torch.Tensor:
    """`x @ weight.T + bias`.

    Args:
        x: [T, K] of `dtype`.
        weight: [N, K]; `can_multiply` must be true.
        dtype: torch.dtype of the results.
        bias: [N]; None: 0.
        partial: whether the result may be partial, its sum left to the caller.

    Returns:
        [T, N]; or [S, T, N] float32, to be summed over S, if `partial` and that is faster.
    """
    T, (N, K) = len(x), weight.shape
    if T == 1:
        return one_row(x, weight, bias, partial=partial)
    if takes_hopper_kernel(x, weight, partial):
        return _by_hopper(x, weight, bias, partial)
    tiles = choose_tiles(T, N, K, weight.plane, partial, has_room(x))
    if tiles is not None:
        return _by_tiles(x, weight, bias, tiles)
    out = torch.empty(T, N, dtype=dtype, device=x.device)
    multiply_into(out, x, weight, bias)
    return out


def can_fix_order(weight: Int4Codes) -> bool:
    """Whether `in_fixed_order` multiplies by this weight, if `can_multiply`."""
    return len(weight) % ONE_TILE[1] == 0


def in_fixed_order(
    x: torch.Tensor, weight: Int4Codes, dtype: torch.dtype, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`linear`, each row alike, whatever their number; the tile is not tuned."""
    tiles = Tiles(*ONE_TILE, PLANES * weight.plane, stages=2)
    return _by_tiles(adjacent_rows(x), weight, bias, tiles)


def multiply_into(
    out: torch.Tensor, x: torch.Tensor, weight: Int4Codes, bias: torch.Tensor | None
) -> None:
    """`linear` of many rows into `out`: [T, N]; without a kernel by the library, a part of the
    weight at a time.
    """
    if takes_hopper_kernel(x, weight) and out.is_contiguous():
        _by_hopper(x, weight, bias, out=out)
        return
    multiply_parts(out, x, bias, functools.partial(numbers_of, weight, out.dtype), ROWS)
