"""Qwen3, dense (Qwen team, 2025). Others in `checkpoint/families.py` differ from it in facts only.

Module names are those of the checkpoints. A layer passes on `hidden`, which the last module adds,
and the residual stream beside it; either may be spread over GPUs (see `RMSNorm.add_forward`).
"""

import torch
from torch import nn

from nanovllm.checkpoint.model_config import ModelConfig
from nanovllm.layers.activation import ACTIVATIONS
from nanovllm.layers.attention import Attention, scoring_of
from nanovllm.layers.base import MLP, Build, Hidden
from nanovllm.layers.embed_head import ParallelLMHead, VocabParallelEmbedding
from nanovllm.layers.layernorm import norm
from nanovllm.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from nanovllm.layers.rotary_embedding import RotaryEmbedding, rotary_embeddings
from nanovllm.layers.sequence_parallel import Residual, add_images
from nanovllm.utils.context import get_context
from nanovllm.vision.towers import make_tower


class Qwen3Attention(nn.Module):
    """Grouped-query attention, in Qwen3 with normalised queries and keys."""

    def __init__(self, config: ModelConfig, i: int, rope: RotaryEmbedding, build: Build) -> None:
        super().__init__()
        M, D, bias = config.hidden_size, config.head_dim, config.output_bias
        width, multiplier = config.num_attention_heads * D, config.residual_multiplier
        self.qkv_proj = QKVParallelLinear(config, build.at("qkv_proj"))
        self.o_proj = RowParallelLinear(width, M, bias, build.at("o_proj"), multiplier)
        norms, is_last = None, i == config.num_hidden_layers - 1
        if config.qk_norm == "head":
            plain = build._replace(fused=False)  # on a GPU `Attention` normalises in its kernel
            self.q_norm, self.k_norm = norms = norm(config, plain, D), norm(config, plain, D)
        scoring = scoring_of(config, i, build.max_model_len)
        self.attn = Attention(self.qkv_proj, D, rope, norms, scoring, is_last, build)

    def forward(self, positions: torch.Tensor, hidden: Hidden) -> Hidden:
        return self.o_proj(self.attn(positions, self.qkv_proj(hidden)))


class Qwen3MLP(MLP):
    """down(silu(gate(x)) * up(x))"""

    def __init__(self, config: ModelConfig, build: Build) -> None:
        super().__init__()
        M, I, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        outputs = {"gate_proj": I, "up_proj": I}
        packed, gelu = config.packed_gate_up, ACTIVATIONS[config.hidden_act]
        multiplier = config.residual_multiplier
        self.down_proj = RowParallelLinear(I, M, bias, build.at("down_proj"), multiplier)
        next_block, build = self.down_proj.act_block, build.at("gate_up_proj")
        self.gate_up_proj = MergedColumnParallelLinear(
            M, outputs, bias, build, packed=packed, gelu=gelu, next_block=next_block
        )
        self.act_block = self.gate_up_proj.act_block

    def forward(self, hidden: Hidden) -> Hidden:
        return self.down_proj(self.gate_up_proj.gated(hidden))


class Qwen3DecoderLayer(nn.Module):
    """x = x + attention(norm(x)); x = x + mlp(norm(x))"""

    attention_class: type[Qwen3Attention] = Qwen3Attention

    def __init__(self, config: ModelConfig, i: int, rope: RotaryEmbedding, build: Build) -> None:
        super().__init__()
        self.self_attn = self.attention_class(config, i, rope, build.at("self_attn"))
        self.make_mlp(config, i, build)
        self.input_layernorm = norm(config, build, act_block=self.self_attn.qkv_proj.act_block)
        self.post_attention_layernorm = norm(config, build, act_block=self.mlp.act_block)

    def make_mlp(self, config: ModelConfig, i: int, build: Build) -> None:
        self.mlp: MLP = Qwen3MLP(config, build.at("mlp"))

    def forward(
        self, positions: torch.Tensor, hidden: Hidden, residual: Residual
    ) -> tuple[Hidden, Residual]:
        hidden, residual = self.input_layernorm.add_forward(hidden, residual)
        hidden = self.self_attn(positions, hidden)
        hidden, residual = self.post_attention_layernorm.add_forward(hidden, residual)
        return self.mlp(hidden), residual


class Qwen3Model(nn.Module):
    """Embedding, layers, final norm.

    Args:
        layer_class: class of the layers.
        final_norm: name of the final norm in the checkpoint.
    """

    def __init__(
        self, config: ModelConfig, build: Build, layer_class: type[nn.Module], final_norm: str
    ) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(config, build)
        self.ropes = ropes = rotary_embeddings(config, build)
        self.layers = nn.ModuleList(
            layer_class(config, i, ropes.get(layer.rope), build.at(f"layers.{i}"))
            for i, layer in enumerate(config.layers)
        )
        self.final_norm = final_norm
        self.add_module(final_norm, norm(config, build))

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        images = get_context().images
        hidden, residual = self.embed_tokens(input_ids, images), None
        for i, layer in enumerate(self.layers):
            hidden, residual = layer(positions, hidden, residual)
            if images is not None:
                add_images(residual, images, i)
        return getattr(self, self.final_norm).whole_forward(hidden, residual)


class Qwen3ForCausalLM(nn.Module):
    """The language model. Build it under `torch.device(...)`; its weights start uninitialised."""

    layer_class: type[nn.Module] = Qwen3DecoderLayer
    final_norm = "norm"
    adds_after_norms = False  # if True, large steps do not divide their rows over GPUs

    def __init__(self, config: ModelConfig, build: Build) -> None:
        super().__init__()
        self.config = config
        self.model = Qwen3Model(config, build.at("model"), self.layer_class, self.final_norm)
        self.lm_head = ParallelLMHead(config, build)
        if config.vision is not None:
            self.visual = make_tower(config.vision, build)
        if config.tie_word_embeddings:
            self.lm_head.tie_to(self.model.embed_tokens)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Compute hidden states [T, M] from input_ids and positions, both [T] int32; only the rows
        [n, M] of `Context.kept_rows`, if it is set.
        """
        return self.model(input_ids, positions)

    def compute_logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Logits of the columns of this rank, [B, M] -> [B, V]; see `ParallelLMHead`."""
        return self.lm_head(hidden, out)
