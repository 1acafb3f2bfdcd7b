"""Reports on draws in the whole engine: log-probabilities in each mode, masks and labels.

What they should be comes from `sampling_oracle.py`, place by place along the tokens that the engine
has drawn: transformers gives the logits, the rest is arithmetic in float64.
"""

import asyncio
import dataclasses
import io
import json
import pickle
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draws import interpreted
from modes import Mode, in_every_mode, run_in
from sampling_oracle import Oracle, kept, processed, reported

from checkpoints import (
    SMALL,
    TINY,
    assert_idle,
    edit_json,
    make_checkpoint,
    outputs_of,
    rare,
)
from nanovllm import (
    LLM,
    AsyncLLM,
    BeamSearchParams,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
)
from nanovllm.batch import Generate, read_rows
from nanovllm.batch import run as run_rows
from nanovllm.outputs import CompletionOutput
from nanovllm.sampling import controlled_sampler, extra_results, logprobs, reporting
from nanovllm.sampling.control_table import ControlTable
from nanovllm.sampling.extras import Extras
from nanovllm.sampling_params import LOGPROBS_MODES
from nanovllm.token_sets import TokenSets, pack

VOCAB = 131  # the last of two ranks has fewer tokens
EOS = [7, 60]
SEED = 23
Request = tuple[list[int], SamplingParams]

CONTROLS: list[dict[str, Any]] = [
    {},
    {"top_k": 9},
    {"top_p": 0.7},
    {"min_p": 0.15},
    {"top_k": 40, "top_p": 0.9, "min_p": 0.01},
    {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.7},
    {"logit_bias": {3: 4.0, 11: -7.5, 60: 3.0}, "top_k": 5},
    {"allowed_token_ids": [*range(5, 100, 2)], "top_p": 0.8, "frequency_penalty": 0.3},
    {"min_tokens": 6, "stop_token_ids": [*range(50, 90)]},
    {"min_tokens": 4, "min_p": 0.05, "logit_bias": {7: 9.0}},
]
WANTED: list[dict[str, Any]] = [
    {"logprobs": 0},
    {"logprobs": 0},
    {"logprobs": 4},
    {"logprobs": 20},
    {"logprob_token_ids": [60, 7, 3, 11]},
    {"logprob_token_ids": [*range(0, VOCAB, 2)], "logprobs": 0},
    {},
]


def random_requests(count: int, seed: int) -> list[Request]:
    """Requests of all kinds, side by side; equal temperatures, modes and controls meet often."""
    print("seed", seed)
    rng = random.Random(seed)
    requests = []
    for i in range(count):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.choice([1, 3, 17, 40]))]
        options: dict[str, Any] = {
            "temperature": [0.0, 0.7, 1.0, 1.5][i % 4],
            "logprobs_mode": [None, *LOGPROBS_MODES][i // 4 % 4],
            "max_tokens": rng.choice([6, 12, 25]),
            "return_sampling_mask": rng.random() < 0.5,
            "seed": seed + i,
            **rng.choice(CONTROLS),
            **rng.choice(WANTED),
        }
        if options["temperature"] and rng.random() < 0.2:
            options["n"] = 3
        requests.append((prompt, SamplingParams(**options)))
    return requests


REQUESTS = random_requests(64, SEED)
FEW = [(prompt, dataclasses.replace(params, max_tokens=6)) for prompt, params in REQUESTS[1::7]]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose distributions leave much to chance."""
    path = tmp_path_factory.mktemp("reports") / "qwen3"
    make_checkpoint(path, seed=6, vocab_size=VOCAB, initializer_range=0.18)
    edit_json(path / "generation_config.json", eos_token_id=EOS)
    return path


@pytest.fixture(scope="module")
def oracle(path: Path) -> Oracle:
    return Oracle(path, EOS, SMALL["max_model_len"])


class Checker:
    """Compares completions with the oracle.

    Args:
        oracle: source of the logits.
        mode: the engine's `logprobs_mode`.

    Attributes:
        counts: how often what was compared.
    """

    def __init__(self, oracle: Oracle, mode: str = LOGPROBS_MODES[0]) -> None:
        self._oracle, self._mode = oracle, mode
        self.counts: Counter[Any] = Counter()

    def check(self, found: CompletionOutput, prompt: list[int], params: SamplingParams) -> None:
        """All that a completion reports."""
        tokens, mode = found.token_ids, params.logprobs_mode or self._mode
        is_silent = params.logprobs is None and params.logprob_token_ids is None
        assert tokens and (found.logprobs is None) == is_silent == (
            found.cumulative_logprob is None
        )
        assert (found.sampling_mask is None) != params.return_sampling_mask
        for part in (found.logprobs, found.sampling_mask):
            assert part is None or len(part) == len(tokens)
        total = 0.0
        self._oracle.read([*prompt, *tokens[:-1]])
        for i, token in enumerate(tokens):
            logits = self._oracle.logits([*prompt, *tokens[:i]])
            values = processed(logits, prompt, tokens[:i], params, EOS)
            left = kept(values, params)
            assert left.mask[token] or left.doubtful[token]
            if found.logprobs is not None:
                want = reported(logits, values, params, mode)
                self._check_place(found.logprobs[i], token, want, params)
                total += found.logprobs[i][token].logprob
                self.counts[mode, params.temperature] += 1
            if found.sampling_mask is not None:
                self._check_mask(found.sampling_mask[i], left)
        assert is_silent or found.cumulative_logprob == pytest.approx(total, abs=1e-9)

    def _check_place(
        self, place: dict[int, Any], token: int, want: np.ndarray, params: SamplingParams
    ) -> None:
        order = (-want).argsort(kind="stable").tolist()
        labels = params.logprob_token_ids
        best = [other for other in order[: params.logprobs or 0] if want[other] > -np.inf]
        others = best if labels is None else dict.fromkeys(labels)
        assert list(place) == [token, *(other for other in others if other != token)]
        for other, item in place.items():
            assert item.logprob == pytest.approx(want[other], abs=1e-4)
            has_rank = labels is None or other == token
            assert item.rank == (1 + int((want > want[other]).sum()) if has_rank else None)
            self.counts["-inf"] += item.logprob == -np.inf
        self.counts["short"] += len(best) < (params.logprobs or 0)

    def _check_mask(self, mask: list[int] | None, left: Any) -> None:
        size = len(left.mask)
        found = np.zeros(size, np.bool_)
        found[[*range(size)] if mask is None else mask] = True
        assert mask is None or mask == sorted(set(mask))
        assert mask is None or len(mask) < size
        assert (found == left.mask)[~left.doubtful].all()
        self.counts["all" if mask is None else "mask"] += 1

    def check_all(self, outputs: list[Any], requests: list[Request]) -> None:
        """The outputs of requests."""
        for output, (prompt, params) in zip(outputs, requests, strict=True):
            assert len(output.outputs) == params.n
            for completion in output.outputs:
                self.check(completion, prompt, params)

    def assert_various(self) -> None:
        """All kinds have been there."""
        kinds = [(mode, T) for mode in LOGPROBS_MODES for T in (0.0, 0.7, 1.0, 1.5)]
        kinds += ["-inf", "short", "all", "mask"]
        assert all(self.counts[kind] > 5 for kind in kinds), self.counts


def run(llm: LLM, requests: list[Request]) -> list[Any]:
    prompts, params = zip(*requests, strict=True)
    return outputs_of(llm, prompts, params)


# -- everything in every mode of the engine -------------------------------------------------------


@in_every_mode("chunks-of-7-overlap", "small-pool-overlap")
def test_reports_are_those_of_the_oracle(path: Path, oracle: Oracle, mode: Mode) -> None:
    prompts, params = zip(*REQUESTS, strict=True)
    outputs, metrics = run_in(mode, path, prompts, params)
    preempted = [output.metrics.num_preemptions for output in outputs]
    assert sum(preempted) > 0 or not mode.preempts
    assert metrics["num_preemptions"] == sum(preempted)
    checker = Checker(oracle)
    checker.check_all(outputs, REQUESTS)
    checker.assert_various()


@pytest.mark.parametrize("engine_mode", [LOGPROBS_MODES[1], rare(LOGPROBS_MODES[2])])
def test_the_engine_has_a_mode_for_those_that_name_none(
    engine_mode: str, path: Path, oracle: Oracle
) -> None:
    """Prompts, scores and beams stay the model's own."""
    requests = [
        ([5, 77], SamplingParams(0.7, 9, seed=1, top_k=4, logprobs=2, prompt_logprobs=1)),
        ([5, 77], SamplingParams(0.7, 9, seed=1, logprobs=0)),
        ([5, 77], SamplingParams(0.7, 9, seed=1, logprobs=0, logprobs_mode="raw_logprobs")),
        ([9], SamplingParams(1.5, 9, seed=2, logprobs=0, logprobs_mode="processed_logprobs")),
    ]
    with LLM(path, logprobs_mode=engine_mode, **SMALL) as llm, LLM(path, **SMALL) as plain:
        outputs = run(llm, requests)
        texts, beams = [[5, 77, 33], [9] * 20], BeamSearchParams(3, 6)
        assert llm.score(texts, use_tqdm=False) == plain.score(texts, use_tqdm=False)
        assert llm.beam_search(texts, beams) == plain.beam_search(texts, beams)
    Checker(oracle, engine_mode).check_all(outputs, requests)
    logits = oracle.logits([5])
    place = outputs[0].prompt_logprobs[1]
    assert place[77].logprob == pytest.approx(logits[77] - np.logaddexp.reduce(logits), abs=1e-4)


@pytest.mark.parametrize(
    ("ranks", "overlap"), [("threads", True), rare("threads", False), rare("processes", True)]
)
@pytest.mark.usefixtures("low_guesses")
def test_of_several_ranks(
    ranks: str, overlap: bool, path: Path, oracle: Oracle, request: pytest.FixtureRequest
) -> None:
    """Whether a step needs the logits of all ranks is known to each of them."""
    if ranks == "threads":
        request.getfixturevalue("threads")
    options = {**SMALL, "num_kvcache_blocks": 9, "max_num_batched_tokens": 24}
    bans = SamplingParams(0.7, 9, min_tokens=9, logprobs=0, logprobs_mode="temperature_logprobs")
    with LLM(path, tensor_parallel_size=2, overlap=overlap, **options) as llm:
        alone = run(llm, [([5], bans)])  # first with controls, whose row no other is beside
        outputs = run(llm, REQUESTS)
        assert llm.metrics()["num_preemptions"] > 0
        assert_idle(llm)
    checker = Checker(oracle)
    checker.check_all([*alone, *outputs], [([5], bans), *REQUESTS])
    checker.assert_various()


@interpreted
@pytest.mark.parametrize("requests", [FEW, rare(REQUESTS)], ids=["few", "all"])
def test_by_kernels(
    requests: list[Request], path: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton's interpreter runs those of the draws with controls, and of all reports."""
    for module in (controlled_sampler, logprobs, reporting):
        monkeypatch.setattr(module, "runs_kernels", lambda logits: True)
    with np.errstate(all="ignore"), LLM(path, **SMALL) as llm:
        outputs = run(llm, requests)
    checker = Checker(oracle)
    checker.check_all(outputs, requests)
    if requests is REQUESTS:
        checker.assert_various()
    assert checker.counts["mask"] > 5 and checker.counts["-inf"] > 5


# -- the token alone ------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", LOGPROBS_MODES)
def test_the_log_probability_of_the_token_draws_nothing_again(
    mode: str, path: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No row is controlled: the host makes no controls, and nothing is drawn a second time."""
    for owner, name in ((ControlTable, "controls"), (Extras, "sample")):
        monkeypatch.setattr(owner, name, lambda *args, **kwargs: pytest.fail("sampled again"))
    own = {"logprobs": 0, "logprobs_mode": mode, "ignore_eos": True}
    requests = [
        ([5, 77], SamplingParams(0.7, 6, seed=1, n=3, return_sampling_mask=True, **own)),
        ([9] * 20, SamplingParams(0.0, 9, top_k=3, **own)),
        ([9], SamplingParams(1.5, 8, seed=2, logprobs=None)),
        ([8, 3], SamplingParams(1.0, 9, seed=3, **own)),
    ]
    num_rows: list[list[bool]] = []
    score = Extras.score

    def spy(self: Extras, which: Any, computed: Any) -> Any:
        num_rows.append(which.tolist())
        return score(self, which, computed)

    monkeypatch.setattr(Extras, "score", spy)
    with LLM(path, **SMALL) as llm:
        outputs = run(llm, requests)
    Checker(oracle).check_all(outputs, requests)
    assert sum(map(sum, num_rows)) == 3 * 6 + 9 + 9, "those that have asked"
    assert sum(map(len, num_rows)) > sum(map(sum, num_rows)), "beside one that has not"
    assert [output.outputs[0].sampling_mask for output in outputs] == [[None] * 6, None, None, None]


def test_raw_log_probabilities_of_controlled_draws_take_the_same_way(
    path: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And early bans only as long as they hold."""
    heavy = []
    report = reporting.report_draws

    def spy(*args: Any) -> Any:
        scored, left = report(*args)
        heavy.append(sum(len(each.places) for each in scored))
        return scored, left

    monkeypatch.setattr("nanovllm.sampling.extras.report_draws", spy)
    requests = [
        ([5, 77], SamplingParams(0.7, 8, seed=1, top_k=5, logprobs=0, ignore_eos=True)),
        (
            [9, 77],
            SamplingParams(
                0.7, 8, min_tokens=3, logprobs=0, logit_bias={}, stop_token_ids=[130],
                logprobs_mode="temperature_logprobs", ignore_eos=True,
            ),
        ),
    ]  # fmt: skip
    with LLM(path, **SMALL) as llm:
        outputs = run(llm, requests)
    Checker(oracle).check_all(outputs, requests)
    assert len(outputs[1]["token_ids"]) > 4 and sum(heavy) == 3


# -- all doors ------------------------------------------------------------------------------------

DRAWN = SamplingParams(
    6.0, 9, seed=4, n=2, top_k=12, ignore_eos=True, logprobs=0, return_sampling_mask=True,
    logprobs_mode="processed_logprobs",
)  # fmt: skip
PROMPTS = ["127+345=", "count from 17:"]


@pytest.fixture(scope="module")
def tiny_llm() -> Iterator[LLM]:
    with LLM(TINY, **{**SMALL, "num_kvcache_blocks": 16}) as llm:
        yield llm


@pytest.fixture(scope="module")
def wanted(tiny_llm: LLM) -> list[list[tuple[Any, ...]]]:
    """What `generate` gives, as `joined` has it; checked along its tokens."""
    outputs = tiny_llm.generate(PROMPTS, DRAWN, use_tqdm=False)
    oracle, found = Oracle(TINY, [256, 258], SMALL["max_model_len"]), []
    for output in outputs:
        for completion in output.outputs:
            masks, places = completion.sampling_mask, completion.logprobs
            assert masks is not None and places is not None and len(masks) == DRAWN.max_tokens
            for i, token in enumerate(completion.token_ids):
                values = oracle.logits([*output.prompt_token_ids, *completion.token_ids[:i]])
                want = reported(values, values, DRAWN, "processed_logprobs")
                assert masks[i] == np.flatnonzero(want > -np.inf).tolist()
                assert places[i][token].logprob == pytest.approx(want[token], abs=1e-4)
        found.append([(c.token_ids, list(c.logprobs or ()), list(c.sampling_mask or ()))
                      for c in output.outputs])  # fmt: skip
    assert len({token for own in found for ids, _, _ in own for token in ids}) > 12, "it draws"
    return found


def joined(parts: Iterable[RequestOutput]) -> list[list[tuple[Any, ...]]]:
    """The completions of each request, put together."""
    found: dict[int, dict[int, Any]] = {}
    for part in parts:
        for new in part.outputs:
            own = found.setdefault(part.request_id, {}).setdefault(new.index, ([], [], []))
            for whole, more in zip(
                own, (new.token_ids, new.logprobs, new.sampling_mask), strict=True
            ):
                assert len(more) == len(new.token_ids)
                whole.extend(more)
    return [[own[i] for i in sorted(own)] for _, own in sorted(found.items())]


def assert_same(found: Any, wanted: Any) -> None:
    """Log-probabilities depend on the batch by rounding, and nothing else does."""
    for ours, theirs in zip(found, wanted, strict=True):
        for mine, its in zip(ours, theirs, strict=True):
            assert (mine[0], mine[2]) == (its[0], its[2])
            for place, other in zip(mine[1], its[1], strict=True):
                [(token, item)] = place.items()
                assert item.logprob == pytest.approx(other[token].logprob, abs=1e-4)


def test_streams_give_what_is_new(tiny_llm: LLM, wanted: Any) -> None:
    assert_same(joined(tiny_llm.stream(PROMPTS, DRAWN)), wanted)
    told: list[RequestOutput] = []
    for prompt in PROMPTS:
        tiny_llm.add_request(prompt, DRAWN, listener=told.append)
    while not tiny_llm.is_finished():
        assert tiny_llm.step() == []
    assert_same(joined(told), wanted)


def test_in_asyncio(wanted: Any) -> None:
    """`generate` gives all so far, and `stream` what is new."""

    async def main() -> tuple[list[RequestOutput], list[RequestOutput]]:
        async with AsyncLLM(TINY, **{**SMALL, "num_kvcache_blocks": 16}) as llm:
            whole = [output async for output in llm.generate(PROMPTS[0], DRAWN)]
            return whole, [output async for output in llm.stream(PROMPTS[0], DRAWN)]

    whole, news = asyncio.run(main())
    for found in (joined(news), joined(whole[-1:])):
        assert_same(found, wanted[:1])
    for output in whole:
        for completion in output.outputs:
            count = len(completion.token_ids)
            own = wanted[0][completion.index]
            assert completion.sampling_mask == own[2][:count] and count
            assert pickle.loads(pickle.dumps(completion)) == completion


def test_rows_of_files_and_tables(tiny_llm: LLM, wanted: Any) -> None:
    """JSON lines, OpenAI's batch format and data frames, each with its own parameters."""
    names = "temperature max_tokens seed n top_k ignore_eos logprobs logprobs_mode"
    params = {name: getattr(DRAWN, name) for name in names.split()}
    rows = [{"prompt": prompt, **params, "return_sampling_mask": True} for prompt in PROMPTS]
    plain = SamplingParams()
    lines = [
        json.loads(result.to_line()) for result in run_rows(tiny_llm, rows, plain, ordered=True)
    ]
    for line, own in zip(lines, wanted, strict=True):
        for found, (token_ids, places, masks) in zip(line["outputs"], own, strict=True):
            assert (found["token_ids"], found["sampling_mask"]) == (token_ids, masks)
            values = [place[token].logprob for place, token in zip(places, token_ids, strict=True)]
            own_values = [place[0]["logprob"] for place in found["logprobs"]]
            assert own_values == pytest.approx(values, abs=1e-4)

    table = {"prompt": np.array(PROMPTS, object)}
    given = {**params, "return_sampling_mask": True}
    with Generate(TINY, sampling_params=given, **SMALL) as generate:
        column = generate(table)["outputs"]
    for text, line in zip(column, lines, strict=True):
        masks = [each["sampling_mask"] for each in json.loads(text)]
        assert masks == [each["sampling_mask"] for each in line["outputs"]]


def test_labels_of_rows(tiny_llm: LLM) -> None:
    """A chat of OpenAI's format has them as `top_logprobs`, beside the drawn token."""
    labels = [ord("4"), ord("5"), 3]
    body = {"messages": [{"role": "user", "content": "127+345="}], "logprob_token_ids": labels}
    body |= {"max_tokens": 1, "temperature": 0, "return_sampling_mask": True}
    url = "/v1/chat/completions"
    [row] = read_rows(io.BytesIO(json.dumps({"custom_id": "a", "url": url, "body": body}).encode()))
    [result] = run_rows(tiny_llm, [row], SamplingParams())
    [choice] = json.loads(result.to_line())["response"]["body"]["choices"]
    [place] = choice["logprobs"]["content"]
    assert choice["sampling_mask"] == [None] and place["token"] == "4"
    assert [each["token"] for each in place["top_logprobs"]][:2] == ["4", "5"]
    assert len(place["top_logprobs"]) == 3


def test_labels_are_tokens_of_the_vocabulary(tiny_llm: LLM) -> None:
    with pytest.raises(ValueError, match=r"logprob_token_ids` must hold token ids in 0\.\.271"):
        tiny_llm.generate("1", SamplingParams(logprob_token_ids=[272]))


# -- masks ----------------------------------------------------------------------------------------


def test_tokens_that_are_as_likely_as_the_last_stay_in(path: Path) -> None:
    """And processed log-probabilities are of the tokens of the mask. Such biases leave no digits of
    the logits.
    """
    ties = dict.fromkeys([3, 40, 97, 130], 1e9)
    params = SamplingParams(
        0.7, 2, seed=1, top_k=2, logit_bias=ties, return_sampling_mask=True,
        logprob_token_ids=[*range(VOCAB)], logprobs_mode="processed_logprobs",
    )  # fmt: skip
    with LLM(path, **SMALL) as llm:
        [output] = run(llm, [([5], params)])
    completion = output.outputs[0]
    assert completion.sampling_mask == [[*ties]] * 2
    for token, place in zip(completion.token_ids, completion.logprobs, strict=True):
        assert place[token].rank == 1
        values = [place[token].logprob for token in range(VOCAB)]
        expected = np.where(np.isin(range(VOCAB), [*ties]), np.log(0.25), -np.inf)
        assert values == pytest.approx(expected.tolist(), abs=1e-5)


@pytest.fixture(params=[False, pytest.param(True, marks=interpreted)])
def by_kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's operators, or the kernels, in Triton's interpreter."""
    if request.param:
        for module in (controlled_sampler, logprobs, reporting):
            monkeypatch.setattr(module, "runs_kernels", lambda logits: True)


@pytest.mark.usefixtures("by_kernels")
@pytest.mark.parametrize("V", [7, 32])
def test_masks_of_vocabularies_of_one_word(V: int, tmp_path: Path) -> None:
    """Where no set of ids is shorter than the bits of all."""
    make_checkpoint(tmp_path, seed=6, vocab_size=V, initializer_range=0.18)
    own = {"max_tokens": 6, "ignore_eos": True, "return_sampling_mask": True}
    requests = [
        ([5, 2], SamplingParams(0.7, seed=top_k, top_k=top_k, **own)) for top_k in (1, 4, V, -1)
    ]
    with np.errstate(all="ignore"), LLM(tmp_path, **SMALL) as llm:
        outputs = run(llm, requests)
    checker = Checker(Oracle(tmp_path, EOS, SMALL["max_model_len"]))
    checker.check_all(outputs, requests)
    assert checker.counts["mask"] == checker.counts["all"] == 2 * 6


@pytest.mark.usefixtures("by_kernels")
def test_bits_travel_for_large_sets_alone(
    path: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here, of more than four tokens: so many ids are as long as the bits of all."""
    num_rows = []
    copy = extra_results.rows_to_host

    def spy(tensor: Any, rows: Any) -> Any:
        num_rows.append(len(rows))
        return copy(tensor, rows)

    monkeypatch.setattr(extra_results, "rows_to_host", spy)
    own = {"max_tokens": 6, "ignore_eos": True, "return_sampling_mask": True}
    requests = [
        ([5, 77], SamplingParams(0.7, seed=top_k, top_k=top_k, **own)) for top_k in (1, 4, 5, 130)
    ]
    with np.errstate(all="ignore"), LLM(path, **SMALL) as llm:
        outputs = run(llm, requests)
    checker = Checker(oracle)
    checker.check_all(outputs, requests)
    assert checker.counts["mask"] == 4 * 6 and num_rows == [2] * 6


def test_masks_follow_a_form(tiny_llm: LLM) -> None:
    """As the engine waits for tokens that it follows, and where all tokens are allowed again."""
    pytest.importorskip("llguidance")
    form = StructuredOutputsParams(regex="[ab][0-9]{2}c")
    params = SamplingParams(
        2.0, 9, seed=3, structured_outputs=form, return_sampling_mask=True, logprobs=3,
        logprobs_mode="temperature_logprobs",
    )  # fmt: skip
    plain = SamplingParams(2.0, 9, seed=3, return_sampling_mask=True, ignore_eos=True)
    with LLM(TINY, overlap=True, **{**SMALL, "num_kvcache_blocks": 16}) as overlapped:
        for llm in (tiny_llm, overlapped):
            guided, free = llm.generate(["127+345="] * 2, [params, plain], use_tqdm=False)
            completion = guided.outputs[0]
            masks = completion.sampling_mask
            assert masks[:4] == [[*b"ab"], [*b"0123456789"], [*b"0123456789"], [*b"c"]]
            assert len(masks) == 5 and set(masks[4]) <= {256, 258}
            places = completion.logprobs
            assert (len(places[0]), len(places[3])) == (2, 1), "no more can come"
            assert list(free.outputs[0].sampling_mask) == [None] * 9


@pytest.mark.parametrize("V", [1, 31, 32, 33, 100, 1000])
def test_sets_of_tokens(V: int) -> None:
    """Of any size, in at most a bit for each token of the vocabulary."""
    print("seed", SEED)
    rng, W = np.random.default_rng(SEED), -(-V // 32)
    sizes = [0, 1, V // 2, V - 1, V, V // 40, min(W, V), W - 1]
    wanted = [sorted(rng.choice(V, size, replace=False).tolist()) for size in sizes]
    bits = np.zeros((len(sizes), 32 * W), np.uint8)
    for row, ids in zip(bits, wanted, strict=True):
        row[ids] = 1
    words = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
    sets = TokenSets(V)
    for i, packed in enumerate(pack(words, V)):
        assert packed is None or len(packed) <= 4 * W
        sets.put(2 * i, packed)  # those between are not put
    sets.extend_to(2 * len(sizes))
    expected: list[Any] = [None] * (2 * len(sizes))
    expected[::2] = [None if len(ids) == V else ids for ids in wanted]
    assert sets == expected and len(sets) == len(expected)
    assert sets[3:9:2] == expected[3:9:2] and sets[-2] == expected[-2]
    assert pickle.loads(pickle.dumps(sets)) == expected
    assert sets != expected[1:] and sets != 5
