"""Linear layers, by the part they play when a model is split over GPUs (Megatron's names).

On one device they all compute `x @ weight.T + bias`; what the packed ones know is which rows of
their weight belong to which projection of the checkpoint. `fused` layers take our kernels where
these are faster.
"""

import torch
import torch.nn.functional as F
from torch import nn


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`x @ weight.T + bias`. A weight in oneDNN's keeping (`onednn.py`) is multiplied there."""
    if weight.is_mkldnn:
        return F.linear(x.to_mkldnn(), weight, bias).to_dense()
    return F.linear(x, weight, bias)


class ReplicatedLinear(nn.Module):
    """`x @ weight.T + bias`, the same on every device. weight: [out, in]."""

    def __init__(
        self, input_size: int, output_size: int, bias: bool, dtype: torch.dtype, fused: bool
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(output_size, input_size, dtype=dtype), False)
        self.bias = nn.Parameter(torch.empty(output_size, dtype=dtype), False) if bias else None
        self.fused = fused and not bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in] -> [T, out]"""
        if self.fused:
            from nanovllm.kernels import linear as kernels

            return kernels.linear(x, self.weight)
        return linear(x, self.weight, self.bias)


class ColumnParallelLinear(ReplicatedLinear):
    """Split along its outputs."""


class RowParallelLinear(ReplicatedLinear):
    """Split along its inputs; the partial results are summed."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in] -> [T, out]; `fused` also [S, T, out], for `RMSNorm.add_forward` to sum."""
        if self.fused:
            from nanovllm.kernels import linear as kernels

            return kernels.linear(x, self.weight, partial=True)
        return super().forward(x)


class MergedColumnParallelLinear(ColumnParallelLinear):
    """Several projections of the same input as one product.

    Args:
        output_sizes: the outputs of each, in the order of their rows in `weight`.
    """

    def __init__(
        self,
        input_size: int,
        output_sizes: list[int],
        bias: bool,
        dtype: torch.dtype,
        fused: bool,
    ) -> None:
        super().__init__(input_size, sum(output_sizes), bias, dtype, fused)
        self.output_sizes = output_sizes


class QKVParallelLinear(MergedColumnParallelLinear):
    """Query, key and value projection as one product: [T, M] -> [T, (Hq + 2 Hkv) * D]."""

    def __init__(
        self,
        hidden_size: int,
        head_dim: int,
        num_heads: int,
        num_kv_heads: int,
        bias: bool,
        dtype: torch.dtype,
        fused: bool,
    ) -> None:
        q_size, kv_size = num_heads * head_dim, num_kv_heads * head_dim
        super().__init__(hidden_size, [q_size, kv_size, kv_size], bias, dtype, fused)
