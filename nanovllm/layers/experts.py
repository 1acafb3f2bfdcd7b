"""Mixture of experts: gated MLPs, of which a router chooses a few for each token."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, ClassVar, TypeAlias

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.checkpoint.model_config import ExpertConfig, ModelConfig
from nanovllm.checkpoint.quantization import WHILE_LOADING
from nanovllm.distributed.bulk import Scattered
from nanovllm.distributed.group import sum_in_order
from nanovllm.layers.activation import ACTIVATIONS, act_and_mul
from nanovllm.layers.base import MLP, Build, Hidden, Layer
from nanovllm.layers.linear import LinearBase, make_weight
from nanovllm.layers.sequence_parallel import sum_over_ranks, whole_rows
from nanovllm.layers.weights.fp8 import Fp8Weight
from nanovllm.layers.weights.int4 import Int4Weight
from nanovllm.layers.weights.mxfp4 import Mxfp4Weight
from nanovllm.layers.weights.quantized import QuantizedWeight
from nanovllm.layers.weights.shard import Part, Shard, StackedShard, ZeroShard
from nanovllm.layers.weights.weight import Weight
from nanovllm.tensors.mxfp4 import BLOCK

if TYPE_CHECKING:
    from nanovllm.kernels.experts.weights import ExpertWeights


# `Router.choose`
Choose: TypeAlias = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def _facts(config: ModelConfig) -> ExpertConfig:
    assert config.experts is not None, "a dense model"
    return config.experts


class Router(LinearBase):
    """The choice of each token's experts, and of their weights. No format quantises it.

    With `ExpertConfig.has_shared` the last expert is the one that all tokens choose; the last row
    of the weight is its gate.
    """

    def __init__(self, config: ModelConfig, build: Build) -> None:
        facts, plain = _facts(config), build._replace(quantization=None)
        outputs = {"": Part.whole(facts.num_experts)}
        if facts.has_shared:
            outputs["shared_expert_gate"] = Part.whole(1)
        super().__init__(Part.whole(config.hidden_size), outputs, facts.bias, plain)
        self.k, self.norm = facts.num_experts_per_tok, facts.norm_topk_prob
        self.has_shared = facts.has_shared

    def choose(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose experts: x [T, M] -> the k experts of each token [T, k], the likeliest first, and
        their weights [T, k] float32; [T, k + 1] with a shared expert, which comes last.
        """
        logits = self(x)
        if self.build.fused:
            from nanovllm.kernels.experts.routing import route

            return route(logits, self.k, self.norm, self.has_shared)
        if self.has_shared:
            logits, gate = logits[:, :-1], logits[:, -1:]
        logits, experts = logits.float().sort(dim=-1, descending=True, stable=True)
        weights = (logits[:, : self.k] if self.norm else logits).softmax(-1)
        experts, weights = experts[:, : self.k], weights[:, : self.k]
        if self.has_shared:
            shared = experts.new_full((len(x), 1), logits.shape[1])
            experts = torch.cat([experts, shared], 1)
            weights = torch.cat([weights, gate.float().sigmoid()], 1)
        return experts, weights


class Experts(Layer):
    """E experts, each `down(act(gate(x)) * up(x))`, and each divided over the ranks as an MLP is.
    The one that all tokens choose, if there is one, is the last.

    Attributes:
        gate_up: [E * 2 I, M], for each expert the gate's I rows, then those of up.
        down: [E * M, I]
    """

    def __init__(self, config: ModelConfig, build: Build) -> None:
        super().__init__()
        facts, M = _facts(config), config.hidden_size
        self.facts, self.build = facts, build
        self.gelu = ACTIVATIONS[config.hidden_act]
        self.outputs, self.num_experts = Part.whole(M), facts.num_experts + facts.has_shared
        E, group = self.num_experts, build.group
        self.part = (
            Part.blocks(facts.intermediate_size, BLOCK, group)
            if facts.is_mxfp4
            else Part.equal(facts.intermediate_size, group)
        )
        I = len(self.part.held)
        both = [_weight(*shape, facts, build) for shape in ((E * 2 * I, M), (E * M, I))]
        codes = [weight for weight in both if isinstance(weight, QuantizedWeight)]
        if not all(weight.has_kernels for weight in codes):  # their kernels share tiles
            for weight in codes:
                weight.kernels = None
        self.gate_up, self.down = both
        shapes = [(E, 2 * I), (E, M)] * facts.bias
        biases = [nn.Parameter(torch.empty(shape, dtype=build.dtype), False) for shape in shapes]
        self.gate_up_bias: nn.Parameter | None
        self.down_bias: nn.Parameter | None
        self.gate_up_bias, self.down_bias = biases or (None, None)

    def of_each(self, weight: Weight) -> torch.Tensor:
        """The values of a matrix by expert: [E, outputs, inputs]."""
        return weight.data.data.view(self.num_experts, -1, weight.data.shape[1])

    @property
    def own_bias(self) -> torch.Tensor | None:
        """The bias that this rank adds: only rank 0 does, so that the ranks' sum has it once."""
        return self.down_bias if self.build.group.rank == 0 else None

    def forward(
        self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor | Scattered:
        """The weighted sum of the experts' outputs for each token.

        Args:
            x: [T, M]
            experts, weights: [T, k], see `Router.choose`.

        Returns:
            [T, M]; or partial results: [k, T, M], or those of `sum_over_ranks`.
        """
        group = self.build.group
        out = self.multiply(x, experts, weights)
        if out.dim() == 2:
            return sum_over_ranks(out, group)
        if group.size == 1 or group.can_exchange(x):  # the norm that follows sums
            return out
        whole = sum_in_order(out) if self.build.fixed_order else out.sum(0, dtype=torch.float32)
        return sum_over_ranks(whole.to(x.dtype), group)

    def multiply(
        self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """The weighted outputs of each token's experts: every product of experts, in any format.

        Both matrices are multiplied here, not each by its `Weight`: their kernels share the tiles,
        and the order of the pairs of a token and an expert. An adapter of experts overrides this.

        Args:
            x, experts, weights: see `forward`.

        Returns:
            [k, T, M], to be summed over k, if `fused`; else [T, M].
        """
        if not self.build.fused:
            return self._by_expert(x, experts, weights)
        from nanovllm.kernels.experts.gated_experts import experts_by_fixed_tiles, gated_experts

        multiply = experts_by_fixed_tiles if self.build.fixed_order else gated_experts
        return multiply(x, self._weights(), experts, weights)

    def _weights(self) -> "ExpertWeights":
        from nanovllm.kernels.experts.weights import ExpertWeights

        return ExpertWeights(
            self.gate_up.codes,
            self.down.codes,
            self.gate_up_bias,
            self.own_bias,
            self.gelu,
            self.facts.swiglu_limit,
        )

    def _by_expert(
        self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Compute one expert after another, each for all of its tokens. Returns [T, M]."""
        k = experts.shape[1]
        order = experts.flatten().argsort(stable=True)
        gate_up_of, down_of = self.of_each(self.gate_up), self.of_each(self.down)
        ends = experts.flatten().bincount(minlength=len(down_of)).cumsum(0).tolist()
        out = x.new_empty(len(order), x.shape[1])
        for i, (begin, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
            if begin < end:
                rows = order[begin:end]
                bias, down_bias = (
                    None if of_all is None else of_all[i]
                    for of_all in (self.gate_up_bias, self.own_bias)
                )
                gate_up = F.linear(x[rows // k], gate_up_of[i], bias)
                inner = _activate(gate_up, self.gelu, self.facts.swiglu_limit)
                out[rows] = F.linear(inner, down_of[i], down_bias)
        return (out.view(-1, k, x.shape[1]) * weights.unsqueeze(-1)).sum(1).to(x.dtype)


def _weight(num_rows: int, num_cols: int, facts: ExpertConfig, build: Build) -> Weight:
    """A weight for one projection of all experts of a layer, in the format of all of these. Experts
    that a checkpoint has in one tensor are not quantised there.
    """
    if facts.is_mxfp4:
        return Mxfp4Weight(num_rows, num_cols, build.dtype, build.fused)
    if facts.packed and build.quantization != WHILE_LOADING:
        build = build._replace(quantization=None)
    build = build._replace(batch_invariant=False)  # whose tile fits not every size; theirs do
    weight = make_weight(num_rows, num_cols, facts.modules(build.path), build)
    if isinstance(weight, Fp8Weight) and weight.act_block is None:
        weight.kernels = None  # our kernels for experts accept codes only where tensor cores do
    return weight


def _activate(x: torch.Tensor, gelu: bool, limit: float) -> torch.Tensor:
    """`act_and_mul`; with a limit, gpt-oss's SwiGLU (OpenAI, 2025): clamped, and of 1 + up."""
    if not limit:
        return act_and_mul(x, gelu)
    gate, up = x.chunk(2, -1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


class NumberedExperts(Experts):
    """Experts that the checkpoint stores one by one, each under its number."""

    def shards(self, path: str) -> Iterator[tuple[str, Shard]]:
        for i in range(self.facts.num_experts):
            yield from self.shards_of(i, f"{path}.{i}")
        if self.facts.has_shared:
            yield from self.shards_of(self.facts.num_experts, self.facts.shared(path))

    def shards_of(self, i: int, path: str) -> Iterator[tuple[str, Shard]]:
        """The tensors of the i-th expert, which has this path, as `Layer.shards`."""
        I, M = len(self.part.held), self.outputs.total
        gate, up, down = self.facts.names
        for name, weight, begin, rows, cols in (
            (gate, self.gate_up, 2 * i * I, self.part, self.outputs),
            (up, self.gate_up, (2 * i + 1) * I, self.part, self.outputs),
            (down, self.down, i * M, self.outputs, self.part),
        ):
            yield from weight.shards(f"{path}.{name}", begin, rows, cols)
            if isinstance(weight.stored, Int4Weight):  # AutoGPTQ writes a bias for every layer
                yield f"{path}.{name}.bias", ZeroShard(torch.empty(0), (rows,))


class StackedExperts(NumberedExperts):
    """Experts that the checkpoint stacks in one tensor for all, in 16 bits, each gate's rows before
    those of up (Qwen3.5).
    """

    def shards(self, path: str) -> Iterator[tuple[str, Shard]]:
        of_each = [[shard for _, shard in self.shards_of(i, "")] for i in range(self.num_experts)]
        routed = of_each[: self.facts.num_experts]
        experts = Part.whole(self.facts.num_experts)
        both = Part.whole(2 * self.part.total), self.outputs
        yield f"{path}.gate_up_proj", StackedShard.of([each[:2] for each in routed], experts, both)
        down = self.outputs, Part.whole(self.part.total)
        yield f"{path}.down_proj", StackedShard.of([each[2:] for each in routed], experts, down)
        if self.facts.has_shared:
            yield from self.shards_of(self.facts.num_experts, self.facts.shared(path))


class PackedExperts(Experts):
    """Experts that the checkpoint packs into one tensor for all, inputs before outputs, gate and up
    interleaved (gpt-oss) or one after the other (Qwen3-VL-MoE).
    """

    interleaves: ClassVar[bool] = True

    def shards(self, path: str) -> Iterator[tuple[str, Shard]]:
        experts, outputs, inner = Part.whole(self.facts.num_experts), self.outputs, self.part
        gate_up = Part.packed([inner, inner])
        if self.interleaves:
            interleaved = [2 * i for i in inner.held] + [2 * i + 1 for i in inner.held]
            gate_up = Part(interleaved, 2 * inner.total)
        for name, weight, rows, columns in (
            ("gate_up_proj", self.gate_up, gate_up, outputs),
            ("down_proj", self.down, outputs, inner),
        ):
            parts = experts, rows, columns
            if isinstance(weight.stored, Mxfp4Weight):
                of_both = partial(Mxfp4Weight.stacked_shards, name=f"{path}.{name}", parts=parts)
                yield from weight.of_stored(of_both)
                continue
            yield f"{path}.{name}", Shard(self.of_each(weight).mT, (experts, columns, rows))
        if self.gate_up_bias is None or self.down_bias is None:
            return
        yield f"{path}.gate_up_proj_bias", Shard(self.gate_up_bias.data, (experts, gate_up))
        yield f"{path}.down_proj_bias", Shard(self.down_bias.data, (experts, outputs))


class JoinedExperts(PackedExperts):
    """The same, gate and up one after the other."""

    interleaves = False


class SparseMLP(MLP):
    """A router and its experts, in place of a dense MLP.

    Args:
        router: name of the router in the checkpoint.
    """

    def __init__(
        self, config: ModelConfig, experts: Experts, build: Build, router: str = "gate"
    ) -> None:
        super().__init__()
        module = Router(config, build.at(router))
        self.add_module(router, module)
        self.choose: Choose = module.choose
        self.experts = experts

    def forward(self, hidden: Hidden) -> Hidden:
        x = whole_rows(hidden)
        return self.experts(x, *self.choose(x))
