"""Rotary position embedding (Su et al., 2021), in the half-split layout of Hugging Face models."""

import math

import torch
from torch import nn

from nanovllm.model_config import RopeParameters


class RotaryEmbedding(nn.Module):
    """Rotates each pair (x[i], x[i + D/2]) of a head by position * theta^(-2i/D).

    "llama3" (Grattafiori et al., 2024) divides frequencies by `factor` that make fewer than
    `low_freq_factor` turns within the original context, keeps those that make more than
    `high_freq_factor`, and interpolates between.

    Attributes:
        cos_sin: [max_position, D] float32, the cosines of a position and then its sines.
    """

    cos_sin: torch.Tensor

    def __init__(self, head_dim: int, max_position: int, rope: RopeParameters) -> None:
        super().__init__()
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        frequencies = 1.0 / rope.rope_theta**exponents
        if rope.rope_type == "llama3":
            turns = rope.original_max_position_embeddings * frequencies / (2 * math.pi)
            low, high = rope.low_freq_factor, rope.high_freq_factor
            kept = ((turns - low) / (high - low)).clamp(0, 1)
            frequencies = frequencies * (kept + (1 - kept) / rope.factor)
        angles = torch.outer(torch.arange(max_position, dtype=torch.float32), frequencies)
        cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1)
        self.register_buffer("cos_sin", cos_sin, persistent=False)

    def forward(self, positions: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Rotate x: [T, H, D] to its positions: [T] int32."""
        # [T, 1, D/2] each
        cos, sin = self.cos_sin.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
        x1, x2 = x.float().chunk(2, dim=-1)
        return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1).to(x.dtype)
