"""Reference sampling of tokens in plain numpy, and the statistics that judge draws."""

import os
from typing import Any

import numpy as np
import pytest
import torch

from nanovllm.layers.sampler import SamplingMetadata

interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="kernels are compiled for the GPU here"
)


def philox(counter: np.ndarray, key: np.ndarray, rounds: int = 7) -> np.ndarray:
    """Philox4x32 (Salmon et al., 2011). counter: [4, ...], key: [2, ...]. Returns [4, ...]."""
    low = np.uint64(0xFFFFFFFF)
    c0, c1, c2, c3 = np.asarray(counter, np.uint64)
    k0, k1 = np.asarray(key, np.uint64)
    for _ in range(rounds):
        a, b = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & low, (a >> 32) ^ c3 ^ k1, a & low
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & low, (k1 + np.uint64(0xBB67AE85)) & low
    return np.stack([c0, c1, c2, c3])


def gumbel(bits: np.ndarray) -> np.ndarray:
    return -np.log(-np.log1p(-(bits + 0.5) / 2**32))


def oracle(
    logits: np.ndarray, temperatures: np.ndarray, keys: np.ndarray, positions: np.ndarray, span: int
) -> tuple[np.ndarray, np.ndarray]:
    """Scores in float64: [n, spans] of the spans, and [n, V] of the columns in their span."""
    n, V = logits.shape
    spans = -(-V // span)
    x = np.full((n, spans * span), -np.inf)
    x[:, :V] = logits.astype(np.float64) / temperatures[:, None]
    weights = np.exp(x).reshape(n, spans, span).sum(-1)

    def noise(count: int, domain: int) -> np.ndarray:  # [4, n, count]
        counter = np.zeros((4, n, count), np.uint64)
        counter[0], counter[1], counter[2] = np.arange(count), positions[:, None], domain
        return gumbel(philox(counter, keys[:, :, None].repeat(count, 2)))

    # Quarter i of a span has its columns start + i * span / 4 + lane.
    columns = noise(spans * span // 4, 0).reshape(4, n, spans, span // 4)
    columns = columns.transpose(1, 2, 0, 3).reshape(n, -1)
    with np.errstate(divide="ignore"):
        return np.log(weights) + noise(spans, 1)[0], (x + columns)[:, :V]


def oracle_draw(*args) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [n], and by how much [n] each won."""
    spans, columns = oracle(*args)
    n, V = columns.shape
    span = args[-1]
    chosen = spans.argmax(1)
    columns[np.arange(V) // span != chosen[:, None]] = -np.inf

    def lead(scores: np.ndarray) -> np.ndarray:
        if scores.shape[1] == 1:
            return np.full(n, np.inf)
        two = np.sort(scores, 1)[:, -2:]
        return two[:, 1] - two[:, 0]

    return columns.argmax(1), np.minimum(lead(spans), lead(columns))


def metadata(temperatures: Any, keys: Any, positions: Any) -> SamplingMetadata:
    n = len(positions)
    return SamplingMetadata(
        torch.as_tensor(temperatures, dtype=torch.float32).expand(n),
        torch.as_tensor(np.asarray(keys, np.uint32).reshape(2, -1).view(np.int32)).expand(2, n),
        torch.as_tensor(positions, dtype=torch.int32),
        torch.arange(n, dtype=torch.int32),
        torch.zeros(n),
    )


def take(data: SamplingMetadata, rows: torch.Tensor) -> SamplingMetadata:
    return SamplingMetadata(*(x[..., rows] for x in data))


def chi_square_p(drawn: list[int], probs: np.ndarray) -> float:
    """p-value of the draws; tokens expected less than 5 times are one bin."""
    from scipy import stats  # takes a second

    expected = probs * len(drawn)
    rare = expected < 5
    counts = np.bincount(drawn, minlength=len(probs))
    f_obs = np.append(counts[~rare], counts[rare].sum())
    f_exp = np.append(expected[~rare], expected[rare].sum())
    keep = f_exp > 0
    return float(stats.chisquare(f_obs[keep], f_exp[keep] * f_obs.sum() / f_exp.sum()).pvalue)
