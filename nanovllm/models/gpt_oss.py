"""gpt-oss (OpenAI, 2025): experts in all layers, and attention with a sink in each head."""

from collections.abc import Iterator

import torch
from torch import nn

from nanovllm.checkpoint.model_config import ModelConfig
from nanovllm.layers.base import Build, Layer
from nanovllm.layers.experts import PackedExperts, SparseMLP
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.layers.weights.shard import Part, Shard
from nanovllm.models.qwen3 import Qwen3Attention, Qwen3DecoderLayer, Qwen3ForCausalLM


class Sinks(Layer):
    """Learned scores, one for each head of this rank; see `Scoring`."""

    def __init__(self, config: ModelConfig, build: Build) -> None:
        super().__init__()
        self.part = Part.equal(config.num_attention_heads, build.group)
        self.scores = nn.Parameter(torch.empty(len(self.part.held), dtype=build.dtype), False)

    def shards(self, path: str) -> Iterator[tuple[str, Shard]]:
        yield path, Shard(self.scores.data, (self.part,))


class GptOssAttention(Qwen3Attention):
    """Attention with sinks."""

    def __init__(self, config: ModelConfig, i: int, rope: RotaryEmbedding, build: Build) -> None:
        super().__init__(config, i, rope, build)
        self.sinks = Sinks(config, build)
        self.attn.scoring = self.attn.scoring._replace(sinks=self.sinks.scores)


class GptOssDecoderLayer(Qwen3DecoderLayer):
    """A layer with experts."""

    attention_class = GptOssAttention

    def make_mlp(self, config: ModelConfig, i: int, build: Build) -> None:
        build = build.at("mlp")
        self.mlp = SparseMLP(config, PackedExperts(config, build.at("experts")), build, "router")


class GptOssForCausalLM(Qwen3ForCausalLM):
    """gpt-oss."""

    layer_class = GptOssDecoderLayer
