"""Attention in plain PyTorch: the CPU path, and the oracle for the other backends."""

import bisect
from itertools import pairwise
from typing import ClassVar

import torch
import torch.nn.functional as F

from nanovllm.attention.base import AttentionBackend, AttentionNeeds, KVCache
from nanovllm.utils.context import Context

MIN_PADDING = 64  # tokens that are not worth a gather of their own


class TorchBackend(AttentionBackend):
    """Gathers each sequence's KV out of its blocks and calls `scaled_dot_product_attention`."""

    name: ClassVar[str] = "torch"
    supports_cuda_graph: ClassVar[bool] = False  # shapes follow the context lengths

    @classmethod
    def refusal(cls, needs: AttentionNeeds) -> str | None:
        return None

    def store_kvcache(
        self, k: torch.Tensor, v: torch.Tensor, cache: KVCache, slot_mapping: torch.Tensor
    ) -> None:
        if (slot_mapping < 0).any():
            rows = (slot_mapping >= 0).nonzero().squeeze(1)
            k, v, slot_mapping = k[rows], v[rows], slot_mapping[rows]
        slots = slot_mapping.long()
        cache.k.flatten(0, 1).index_copy_(0, slots, k)
        cache.v.flatten(0, 1).index_copy_(0, slots, v)

    def prefill(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cache: KVCache,
        context: Context,
        scale: float,
    ) -> torch.Tensor:
        assert context.cu_seqlens_q is not None
        assert context.cu_seqlens_k is not None
        q_bounds, k_bounds = context.cu_seqlens_q.tolist(), context.cu_seqlens_k.tolist()
        tables = context.block_tables[context.num_decodes :]
        out = torch.empty_like(q)
        for i, (begin, end) in enumerate(pairwise(q_bounds)):
            length = k_bounds[i + 1] - k_bounds[i]
            if length == end - begin:  # nothing cached: the step's own keys are all there is
                keys, values = k[begin:end], v[begin:end]
            else:
                positions = torch.arange(length, device=q.device)
                slots = _slots(tables[i : i + 1], positions.unsqueeze(0), cache.k.shape[1])[0]
                keys = cache.k.flatten(0, 1).index_select(0, slots)
                values = cache.v.flatten(0, 1).index_select(0, slots)
            out[begin:end] = _causal_attention(q[begin:end], keys, values, scale)
        return out

    def decode(
        self, q: torch.Tensor, cache: KVCache, context: Context, scale: float
    ) -> torch.Tensor:
        # Sequences of similar length share a gather, so that padding at most doubles it.
        lens = context.context_lens[: q.shape[0]].long()
        order = lens.argsort()
        sorted_lens, out, begin = lens[order].tolist(), torch.empty_like(q), 0
        while begin < len(sorted_lens):
            end = bisect.bisect_right(sorted_lens, 2 * sorted_lens[begin] + MIN_PADDING)
            rows = order[begin:end]
            out[rows] = _decode(q[rows], cache, context.block_tables[rows], lens[rows], scale)
            begin = end
        return out


def _decode(
    q: torch.Tensor, cache: KVCache, tables: torch.Tensor, lens: torch.Tensor, scale: float
) -> torch.Tensor:
    """q: [B, Hq, D]; tables: [B, W]; lens: [B] int64. Returns [B, Hq, D]."""
    (B, Hq, D), (_, S, Hkv, _) = q.shape, cache.k.shape
    lens = lens.unsqueeze(1)
    positions = torch.arange(int(lens.max()), device=q.device).unsqueeze(0)  # [1, L]
    # Shorter sequences repeat their last slot, masked, rather than read foreign ones.
    own = torch.minimum(positions, lens - 1).clamp(min=0)
    slots = _slots(tables, own, S).flatten()
    # [B, Hkv, L, D]; the G queries of a KV head are the rows of one product. Gathering from two
    # dimensions is three times as fast as from three.
    k, v = (
        x.view(-1, Hkv * D).index_select(0, slots).view(B, -1, Hkv, D).transpose(1, 2)
        for x in cache
    )
    mask = (positions < lens)[:, None, None, :]
    rows = q.reshape(B, Hkv, Hq // Hkv, D)
    out = F.scaled_dot_product_attention(rows, k, v, attn_mask=mask, scale=scale)
    return out.reshape(B, Hq, D)


def _slots(block_tables: torch.Tensor, positions: torch.Tensor, block_size: int) -> torch.Tensor:
    """Slots [B, L] int64 of positions [B, L] in the blocks [B, W] of their sequence."""
    blocks = block_tables.long().gather(1, positions // block_size)
    return blocks * block_size + positions % block_size


def _causal_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> torch.Tensor:
    """q: [n, Hq, D], the last n of the L positions of k, v: [L, Hkv, D]. Returns [n, Hq, D]."""
    (n, Hq, D), (L, Hkv, _) = q.shape, k.shape
    G = Hq // Hkv
    # Heads as [Hkv, G]: the keys of a group are expanded, not copied.
    q = q.transpose(0, 1).reshape(Hkv, G, n, D)
    k = k.transpose(0, 1).unsqueeze(1).expand(Hkv, G, L, D)
    v = v.transpose(0, 1).unsqueeze(1).expand(Hkv, G, L, D)
    mask = None
    if n not in (1, L):
        positions = torch.arange(L, device=q.device)
        mask = positions <= positions[L - n :, None]  # [n, L]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=n == L, scale=scale)
    return out.reshape(Hq, n, D).transpose(0, 1)
