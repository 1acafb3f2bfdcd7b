"""Attention through our own Triton kernels: a GPU path that needs nothing but PyTorch."""

import importlib.util
import os
from typing import ClassVar

import torch

from nanovllm.attention.base import AttentionBackend, AttentionNeeds
from nanovllm.utils.context import Context

HEAD_DIMS = (16, 32, 64, 128, 256)


def triton_refusal(device: torch.device) -> str | None:
    """Why Triton kernels cannot run on `device`, or None if they can."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"needs a CUDA device, not {device.type} (TRITON_INTERPRET=1 runs it slowly)"
    return None


class TritonBackend(AttentionBackend):
    """Paged prefill and split-KV decode of `nanovllm.kernels`."""

    name: ClassVar[str] = "triton"
    supports_cuda_graph: ClassVar[bool] = True

    @classmethod
    def refusal(cls, needs: AttentionNeeds) -> str | None:
        if needs.head_dim not in HEAD_DIMS:
            return f"head_dim {needs.head_dim} is not one of {', '.join(map(str, HEAD_DIMS))}"
        return triton_refusal(needs.device)

    def __init__(self) -> None:
        from nanovllm.kernels import paged_attention

        self._kernels = paged_attention

    def store_kvcache(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        self._kernels.store_kvcache(k, v, k_cache, v_cache, slot_mapping)

    def prefill(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        context: Context,
        scale: float,
    ) -> torch.Tensor:
        assert context.cu_seqlens_q is not None
        assert context.cu_seqlens_k is not None
        return self._kernels.paged_prefill(
            q,
            k_cache,
            v_cache,
            context.block_tables[context.num_decodes :],
            context.cu_seqlens_q,
            context.cu_seqlens_k,
            context.max_seqlen_q,
            scale,
        )

    def decode(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        context: Context,
        scale: float,
    ) -> torch.Tensor:
        n = q.shape[0]
        tables, lens = context.block_tables[:n], context.context_lens[:n]
        return self._kernels.paged_decode(q, k_cache, v_cache, tables, lens, scale)
