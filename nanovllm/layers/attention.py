"""The attention layer: stores this step's KV, then attends through the backend."""

import torch
from torch import nn

from nanovllm.attention.base import AttentionBackend
from nanovllm.utils.context import get_context


class Attention(nn.Module):
    """Causal attention over the paged KV cache of one layer.

    The layer is bound to its part of the cache once (`bind_kv_cache`); everything that changes
    from step to step comes from the step's `Context`.
    """

    def __init__(self, backend: AttentionBackend, head_dim: int) -> None:
        super().__init__()
        self.backend = backend
        self.scale = head_dim**-0.5
        self.k_cache = self.v_cache = torch.empty(0)

    def bind_kv_cache(self, k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
        """Use these caches, each [N, S, Hkv, D], from now on."""
        self.k_cache, self.v_cache = k_cache, v_cache

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q: [T, Hq, D]; k, v: [T, Hkv, D]. Returns [T, Hq, D]."""
        context, backend, caches = get_context(), self.backend, (self.k_cache, self.v_cache)
        backend.store_kvcache(k, v, *caches, context.slot_mapping)
        n = context.num_decodes
        if n == q.shape[0]:
            return backend.decode(q, *caches, context, self.scale)
        if n == 0:
            return backend.prefill(q, k, v, *caches, context, self.scale)
        decoded = backend.decode(q[:n], *caches, context, self.scale)
        return torch.cat(
            [decoded, backend.prefill(q[n:], k[n:], v[n:], *caches, context, self.scale)]
        )
