"""Qwen3-MoE (Qwen team, 2025) and Mixtral (Jiang et al., 2024): experts in the place of MLPs."""

from nanovllm.checkpoint.model_config import ModelConfig
from nanovllm.layers.base import Build
from nanovllm.layers.experts import (
    Experts,
    JoinedExperts,
    NumberedExperts,
    SparseMLP,
    StackedExperts,
)
from nanovllm.models.qwen3 import Qwen3DecoderLayer, Qwen3ForCausalLM, Qwen3MLP


class Qwen3MoeDecoderLayer(Qwen3DecoderLayer):
    """A layer with experts or, in some models, a dense MLP."""

    def make_mlp(self, config: ModelConfig, i: int, build: Build) -> None:
        build = build.at("mlp")
        if config.layers[i].is_sparse:
            experts = self.experts_class(config)(config, build.at("experts"))
            self.mlp = SparseMLP(config, experts, build)
        else:
            self.mlp = Qwen3MLP(config, build)

    def experts_class(self, config: ModelConfig) -> type[Experts]:
        """The class for the form that experts have in the checkpoint."""
        return NumberedExperts


class Qwen3VLMoeDecoderLayer(Qwen3MoeDecoderLayer):
    """The same, with experts in one tensor, or one by one in checkpoints that others quantised."""

    def experts_class(self, config: ModelConfig) -> type[Experts]:
        assert config.experts is not None, "a dense model"
        if not config.experts.packed:
            return NumberedExperts
        return JoinedExperts if config.experts.inputs_first else StackedExperts


class MixtralDecoderLayer(Qwen3DecoderLayer):
    """A layer with experts."""

    def make_mlp(self, config: ModelConfig, i: int, build: Build) -> None:
        build = build.at("block_sparse_moe")
        experts = NumberedExperts(config, build.at("experts"))
        self.block_sparse_moe = self.mlp = SparseMLP(config, experts, build)


class Qwen3MoeForCausalLM(Qwen3ForCausalLM):
    """Qwen3-MoE."""

    layer_class = Qwen3MoeDecoderLayer


class Qwen3VLMoeForConditionalGeneration(Qwen3ForCausalLM):
    """Qwen3-VL-MoE."""

    layer_class = Qwen3VLMoeDecoderLayer


class MixtralForCausalLM(Qwen3ForCausalLM):
    """Mixtral."""

    layer_class = MixtralDecoderLayer
