"""Matrix products for few rows, where reading the weights is all that takes time.

A library's product of a few rows by a small matrix leaves most of the GPU idle. Two kernels do
better (docs/experiments.md): one for a single row, without tensor cores, and one that also splits
the sum (split-K) into partial results, which the residual addition after it sums anyway. Both
fetch weights before the kernel before them has ended. Everything else goes to `F.linear`.

Letters: T rows, N outputs, K inputs.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from nanovllm.kernels.activation import silu_and_mul
from nanovllm.kernels.pdl import launch_dependents, pdl_options, wait

MAX_WEIGHT = 2**23  # elements of a weight; the library reads larger ones fast enough
LINE = 64  # elements of 16 bits in a cache line of 128 bytes


class Tiles(NamedTuple):
    """How `_tiles_kernel` divides a product."""

    block_t: int
    splits: int
    stages: int


@triton.jit
def _row_kernel(
    x_ptr, weight_ptr, out_ptr,
    N: tl.constexpr, K: tl.constexpr, GATED: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # One program: BLOCK_N outputs of the only row. Their first weights are read before the wait.
    launch_dependents(PDL)
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    weight_ptrs = weight_ptr + n[:, None] * K + k[None, :]
    mask = (n[:, None] < N) & (k[None, :] < K)
    weight = tl.load(weight_ptrs, mask=mask, other=0.0)
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    if GATED:
        up_weight = tl.load(weight_ptrs + N * K, mask=mask, other=0.0)
        up_acc = acc
    wait(PDL)
    for start in tl.static_range(0, K, BLOCK_K):
        if start > 0:
            mask = (n[:, None] < N) & (start + k[None, :] < K)
            weight = tl.load(weight_ptrs + start, mask=mask, other=0.0)
            if GATED:
                up_weight = tl.load(weight_ptrs + start + N * K, mask=mask, other=0.0)
        x = tl.load(x_ptr + start + k, mask=start + k < K, other=0.0).to(tl.float32)[None, :]
        acc += weight.to(tl.float32) * x
        if GATED:
            up_acc += up_weight.to(tl.float32) * x
    out = tl.sum(acc, 1)
    if GATED:
        out = out * tl.sigmoid(out) * tl.sum(up_acc, 1)
    tl.store(out_ptr + n, out.to(out_ptr.dtype.element_ty), mask=n < N)


@triton.jit
def _prefetch(ptrs):
    """Ask for the cache lines of `ptrs` to be brought into the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [ptrs.to(tl.int64)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _tiles_kernel(
    x_ptr, weight_ptr, out_ptr, T, stride_x,
    N: tl.constexpr, K: tl.constexpr, LINE: tl.constexpr, LINES: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    # One program: BLOCK_N outputs of BLOCK_T rows, summed over one split of the inputs. The
    # weights are the left operand, whose tile has the 64 rows that tensor cores want.
    launch_dependents(PDL)
    SPAN: tl.constexpr = K // SPLITS
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(2)
    weight_ptr += split * SPAN
    if PDL:
        line = tl.minimum(tl.arange(0, LINES) * LINE, SPAN - LINE)
        _prefetch(weight_ptr + n[:, None] * K + line[None, :])
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    k = tl.arange(0, BLOCK_K)
    weight_ptrs = weight_ptr + n[:, None] * K + k[None, :]
    x_ptrs = x_ptr + split * SPAN + tl.minimum(t, T - 1)[None, :] * stride_x + k[:, None]
    acc = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    wait(PDL)
    for start in range(0, SPAN, BLOCK_K):
        acc = tl.dot(tl.load(weight_ptrs + start), tl.load(x_ptrs + start), acc)
    out_ptrs = out_ptr + (split * T + t[None, :]) * N + n[:, None]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=t[None, :] < T)


def _one_row(x: torch.Tensor, weight: torch.Tensor, gated: bool) -> torch.Tensor:
    N, K = weight.shape
    if gated:
        N //= 2
    # 4096 weights for each program, in at most 12 rounds; measured on an H200.
    BLOCK_K = max(16, min(2048, triton.next_power_of_2(K)))
    BLOCK_N = max(1, 4096 // BLOCK_K // (2 if gated else 1))
    out = torch.empty(1, N, dtype=x.dtype, device=x.device)
    _row_kernel[(triton.cdiv(N, BLOCK_N),)](
        x, weight, out, N=N, K=K, GATED=gated, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, num_warps=4,
        **pdl_options(),
    )  # fmt: skip
    return out


def choose_tiles(T: int, N: int, K: int, partial: bool) -> Tiles | None:
    """Tiles for T rows, or None where the library is faster (measured on an H200).

    Args:
        partial: whether partial results are welcome.
    """
    if N * K > MAX_WEIGHT or N % 64 or K % 512 or (256 if partial else 64) < T:
        return None
    if T > 128:
        return Tiles(64, 2, 4)
    block_t = max(16, min(64, triton.next_power_of_2(T)))
    return Tiles(block_t, 4 if partial else 1, 5 if T <= 64 else 4)


def _by_tiles(x: torch.Tensor, weight: torch.Tensor, tiles: Tiles) -> torch.Tensor:
    """[S, T, N] float32 for S splits; [T, N] for one."""
    (T, K), N, S = x.shape, weight.shape[0], tiles.splits
    shape, dtype = ((S, T, N), torch.float32) if S > 1 else ((T, N), x.dtype)
    out = torch.empty(shape, dtype=dtype, device=x.device)
    _tiles_kernel[(N // 64, triton.cdiv(T, tiles.block_t), S)](
        x, weight, out, T, x.stride(0), N=N, K=K,
        LINE=LINE, LINES=triton.next_power_of_2(K // S // LINE),
        BLOCK_T=tiles.block_t, BLOCK_N=64, BLOCK_K=128, SPLITS=S,
        num_warps=4, num_stages=tiles.stages, **pdl_options(),
    )  # fmt: skip
    return out


def linear(x: torch.Tensor, weight: torch.Tensor, partial: bool = False) -> torch.Tensor:
    """`x @ weight.T`.

    Args:
        x: [T, K]
        weight: [N, K], contiguous.
        partial: allow a result whose sum is left to the caller.

    Returns:
        [T, N]; or [S, T, N] float32, to be summed over S, if `partial` and that is faster.
    """
    assert x.stride(1) == 1 and weight.is_contiguous(), "rows of x and weight must be contiguous"
    if x.dtype in (torch.bfloat16, torch.float16):
        if len(x) == 1:
            return _one_row(x, weight, gated=False)
        tiles = choose_tiles(len(x), *weight.shape, partial)
        if tiles is not None:
            return _by_tiles(x, weight, tiles)
    return F.linear(x, weight)


def gated_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`silu(x @ gate.T) * (x @ up.T)`. x: [T, K]; weight: [2 N, K] = gate, then up -> [T, N]."""
    assert x.stride(1) == 1 and weight.is_contiguous(), "rows of x and weight must be contiguous"
    if len(x) == 1 and x.dtype in (torch.bfloat16, torch.float16):
        return _one_row(x, weight, gated=True)
    return silu_and_mul(F.linear(x, weight))
