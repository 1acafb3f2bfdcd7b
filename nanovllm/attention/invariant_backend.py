"""Attention through one Triton kernel for prompts and decodes, for `Config.batch_invariant`."""

from typing import ClassVar

import torch

from nanovllm.attention.base import QKV
from nanovllm.attention.triton_backend import TritonBackend
from nanovllm.tensors.kv_cache import KVCache
from nanovllm.tensors.scoring import Scoring
from nanovllm.utils.context import Context, decodes_as_prompts


class InvariantBackend(TritonBackend):
    """The Triton backend with the kernel of `kernels.attention.aligned`. It reads all keys from the
    cache, and no shared prefix for several decodes at once.
    """

    attends_in_images: ClassVar[bool] = False

    def __init__(self) -> None:
        from nanovllm.kernels.attention.aligned import aligned_attention

        super().__init__()
        self._aligned = aligned_attention

    def prefill(self, qkv: QKV, cache: KVCache, context: Context, scoring: Scoring) -> torch.Tensor:
        assert context.cu_seqlens_q is not None and context.cu_seqlens_k is not None
        bounds = context.cu_seqlens_q, context.cu_seqlens_k, context.max_seqlen_q
        tables = context.block_tables[context.num_decodes :]
        return self._aligned(qkv.q, cache, tables, *bounds, scoring)

    def decode(
        self, q: torch.Tensor, cache: KVCache, context: Context, scoring: Scoring
    ) -> torch.Tensor:
        n = len(q)
        bounds = decodes_as_prompts(context)
        return self._aligned(q, cache, context.block_tables[:n], *bounds, 1, scoring)

    def max_fused_decodes(self, head_dim: int) -> int:
        return 0

    def members_of_tile(self, num_heads: int, num_kv_heads: int) -> int:
        return 0

    def max_gathered(self) -> int:
        return 0
