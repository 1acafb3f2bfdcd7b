"""Matrix products with weights in INT8, with one scale per row, and activations in 16 bits.

A row of activations is quantised to integers of 16 bits by its largest value: an error of 2 ** -16
of that. Their upper and lower bytes are two rows of INT8, which tensor cores multiply by the
weights exactly, so nothing is unpacked.

Letters: T rows, N outputs, K inputs.
"""

from typing import NamedTuple

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
from nanovllm.tensors.fp8 import Codes
from nanovllm.utils.device import MIN_CAPABILITY, capability
from nanovllm.utils.integers import cdiv, next_power_of_2

MAX_INPUTS = 2**16  # the sum of their products fits int32
_LARGEST = tl.constexpr(127.0 * 257.0)  # integer, so that upper bytes are INT8 codes, too
_LEAST = tl.constexpr(2.0**-100)  # largest value of a row of zeros
# Added to a float32, it leaves the nearest integer in the low bits of the mantissa, beside its own.
_ROUND, _ROUND_BITS = tl.constexpr(1.5 * 2.0**23), tl.constexpr(0x4B400000)


def can_multiply(device: torch.device, dtype: torch.dtype, num_inputs: int) -> bool:
    """Whether products of `dtype` run on a device."""
    if device.type == "cuda" and capability(device.index) < MIN_CAPABILITY:
        return False
    return dtype in HALF and num_inputs % 16 == 0 and num_inputs <= MAX_INPUTS


@triton.jit
def _bytes_kernel(x_ptr, bytes_ptr, scales_ptr, stride, K, BLOCK: tl.constexpr, PDL: tl.constexpr):
    launch_dependents(PDL)
    row, cols = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    mask = cols < K
    wait(PDL)
    x = tl.load(x_ptr + row * stride + cols, mask=mask, other=0.0).to(tl.float32)
    scale = larger(tl.reduce(tl.abs(x), 0, larger), _LEAST) / _LARGEST
    tl.store(scales_ptr + row, scale)  # NaN and infinity stay in it
    integers = (x * (1.0 / scale) + _ROUND).to(tl.int32, bitcast=True) - _ROUND_BITS
    upper = (integers + 128) >> 8
    lower = integers - (upper << 8)
    ptrs = bytes_ptr + 2 * row * K + cols
    tl.store(ptrs, upper.to(tl.int8), mask=mask)
    tl.store(ptrs + K, lower.to(tl.int8), mask=mask)


def in_bytes(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise x: [T, K] to 256 * upper + lower bytes, times a scale. Returns the bytes [2 T, K]
    int8, in rows 2 t and 2 t + 1, and the scales [T] float32.
    """
    T, K = x.shape
    out = spare_rows(2 * T, K, like=x, dtype=torch.int8)
    scales = torch.empty(T, dtype=torch.float32, device=x.device)
    BLOCK = next_power_of_2(K)
    _bytes_kernel[(T,)](
        x, out, scales, x.stride(0), K, BLOCK=BLOCK, num_warps=min(16, max(1, BLOCK // 512)),
        **pdl_options(x),
    )  # fmt: skip
    return out, scales


@triton.jit(do_not_specialize=["T"])
def _int8_tiles_kernel(
    x, x_scales_ptr, weight, scales_ptr, out_ptr, T, N, K: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    TMA: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # One program: BLOCK_N outputs of BLOCK_T rows. The weights are the left operand. Programs of
    # the same weights are neighbours, so one of them reads these from memory.
    launch_dependents(PDL)
    t, n = tl.program_id(0) * BLOCK_T, tl.program_id(1) * BLOCK_N
    rows, outputs = t + tl.arange(0, BLOCK_T), n + tl.arange(0, BLOCK_N)
    scale = tl.load(scales_ptr + outputs, mask=outputs < N, other=0.0)
    acc = tl.zeros([BLOCK_N, 2 * BLOCK_T], tl.int32)
    wait(PDL)
    x_scale = tl.load(x_scales_ptr + rows, mask=rows < T, other=0.0)
    for k in range(0, K, BLOCK_K):
        codes = load_tile(weight, n, N, k, K, BLOCK_N, BLOCK_K, TMA)
        pairs = load_tile(x, 2 * t, 2 * T, k, K, 2 * BLOCK_T, BLOCK_K, TMA)
        acc = tl.dot(codes, pairs.T, acc, out_dtype=tl.int32)
    upper, lower = tl.split(tl.reshape(acc, [BLOCK_N, BLOCK_T, 2]))
    numbers = upper.to(tl.float32) * 256.0 + lower.to(tl.float32)
    numbers *= x_scale[None, :] * scale[:, None]
    out_ptrs = out_ptr + rows.to(tl.int64)[None, :] * N + outputs[:, None]
    mask = (rows < T)[None, :] & (outputs < N)[:, None]
    tl.store(out_ptrs, numbers.to(out_ptr.dtype.element_ty), mask=mask)


class Tiles(NamedTuple):
    """The tiles of a product in `_int8_tiles_kernel`."""

    block_t: int
    block_n: int
    block_k: int
    stages: int


def choose_tiles(T: int, room: bool) -> Tiles:
    """Choose tiles for T rows (measured on an H200); `room`: see `has_room`."""
    if not room:
        return Tiles(max(8, min(32, next_power_of_2(T))), 64, 64, 3)
    return Tiles(max(8, next_power_of_2(T)), 64, 256, 3) if T <= 32 else Tiles(64, 128, 128, 3)


def linear_into(
    out: torch.Tensor, x: torch.Tensor, weight: Codes, tiles: Tiles | None = None
) -> None:
    """`x @ weight.T` into out: [T, N], contiguous, of the same dtype as x: [T, K].

    Args:
        weight: [N, K] int8 with one scale per row; `can_multiply` must be true.
    """
    (T, K), N, codes = x.shape, len(weight), weight.codes
    assert x.stride(1) == 1 and out.is_contiguous(), "rows are read and written whole"
    rows, x_scales = in_bytes(x)
    tiles = tiles or choose_tiles(T, has_room(x))
    block_t, block_n, block_k = tiles.block_t, tiles.block_n, tiles.block_k
    tma = can_describe(codes) and can_describe(rows)
    _int8_tiles_kernel[(cdiv(T, block_t), cdiv(N, block_n))](
        describe(rows, 2 * block_t, block_k) if tma else rows, x_scales,
        describe(codes, block_n, block_k) if tma else codes, weight.scales, out, T, N, K=K,
        BLOCK_T=block_t, BLOCK_N=block_n, BLOCK_K=block_k, TMA=tma,
        num_warps=4, num_stages=tiles.stages, **pdl_options(x),
    )  # fmt: skip
