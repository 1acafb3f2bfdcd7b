"""Attention through the flash-attn package (Dao, 2023), where it is installed."""

import importlib.util
from typing import ClassVar

import torch

from nanovllm.attention.base import QKV, AttentionNeeds
from nanovllm.attention.triton_backend import TritonStore
from nanovllm.tensors.kv_cache import KVCache
from nanovllm.tensors.scoring import Scoring
from nanovllm.utils.context import Context
from nanovllm.utils.device import triton_refusal

BLOCK_MULTIPLE = 256  # block sizes that flash-attn 2's paged kernels accept are multiples of it
HEAD_DIMS = (32, 64, 128)  # with others, some results were wrong (version 2.8.3)


class FlashAttentionBackend(TritonStore):
    """`flash_attn_varlen_func` for prefill, `flash_attn_with_kvcache` for decode."""

    name: ClassVar[str] = "flash_attn"

    @classmethod
    def refusal(cls, needs: AttentionNeeds) -> str | None:
        if needs.device.type != "cuda":
            return f"needs a CUDA device, not {needs.device.type}"
        if needs.block_size % BLOCK_MULTIPLE:
            return (
                f"needs kvcache_block_size to be a multiple of {BLOCK_MULTIPLE}, "
                f"got {needs.block_size}"
            )
        if needs.dtype not in (torch.bfloat16, torch.float16):
            return f"needs bfloat16 or float16, not {needs.dtype}"
        if needs.head_dim not in HEAD_DIMS:
            return f"head_dim {needs.head_dim} is not one of {', '.join(map(str, HEAD_DIMS))}"
        if needs.fp8:
            return "does not support an FP8 KV cache with exponents per token and head"
        if needs.batch_invariant:
            return "divides keys by what else is in the batch"
        if needs.softcap or needs.sinks:
            return "this model has soft-capped scores or attention sinks"
        if refusal := triton_refusal(needs.device):  # the KV store is a Triton kernel
            return refusal
        if importlib.util.find_spec("flash_attn") is None:
            return "the package flash-attn is not installed"
        try:
            import flash_attn  # noqa: F401
        except ImportError as error:  # built for another torch, say
            return f"the package flash-attn cannot be imported: {error}"
        return None

    def __init__(self) -> None:
        from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

        super().__init__()
        self._varlen, self._with_kvcache = flash_attn_varlen_func, flash_attn_with_kvcache

    def prefill(self, qkv: QKV, cache: KVCache, context: Context, scoring: Scoring) -> torch.Tensor:
        (q, k, v), block_table = qkv, None
        if context.num_keys != len(q):
            k, v, block_table = cache.k, cache.v, context.block_tables[context.num_decodes :]
        return self._varlen(
            q,
            k,
            v,
            cu_seqlens_q=context.cu_seqlens_q,
            cu_seqlens_k=context.cu_seqlens_k,
            max_seqlen_q=context.max_seqlen_q,
            max_seqlen_k=context.max_seqlen_k,
            softmax_scale=scoring.scale,
            causal=True,
            window_size=_window(scoring),
            block_table=block_table,
        )

    def decode(
        self, q: torch.Tensor, cache: KVCache, context: Context, scoring: Scoring
    ) -> torch.Tensor:
        n = q.shape[0]
        out = self._with_kvcache(
            q.unsqueeze(1),
            cache.k,
            cache.v,
            cache_seqlens=context.context_lens[:n],
            block_table=context.block_tables[:n],
            softmax_scale=scoring.scale,
            causal=True,
            window_size=_window(scoring),
        )
        return out.squeeze(1)


def _window(scoring: Scoring) -> tuple[int, int]:
    """The numbers of keys before and after its own position that a query sees; -1: all."""
    return scoring.window - 1, 0 if scoring.window else -1
