"""Attention through our own Triton kernels: a GPU path that needs nothing but PyTorch."""

from typing import ClassVar

import torch

from nanovllm.attention.base import QKV, AttentionBackend, AttentionNeeds
from nanovllm.tensors.kv_cache import KVCache
from nanovllm.tensors.scoring import Scoring
from nanovllm.utils.context import Context
from nanovllm.utils.device import triton_refusal

HEAD_DIMS = (16, 32, 64, 80, 96, 128, 256)


class TritonStore(AttentionBackend):
    """The base of the backends for GPUs: it stores keys and values with our Triton kernel."""

    supports_cuda_graph: ClassVar[bool] = True

    def __init__(self) -> None:
        from nanovllm.kernels.attention.kv_cache import store_kvcache

        self._store = store_kvcache

    def store_kvcache(
        self, k: torch.Tensor, v: torch.Tensor, cache: KVCache, slot_mapping: torch.Tensor
    ) -> None:
        self._store(k, v, cache, slot_mapping)


class TritonBackend(TritonStore):
    """Paged prefill and split-KV decode of `nanovllm.kernels`."""

    name: ClassVar[str] = "triton"
    captures_prompts: ClassVar[bool] = True
    attends_in_images: ClassVar[bool] = True

    @classmethod
    def refusal(cls, needs: AttentionNeeds) -> str | None:
        if needs.head_dim not in HEAD_DIMS:
            return f"head_dim {needs.head_dim} is not one of {', '.join(map(str, HEAD_DIMS))}"
        if needs.fp8 and needs.head_dim < 32:  # pairs of columns are too few for tensor cores
            return f"supports an FP8 KV cache for head_dim from 32 on, not {needs.head_dim}"
        return triton_refusal(needs.device)

    def __init__(self) -> None:
        from nanovllm.kernels.attention.decode_many import paged_decode
        from nanovllm.kernels.attention.prefill import paged_prefill
        from nanovllm.kernels.attention.prefix import members_of_tile

        super().__init__()
        self._prefill, self._decode = paged_prefill, paged_decode
        self._members_of_tile = members_of_tile

    def prefill(self, qkv: QKV, cache: KVCache, context: Context, scoring: Scoring) -> torch.Tensor:
        assert context.cu_seqlens_q is not None and context.cu_seqlens_k is not None
        limits = None if context.images is None else context.images.limits
        return self._prefill(
            *qkv,
            cache,
            context.block_tables[context.num_decodes :],
            context.cu_seqlens_q,
            context.cu_seqlens_k,
            context.max_seqlen_q,
            context.num_keys,
            scoring,
            context.shared,
            None if limits is None else limits[context.num_decodes :],
        )

    def decode(
        self, q: torch.Tensor, cache: KVCache, context: Context, scoring: Scoring
    ) -> torch.Tensor:
        n = q.shape[0]
        return self._decode(
            q,
            cache,
            context.block_tables[:n],
            context.context_lens[:n],
            scoring,
            prefixes=None if scoring.window else context.prefixes,
            max_context=context.longest or None,
            shared=context.shared,
        )

    def max_fused_decodes(self, head_dim: int) -> int:
        from nanovllm.kernels.attention.decode_few import MAX_ROWS, takes_heads

        return MAX_ROWS if takes_heads(head_dim) else 0

    def members_of_tile(self, num_heads: int, num_kv_heads: int) -> int:
        return self._members_of_tile(num_heads, num_kv_heads)

    def max_gathered(self) -> int:
        from nanovllm.kernels.attention.prefill import MAX_GATHERED

        return MAX_GATHERED
