"""Matrix products with weights in INT4 (`tensors.int4`) and activations in 16 bits.

The product of a single row is in `int4_row.py`. Those of more have a kernel of their own on Hopper
(`hopper_int4.py`). Elsewhere few rows use tiles, whose weights are unpacked on their way from
shared memory to tensor cores, and many rows the library, with weights that are unpacked a part at a
time (docs/experiments.md).

Letters: T rows, N outputs, K inputs, P columns of a plane.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from nanovllm.kernels.device_features import (
    TILE_ROWS,
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
from nanovllm.kernels.products.tiles import SPLITS, Tiles, empty_parts
from nanovllm.tensors.int4 import PLANES, Int4Codes
from nanovllm.utils.device import MIN_CAPABILITY, capability
from nanovllm.utils.integers import next_power_of_2

MAX_ROWS = 256  # for products by tiles
FEW_ROWS = 64  # up to which tiles have 64 outputs, and are loaded by TMA
PROGRAMS = 128  # to run at once, with large tiles
MIN_TILES = 64  # of few rows, from which the kernel on Hopper is faster than that of all GPUs


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


def takes_hopper_kernel(
    x: torch.Tensor, weight: Int4Codes, partial: bool = False, gated: bool = False
) -> bool:
    """Whether `hopper_int4` multiplies x: [T, K] by this weight, rather than the kernel of all GPUs
    or the library.

    Args:
        partial: whether results may be partial.
        gated: whether the weight has gates and the values that these multiply.
    """
    whole = len(weight) % 128 == 0 and weight.plane in (32, 64)
    several = len(x) > 1 and _has_tiles(len(x), len(weight), partial, gated)
    whole &= several and x.dtype in HALF and weight.scales.dtype == x.dtype
    return whole and has_own_kernels(x) and can_describe(x)


def _has_tiles(T: int, N: int, partial: bool, gated: bool) -> bool:
    """Whether most multiprocessors would have a tile of `hopper_int4`, or there are many rows."""
    tiles = N // 256 if gated else N // 128 * (SPLITS[-1] if partial else 1)
    return T > FEW_ROWS or tiles >= MIN_TILES


def _by_hopper(x: torch.Tensor, weight: Int4Codes, *args: Any, **options: Any) -> torch.Tensor:
    from nanovllm.kernels.products.hopper_int4 import hopper_int4

    return hopper_int4(x, weight, *args, **options)


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
