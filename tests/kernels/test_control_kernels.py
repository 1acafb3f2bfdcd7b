"""The Triton kernels for controls of sampling against the expressions of the CPU, which have
oracles of their own: in the interpreter, and compiled on a GPU.
"""

import os
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from checkpoints import rare
from nanovllm.kernels.sampling import controls as kernels
from nanovllm.kernels.sampling import logprobs as logprobs_kernels
from nanovllm.kernels.sampling import thresholds as thresholds_kernels
from nanovllm.kernels.sampling.draw import sample
from nanovllm.kernels.sampling.logprobs import logprobs
from nanovllm.kernels.sampling.thresholds import thresholds
from nanovllm.layers.embed_head import vocab_span
from nanovllm.sampling import reporting
from nanovllm.sampling.controlled_sampler import least_logits, process_logits
from nanovllm.sampling.controls import IN_PROMPT, MAX_COUNT, Controls, Reports
from nanovllm.sampling.logprobs import Distributions, Labels, Logprobs, logprobs_of
from nanovllm.sampling.request_controls import token_mask

SEED = 5
ON_GPU = os.environ.get("TRITON_INTERPRET") != "1"
DEVICE = "cuda" if ON_GPU else "cpu"
INF = float("inf")
LARGE = pytest.param(151936, marks=pytest.mark.gpu)
pytestmark = [pytest.mark.filterwarnings("ignore:invalid value")]
pytestmark += [pytest.mark.gpu] if ON_GPU else []


def no_controls(n: int, **changes: np.ndarray) -> Controls:
    values: dict[str, Any] = {
        "top_k": np.zeros(n, np.int32),
        "top_p": np.ones(n, np.float32),
        "min_p": np.zeros(n, np.float32),
        "penalties": np.array([[1.0], [0.0], [0.0]], np.float32).repeat(n, 1),
        "edit_starts": np.zeros(n + 1, np.int32),
        "edit_tokens": np.zeros(0, np.int32),
        "edit_biases": np.zeros(0, np.float32),
        "masks": np.zeros((0, 1), np.int32),
        "mask_rows": np.full(n, -1, np.int32),
        "reset": np.zeros(0, np.int32),
        "counts": np.zeros((3, 0), np.int32),
        "reports": Reports(*(np.zeros(0, np.int32) for _ in Reports._fields)),
    }
    return Controls(**(values | changes))


def to_device(*arrays: np.ndarray) -> list[torch.Tensor]:
    return [torch.from_numpy(np.ascontiguousarray(array)).to(DEVICE) for array in arrays]


def among_others(logits: torch.Tensor) -> torch.Tensor:
    """The logits on the device, as columns of a wider tensor that is infinite elsewhere."""
    wider = torch.nn.functional.pad(logits, (0, 3), value=INF)
    return wider.to(DEVICE)[:, : logits.shape[1]]


def random_logits(rng: np.random.Generator, n: int, V: int, kind: str) -> torch.Tensor:
    x = rng.normal(size=(n, V)).astype(np.float32) * 3
    if kind == "ties":
        x = np.round(x)
    elif kind == "peaked":
        x[np.arange(n), rng.integers(V, size=n)] += 40
    elif kind == "extremes":
        x[:, rng.integers(V, size=20)] = -np.inf
        x[:, rng.integers(V, size=20)] = 1e4
        x[:, rng.integers(V, size=20)] = -1e30
        x[:, rng.integers(V, size=5)] = np.float32(-0.0)
        x[:, rng.integers(V, size=5)] = 0.0
        x[0, 1:] = -np.inf
    elif kind == "equal":
        x[:] = 1.5
    elif kind == "few":
        x[:, 3:-2] = -np.inf
        x[:, [1, -1]] = np.nan
        x[1], x[2], x[3, 0] = np.nan, -np.inf, np.inf
    return torch.from_numpy(x).to(torch.bfloat16 if kind == "16 bits" else torch.float32)


def kernel_logprobs(
    logits: torch.Tensor, drawn: torch.Tensor, N: int, distributions: Distributions | None = None
) -> list[torch.Tensor]:
    """Tokens, values and ranks."""
    device = logits.device
    own = distributions or Distributions.of_model(len(logits), device)
    found = Logprobs.empty(len(drawn), N, 0, device)
    logprobs(
        logits, drawn.to(device), *(part.to(device) for part in own), found.token_ids, found.values,
        found.ranks,
    )  # fmt: skip
    return [part.cpu() for part in (found.token_ids, found.values, found.ranks)]


def kernel_process(
    logits: torch.Tensor, slots: torch.Tensor, c: Controls, counts: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits are columns of a wider tensor, and left as they are."""
    arrays = to_device(
        c.masks, c.mask_rows, c.edit_starts, c.edit_tokens, c.edit_biases, c.penalties
    )
    if counts is not None:
        counts = counts.to(DEVICE)
    given = among_others(logits)
    before = given.clone()
    results = kernels.process(given, slots.to(DEVICE), *arrays, counts)
    assert torch.equal(given.nan_to_num(7), before.nan_to_num(7))
    assert results[2] is None, "no weights of spans were asked for"
    return results[:2]


def filtered(logits: torch.Tensor, temperatures: torch.Tensor, c: Controls) -> torch.Tensor:
    """The logits, -inf where the filters exclude them on a CPU."""
    least = least_logits(logits, temperatures, c)
    return logits.masked_fill(logits < least[:, None], -INF)


def kernel_kept(logits: torch.Tensor, temperatures: torch.Tensor, c: Controls) -> torch.Tensor:
    """Mask [n, V] of the tokens that are not below the thresholds."""
    x, tops = kernel_process(logits, torch.arange(len(logits), dtype=torch.int32), c, None)
    filters = to_device(c.top_k, c.top_p, c.min_p)
    least = thresholds(x, tops, temperatures.to(DEVICE), *filters).cpu()
    return (logits >= least[:, None]) & (logits > -INF)


@pytest.mark.parametrize("V", [33, 4096, 5000, LARGE])
@pytest.mark.parametrize("what", ["nothing", "masks", "edits", "penalties", "all", "16 bits"])
def test_process(what: str, V: int) -> None:
    """Every token of every row, to the bit but for the order of sums."""
    rng, n = np.random.default_rng(SEED), 5
    logits = random_logits(rng, n, V, what)
    logits[2, 3], logits[4, 8:12] = -INF, torch.nan
    logits[3, 5:9] = INF
    slots = torch.tensor([4, 0, 6, 2, 7], dtype=torch.int32)
    c = no_controls(n)
    if what in ("masks", "all", "16 bits"):
        masks = np.stack([token_mask(rng.choice(V, 20), V), token_mask([V - 1], V)])
        c = c._replace(masks=masks, mask_rows=np.array([-1, 1, 0, -1, 0], np.int32))
    if what in ("edits", "all", "16 bits"):
        starts = np.array([0, 3, 3, 4, 9, 20], np.int32)
        parts = [np.sort(rng.integers(V, size=k)) for k in np.diff(starts)]
        biases = rng.normal(size=20).astype(np.float32)
        biases[[1, 5]] = -np.inf
        parts[3][:2], biases[4:6] = [6, 6], [1, -np.inf]
        parts[3].sort()
        c = c._replace(
            edit_starts=starts,
            edit_tokens=np.concatenate(parts).astype(np.int32),
            edit_biases=biases,
        )
    counts = None
    if what in ("penalties", "all", "16 bits"):
        penalties = np.array([[1, 1.3, 0.5, 1, 2], [0, 0, 1, -1, 0], [0, 0.5, 0, 2, 0]])
        c = c._replace(penalties=penalties.astype(np.float32))
        counts = torch.from_numpy(rng.integers(0, 4, (8, V)).astype(np.int16))
        counts[:, ::3] += IN_PROMPT
        counts[:, 5] = MAX_COUNT
    want = process_logits(logits, slots.long(), c, counts)
    got, tops = kernel_process(logits, slots, c, counts)
    torch.testing.assert_close(got.cpu(), want, rtol=1e-6, atol=1e-5)
    blocks = torch.nn.functional.pad(got, (0, tops.shape[1] * kernels.BLOCK - V), value=-INF)
    assert torch.equal(tops, blocks.view(n, -1, kernels.BLOCK).amax(-1))


@pytest.mark.parametrize(
    ("V", "kind"),
    [
        (100, "ties"),
        (4500, "16 bits"),
        *(rare(100, kind) for kind in ("random", "extremes", "peaked", "equal")),
        rare(4500, "random"),
        pytest.param(151936, "random", marks=pytest.mark.gpu),
    ],
)
def test_thresholds(V: int, kind: str) -> None:
    """The kept tokens, but for those so near to the bound of top_p or min_p that sums decide."""
    rng, n = np.random.default_rng(SEED), 12
    logits = random_logits(rng, n, V, kind)
    temperatures = torch.tensor([1, 0.7, 0, 2, 1, 0.3, 10, 0.1, 1, 1, 1, 0.5])
    c = no_controls(
        n,
        top_k=np.array([5, 0, 0, V - 3, 0, 1, 2 * V, 70, 0, 50, 0, 1], np.int32),
        top_p=np.array([0.9, 0.8, 1, 0.95, 1, 1, 1, 0.3, 1e-6, 1, 0.999, 0.1], np.float32),
        min_p=np.array([0, 0, 0, 0.01, 0.05, 0, 0, 0, 0, 1, 0.5, 0], np.float32),
    )
    kept = kernel_kept(logits, temperatures, c)
    want = filtered(logits.float(), temperatures, c) > -INF
    different = (kept != want).sum(1)
    assert (different[torch.from_numpy(c.top_p == 1)] == 0).all(), different
    probability = (logits / temperatures.clamp(min=1e-5)[:, None]).double().softmax(-1)
    assert ((kept != want) * probability).sum() < 1e-5
    assert (kept.sum(1) > 0).all()


def test_thresholds_by_hand() -> None:
    n, logits = 8, torch.tensor([0.5, 0.25, 0.15, 0.1]).log().repeat(8, 1)
    logits[6:] = torch.tensor([1.0, 0.0, -0.0, -9.0])
    temperatures = torch.ones(n)
    temperatures[5] = 0
    c = no_controls(
        n,
        top_k=np.array([0, 0, 0, 900, 2, 0, 2, 1], np.int32),
        # The mass is of what min_p and top_k leave: 0.66 of 0.75 ends before 0.5, 0.68 does not.
        top_p=np.array([0.66, 0.68, 1e-46, 0.7, 0, 1, 0.6, 1], np.float32),
        min_p=np.array([0.4, 0.4, 0, 0, 0, 0, 0, 0], np.float32),
    )
    kept = kernel_kept(logits, temperatures, c)
    assert kept.sum(1).tolist() == [1, 2, 1, 2, 1, 4, 3, 1], "of the most likely"
    assert torch.equal(kept, filtered(logits, temperatures, c) > -INF)


@pytest.mark.parametrize("kind", ["random", rare("ties"), rare("extremes"), rare("equal")])
def test_top_p_among_many(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The candidates of top_p are narrowed down first, if there are more than `PART`."""
    monkeypatch.setattr(thresholds_kernels, "PART", 32 if kind == "random" else 256)
    rng, n, V = np.random.default_rng(SEED), 10, 1000
    logits = random_logits(rng, n, V, kind)
    temperatures = torch.tensor([3.0, 1.5]).repeat(n // 2)
    top_p = np.linspace(0.08, 0.98, n, dtype=np.float32)
    c = no_controls(n, top_p=top_p)
    kept = kernel_kept(logits, temperatures, c)
    assert torch.equal(kept, filtered(logits, temperatures, c) > -INF)
    assert kind in ("equal", "extremes") or len(set(kept.sum(1).tolist())) > n // 2


@pytest.mark.parametrize("num_logprobs", [0, rare(5), 20])
@pytest.mark.parametrize("V", [pytest.param(40, marks=pytest.mark.slow), 4097, LARGE])
@pytest.mark.parametrize("kind", ["random", "ties", "peaked", "few", "16 bits"])
def test_logprobs(kind: str, V: int, num_logprobs: int) -> None:
    rng, n = np.random.default_rng(SEED), 6
    logits = random_logits(rng, n, V, kind)
    if kind == "few":
        logits[4:, [1, -1]] = -INF  # no NaN
    drawn = torch.from_numpy(rng.integers(V, size=n).astype(np.int32))
    drawn[:2] = logits[:2].argmax(-1)
    want = logprobs_of(logits, drawn, num_logprobs)
    tokens, values, ranks = kernel_logprobs(among_others(logits), drawn, num_logprobs)
    assert torch.equal(ranks, want.ranks)
    assert torch.equal(tokens[:, 0], drawn)
    for row in tokens[:, 1:].tolist():
        assert len(set(row)) == num_logprobs, "each token once"
    assert tokens.min() >= 0 and tokens.max() < V
    exact = logits.double().log_softmax(-1)  # NaN for all tokens of a row that has one
    for ids in (tokens, want.token_ids):
        of_tokens = exact.gather(1, ids.long()).float()
        torch.testing.assert_close(values, of_tokens, rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("kind", ["random", "ties", "few", "16 bits"])
@pytest.mark.parametrize("V", [rare(40), 4097, LARGE])
def test_distributions(kind: str, V: int) -> None:
    """Rows in any order, at temperatures, over what is not below a bound; some are not wanted, and
    some have no token.
    """
    rng, m = np.random.default_rng(SEED), 7
    logits = random_logits(rng, 5, V, kind)
    rows = torch.tensor([3, 0, 4, 4, 2, 1, 0], dtype=torch.int32)
    divisors = torch.tensor([1, 0.7, 0, 1.5, 30, 0.01, 1])
    bounds = logits[rows].float().nan_to_num(-INF).topk(9).values[:, -1]
    least = torch.where(torch.arange(m) % 3 == 1, bounds, -INF)
    drawn = logits[rows].float().nan_to_num(-INF).topk(4).indices[:, -1].to(torch.int32)
    drawn[6] = -1
    own = Distributions(rows, divisors, least)
    tokens, values, ranks = kernel_logprobs(among_others(logits), drawn, 12, own)
    wanted = divisors > 0
    x = logits[rows].double() / divisors[:, None]
    x = x.masked_fill(logits[rows].float() < least[:, None], -INF)
    exact, lost = x.log_softmax(-1), logits[rows].isnan().any(1)
    ids = tokens.long().clamp(min=0)
    given = exact.gather(1, ids).float()[wanted]
    torch.testing.assert_close(values[wanted], given, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert values[wanted & lost].isnan().all()
    assert tokens[wanted, 0].tolist() == drawn[wanted].tolist()
    exact = x.nan_to_num(-INF, INF, -INF)
    larger = exact > exact.gather(1, ids[:, :1])
    assert torch.equal(ranks[wanted], larger.sum(1)[wanted].int() + 1)
    best = exact.sort(descending=True).values[:, :12]
    assert torch.equal(exact.gather(1, ids[:, 1:])[wanted], best[wanted])
    labels = Labels(*to_device(np.array([0, 1, 1, 5], np.int32), np.array([4, 7, 0, 9], np.int32)))
    args = (part.to(DEVICE) for part in own)
    found = logprobs_of(logits.to(DEVICE), drawn.to(DEVICE), 0, Distributions(*args), labels)
    expected = x.log_softmax(-1)[labels.entries.long().cpu(), labels.tokens.long().cpu()].float()
    torch.testing.assert_close(found.labels.cpu(), expected, rtol=1e-5, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("kind", ["random", "ties", "few"])
@pytest.mark.parametrize("V", [33, rare(4096), LARGE])
def test_what_is_left(kind: str, V: int) -> None:
    """The bits of what is not below the bound, ties of it included, nor -inf."""
    rng = np.random.default_rng(SEED)
    x = random_logits(rng, 5, V, kind).nan_to_num(-INF, INF, -INF)
    rows = torch.tensor([4, 0, 3], dtype=torch.int32)
    least = torch.tensor([-INF, x[0].topk(5).values[-1], x[3].max()])
    found = kernels.left(x.to(DEVICE), rows.to(DEVICE), least.to(DEVICE)).cpu().numpy()
    assert found.dtype == np.int32 and found.shape == (3, -(-V // 32))
    bits = np.unpackbits(found.view(np.uint8), axis=1, bitorder="little")
    want = ((x[rows] >= least[:, None]) & (x[rows] > -INF)).numpy()
    assert np.array_equal(bits[:, :V], want) and not bits[:, V:].any()
    assert kind != "ties" or want[1].sum() > 5


@pytest.mark.parametrize("way", ["kernel", "torch"])
@pytest.mark.parametrize("V", [33, 20000, LARGE])
def test_the_first_that_are_left_are_listed(V: int, way: str) -> None:
    """Of rows that leave none, all, and about as many as there is room for."""
    rng, W = np.random.default_rng(SEED), -(-V // 32)
    for count in (0, 1, 31, 255):
        sizes = [size for size in (0, 1, count - 1, count, count + 1, V) if 0 <= size <= V]
        is_left = np.zeros((len(sizes), 32 * W), np.bool_)
        for row, size in zip(is_left, sizes, strict=True):
            row[rng.choice(V, size, replace=False)] = True
        is_left[1, :V] = np.arange(V) == V - 1  # the last word's last column
        if way == "kernel":
            words = np.packbits(is_left, axis=1, bitorder="little").view(np.int32)
            found = kernels.listed(*to_device(words), count)
        else:
            found = reporting._listed(*to_device(is_left[:, :V]), count)
        assert found.dtype == torch.int32 and found.shape == (len(sizes), 1 + count)
        for (num, *ids), row in zip(found.tolist(), is_left, strict=True):
            wanted = np.flatnonzero(row).tolist()
            assert num == len(wanted) and ids[:num] == wanted[:count]


def test_large_logits_do_not_round_log_probabilities() -> None:
    """The log-probabilities of certain tokens came out above 0."""
    logits = torch.zeros(24, 50)
    logits[:, 7] = 60 + 0.37 * torch.arange(24)
    logits[12:, 8] = logits[12:, 7] - 1
    drawn = torch.full((24,), 7, dtype=torch.int32)
    _, values, _ = kernel_logprobs(logits.to(DEVICE), drawn, 1)
    exact = logits.double().log_softmax(-1)[:, [7, 7]].float()
    torch.testing.assert_close(values.cpu(), exact, rtol=0, atol=3e-7)
    assert not (values > 0).any()


@pytest.mark.skipif(ON_GPU, reason="looks at what the interpreter keeps")
def test_no_kernel_is_compiled_for_what_varies() -> None:
    """Batches drain, and N is what their requests want: not for 1, nor for multiples of 16."""
    for kernel, name in (
        (kernels._process_kernel, "n"),
        (logprobs_kernels._span_logprobs_kernel, "N"),
        (logprobs_kernels._logprobs_kernel, "N"),
    ):
        assert name in kernel.arg_names and kernel.kwargs["do_not_specialize"] == [name]


def test_counting() -> None:
    counts = torch.zeros(4, 50, dtype=torch.int16, device=DEVICE)
    counts[2, 7], counts[1, 9] = IN_PROMPT, MAX_COUNT
    slots, tokens = to_device(np.array([2, 1, 0], np.int32), np.array([7, 9, 3], np.int32))
    kernels.count(counts, slots, tokens)
    assert counts[2, 7] == IN_PROMPT + 1 and counts[1, 9] == MAX_COUNT and counts[0, 3] == 1
    assert int((counts != 0).sum()) == 3


@pytest.mark.parametrize("kind", ["random", "extremes", "16 bits", "odd"])
def test_weights_of_spans(kind: str) -> None:
    """They save the draw a pass: `sample` draws as by its own."""
    n, V = 6, 2 * kernels.SPAN + 77
    logits = random_logits(np.random.default_rng(SEED), n, V, kind).to(DEVICE)
    slots = torch.arange(n, dtype=torch.int32, device=DEVICE)
    temperatures = torch.tensor([1, 0.7, 0, 2, 1e-5, 30], device=DEVICE)
    controls = no_controls(n)
    arrays = to_device(
        controls.masks, controls.mask_rows, controls.edit_starts, controls.edit_tokens,
        controls.edit_biases, controls.penalties,
    )  # fmt: skip
    x, _, weights = kernels.process(logits, slots, *arrays, None, temperatures)
    tiles = torch.nn.functional.pad(x, (0, -V % kernels.SPAN), value=-INF).view(n, -1, kernels.SPAN)
    drawn = temperatures[:, None, None].clamp(min=1e-5).double()
    exact = (tiles.double() / drawn).logsumexp(-1) / np.log(2)
    exact[2] = tiles[2].amax(-1)
    torch.testing.assert_close(weights, exact.float(), rtol=2e-6, atol=1e-4)
    keys = torch.randint(-(2**31), 2**31, (2, n), dtype=torch.int32).to(DEVICE)
    args = x, temperatures, keys, slots, slots, torch.zeros_like(slots), kernels.SPAN
    assert torch.equal(sample(*args, weights=weights)[0], sample(*args)[0])
    weights[:, 2] = INF
    assert kind != "random" or (sample(*args, weights=weights)[0] >= 2 * kernels.SPAN).all()


def test_what_is_below_the_threshold_is_never_drawn() -> None:
    """And with a threshold that keeps all the draws are those without."""
    V, n = 300, 6
    torch.manual_seed(SEED)
    logits = torch.randn(n, V).bfloat16().to(DEVICE)
    keys = torch.randint(-(2**31), 2**31, (2, n), dtype=torch.int32).to(DEVICE)
    slots = torch.arange(n, dtype=torch.int32, device=DEVICE)
    table = torch.zeros(n, dtype=torch.int32, device=DEVICE)
    args = torch.ones(n, device=DEVICE), keys, slots, slots, table, vocab_span(V)
    padded = torch.nn.functional.pad(logits.float(), (0, -V % kernels.BLOCK), value=-INF)
    tops = padded.view(n, -1, kernels.BLOCK).amax(-1)
    keep_all = torch.full((n,), -INF, device=DEVICE)
    everything, _ = sample(logits, *args, least=keep_all, tops=tops)
    assert torch.equal(everything, sample(logits, *args)[0])
    least = logits.float().topk(3).values[:, -1].contiguous()
    drawn, _ = sample(logits, *args, least=least, tops=tops)
    assert (logits.gather(1, drawn.long().unsqueeze(1)).squeeze(1) >= least).all()
    assert (drawn != everything).any() and torch.equal(table, drawn)
    top = logits.argmax(-1)
    assert (drawn != top).any(), "it draws"
