"""Attention in plain PyTorch: the CPU path, and the oracle for the other backends."""

import bisect
from itertools import pairwise
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F

from nanovllm.attention.base import QKV, AttentionBackend, AttentionNeeds
from nanovllm.tensors.fp8 import FP8
from nanovllm.tensors.kv_cache import KVCache, dequantize, quantize
from nanovllm.tensors.scoring import Scoring
from nanovllm.utils.context import Context

MANY_QUERIES = 64  # queries with scores in memory at once, if PyTorch's own attention cannot run
MIN_PADDING = 64  # tokens of padding per sequence that do not justify another gather


class Gather(NamedTuple):
    """B decoding sequences of similar length, whose KV is gathered together, padded to L, the
    longest.

    Attributes:
        rows: [B] int64, rows of these sequences in the step.
        slots: [B * L] int64, KV slots. Shorter sequences repeat their last slot, masked, rather
            than read slots of others.
        mask: [B, 1, 1, L] bool, whether a sequence has the position.
    """

    rows: torch.Tensor
    slots: torch.Tensor
    mask: torch.Tensor


class TorchBackend(AttentionBackend):
    """A gather of each sequence's KV from its blocks, then `scaled_dot_product_attention`."""

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
        _write(k, cache.k, cache.k_exponents, slots)
        _write(v, cache.v, cache.v_exponents, slots)

    def prefill(self, qkv: QKV, cache: KVCache, context: Context, scoring: Scoring) -> torch.Tensor:
        assert context.cu_seqlens_q is not None
        assert context.cu_seqlens_k is not None
        q, k, v = qkv
        q_bounds, k_bounds = context.cu_seqlens_q.tolist(), context.cu_seqlens_k.tolist()
        tables = context.block_tables[context.num_decodes :]
        out = torch.empty_like(q)
        for i, (begin, end) in enumerate(pairwise(q_bounds)):
            length = k_bounds[i + 1] - k_bounds[i]
            if length == end - begin:  # nothing is cached: the step has all keys
                keys, values = k[begin:end], v[begin:end]
            else:
                cached = length - (end - begin)
                first = max(0, cached + 1 - scoring.window) if scoring.window else 0  # key seen
                positions = torch.arange(first, length, device=q.device)
                slots = slots_of(tables[i : i + 1], positions.unsqueeze(0), cache.k.shape[1])[0]
                keys = read_keys(cache.k, cache.k_exponents, slots, q.dtype)
                values = read_keys(cache.v, cache.v_exponents, slots, q.dtype)
            out[begin:end] = _causal_attention(q[begin:end], keys, values, scoring)
        return out

    def decode(
        self, q: torch.Tensor, cache: KVCache, context: Context, scoring: Scoring
    ) -> torch.Tensor:
        key = f"gathers {scoring.window}"
        if key not in context.shared:
            context.shared[key] = _plan(context, q.shape[0], cache.k.shape[1], scoring.window)
        out = torch.empty_like(q)
        for gather in context.shared[key]:
            out[gather.rows] = _decode(q[gather.rows], cache, gather, scoring)
        return out


def _plan(context: Context, num_decodes: int, block_size: int, window: int) -> list[Gather]:
    """The gathers of a step. Sequences of similar length share one, so that padding adds at most
    half of each length, and `MIN_PADDING` tokens. Lengths are counted within the window.
    """
    whole = context.context_lens[:num_decodes].long()
    lens = whole.clamp(max=window) if window else whole
    order = lens.argsort()
    sorted_lens, gathers, begin = lens[order].tolist(), [], 0
    while begin < num_decodes:
        end = bisect.bisect_right(sorted_lens, int(1.5 * sorted_lens[begin]) + MIN_PADDING)
        rows = order[begin:end]
        lengths = lens[rows].unsqueeze(1)
        positions = torch.arange(sorted_lens[end - 1], device=lens.device).unsqueeze(0)  # [1, L]
        unseen = whole[rows].unsqueeze(1) - lengths  # positions before the window
        own = unseen + torch.minimum(positions, lengths - 1).clamp(min=0)
        slots = slots_of(context.block_tables[rows], own, block_size).flatten()
        gathers.append(Gather(rows, slots, (positions < lengths)[:, None, None, :]))
        begin = end
    return gathers


def _decode(q: torch.Tensor, cache: KVCache, gather: Gather, scoring: Scoring) -> torch.Tensor:
    """Attend with queries q: [B, Hq, D] of the gathered sequences. Returns [B, Hq, D]."""
    (B, Hq, D), Hkv = q.shape, cache.k.shape[2]
    # [B, Hkv, L, D]; the G queries of a KV head are the rows of one product.
    k = read_keys(cache.k, cache.k_exponents, gather.slots, q.dtype)
    v = read_keys(cache.v, cache.v_exponents, gather.slots, q.dtype)
    k, v = (x.view(B, -1, Hkv, D).transpose(1, 2) for x in (k, v))
    rows = q.reshape(B, Hkv, Hq // Hkv, D)
    sinks = None if scoring.sinks is None else scoring.sinks.view(Hkv, -1, 1)
    return attend(rows, k, v, gather.mask, scoring, sinks).reshape(B, Hq, D)


def _write(
    x: torch.Tensor, stored: torch.Tensor, exponents: torch.Tensor | None, slots: torch.Tensor
) -> None:
    """Write keys or values x: [n, Hkv, D] to slots [n] int64."""
    if exponents is not None:
        S = exponents.shape[2]
        codes, exponents[slots // S, :, slots % S] = quantize(x)
        # PyTorch moves bytes, but not FP8.
        x, stored = codes.view(torch.uint8), stored.view(torch.uint8)
    stored.flatten(0, 1).index_copy_(0, slots, x)


def read_keys(
    stored: torch.Tensor, exponents: torch.Tensor | None, slots: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Read keys or values [n, Hkv, D] from slots [n] int64."""
    S, Hkv, D = stored.shape[1:]
    found = stored.view(-1, Hkv * D)  # gathering from two dimensions is 3 times as fast as from 3
    if exponents is None:
        return found.index_select(0, slots).view(-1, Hkv, D)
    codes = found.view(torch.uint8).index_select(0, slots).view(FP8).view(-1, Hkv, D)
    return dequantize(codes, exponents[slots // S, :, slots % S], dtype)


def slots_of(block_tables: torch.Tensor, positions: torch.Tensor, block_size: int) -> torch.Tensor:
    """Slots [B, L] int64 of positions [B, L] in the blocks [B, W] of their sequence."""
    blocks = block_tables.long().gather(1, positions // block_size)
    return blocks * block_size + positions % block_size


def _causal_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scoring: Scoring
) -> torch.Tensor:
    """Attend with q: [n, Hq, D], the last n of L positions, to k, v: [L, Hkv, D]. Returns
    [n, Hq, D].
    """
    (n, Hq, D), (L, Hkv, _) = q.shape, k.shape
    G = Hq // Hkv
    if n > MANY_QUERIES and (scoring.softcap or scoring.sinks is not None):
        parts, seen = [], L - n
        for rows in q.split(MANY_QUERIES):
            seen += len(rows)
            parts.append(_causal_attention(rows, k[:seen], v[:seen], scoring))
        return torch.cat(parts)
    # Heads are [Hkv, G]: the keys of a group are expanded, not copied.
    q = q.transpose(0, 1).reshape(Hkv, G, n, D)
    k = k.transpose(0, 1).unsqueeze(1).expand(Hkv, G, L, D)
    v = v.transpose(0, 1).unsqueeze(1).expand(Hkv, G, L, D)
    mask, slides = None, 0 < scoring.window < L
    if n not in (1, L) or slides:
        keys = torch.arange(L, device=q.device)
        queries = keys[L - n :, None]
        mask = keys <= queries  # [n, L]
        if slides:
            mask &= keys > queries - scoring.window
    sinks = None if scoring.sinks is None else scoring.sinks.view(Hkv, G, 1, 1)
    return attend(q, k, v, mask, scoring, sinks).reshape(Hq, n, D).transpose(0, 1)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scoring: Scoring,
    sinks: torch.Tensor | None,
    causal: bool = True,
) -> torch.Tensor:
    """Attend with q: [..., n, D] to k, v: [..., L, D]; sinks: [..., n or 1, 1]. Returns
    [..., n, D]. Without a mask, each query sees all keys, or if `causal`, there are as many queries
    as keys, or one query that sees all.
    """
    n, L = q.shape[-2], k.shape[-2]
    causal = causal and mask is None and n > 1
    if not scoring.softcap and sinks is None:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, scale=scoring.scale
        )
    scores = (q @ k.transpose(-1, -2)).float() * scoring.scale
    if scoring.softcap:
        scores = scoring.softcap * (scores / scoring.softcap).tanh()
    if causal:
        mask = torch.ones(n, L, dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.float().expand(*scores.shape[:-1], 1)], dim=-1)
    return scores.softmax(-1)[..., :L].to(v.dtype) @ v
