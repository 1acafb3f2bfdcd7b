"""The gate of an MLP."""

import torch
import torch.nn.functional as F

ACTIVATIONS = {"silu": False, "gelu_pytorch_tanh": True}  # name in config.json -> whether GELU


def act_and_mul(x: torch.Tensor, gelu: bool = False) -> torch.Tensor:
    """`act(gate) * up` of [gate | up] (Shazeer, 2020): [T, 2 I] -> [T, I]. act is SiLU, or GELU
    (tanh).
    """
    gate, up = x.chunk(2, -1)
    return (F.gelu(gate, approximate="tanh") if gelu else F.silu(gate)) * up
