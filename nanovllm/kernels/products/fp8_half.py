"""Matrix products with FP8 weights and 16-bit activations, for GPUs whose tensor cores have no FP8.

Codes are converted to 16 bits, exactly, on their way to tensor cores; products of many rows use the
library, with weights that are converted a part at a time. Tiles are those of INT4
(`int4_linear.py`), and nothing is tuned: no such GPU has run them.

Letters: T rows, N outputs, K inputs.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.device_features import load_tile
from nanovllm.kernels.products.fp8_linear import BLOCK, act_block_of, knows_blocks
from nanovllm.kernels.products.linear import HALF, multiply_parts
from nanovllm.tensors.fp8 import Codes
from nanovllm.utils.device import FP8_CAPABILITY, MIN_CAPABILITY, capability
from nanovllm.utils.integers import cdiv, next_power_of_2

BLOCK_N, BLOCK_K = 64, 64
MAX_ROWS = 256  # for products by tiles
MAX_TILE_ROWS = 64
_BIASES = tl.constexpr(2.0 ** (15 - 7))  # for the exponent biases of float16 and e4m3


def can_multiply(weight: Codes, dtype: torch.dtype) -> bool:
    """Whether products of `dtype` with this weight run on its device, and FP8 ones do not."""
    device = weight.codes.device
    if device.type == "cuda" and not (MIN_CAPABILITY <= capability(device.index) < FP8_CAPABILITY):
        return False
    return dtype in HALF and knows_blocks(weight)


@triton.jit
def _numbers(codes, DTYPE: tl.constexpr):
    """The values of e4m3 codes in uint8: their bits make a float16 with a smaller exponent."""
    bits = codes.to(tl.uint16)
    bits = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
    return (bits.to(tl.float16, bitcast=True).to(tl.float32) * _BIASES).to(DTYPE)


@triton.jit(do_not_specialize=["T"])
def _fp8_half_kernel(
    x_ptr, weight_ptr, scales_ptr, bias_ptr, out_ptr, T, N, K: tl.constexpr,
    SCALE_BLOCK: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # One program: BLOCK_N outputs of BLOCK_T rows. The weights are the left operand.
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    t, n = tl.program_id(0) * BLOCK_T, tl.program_id(1) * BLOCK_N
    rows, outputs = t + tl.arange(0, BLOCK_T), n + tl.arange(0, BLOCK_N)
    acc = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    for k in range(0, K, BLOCK_K):
        weight = _numbers(load_tile(weight_ptr, n, N, k, K, BLOCK_N, BLOCK_K, False), DTYPE)
        x = load_tile(x_ptr, t, T, k, K, BLOCK_T, BLOCK_K, False).T
        if SCALE_BLOCK == 0:
            acc = tl.dot(weight, x, acc)
        else:  # all inputs and outputs of a tile share a scale
            block = n // SCALE_BLOCK * tl.cdiv(K, SCALE_BLOCK) + k // SCALE_BLOCK
            acc += tl.dot(weight, x) * tl.load(scales_ptr + block)
    if SCALE_BLOCK == 0:
        acc *= tl.load(scales_ptr + outputs, mask=outputs < N, other=0.0)[:, None]
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + outputs, mask=outputs < N, other=0.0).to(tl.float32)[:, None]
    out_ptrs = out_ptr + rows[None, :].to(tl.int64) * N + outputs[:, None]
    tl.store(out_ptrs, acc.to(DTYPE), mask=(rows[None, :] < T) & (outputs < N)[:, None])


one_row = None  # tiles multiply a single row, too


def linear(
    x: torch.Tensor,
    weight: Codes,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    partial: bool = False,
) -> torch.Tensor:
    """`x @ weight.T + bias`: [T, N], if `can_multiply`; see `fp8_linear.linear`."""
    T, N = len(x), len(weight)
    if T > MAX_ROWS:
        out = torch.empty(T, N, dtype=dtype, device=x.device)
        multiply_into(out, x, weight, bias)
        return out
    return _by_tiles(x, weight, dtype, bias, max(16, min(MAX_TILE_ROWS, next_power_of_2(T))))


def _by_tiles(
    x: torch.Tensor, weight: Codes, dtype: torch.dtype, bias: torch.Tensor | None, block_t: int
) -> torch.Tensor:
    (T, K), N = x.shape, len(weight)
    out = torch.empty(T, N, dtype=dtype, device=x.device)
    _fp8_half_kernel[(cdiv(T, block_t), cdiv(N, BLOCK_N))](
        x.contiguous(), weight.codes.view(torch.uint8), weight.scales, bias, out, T, N, K=K,
        SCALE_BLOCK=act_block_of(weight), BLOCK_T=block_t, BLOCK_N=BLOCK_N,
        BLOCK_K=BLOCK_K, num_warps=4, num_stages=3,
    )  # fmt: skip
    return out


def can_fix_order(weight: Codes) -> bool:
    """Whether `in_fixed_order` multiplies by this weight, if `can_multiply`."""
    return True


def in_fixed_order(
    x: torch.Tensor, weight: Codes, dtype: torch.dtype, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`linear`, each row alike, whatever their number."""
    return _by_tiles(x, weight, dtype, bias, MAX_TILE_ROWS)


def multiply_into(
    out: torch.Tensor, x: torch.Tensor, weight: Codes, bias: torch.Tensor | None
) -> None:
    """`linear` of many rows into `out`: [T, N], by the library."""

    def numbers(begin: int, end: int) -> torch.Tensor:
        return weight[begin:end].numbers(out.dtype)

    multiply_parts(out, x, bias, numbers, BLOCK)
