"""`ShortConv`: a layer that mixes a few neighbouring tokens (Liquid AI, LFM2, 2025).

Names of the checkpoint's tensors, and the formula: transformers, models/lfm2.
"""

from collections.abc import Iterator

import torch
from torch import nn

from nanovllm.checkpoint.model_config import ModelConfig
from nanovllm.layers.base import Build, Hidden, Per, State
from nanovllm.layers.linear import ColumnParallelLinear, RowParallelLinear
from nanovllm.layers.weights.shard import Part, Shard
from nanovllm.recurrent import causal_conv
from nanovllm.recurrent.layer import Bounds, RecurrentLayer, chunks_of_step


class ShortConv(RecurrentLayer):
    """`out(C * conv(B * x))` of a projection to B, C and x, each of M channels: [T, M] -> [T, M].
    The ranks divide the channels.
    """

    def __init__(self, config: ModelConfig, is_last: bool, build: Build) -> None:
        super().__init__(is_last, build)
        facts, M = config.short_conv, config.hidden_size
        assert facts is not None, "a model without such layers"
        self.taps = facts.kernel_size
        self.channels = Part.equal(M, build.group)
        outputs = {"in_proj": Part.packed([self.channels] * 3)}
        own = build.at("in_proj")
        self.in_proj = ColumnParallelLinear(Part.whole(M), outputs, facts.bias, own)
        self.out_proj = RowParallelLinear(M, M, facts.bias, build.at("out_proj"))
        width = len(self.channels.held)
        weight = torch.empty(width, self.taps, dtype=build.dtype)
        self.weight = nn.Parameter(weight, False)
        bias = torch.empty(width, dtype=build.dtype)
        self.bias = nn.Parameter(bias, False) if facts.bias else None
        self.tail = torch.empty(0)

    def states(self) -> dict[str, State]:
        """The last inputs of the convolution, B * x, oldest first."""
        shape = self.taps - 1, len(self.channels.held)
        return {"tail": State(shape, self.build.dtype, Per.SEQUENCE)}

    def bind(self, **tensors: torch.Tensor) -> None:
        """Use this `tail` from now on."""
        self.tail = tensors["tail"]

    def shards(self, path: str) -> Iterator[tuple[str, Shard]]:
        taps, weight = Part.whole(self.taps), self.weight.data.unsqueeze(1)
        yield f"{path}.conv.weight", Shard(weight, (self.channels, Part.whole(1), taps))
        if self.bias is not None:
            yield f"{path}.conv.bias", Shard(self.bias.data, (self.channels,))

    def forward(self, hidden: Hidden) -> Hidden:
        return self.out_proj(self._mix(self.in_proj(hidden)))

    def _decode(
        self, inputs: list[torch.Tensor], slots: torch.Tensor, context_lens: torch.Tensor
    ) -> torch.Tensor:
        """`C * conv(B * x)` at decodes: [D, 3 M of this rank] -> [D, M of it]"""
        [bcx] = inputs
        if self.build.fused:
            from nanovllm.kernels.recurrent import short_conv

            return short_conv.decode(bcx, self.weight, self.bias, self.tail, slots, context_lens)
        before, after, x = bcx.chunk(3, -1)
        out = causal_conv.decode(before * x, self.weight, self.tail, slots, context_lens)
        return self._gate(out, after)

    def _prompts(self, inputs: list[torch.Tensor], bounds: Bounds) -> torch.Tensor:
        """The same at tokens of prompts."""
        [bcx] = inputs
        if self.build.fused:
            from nanovllm.kernels.recurrent import short_conv

            chunks = chunks_of_step(bounds[1], len(bcx))
            return short_conv.prompts(bcx, self.weight, self.bias, self.tail, *bounds, chunks)
        before, after, x = bcx.chunk(3, -1)
        return self._gate(causal_conv.prompts(before * x, self.weight, self.tail, *bounds), after)

    def _gate(self, convolved: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        if self.bias is not None:
            convolved = convolved + self.bias
        return gate * convolved.to(gate.dtype)
