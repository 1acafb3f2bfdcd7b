"""Controls of rows of logits against transformers and plain arithmetic, and what is then drawn."""

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import sampling_oracle
import torch
import transformers
from draws import chi_square_p, metadata, take
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoints import with_rare
from nanovllm import SamplingParams
from nanovllm.layers.sampler import SamplingMetadata, sample_on_cpu
from nanovllm.sampling.controlled_sampler import (
    ControlledSampler,
    least_logits,
    process_logits,
)
from nanovllm.sampling.controls import NO_FILTERS, Controls, Reports
from nanovllm.sampling.logprobs import Logprobs, logprobs_of
from nanovllm.sampling.request_controls import token_mask

SEED = 11
IN_PROMPT = -(2**15)
INF = math.inf
ON_GPU = os.environ.get("TRITON_INTERPRET") != "1"  # where kernels run
KERNELS = pytest.param(True, marks=pytest.mark.gpu if ON_GPU else (), id="kernels")


def params_of(**options: Any) -> SamplingParams:
    """Parameters that draw, unless a temperature is given."""
    return SamplingParams(**{"temperature": 1.0, **options})


def make_controls(
    rows: Sequence[SamplingParams],
    vocab_size: int,
    *,
    edits: Sequence[Mapping[int, float] | list[tuple[int, float]]] | None = None,
    histories: Sequence[tuple[list[int], list[int]] | None] | None = None,
) -> Controls:
    """Controls laid out by hand, as `request_controls` gives them: greedy rows have no filters.

    Args:
        rows: filters, penalties, log-probabilities and allowed tokens are taken from these.
        edits: tokens and biases of each row.
        histories: prompt and output of each row whose counts begin anew; row i has slot i.
    """
    n = len(rows)
    pairs = [sorted(dict(row or {}).items() if isinstance(row, Mapping) else row)
             for row in edits or [{}] * n]  # fmt: skip
    flat = [pair for row in pairs for pair in row]
    masks, mask_rows = [], []
    for params in rows:
        mask = token_mask(params.allowed_token_ids, vocab_size)
        mask_rows.append(-1 if mask is None else len(masks))
        masks += [] if mask is None else [mask]
    known = [(slot, h) for slot, h in enumerate(histories or ()) if h is not None]
    counts = [
        (slot, token, output.count(token) + IN_PROMPT * (token in prompt))
        for slot, (prompt, output) in known
        for token in sorted({*prompt, *output})
    ]
    filters = [NO_FILTERS if p.is_greedy else (max(p.top_k, 0), p.top_p, p.min_p) for p in rows]
    top_k, top_p, min_p = zip(*filters, strict=True)
    return Controls(
        top_k=np.array(top_k, np.int32),
        top_p=np.array(top_p, np.float32),
        min_p=np.array(min_p, np.float32),
        penalties=np.array(
            [
                [p.repetition_penalty for p in rows],
                [p.presence_penalty for p in rows],
                [p.frequency_penalty for p in rows],
            ],
            np.float32,
        ),
        edit_starts=np.cumsum([0, *map(len, pairs)], dtype=np.int32),
        edit_tokens=np.array([token for token, _ in flat], np.int32),
        edit_biases=np.array([bias for _, bias in flat], np.float32),
        masks=np.array(masks, np.int32).reshape(-1, -(-vocab_size // 32)),
        mask_rows=np.array(mask_rows, np.int32),
        reset=np.array([slot for slot, _ in known], np.int32),
        counts=np.array(counts, np.int32).reshape(-1, 3).T,
        reports=Reports(
            num_logprobs=np.array(
                [-1 if p.logprobs is None else p.logprobs for p in rows], np.int32
            ),
            modes=np.zeros(n, np.int32),
            divisors=np.ones(n, np.float32),
            label_rows=np.zeros(0, np.int32),
            label_tokens=np.zeros(0, np.int32),
            masks=np.zeros(n, np.bool_),
        ),
    )


def temperatures_of(rows: Sequence[SamplingParams]) -> torch.Tensor:
    return torch.tensor([params.temperature for params in rows], dtype=torch.float32)


def filtered(logits: torch.Tensor, rows: Sequence[SamplingParams]) -> torch.Tensor:
    before = logits.clone()
    least = least_logits(logits, temperatures_of(rows), make_controls(rows, logits.shape[1]))
    assert torch.equal(logits, before), "the logits are the caller's"
    return logits.masked_fill(logits < least[:, None], -INF)


def draw(
    logits: torch.Tensor,
    data: SamplingMetadata,
    controls: Controls,
    sampler: ControlledSampler | None = None,
    by_kernels: bool = False,
) -> tuple[torch.Tensor, Logprobs | None]:
    """Tokens and log-probabilities, by a new sampler unless one is given."""
    n, V = logits.shape
    last_tokens = torch.full((max(n, int(data.slots.max()) + 1),), -1, dtype=torch.int32)
    sampler = sampler or ControlledSampler(V, n)
    if by_kernels:
        device = torch.device("cuda" if ON_GPU else "cpu")
        logits, last_tokens, *arrays = (
            x.contiguous().to(device) for x in (logits, last_tokens, *data)
        )
        data = SamplingMetadata(*arrays)
        counts = sampler._update_counts(device, controls) if controls.has_penalties else None
        drawn = sampler._on_gpu(logits, data, controls, last_tokens, counts).tokens
    else:
        drawn = sampler(logits, data, controls, last_tokens).tokens
    assert drawn.dtype == torch.int32 and drawn.shape == (n,)
    assert torch.equal(last_tokens[data.slots], drawn)
    most = min(int(controls.reports.num_logprobs.max()), V)
    return drawn.cpu(), None if most < 0 else logprobs_of(logits, drawn, most)


def survivors(row: torch.Tensor) -> set[int]:
    return set(torch.isfinite(row).nonzero().flatten().tolist())


# -- filters --------------------------------------------------------------------------------------

LOG_PROBS = [math.log(p) for p in (0.15, 0.5, 0.1, 0.25)]


@pytest.mark.parametrize(
    ("options", "want"),
    [
        ({}, {0, 1, 2, 3}),
        ({"top_k": 1}, {1}),
        ({"top_k": 3}, {0, 1, 3}),
        ({"top_k": 4}, {0, 1, 2, 3}),
        ({"top_k": 900}, {0, 1, 2, 3}),
        ({"top_k": -1}, {0, 1, 2, 3}),
        ({"top_p": 1e-9}, {1}),
        ({"top_p": 1e-46}, {1}),  # 0 in float32
        ({"top_p": 0.49}, {1}),
        ({"top_p": 0.51}, {1, 3}),
        ({"top_p": 0.89}, {0, 1, 3}),
        ({"top_p": 0.91}, {0, 1, 2, 3}),
        ({"min_p": 0.19}, {0, 1, 2, 3}),
        ({"min_p": 0.21}, {0, 1, 3}),
        ({"min_p": 0.49}, {1, 3}),
        ({"min_p": 1.0}, {1}),
        # The mass of top_p is over what is left: 0.66 of 0.75 ends before 0.5, 0.68 does not.
        ({"top_k": 2, "top_p": 0.66}, {1}),
        ({"top_k": 2, "top_p": 0.68}, {1, 3}),
        ({"min_p": 0.4, "top_p": 0.66}, {1}),
        ({"min_p": 0.4, "top_p": 0.68}, {1, 3}),
        ({"min_p": 0.25, "top_k": 2, "top_p": 0.99}, {1, 3}),
        # At temperature 0.5 the probabilities are as 9 : 100 : 4 : 25.
        ({"temperature": 0.5, "top_p": 0.71}, {1}),
        ({"temperature": 0.5, "top_p": 0.73}, {1, 3}),
        ({"temperature": 0.5, "min_p": 0.26}, {1}),
        ({"temperature": 0.5, "min_p": 0.24}, {1, 3}),
    ],
)
def test_filters_by_hand(options: dict[str, Any], want: set[int]) -> None:
    assert survivors(filtered(torch.tensor([LOG_PROBS]), [params_of(**options)])[0]) == want


@pytest.mark.parametrize(
    "options", [{"top_k": 3}, {"top_p": 0.2}, {"top_p": 0.5}, {"top_p": 0.75}, {"min_p": 1.0}]
)
def test_equally_likely_tokens_stay_or_go_together(options: dict[str, Any]) -> None:
    """Whether a token can come must not depend on its id."""
    logits = torch.tensor([[2.0, -INF, 2.0, 1.0, 2.0, -3.0, 2.0]])
    assert survivors(filtered(logits, [params_of(**options)])[0]) == {0, 2, 4, 6}


@pytest.mark.parametrize(
    "row",
    [
        [1e4, -1e4, 0.0, 1e4 - 1],
        [-INF, -1e4, -INF, -INF],
        [3e38, -3e38, 0.0, 1.0],
        [0.0, 0.0, 0.0, -INF],
    ],
    ids=["far apart", "one survivor", "the ends of float32", "ties"],
)
@pytest.mark.parametrize("temperature", [0.0, 1e-5, 0.1, 1.0, 10.0])
def test_extreme_logits(row: list[float], temperature: float) -> None:
    every: dict[str, Any] = {
        "top_k": [0, 1, 2, 4, 9],
        "top_p": [1e-9, 0.3, 1.0],
        "min_p": [0, 0.5, 1],
    }
    rows = [
        params_of(temperature=temperature, top_k=k, top_p=p, min_p=m)
        for k in every["top_k"]
        for p in every["top_p"]
        for m in every["min_p"]
    ]
    found = filtered(torch.tensor([row]).expand(len(rows), -1), rows)
    for params, out in zip(rows, found, strict=True):
        want = sampling_oracle.kept(torch.tensor(row).double().numpy(), params)
        assert not want.doubtful.any()
        assert survivors(out) == set(np.flatnonzero(want.mask)), params
    drawn, _ = draw(
        torch.tensor([row]).expand(len(rows), -1),
        metadata(temperatures_of(rows), [range(len(rows)), [5] * len(rows)], range(len(rows))),
        make_controls(rows, 4),
    )
    for params, out, token in zip(rows, found, drawn.tolist(), strict=True):
        assert token in survivors(out)
        assert not params.is_greedy or token == int(np.argmax(row))


FILTERS = {
    "temperature": st.sampled_from([0.0, 1e-6, 0.1, 0.5, 0.7, 1.0, 1.3, 3.0, 10.0]),
    "top_k": st.sampled_from([-1, 0, 1, 2, 3, 7, 30, 1000]),
    "top_p": st.one_of(st.sampled_from([1.0, 1e-9, 0.5, 0.999999]), st.floats(1e-3, 1.0)),
    "min_p": st.one_of(st.sampled_from([0.0, 1.0, 1e-9]), st.floats(0.0, 1.0)),
}
LOGITS = [
    st.floats(-12, 12, width=32),
    st.sampled_from([-2.0, -1.0, 0.0, 0.5, 1.0, 1.5]),  # ties
    st.sampled_from([1e4, -1e4, -INF, 0.0, 1.0, 9999.0]),
]


@st.composite
def batches(draw: Any) -> tuple[torch.Tensor, list[SamplingParams]]:
    """Logits [n, V], with a possible token in each row, and parameters of the rows."""
    n, V = draw(st.integers(1, 4)), draw(st.integers(1, 40))
    logits = [draw(st.lists(draw(st.sampled_from(LOGITS)), min_size=V, max_size=V))
              for _ in range(n)]  # fmt: skip
    for row in logits:
        row[draw(st.integers(0, V - 1))] = draw(st.floats(-5, 5, width=32))
    rows = draw(st.lists(st.fixed_dictionaries(FILTERS), min_size=n, max_size=n))
    return torch.tensor(logits, dtype=torch.float32), [SamplingParams(**row) for row in rows]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(batch=batches())
def test_filters_are_their_definitions(batch: tuple[torch.Tensor, list[SamplingParams]]) -> None:
    logits, rows = batch
    for row, out, params in zip(logits, filtered(*batch), rows, strict=True):
        want = sampling_oracle.kept(row.double().numpy(), params)
        sure = torch.from_numpy(~want.doubtful)
        expected = torch.where(torch.from_numpy(want.mask), row, -INF)
        assert torch.equal(out[sure], expected[sure]), params
        assert ((out == row) | (out == -INF)).all()
        assert out.max() == row.max(), "the most likely token is always left"


def randn(n: int, vocab_size: int, scale: float = 3.0) -> torch.Tensor:
    """Logits without ties."""
    logits = scale * torch.randn(n, vocab_size, generator=torch.Generator().manual_seed(SEED))
    logits += 1e-3 * logits.argsort().argsort()
    assert all(len(set(row.tolist())) == vocab_size for row in logits)
    return logits


def test_filters_are_those_of_transformers() -> None:
    """Without ties, in the same order: temperature, min_p, top_k, top_p."""
    print("seed", SEED)
    rng = np.random.default_rng(SEED)
    V, n = 300, 400
    logits = randn(n, V)
    rows = [
        params_of(
            temperature=float(rng.choice([0.1, 0.5, 0.8, 1.0, 2.0, 10.0])),
            top_k=int(rng.choice([0, 1, 2, 10, 50, 299, 300, 400])),
            top_p=float(rng.choice([1.0, 0.999, 0.95, 0.9, 0.5, 0.1, 1e-4])),
            min_p=float(rng.choice([0.0, 1.0, 0.5, 0.1, 0.01, 1e-4])),
        )
        for _ in range(n)
    ]
    found = filtered(logits, rows)
    sizes = set()
    for row, out, params in zip(logits, found, rows, strict=True):
        warpers = [
            transformers.TemperatureLogitsWarper(params.temperature),
            transformers.MinPLogitsWarper(float(np.float32(params.min_p))),
        ]
        if params.top_k:
            warpers.append(transformers.TopKLogitsWarper(params.top_k))
        warpers.append(transformers.TopPLogitsWarper(float(np.float32(params.top_p))))
        scores = row.double().unsqueeze(0)
        for warper in warpers:
            scores = warper(torch.zeros(1, 1, dtype=torch.long), scores)
        assert survivors(out) == survivors(scores[0]), params
        sizes.add(len(survivors(out)))
    assert {1, 2, 10, 50, V} <= sizes, "too few cases"


def test_a_row_is_filtered_without_regard_to_the_others() -> None:
    logits = randn(6, 60).round()  # with ties
    rows = [
        params_of(),
        params_of(top_k=3),
        params_of(top_p=0.5, temperature=3.0),
        params_of(temperature=0.0),
        params_of(min_p=0.2, temperature=0.3),
        params_of(top_k=1),
    ]
    together = filtered(logits, rows)
    for i, params in enumerate(rows):
        assert torch.equal(filtered(logits[i : i + 1], [params])[0], together[i])
    assert torch.equal(together[0], logits[0])


def test_only_what_top_p_looks_at_is_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, sort = [], torch.Tensor.sort
    monkeypatch.setattr(torch.Tensor, "sort", lambda x, **k: sizes.append(len(x)) or sort(x, **k))
    rows = [params_of(), params_of(top_k=3), params_of(min_p=0.1), params_of(top_k=5, top_p=0.5)]
    filtered(randn(4, 60), rows)
    assert sizes == [5]


# -- masks, edits and penalties -------------------------------------------------------------------


def process(
    logits: torch.Tensor, controls: Controls, sampler: ControlledSampler | None = None
) -> torch.Tensor:
    """Result of `process_logits` after the counts have been set."""
    n, V = logits.shape
    sampler = sampler or ControlledSampler(V, n)
    if controls.has_penalties:
        sampler._update_counts(logits.device, controls)
    before = logits.clone()
    out = process_logits(logits, torch.arange(n, dtype=torch.int32), controls, sampler.counts)
    assert torch.equal(logits.nan_to_num(), before.nan_to_num()), "the logits are the caller's"
    assert out.dtype == torch.float32
    return out


def assert_processed(found: torch.Tensor, want: np.ndarray) -> None:
    assert np.array_equal(found.isneginf().numpy(), np.isneginf(want))
    finite = np.isfinite(want)
    np.testing.assert_allclose(found.double().numpy()[finite], want[finite], rtol=1e-5, atol=1e-5)


@st.composite
def processing(draw: Any) -> Any:
    """Logits [n, V], and for each row parameters, prompt and output."""
    n, V = draw(st.integers(1, 4)), draw(st.integers(1, 70))
    tokens = st.integers(0, V - 1)
    logits = [draw(st.lists(draw(st.sampled_from(LOGITS)), min_size=V, max_size=V))
              for _ in range(n)]  # fmt: skip
    options = st.fixed_dictionaries(
        {},
        optional={
            "repetition_penalty": st.sampled_from([0.5, 1.1, 2.0, 1.7]),
            "presence_penalty": st.floats(-2, 2),
            "frequency_penalty": st.floats(-2, 2),
            "logit_bias": st.dictionaries(tokens, st.floats(-100, 100), min_size=1, max_size=5),
            "allowed_token_ids": st.lists(tokens, min_size=1, max_size=V),
        },
    )
    rows = [
        (
            SamplingParams(**draw(options)),
            draw(st.lists(tokens, min_size=1, max_size=12)),
            draw(st.lists(tokens, max_size=12)),
        )
        for _ in range(n)
    ]
    return torch.tensor(logits, dtype=torch.float32), rows


@settings(max_examples=100, deadline=None, derandomize=True)
@given(case=processing())
def test_logits_are_processed_as_written(case: Any) -> None:
    logits, rows = case
    controls = make_controls(
        [params for params, *_ in rows],
        logits.shape[1],
        edits=[params.logit_bias or {} for params, *_ in rows],
        histories=[history for _, *history in rows],
    )
    for row, out, (params, prompt, output) in zip(
        logits, process(logits, controls), rows, strict=True
    ):
        assert_processed(out, sampling_oracle.processed(row.tolist(), prompt, output, params))


def test_penalties_by_hand() -> None:
    """Repetition looks at prompt and output, the others at the output only, and at what is new."""
    logits = torch.tensor([[4.0, -4.0, 4.0, -4.0, 4.0, 0.0, -INF]])
    history = ([0, 1, 6, 0], [2, 3, 3, 3, 6])
    cases: dict[str, list[float]] = {
        "repetition_penalty": [2.0, -8.0, 2.0, -8.0, 4.0, 0.0, -INF],
        "presence_penalty": [4.0, -4.0, 2.0, -6.0, 4.0, 0.0, -INF],
        "frequency_penalty": [4.0, -4.0, 2.0, -10.0, 4.0, 0.0, -INF],
    }
    for name, want in cases.items():
        controls = make_controls([params_of(**{name: 2.0})], 7, histories=[history])
        assert process(logits, controls)[0].tolist() == want, name
    every = params_of(**dict.fromkeys(cases, 2.0))
    controls = make_controls([every], 7, histories=[history])
    assert process(logits, controls)[0].tolist() == [2.0, -8.0, -2.0, -16.0, 4.0, 0.0, -INF]


def test_bias_and_ban_come_before_the_penalties() -> None:
    """A bias that changes the sign of a logit changes what the penalty does to it."""
    params = params_of(repetition_penalty=2.0, allowed_token_ids=[0, 1, 2])
    edits = [(0, 5.0), (1, -5.0), (2, 1.0), (2, 2.0), (2, -INF), (3, 50.0)]
    controls = make_controls([params], 4, edits=[edits], histories=[([0, 1, 2, 3], [])])
    found = process(torch.tensor([[-3.0, 3.0, 1.0, 1.0]]), controls)
    assert found[0].tolist() == [1.0, -4.0, -INF, -INF]


@pytest.mark.parametrize("vocab_size", [31, 32, 33, 64, 100])
def test_masks_of_some_rows(vocab_size: int) -> None:
    """Bits beyond the vocabulary are nobody's, and rows without a mask keep everything."""
    allowed = [None, [0], [vocab_size - 1], None, list(range(0, vocab_size, 3))]
    logits = randn(5, vocab_size)
    controls = make_controls([params_of(allowed_token_ids=a) for a in allowed], vocab_size)
    for row, out, tokens in zip(logits, process(logits, controls), allowed, strict=True):
        left = survivors(out)
        assert left == set(range(vocab_size) if tokens is None else tokens)
        assert all(out[i] == row[i] for i in left)


def test_processing_is_that_of_transformers() -> None:
    print("seed", SEED)
    rng = np.random.default_rng(SEED)
    V, n, num_prompt, min_tokens = 90, 60, 7, 5
    logits = randn(n, V)
    rows, edits, histories, want = [], [], [], []
    for row in logits:
        prompt = rng.integers(0, V, num_prompt).tolist()
        output = rng.integers(0, V, rng.integers(0, 10)).tolist()
        penalty, bias = float(rng.choice([0.7, 1.2, 3.0])), {
            int(token): float(rng.normal(0, 5)) for token in rng.choice(V, 6, replace=False)
        }  # fmt: skip
        bad, stops = [int(i) for i in rng.choice(V, 2)], [int(i) for i in rng.choice(V, 2)]
        ids, scores = torch.tensor([prompt + output]), row.double().unsqueeze(0)
        for processor in (
            transformers.SuppressTokensLogitsProcessor(bad),
            transformers.MinNewTokensLengthLogitsProcessor(num_prompt, min_tokens, stops),
            transformers.SequenceBiasLogitsProcessor([[[k], v] for k, v in bias.items()]),
            transformers.RepetitionPenaltyLogitsProcessor(penalty),
        ):
            scores = processor(ids, scores)
        want.append(scores[0].numpy())
        rows.append(params_of(repetition_penalty=penalty))
        banned = bad + (stops if len(output) < min_tokens else [])
        edits.append([*bias.items(), *((token, -INF) for token in banned)])
        histories.append((prompt, output))
    controls = make_controls(rows, V, edits=edits, histories=histories)
    for found, expected in zip(process(logits, controls), want, strict=True):
        assert_processed(found, expected)


def test_logits_of_16_bits_are_processed_in_32() -> None:
    logits = randn(2, 50).bfloat16()
    params = params_of(repetition_penalty=1.01, frequency_penalty=0.001)
    controls = make_controls([params] * 2, 50, histories=[([1, 2], [3] * 5), ([4], [5, 6])])
    assert torch.equal(process(logits, controls), process(logits.float(), controls))


# -- draws ----------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("by_kernels", [False, KERNELS])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_ban_wins_over_infinity_and_nan_is_never_drawn(
    temperature: float, by_kernels: bool
) -> None:
    n, row = 10, [INF, 0.0, math.nan, 1.0, math.nan]
    rows = [params_of(temperature=temperature, **({"min_p": 0.1} if i % 2 else {}))
            for i in range(n)]  # fmt: skip
    controls = make_controls(rows, 5, edits=[{0: -INF, 4: 3.0}] * n)
    data = metadata(temperature, [[4] * n, range(n)], range(n))
    drawn, _ = draw(torch.tensor([row] * n), data, controls, by_kernels=by_kernels)
    assert set(drawn.tolist()) == ({1, 3} if temperature else {3})
    found = process(torch.tensor([row]), make_controls([params_of()], 5, edits=[{0: -INF}]))
    assert found[0].tolist() == [-INF, 0.0, -INF, 1.0, -INF]


@pytest.mark.parametrize("by_kernels", [False, KERNELS])
def test_what_is_left_is_drawn_by_the_same_noise(by_kernels: bool) -> None:
    """A draw without filters that they would have left is also the draw with them: with the same
    seed, a control that does not act changes nothing. Every other draw is of what is left. (For
    the kernels if all is one span: else fewer tokens in one make others likelier.)
    """
    n, V = (21, 16) if by_kernels else (300, 80)
    logits = randn(n, V, 1.5)
    kinds = [
        params_of(**options)
        for options in (
            {"top_k": 8}, {"top_p": 0.6}, {"min_p": 0.2, "temperature": 0.7}, {}, {"top_k": 1},
            {"top_k": 500}, {"temperature": 0.0},
        )
    ]  # fmt: skip
    rows = [kinds[i % len(kinds)] for i in range(n)]
    keys = np.random.default_rng(SEED).integers(0, 2**32, (2, n), np.uint32)
    data = metadata(temperatures_of(rows), keys, torch.arange(n) % 50)
    plain, _ = draw(logits, data, make_controls([params_of()] * n, V), by_kernels=by_kernels)
    if not by_kernels:
        assert torch.equal(plain, sample_on_cpu(logits, data, range(V), V)[0])
    drawn, logprobs = draw(logits, data, make_controls(rows, V), by_kernels=by_kernels)
    assert logprobs is None
    num_changed = 0
    for i, params in enumerate(rows):
        left = np.flatnonzero(sampling_oracle.kept(logits[i].double().numpy(), params).mask)
        assert drawn[i] in left
        if plain[i] in left:
            assert drawn[i] == plain[i]
        num_changed += int(drawn[i] != plain[i])
    assert n / 6 < num_changed < 5 * n / 6
    for i in range(0, n, 37):
        one = torch.tensor([i])
        alone = take(data, one)._replace(slots=torch.zeros(1, dtype=torch.int32))
        again, _ = draw(logits[one], alone, make_controls([rows[i]], V), by_kernels=by_kernels)
        assert again.tolist() == [drawn[i]]


DRAWN = {
    "top_k": {"top_k": 6},
    "top_p": {"top_p": 0.8, "temperature": 1.5},
    "min_p": {"min_p": 0.15, "temperature": 0.8},
    "all": {
        "top_k": 20, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.4,
        "presence_penalty": 0.5, "frequency_penalty": -0.3, "temperature": 1.3,
        "logit_bias": {3: 2.0, 8: -1.0}, "allowed_token_ids": list(range(35)),
    },
}  # fmt: skip


@pytest.mark.parametrize("by_kernels", [False, pytest.param(True, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", with_rare(DRAWN, "top_k", "top_p", "min_p"))
def test_draws_follow_what_is_left_of_the_softmax(name: str, by_kernels: bool) -> None:
    """Chi-square over 5,000 draws: first tokens of as many requests."""
    n, V = 5_000, 40
    params, history = params_of(**DRAWN[name]), ([1, 2, 3, 20], [2, 5, 5, 7])
    logits = 1.3 * torch.randn(1, V, generator=torch.Generator().manual_seed(SEED))
    logits[0, 10:13] = logits[0].max() - 0.5  # ties
    data = metadata(params.temperature, [[6] * n, range(n)], [9] * n)
    controls = make_controls(
        [params] * n, V, edits=[params.logit_bias or {}] * n, histories=[history] * n
    )
    drawn, _ = draw(logits.expand(n, V), data, controls, by_kernels=by_kernels)
    probs = sampling_oracle.probabilities(
        sampling_oracle.processed(logits[0].tolist(), *history, params), params
    )
    p = chi_square_p(drawn.tolist(), probs)
    print("p", p, "tokens left", (probs > 0).sum())
    assert p > 1e-3
    assert 4 < (probs > 0).sum() < 30
    assert set(drawn.tolist()) == set(np.flatnonzero(probs * n > 20)) | (
        set(drawn.tolist()) & set(np.flatnonzero(probs > 0))
    )
    unfiltered = (logits[0].double() / params.temperature).softmax(-1).numpy()
    assert chi_square_p(drawn.tolist(), unfiltered) < 1e-6, "the test cannot tell them apart"


# -- counts from step to step ---------------------------------------------------------------------


def greedy_step(
    sampler: ControlledSampler,
    logits: torch.Tensor,
    rows: list[SamplingParams],
    slots: list[int],
    histories: dict[int, tuple[list[int], list[int]]],
) -> list[int]:
    """Tokens of rows in these slots; `histories` are those that begin anew."""
    controls = make_controls(
        rows, logits.shape[1], histories=[histories.get(i) for i in range(max(slots) + 1)]
    )
    n = len(rows)
    data = metadata([0.0] * n, [[1] * n, [2] * n], [3] * n)
    data = data._replace(slots=torch.tensor(slots, dtype=torch.int32))
    drawn, _ = draw(logits, data, controls, sampler)
    return drawn.tolist()


def test_tokens_are_counted_as_they_are_drawn() -> None:
    """Rows come in any order and not in every step, share steps with rows that have no penalties,
    and give their slots away; the table follows, without being told the tokens.
    """
    print("seed", SEED)
    rng = np.random.default_rng(SEED)
    V, num_slots = 12, 5
    sampler = ControlledSampler(V, num_slots)
    kinds = [
        SamplingParams(temperature=0, repetition_penalty=1.5),
        SamplingParams(temperature=0, presence_penalty=1.2),
        SamplingParams(temperature=0, frequency_penalty=0.4),
        SamplingParams(temperature=0, repetition_penalty=0.8, frequency_penalty=2.0),
        SamplingParams(temperature=0),
    ]
    assert sampler.counts is None, "the table is made when it is needed"
    seqs: dict[int, tuple[SamplingParams, list[int], list[int]]] = {}
    num_resets = 0
    for _ in range(150):
        slots = rng.permutation(num_slots)[: rng.integers(1, num_slots + 1)].tolist()
        fresh = [slot for slot in slots if slot not in seqs or rng.random() < 0.06]
        for slot in fresh:
            prompt, output = (rng.integers(0, V, rng.integers(0, 5)).tolist() for _ in range(2))
            seqs[slot] = (kinds[rng.integers(len(kinds))], [0, *prompt], output)
        # Those without penalties need no counts. The table may have anything for them.
        fresh = [slot for slot in fresh if seqs[slot][0] is not kinds[-1]]
        num_resets += len(fresh)
        rows = [seqs[slot][0] for slot in slots]
        logits = torch.from_numpy(rng.normal(0, 2, (len(slots), V)).astype(np.float32))
        drawn = greedy_step(sampler, logits, rows, slots, {slot: seqs[slot][1:] for slot in fresh})
        for row, slot, token in zip(logits.tolist(), slots, drawn, strict=True):
            params, prompt, output = seqs[slot]
            want = sampling_oracle.processed(row, prompt, output, params)
            assert token == int(want.argmax())
            output.append(token)
    assert num_resets > 20
    assert sampler.counts is not None and sampler.counts.shape == (num_slots, V)


@pytest.mark.parametrize("by_kernels", [False, KERNELS])
def test_a_greedy_step_by_hand(by_kernels: bool) -> None:
    """Each control takes the best token away in one row, and tokens are counted."""
    options: list[dict[str, Any]] = [
        {},
        {"repetition_penalty": 4.0},
        {"presence_penalty": 2.0},
        {"frequency_penalty": 1.0},
        {"allowed_token_ids": [2, 3]},
        {},
    ]
    rows = [params_of(temperature=0.0, **own) for own in options]
    histories = [([0, 1], [0, 0])] * 6
    controls = make_controls(rows, 4, edits=[{}] * 5 + [{0: -1.5}], histories=histories)
    sampler, data = ControlledSampler(4, 6), metadata(0.0, [[1] * 6] * 2, [4] * 6)
    logits = torch.tensor([[4.0, 3.0, 2.5, 0.5]]).expand(6, 4)
    drawn, _ = draw(logits, data, controls, sampler, by_kernels)
    assert drawn.tolist() == [0, 2, 1, 1, 2, 1]
    assert sampler.counts is not None
    counts = torch.tensor([[2, 0, 0, 0]] * 6, dtype=torch.int16)
    counts[torch.arange(6), drawn] += 1
    counts[:, :2] += IN_PROMPT
    assert torch.equal(sampler.counts.cpu(), counts)


def test_counts_end_at_their_type() -> None:
    """32,767 times is as often as can be counted: one more must not look like a prompt's token."""
    sampler = ControlledSampler(3, 1)
    params = SamplingParams(temperature=0, frequency_penalty=1e-4)
    logits = torch.tensor([[0.0, 50.0, 0.0]])
    for prompt in ([2], [1]):
        history = (prompt, [1] * 32_765)
        assert [
            greedy_step(sampler, logits, [params], [0], {0: history} if i == 0 else {})[0]
            for i in range(5)
        ] == [1] * 5
        assert sampler.counts is not None
        own = int(sampler.counts[0, 1])
        assert own == (32_767 if prompt == [2] else -1)
        controls = make_controls([params], 3)
        found = process_logits(logits, torch.zeros(1, dtype=torch.int32), controls, sampler.counts)
        assert found[0, 1] == pytest.approx(50 - 3.2767)


# -- log-probabilities ----------------------------------------------------------------------------


def softmax_by_hand(row: torch.Tensor) -> np.ndarray:
    values = row.double().numpy()
    return values - values.max() - math.log(math.fsum(np.exp(values - values.max())))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_logprobs", [0, 1, 5, 20, 30])
def test_log_probabilities(num_logprobs: int, dtype: torch.dtype) -> None:
    """The drawn token first, then the most likely ones, as many as there are."""
    n, V = 40, 25
    logits = randn(n, V, 5.0).to(dtype)
    logits[0] = 1e4 * torch.arange(V)
    logits[1, 3:] = -INF
    tokens = torch.arange(n, dtype=torch.int32) % V
    tokens[1] = 2
    found = logprobs_of(logits, tokens, num_logprobs)
    width = 1 + min(num_logprobs, V)
    assert found.token_ids.dtype == found.ranks.dtype == torch.int32
    assert found.values.dtype == torch.float32
    assert found.token_ids.shape == found.values.shape == (n, width)
    assert found.token_ids[:, 0].tolist() == tokens.tolist()
    parts = found.token_ids, found.values, found.ranks
    for row, token, ids, values, rank in zip(logits, tokens, *parts, strict=True):
        want = softmax_by_hand(row)
        with np.errstate(invalid="ignore"):
            np.testing.assert_allclose(values.numpy(), want[ids.numpy()], atol=2e-5, rtol=1e-6)
        np.testing.assert_array_equal(want[ids[1:].numpy()], np.sort(want)[::-1][: width - 1])
        assert len(set(ids[1:].tolist())) == width - 1
        assert rank == 1 + sum(value > want[token] for value in want)


def test_log_probabilities_beside_nan_are_nan() -> None:
    """None is right then: the softmax is of all logits."""
    logits = randn(3, 25, 5.0)
    logits[1, 7] = torch.nan
    values = logprobs_of(logits, torch.tensor([1, 2, 3]).int(), 5).values
    assert values.isnan().all(1).tolist() == values.isnan().any(1).tolist() == [False, True, False]


def test_equally_likely_tokens_have_the_same_rank() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 1.0, 0.0, -INF]]).expand(6, 6)
    assert logprobs_of(logits, torch.arange(6).int(), 0).ranks.tolist() == [3, 1, 1, 3, 5, 6]


def test_what_is_a_little_larger_ranks_before() -> None:
    """Also if the log-probabilities are rounded to the same."""
    logits = torch.tensor([[1e-8, 2e-8, 10.0, 0.0]]).expand(4, 4)
    found = logprobs_of(logits, torch.arange(4).int(), 4)
    assert found.ranks.tolist() == [3, 2, 1, 4]
    assert found.token_ids[:, 1:].tolist() == [[2, 1, 0, 3]] * 4
    assert found.values[0, 0] == found.values[1, 0], "the test cannot tell them apart"


def test_log_probabilities_are_of_the_logits_before_everything() -> None:
    """Controls that leave one token do not make it certain."""
    V = 30
    rows = [
        params_of(logprobs=2, allowed_token_ids=[7], temperature=0.3),
        params_of(logprobs=0, top_k=1),
        params_of(temperature=0.0, logprobs=4),
        params_of(repetition_penalty=2.0, min_p=1.0),
    ]
    logits = randn(4, V)
    controls = make_controls(rows, V, edits=[{}, {3: 99.0}, {}, {}], histories=[([1], [2])] * 4)
    data = metadata(temperatures_of(rows), [[1] * 4, range(4)], [5] * 4)
    drawn, logprobs = draw(logits, data, controls)
    assert drawn[:2].tolist() == [7, 3]
    assert logprobs is not None
    assert logprobs.token_ids.shape == (4, 5), "as many as the row that wants the most"
    for row, token, values in zip(logits, drawn.tolist(), logprobs.values, strict=True):
        assert values[0] == pytest.approx(softmax_by_hand(row)[token], abs=1e-5)
        assert values[1] == pytest.approx(softmax_by_hand(row).max(), abs=1e-5)
