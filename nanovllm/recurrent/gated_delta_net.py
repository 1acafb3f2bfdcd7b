"""`GatedDeltaNet`: a layer of linear attention with a state (Yang et al., 2025), as in Qwen3-Next.

Names of the checkpoint's tensors, shapes and formulas: transformers, models/qwen3_5 and qwen3_next.
"""

from collections.abc import Iterator

import torch
from torch import nn

from nanovllm.checkpoint.model_config import DeltaNetConfig, ModelConfig
from nanovllm.layers.base import Build, Hidden, Per, State
from nanovllm.layers.linear import ColumnParallelLinear, RowParallelLinear
from nanovllm.layers.weights.quantized import QuantizedWeight
from nanovllm.layers.weights.shard import Part, Shard
from nanovllm.recurrent import delta_rule
from nanovllm.recurrent.layer import Bounds, RecurrentLayer, chunks_of_step
from nanovllm.tensors.delta_net import DeltaNet, DeltaState


class GatedDeltaNet(RecurrentLayer):
    """A layer of Hv value heads, Hv / Hk of which share a key head: [T, M] -> [T, M].

    A projection gives q, k, v and z of each token, another the numbers b and a of each head. A
    causal convolution runs over q, k and v; then each head's memory S [V, K] decays, takes in the
    value v at the key k, and answers the query q. The answers are normalised and gated by z.

    The ranks divide the heads. Parameters of the decay, and the gated norm's, stay in float32.
    """

    def __init__(self, config: ModelConfig, is_last: bool, build: Build) -> None:
        super().__init__(is_last, build)
        facts, group = config.delta_net, build.group
        assert facts is not None, "a model without such layers"
        M, self.facts = config.hidden_size, facts
        Hv, V, J = facts.num_value_heads, facts.value_head_dim, facts.conv_kernel_dim
        self.num_key_heads = facts.num_key_heads // group.size
        self.num_value_heads = Hv // group.size
        self.channels = _channels(facts, build)
        inputs, own = Part.whole(M), build.at("in_proj")
        self.in_proj = ColumnParallelLinear(inputs, _projections(facts, build), False, own)
        self._gate_names = self._add_gates(inputs, build)
        self.out_proj = RowParallelLinear(Hv * V, M, False, build.at("out_proj"))
        self.conv = _parameter(len(self.channels.held), J, dtype=build.dtype)
        self.A_log, self.dt_bias = (_parameter(self.num_value_heads) for _ in range(2))
        self.norm, self.eps = _parameter(V), config.rms_norm_eps
        self.state = DeltaState(torch.empty(0), torch.empty(0))

    def _add_gates(self, inputs: Part, build: Build) -> list[str]:
        """Add the projections to b and a, and return their names: one in 16 bits, or those of the
        checkpoint, if it has codes for them, which become numbers after loading.
        """
        gates = _gates(self.facts, build)
        if not self.facts.gates_in_codes:
            plain = build.at("in_proj_gates")._replace(quantization=None)
            self.in_proj_gates = ColumnParallelLinear(inputs, gates, False, plain)
            return ["in_proj_gates"]
        for name, rows in gates.items():
            layer = ColumnParallelLinear(inputs, {"": rows}, False, build.at(name))
            if isinstance(layer.weight, QuantizedWeight):
                layer.weight.kernels = None
            self.add_module(name, layer)
        return list(gates)

    def _gates_of(self, hidden: Hidden) -> torch.Tensor:
        """b and a of all heads: [T, M] -> [T, 2 Hv]"""
        parts = [getattr(self, name)(hidden) for name in self._gate_names]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def states(self) -> dict[str, State]:
        """The fields of a `DeltaState`."""
        facts, C = self.facts, len(self.channels.held)
        memory = self.num_value_heads, facts.value_head_dim, facts.key_head_dim
        return {
            "tail": State((facts.conv_kernel_dim - 1, C), self.build.dtype, Per.SEQUENCE),
            "memory": State(memory, torch.float32, Per.SEQUENCE),
        }

    def bind(self, **tensors: torch.Tensor) -> None:
        """Use a `DeltaState` with these fields from now on."""
        self.state = DeltaState(**tensors)

    def shards(self, path: str) -> Iterator[tuple[str, Shard]]:
        heads = Part.equal(self.facts.num_value_heads, self.build.group)
        taps = Part.whole(self.facts.conv_kernel_dim)
        conv = self.conv.data.unsqueeze(1)
        yield f"{path}.conv1d.weight", Shard(conv, (self.channels, Part.whole(1), taps))
        yield f"{path}.A_log", Shard(self.A_log.data, (heads,))
        yield f"{path}.dt_bias", Shard(self.dt_bias.data, (heads,))
        yield f"{path}.norm.weight", Shard.whole(self.norm.data)

    def forward(self, hidden: Hidden) -> Hidden:
        return self.out_proj(self._mix(self.in_proj(hidden), self._gates_of(hidden)))

    def _decode(
        self, inputs: list[torch.Tensor], slots: torch.Tensor, context_lens: torch.Tensor
    ) -> torch.Tensor:
        """The gated answers of the heads at decodes: [D, C + Hv V], q, k, v and z of each token,
        and [D, 2 Hv], b of all heads, then a, -> [D, Hv V]; see `delta_rule.decode`.
        """
        mixed, gates = inputs
        of_decodes = mixed, gates, self._delta_net(), self.state, slots, context_lens
        if not self.build.fused:
            return delta_rule.decode(*of_decodes)
        from nanovllm.kernels.recurrent import delta_decode

        return delta_decode.decode(*of_decodes)

    def _prompts(self, inputs: list[torch.Tensor], bounds: Bounds) -> torch.Tensor:
        """The same at tokens of prompts; see `delta_rule.prompts`."""
        mixed, gates = inputs
        of_prompts = mixed, gates, self._delta_net(), self.state, *bounds
        if not self.build.fused:
            return delta_rule.prompts(*of_prompts)
        if self.build.fixed_order:
            from nanovllm.kernels.recurrent import delta_tokens

            return delta_tokens.tokens(*of_prompts)
        from nanovllm.kernels.recurrent import delta_prompt

        return delta_prompt.prompts(*of_prompts, chunks_of_step(bounds[1], len(mixed)))

    def _delta_net(self) -> DeltaNet:
        return DeltaNet(
            self.conv, self.A_log, self.dt_bias, self.norm, self.eps, self.num_key_heads
        )


def _parameter(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, dtype=dtype), False)


def _channels(facts: DeltaNetConfig, build: Build) -> Part:
    """The channels of the convolution on this rank: those of its q, k and v."""
    keys = Part.equal(facts.num_key_heads * facts.key_head_dim, build.group)
    values = Part.equal(facts.num_value_heads * facts.value_head_dim, build.group)
    return Part.packed([keys, keys, values])


def _projections(facts: DeltaNetConfig, build: Build) -> dict[str, Part]:
    """The rows of q, k, v and z on this rank, by module of the checkpoint."""
    if facts.by_key_head:
        K, V = facts.key_head_dim, _values_by_key_head(facts) * facts.value_head_dim
        return {"in_proj_qkvz": _by_key_head(facts, build, (K, K, V, V))}
    values = Part.equal(facts.num_value_heads * facts.value_head_dim, build.group)
    return {"in_proj_qkv": _channels(facts, build), "in_proj_z": values}


def _gates(facts: DeltaNetConfig, build: Build) -> dict[str, Part]:
    """The rows of b and a on this rank, by module of the checkpoint."""
    if facts.by_key_head:
        each = _values_by_key_head(facts)
        return {"in_proj_ba": _by_key_head(facts, build, (each, each))}
    heads = Part.equal(facts.num_value_heads, build.group)
    return {"in_proj_b": heads, "in_proj_a": heads}


def _values_by_key_head(facts: DeltaNetConfig) -> int:
    return facts.num_value_heads // facts.num_key_heads


def _by_key_head(facts: DeltaNetConfig, build: Build, sizes: tuple[int, ...]) -> Part:
    """The rows on this rank of a module that has, for each key head, blocks of these sizes: first
    those of all first blocks, then those of all second ones, and so on.
    """
    width, heads = sum(sizes), Part.equal(facts.num_key_heads, build.group).held
    held, begin = [], 0
    for size in sizes:
        held += [head * width + begin + i for head in heads for i in range(size)]
        begin += size
    return Part(held, facts.num_key_heads * width)
