"""Activations in FP8, with one scale per row or per block of a row, chosen by their values.

Letters: T rows, K columns.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.device_features import launch_dependents, pdl_options, spare_rows, wait
from nanovllm.tensors.fp8 import FP8, LARGEST, Codes
from nanovllm.utils.integers import cdiv, next_power_of_2

_LARGEST = tl.constexpr(LARGEST)
_LEAST = tl.constexpr(2.0**-100)  # scale, such as that of zeros


@triton.jit
def scale_of(most):
    """The scale of numbers, of which these are the largest magnitudes."""
    return tl.maximum(most / _LARGEST, _LEAST)


@triton.jit
def store_codes(
    x, codes_ptr, scales_ptr, row, begin, K, BLOCK: tl.constexpr, X_BLOCK: tl.constexpr, most=0.0
):  # fmt: skip
    """Store x: [BLOCK] float32 as codes, the columns from `begin` on of a row, 0 beyond K. Each
    X_BLOCK of them share a scale; 0: all do, with the row's others, whose largest is `most`.
    """
    if X_BLOCK == 0:
        scale = scale_of(tl.maximum(tl.max(tl.abs(x)), most))
        tl.store(scales_ptr + row, scale)
        x *= 1.0 / scale
    else:
        parts = tl.reshape(x, [BLOCK // X_BLOCK, X_BLOCK])
        scale = scale_of(tl.max(tl.abs(parts), 1))
        i, count = begin // X_BLOCK + tl.arange(0, BLOCK // X_BLOCK), tl.cdiv(K, X_BLOCK)
        tl.store(scales_ptr + row * count + i, scale, mask=i < count)
        x = tl.reshape(parts * (1.0 / scale)[:, None], [BLOCK])
    cols = begin + tl.arange(0, BLOCK)
    tl.store(codes_ptr + row * K + cols, x.to(tl.float8e4nv), mask=cols < K)


def empty_codes(T: int, K: int, act_block: int, device: torch.device) -> Codes:
    """Uninitialised codes [T, K], with one scale per `act_block` columns of a row; 0: per row."""
    codes = spare_rows(T, K, like=torch.empty(0, dtype=FP8, device=device))
    width = act_block or K
    scales = torch.empty(T, cdiv(K, width), dtype=torch.float32, device=device)
    return Codes(codes, scales, (1, width))


@triton.jit
def _quantize_kernel(
    x_ptr, codes_ptr, scales_ptr, stride, K,
    BLOCK: tl.constexpr, X_BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_dependents(PDL)
    row, cols = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    wait(PDL)
    x = tl.load(x_ptr + row * stride + cols, mask=cols < K, other=0.0).to(tl.float32)
    store_codes(x, codes_ptr, scales_ptr, row, 0, K, BLOCK, X_BLOCK)


def quantize(x: torch.Tensor, act_block: int) -> Codes:
    """Quantise x: [T, K], with one scale per `act_block` columns of a row; 0: per row."""
    T, K = x.shape
    out = empty_codes(T, K, act_block, x.device)
    BLOCK = max(act_block, next_power_of_2(K))
    _quantize_kernel[(T,)](
        x, out.codes, out.scales, x.stride(0), K, BLOCK=BLOCK, X_BLOCK=act_block,
        num_warps=min(16, max(1, BLOCK // 512)), **pdl_options(x),
    )  # fmt: skip
    return out
