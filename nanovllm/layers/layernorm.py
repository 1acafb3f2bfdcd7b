"""RMS normalisation, alone or with the residual addition before it."""

from typing import TYPE_CHECKING

import torch
from torch import nn

from nanovllm.checkpoint.model_config import ModelConfig
from nanovllm.distributed.bulk import Gathered, Scattered
from nanovllm.layers.base import Build, Hidden, Layer
from nanovllm.layers.sequence_parallel import Owned, Residual, kept, whole_rows
from nanovllm.tensors.fp8 import Codes

if TYPE_CHECKING:
    from nanovllm.distributed.peer_memory import PeerMemory


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
            return self._add_owned_rows(x, residual)
        assert isinstance(x, torch.Tensor), "gathered rows are normalised already"
        group = self.build.group
        residual = kept(residual, x.shape[-2], group)
        if x.dim() == 3:
            assert self.build.fused, "plain layers leave no partial results"
            return self._add_by_kernel(x, residual, group.peers)
        if residual is None:
            return self(x), x
        if self.build.fused:
            return self._add_by_kernel(x, residual)
        total = x + residual
        return self(total), total

    def _add_owned_rows(self, x: Scattered, residual: Residual) -> tuple[Gathered, Owned]:
        """`add_forward` of this rank's rows. The other ranks' normalised rows may still be
        arriving.
        """
        assert residual is None or isinstance(residual, Owned), "rows are divided once"
        own = None if residual is None else residual.rows
        out = x.exchange.own_rows(x.num_rows, self.act_block)
        _, total = self._add_by_kernel(x.partial, own, out=out)
        gathered = x.exchange.gather(x.num_rows, self.act_block)
        return gathered, Owned(total, gathered.held)

    def _add_by_kernel(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        peers: "PeerMemory | None" = None,
        out: torch.Tensor | Codes | None = None,
    ) -> tuple[torch.Tensor | Codes, torch.Tensor]:
        """See `kernels.norm.add_rms_norm`."""
        from nanovllm.kernels.norm import add_rms_norm

        return add_rms_norm(
            x,
            residual,
            self.weight,
            self.eps,
            peers=peers,
            out=out,
            plus_one=self.plus_one,
            act_block=self.act_block,
            fixed_order=self.build.fixed_order,
        )

    def whole_forward(self, x: Hidden, residual: Residual = None) -> torch.Tensor:
        """The normalised rows of `add_forward`: [T, M], also those of other ranks, which the next
        step overwrites.
        """
        normed, _ = self.add_forward(x, residual)
        return whole_rows(normed)


def norm(
    config: ModelConfig, build: Build, size: int | None = None, act_block: int | None = None
) -> RMSNorm:
    """A norm of hidden states, or of rows of another `size`."""
    size, plus_one = size or config.hidden_size, config.norm_plus_one
    experts = config.experts
    k = 0 if experts is None else experts.num_experts_per_tok + experts.has_shared
    eps = config.rms_norm_eps
    return RMSNorm(size, eps, build, plus_one=plus_one, num_experts=k, act_block=act_block)
