"""RMS normalisation, alone or with the residual addition before it."""

import torch
from torch import nn

from nanovllm.checkpoint.model_config import ModelConfig
from nanovllm.distributed.bulk import Gathered, Scattered
from nanovllm.layers.base import Build, Hidden, Layer
from nanovllm.layers.spread import Residual, kept, normalise_owned_rows
from nanovllm.tensors.fp8 import Codes


class RMSNorm(Layer):
    """`x / sqrt(mean(x^2) + eps) * weight`, computed in float32 (Zhang and Sennrich, 2019).

    `fused` layers use the Triton kernel instead of the PyTorch expression.

    Args:
        plus_one: whether to multiply by `1 + weight`, as Gemma does.
        num_experts: experts per token, whose partial results it sums; 0: none.
        act_block: `Weight.act_block` of the layer that uses its results.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float,
        build: Build,
        *,
        plus_one: bool = False,
        num_experts: int = 0,
        act_block: int | None = None,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size, dtype=build.dtype), False)
        self.eps, self.plus_one = eps, plus_one
        self.num_experts, self.act_block = num_experts, act_block
        self.build = build

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., M] -> [..., M]"""
        if self.build.fused:
            from nanovllm.kernels.norm import rms_norm

            return rms_norm(x, self.weight, self.eps, self.plus_one)
        return self.plain(x)

    def plain(self, x: torch.Tensor) -> torch.Tensor:
        """`forward` by PyTorch's operators."""
        h = x.float()
        h = h * torch.rsqrt(self.mean_square(h) + self.eps)
        if self.plus_one:
            return (h * (1 + self.weight.float())).to(x.dtype)
        return self.weight * h.to(x.dtype)

    def mean_square(self, h: torch.Tensor) -> torch.Tensor:
        """[..., M] -> [..., 1]"""
        return h.square().mean(-1, keepdim=True)

    def add_forward(
        self, x: Hidden, residual: Residual
    ) -> tuple[torch.Tensor | Codes | Gathered, Residual]:
        """Normalise `x + residual`. Returns the normalised rows and the sum. Neither input is
        changed.

        The first layer of a model has no residual yet: None stands for zero. If x has only the rows
        that attention kept, the residual's other rows are dropped. With `fused`, x may be partial
        results [S, T, M] of a `RowParallelLinear`, to be summed over S and the ranks; or
        `Scattered`: then the sum has this rank's rows only, and the normalised rows are being
        gathered.
        """
        if isinstance(x, Scattered):
            return normalise_owned_rows(
                x, residual, self.weight, self.eps, self.plus_one, self.act_block
            )
        assert isinstance(x, torch.Tensor), "gathered rows are normalised already"
        residual = kept(residual, x.shape[-2], self.build.group)
        if residual is None and x.dim() == 2:
            return self(x), x
        if self.build.fused:
            from nanovllm.kernels.norm import add_rms_norm

            peers = self.build.group.peers if x.dim() == 3 else None
            return add_rms_norm(
                x, residual, self.weight, self.eps, peers, None, self.plus_one, self.act_block
            )
        assert residual is not None, "plain layers leave no partial results"
        residual = x + residual
        return self(residual), residual

    def whole_forward(self, x: Hidden, residual: Residual = None) -> torch.Tensor:
        """The normalised rows of `add_forward`: [T, M], also those of other ranks, which the next
        step overwrites.
        """
        normed, _ = self.add_forward(x, residual)
        assert not isinstance(normed, Codes), "nothing here accepts codes"
        return normed.whole() if isinstance(normed, Gathered) else normed


def norm(
    config: ModelConfig, build: Build, size: int | None = None, act_block: int | None = None
) -> RMSNorm:
    """A norm of hidden states, or of rows of another `size`."""
    size, plus_one = size or config.hidden_size, config.norm_plus_one
    k = 0 if config.experts is None else config.experts.num_experts_per_tok
    eps = config.rms_norm_eps
    return RMSNorm(size, eps, build, plus_one=plus_one, num_experts=k, act_block=act_block)
