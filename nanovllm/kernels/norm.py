"""RMS normalisation, one row per program: alone, or fused with the sums before it.

These add the partial results of a product, other ranks' partial results (`peers.py`), and the
residual.
"""

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from nanovllm.kernels.all_reduce import all_reduce_row, peer_options, sums_by_owner
from nanovllm.kernels.device_features import (
    has_ptx,
    launch_dependents,
    pdl_options,
    spare_rows,
    wait,
)
from nanovllm.kernels.fp8 import empty_codes, store_codes
from nanovllm.tensors.fp8 import Codes
from nanovllm.utils.integers import next_power_of_2

if TYPE_CHECKING:
    from nanovllm.distributed.peer_memory import PeerMemory


FEW_ROWS = 256


@triton.jit
def weighted(x, weight, PLUS_ONE: tl.constexpr):
    """The product of normalised x: float32 and `weight`, or `1 + weight`, in the weight's dtype."""
    if PLUS_ONE:
        return (x * (weight.to(tl.float32) + 1.0)).to(weight.dtype)
    else:
        return x.to(weight.dtype) * weight


@triton.jit(do_not_specialize=["stride_part"])
def _rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, scales_ptr, sum_ptr, eps, stride_part,
    peers_ptr, epochs_ptr,
    M: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, SUM: tl.constexpr,
    ADD: tl.constexpr, PLUS_ONE: tl.constexpr, X_BLOCK: tl.constexpr,
    BY_OWNER: tl.constexpr, ROW_BYTES: tl.constexpr, ROWS: tl.constexpr, RANK: tl.constexpr,
    SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < M
    dtype = weight_ptr.dtype.element_ty
    weight = tl.load(weight_ptr + cols, mask=mask, other=0.0)
    wait(PDL)
    x = tl.load(x_ptr + row * M + cols, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        x += tl.load(x_ptr + part * stride_part + row * M + cols, mask=mask, other=0.0)
    if ADD:  # loaded before the wait for other ranks
        residual = tl.load(residual_ptr + row * M + cols, mask=mask, other=0.0).to(tl.float32)
    if SIZE > 1:
        x = all_reduce_row(
            x.to(dtype), peers_ptr, epochs_ptr, row, cols, mask, BY_OWNER,
            ROW_BYTES, ROWS, RANK, SIZE,
        )  # fmt: skip
    if SUM:
        # Round as stored results are rounded, so that fused and plain layers agree.
        x = x.to(dtype).to(tl.float32)
        if ADD:
            x += residual
        total = x.to(dtype)
        tl.store(sum_ptr + row * M + cols, total, mask=mask)
        x = total.to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x) / M + eps)
    out = weighted(x, weight, PLUS_ONE)
    if scales_ptr is None:
        tl.store(out_ptr + row * M + cols, out, mask=mask)
    else:
        store_codes(out.to(tl.float32), out_ptr, scales_ptr, row, 0, M, BLOCK, X_BLOCK)


def _launch(
    x: torch.Tensor,
    parts: int,  # 0: x is no partial result
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    plus_one: bool,
    peers: "PeerMemory | None",
    out: torch.Tensor | Codes | None,
    act_block: int | None,
    fixed_order: bool = False,
) -> tuple[torch.Tensor | Codes, torch.Tensor]:
    T, M = x.numel() // max(1, parts) // x.shape[-1], x.shape[-1]
    if parts <= 1:
        x = x.contiguous()
    shape = (T, M) if parts or peers is not None else x.shape
    if out is None and act_block is not None and (T > 1 or fixed_order):
        out = empty_codes(T, M, act_block, x.device)
    assert not isinstance(out, Codes) or out.block[1] == (act_block or M), (
        "`act_block` must be that of `out`"
    )
    normed = spare_rows(*shape, like=weight) if out is None else out
    results = (normed.codes, normed.scales) if isinstance(normed, Codes) else (normed, None)
    sums = residual is not None or peers is not None or parts > 0
    total = torch.empty_like(results[0], dtype=weight.dtype) if sums else x
    BLOCK = max(act_block or 0, next_power_of_2(M))
    num_warps = min(16, max(1, BLOCK // 512))
    few = parts > 1 and T <= FEW_ROWS and not fixed_order
    if few and BLOCK >= 4096 and peers is None and has_ptx(x):
        # With more threads that read, it ends sooner (measured on an H200). AMD's warps have 64
        # threads, and a program at most 1024.
        num_warps = 32
    assert peers is None or peers.max_rows >= T, f"{T} rows do not fit the exchange of the ranks"
    assert peers is None or 32 * num_warps <= BLOCK, f"{M} elements have several threads each"
    _rms_norm_kernel[(T,)](
        x, x if residual is None else residual.contiguous(), weight, *results, total, eps,
        x.stride(0) if parts > 1 else 0,
        M=M, BLOCK=BLOCK, PARTS=max(1, parts), SUM=sums, ADD=residual is not None,
        PLUS_ONE=plus_one, X_BLOCK=act_block or 0, BY_OWNER=sums_by_owner(peers, T),
        num_warps=num_warps, **peer_options(peers, weight), **pdl_options(x),
    )  # fmt: skip
    return normed, total


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, plus_one: bool = False
) -> torch.Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight`, or `* (1 + weight)`, for x: [..., M], weight: [M]."""
    out, _ = _launch(x, 0, None, weight, eps, plus_one, None, None, None)
    assert isinstance(out, torch.Tensor)
    return out


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    peers: "PeerMemory | None" = None,
    out: torch.Tensor | Codes | None = None,
    plus_one: bool = False,
    act_block: int | None = None,
    fixed_order: bool = False,
) -> tuple[torch.Tensor | Codes, torch.Tensor]:
    """`rms_norm(x + residual)`, and `x + residual`: two new tensors [T, M].

    Args:
        x: [T, M], or S partial results [S, T, M], which are summed first; rows are adjacent.
        residual: [T, M]; None: 0.
        peers: ranks over which x is summed, too; T is at most their `max_rows`.
        out: output buffer of the first result.
        act_block: columns that share a scale, if the first result shall be `Codes` (of several rows
            only); 0: all of a row; None: no codes.
        fixed_order: whether rows are computed alike, whatever their number; a single one is
            quantised then, too.
    """
    parts = len(x) if x.dim() == 3 else 0
    return _launch(x, parts, residual, weight, eps, plus_one, peers, out, act_block, fixed_order)
