"""Matrix products in FP8: both operands are `Codes`, the sums float32.

Activations are quantised by the kernel before, with one scale per token (or per 128 inputs of it,
if weights have blocks of 128 x 128); a single row stays in 16 bits. Products of few rows use our
kernels, which halve the bytes and also leave no time unused (docs/experiments.md); others use the
library's.

Letters: T rows, N outputs, K inputs.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from nanovllm.kernels.device_features import (
    TILE_ROWS,
    can_describe,
    describe,
    launch_dependents,
    pdl_options,
    prefetch_weights,
    wait,
)
from nanovllm.kernels.fp8 import quantize
from nanovllm.kernels.products.fp8_row import one_row
from nanovllm.kernels.products.linear import BLOCK_N, HALF
from nanovllm.kernels.products.tiles import Tiles, empty_parts
from nanovllm.tensors.fp8 import FP8, Codes
from nanovllm.utils.device import FP8_CAPABILITY, capability
from nanovllm.utils.integers import cdiv, next_power_of_2

BLOCK = 128  # inputs, and outputs of weights, that may share a scale
SMALL = 2**26  # elements of a weight for which the sum over 256 rows is split
# Programs that run at once: two per multiprocessor, or one with large tiles. If stages leave room
# for another, programs of the next kernel start first where fewer run, and are placed unevenly
# (docs/experiments.md, 38).
PROGRAMS, ROOMY_PROGRAMS = 256, 132
MAX_ROWS = 192  # up to which a program computes a tile and more rows
FEW_INPUTS = 2048  # up to which reading the weights twice is faster than two parts
ONE_TILE = Tiles(64, BLOCK_N, BLOCK)  # of any number of rows, see `in_fixed_order`; not tuned


def can_multiply(weight: Codes, dtype: torch.dtype) -> bool:
    """Whether products of `dtype` with this weight run on its device."""
    device, (N, K) = weight.codes.device, weight.codes.shape
    if device.type == "cuda" and capability(device.index) < FP8_CAPABILITY:
        return False
    return knows_blocks(weight) and dtype in HALF and N % 16 == K % 16 == 0


def knows_blocks(weight: Codes) -> bool:
    """Whether kernels support its scales: of rows, or of blocks of 128 x 128."""
    return weight.block in ((1, weight.codes.shape[1]), (BLOCK, BLOCK))


def act_block_of(weight: Codes) -> int:
    """The number of inputs that share a scale, in activations for `weight`; 0: all of a row."""
    return 0 if weight.block[0] == 1 else BLOCK


@triton.jit
def _store(acc, x_scale, scale, bias, out_ptr, rows, outputs, T, N):
    if scale is not None:
        acc *= x_scale[None, :] * scale[:, None]
    if bias is not None:
        acc += bias[:, None]
    out_ptrs = out_ptr + rows.to(tl.int64)[None, :] * N + outputs[:, None]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=rows[None, :] < T)


@triton.jit(do_not_specialize=["T"])
def _fp8_tiles_kernel(
    x_desc, more_desc, x_scales_ptr, weight_desc, weight_ptr, scales_ptr, bias_ptr, out_ptr,
    T, N, K, SPAN, SCALE_BLOCK: tl.constexpr, BLOCK_T: tl.constexpr, MORE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # One program: BLOCK_N outputs of BLOCK_T rows, and of MORE if scales are of rows, summed over
    # SPAN of the inputs. The weights are the left operand: its tile has the 64 rows that tensor
    # cores need, however small T is. Programs of the same weights are neighbours, so one of them
    # reads these from memory.
    tl.static_assert(MORE == 0 or SCALE_BLOCK == 0)
    launch_dependents(PDL)
    t, n = tl.program_id(0) * (BLOCK_T + MORE), tl.program_id(1) * BLOCK_N
    rows, outputs, split = t + tl.arange(0, BLOCK_T), n + tl.arange(0, BLOCK_N), tl.program_id(2)
    acc, x_scale, scale, bias = tl.zeros([BLOCK_N, BLOCK_T], tl.float32), None, None, None
    if MORE > 0:
        more_acc = tl.zeros([BLOCK_N, MORE], tl.float32)
        more_rows = t + BLOCK_T + tl.arange(0, MORE)
    if bias_ptr is not None:  # a summand of the first part
        bias = tl.where(split == 0, tl.load(bias_ptr + outputs).to(tl.float32), 0.0)
    if SCALE_BLOCK == 0:
        scale = tl.load(scales_ptr + outputs)
    if t == 0:
        prefetch_weights(weight_ptr, n, split * SPAN, K, SPAN, BLOCK_N, PDL)
    wait(PDL)
    if SCALE_BLOCK == 0:  # loaded before the tiles, so that they arrive in time
        x_scale = tl.load(x_scales_ptr + rows, mask=rows < T, other=0.0)
        if MORE > 0:
            more_scale = tl.load(x_scales_ptr + more_rows, mask=more_rows < T, other=0.0)
    for k in range(split * SPAN, (split + 1) * SPAN, BLOCK_K):
        weight, x = weight_desc.load([n, k]), x_desc.load([t, k]).T
        if MORE > 0:
            more_acc = tl.dot(weight, more_desc.load([t + BLOCK_T, k]).T, more_acc)
        if SCALE_BLOCK == 0:
            acc = tl.dot(weight, x, acc)
        else:  # BLOCK_K inputs share a scale
            g, width = k // SCALE_BLOCK, tl.cdiv(K, SCALE_BLOCK)
            both = tl.load(x_scales_ptr + rows * width + g, mask=rows < T, other=0.0)
            both *= tl.load(scales_ptr + n // SCALE_BLOCK * width + g)
            acc += tl.dot(weight, x) * both[None, :]
    out_ptr += split.to(tl.int64) * T * N
    _store(acc, x_scale, scale, bias, out_ptr, rows, outputs, T, N)
    if MORE > 0:
        _store(more_acc, more_scale, scale, bias, out_ptr, more_rows, outputs, T, N)


def choose_tiles(T: int, N: int, K: int, partial: bool, in_blocks: bool) -> Tiles | None:
    """Choose tiles for T rows; None if the library is faster (measured on an H200).

    Args:
        N: rows of the weight.
        K: columns of the weight.
        partial: whether results may be partial.
        in_blocks: whether scales are of blocks.
    """
    wide = K % 1024 == 0 and not in_blocks
    block_t, more = max(16, min(TILE_ROWS, next_power_of_2(T))), 0
    if TILE_ROWS < T <= MAX_ROWS and not in_blocks:
        more = 32 if T <= TILE_ROWS + 32 else 64
    most = 2 * TILE_ROWS if more or (partial and N * K <= SMALL) else TILE_ROWS
    if most < T or N % BLOCK_N or K % 512:
        return None
    tiles, programs = Tiles(block_t, BLOCK_N, BLOCK, more=more), N // BLOCK_N
    at_once = PROGRAMS if block_t < 64 or (block_t == 64 and not wide) else ROOMY_PROGRAMS
    if partial:
        tiles = tiles.split(T, N, at_once)
    programs *= cdiv(T, block_t + more) * tiles.splits
    if tiles.splits == 2 and 64 < T <= MAX_ROWS and K <= FEW_INPUTS and not in_blocks:
        # Two tiles of rows make as many programs, without parts.
        tiles = tiles._replace(block_t=block_t if more else block_t // 2, more=0, splits=1)
    return tiles._replace(**_sizes(tiles, programs, at_once, N, wide, in_blocks))


def _sizes(
    tiles: Tiles, programs: int, at_once: int, N: int, wide: bool, in_blocks: bool
) -> dict[str, int]:
    """The inputs, outputs and stages of tiles (measured on an H200)."""
    if tiles.block_t == TILE_ROWS:
        if programs <= at_once:
            return {"stages": 6}
        if tiles.more:  # stages of two programs fit a multiprocessor
            return {"stages": 4 if tiles.more == 32 else 3}
        if N % BLOCK == 0:  # each row is read by half as many programs
            return {"block_n": BLOCK, "stages": 6 if programs <= 2 * at_once else 3}
    elif wide and (tiles.block_t < 64 or programs <= at_once):
        return {"block_k": 2 * BLOCK}
    few = tiles.block_t == 16 or (tiles.block_t == 32 and not in_blocks)
    two = tiles.block_t == 64 and programs <= PROGRAMS and not in_blocks  # on a multiprocessor
    return {"stages": 8 if few else 6 if two else 4}


def _by_tiles(
    x: Codes, weight: Codes, bias: torch.Tensor | None, tiles: Tiles, dtype: torch.dtype
) -> torch.Tensor:
    (T, K), N, S = x.codes.shape, len(weight), tiles.splits
    out = empty_parts(S, T, N, dtype, x.codes.device)
    block_n, block_k, more = tiles.block_n, tiles.block_k, tiles.more
    _fp8_tiles_kernel[tiles.grid(T, N)](
        describe(x.codes, tiles.block_t, block_k),
        describe(x.codes, more, block_k) if more else None, x.scales,
        describe(weight.codes, block_n, block_k), weight.codes, weight.scales, bias, out,
        T, N, K, K // S, SCALE_BLOCK=act_block_of(weight), BLOCK_T=tiles.block_t, MORE=more,
        BLOCK_N=block_n, BLOCK_K=block_k, num_warps=4, num_stages=tiles.stages,
        **pdl_options(x.codes),
    )  # fmt: skip
    return out


def linear(
    x: torch.Tensor | Codes,
    weight: Codes,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    partial: bool = False,
) -> torch.Tensor:
    """`x @ weight.T + bias`.

    Args:
        x: [T, K] of `dtype`, or `Codes` with groups of `act_block_of(weight)`.
        weight: [N, K]; `can_multiply` must be true.
        dtype: torch.dtype of the results.
        bias: [N]; None: 0.
        partial: whether the result may be partial, its sum left to the caller.

    Returns:
        [T, N]; or [S, T, N] float32, to be summed over S, if `partial` and that is faster.
    """
    T, (N, K) = len(x), weight.codes.shape
    if isinstance(x, torch.Tensor):
        if T == 1:
            return one_row(x, weight, bias)
        x = quantize(x, act_block_of(weight))
    tiles = choose_tiles(T, N, K, partial, weight.block[0] > 1)
    if tiles is not None and can_describe(x.codes) and can_describe(weight.codes):
        return _by_tiles(x, weight, bias, tiles, dtype)
    return _many_rows(x, weight, dtype, bias)


def can_fix_order(weight: Codes) -> bool:
    """Whether `in_fixed_order` multiplies by this weight, if `can_multiply`."""
    N, K = weight.codes.shape
    return N % BLOCK_N == K % BLOCK == 0 and can_describe(weight.codes)


def in_fixed_order(
    x: torch.Tensor | Codes,
    weight: Codes,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """`linear`, each row alike, whatever their number; a single one is quantised, too."""
    if isinstance(x, torch.Tensor):
        x = quantize(x, act_block_of(weight))
    assert can_describe(x.codes), "rows begin at multiples of 16 bytes, as the weight's do"
    return _by_tiles(x, weight, bias, ONE_TILE, dtype)


def multiply_into(
    out: torch.Tensor, x: torch.Tensor | Codes, weight: Codes, bias: torch.Tensor | None
) -> None:
    """`linear` of many rows into `out`: [T, N]."""
    if isinstance(x, torch.Tensor):
        x = quantize(x, act_block_of(weight))
    if out.dtype == torch.bfloat16 and _library_has(weight):
        _by_library(x, weight, bias, out)
    else:
        out.copy_(_many_rows(x, weight, out.dtype, bias))


def _many_rows(
    x: Codes, weight: Codes, dtype: torch.dtype, bias: torch.Tensor | None
) -> torch.Tensor:
    if _library_has(weight):
        return _by_library(x, weight, bias, None).to(dtype)
    if can_describe(x.codes) and len(weight) % BLOCK_N == weight.codes.shape[1] % BLOCK == 0:
        return _by_tiles(x, weight, bias, Tiles(TILE_ROWS, BLOCK_N, BLOCK), dtype)
    return F.linear(x.numbers(dtype), weight.numbers(dtype), bias)


def _library_has(weight: Codes) -> bool:
    """Whether PyTorch can multiply with these scales: with blocks, on Hopper, from CUDA 12.9 on, if
    the number of blocks of inputs is a multiple of 4.
    """
    if weight.block[0] == 1:
        return True
    (N, K), device = weight.codes.shape, weight.codes.device
    if N % BLOCK or K % (4 * BLOCK) or not weight.codes.is_cuda:
        return False
    version = tuple(map(int, (torch.version.cuda or "0.0").split(".")))
    return capability(device.index)[0] == 9 and version >= (12, 9)


def _by_library(
    x: Codes, weight: Codes, bias: torch.Tensor | None, out: torch.Tensor | None
) -> torch.Tensor:
    """The product by the library, in bfloat16, its only dtype."""
    codes, scales, in_blocks = x.codes, x.scales, weight.block[0] > 1
    if in_blocks:  # it needs scales with tokens adjacent, and a multiple of four tokens
        missing = -len(x) % 4
        if missing:
            codes = F.pad(codes.view(torch.uint8), (0, 0, 0, missing)).view(FP8)
        scales = F.pad(scales.T, (0, missing)).contiguous().T
    elif scales.data_ptr() % 16:
        scales = scales.clone()
    result = torch._scaled_mm(
        codes, weight.codes.T, scales, weight.scales.T, out_dtype=torch.bfloat16,
        use_fast_accum=not in_blocks, out=out if len(codes) == len(x) else None,
    )[: len(x)]  # fmt: skip
    if bias is not None:
        result += bias
    return result if out is None or result.data_ptr() == out.data_ptr() else out.copy_(result)
