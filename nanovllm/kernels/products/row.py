"""The product of a single row by a matrix, or by the row's experts, which reads the weights once
and needs no tensor cores; and functions that `fp8_row.py` and `int4_row.py` share with it.

Letters: N outputs, K inputs.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.activation import activate_and_mul
from nanovllm.kernels.device_features import launch_dependents, pdl_options, wait
from nanovllm.tensors.fp8 import Codes
from nanovllm.utils.integers import cdiv, next_power_of_2


def stored(
    weight: torch.Tensor | Codes,
) -> tuple[torch.Tensor, torch.Tensor | None, tuple[int, int]]:
    """The values or codes [N, K]; for codes, their scales; and the block that shares a scale."""
    if isinstance(weight, Codes):
        return weight.codes, weight.scales, weight.block
    return weight, None, (1, weight.shape[1])


@triton.jit
def load_bias(bias_ptr, n, mask):
    """Load a bias as float32; 0 if there is none."""
    if bias_ptr is None:
        return 0.0
    else:
        return tl.load(bias_ptr + n, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_words(ptr, block, begin, q, N, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr):
    """Load words of a block of rows, of WIDTH words each, from `begin` on; 0 beyond the last."""
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (n < N)[:, None] & (begin + q < WIDTH)[None, :]
    ptrs = ptr + n.to(tl.int64)[:, None] * WIDTH + (begin + q)[None, :]
    return tl.load(ptrs, mask=mask, other=0)


@triton.jit
def _add_products(
    acc, weight, x, row, n, start, codes_scales_ptr,
    N: tl.constexpr, K: tl.constexpr, SCALE_ROWS: tl.constexpr, SCALE_COLS: tl.constexpr,
):  # fmt: skip
    """acc + the products of x: [1, BLOCK_K] and weights of rows row + n, from column `start` on.
    Products with codes in blocks of SCALE_ROWS x SCALE_COLS are scaled, and acc has a column per
    block.
    """
    products = weight.to(tl.float32) * x
    if SCALE_COLS == 0:
        return acc + products
    else:
        WIDTH: tl.constexpr = products.shape[1] // SCALE_COLS
        sums = tl.sum(tl.reshape(products, [products.shape[0], WIDTH, SCALE_COLS]), 2)
        g = start // SCALE_COLS + tl.arange(0, WIDTH)
        blocks = ((row + n) // SCALE_ROWS)[:, None] * tl.cdiv(K, SCALE_COLS) + g[None, :]
        mask = (n < N)[:, None] & (g * SCALE_COLS < K)[None, :]
        return acc + sums * tl.load(codes_scales_ptr + blocks, mask=mask, other=0.0)


@triton.jit
def _sum(acc, codes_scales_ptr, rows, mask, SCALE_COLS: tl.constexpr):
    """The sums of `_add_products`, times the scales of these rows if each has one."""
    out = tl.sum(acc, 1)
    if codes_scales_ptr is not None and SCALE_COLS == 0:
        out *= tl.load(codes_scales_ptr + rows, mask=mask, other=0.0)
    return out


@triton.jit
def _row_kernel(
    x_ptr, weight_ptr, codes_scales_ptr, bias_ptr, experts_ptr, scales_ptr, out_ptr, x_stride,
    N: tl.constexpr, K: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr, LIMIT: tl.constexpr,
    SCALE_ROWS: tl.constexpr, SCALE_COLS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # One program: BLOCK_N outputs of the only row, or of one of its experts. The first weights are
    # read before the wait, unless the experts are not known yet. Codes have scales per block of
    # SCALE_ROWS x SCALE_COLS, or per row (SCALE_COLS 0).
    launch_dependents(PDL)
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    first = tl.zeros([], tl.int64)
    if experts_ptr is not None:
        wait(PDL)
        j = tl.program_id(1)
        first = tl.load(experts_ptr + j).to(tl.int64) * (2 * N if GATED else N)
        weight_ptr += first * K
        if bias_ptr is not None:
            bias_ptr += first
        x_ptr += j * x_stride
        out_ptr += j * N
    k = tl.arange(0, BLOCK_K)
    weight_ptrs = weight_ptr + n[:, None] * K + k[None, :]
    mask = (n[:, None] < N) & (k[None, :] < K)
    weight = tl.load(weight_ptrs, mask=mask, other=0.0)
    COLUMNS: tl.constexpr = BLOCK_K if SCALE_COLS == 0 else BLOCK_K // SCALE_COLS
    acc = tl.zeros([BLOCK_N, COLUMNS], tl.float32)
    if GATED:
        up_weight = tl.load(weight_ptrs + N * K, mask=mask, other=0.0)
        up_acc = acc
        up_bias = load_bias(bias_ptr, N + n, n < N)
    bias = load_bias(bias_ptr, n, n < N)
    if experts_ptr is None:
        wait(PDL)
    for start in tl.static_range(0, K, BLOCK_K):
        if start > 0:
            mask = (n[:, None] < N) & (start + k[None, :] < K)
            weight = tl.load(weight_ptrs + start, mask=mask, other=0.0)
            if GATED:
                up_weight = tl.load(weight_ptrs + start + N * K, mask=mask, other=0.0)
        x = tl.load(x_ptr + start + k, mask=start + k < K, other=0.0).to(tl.float32)[None, :]
        acc = _add_products(
            acc, weight, x, first, n, start, codes_scales_ptr, N, K, SCALE_ROWS, SCALE_COLS
        )  # fmt: skip
        if GATED:
            up_acc = _add_products(
                up_acc, up_weight, x, first + N, n, start, codes_scales_ptr, N, K,
                SCALE_ROWS, SCALE_COLS,
            )  # fmt: skip
    out = _sum(acc, codes_scales_ptr, first + n, n < N, SCALE_COLS) + bias
    if GATED:
        up = _sum(up_acc, codes_scales_ptr, first + N + n, n < N, SCALE_COLS) + up_bias
        out = activate_and_mul(out, up, GELU, LIMIT)
    if scales_ptr is not None:
        out *= tl.load(scales_ptr + tl.program_id(1))
    tl.store(out_ptr + n, out.to(out_ptr.dtype.element_ty), mask=n < N)


def one_row(
    x: torch.Tensor,
    weight: torch.Tensor | Codes,
    bias: torch.Tensor | None,
    *,
    gated: bool = False,
    gelu: bool = False,
    limit: float = 0.0,
    num_experts: int = 1,
    experts: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """The product of a single row; or of it by each of k experts, or of k rows by one expert each.

    Args:
        x: [1, K], or [k, K].
        weight: [N, K], or [E * N, K] of all E experts; if `gated`, N counts gate and up.
        bias: [N], or [E, N] of experts; None: 0.
        gated, gelu, limit: see `kernels.activation.activate_and_mul`.
        num_experts: number of experts E.
        experts: [1, k] int32, indices of the row's experts; None: there are none.
        scales: [1, k] float32, factors on the results; None: 1.

    Returns:
        [1, N], or [k, N] of experts; with `scales`, [k, 1, N] float32. If `gated`, N / 2 for N.
    """
    matrix, codes_scales, block = stored(weight)
    assert x.stride(-1) == 1 and matrix.is_contiguous(), "rows must be contiguous"
    N, K = matrix.shape
    N //= 2 * num_experts if gated else num_experts
    scale_cols = block[1] if block[0] > 1 else 0
    # 4096 weights per program at a time; measured on an H200.
    BLOCK_K = max(16, scale_cols, min(2048, next_power_of_2(K)))
    BLOCK_N = max(1, 4096 // BLOCK_K // (2 if gated else 1))
    k = 1 if experts is None else experts.numel()
    dtype = x.dtype if scales is None else torch.float32
    out = torch.empty(k, N, dtype=dtype, device=x.device)
    _row_kernel[(cdiv(N, BLOCK_N), k)](
        x, matrix, codes_scales, bias, experts, scales, out, x.stride(0) if len(x) > 1 else 0,
        N=N, K=K, GATED=gated, GELU=gelu, LIMIT=limit, SCALE_ROWS=block[0], SCALE_COLS=scale_cols,
        BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, num_warps=4, **pdl_options(x),
    )  # fmt: skip
    return out if scales is None else out.unsqueeze(1)
