"""The attention layer, from the projection of a step's tokens to the outputs of their heads."""

import torch

from nanovllm.attention.base import QKV
from nanovllm.attention.images import attend_in_images
from nanovllm.checkpoint.model_config import ModelConfig
from nanovllm.layers.base import Build, State, StatefulLayer
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import QKVParallelLinear, local_kv_heads
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.tensors.fp8 import FP8
from nanovllm.tensors.kv_cache import KVCache, rounded
from nanovllm.tensors.qk_norm_rope import QKNormRope
from nanovllm.tensors.scoring import Scoring
from nanovllm.utils.context import Context, get_context


def scoring_of(config: ModelConfig, i: int, max_model_len: int) -> Scoring:
    """The scoring of layer i, for sequences of at most `max_model_len` tokens."""
    window, softcap = config.layers[i].window, config.attn_logit_softcapping
    if window >= max_model_len:  # it would hide nothing
        window = 0
    return Scoring(config.attention_multiplier, window, softcap)


def members_of_tile(config: ModelConfig, build: Build) -> int:
    """The maximum number of decodes that read a shared prefix as one tile, see `SharedPrefixes`; 0:
    each reads its own.
    """
    if all(scoring_of(config, i, build.max_model_len).window for i in range(len(config.layers))):
        return 0
    num_kv_heads = len(local_kv_heads(config.num_key_value_heads, build.group))
    return build.backend.members_of_tile(
        config.num_attention_heads // build.group.size, num_kv_heads
    )


def gate_heads(
    out: torch.Tensor, gate: torch.Tensor, rows: torch.Tensor | None, fused: bool
) -> torch.Tensor:
    """The outputs of heads, each number times the sigmoid of its gate.

    Args:
        out: [T, Hq D], or [n, Hq D] of the n rows that were kept.
        gate: [T, Hq D], or partial results [S, T, Hq D], to be summed.
        rows: rows that were kept; None: all.
        fused: whether to use our kernel.
    """
    if fused:
        from nanovllm.kernels.attention import gate as kernels

        return kernels.gate_heads(out, gate, rows)
    if gate.dim() == 3:
        gate = gate.sum(0)
    if rows is not None:
        gate = gate.index_select(0, rows)
    return out * gate.sigmoid().to(out.dtype)


class Attention(StatefulLayer):
    """Causal attention over the paged KV cache of one layer.

    If `fused`, one kernel normalises and rotates queries and keys, and stores keys and values; then
    the backend attends. For few decodes, one kernel does all of that. The layer is bound once to
    its part of the KV pool; the step's `Context` has everything that changes from step to step.

    Args:
        heads: projection, with Hq query heads and Hkv KV heads on this rank.
        head_dim: head size D.
        rope: rotary embedding of queries and keys.
        norms: norms over D, of queries and of keys; None: they are not normalised here.
        scoring: scale, window, soft cap and sinks of the scores.
        is_last: whether this is the model's last layer, after which only the rows
            `Context.kept_rows` are used.
        build: options of the model.
    """

    def __init__(
        self,
        heads: QKVParallelLinear,
        head_dim: int,
        rope: RotaryEmbedding,
        norms: tuple[RMSNorm, RMSNorm] | None,
        scoring: Scoring,
        is_last: bool,
        build: Build,
    ) -> None:
        super().__init__()
        self.head_counts = [heads.num_heads, heads.num_kv_heads, heads.num_kv_heads]
        self.head_dim, self.scoring = head_dim, scoring
        self.rope, self.norms = rope, norms
        self.is_last, self.backend, self.build = is_last, build.backend, build
        self.cache = KVCache(torch.empty(0), torch.empty(0))
        can_own = build.fused and rope.query_scale is None and build.decode_tokens == 1
        self.max_fused_decodes = build.backend.max_fused_decodes(head_dim) if can_own else 0

    def states(self) -> dict[str, State]:
        """The fields of a `KVCache`."""
        S, Hkv, dtype = self.build.block_size, self.head_counts[1], self.build.cache_dtype
        window = self.scoring.window
        cached = State((S, Hkv, self.head_dim), dtype or self.build.dtype, window=window)
        if dtype != FP8:
            return {"k": cached, "v": cached}
        exponents = State((Hkv, S), torch.int8, window=window)
        return {"k": cached, "v": cached, "k_exponents": exponents, "v_exponents": exponents}

    def bind(self, **tensors: torch.Tensor) -> None:
        """Use a `KVCache` with these fields from now on."""
        self.cache = KVCache(**tensors)

    def forward(self, positions: torch.Tensor, qkv: torch.Tensor) -> torch.Tensor:
        """The outputs of the heads, for the tokens of a step.

        Args:
            positions: [T] int32
            qkv: [T, (Hq + 2 Hkv) D], queries, keys and values; if `fused`, also partial results
                [S, T, ...], to be summed over S.

        Returns:
            [T, Hq D]; [n, Hq D] in the last layer, if only n rows are kept.
        """
        context = get_context().of_layer(slides=self.scoring.window > 0)
        qkv = qkv.unflatten(-1, (-1, self.head_dim))
        if (
            qkv.shape[-3] == context.num_decodes <= self.max_fused_decodes
            and context.prefixes is None
        ):
            how = self._norm_rope(positions, context)
            out = self._own_decode(qkv, how, self.cache, context)
        else:
            if self.build.fused:
                from nanovllm.kernels.attention.rope import qk_norm_rope_store

                how = self._norm_rope(positions, context)
                dtype, fixed_order = self.build.dtype, self.build.fixed_order
                qkv = qk_norm_rope_store(qkv, how, self.cache, dtype, fixed_order)
                q, k, v = qkv.split(self.head_counts, dim=1)
            else:
                q, k, v = qkv.split(self.head_counts, dim=1)
                if self.norms is not None:
                    q_norm, k_norm = self.norms
                    q, k = q_norm(q), k_norm(k)
                turned = context.rotations
                q, k = self.rope(positions, q, turned), self.rope(positions, k, turned)
                if self.build.cache_dtype == FP8:
                    k, v = rounded(k), rounded(v)
                self.backend.store_kvcache(k, v, self.cache, context.slot_mapping)
            if self.rope.query_scale is not None:
                q = q * self.rope.query_scale[positions].to(q.dtype)[:, None, None]
            out = self.backend.attend(QKV(q, k, v), self.cache, context, self.scoring)
            has_spans = context.images is not None and context.images.spans
            if has_spans and not self.backend.attends_in_images:
                attend_in_images(q, out, self.cache, context, self.scoring)
        rows = self.kept_rows()
        return out.flatten(1) if rows is None else out.flatten(1).index_select(0, rows)

    def kept_rows(self) -> torch.Tensor | None:
        """The rows of a step that the layer returns: [n] int32; None: all."""
        return get_context().kept_rows if self.is_last else None

    def _norm_rope(self, positions: torch.Tensor, context: Context) -> QKNormRope:
        norms, plus_one, turn = None, False, self.rope.turn
        if context.rotations is not None:
            turn = turn._replace(cos_sin=context.rotations)
        if self.norms is not None:
            q_norm, k_norm = self.norms
            norms, plus_one = (q_norm.weight, k_norm.weight, q_norm.eps), q_norm.plus_one
        return QKNormRope(norms, plus_one, turn, positions, context.slot_mapping)

    def _own_decode(
        self, qkv: torch.Tensor, how: QKNormRope, cache: KVCache, context: Context
    ) -> torch.Tensor:
        from nanovllm.kernels.attention.decode_few import own_decode

        return own_decode(
            qkv,
            how,
            cache,
            self.build.dtype,
            context.block_tables,
            context.context_lens,
            max_context=self.build.max_model_len,
            scoring=self.scoring,
            shared=context.shared,
        )
