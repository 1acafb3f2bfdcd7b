"""Log-probabilities of prompts and `LLM.score`, against transformers."""

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from modes import PREFIXED as PROMPTS
from modes import SHARED, Mode, in_every_mode, run_in

from checkpoints import (
    SMALL,
    TINY,
    assert_usable,
    generate_checked,
    greedy,
    make_checkpoint,
    rare,
    reference,
    reference_logprobs,
    run_past_a_failure,
    tokens,
)
from faults import fail_at
from nanovllm import LLM, SamplingParams
from nanovllm.engine.scheduler import Scheduler
from nanovllm.llm import classification_of
from nanovllm.outputs import CompletionOutput, Logprob, RequestOutput, ScoreOutput, TokenLogprobs
from nanovllm.sampling import prompt_logprobs

TOLERANCE = 1e-4
# How many log-probabilities of each prompt's tokens are wanted; tokens to generate.
WANTED: list[tuple[int | None, int]] = [
    (None, 5),
    (0, 3),
    (5, 4),
    (5, 1),
    (0, 6),
    (None, 4),
    (20, 2),
    (5, 2),
    (0, 1),
    (3, 3),
    (1, 1),
    (None, 5),
]
PARAMS = [greedy(length, prompt_logprobs=count) for count, length in WANTED]


def assert_right(path: Any, outputs: Any, params: Any) -> None:
    """All log-probabilities of prompts are there and right, and the greedy tokens too."""
    for output, own in zip(outputs, params, strict=True):
        assert (output.prompt_logprobs is None) == (own.prompt_logprobs is None)
        if own.prompt_logprobs is not None:
            assert_prompt_is_right(path, output, own.prompt_logprobs)
        if own.is_greedy:
            expected = reference(path, output.prompt_token_ids, own.max_tokens)
            assert output["token_ids"] == expected


def assert_prompt_is_right(path: Any, output: Any, count: int) -> None:
    token_ids, places = output.prompt_token_ids, list(output.prompt_logprobs)
    assert len(places) == len(output.prompt_logprobs) == len(token_ids)
    assert places[0] is None
    assert output.num_cached_tokens == 0, "logits of tokens that were not computed"
    for token, place, row in zip(
        token_ids[1:], places[1:], reference_logprobs(path, token_ids), strict=False
    ):
        best = row.sort(descending=True).values.tolist()
        assert next(iter(place)) == token, "the prompt's own token comes first"
        for other, item in place.items():
            assert item.logprob == pytest.approx(float(row[other]), abs=TOLERANCE)
            assert item.logprob == pytest.approx(best[item.rank - 1], abs=TOLERANCE), "rank"
            assert item.decoded_token is None
        top = {item.rank for item in place.values()}
        assert top == {*range(1, count + 1), place[token].rank}
        assert len(place) == len(top)


@in_every_mode(
    *("chunks", "chunks-overlap", "chunks-of-7", "chunks-of-7-overlap"),
    *("no-cache", "no-cache-overlap"),
    pools=False,
)
def test_prompts_have_the_log_probabilities_of_transformers(mode: Mode, checkpoint: Any) -> None:
    """Chunks cut prompts anywhere, and requests with and without share prefixes."""
    outputs, metrics = run_in(mode, checkpoint, PROMPTS, PARAMS)
    assert_right(checkpoint, outputs, PARAMS)
    cached = [output.num_cached_tokens for output in outputs]
    assert any(cached) == mode.caches
    assert metrics["num_cached_tokens"] == sum(cached)


@pytest.mark.parametrize("size", [2, rare(4)])
@pytest.mark.usefixtures("threads")
def test_ranks_put_their_logits_together(
    size: int, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """131 tokens: the last of two ranks has fewer than the first, the last of four has none."""
    path = make_checkpoint(tmp_path / "odd", vocab_size=131, num_key_value_heads=1)
    monkeypatch.setattr(prompt_logprobs, "ROWS", 5)
    prompts = [*PROMPTS, [130, 129, 64, 63, 0, 130]]
    params = [*PARAMS, greedy(3, prompt_logprobs=20)]
    outputs, _ = generate_checked(
        path, prompts, params, tensor_parallel_size=size, max_num_batched_tokens=24
    )
    assert_right(path, outputs, params)


@pytest.mark.slow
def test_workers_take_part(checkpoint: Any) -> None:
    """Ranks in processes: the plan says what they compute."""
    options = {"tensor_parallel_size": 2, "max_num_batched_tokens": 24, "overlap": True}
    outputs, metrics = generate_checked(checkpoint, PROMPTS, PARAMS, **options)
    assert metrics["tensor_parallel_size"] == 2
    assert_right(checkpoint, outputs, PARAMS)


@pytest.mark.parametrize("overlap", [False, True], ids=["synchronous", "overlap"])
@pytest.mark.usefixtures("low_guesses")
def test_preempted_prompts_have_each_place_once(
    overlap: bool, checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Preempted in the middle of their prompt they go on with it; later they keep what they have
    and may use the cache.
    """
    known = []  # of the preempted: places that they have, and tokens of the prompt
    whole = []  # and whether they must compute it all again
    preempt = Scheduler.preempt

    def record(self: Scheduler, seq: Any) -> None:
        if seq.results.prompt_logprobs is not None:
            known.append((len(seq.results.prompt_logprobs), seq.num_prompt_tokens))
            whole.append(seq.needs_whole_prompt)
        preempt(self, seq)

    monkeypatch.setattr(Scheduler, "preempt", record)
    prompts = [[i, *range(12 * i, 12 * i + 13)] for i in range(3)]
    prompts += [[100 - i for i in range(60)], [*range(50, 80)], [*range(40)], [8] * 33]
    params = [greedy(40, prompt_logprobs=i % 3) for i in range(3)]
    params += [greedy(9, prompt_logprobs=2) for _ in range(4)]
    outputs, metrics = generate_checked(
        checkpoint, prompts, params, overlap=overlap, num_kvcache_blocks=9,
        max_num_seqs=5, max_num_batched_tokens=6,
    )  # fmt: skip
    assert_right(checkpoint, outputs, params)
    assert metrics["num_preemptions"] == len(known) > 0
    assert any(1 < places < size for places, size in known), "none in the middle of its prompt"
    assert any(places == size for places, size in known), "none after its prompt"
    assert whole == [places < size for places, size in known]


@pytest.mark.parametrize("overlap", [False, True], ids=["synchronous", "overlap"])
@pytest.mark.parametrize("k", [rare(1), 2, rare(5), 9])
def test_failed_launch_is_repeated(
    k: int, overlap: bool, checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results of the failed step do not count, and its places come once."""
    with LLM(checkpoint, overlap=overlap, **{**SMALL, "max_num_batched_tokens": 24}) as llm:
        ids = [llm.add_request(*request) for request in zip(PROMPTS, PARAMS, strict=True)]
        fail_at(
            monkeypatch, llm.model_runner, "launch", k, RuntimeError("out of memory"), after=True
        )
        found = run_past_a_failure(llm)
    assert_right(checkpoint, [found[i] for i in ids], PARAMS)


def test_cache_serves_others_before_and_after(checkpoint: Any) -> None:
    """A prompt whose log-probabilities are wanted is computed; what it leaves serves others."""
    prompt = [*SHARED, *range(10)]
    plain, scored = greedy(3), greedy(3, prompt_logprobs=2)
    for first, second in ((plain, scored), (scored, plain), (scored, scored)):
        with LLM(checkpoint, **SMALL) as llm:
            outputs = [
                llm.generate(prompt, params, use_tqdm=False)[0] for params in (first, second)
            ]
            assert_right(checkpoint, outputs, [first, second])
            assert outputs[1].num_cached_tokens == (48 if second is plain else 0)
            assert_usable(llm, checkpoint)


def test_completions_share_the_prompt(checkpoint: Any) -> None:
    """n > 1: the prompt's come once, whichever completion computes it; the draws are the same."""
    prompt = [*SHARED, *range(10)]
    scored = SamplingParams(2.0, 8, n=3, seed=4, prompt_logprobs=2)
    plain = SamplingParams(2.0, 8, n=3, seed=4)
    for options in ({}, {"max_num_batched_tokens": 9}, {"enable_prefix_caching": False}):
        outputs, metrics = generate_checked(checkpoint, [prompt] * 2, [scored, plain], **options)
        assert_right(checkpoint, outputs, [scored, plain])
        drawn = [[c.token_ids for c in output.outputs] for output in outputs]
        assert drawn[0] == drawn[1]
        assert len({tuple(tokens) for tokens in drawn[0]}) == 3
        if metrics["num_cached_tokens"]:
            assert metrics["num_prefill_tokens"] < 3 * len(prompt)


def test_beside_other_wishes(checkpoint: Any) -> None:
    """Log-probabilities of the prompt are the model's alone, whatever controls say."""
    common = {"seed": 3, "max_tokens": 6, "temperature": 1.5}
    wishes: list[dict[str, Any]] = [
        {"logprobs": 4},
        {"logprobs": 0, "top_k": 3, "repetition_penalty": 3.0},
        {"logit_bias": {5: 50.0}, "presence_penalty": 1.0},
        {"allowed_token_ids": [1, 2, 3], "min_p": 0.1},
        {},
    ]
    prompts = [[*SHARED[: 9 * i + 1], i] for i in range(len(wishes))]
    for budget in (64, 10):
        options = {"max_num_batched_tokens": budget}
        params = [SamplingParams(**common, **wish) for wish in wishes]
        alone, _ = generate_checked(checkpoint, prompts, params, **options)
        params = [SamplingParams(**common, **wish, prompt_logprobs=i + 1)
                  for i, wish in enumerate(wishes)]  # fmt: skip
        outputs, _ = generate_checked(checkpoint, prompts, params, **options)
        assert_right(checkpoint, outputs, params)
        assert tokens(outputs) == tokens(alone)
        for output, wish in zip(outputs, wishes, strict=True):
            places = output.outputs[0].logprobs
            assert (places is None) == ("logprobs" not in wish)
            if places is not None:
                ids = [*output.prompt_token_ids, *output["token_ids"]]
                rows = reference_logprobs(checkpoint, ids)[len(output.prompt_token_ids) - 1 :]
                for token, place, row in zip(output["token_ids"], places, rows, strict=False):
                    assert place[token].logprob == pytest.approx(float(row[token]), abs=TOLERANCE)
                assert len(places) == len(output["token_ids"])


def test_more_than_the_vocabulary_has(tmp_path: Any) -> None:
    path = make_checkpoint(tmp_path / "few", vocab_size=12)
    prompt, params = [1, 5, 11, 0, 3], greedy(3, prompt_logprobs=20, logprobs=20)
    with LLM(path, **SMALL) as llm:
        [output] = llm.generate(prompt, params, use_tqdm=False)
    assert output.prompt_logprobs is not None
    for places in (output.prompt_logprobs[1:], output.outputs[0].logprobs):
        assert [set(place) for place in places] == [set(range(12))] * len(places)
        totals = [sum(math.exp(item.logprob) for item in place.values()) for place in places]
        assert totals == pytest.approx([1] * len(places), abs=TOLERANCE)


@pytest.mark.parametrize("rows", [1, 3, 16])
def test_logits_of_some_rows_at_a_time(
    rows: int, checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits of all tokens of a step would be gigabytes for a large vocabulary."""
    monkeypatch.setattr(prompt_logprobs, "ROWS", rows)
    with LLM(checkpoint, **{**SMALL, "max_num_batched_tokens": 100}) as llm:
        compute = llm.model_runner.built.extras.prompt_logprobs._compute_logits
        sizes: list[int] = []

        def record(hidden: torch.Tensor) -> torch.Tensor:
            sizes.append(len(hidden))
            return compute(hidden)

        monkeypatch.setattr(
            llm.model_runner.built.extras.prompt_logprobs, "_compute_logits", record
        )
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert_right(checkpoint, outputs, PARAMS)
    assert max(sizes) == rows
    wanted = [p for p, own in zip(PROMPTS, PARAMS, strict=True) if own.prompt_logprobs is not None]
    assert sum(sizes) == sum(len(prompt) - 1 for prompt in wanted)


# -- LLM.score ------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 8}], ids=["whole", "chunks"])
def test_score_is_the_loss_of_transformers(options: dict[str, Any], checkpoint: Any) -> None:
    with LLM(checkpoint, **{**SMALL, **options}) as llm:
        for _ in range(2):  # what is cached changes nothing
            scores = llm.score(PROMPTS, use_tqdm=False)
            assert [score.prompt_token_ids for score in scores] == PROMPTS
            for score in scores:
                ids = score.prompt_token_ids
                rows = reference_logprobs(checkpoint, ids)
                expected = [float(rows[i, token]) for i, token in enumerate(ids[1:])]
                assert score.logprobs == pytest.approx(expected, abs=TOLERANCE)
                assert score.total_logprob == pytest.approx(sum(expected), rel=1e-5)
                if len(ids) == 1:
                    assert (score.logprobs, score.total_logprob) == ([], 0)
                    assert math.isnan(score.perplexity)
                else:
                    loss = -sum(expected) / len(expected)
                    assert score.perplexity == pytest.approx(math.exp(loss), rel=1e-4)
        assert llm.score([], use_tqdm=False) == []
        assert_usable(llm, checkpoint)


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 8}], ids=["whole", "chunks"])
def test_score_ranks_what_evaluations_ask_for(options: dict[str, Any], checkpoint: Any) -> None:
    """The likelihood of a continuation, and whether greedy decoding gives it."""
    context, start = PROMPTS[0], PROMPTS[0][:1]
    greedy_end, whole = reference(checkpoint, context, 6), reference(checkpoint, start, 6)
    other_end = [*greedy_end[:-1], (greedy_end[-1] + 1) % 128]
    texts = [[*context, *greedy_end], [*context, *other_end], [*start, *whole]]
    with LLM(checkpoint, **{**SMALL, **options}) as llm:
        scores = llm.score(texts, use_tqdm=False)
        alone = llm.score([5], use_tqdm=False)
    for score in scores:
        places = zip(
            reference_logprobs(checkpoint, score.prompt_token_ids), score.ranks, strict=False
        )
        for token, (row, rank) in zip(score.prompt_token_ids[1:], places, strict=True):
            above = int((row > row[token] + TOLERANCE).sum())
            assert above < rank <= int((row > row[token] - TOLERANCE).sum())
        assert len(score.ranks) == len(score.logprobs) == len(score.prompt_token_ids) - 1
    ends = [score.ranks[len(context) - 1 :] for score in scores[:2]]
    assert ends[0] == [1] * 6 and ends[1][:-1] == [1] * 5 and ends[1][-1] > 1
    assert [score.is_greedy for score in scores] == [False, False, True]
    assert (alone[0].ranks, alone[0].is_greedy) == ([], True)


@pytest.mark.parametrize("calls", ["generate", "stream"])
def test_tokens_are_not_decoded_without_detokenize(calls: str, monkeypatch: Any) -> None:
    with LLM(TINY, device="cpu", num_kvcache_blocks=8) as llm:
        params = greedy(4, logprobs=2, prompt_logprobs=2, detokenize=False)
        monkeypatch.setattr(llm.tokenizer, "decode", lambda *_, **__: pytest.fail("decoded"))
        for output in getattr(llm, calls)("127+345=", params):
            places = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
            items = [item for place in places for item in place.values()]
            assert len(items) > 8 and {item.decoded_token for item in items} == {None}
            assert pickle.loads(pickle.dumps(output)) == output


def test_score_of_text(tiny: str, reference: Any) -> None:
    texts = ["127+345=472", "127+345=999", "The answer"]
    with LLM(tiny, device="cpu", num_kvcache_blocks=8) as llm:
        scores = llm.score(texts, use_tqdm=False)
        # Products of other shapes add in another order.
        (alone,) = llm.score(texts[0], use_tqdm=False)
        assert alone.logprobs == pytest.approx(scores[0].logprobs, abs=TOLERANCE)
        for text, score in zip(texts, scores, strict=True):
            ids = torch.tensor([llm.tokenizer.encode(text)])
            assert score.prompt_token_ids == ids[0].tolist()
            with torch.inference_mode():
                loss = reference(ids, labels=ids).loss
            assert score.perplexity == pytest.approx(float(loss.exp()), rel=1e-3)
    assert scores[0].total_logprob > scores[1].total_logprob + 5


def test_score_refuses_what_generate_refuses(checkpoint: Any) -> None:
    with LLM(checkpoint, **SMALL) as llm:
        with pytest.raises(ValueError, match=r"`prompts\[1\]` must have at least one token"):
            llm.score([[1], []])
        with pytest.raises(ValueError, match="no tokenizer"):
            llm.score("text")
        with pytest.raises(ValueError, match="must leave room for one token"):
            llm.score([1] * 128)
        request_id = llm.add_request([1, 2], greedy(3))
        with pytest.raises(RuntimeError, match="are left"):
            llm.score([[1, 2]])
        assert llm.abort(request_id)
        assert_usable(llm, checkpoint)


def test_score_does_not_teach_how_long_texts_are(checkpoint: Any) -> None:
    """Their single tokens would make admission expect single tokens of everybody."""
    with LLM(checkpoint, **SMALL) as llm:
        llm.score(PROMPTS, use_tqdm=False)
        prompts = [[i, *range(13)] for i in range(8)]
        llm.generate(prompts, SamplingParams(0, 100), use_tqdm=False)
        assert llm.metrics()["num_preemptions"] == 0


# -- the results ----------------------------------------------------------------------------------


def text_of(token: int) -> str | None:
    return f"<{token}>" if token else None


@pytest.fixture(name="places")
def places_fixture() -> TokenLogprobs:
    places = TokenLogprobs(2, text_of)
    places.append_nothing()
    places.append([7, 7, 3, 99], [-0.25, -0.25, -1.5, -9.0], 1)  # more than asked for
    places.append([0, 5, 6], [-4.0, -0.5, -1.0], 4)
    return places


EXPECTED: list[Any] = [
    None,
    {7: Logprob(-0.25, 1, "<7>"), 3: Logprob(-1.5, 2, "<3>")},
    {0: Logprob(-4.0, 4, None), 5: Logprob(-0.5, 1, "<5>"), 6: Logprob(-1.0, 2, "<6>")},
]


def test_places_read_like_a_list(places: TokenLogprobs) -> None:
    assert len(places) == 3
    assert list(places) == EXPECTED
    assert [list(place) for place in places if place] == [[7, 3], [0, 5, 6]]
    assert [places[i] for i in range(-3, 3)] == EXPECTED * 2
    assert list(reversed(places)) == EXPECTED[::-1]
    for index in (slice(None), slice(1, 2), slice(-2, None), slice(None, None, -1), slice(5, 9)):
        assert places[index] == EXPECTED[index]
    for index in (3, -4):
        with pytest.raises(IndexError):
            places[index]
    with pytest.raises(TypeError):
        places["a"]
    assert places.index(None) == 0
    assert EXPECTED[2] in places
    assert places.total == -4.25
    assert places == EXPECTED == places == tuple(EXPECTED)
    assert places != EXPECTED[:2] and places != {} and places is not None
    assert repr(places) == repr(EXPECTED)
    with pytest.raises(TypeError, match="unhashable"):
        hash(places)


def test_places_without_the_most_likely() -> None:
    places = TokenLogprobs(0, text_of)
    places.append([7], [-0.25], 1)
    places.append([8, 1, 2], [-5.0, 0.0, 0.0], 31)
    assert list(places) == [{7: Logprob(-0.25, 1, "<7>")}, {8: Logprob(-5.0, 31, "<8>")}]
    assert not TokenLogprobs(3, text_of)
    twin = TokenLogprobs(0, text_of)
    for token, value, rank in ((7, -0.25, 1), (8, -5.0, 31)):
        twin.append_token(token, value, rank)
    assert twin == places and twin.total == places.total


def test_places_leave_out_what_cannot_come() -> None:
    """But for the token itself, and for labels, which have no ranks."""
    values = [-math.inf, -0.5, -math.inf, -math.inf]
    places = TokenLogprobs(3, text_of)
    places.append([7, 3, 1, 2], values, 9)
    own = Logprob(-math.inf, 9, "<7>")
    assert list(places) == [{7: own, 3: Logprob(-0.5, 1, "<3>")}]
    labels = TokenLogprobs(3, text_of, of_labels=True)
    labels.append([7, 3, 7, 2], values, 9)
    never = Logprob(-math.inf, None, "<2>")
    assert list(labels) == [{7: own, 3: Logprob(-0.5, None, "<3>"), 2: never}]
    assert pickle.loads(pickle.dumps(labels)) == labels
    lost = TokenLogprobs(1, text_of)
    lost.append([7, 3], [math.nan, math.nan], 1)
    assert list(lost[0]) == [7, 3]


@pytest.mark.parametrize(
    "twin", [copy.copy, copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))]
)
def test_places_can_be_copied_and_sent(twin: Any) -> None:
    places = TokenLogprobs(1, lambda token: f"{token:c}")  # which itself cannot be pickled
    places.append([70, 71], [-1.0, -0.5], 2)
    copied = twin(places)
    assert list(copied) == list(places) == [{70: Logprob(-1.0, 2, "F"), 71: Logprob(-0.5, 1, "G")}]
    assert copied.total == -1.0


def test_results_are_sent_without_the_tokenizer() -> None:
    params = greedy(4, logprobs=2, prompt_logprobs=2)
    with LLM(TINY, device="cpu", num_kvcache_blocks=8) as llm:
        [output] = llm.generate("127+345=", params, use_tqdm=False)
        [score] = llm.score("127+345=", use_tqdm=False)
    data = pickle.dumps(output)
    assert b"okenizer" not in data
    sent = pickle.loads(data)
    assert sent == copy.deepcopy(output) == output
    drawn = zip(sent["token_ids"], sent.outputs[0].logprobs, strict=True)
    texts = [place[token].decoded_token for token, place in drawn]
    assert texts == ["4", "7", "2", "<|im_end|>"]
    assert pickle.loads(pickle.dumps(score)) == score == ScoreOutput(**vars(score))


# -- labels -------------------------------------------------------------------------------------


def test_the_share_of_labels_is_no_more_than_one():
    """Rounded log-probabilities of float32 may sum up to more."""
    places = [{token: Logprob(math.log(0.5) + 6e-9, None, None) for token in (1, 2)}]
    completion = CompletionOutput(0, "", [1], "length", logprobs=places)
    output = RequestOutput(0, None, [3], [completion], True, 0)
    assert classification_of(output, [1, 2]).share == 1.0


def test_labels_have_the_probabilities_of_transformers(reference):
    """As the next token: among each other, and together among all tokens."""
    prompts, labels = ["127+345=", "9+9=", "count from 17:"], ["4", ord("1"), " ", "z"]
    tokens = [ord("4"), ord("1"), ord(" "), ord("z")]
    with LLM(TINY, max_model_len=256, num_kvcache_blocks=16) as llm:
        found = llm.classify(prompts, labels, use_tqdm=False)
        encode = llm.get_tokenizer().encode
        refused = llm.classify(["a", "x" * 999], labels, use_tqdm=False, on_error="return")
        for wrong, says in (
            (["4", "yes"], r"`labels\[1\]` must be a text of one token, got 'yes' with 3"),
            (["4"], "`labels` must be at least two different tokens"),
            (["4", ord("4")], "`labels` must be at least two different tokens"),
            ([1, 10**6], "vocabulary"),
            (["4", None], r"`labels\[1\]` must be an integer"),
            ("45", "`labels` must be a list"),
        ):
            with pytest.raises((TypeError, ValueError), match=says):
                llm.classify(prompts, wrong, use_tqdm=False)
    for prompt, output in zip(prompts, found, strict=True):
        ids = torch.tensor([encode(prompt)])
        probs = reference(ids).logits[0, -1].double().softmax(0)[tokens]
        assert output.share == pytest.approx(float(probs.sum()), rel=1e-3)
        assert output.probs == pytest.approx((probs / probs.sum()).tolist(), rel=2e-3, abs=1e-9)
        assert output.prompt_token_ids == ids[0].tolist() and output.error is None
    assert refused[0].error is None and sum(refused[0].probs) == pytest.approx(1)
    assert refused[1].probs == [] and "max_model_len" in refused[1].error
