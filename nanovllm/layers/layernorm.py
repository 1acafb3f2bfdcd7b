"""RMS normalisation, alone or with the residual addition before it."""

import torch
from torch import nn


class RMSNorm(nn.Module):
    """`x / sqrt(mean(x^2) + eps) * weight`, computed in float32 (Zhang and Sennrich, 2019).

    Args:
        fused: use the Triton kernel instead of the PyTorch expression.
    """

    def __init__(self, hidden_size: int, eps: float, dtype: torch.dtype, fused: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size, dtype=dtype), False)
        self.eps = eps
        self.fused = fused

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., M] -> [..., M]"""
        if self.fused:
            from nanovllm.kernels.norm import rms_norm

            return rms_norm(x, self.weight, self.eps)
        h = x.float()
        h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * h.to(x.dtype)

    def add_forward(
        self, x: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Normalise `x + residual`; returns that and the sum. Neither input is changed.

        The first layer of a model has no residual yet: None stands for zero. With `fused`, x may
        be partial results [S, T, M] of a `RowParallelLinear`.
        """
        if residual is None:
            return self(x), x
        if self.fused:
            from nanovllm.kernels.norm import add_rms_norm

            return add_rms_norm(x, residual, self.weight, self.eps)
        residual = x + residual
        return self(residual), residual
