"""The product of a single row, which stays in 16 bits, by weights in FP8.

A program keeps the row for several blocks of outputs (docs/experiments.md).

Letters: N outputs, K inputs.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.activation import activate_and_mul
from nanovllm.kernels.device_features import has_ptx, launch_dependents, pdl_options, wait
from nanovllm.kernels.products.row import load_bias, load_words
from nanovllm.tensors.fp8 import Codes
from nanovllm.utils.integers import cdiv, next_power_of_2

# Inputs and codes of a block; and programs that run at once, as many as registers allow, with
# scales of rows and with scale blocks. Measured on an H200.
INPUTS, CODES, PROGRAMS, BLOCKS_PROGRAMS = 4096, 16384, 792, 660
MAX_OUTPUTS = 128  # per block; they share scales if weights have scale blocks of this size


@triton.jit
def _by_pairs(words, first, second):
    """The products of codes (e4m3), four in an int32, and inputs, two float16 in an int32: for
    eight codes, in two neighbouring words, two sums of four, as float32. Pairs take half the
    instructions; the rounding in float16 is a tenth of that of results (docs/experiments.md).
    """
    return tl.inline_asm_elementwise(
        """
        {
            .reg .b16 lower, upper;
            .reg .b32 pair, sum;
            mov.b32 {lower, upper}, $2;
            cvt.rn.f16x2.e4m3x2 pair, lower;
            mul.rn.f16x2 sum, pair, $4;
            cvt.rn.f16x2.e4m3x2 pair, upper;
            fma.rn.f16x2 sum, pair, $6, sum;
            mov.b32 {lower, upper}, $3;
            cvt.rn.f16x2.e4m3x2 pair, lower;
            fma.rn.f16x2 sum, pair, $5, sum;
            cvt.rn.f16x2.e4m3x2 pair, upper;
            fma.rn.f16x2 sum, pair, $7, sum;
            mov.b32 {lower, upper}, sum;
            cvt.f32.f16 $0, lower;
            cvt.f32.f16 $1, upper;
        }
        """,
        "=&f,=&f,r,r,r,r,r,r", [words, first, second], dtype=tl.float32, is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def _code(words, i: tl.constexpr):
    return ((words >> (8 * i)) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def _number(word, i: tl.constexpr, DTYPE: tl.constexpr):
    return ((word >> (16 * i)) & 0xFFFF).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def _pair(a, b):
    lower, upper = a.to(tl.float16).to(tl.int16, bitcast=True), b.to(tl.float16)
    return (lower.to(tl.int32) & 0xFFFF) | (upper.to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def _load_fours(words_ptr, begin, q, K: tl.constexpr, DTYPE: tl.constexpr, CVT: tl.constexpr):
    """Load inputs from `begin` on, four in an int64, as float32: every fourth, from each of the
    first four on. If `CVT`, in the form for `_by_pairs`, and the powers of two by which they were
    divided: the largest of eight inputs is 1 to 2, so sums with e4m3, whose largest is 448, stay in
    float16.
    """
    word = tl.load(words_ptr + begin // 4 + q, mask=begin // 4 + q < K // 4, other=0)
    a, b = _number(word, 0, DTYPE), _number(word, 1, DTYPE)
    c, d = _number(word, 2, DTYPE), _number(word, 3, DTYPE)
    if not CVT:
        return a, b, c, d
    Q: tl.constexpr = q.shape[0]
    most = tl.maximum(tl.maximum(tl.abs(a), tl.abs(b)), tl.maximum(tl.abs(c), tl.abs(d)))
    most = tl.max(tl.reshape(most, [Q // 2, 2]), 1)
    most = tl.reshape(tl.broadcast_to(most[:, None], [Q // 2, 2]), [Q])
    # The exponent of float32, at most one less than the largest, so that it has an inverse.
    exponent = tl.minimum(most.to(tl.int32, bitcast=True) & (0xFF << 23), 253 << 23)
    up = ((254 << 23) - exponent).to(tl.float32, bitcast=True)
    first, second = _pair(a * up, b * up), _pair(c * up, d * up)
    return first, second, exponent.to(tl.float32, bitcast=True)


@triton.jit
def _multiply_words(
    words, x, scales_ptr, row, begin, q,
    K: tl.constexpr, SCALE_BLOCK: tl.constexpr, CVT: tl.constexpr,
):  # fmt: skip
    """The sums of products with x; with scale blocks, all rows have the scales of `row`."""
    if SCALE_BLOCK > 0:
        g = row // SCALE_BLOCK * tl.cdiv(K, SCALE_BLOCK) + (begin + 4 * q) // SCALE_BLOCK
        scale = tl.load(scales_ptr + g, mask=begin // 4 + q < K // 4, other=0.0)
    if CVT:
        products = _by_pairs(words, x[0][None, :], x[1][None, :])
        if SCALE_BLOCK > 0:
            scale *= x[2]
        else:
            scale = x[2]
        products *= scale[None, :]
    else:
        products = _code(words, 0) * x[0][None, :] + _code(words, 1) * x[1][None, :]
        products += _code(words, 2) * x[2][None, :] + _code(words, 3) * x[3][None, :]
        if SCALE_BLOCK > 0:
            products *= scale[None, :]
    return tl.sum(products, 1)


@triton.jit
def _fp8_row_kernel(
    x_ptr, words_ptr, scales_ptr, bias_ptr, out_ptr,
    N: tl.constexpr, K: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr,
    SCALE_BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STEPS: tl.constexpr,
    CVT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # One program: blocks of BLOCK_N outputs of the only row, over STEPS times BLOCK_K inputs. The
    # next codes are loaded while it multiplies, the first ones before the wait.
    launch_dependents(PDL)
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    first, q = tl.program_id(0), tl.arange(0, BLOCK_K // 4)
    up_ptr = words_ptr + N * (K // 4)
    words = load_words(words_ptr, first, 0, q, N, K // 4, BLOCK_N)
    if GATED:
        up_words = load_words(up_ptr, first, 0, q, N, K // 4, BLOCK_N)
    wait(PDL)
    x = _load_fours(x_ptr, 0, q, K, DTYPE, CVT)
    for block in range(first, tl.cdiv(N, BLOCK_N), tl.num_programs(0)):
        row = block * BLOCK_N
        n = row + tl.arange(0, BLOCK_N)
        out = tl.zeros([BLOCK_N], tl.float32)
        up = out
        for step in range(STEPS):
            start = step * BLOCK_K
            last = step + 1 == STEPS
            after = tl.where(last, 0, start + BLOCK_K)
            where = tl.where(last, block + tl.num_programs(0), block)
            following = load_words(words_ptr, where, after // 4, q, N, K // 4, BLOCK_N)
            if STEPS > 1:
                x = _load_fours(x_ptr, start, q, K, DTYPE, CVT)
            out += _multiply_words(words, x, scales_ptr, row, start, q, K, SCALE_BLOCK, CVT)
            words = following
            if GATED:
                following = load_words(up_ptr, where, after // 4, q, N, K // 4, BLOCK_N)
                up += _multiply_words(
                    up_words, x, scales_ptr, N + row, start, q, K, SCALE_BLOCK, CVT
                )  # fmt: skip
                up_words = following
        if SCALE_BLOCK == 0:
            out *= tl.load(scales_ptr + n, mask=n < N, other=0.0)
        out += load_bias(bias_ptr, n, n < N)
        if GATED:
            if SCALE_BLOCK == 0:
                up *= tl.load(scales_ptr + N + n, mask=n < N, other=0.0)
            out = activate_and_mul(out, up + load_bias(bias_ptr, N + n, n < N), GELU, 0)
        tl.store(out_ptr + n, out.to(out_ptr.dtype.element_ty), mask=n < N)


def one_row(
    x: torch.Tensor,
    weight: Codes,
    bias: torch.Tensor | None,
    *,
    gated: bool = False,
    gelu: bool = False,
) -> torch.Tensor:
    """The product of a single row, x: [1, K], by weight: [N, K]; if `gated`, N counts gate and up.

    Returns:
        [1, N]; if `gated`, [1, N / 2].
    """
    N, K = weight.codes.shape
    assert x.is_contiguous() and x.element_size() == 2 and K % 8 == 0, "eight inputs share a power"
    if gated:
        N //= 2
    block_k = min(INPUTS, next_power_of_2(K))
    block_n = min(MAX_OUTPUTS, CODES // block_k // (2 if gated else 1))
    blocks, most = cdiv(N, block_n), PROGRAMS if weight.block[0] == 1 else BLOCKS_PROGRAMS
    programs = cdiv(blocks, cdiv(blocks, most))  # with equal numbers of blocks
    out = x.new_empty(1, N)
    _fp8_row_kernel[(programs,)](
        x.view(torch.int64), weight.codes.view(torch.int32), weight.scales, bias, out,
        N=N, K=K, GATED=gated, GELU=gelu, BLOCK_N=block_n, BLOCK_K=block_k, STEPS=cdiv(K, block_k),
        SCALE_BLOCK=0 if weight.block[0] == 1 else weight.block[1], CVT=has_ptx(x), num_warps=4,
        **pdl_options(x),
    )  # fmt: skip
    return out
