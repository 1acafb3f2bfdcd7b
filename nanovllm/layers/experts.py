"""Mixture of experts: gated MLPs, of which each token takes the few that a router chooses."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.distributed.bulk import Gathered, Scattered
from nanovllm.layers.activation import act_and_mul
from nanovllm.layers.base import Build, Hidden, Layer, Part, Shard
from nanovllm.layers.linear import ReplicatedLinear, sum_over_ranks
from nanovllm.model_config import ModelConfig

ROWS = 4096  # of which partial results are kept at once


class Router(ReplicatedLinear):
    """Which experts each token takes, and how much of each."""

    def __init__(self, config: ModelConfig, build: Build) -> None:
        assert config.experts is not None, "a dense model"
        super().__init__(config.hidden_size, config.experts.num_experts, False, build)
        self.facts = config.experts

    def choose(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, M] -> the k experts of each token [T, k] int64, the likeliest first, and their
        weights [T, k] float32.
        """
        scores = self(x).float().softmax(-1)
        weights, experts = scores.topk(self.facts.num_experts_per_tok)
        if self.facts.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        return experts, weights


class Experts(Layer):
    """E experts, each `down(silu(gate(x)) * up(x))`, and each divided over the ranks as an MLP is.

    Args:
        config: of the model.
        names: what the checkpoint calls gate, up and down.
        build: of the model.
    """

    def __init__(self, config: ModelConfig, names: tuple[str, str, str], build: Build) -> None:
        super().__init__()
        assert config.experts is not None, "a dense model"
        self.num_experts, self.names, self.build = config.experts.num_experts, names, build
        M, self.part = config.hidden_size, Part.equal(config.experts.intermediate_size, build.group)
        I = len(self.part.held)
        shapes = (self.num_experts, 2 * I, M), (self.num_experts, M, I)
        self.gate_up, self.down = (
            nn.Parameter(torch.empty(shape, dtype=build.dtype), False) for shape in shapes
        )

    def shards(self, path: str) -> Iterator[tuple[str, Shard]]:
        I, whole = len(self.part.held), Part.whole(self.down.shape[1])
        gate, up, down = (f"{name}.weight" for name in self.names)
        for i, (gate_up, down_proj) in enumerate(
            zip(self.gate_up.data, self.down.data, strict=True)
        ):
            yield f"{path}.{i}.{gate}", Shard(gate_up[:I], (self.part, whole))
            yield f"{path}.{i}.{up}", Shard(gate_up[I:], (self.part, whole))
            yield f"{path}.{i}.{down}", Shard(down_proj, (whole, self.part))

    def forward(
        self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor | Scattered:
        """The weighted sum of what the experts make of each token.

        Args:
            x: [T, M]
            experts, weights: [T, k], see `Router.choose`.

        Returns:
            [T, M], or partial results: [k, T, M], or as of `sum_over_ranks`.
        """
        group = self.build.group
        if not self.build.fused:
            return sum_over_ranks(self._by_expert(x, experts, weights), group)
        if len(x) <= ROWS and (group.size == 1 or group.can_exchange(x)):
            return self._by_kernels(x, experts, weights)
        parts = zip(*(part.split(ROWS) for part in (x, experts, weights)), strict=True)
        out = torch.cat([self._by_kernels(*part).sum(0).to(x.dtype) for part in parts])
        return sum_over_ranks(out, group)

    def _by_kernels(
        self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Partial results [k, T, M] float32."""
        from nanovllm.kernels.experts import gated_experts

        return gated_experts(x, self.gate_up, self.down, experts.to(torch.int32), weights)

    def _by_expert(
        self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """One expert after the other, with all of its tokens."""
        k = experts.shape[1]
        order = experts.flatten().argsort(stable=True)
        ends = experts.flatten().bincount(minlength=self.num_experts).cumsum(0).tolist()
        out = x.new_empty(len(order), x.shape[1])
        for i, (begin, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
            if begin < end:
                rows = order[begin:end]
                inner = act_and_mul(F.linear(x[rows // k], self.gate_up[i]))
                out[rows] = F.linear(inner, self.down[i])
        return (out.view(-1, k, x.shape[1]) * weights.unsqueeze(-1)).sum(1).to(x.dtype)


class SparseMLP(nn.Module):
    """A router and its experts, in the place of an MLP."""

    def __init__(self, config: ModelConfig, names: tuple[str, str, str], build: Build) -> None:
        super().__init__()
        self.gate = Router(config, build)
        self.experts = Experts(config, names, build)

    def forward(self, hidden: Hidden) -> Hidden:
        x = hidden.whole() if isinstance(hidden, Gathered) else hidden
        assert isinstance(x, torch.Tensor), "rows are normalised before they come here"
        return self.experts(x, *self.gate.choose(x))
