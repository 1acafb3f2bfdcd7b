"""RMS normalisation, with and without the residual addition, one row per program."""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.hopper import launch_dependents, pdl_options, wait


@triton.jit(do_not_specialize=["stride_part"])
def _rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, sum_ptr, eps, stride_part,
    M: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, PARTS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    launch_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < M
    dtype = out_ptr.dtype.element_ty
    weight = tl.load(weight_ptr + cols, mask=mask, other=0.0)
    wait(PDL)
    x = tl.load(x_ptr + row * M + cols, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        x += tl.load(x_ptr + part * stride_part + row * M + cols, mask=mask, other=0.0)
    if ADD:
        # Round as the stored results are rounded, so that fused and plain agree.
        x = x.to(dtype).to(tl.float32)
        x += tl.load(residual_ptr + row * M + cols, mask=mask, other=0.0).to(tl.float32)
        total = x.to(dtype)
        tl.store(sum_ptr + row * M + cols, total, mask=mask)
        x = total.to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x) / M + eps)
    tl.store(out_ptr + row * M + cols, x.to(dtype) * weight, mask=mask)


def _launch(
    x: torch.Tensor, parts: int, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.contiguous()
    out = torch.empty_like(x if residual is None else residual)
    total = x if residual is None else torch.empty_like(residual)
    M = x.shape[-1]
    BLOCK = triton.next_power_of_2(M)
    _rms_norm_kernel[(out.numel() // M,)](
        x, x if residual is None else residual.contiguous(), weight, out, total, eps, out.numel(),
        M=M, BLOCK=BLOCK, ADD=residual is not None, PARTS=parts,
        num_warps=min(16, max(1, BLOCK // 512)), **pdl_options(x),
    )  # fmt: skip
    return out, total


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight`. x: [..., M]; weight: [M]."""
    return _launch(x, 1, None, weight, eps)[0]


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rms_norm(x + residual)`, and `x + residual`; both new tensors like residual: [..., M].

    x may also be the S partial results of `linear`, [S, ..., M] float32, which are summed first.
    """
    parts = len(x) if x.dim() > residual.dim() else 1
    return _launch(x, parts, residual, weight, eps)
