"""Controls of sampling in the whole engine: token for token what a loop around transformers gives.

One workload with every control runs in every mode of the engine; what it should give comes from
`sampling_oracle.py`, draws included.
"""

import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from modes import Mode, in_every_mode, run_in
from numpy.typing import NDArray
from ranks_in_threads import ranks_of
from sampling_oracle import Completion, Oracle

from checkpoints import (
    SMALL,
    TINY,
    assert_idle,
    edit_json,
    interrupt_after_launch,
    make_checkpoint,
    rare,
    run_steps,
    run_until,
    tokens,
    with_rare,
)
from faults import Interrupt, fail_at
from nanovllm import LLM, RequestOutput, SamplingParams
from nanovllm.engine import executor
from nanovllm.outputs import CompletionOutput
from nanovllm.sampling import control_table
from nanovllm.sampling.controlled_sampler import ControlledSampler
from nanovllm.utils.device import host_array

VOCAB = 131  # the last of two ranks has fewer tokens, the last of four has none
EOS = [7, 60]
BOTH = pytest.mark.parametrize("overlap", [False, True], ids=["synchronous", "overlap"])

Request = tuple[list[int], SamplingParams]


def params_of(max_tokens: int | None = 30, **options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, **{"temperature": 1.0, **options})


PENALTIES: dict[str, Any] = {
    "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.6,
}  # fmt: skip
SHARED = list(range(40, 75))
REQUESTS: list[Request] = [
    ([5, 77, 33], params_of(temperature=0, ignore_eos=True)),
    ([9] * 20, params_of(seed=1)),
    ([*SHARED, 1], params_of(temperature=0, repetition_penalty=1.5, ignore_eos=True)),
    ([*SHARED, 2], params_of(seed=2, **PENALTIES)),
    ([9] * 20, params_of(seed=3, temperature=0.8, top_k=5, frequency_penalty=1.0)),
    ([100], params_of(seed=4, temperature=1.5, top_p=0.8, ignore_eos=True)),
    ([3, 1, 4, 1, 5], params_of(seed=5, min_p=0.1, logprobs=0)),
    ([8] * 17, params_of(temperature=0, logit_bias={i: 0.3 * i for i in range(20)}, logprobs=3)),
    ([1, 2], params_of(seed=6, allowed_token_ids=range(5, 40), ignore_eos=True)),
    ([6, 6], params_of(seed=7, temperature=2.0, min_tokens=12, stop_token_ids=range(50, 80))),
    (list(range(90)), params_of(20, seed=8, ignore_eos=True, logprobs=5, **PENALTIES)),
    (
        [*SHARED, 3],
        params_of(
            seed=9, temperature=0.9, top_k=30, top_p=0.9, min_p=0.02, min_tokens=20, logprobs=20,
            logit_bias={7: 3.0, 60: 3.0, 11: -100.0}, allowed_token_ids=range(100), **PENALTIES,
        ),
    ),
    ([12, 13], params_of(top_k=20, repetition_penalty=0.8)),
    ([12, 13], params_of(temperature=0.6)),
    ([14, 15, 16], params_of(temperature=0, frequency_penalty=-0.3, logprobs=1)),
    ([17] * 5, params_of(40, temperature=0, presence_penalty=2.0, min_tokens=40)),
]  # fmt: skip


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose distributions leave much to chance, and which often ends."""
    path = tmp_path_factory.mktemp("controls") / "qwen3"
    make_checkpoint(path, seed=4, vocab_size=VOCAB, initializer_range=0.18)
    edit_json(path / "generation_config.json", eos_token_id=EOS)
    return path


@pytest.fixture(scope="module")
def oracle(path: Path) -> Oracle:
    return Oracle(path, EOS, SMALL["max_model_len"])


@pytest.fixture(scope="module")
def wanted(oracle: Oracle) -> list[Completion]:
    """Expected completions of REQUESTS in a new engine."""
    found = [
        oracle.complete(prompt, params, unseeded=f"0 {i}")
        for i, (prompt, params) in enumerate(REQUESTS)
    ]
    reasons = [(completion.finish_reason, completion.stop_reason) for completion in found]
    assert sum(reason == "length" for reason, _ in reasons) > 3
    assert sum(reason == ("stop", None) for reason in reasons) > 3
    assert any(stop is not None for _, stop in reasons)
    return found


@pytest.fixture(name="llm", params=[rare(False), True], ids=["synchronous", "overlap"])
def llm_fixture(path: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    """A fresh engine without and with overlap."""
    with LLM(path, overlap=request.param, **SMALL) as llm:
        yield llm


def generate(llm: LLM, requests: list[Request]) -> list[RequestOutput]:
    prompts, params = zip(*requests, strict=True)
    outputs = llm.generate(list(prompts), list(params), use_tqdm=False)
    assert_idle(llm)
    assert not llm.core.requests
    return outputs


def check(found: CompletionOutput, want: Completion, params: SamplingParams) -> None:
    """Tokens and reasons are the same, and log-probabilities within 1e-4."""
    assert found.token_ids == want.token_ids
    assert (found.finish_reason, found.stop_reason) == (want.finish_reason, want.stop_reason)
    if params.logprobs is None:
        assert found.logprobs is None and found.cumulative_logprob is None
        return
    assert found.logprobs is not None
    assert len(found.logprobs) == len(found.token_ids)
    total = 0.0
    for token, entry, row in zip(found.token_ids, found.logprobs, want.logprobs, strict=True):
        order = row.argsort()[::-1].tolist()
        best = order[: params.logprobs]
        assert list(entry) == [token, *(other for other in best if other != token)]
        for other, logprob in entry.items():
            assert logprob.logprob == pytest.approx(row[other], abs=1e-4)
            assert logprob.rank == order.index(other) + 1
            assert logprob.decoded_token is None, "no tokenizer"
        total += entry[token].logprob
    assert found.cumulative_logprob == pytest.approx(total, abs=1e-9)


def check_all(outputs: list[RequestOutput], wanted: list[Completion]) -> None:
    requests = REQUESTS[: len(outputs)]
    for output, want, (prompt, params) in zip(outputs, wanted, requests, strict=True):
        assert output.prompt_token_ids == prompt
        assert [completion.index for completion in output.outputs] == [0]
        check(output.outputs[0], want, params)


# -- every control in every mode ------------------------------------------------------------------

SMALL_POOL = {"num_kvcache_blocks": 9, "max_num_batched_tokens": 24}


@in_every_mode("chunks", "chunks-of-7-overlap", "large-blocks", "small-pool-overlap")
def test_tokens_are_those_of_the_oracle(path: Path, wanted: list[Completion], mode: Mode) -> None:
    """Counts of tokens begin anew on the device when a request resumes, maybe in another slot."""
    prompts, params = zip(*REQUESTS, strict=True)
    outputs, metrics = run_in(mode, path, prompts, params)
    preempted = [output.metrics.num_preemptions for output in outputs]
    assert sum(preempted) == metrics["num_preemptions"]
    penalised = [params.frequency_penalty != 0 for _, params in REQUESTS]
    assert any(map(min, preempted, penalised)) or not mode.preempts, "no counts were lost"
    check_all(outputs, wanted)


FAMILIES: dict[str, dict[str, Any]] = {  # one of each kind
    "gemma2": {"head_dim": 32, "sliding_window": 20, "attn_logit_softcapping": 2.0},
    "gpt_oss": {"head_dim": 16, "sliding_window": 20, "num_local_experts": 5},
    "mistral": {"sliding_window": 20},
    "olmo2": {},
}


@pytest.mark.parametrize("family", with_rare(FAMILIES, "gpt_oss", "mistral", "olmo2"))
@pytest.mark.usefixtures("low_guesses")
def test_other_families(family: str, tmp_path: Path) -> None:
    """Soft-capped logits, sparse layers, windows, norms after layers: every control, preempted."""
    path = tmp_path / family
    options = {"vocab_size": VOCAB, "initializer_range": 0.18, **FAMILIES[family]}
    make_checkpoint(path, family, seed=4, **options)
    edit_json(path / "generation_config.json", eos_token_id=EOS)
    oracle = Oracle(path, EOS, SMALL["max_model_len"])
    with LLM(path, **{**SMALL, **SMALL_POOL}) as llm:
        outputs = generate(llm, REQUESTS[:10])
        assert llm.metrics()["num_preemptions"] > 0 or llm.scheduler.block_manager.window
    wanted = [
        oracle.complete(prompt, params, unseeded=f"0 {i}")
        for i, (prompt, params) in enumerate(REQUESTS[:10])
    ]
    assert {want.finish_reason for want in wanted} == {"stop", "length"}
    check_all(outputs, wanted)


@pytest.mark.slow  # test_tensor_parallel.py has unequal parts of the vocabulary
@pytest.mark.usefixtures("threads")
def test_a_rank_without_tokens(path: Path, oracle: Oracle, wanted: list[Completion]) -> None:
    """The last of four has no part of the vocabulary."""
    few = [3, 7, 8]
    plain = ([5, 77], params_of(10, seed=1, logprobs=2))  # of which only the logits are needed
    with LLM(path, tensor_parallel_size=4, overlap=True, **SMALL) as llm:
        [output] = generate(llm, [plain])
        check(output.outputs[0], oracle.complete(*plain), plain[1])
        for i, output in zip(few, generate(llm, [REQUESTS[i] for i in few]), strict=True):
            check(output.outputs[0], wanted[i], REQUESTS[i][1])
        vocabularies = [
            len(runner.built.step.sampler.sampler.vocab) for runner in ranks_of(llm).runners
        ]
    assert vocabularies[0] > 0 == vocabularies[-1]


@pytest.mark.parametrize("ranks", ["threads", rare("processes")])
@pytest.mark.usefixtures("low_guesses")
def test_workers_are_told_the_tokens(
    ranks: str, path: Path, wanted: list[Completion], request: pytest.FixtureRequest
) -> None:
    """Plans are all that they get, pickled: they know no controls."""
    if ranks == "threads":
        request.getfixturevalue("threads")
    with LLM(path, tensor_parallel_size=2, overlap=True, **{**SMALL, **SMALL_POOL}) as llm:
        check_all(generate(llm, REQUESTS), wanted)
        assert llm.metrics()["num_preemptions"] > 0


def test_masks_are_made_for_the_device(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In memory that a GPU reads directly; otherwise they would be copied on the host, too."""
    made = []

    def spy(device: torch.device, shape: tuple[int, ...]) -> NDArray[np.int32]:
        made.append((device, shape))
        return host_array(device, shape)

    monkeypatch.setattr(executor, "host_array", spy)
    with LLM(path, **SMALL) as llm:
        params = params_of(max_tokens=3, allowed_token_ids=[5, 6], ignore_eos=True)
        [output] = llm.generate([[1, 2]], params, use_tqdm=False)
    assert {5, 6}.issuperset(output.outputs[0].token_ids)
    assert [shape for _, shape in made if shape[0]] == [(1, -(-VOCAB // 32))] * 3
    assert {device for device, _ in made} == {torch.device("cpu")}


@BOTH
def test_a_slot_has_the_counts_of_one_request(path: Path, oracle: Oracle, overlap: bool) -> None:
    """The next one in it may begin at the very length up to which the one before was counted."""
    params = params_of(4, temperature=0, ignore_eos=True, repetition_penalty=3.0)
    requests = [([9 + length] * length, params) for length in (5, 9, 13, 17, 3, 7)]
    with LLM(path, overlap=overlap, **{**SMALL, "max_num_seqs": 1}) as llm:
        for output, request in zip(generate(llm, requests), requests, strict=True):
            check(output.outputs[0], oracle.complete(*request), params)


def test_seeds_draw_differently(path: Path) -> None:
    seeds = [0, 1, 2, 2**32, 2**40, 2**64 - 1, 0]
    requests = [([5, 77], params_of(20, seed=seed, ignore_eos=True)) for seed in seeds]
    with LLM(path, **SMALL) as llm:
        found = tokens(generate(llm, requests))
    assert found[0] == found[-1]
    assert len(set(map(tuple, found))) == len(seeds) - 1


def test_requests_that_differ_in_their_bias_only(llm: LLM) -> None:
    """Controls are remembered by sampling parameters, whose hash leaves the bias out."""
    params = [params_of(8, temperature=0, logit_bias=bias) for bias in ({3: 90}, {4: 90}, {3: 80})]
    outputs = generate(llm, [([5], p) for p in params])
    assert tokens(outputs) == [[3] * 8, [4] * 8, [3] * 8]


# -- by transformers' own generate ----------------------------------------------------------------

THEIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "repetition-below-1": ({"repetition_penalty": 0.7}, {"repetition_penalty": 0.7}),
    "bias": (
        {"logit_bias": {3: 4.5, 20: -9.0, 7: 1.5}},
        {"sequence_bias": [[[3], 4.5], [[20], -9.0], [[7], 1.5]]},
    ),
    "min-tokens": (
        {"min_tokens": 15, "logit_bias": {7: 3.0, 60: 3.0}},
        {"min_new_tokens": 15, "sequence_bias": [[[7], 3.0], [[60], 3.0]]},
    ),
    "all": (
        {"repetition_penalty": 1.2, "min_tokens": 9, "logit_bias": {3: 3.0, 60: 4.0}},
        {
            "repetition_penalty": 1.2,
            "min_new_tokens": 9,
            "sequence_bias": [[[3], 3.0], [[60], 4.0]],
        },
    ),
}


@pytest.mark.parametrize("name", with_rare(THEIRS, *THEIRS.keys() - {"all"}))
def test_greedy_tokens_are_those_of_generate(name: str, llm: LLM, oracle: Oracle) -> None:
    mine, theirs = THEIRS[name]
    prompts = [[5, 77, 33], [9] * 20, [*SHARED, 4], [1, 2, 3, 4], list(range(30, 60))]
    requests = [(prompt, params_of(32, temperature=0, **mine)) for prompt in prompts]
    prefixes = []
    for (prompt, params), output in zip(requests, generate(llm, requests), strict=True):
        ids = torch.tensor([prompt])
        want = oracle.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=32, do_sample=False,
            eos_token_id=EOS, pad_token_id=0, **theirs,
        )  # fmt: skip
        assert output["token_ids"] == want[0, len(prompt) :].tolist()
        plain = oracle.complete(prompt, params_of(32, temperature=0)).token_ids
        prefixes.append(output["token_ids"] == plain)
        check(output.outputs[0], oracle.complete(prompt, params), params)
    assert not all(prefixes), "the control changes nothing"


@BOTH
def test_the_embedded_checkpoint(tiny: str, reference: Any, overlap: bool) -> None:
    """Text comes in and out: penalties, words that must not come, and tokens as text."""
    prompts = ["127+345=", "999+1=", "Count: 1 2 3", "reverse engine"]
    params = SamplingParams(temperature=0, max_tokens=20, repetition_penalty=1.1, logprobs=2)
    with LLM(tiny, device="cpu", overlap=overlap, num_kvcache_blocks=16) as llm:
        tokenizer = llm.get_tokenizer()
        outputs = llm.generate(prompts, params, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = torch.tensor([tokenizer.encode(prompt)])
        want = reference.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False,
            eos_token_id=[258, 256], repetition_penalty=1.1,
        )  # fmt: skip
        assert output["token_ids"] == want[0, ids.shape[1] :].tolist()
        logprobs = output.outputs[0].logprobs
        assert logprobs is not None
        for entry in logprobs:
            for token, logprob in entry.items():
                assert logprob.decoded_token == tokenizer.decode([token])


@pytest.mark.parametrize("overlap", [rare(False), True], ids=["synchronous", "overlap"])
@pytest.mark.usefixtures("low_guesses")
def test_bad_words_do_not_come(tiny: str, overlap: bool) -> None:
    """Words of several tokens, whose first only the device may know when the last is drawn."""
    prompts = [list(f"{i}+{j}=".encode()) for i in (127, 999) for j in (345, 1, 250)]
    plain = params_of(16, temperature=0, ignore_eos=True)
    options: dict[str, Any] = {
        "device": "cpu", "overlap": overlap, "num_kvcache_blocks": 5, "kvcache_block_size": 16,
    }  # fmt: skip
    tiny_oracle = Oracle(TINY, [258, 256], 80)
    with LLM(tiny, **options) as llm:
        encode = llm.get_tokenizer().encode
        texts = [output["text"] for output in generate(llm, [(p, plain) for p in prompts])]
        words = [text[1:3] if i % 3 else text[:1] for i, text in enumerate(texts)]
        params = [dataclasses.replace(plain, bad_words=[word, "zz"]) for word in words]
        before = llm.metrics()["num_preemptions"]
        outputs = generate(llm, list(zip(prompts, params, strict=True)))
        assert llm.metrics()["num_preemptions"] > before
    for prompt, output, word, text in zip(prompts, outputs, words, texts, strict=True):
        sequence = tuple(encode(word))
        assert len(sequence) == len(word)
        want = tiny_oracle.complete(prompt, plain, bad_words=[sequence])
        assert output["token_ids"] == want.token_ids
        assert sequence not in [tuple(want.token_ids[i : i + len(word)]) for i in range(16)]
        assert output["text"][: len(word) - 1] == text[: len(word) - 1]


# -- the end of a request -------------------------------------------------------------------------


def test_stop_tokens(llm: LLM, oracle: Oracle) -> None:
    """An id in `stop_token_ids` is the reason, an end-of-sequence token is not; it is kept."""
    prompt = [5, 77, 33]
    free = oracle.complete(prompt, params_of(40, temperature=0, ignore_eos=True)).token_ids
    first = {token: free.index(token) for token in free}
    late = max(first, key=lambda token: first[token])
    assert first[late] > 5
    cases: list[tuple[dict[str, Any], int, str, int | None]] = [
        ({"stop_token_ids": [late, 130], "ignore_eos": True}, first[late] + 1, "stop", late),
        ({"stop_token_ids": [130], "ignore_eos": True}, 40, "length", None),
        ({"stop_token_ids": [free[0]]}, 1, "stop", free[0]),
    ]
    params = [params_of(40, temperature=0, **options) for options, *_ in cases]
    for output, (_, length, reason, stop) in zip(
        generate(llm, [(prompt, p) for p in params]), cases, strict=True
    ):
        assert output["token_ids"] == free[:length]
        assert output.outputs[0].finish_reason == reason
        assert output.outputs[0].stop_reason == stop


def test_end_of_sequence_tokens_and_stop_tokens(llm: LLM) -> None:
    """Forced by a bias, at the third token: whoever names the token says why it ends."""
    cases: list[tuple[dict[str, Any], tuple[str, int | None]]] = [
        ({}, ("stop", None)),
        ({"stop_token_ids": [7]}, ("stop", None)),
        ({"stop_token_ids": [7], "ignore_eos": True}, ("stop", 7)),
        ({"stop_token_ids": [60], "ignore_eos": True}, ("length", None)),
    ]
    options: dict[str, Any] = {"temperature": 0, "logit_bias": {7: 100.0}}
    for min_tokens in (0, 1, 2):
        requests = [
            ([5], params_of(4, min_tokens=min_tokens, **options, **more)) for more, _ in cases
        ]
        for output, (more, want) in zip(generate(llm, requests), cases, strict=True):
            found = output.outputs[0]
            assert (found.finish_reason, found.stop_reason) == want
            if want[0] == "stop":
                assert found.token_ids.index(7) == len(found.token_ids) - 1 == min_tokens, more


def test_min_tokens_up_to_the_last(llm: LLM) -> None:
    params = params_of(6, temperature=0, min_tokens=6, logit_bias={7: 100.0, 60: 90.0})
    [output] = generate(llm, [([5], params)])
    assert len(output["token_ids"]) == 6
    assert not set(output["token_ids"]) & set(EOS)
    assert output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize(("blocks", "most", "overlap"), [rare(32, 128, False), (3, 48, True)])
def test_without_max_tokens_the_model_or_the_pool_ends_it(
    path: Path, oracle: Oracle, blocks: int, most: int, overlap: bool
) -> None:
    with LLM(path, overlap=overlap, **{**SMALL, "num_kvcache_blocks": blocks}) as llm:
        params = params_of(None, seed=1, ignore_eos=True, frequency_penalty=0.5)
        prompt = [5, 77, 33]
        output, ends = generate(llm, [(prompt, params), (prompt, params_of(None, seed=2))])
        want = oracle.complete(prompt, params).token_ids[: most - 3]
        assert len(want) == most - 3
        assert output["token_ids"] == want
        assert output.outputs[0].finish_reason == "length"
        check(ends.outputs[0], oracle.complete(prompt, params_of(None, seed=2)), params_of())
        assert ends.outputs[0].finish_reason == "stop", "the case is pointless"


# -- several completions --------------------------------------------------------------------------


@pytest.mark.parametrize("n", [rare(2), 3, rare(11)])
def test_completions_are_those_of_requests_with_the_seeds_that_follow(
    n: int, llm: LLM, oracle: Oracle
) -> None:
    """Also of more than run at once. One that has ended has nothing added while others go on."""
    params = params_of(30, seed=40, logprobs=1, top_p=0.9, **PENALTIES)
    prompt = [5, 77, 33]
    request = (prompt, dataclasses.replace(params, n=n))
    single = [(prompt, dataclasses.replace(params, seed=40 + i)) for i in range(n)]
    together, *alone, again = generate(llm, [request, *single, request])
    for output in (together, again):
        assert [completion.index for completion in output.outputs] == list(range(n))
        for i, completion in enumerate(output.outputs):
            check(completion, oracle.complete(prompt, params, index=i), params)
    assert tokens(alone) == [completion.token_ids for completion in together.outputs]
    assert len(set(map(tuple, tokens(alone)))) == n
    assert together["token_ids"] == together.outputs[0].token_ids
    lengths = [len(completion.token_ids) for completion in together.outputs]
    assert n < 11 or min(lengths) < max(lengths)


def test_completions_without_a_seed_differ(llm: LLM, oracle: Oracle) -> None:
    params = params_of(12, n=4, ignore_eos=True)
    outputs = generate(llm, [([5, 77], params), ([5, 77], params)])
    found = [c.token_ids for output in outputs for c in output.outputs]
    assert len(set(map(tuple, found))) == 8
    for i, token_ids in enumerate(found):
        assert token_ids == oracle.complete([5, 77], params, unseeded=f"0 {i}").token_ids


def test_completions_that_end_together_are_one_output(llm: LLM) -> None:
    """A request was returned once for each of those that ended in the step of the last."""
    ids = [llm.add_request([5, 77], params_of(6, n=n, ignore_eos=True)) for n in (3, 1, 2)]
    outputs: list[RequestOutput] = []
    while not llm.is_finished():
        outputs += llm.step()
    assert sorted(output.request_id for output in outputs) == ids
    assert {output.request_id: len(output.outputs) for output in outputs} == dict(
        zip(ids, (3, 1, 2), strict=True)
    )
    assert_idle(llm)


@pytest.mark.parametrize("when", [rare("waiting"), rare("running"), "some ended"])
def test_abort_takes_all_completions(when: str, llm: LLM, oracle: Oracle) -> None:
    params = params_of(30, seed=1, n=12, **PENALTIES)
    lengths = [
        len(oracle.complete([5, 77], params, index=index).token_ids) for index in range(params.n)
    ]
    assert min(lengths[:8]) < 20 < max(lengths[:8])
    victim = llm.add_request([5, 77], params)
    other = llm.add_request(*REQUESTS[3])
    assert llm.abort(other) and not llm.abort(other)
    num_steps = {"waiting": 0, "running": 2, "some ended": min(lengths[:8]) + 2}[when]
    for _ in range(num_steps):
        assert llm.step() == []
    some_ended = any(seq.is_finished for seq in llm.core.requests[victim].seqs)
    assert some_ended == (when == "some ended")
    assert llm.abort(victim)
    assert not llm.abort(victim)
    assert llm.is_finished()
    assert llm.step() == []
    assert_idle(llm)
    assert not llm.core.requests and not llm.core.finished
    [output] = generate(llm, [REQUESTS[3]])
    check(output.outputs[0], oracle.complete(*REQUESTS[3]), REQUESTS[3][1])


# -- the fast path --------------------------------------------------------------------------------

PLAIN = [0, 1, 13]


def test_plain_requests_do_without(
    path: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ControlledSampler, "__call__", lambda *args: 1 / 0)
    requests = [REQUESTS[i] for i in PLAIN] + [
        ([9, 9], params_of(12, seed=5, n=3, top_k=VOCAB, stop_token_ids=[33])),
        ([9, 8], params_of(12, temperature=0, top_k=3, top_p=0.2, min_p=0.3)),
        ([9, 7], params_of(12, seed=6, logprobs=2)),  # its tokens are those drawn without
    ]
    with LLM(path, **SMALL) as llm:
        outputs = generate(llm, requests)
        assert llm.model_runner.built.extras.sampler.counts is None, "memory for nothing"
        for i, (output, (prompt, params)) in enumerate(zip(outputs, requests, strict=True)):
            for completion in output.outputs:
                want = oracle.complete(prompt, params, index=completion.index, unseeded=f"0 {i}")
                check(completion, want, params)
        with pytest.raises(ZeroDivisionError):
            generate(llm, [REQUESTS[2]])


def test_only_rows_with_controls_are_drawn_again(
    path: Path, wanted: list[Completion], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And those of `min_tokens` alone until it is reached."""
    num_rows: list[int] = []
    call = ControlledSampler.__call__

    def count(self: ControlledSampler, logits: torch.Tensor, *args: Any) -> Any:
        num_rows.append(len(logits))
        return call(self, logits, *args)

    monkeypatch.setattr(ControlledSampler, "__call__", count)
    with LLM(path, **SMALL) as llm:
        check_all(generate(llm, REQUESTS), wanted)
    expected = sum(
        min(params.min_tokens, len(want.token_ids)) if i == 9 else len(want.token_ids)
        for i, ((_, params), want) in enumerate(zip(REQUESTS, wanted, strict=True))
        if i not in PLAIN
    )
    assert sum(num_rows) == expected


# -- faults ---------------------------------------------------------------------------------------

FAULTY = [1, 3, 4, 9, 10, 12]  # of REQUESTS


def expected(oracle: Oracle) -> list[list[int]]:
    return [
        oracle.complete(*REQUESTS[i], unseeded=f"0 {k}").token_ids for k, i in enumerate(FAULTY)
    ]


def add_faulty(llm: LLM) -> list[int]:
    return [llm.add_request(*REQUESTS[i]) for i in FAULTY]


@pytest.mark.parametrize(
    "error", [RuntimeError("out of memory"), rare(KeyboardInterrupt())], ids=repr
)
@pytest.mark.parametrize(
    ("point", "after", "k"),
    [
        ("launch", False, 1),
        ("finish", True, 6),
        rare("launch", False, 6),
        rare("finish", True, 1),
        *((point, True, 3) for point in ("sample", "_update_counts", "_counts")),
        *(rare(point, True, 1) for point in ("sample", "_update_counts", "_counts")),
    ],
)
def test_a_failed_step_can_be_repeated(
    point: str, after: bool, k: int, error: BaseException, llm: LLM, oracle: Oracle,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Whether or not the device has counted the tokens of the step that failed."""
    extras = llm.model_runner.built.extras
    owner = {"sample": extras, "_update_counts": extras.sampler, "_counts": control_table}
    ids = add_faulty(llm)
    calls = fail_at(monkeypatch, owner.get(point, llm.model_runner), point, k, error, after=after)
    done = run_until(type(error), llm)
    assert len(calls) == k
    done.update(run_steps(llm))
    assert done == dict(zip(ids, expected(oracle), strict=True))
    assert_idle(llm)


@pytest.mark.parametrize("k", [rare(1), 2, rare(5), 11])
def test_ctrl_c_between_launch_and_books(
    k: int, llm: LLM, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device has counted tokens of a step that the host has not noted, and repeats."""
    ids = add_faulty(llm)
    done = interrupt_after_launch(monkeypatch, llm, k)
    done.update(run_steps(llm))
    assert done == dict(zip(ids, expected(oracle), strict=True))
    assert_idle(llm)


NUM_INTERRUPTS = 20


def test_ctrl_c_at_any_line(llm: LLM, oracle: Oracle) -> None:
    """Wherever it hits: whatever comes out afterwards is right."""
    requests = [
        ([5, 77], params_of(6, seed=1, n=2, **PENALTIES)),
        ([9] * 20, params_of(5, temperature=0, repetition_penalty=1.5, logprobs=2)),
        ([8], params_of(5, seed=4, min_tokens=3, top_k=9, logit_bias={7: 3.0})),
    ]
    wanted = {
        tuple(prompt): [oracle.complete(prompt, params, index=i) for i in range(params.n)]
        for prompt, params in requests
    }

    def work() -> None:
        for request in requests:
            llm.add_request(*request)
        finish()

    def finish() -> None:
        while not llm.is_finished():
            done.extend(llm.step())

    done: list[RequestOutput] = []
    for _ in range(2):  # the second finds prefixes in the cache, and is the shortest
        with Interrupt(float("inf")) as whole:
            work()
    assert len(done) == 6
    for k in range(1, whole.count - 100, whole.count // NUM_INTERRUPTS):
        done.clear()
        with pytest.raises(KeyboardInterrupt), Interrupt(k):
            work()
        finish()
        for output in done:
            params = next(p for prompt, p in requests if prompt == output.prompt_token_ids)
            for completion, want in zip(
                output.outputs, wanted[tuple(output.prompt_token_ids)], strict=True
            ):
                check(completion, want, params)
        assert_idle(llm)


# -- where the time went --------------------------------------------------------------------------


@pytest.mark.usefixtures("low_guesses")
def test_metrics_of_requests(path: Path) -> None:
    """Nothing ends before it begins, who waits has waited longer, and preemptions add up."""
    several = ([5, 77], params_of(20, seed=1, n=3, ignore_eos=True))
    with LLM(path, **{**SMALL, **SMALL_POOL, "num_kvcache_blocks": 8}) as llm:
        outputs = generate(llm, [*REQUESTS, *[several] * 4])
        found = [output.metrics for output in outputs if output.metrics is not None]
        for times in found:
            assert 0 <= times.queue_seconds < times.first_token_seconds < times.total_seconds
        preempted = [times.num_preemptions for times in found]
        assert sum(preempted) == llm.metrics()["num_preemptions"]
        assert sum(preempted[-4:]) > 0
        assert found[-1].queue_seconds > found[0].first_token_seconds


def test_times_of_completions_that_run_one_after_the_other(path: Path) -> None:
    """The first that starts begins the request, and the last that ends ends it."""
    with LLM(path, **{**SMALL, "max_num_seqs": 1, "max_num_batched_tokens": 4}) as llm:
        before = time.perf_counter()
        llm.add_request([9] * 10, params_of(3, seed=1, n=3, ignore_eos=True))
        added = time.perf_counter()
        marks = []  # after each step
        while not llm.is_finished():
            outputs = llm.step()
            marks.append(time.perf_counter())
    assert len(marks) == 3 * (3 + 2)  # three chunks, and two tokens more
    [output] = outputs
    times = output.metrics
    assert times is not None
    assert 0 <= times.queue_seconds < marks[0] - before
    assert marks[1] - added < times.first_token_seconds < marks[2] - before
    assert marks[-2] - added < times.total_seconds < marks[-1] - before
    assert times.num_preemptions == 0
