"""The gate of an MLP."""

import torch
import torch.nn.functional as F

ACTIVATIONS = {"silu": False, "gelu_pytorch_tanh": True}  # name in config.json -> whether GELU


def act_and_mul(x: torch.Tensor, gelu: bool = False, limit: float = 0.0) -> torch.Tensor:
    """`act(gate) * up` of [gate | up] (Shazeer, 2020): [T, 2 I] -> [T, I]; act is SiLU, or GELU by
    tanh. A limit clamps both first, and gates 1 + up: gpt-oss's SwiGLU (OpenAI, 2025).
    """
    gate, up = x.chunk(2, -1)
    if limit:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return gate * torch.sigmoid(1.702 * gate) * (up + 1)
    return (F.gelu(gate, approximate="tanh") if gelu else F.silu(gate)) * up
