"""Qwen3, dense (Qwen team, 2025). Module names are those of the checkpoints."""

from collections.abc import Callable, Hashable
from functools import partial
from typing import ClassVar

import torch
from torch import nn

from nanovllm.attention.base import AttentionBackend
from nanovllm.distributed.bulk import Gathered, Hidden
from nanovllm.layers.activation import SiluAndMul
from nanovllm.layers.attention import Attention
from nanovllm.layers.base import Build, Layer
from nanovllm.layers.embed_head import ParallelLMHead, VocabParallelEmbedding
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    gather_owned_rows,
)
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.model_config import ModelConfig
from nanovllm.utils.context import get_context


class Qwen3Attention(Layer):
    """Grouped-query attention with RMS-normalised queries and keys."""

    def __init__(
        self,
        config: ModelConfig,
        rotary_emb: RotaryEmbedding,
        backend: AttentionBackend,
        build: Build,
    ) -> None:
        super().__init__()
        num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        head_dim, bias = config.head_dim, config.attention_bias
        self.head_dim = head_dim
        self.fused = build.fused
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size, head_dim, num_heads, num_kv_heads, bias, build
        )
        local = self.qkv_proj
        self.head_counts = [local.num_heads, local.num_kv_heads, local.num_kv_heads]
        self.o_proj = RowParallelLinear(num_heads * head_dim, config.hidden_size, bias, build)
        plain = build._replace(fused=False)
        self.q_norm = RMSNorm(head_dim, config.rms_norm_eps, plain)
        self.k_norm = RMSNorm(head_dim, config.rms_norm_eps, plain)
        self.rotary_emb = rotary_emb
        self.attn = Attention(backend, head_dim)

    def forward(self, positions: torch.Tensor, hidden: Hidden, rows: torch.Tensor | None) -> Hidden:
        """positions: [T]; hidden: normalised rows. Returns results that may be partial, of all
        rows, or of `rows`: [n].
        """
        qkv = self.qkv_proj(hidden).unflatten(-1, (-1, self.head_dim))
        # [T, Hq + 2 Hkv, D], or partial results of it
        if self.fused:
            from nanovllm.kernels.rope import qk_norm_rope_store

            norms = (self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
            slots = get_context().slot_mapping
            qkv = qk_norm_rope_store(
                qkv, *norms, self.rotary_emb.cos_sin, positions, *self.attn.cache, slots
            )
            out = self.attn.attend(*qkv.split(self.head_counts, dim=1))
        else:
            q, k, v = qkv.split(self.head_counts, dim=1)
            q = self.rotary_emb(positions, self.q_norm(q))
            k = self.rotary_emb(positions, self.k_norm(k))
            out = self.attn(q, k, v)
        out = out.flatten(1)
        return self.o_proj(out if rows is None else out.index_select(0, rows))

    def variants(self) -> dict[Hashable, Callable[[], object]]:
        if not self.fused:
            return {}
        from nanovllm.kernels.linear import split_numbers
        from nanovllm.kernels.rope import qk_norm_rope_store

        num_heads, num_kv_heads, _ = self.head_counts
        weight, cos_sin = self.q_norm.weight, self.rotary_emb.cos_sin

        def store(parts: int) -> None:
            shape = 1, num_heads + 2 * num_kv_heads, self.head_dim
            qkv = weight.new_zeros(shape)
            if parts > 1:
                qkv = weight.new_zeros(parts, *shape, dtype=torch.float32)
            k, v = weight.new_zeros(2, 1, 1, num_kv_heads, self.head_dim)
            zero = weight.new_zeros(1, dtype=torch.int32)
            qk_norm_rope_store(qkv, weight, weight, self.q_norm.eps, cos_sin, zero, k, v, zero)

        numbers = 1, *(split_numbers(weight) if self.qkv_proj.fused else ())
        return {(Qwen3Attention, parts): partial(store, parts) for parts in numbers}


class Qwen3MLP(nn.Module):
    """down(silu(gate(x)) * up(x))"""

    def __init__(self, config: ModelConfig, build: Build) -> None:
        super().__init__()
        hidden_size, intermediate_size = config.hidden_size, config.intermediate_size
        self.gate_up_proj = MergedColumnParallelLinear(
            hidden_size, [intermediate_size, intermediate_size], False, build
        )
        self.down_proj = RowParallelLinear(intermediate_size, hidden_size, False, build)
        self.act_fn = SiluAndMul()
        self.fused = build.fused

    def forward(self, hidden: Hidden) -> Hidden:
        """hidden: normalised rows. Returns results that may be partial."""
        if self.fused:
            return self.down_proj(self.gate_up_proj.gated(hidden))
        return self.down_proj(self.act_fn(self.gate_up_proj(hidden)))


class Qwen3DecoderLayer(nn.Module):
    """Attention and MLP, each behind a norm. The residual stream travels beside the output."""

    def __init__(
        self,
        config: ModelConfig,
        rotary_emb: RotaryEmbedding,
        backend: AttentionBackend,
        build: Build,
    ) -> None:
        super().__init__()
        norm_args = (config.hidden_size, config.rms_norm_eps, build)
        self.self_attn = Qwen3Attention(config, rotary_emb, backend, build)
        self.mlp = Qwen3MLP(config, build)
        self.input_layernorm = RMSNorm(*norm_args)
        self.post_attention_layernorm = RMSNorm(*norm_args)
        self.group = build.group

    def forward(
        self,
        positions: torch.Tensor,
        hidden: Hidden,
        residual: torch.Tensor | None,
        rows: torch.Tensor | None = None,
    ) -> tuple[Hidden, torch.Tensor]:
        """hidden: what is not yet added to residual, and may be partial results (see
        `RowParallelLinear`). Returns the same pair, of all rows or of `rows`: [n]. The residual is
        [T, M], or in large steps on several GPUs this rank's rows of it.
        """
        normed, residual = self.input_layernorm.add_forward(hidden, residual)
        hidden = self.self_attn(positions, normed, rows)
        if rows is not None and isinstance(normed, Gathered):
            # Behind attention: when this sum is there, all ranks have the gathered rows, so none
            # waits for them while another's norm waits for it, perhaps on the whole GPU.
            residual = self.group.all_reduce(gather_owned_rows(residual, rows, normed.held))
        elif rows is not None:
            residual = residual.index_select(0, rows)
        hidden, residual = self.post_attention_layernorm.add_forward(hidden, residual)
        return self.mlp(hidden), residual


class Qwen3Model(nn.Module):
    """Embedding, layers, final norm."""

    def __init__(self, config: ModelConfig, backend: AttentionBackend, build: Build) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, build)
        rotary_emb = RotaryEmbedding(
            config.head_dim, config.max_position_embeddings, config.rope_theta
        )
        self.layers = nn.ModuleList(
            Qwen3DecoderLayer(config, rotary_emb, backend, build)
            for _ in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, build)

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        """input_ids, positions: [T] int32. Returns [T, M], or [n, M] of `rows`: [n] int32; of the
        others the last layer computes nothing behind attention.
        """
        hidden: Hidden = self.embed_tokens(input_ids)
        residual: torch.Tensor | None = None
        *layers, last = self.layers
        for layer in layers:
            hidden, residual = layer(positions, hidden, residual)
        hidden, residual = last(positions, hidden, residual, rows)
        hidden, _ = self.norm.add_forward(hidden, residual)
        return hidden.whole() if isinstance(hidden, Gathered) else hidden


class Qwen3ForCausalLM(nn.Module):
    """The language model. Build it under `torch.device(...)`; its weights start uninitialised."""

    # Our packed modules, and the checkpoint's modules that their rows come from.
    packed_modules_mapping: ClassVar[dict[str, tuple[str, ...]]] = {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "gate_up_proj": ("gate_proj", "up_proj"),
    }

    def __init__(self, config: ModelConfig, backend: AttentionBackend, build: Build) -> None:
        super().__init__()
        self.model = Qwen3Model(config, backend, build)
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, build)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        """input_ids, positions: [T] int32. Returns hidden states [T, M], or [n, M] of `rows`: [n]
        int32.
        """
        return self.model(input_ids, positions, rows)

    def compute_logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """[B, M] -> [B, V], the columns of this rank; see `ParallelLMHead`."""
        return self.lm_head(hidden, out)
