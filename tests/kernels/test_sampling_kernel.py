"""The Triton sampling kernel: in the interpreter against an oracle in numpy, and on the GPU."""

import numpy as np
import pytest
import torch
from draws import chi_square_p

pytest.importorskip("triton")

from draws import interpreted, oracle_draw, philox

from nanovllm.kernels.sampling.draw import sample
from nanovllm.layers.embed_head import vocab_span
from nanovllm.sampling_params import NO_TOKEN

SEED = 11


def draw(
    logits: np.ndarray,
    temperatures: np.ndarray,
    keys: np.ndarray,
    positions: np.ndarray,
    span: int = 16,
) -> np.ndarray:
    n = len(logits)
    slots = torch.arange(n, 0, -1, dtype=torch.int32)
    table = torch.full((n + 2,), -5, dtype=torch.int32)
    tokens, _ = sample(
        torch.from_numpy(logits.astype(np.float32)),
        *tensors(temperatures, keys, positions),
        slots,
        table,
        span,
    )
    kept = tokens.clamp(min=0)  # 0 in the place of none
    assert table.tolist() == [-5, *kept.flip(0).tolist(), -5], "each token at its slot"
    return tokens.numpy()


def tensors(
    temperatures: np.ndarray, keys: np.ndarray, positions: np.ndarray
) -> tuple[torch.Tensor, ...]:
    return (
        torch.from_numpy(temperatures.astype(np.float32)),
        torch.from_numpy(np.ascontiguousarray(keys, np.uint32).view(np.int32)),
        torch.from_numpy(positions.astype(np.int32)),
    )


@interpreted
@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 1.0])
def test_the_best_of_two_parts_is_the_best_of_the_whole_vocabulary(temperature) -> None:
    """Ranks draw so; the second part begins with columns equal to some of the first."""
    rng, n, V, span = np.random.default_rng(SEED), 24, 70, 16
    logits = torch.from_numpy(rng.normal(0, 2, (n, V)).astype(np.float32))
    logits[:4] = 1.0
    logits[4:8, 5] = logits[4:8, 37] = 9.0
    keys, positions = rng.integers(0, 2**32, (2, n)), rng.integers(0, 999, n)
    slots, table = torch.arange(n, dtype=torch.int32), torch.zeros(n, dtype=torch.int32)
    args = (*tensors(np.full(n, temperature), keys, positions), slots, table, span)
    whole, _ = sample(logits, *args)
    first, high = sample(logits[:, :32].contiguous(), *args)
    second, higher = sample(logits[:, 32:].contiguous(), *args, start=32)
    assert torch.equal(torch.where(higher > high, second, first), whole)
    assert first.max() < 32 <= second.min() and len(set(whole.tolist())) > 5


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
    ("V", "span", "n"),
    [(100, 16, 40), (100, 128, 40), pytest.param(12, 16, 60, marks=pytest.mark.slow)],
)
def test_kernel_draws_what_the_oracle_draws(V, span, n):
    """Several spans or one, columns past the vocabulary, and a span without any weight."""
    rng = np.random.default_rng(SEED)
    logits = rng.normal(0, 2, (n, V)).astype(np.float32)
    logits[:, 5] = -np.inf
    logits[:, 32:48] = -np.inf
    temperatures = rng.choice(np.array([0.3, 0.7, 1.0, 1.5], np.float32), n)
    keys, positions = rng.integers(0, 2**32, (2, n)), rng.integers(0, 40_000, n)
    drawn = draw(logits, temperatures, keys, positions, span)
    wanted, lead = oracle_draw(logits, temperatures, keys, positions, span)
    clear = lead > 1e-4  # not decided by the rounding of float32
    assert clear.mean() > 0.95
    assert (drawn == wanted)[clear].all()
    assert len(set(drawn.tolist())) > 5


@interpreted
def test_greedy_rows_take_the_first_largest_logit():
    """Ties within a span, across quarters and spans."""
    logits = np.random.default_rng(SEED).normal(0, 1, (9, 50))
    for row, ties in enumerate([(3, 4), (2, 9), (15, 16), (31, 32), (49, 1), (0, 49), (33, 47)]):
        logits[row, list(ties)] = 9
    logits[7] = 0
    logits[8] = -np.inf
    keys, positions = np.arange(18).reshape(2, 9), np.arange(9)
    temperatures = np.array([0, 1e-9, *[9.9e-6] * 5, 0, 0])
    drawn = draw(logits, temperatures, keys, positions)
    assert drawn.tolist() == logits.argmax(1).tolist() == [3, 2, 15, 31, 1, 0, 33, 0, 0]
    assert (draw(logits, np.full(9, 1e-5), keys, positions) != drawn).any(), "that one draws"


@interpreted
def test_a_row_is_drawn_without_regard_to_the_others():
    rng, n = np.random.default_rng(SEED), 24
    logits, temperatures = rng.normal(0, 1, (n, 40)), np.linspace(0, 2, n) * (np.arange(n) % 4 > 0)
    keys, positions = rng.integers(0, 2**32, (2, n)), rng.integers(0, 999, n)
    drawn = draw(logits, temperatures, keys, positions)
    for rows in (rng.permutation(n), np.arange(0, n, 3), np.array([7])):
        again = draw(logits[rows], temperatures[rows], keys[:, rows], positions[rows])
        assert again.tolist() == drawn[rows].tolist()


@interpreted
@pytest.mark.parametrize(
    "V",
    [
        pytest.param(40, id="three spans, padded to four"),
        pytest.param(64, id="four spans", marks=pytest.mark.slow),
    ],
)
def test_a_row_with_nan_has_no_token_and_infinity_is_always_drawn(V):
    """Also if it is one column of many, or the last."""
    logits = np.random.default_rng(SEED).normal(0, 1, (35, V))
    logits[:5] = np.nan
    logits[np.arange(5, 25), np.linspace(0, V - 1, 20).astype(int)] = np.nan
    logits[25:30, 37] = np.inf
    logits[20:25, 3] = np.inf
    logits[30:] = -np.inf
    keys, positions = np.ones((2, 35)), np.arange(35)
    for temperature in (0.0, 1.0):
        drawn = draw(logits, np.full(35, temperature), keys, positions)
        assert drawn.tolist() == [NO_TOKEN] * 25 + [37] * 5 + [0] * 5


@interpreted
def test_extreme_logits_do_not_overflow():
    """A low temperature makes exponents of tens of thousands; the sums must not notice."""
    logits = np.full((10, 64), -3e4)
    logits[:, 40], logits[:, 3] = 3e4, 2.9e4
    keys, positions = np.zeros((2, 10)), np.arange(10)
    assert draw(logits, np.full(10, 0.01), keys, positions).tolist() == [40] * 10
    assert draw(-np.abs(logits), np.full(10, 2.0), keys, positions).max() < 64


@interpreted
@pytest.mark.parametrize(
    "span",
    [pytest.param(16, id="one span", marks=pytest.mark.slow), pytest.param(4, id="three spans")],
)
def test_kernel_follows_the_softmax(span):
    """60 draws of one request; the oracle, which draws the same, 50,000."""
    n, V = 50_000, 12
    logits = np.random.default_rng(SEED).normal(0, 1.5, V)
    logits[[2, 3]], logits[7] = logits[1], -np.inf
    rows, temperatures = np.tile(logits, (n, 1)).astype(np.float32), np.full(n, 0.7)
    keys, positions = np.full((2, n), 17), np.arange(n)
    wanted, _ = oracle_draw(rows, temperatures, keys, positions, span)
    few = slice(0, 60)
    drawn = draw(rows[few], temperatures[few], keys[:, few], positions[few], span)
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
    slots, table = positions.flip(0), torch.full_like(positions, -1)
    span = vocab_span(V)
    tokens, _ = sample(logits.bfloat16(), temperatures, keys, positions, slots, table, span)
    assert torch.equal(table, tokens.flip(0))
    assert torch.equal(tokens[::2].long(), logits.bfloat16()[::2].argmax(-1))
    order = torch.randperm(n, device="cuda")
    mixed = logits.bfloat16()[order], temperatures[order], keys[:, order], positions[order]
    again, _ = sample(*mixed, slots, table, span)
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
        zero = torch.zeros_like(keys[0])
        args = torch.full((n,), 0.8, device="cuda"), keys, zero, zero, zero
        drawn.append(sample(logits.expand(n, V).contiguous(), *args, vocab_span(V))[0])
    tokens = torch.cat(drawn).long()
    assert chi_square_p(bins[tokens].tolist(), expected.cpu().numpy()) > 1e-3
    rank = logits.argsort(descending=True).argsort()  # how likely tokens are drawn how often
    edges = torch.tensor([0, 1, 10, 100, 1000, 10000, V], device="cuda")
    band = torch.bucketize(rank, edges, right=True) - 1
    expected = torch.zeros(6, dtype=torch.double, device="cuda").index_add_(0, band, probs)
    assert chi_square_p(band[tokens].tolist(), expected.cpu().numpy()) > 1e-3
