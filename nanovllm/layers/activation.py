"""The gated activation of the MLP."""

import torch
import torch.nn.functional as F


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up` of [gate | up] (SwiGLU; Shazeer, 2020): [T, 2 I] -> [T, I]"""
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up
