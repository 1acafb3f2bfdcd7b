"""The attention layer: stores this step's KV, then attends through the backend."""

import torch
from torch import nn

from nanovllm.attention.base import AttentionBackend, KVCache
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
        self.cache = KVCache(torch.empty(0), torch.empty(0))

    def bind_kv_cache(self, cache: KVCache) -> None:
        """Use this cache from now on."""
        self.cache = cache

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q: [T, Hq, D]; k, v: [T, Hkv, D]. Returns [T, Hq, D]."""
        self.backend.store_kvcache(k, v, self.cache, get_context().slot_mapping)
        return self.attend(q, k, v)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """The same with k and v in the cache already."""
        context, backend, cache = get_context(), self.backend, self.cache
        n = context.num_decodes
        if n == q.shape[0]:
            return backend.decode(q, cache, context, self.scale)
        if n == 0:
            return backend.prefill(q, k, v, cache, context, self.scale)
        decoded = backend.decode(q[:n], cache, context, self.scale)
        rest = backend.prefill(q[n:], k[n:], v[n:], cache, context, self.scale)
        return torch.cat([decoded, rest])
