"""Attention of images whose tokens all see each other, by PyTorch, after backends without it."""

import torch

from nanovllm.attention.torch_backend import attend, read_keys, slots_of
from nanovllm.tensors.kv_cache import KVCache
from nanovllm.tensors.scoring import Scoring
from nanovllm.utils.context import Context


def attend_in_images(
    q: torch.Tensor, out: torch.Tensor, cache: KVCache, context: Context, scoring: Scoring
) -> None:
    """Attend again for the tokens of images: each sees what is before it, and all of its image.

    Args:
        q: [T, Hq, D] queries; keys and values are in the cache.
        out: [T, Hq, D] outputs of causal attention, of which these rows are written over.
    """
    assert context.images is not None, "a step without images"
    for span in context.images.spans:
        end = span.position + span.num_tokens
        first = max(0, span.position + 1 - scoring.window) if scoring.window else 0  # key seen
        keys = torch.arange(first, end, device=q.device)
        table = context.block_tables[span.sequence : span.sequence + 1]
        slots = slots_of(table, keys.unsqueeze(0), cache.k.shape[1])[0]
        k = read_keys(cache.k, cache.k_exponents, slots, q.dtype)  # [L, Hkv, D]
        v = read_keys(cache.v, cache.v_exponents, slots, q.dtype)
        mask = None
        if first or (scoring.window and end - scoring.window > 0):
            queries = keys[-span.num_tokens :, None]
            mask = keys > queries - scoring.window  # [n, L]
        rows = slice(span.row, span.row + span.num_tokens)
        n, Hq, D = q[rows].shape
        Hkv = k.shape[1]
        heads = q[rows].transpose(0, 1).reshape(Hkv, -1, n, D)
        k, v = (x.transpose(0, 1).unsqueeze(1).expand(Hkv, Hq // Hkv, -1, D) for x in (k, v))
        sinks = None if scoring.sinks is None else scoring.sinks.view(Hkv, -1, 1, 1)
        found = attend(heads, k, v, mask, scoring, sinks, causal=False)
        out[rows] = found.reshape(Hq, n, D).transpose(0, 1)
