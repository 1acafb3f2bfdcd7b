"""The product of a single row by weights in INT4 (`tensors.int4`).

The row is quantised to integers of 16 bits, whose products with codes are exact: four of them are
one instruction, and nothing is unpacked. A program keeps the row's integers for several blocks of
outputs (docs/experiments.md).

Letters: N outputs, K inputs, P columns of a plane.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.activation import activate_and_mul
from nanovllm.kernels.device_features import has_ptx, launch_dependents, pdl_options, wait
from nanovllm.kernels.products.int4 import dot_planes, halves, in_bytes, offset_of
from nanovllm.kernels.products.row import load_bias, load_words
from nanovllm.kernels.products.tiles import empty_parts
from nanovllm.tensors.int4 import Int4Codes
from nanovllm.utils.integers import cdiv, next_power_of_2

BLOCK_K = 4096
# Outputs of a block, programs that run at once, most registers per thread; measured on an H200.
BLOCKS, GATED_BLOCKS = (8, 528, None), (8, 396, 168)
SPLITS = 2, 3, 4  # possible numbers of parts of the sum
_LARGEST = tl.constexpr(32767.0)  # integer
_LEAST = tl.constexpr(2.0**-100)  # largest value of zeros
# Added to a float32, it leaves the nearest integer in the low bits of the mantissa.
_ROUND = tl.constexpr(1.5 * 2.0**23)


@triton.jit
def _wide_halves(word, DTYPE: tl.constexpr):
    lower, upper = halves(word, DTYPE)
    return lower.to(tl.float32), upper.to(tl.float32)


@triton.jit
def larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _integers(
    pairs_ptr, pair, inside,
    CHUNKS: tl.constexpr, P: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Quantise the inputs of two planes to integers of 16 bits, for `dot_planes`, by the largest of
    each 2 P: an error of 2 ** -16 of that. NaN and infinity stay in the unit.

    Args:
        pairs_ptr: pointer to int32, two inputs each.
        pair: [CHUNKS * P / 2], indices of the pairs of the first plane.

    Returns:
        Upper and lower bytes; and for each chunk its unit, the value of the integer 1, and its sum.
    """
    HALF_P: tl.constexpr = P // 2
    a, c = _wide_halves(tl.load(pairs_ptr + pair, mask=inside, other=0), DTYPE)
    b, d = _wide_halves(tl.load(pairs_ptr + pair + HALF_P, mask=inside, other=0), DTYPE)
    most = larger(larger(tl.abs(a), tl.abs(b)), larger(tl.abs(c), tl.abs(d)))
    most = larger(tl.reduce(tl.reshape(most, [CHUNKS, HALF_P]), 1, larger), _LEAST)
    unit = most / _LARGEST
    up = tl.broadcast_to((1.0 / unit)[:, None], [CHUNKS, HALF_P])
    up = tl.reshape(up, [CHUNKS * HALF_P])
    a = (a * up + _ROUND).to(tl.int32, bitcast=True)
    b = (b * up + _ROUND).to(tl.int32, bitcast=True)
    c = (c * up + _ROUND).to(tl.int32, bitcast=True)
    d = (d * up + _ROUND).to(tl.int32, bitcast=True)
    upper, lower = in_bytes(a, b, c, d, ASM)
    ones = dot_planes(lower * 0 + 0x01010101, upper, lower, False, ASM)
    sums = tl.sum(tl.reshape(ones, [CHUNKS, HALF_P]), 1)
    return upper, lower, unit, sums.to(tl.float32)


@triton.jit
def _load(
    weight_ptr, words_ptr, block, begin, q,
    N: tl.constexpr, ALL: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Load codes of a block of N outputs, and the words with the scales of their chunks of inputs,
    from `begin` on: for the first two planes, in the lower halves of bytes, and for the upper ones.

    Args:
        words_ptr: pointer to the words, of which there are ALL per group.
    """
    codes = load_words(weight_ptr, block, begin // 8, q, N, K // 8, BLOCK_N)
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    k = begin + tl.arange(0, q.shape[0] * 2 // P) * (4 * P)
    mask, ptrs = (n < N)[:, None] & (k < K)[None, :], words_ptr + n[:, None]
    lower = tl.load(ptrs + (k // GROUP * ALL)[None, :], mask=mask, other=0)
    upper = tl.load(ptrs + ((k + 2 * P) // GROUP * ALL)[None, :], mask=mask, other=0)
    return codes, lower, upper


@triton.jit
def _products(
    codes, word, x, P: tl.constexpr, UPPER: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr
):  # fmt: skip
    """The products [N, C] of codes [N, Q] of two planes, whose scales are in word: [N, C], and x,
    from `_integers`.
    """
    upper, lower, unit, sums = x
    products = dot_planes(codes, upper[None, :], lower[None, :], UPPER, ASM)
    products = tl.reshape(products, [word.shape[0], word.shape[1], P // 2])
    minus, scale = _wide_halves(word, DTYPE)
    less = minus + offset_of(DTYPE)  # minus the zero point
    return (tl.sum(products, 2).to(tl.float32) + less * sums[None, :]) * (scale * unit[None, :])


@triton.jit
def _sums(weights, a, b, P: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """The sums of the products of weights, from `_load`, and a and b, the `_integers` of planes."""
    codes, lower, upper = weights
    products = _products(codes, lower, a, P, False, DTYPE, ASM)
    return tl.sum(products + _products(codes, upper, b, P, True, DTYPE, ASM), 1)


@triton.jit
def _int4_row_kernel(
    pairs_ptr, weight_ptr, words_ptr, bias_ptr, out_ptr,
    N: tl.constexpr, K: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr,
    GROUP: tl.constexpr, P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STEPS: tl.constexpr, BF16: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # One program: blocks of BLOCK_N outputs of the only row, over STEPS times BLOCK_K inputs. The
    # next weights are loaded while it multiplies, the first ones before the wait.
    launch_dependents(PDL)
    DTYPE: tl.constexpr = tl.bfloat16 if BF16 else tl.float16
    CHUNKS: tl.constexpr = BLOCK_K // (4 * P)
    ALL: tl.constexpr = 2 * N if GATED else N
    first, split = tl.program_id(0), tl.program_id(1)
    q = tl.arange(0, BLOCK_K // 8)
    pair = q // (P // 2) * (2 * P) + q % (P // 2)
    begin = split * STEPS * BLOCK_K
    up_ptr, up_words_ptr = weight_ptr + N * (K // 8), words_ptr + N
    weights = _load(weight_ptr, words_ptr, first, begin, q, N, ALL, K, GROUP, P, BLOCK_N)
    if GATED:
        up_weights = _load(up_ptr, up_words_ptr, first, begin, q, N, ALL, K, GROUP, P, BLOCK_N)
    wait(PDL)
    inside = begin // 8 + q < K // 8
    a = _integers(pairs_ptr + begin // 2, pair, inside, CHUNKS, P, DTYPE, ASM)
    b = _integers(pairs_ptr + begin // 2 + P, pair, inside, CHUNKS, P, DTYPE, ASM)
    for block in range(first, tl.cdiv(N, BLOCK_N), tl.num_programs(0)):
        n = block * BLOCK_N + tl.arange(0, BLOCK_N)
        out = tl.zeros([BLOCK_N], tl.float32)
        up = out
        for step in tl.static_range(STEPS):
            start = begin + step * BLOCK_K
            if step + 1 < STEPS:
                after, where = start + BLOCK_K, block
            else:
                after, where = begin, block + tl.num_programs(0)
            ahead = _load(weight_ptr, words_ptr, where, after, q, N, ALL, K, GROUP, P, BLOCK_N)
            if STEPS > 1:
                inside = start // 8 + q < K // 8
                a = _integers(pairs_ptr + start // 2, pair, inside, CHUNKS, P, DTYPE, ASM)
                b = _integers(pairs_ptr + start // 2 + P, pair, inside, CHUNKS, P, DTYPE, ASM)
            out += _sums(weights, a, b, P, DTYPE, ASM)
            weights = ahead
            if GATED:
                ahead = _load(up_ptr, up_words_ptr, where, after, q, N, ALL, K, GROUP, P, BLOCK_N)
                up += _sums(up_weights, a, b, P, DTYPE, ASM)
                up_weights = ahead
        out += tl.where(split == 0, load_bias(bias_ptr, n, n < N), 0.0)
        if GATED:
            up += load_bias(bias_ptr, N + n, n < N)
            out = activate_and_mul(out, up, GELU, 0)
        tl.store(out_ptr + split * N + n, out.to(out_ptr.dtype.element_ty), mask=n < N)


def one_row(
    x: torch.Tensor,
    weight: Int4Codes,
    bias: torch.Tensor | None,
    *,
    gated: bool = False,
    gelu: bool = False,
    partial: bool = False,
) -> torch.Tensor:
    """The product of a single row, x: [1, K], by weight: [N, K]; if `gated`, N counts gate and up.

    Returns:
        [1, N], or if `gated` [1, N / 2]; if `partial`, also [S, 1, N] float32, to be summed over S.
    """
    N, K = weight.shape
    if gated:
        N //= 2
    block_k = min(BLOCK_K, next_power_of_2(K))
    block_n, most, registers = GATED_BLOCKS if gated else BLOCKS
    steps = cdiv(K, block_k)
    splits = steps if partial and steps in SPLITS else 1
    blocks = cdiv(N, block_n)
    programs = cdiv(blocks, cdiv(blocks * splits, most))  # with equal numbers of blocks
    out = empty_parts(splits, 1, N, x.dtype, x.device)
    _int4_row_kernel[(programs, splits)](
        x.view(torch.int32), weight.data.view(torch.int32), weight.scales.view(torch.int32), bias,
        out, N=N, K=K, GATED=gated, GELU=gelu, GROUP=weight.group, P=weight.plane,
        BLOCK_N=block_n, BLOCK_K=block_k, STEPS=steps // splits, BF16=x.dtype == torch.bfloat16,
        ASM=has_ptx(x), num_warps=4, maxnreg=registers, **pdl_options(x),
    )  # fmt: skip
    return out
