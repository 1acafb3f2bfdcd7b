"""The Triton sampling kernel: in the interpreter against an oracle in numpy, and on the GPU."""

import os

import numpy as np
import pytest
import torch
from test_reference import chi_square_p

pytest.importorskip("triton")

from nanovllm.kernels import sampling
from nanovllm.kernels.sampling import sample

SEED = 11
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


def oracle_scores(
    logits: np.ndarray,
    temperatures: np.ndarray,
    keys: np.ndarray,
    positions: np.ndarray,
    block: int,
) -> np.ndarray:
    """logit / T - log E in float64. logits: [n, V]. Returns [n, V]."""
    n, V = logits.shape
    starts, lanes = np.arange(0, V, block), np.arange(block // 4)
    groups = (starts[:, None] // 4 + lanes).ravel()[None]  # [1, G], each of four columns
    counter = np.zeros((4, n, groups.shape[1]), np.uint64)
    counter[0], counter[1] = groups, positions[:, None]
    bits = philox(counter, keys[:, :, None].repeat(groups.shape[1], 2))  # [4, n, G]
    # Quarter i of a block has its columns start + i * block / 4 + lane.
    bits = bits.reshape(4, n, len(starts), block // 4).transpose(1, 2, 0, 3).reshape(n, -1)[:, :V]
    noise = -np.log(-np.log1p(-(bits + 0.5) / 2**32))
    return logits.astype(np.float64) / temperatures[:, None] + noise


def shrink(monkeypatch: pytest.MonkeyPatch, block: int, splits: int) -> None:
    monkeypatch.setattr(sampling, "BLOCK", block)
    monkeypatch.setattr(sampling, "SPLITS", splits)


def draw(
    logits: np.ndarray, temperatures: np.ndarray, keys: np.ndarray, positions: np.ndarray
) -> np.ndarray:
    return sample(
        torch.from_numpy(logits.astype(np.float32)),
        torch.from_numpy(temperatures.astype(np.float32)),
        torch.from_numpy(np.ascontiguousarray(keys, np.uint32).view(np.int32)),
        torch.from_numpy(positions.astype(np.int32)),
    ).numpy()


def test_the_oracle_is_philox() -> None:
    """The known answers that come with Random123, for 7 and 10 rounds."""
    ones, zeros = np.full((6, 1), 2**32 - 1), np.zeros((6, 1))
    for x, rounds, answer in (
        (zeros, 7, "5f6fb709 0d893f64 4f121f81 4f730a48"),
        (ones, 7, "5207ddc2 45165e59 4d8ee751 8c52f662"),
        (zeros, 10, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        (ones, 10, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ):
        assert " ".join(f"{int(w):08x}" for w in philox(x[:4], x[4:], rounds).ravel()) == answer


@interpreted
@pytest.mark.parametrize(
    ("V", "block", "splits", "n"), [(100, 64, 1, 150), (100, 32, 2, 100), (12, 16, 1, 100)]
)
def test_kernel_draws_what_the_oracle_draws(V, block, splits, n, monkeypatch):
    """Several iterations, several programs of a row, and columns past the vocabulary."""
    rng = np.random.default_rng(SEED)
    shrink(monkeypatch, block, splits)
    logits = rng.normal(0, 2, (n, V)).astype(np.float32)
    logits[:, 5] = -np.inf
    temperatures = rng.choice(np.array([0.3, 0.7, 1.0, 1.5], np.float32), n)
    keys, positions = rng.integers(0, 2**32, (2, n)), rng.integers(0, 40_000, n)
    drawn = draw(logits, temperatures, keys, positions)
    scores = oracle_scores(logits, temperatures, keys, positions, block)
    assert (scores[np.arange(n), drawn] >= scores.max(1) - 1e-4).all()
    assert (drawn == scores.argmax(1)).mean() >= 0.99  # but for ties within float32


@interpreted
def test_greedy_rows_take_the_first_largest_logit(monkeypatch):
    """Ties within a block, across quarters, iterations and programs."""
    shrink(monkeypatch, 16, 2)
    logits = np.random.default_rng(SEED).normal(0, 1, (8, 50))
    for row, ties in enumerate([(3, 4), (2, 9), (15, 16), (31, 32), (49, 1), (0, 49), (33, 47)]):
        logits[row, list(ties)] = 9
    logits[7] = 0
    keys, positions = np.arange(16).reshape(2, 8), np.arange(8)
    temperatures = np.array([0, 1e-9, *[9.9e-6] * 5, 0])
    drawn = draw(logits, temperatures, keys, positions)
    assert drawn.tolist() == logits.argmax(1).tolist() == [3, 2, 15, 31, 1, 0, 33, 0]


@interpreted
def test_a_row_is_drawn_without_regard_to_the_others(monkeypatch):
    shrink(monkeypatch, 16, 2)
    rng, n = np.random.default_rng(SEED), 24
    logits, temperatures = rng.normal(0, 1, (n, 40)), np.linspace(0, 2, n) * (np.arange(n) % 4 > 0)
    keys, positions = rng.integers(0, 2**32, (2, n)), rng.integers(0, 999, n)
    drawn = draw(logits, temperatures, keys, positions)
    for rows in (rng.permutation(n), np.arange(0, n, 3), np.array([7])):
        again = draw(logits[rows], temperatures[rows], keys[:, rows], positions[rows])
        assert again.tolist() == drawn[rows].tolist()


@interpreted
def test_kernel_follows_the_softmax(monkeypatch):
    """500 draws of one request; the oracle, which draws the same, 50,000."""
    shrink(monkeypatch, 16, 1)
    n, V = 50_000, 12
    logits = np.random.default_rng(SEED).normal(0, 1.5, V)
    logits[[2, 3]], logits[7] = logits[1], -np.inf
    rows, temperatures = np.tile(logits, (n, 1)).astype(np.float32), np.full(n, 0.7)
    keys, positions = np.full((2, n), 17), np.arange(n)
    wanted = oracle_scores(rows, temperatures, keys, positions, 16).argmax(1)
    few = slice(0, 500)
    drawn = draw(rows[few], temperatures[few], keys[:, few], positions[few])
    assert (drawn == wanted[few]).mean() >= 0.99
    probs = np.exp(logits / 0.7) / np.exp(logits / 0.7).sum()
    for sample_of in (drawn, wanted):
        assert chi_square_p(sample_of.tolist(), probs) > 1e-3
        assert 7 not in sample_of
    wrong = np.exp(logits) / np.exp(logits).sum()
    assert chi_square_p(wanted.tolist(), wrong) < 1e-9


@pytest.mark.gpu
@pytest.mark.parametrize("V", [7, 1000, 151936])
def test_sampling_kernel(V: int) -> None:
    """Greedy rows take the first largest logit; the others a draw of their own key and position."""
    n = 64
    logits = torch.randn(n, V, device="cuda", generator=torch.Generator("cuda").manual_seed(SEED))
    temperatures = torch.linspace(0, 3, n, device="cuda") * (torch.arange(n, device="cuda") % 2)
    keys = torch.arange(2 * n, dtype=torch.int32, device="cuda").view(2, n)
    positions = torch.arange(n, dtype=torch.int32, device="cuda")
    tokens = sample(logits.bfloat16(), temperatures, keys, positions)
    assert torch.equal(tokens[::2].long(), logits.bfloat16()[::2].argmax(-1))
    order = torch.randperm(n, device="cuda")
    again = sample(logits.bfloat16()[order], temperatures[order], keys[:, order], positions[order])
    assert torch.equal(again, tokens[order]), "a draw depends on its neighbours"


@pytest.mark.gpu
def test_sampling_kernel_distribution_of_a_large_vocabulary() -> None:
    """20,000 draws over 151,936 tokens, rare ones included: chi-square over bins of tokens."""
    V, n, rounds = 151936, 500, 40
    generator = torch.Generator("cuda").manual_seed(SEED)
    logits = 3 * torch.randn(V, device="cuda", generator=generator)
    probs = (logits.double() / 0.8).softmax(-1)
    bins = (torch.arange(V, device="cuda") * 2654435761 % 2**32) % 100
    expected = torch.zeros(100, dtype=torch.double, device="cuda").index_add_(0, bins, probs)
    drawn = []
    for i in range(rounds):
        keys = torch.stack([torch.arange(n), torch.full((n,), i)]).to("cuda", torch.int32)
        args = torch.full((n,), 0.8, device="cuda"), keys, torch.zeros_like(keys[0])
        drawn.append(sample(logits.expand(n, V).contiguous(), *args))
    tokens = torch.cat(drawn).long()
    assert chi_square_p(bins[tokens].tolist(), expected.cpu().numpy()) > 1e-3
    rank = logits.argsort(descending=True).argsort()  # how likely tokens are drawn how often
    edges = torch.tensor([0, 1, 10, 100, 1000, 10000, V], device="cuda")
    band = torch.bucketize(rank, edges, right=True) - 1
    expected = torch.zeros(6, dtype=torch.double, device="cuda").index_add_(0, band, probs)
    assert chi_square_p(band[tokens].tolist(), expected.cpu().numpy()) > 1e-3
