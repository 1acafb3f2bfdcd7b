"""The gated activation of the MLP."""

import torch
import torch.nn.functional as F
from torch import nn


class SiluAndMul(nn.Module):
    """`silu(gate) * up` of [gate | up] (SwiGLU; Shazeer, 2020).

    Args:
        fused: use the Triton kernel instead of the PyTorch expression.
    """

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused = fused

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, 2 I] -> [T, I]"""
        if self.fused:
            from nanovllm.kernels.activation import silu_and_mul

            return silu_and_mul(x)
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up
