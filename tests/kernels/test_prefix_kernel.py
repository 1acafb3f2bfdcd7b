"""Prefixes that several decodes share, read once: against float64, one row at a time."""

from itertools import product

import numpy as np
import pytest
import torch
from attention_cases import DEVICE, DTYPES, close, poisoned_cache, randn

pytest.importorskip("triton")

from checkpoints import rare
from nanovllm.attention.torch_backend import TorchBackend
from nanovllm.kernels.attention.decode_many import paged_decode
from nanovllm.kernels.attention.prefix import members_of_tile, paged_prefix
from nanovllm.scheduling.prefixes import find_shared_prefixes
from nanovllm.tensors.fp8 import FP8
from nanovllm.tensors.kv_cache import dequantize, quantize
from nanovllm.tensors.scoring import Scoring
from nanovllm.utils.context import Prefixes

WAYS = "plain", "capped", "sinks", "fp8"
FACTORS = WAYS, (16, 128), (1, 4), (32, 80, 256)
# Half of their product, in which any three values meet.
HALF = [case for case in product(*FACTORS) if sum(map(tuple.index, FACTORS, case)) % 2]
COMMON = [("plain", 16, 4, 32), ("sinks", 128, 1, 32), ("fp8", 16, 1, 80), ("fp8", 16, 4, 256)]


def expected(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scoring: Scoring) -> torch.Tensor:
    """[Hq, D] of a query [Hq, D] to keys and values [n, Hkv, D], in float64."""
    group = q.shape[0] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("hd,nhd->hn", q.double(), k) * scoring.scale
    if scoring.softcap:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    if scoring.sinks is not None:
        scores = torch.cat([scores, scoring.sinks.double()[:, None]], 1)
    weights = scores.softmax(1)[:, : len(k)]
    return torch.einsum("hn,nhd->hd", weights, v)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("how", "block_size", "num_splits", "d"),
    [
        *COMMON,
        *[rare(*case) for case in HALF if case not in COMMON],
    ],
)
def test_shared_prefixes(
    how: str,
    block_size: int,
    num_splits: int,
    d: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two groups, one of them of several tiles, among decodes that share nothing; padding."""
    monkeypatch.setattr("nanovllm.scheduling.prefixes.MIN_SAVED", 0)
    hq, hkv = 16, 2
    shared, lens = [70, 30], [(0, 90), (1, 33), (None, 5), (0, 75), (1, 64), (None, 40)]
    lens += [(0, 81 + i) for i in range(8)] + [(1, 40), (1, 50)]
    if block_size == 128:
        shared, lens = [300, 128], [(group, n + 250) for group, n in lens]
    shared = [n // block_size * block_size for n in shared]
    cache = poisoned_cache((400, block_size, hkv, d), FP8 if how == "fp8" else dtype)
    free = iter(torch.randperm(400, generator=torch.Generator().manual_seed(1)).tolist())

    def tokens(n: int, seed: int) -> torch.Tensor:
        x = torch.stack([randn(n, hkv, d, seed=seed), randn(n, hkv, d, seed=seed + 500)])
        if how == "fp8":
            x = dequantize(*quantize(x), torch.float32)
        return x.to(dtype)

    def store(x: torch.Tensor) -> list[int]:
        n = x.shape[1]
        table = [next(free) for _ in range(-(-n // block_size))]
        slots = [table[i // block_size] * block_size + i % block_size for i in range(n)]
        TorchBackend().store_kvcache(*x, cache, torch.tensor(slots, device=DEVICE))
        return table

    prefixes = [tokens(n, 50 + i) for i, n in enumerate(shared)]
    begun = [store(x) for x in prefixes]
    rows, tables = [], []
    for i, (group, n) in enumerate(lens):
        before = prefixes[group] if group is not None else prefixes[0][:, :0]
        own = tokens(n - before.shape[1], 100 + i)
        rows.append(torch.cat([before, own], 1))
        tables.append((begun[group] if group is not None else []) + store(own))
    B = len(lens) + 2  # two of padding
    block_tables = np.zeros((B, max(map(len, tables))), np.int32)
    for i, table in enumerate(tables):
        block_tables[i, : len(table)] = table
    context_lens = np.array([n for _, n in lens] + [0, 0], np.int32)
    n = len(lens)
    found = find_shared_prefixes(
        block_tables[:n], context_lens[:n], block_size, members_of_tile(hq, hkv)
    )
    assert found is not None
    assert found.lens.tolist() == [0 if group is None else shared[group] for group, _ in lens]
    assert len(found.begins) == 3, "the first group has two tiles"
    # Padded, as in a graph.
    padded = [np.pad(x, (0, m - len(x))) for x, m in zip(found, (B, B, 5, 5), strict=True)]
    on_device = Prefixes(*(torch.tensor(x, device=DEVICE) for x in padded))
    sinks = randn(hq, seed=9, dtype=dtype) if how == "sinks" else None
    scoring = Scoring(d**-0.5, 0, 2.0 if how == "capped" else 0.0, sinks)
    q = randn(B, hq, d, dtype=dtype)
    args = torch.tensor(block_tables, device=DEVICE), torch.tensor(context_lens, device=DEVICE)
    # What they share is not read again: it may be anything for the second kernel.
    out = paged_decode(q, cache, *args, scoring, prefixes=on_device, num_splits=num_splits)
    for i, x in enumerate(rows):
        close(out[i], expected(q[i], x[0], x[1], scoring).to(dtype))
    seen = paged_prefix(q, cache, args[0], on_device, scoring)
    assert seen.m[0].isfinite().any() and (seen.l[0] >= 0).all()
