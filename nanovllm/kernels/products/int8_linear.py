"""Matrix products with weights in INT8, with one scale per row, and integer activations.

A row of activations is quantised by its largest value: to integers of 8 bits for layers whose
checkpoint asks for it (W8A8), and to 16 bits for the LM head, which is an error of 2 ** -16 of that
value. The upper and lower bytes of 16 bits are two rows of INT8, which tensor cores multiply by the
weights exactly, so nothing is unpacked.

Letters: T rows, N outputs, K inputs.
"""

import torch
import triton
import triton.language as tl

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
from nanovllm.kernels.products.int4_row import larger
from nanovllm.kernels.products.linear import HALF
from nanovllm.kernels.products.row import one_row
from nanovllm.kernels.products.tiles import Tiles, empty_parts
from nanovllm.tensors.fp8 import Codes
from nanovllm.utils.device import MIN_CAPABILITY, capability
from nanovllm.utils.integers import next_power_of_2

MANY_ROWS = 256  # above which tiles are large
PROGRAMS = 256  # to run at once
MAX_INPUTS = 2**16  # the sum of their products fits int32
ONE_TILE = Tiles(64, 64, 64, stages=3)  # of any number of rows, see `in_fixed_order`; not tuned
_LARGEST = tl.constexpr(127.0)  # integer of 8 bits
_LARGEST_PAIR = tl.constexpr(127.0 * 257.0)  # of 16, so that upper bytes are INT8 codes, too
_LEAST = tl.constexpr(2.0**-100)  # largest value of a row of zeros
# Added to a float32, it leaves the nearest integer in the low bits of the mantissa, beside its own.
_ROUND, _ROUND_BITS = tl.constexpr(1.5 * 2.0**23), tl.constexpr(0x4B400000)


def can_multiply(device: torch.device, dtype: torch.dtype, num_inputs: int) -> bool:
    """Whether products of `dtype` run on a device."""
    if device.type == "cuda" and capability(device.index) < MIN_CAPABILITY:
        return False
    return dtype in HALF and num_inputs % 16 == 0 and num_inputs <= MAX_INPUTS


@triton.jit
def _integers_kernel(
    x_ptr, bytes_ptr, scales_ptr, stride, K, PAIRS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    launch_dependents(PDL)
    row, cols = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    mask = cols < K
    wait(PDL)
    x = tl.load(x_ptr + row * stride + cols, mask=mask, other=0.0).to(tl.float32)
    most = larger(tl.reduce(tl.abs(x), 0, larger), _LEAST)
    scale = most / (_LARGEST_PAIR if PAIRS else _LARGEST)
    tl.store(scales_ptr + row, scale)  # NaN and infinity stay in it
    integers = (x * (1.0 / scale) + _ROUND).to(tl.int32, bitcast=True) - _ROUND_BITS
    if PAIRS:
        upper = (integers + 128) >> 8
        lower = integers - (upper << 8)
        ptrs = bytes_ptr + 2 * row * K + cols
        tl.store(ptrs, upper.to(tl.int8), mask=mask)
        tl.store(ptrs + K, lower.to(tl.int8), mask=mask)
    else:
        tl.store(bytes_ptr + row * K + cols, integers.to(tl.int8), mask=mask)


def quantize(x: torch.Tensor) -> Codes:
    """Quantise x: [T, K] to INT8, with one scale per row."""
    codes, scales = _integers(x, pairs=False)
    return Codes(codes, scales[:, None], (1, x.shape[1]))


def in_bytes(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise x: [T, K] to 256 * upper + lower bytes, times a scale. Returns the bytes [2 T, K]
    int8, in rows 2 t and 2 t + 1, and the scales [T] float32.
    """
    return _integers(x, pairs=True)


def _integers(x: torch.Tensor, pairs: bool) -> tuple[torch.Tensor, torch.Tensor]:
    T, K = x.shape
    out = spare_rows(2 * T if pairs else T, K, like=x, dtype=torch.int8)
    scales = torch.empty(T, dtype=torch.float32, device=x.device)
    BLOCK = next_power_of_2(K)
    _integers_kernel[(T,)](
        x, out, scales, x.stride(0), K, PAIRS=pairs, BLOCK=BLOCK,
        num_warps=min(16, max(1, BLOCK // 512)), **pdl_options(x),
    )  # fmt: skip
    return out, scales


@triton.jit(do_not_specialize=["T"])
def _int8_tiles_kernel(
    x, x_scales_ptr, weight, scales_ptr, bias_ptr, out_ptr, T, N, K: tl.constexpr,
    SPAN: tl.constexpr, PAIRS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, TMA: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # One program: BLOCK_N outputs of BLOCK_T rows, summed over SPAN of the inputs. The weights are
    # the left operand. Programs of the same weights are neighbours, so one of them reads these from
    # memory.
    EACH: tl.constexpr = 2 if PAIRS else 1  # rows of bytes
    launch_dependents(PDL)
    t, n = tl.program_id(0) * BLOCK_T, tl.program_id(1) * BLOCK_N
    rows, outputs = t + tl.arange(0, BLOCK_T), n + tl.arange(0, BLOCK_N)
    scale = tl.load(scales_ptr + outputs, mask=outputs < N, other=0.0)
    acc = tl.zeros([BLOCK_N, EACH * BLOCK_T], tl.int32)
    begin = 0
    if SPAN < K:
        begin = tl.program_id(2) * SPAN
        out_ptr += tl.program_id(2).to(tl.int64) * T * N
    wait(PDL)
    x_scale = tl.load(x_scales_ptr + rows, mask=rows < T, other=0.0)
    for k in range(begin, begin + SPAN, BLOCK_K):
        codes = load_tile(weight, n, N, k, K, BLOCK_N, BLOCK_K, TMA)
        x_rows = load_tile(x, EACH * t, EACH * T, k, K, EACH * BLOCK_T, BLOCK_K, TMA)
        acc = tl.dot(codes, x_rows.T, acc, out_dtype=tl.int32)
    if PAIRS:
        upper, lower = tl.split(tl.reshape(acc, [BLOCK_N, BLOCK_T, 2]))
        numbers = upper.to(tl.float32) * 256.0 + lower.to(tl.float32)
    else:
        numbers = acc.to(tl.float32)
    numbers *= x_scale[None, :] * scale[:, None]
    if bias_ptr is not None:  # a summand of the first part
        bias = tl.load(bias_ptr + outputs, mask=outputs < N, other=0.0).to(tl.float32)
        numbers += tl.where(begin == 0, bias, 0.0)[:, None]
    out_ptrs = out_ptr + rows.to(tl.int64)[None, :] * N + outputs[:, None]
    mask = (rows < T)[None, :] & (outputs < N)[:, None]
    tl.store(out_ptrs, numbers.to(out_ptr.dtype.element_ty), mask=mask)


def choose_tiles(T: int, room: bool) -> Tiles:
    """Choose tiles for T rows (measured on an H200); `room`: see `has_room`."""
    if not room:
        return Tiles(max(8, min(32, next_power_of_2(T))), 64, 64, stages=3)
    if T <= 32:
        return Tiles(max(8, next_power_of_2(T)), 64, 256, stages=3)
    return Tiles(64, 128, 128, stages=3)


def linear_into(
    out: torch.Tensor, x: torch.Tensor, weight: Codes, tiles: Tiles | None = None
) -> None:
    """`x @ weight.T` into out: [T, N], contiguous, of the same dtype as x: [T, K].

    Args:
        weight: [N, K] int8 with one scale per row; `can_multiply` must be true.
    """
    assert x.stride(1) == 1 and out.is_contiguous(), "rows are read and written whole"
    rows, x_scales = in_bytes(x)
    tiles = tiles or choose_tiles(len(x), has_room(x))
    _by_tiles(out, rows, x_scales, weight, None, tiles, pairs=True)


def _by_tiles(
    out: torch.Tensor,
    rows: torch.Tensor,
    x_scales: torch.Tensor,
    weight: Codes,
    bias: torch.Tensor | None,
    tiles: Tiles,
    pairs: bool,
) -> None:
    (N, K), codes, T = weight.codes.shape, weight.codes, len(x_scales)
    block_t, block_n, block_k = tiles.block_t, tiles.block_n, tiles.block_k
    tma = can_describe(codes) and can_describe(rows)
    row_block = 2 * block_t if pairs else block_t
    _int8_tiles_kernel[tiles.grid(T, N)](
        describe(rows, row_block, block_k) if tma else rows, x_scales,
        describe(codes, block_n, block_k) if tma else codes, weight.scales, bias, out, T, N, K=K,
        SPAN=K // tiles.splits, PAIRS=pairs, BLOCK_T=block_t, BLOCK_N=block_n, BLOCK_K=block_k,
        TMA=tma, num_warps=tiles.warps, num_stages=tiles.stages, **pdl_options(out),
    )  # fmt: skip


def choose_w8a8_tiles(T: int, N: int, K: int, partial: bool, room: bool) -> Tiles:
    """Choose tiles for T rows in INT8.

    Args:
        N, K: rows and columns of the weight.
        partial: whether results may be partial.
        room: see `has_room`.
    """
    if T > MANY_ROWS:
        return Tiles(128, 128, 128, warps=8) if room else Tiles(64, 64, 64, stages=3)
    block_t, block_k = max(16, min(64, next_power_of_2(T))), 128 if room else 64
    tiles = Tiles(block_t, 64, block_k, stages=4 if room else 3)
    if not partial or K % block_k:
        return tiles
    return tiles.split(T, N, PROGRAMS, K // block_k)


def linear(
    x: torch.Tensor,
    weight: Codes,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    partial: bool = False,
) -> torch.Tensor:
    """`x @ weight.T + bias`, of activations in INT8; a single row stays in 16 bits.

    Args:
        x: [T, K] of `dtype`.
        weight: [N, K] int8 with one scale per row; `can_multiply` must be true.
        dtype: torch.dtype of the results.
        bias: [N]; None: 0.
        partial: whether the result may be partial, its sum left to the caller.

    Returns:
        [T, N]; or [S, T, N] float32, to be summed over S, if `partial` and that is faster.
    """
    (T, K), N = x.shape, len(weight)
    if T == 1:
        return one_row(x, weight, bias)
    tiles = choose_w8a8_tiles(T, N, K, partial, has_room(x))
    out = empty_parts(tiles.splits, T, N, dtype, x.device)
    rows = quantize(x)
    _by_tiles(out, rows.codes, rows.scales, weight, bias, tiles, pairs=False)
    return out


def can_fix_order(weight: Codes) -> bool:
    """Whether `in_fixed_order` multiplies by this weight, if `can_multiply`."""
    return True


def in_fixed_order(
    x: torch.Tensor, weight: Codes, dtype: torch.dtype, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`linear`, each row alike, whatever their number; a single one is in INT8, too."""
    rows, out = quantize(x), empty_parts(1, len(x), len(weight), dtype, x.device)
    _by_tiles(out, rows.codes, rows.scales, weight, bias, ONE_TILE, pairs=False)
    return out


def multiply_into(
    out: torch.Tensor, x: torch.Tensor, weight: Codes, bias: torch.Tensor | None
) -> None:
    """`linear` of many rows into `out`: [T, N]."""
    rows, (N, K) = quantize(x), weight.codes.shape
    tiles = choose_w8a8_tiles(len(x), N, K, False, has_room(x))
    _by_tiles(out, rows.codes, rows.scales, weight, bias, tiles, pairs=False)
