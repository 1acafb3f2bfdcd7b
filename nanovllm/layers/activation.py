"""The gated activation of the MLP."""

import torch
import torch.nn.functional as F
from torch import nn


class SiluAndMul(nn.Module):
    """`silu(gate) * up` of [gate | up] (SwiGLU; Shazeer, 2020)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, 2 I] -> [T, I]"""
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up
