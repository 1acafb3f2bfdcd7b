"""Sampling: the right distribution, and draws that depend on request, position and seed alone."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from draws import chi_square_p, metadata, take
from modes import Mode, in_every_mode, run_in

from checkpoints import SMALL, make_checkpoint, rare, tokens
from nanovllm import LLM, SamplingParams
from nanovllm.distributed.group import Group
from nanovllm.layers.sampler import Sampler, SamplingMetadata, sample_on_cpu
from nanovllm.sampling_params import NO_TOKEN

SEED = 3


def make_logits(n: int, vocab_size: int) -> torch.Tensor:
    return torch.randn(n, vocab_size, generator=torch.Generator().manual_seed(SEED))


def draw(logits: torch.Tensor, data: SamplingMetadata) -> torch.Tensor:
    V = logits.shape[1]
    return sample_on_cpu(logits, data, range(V), V)[0]


def test_below_1e_5_the_first_largest_logit_is_taken() -> None:
    """Defect 17: temperature 0 was refused; a tiny one must not divide into infinities."""
    temperatures = [0.0, 1e-9, 1e-30, *[9.9e-6] * 20]
    n = len(temperatures)
    logits = make_logits(n, 50)
    logits[:, [7, 20, 49]] = 9.0
    before = logits.clone()
    data = metadata(temperatures, [[1] * n, range(n)], range(n))
    table = torch.full((n,), -1, dtype=torch.int32)
    drawn = Sampler(50, Group())(logits, data, table)
    assert drawn.dtype == torch.int32
    assert drawn.tolist() == [7] * n
    assert torch.equal(logits, before), "the logits are the caller's"
    assert Sampler(50, Group())(logits.bfloat16(), data, table).tolist() == [7] * n
    assert table.tolist() == [7] * n
    assert len(set(draw(logits, data._replace(temperatures=torch.full((n,), 1e-5))).tolist())) == 3


def test_a_row_with_nan_has_no_token_and_infinity_is_always_drawn() -> None:
    """NaN was token 0, or passed over. The table has 0 for the step that is launched already."""
    logits = make_logits(80, 40)
    logits[:20] = torch.nan
    logits[20:40, 5] = torch.nan
    logits[40:60, 37] = torch.inf
    logits[60:] = -torch.inf
    logits[30:40, 7] = torch.inf
    table = torch.full((80,), -5, dtype=torch.int32)
    for temperature in (0.0, 1.0):
        data = metadata(temperature, [[1] * 80, range(80)], range(80))
        drawn = Sampler(40, Group())(logits, data._replace(slots=torch.arange(80)), table)
        assert drawn.tolist() == [NO_TOKEN] * 40 + [37] * 20 + [0] * 20
        assert table.tolist() == [0] * 40 + [37] * 20 + [0] * 20


def test_a_row_is_drawn_without_regard_to_the_others() -> None:
    n, generator = 200, torch.Generator().manual_seed(SEED)
    logits = make_logits(n, 100)
    keys = np.random.default_rng(SEED).integers(0, 2**32, (2, n), np.uint32)
    data = metadata(torch.linspace(0, 2, n), keys, torch.arange(n) % 7)
    drawn = draw(logits, data)
    for rows in (torch.randperm(n, generator=generator), torch.arange(0, n, 3), torch.tensor([5])):
        assert torch.equal(draw(logits[rows], take(data, rows)), drawn[rows])


@pytest.mark.parametrize("vary", ["position", "first word", "second word", "swapped words"])
def test_other_positions_and_keys_draw_otherwise(vary: str) -> None:
    """All rows have the same flat logits: what is drawn is the noise, and 1 in 1,000 are alike."""
    n, V = 100, 1 << 16
    fixed, counted = np.full(n, 2**31 + 5), np.arange(n)
    keys = {"first word": (counted, fixed), "second word": (fixed, counted)}.get(vary)
    data = metadata(1.0, keys or (fixed, fixed + 1), counted if vary == "position" else fixed % 9)
    if vary == "swapped words":
        n, data = 2, metadata(1.0, [[1, 2], [2, 1]], [4, 4])
    drawn = [int(draw(torch.zeros(1, V), take(data, torch.tensor([i])))) for i in range(n)]
    assert len(set(drawn)) >= 0.99 * n


@pytest.mark.parametrize("temperature", [0.7, rare(1.5)])
@pytest.mark.parametrize("by", [rare("position"), "request"])
def test_draws_follow_the_softmax(by: str, temperature: float) -> None:
    """Chi-square over 20,000 draws, by the positions of one request and by first tokens of many."""
    n, V = 20_000, 40
    logits = 2 * make_logits(1, V)
    logits[0, 10:15] = logits[0].max() - 0.5  # ties
    logits[0, 20:30] = -torch.inf
    counted, fixed = np.arange(n), np.full(n, 6)
    positions, ids = (counted, fixed) if by == "position" else (fixed, counted)
    drawn = draw(logits.expand(n, V), metadata(temperature, [fixed, ids], positions))
    probs = (logits[0].double() / temperature).softmax(-1).numpy()
    p = chi_square_p(drawn.tolist(), probs)
    print("p", p)
    assert p > 1e-3
    assert not set(drawn.tolist()) & set(range(20, 30)), "an impossible token was drawn"
    wrong = (logits[0].double() / temperature / 1.1).softmax(-1).numpy()
    assert chi_square_p(drawn.tolist(), wrong) < 1e-6, "the test cannot tell distributions apart"


# -- in the engine --------------------------------------------------------------------------------

PROMPTS = [[5, 77, 33], [9] * 20, [1, 2, 3, 4], [100], list(range(60)), [8] * 20]
PARAMS = [
    SamplingParams(temperature=t, max_tokens=n)
    for t, n in ((1.0, 40), (0.7, 30), (0.0, 25), (1.5, 40), (1.0, 20), (1.0, 40))
]


@pytest.fixture(scope="module")
def flat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose distributions leave much to chance."""
    return make_checkpoint(tmp_path_factory.mktemp("flat") / "qwen3", initializer_range=0.15)


def run(model: Path, **options: Any) -> tuple[list[list[int]], dict[str, Any]]:
    with LLM(model, **{**SMALL, **options}) as llm:
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        return tokens(outputs), llm.metrics()


@pytest.fixture(scope="module")
def alone(flat: Path) -> list[list[int]]:
    """Each request by itself, under the id that it has in a batch."""
    with LLM(flat, **SMALL) as llm:
        requests = zip(PROMPTS, PARAMS, strict=True)
        return [llm.generate(*request, use_tqdm=False)[0]["token_ids"] for request in requests]


@in_every_mode("chunks", "chunks-of-7-overlap", "large-blocks", "small-pool-overlap")
def test_a_request_draws_the_same_whatever_runs_beside_it(
    flat: Path, alone: list[list[int]], mode: Mode
) -> None:
    assert all(len(set(drawn)) > 8 for drawn in alone), "nothing was left to chance"
    outputs, _ = run_in(mode, flat, PROMPTS, PARAMS)
    assert tokens(outputs) == alone


def test_another_seed_draws_otherwise(flat: Path, alone: list[list[int]]) -> None:
    assert run(flat, seed=0)[0] == alone
    for seed in (1, 2**64 - 1):
        drawn, _ = run(flat, seed=seed)
        assert [a == b for a, b in zip(drawn, alone, strict=True)] == [
            params.temperature == 0 for params in PARAMS
        ]


def test_equal_requests_draw_differently(flat: Path) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=10)
    with LLM(flat, **SMALL) as llm:
        outputs = llm.generate([PROMPTS[0]] * 8, params, use_tqdm=False)
        outputs += llm.generate([PROMPTS[0]] * 8, params, use_tqdm=False)
    assert len({tuple(drawn) for drawn in tokens(outputs)}) == 16
