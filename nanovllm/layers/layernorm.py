"""RMS normalisation, alone or with the residual addition before it."""

from collections.abc import Callable, Hashable
from functools import partial

import torch
from torch import nn

from nanovllm.distributed.bulk import Gathered, Hidden, Scattered
from nanovllm.layers.base import Build, Layer


class RMSNorm(Layer):
    """`x / sqrt(mean(x^2) + eps) * weight`, computed in float32 (Zhang and Sennrich, 2019).

    `fused` layers take the Triton kernel instead of the PyTorch expression.
    """

    def __init__(self, hidden_size: int, eps: float, build: Build) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size, dtype=build.dtype), False)
        self.eps = eps
        self.build = build

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., M] -> [..., M]"""
        if self.build.fused:
            from nanovllm.kernels.norm import rms_norm

            return rms_norm(x, self.weight, self.eps)
        h = x.float()
        h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * h.to(x.dtype)

    def variants(self) -> dict[Hashable, Callable[[], object]]:
        """Of partial results. A norm that sums over ranks waits for the others: it is compiled
        when all of them run.
        """
        if not self.build.fused or self.build.group.size > 1:
            return {}
        from nanovllm.kernels.linear import split_numbers
        from nanovllm.kernels.norm import add_rms_norm

        def add(parts: int) -> None:
            residual = self.weight.new_zeros(1, len(self.weight))
            x = residual.new_zeros(parts, *residual.shape, dtype=torch.float32)
            add_rms_norm(x, residual, self.weight, self.eps)

        numbers = split_numbers(self.weight)
        return {(RMSNorm, self.weight.shape, parts): partial(add, parts) for parts in numbers}

    def add_forward(
        self, x: Hidden, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor | Gathered, torch.Tensor]:
        """Normalise `x + residual`; returns that and the sum. Neither input is changed.

        The first layer of a model has no residual yet: None stands for zero. With `fused`, x may
        be partial results [S, T, M] of a `RowParallelLinear`, to be summed over S and the ranks;
        or `Scattered`: then both results are of this rank's rows, and the first is being gathered.
        """
        if isinstance(x, Scattered):
            from nanovllm.kernels.norm import add_rms_norm

            out = x.exchange.own_rows(x.num_rows)
            _, total = add_rms_norm(x.partial, residual, self.weight, self.eps, out=out)
            return x.exchange.gather(x.num_rows), total
        assert isinstance(x, torch.Tensor), "gathered rows are normalised already"
        if residual is None and x.dim() == 2:
            return self(x), x
        if self.build.fused:
            from nanovllm.kernels.norm import add_rms_norm

            peers = self.build.group.peers if x.dim() == 3 else None
            return add_rms_norm(x, residual, self.weight, self.eps, peers)
        assert residual is not None, "plain layers leave no partial results"
        residual = x + residual
        return self(residual), residual
