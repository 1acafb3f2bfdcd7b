"""RMS normalisation, with and without the residual addition, one row per program."""

import torch
import triton
import triton.language as tl


@triton.jit
def _rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, sum_ptr, eps,
    M: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < M
    x = tl.load(x_ptr + row * M + cols, mask=mask, other=0.0)
    dtype = x.dtype
    x = x.to(tl.float32)
    if ADD:
        x += tl.load(residual_ptr + row * M + cols, mask=mask, other=0.0).to(tl.float32)
        # Round as the stored sum is rounded, so that fused and plain agree.
        x = x.to(dtype)
        tl.store(sum_ptr + row * M + cols, x, mask=mask)
        x = x.to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x) / M + eps)
    weight = tl.load(weight_ptr + cols, mask=mask, other=0.0)
    tl.store(out_ptr + row * M + cols, x.to(dtype) * weight, mask=mask)


def _launch(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.contiguous()
    out = torch.empty_like(x)
    total = x if residual is None else torch.empty_like(x)
    M = x.shape[-1]
    BLOCK = triton.next_power_of_2(M)
    _rms_norm_kernel[(x.numel() // M,)](
        x, x if residual is None else residual.contiguous(), weight, out, total, eps,
        M=M, BLOCK=BLOCK, ADD=residual is not None,
        num_warps=min(16, max(1, BLOCK // 512)),
    )  # fmt: skip
    return out, total


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight`. x: [..., M]; weight: [M]."""
    return _launch(x, None, weight, eps)[0]


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rms_norm(x + residual)`, and `x + residual`; both new tensors [..., M]."""
    return _launch(x, residual, weight, eps)
