"""Beam search against transformers, against vLLM's algorithm in its plainest form, and brute force.

What transformers calls a beam search is the same search where nothing ends early. Its scores
are cumulative log-probabilities by the length of the output alone (here: with the prompt), and of
what ends it keeps only the `num_beams` most likely of all candidates at each step (here: every
candidate), so that here the outcome is at least as likely.
"""

import functools
import itertools
import math
import pickle
from dataclasses import FrozenInstanceError, fields

import numpy as np
import pytest
import torch

from checkpoints import (
    PROMPT,
    PROMPTS,
    SMALL,
    TINY,
    assert_idle,
    assert_usable,
    copy_checkpoint,
    edit_json,
    greedy,
    make_checkpoint,
    reference,
    reference_model,
)
from nanovllm import LLM, BeamSearchOutput, BeamSearchParams, SamplingParams
from nanovllm.requests.beam_search import beam_search

# -- oracles --------------------------------------------------------------------------------------


@functools.cache
def model_logprobs(path, prefix):
    """Log-probability of every token after `prefix`, by transformers without any cache."""
    with torch.inference_mode():
        logits = reference_model(path)(torch.tensor([prefix])).logits[0, -1]
    return logits.log_softmax(-1).tolist()


@functools.cache
def toy_logprobs(seed, vocab, prefix):
    """Log-probabilities of a random language model, which is a table."""
    logits = 2 * np.random.default_rng([seed, *prefix]).normal(size=vocab)
    return (logits - np.log(np.exp(logits).sum())).tolist()


def score(ids, total, eos, length_penalty):
    return total / (len(ids) - (ids[-1] in eos)) ** length_penalty


def plain_search(logprobs, prompt, width, max_tokens, length_penalty=1.0, eos=()):
    """vLLM's loop: it never stops early, and sorts everything at the end."""
    beams, completed = [(tuple(prompt), 0.0)], []
    for _ in range(max_tokens):
        grown = []
        for ids, total in beams:
            row = logprobs(ids)
            for token in sorted(range(len(row)), key=lambda t: -row[t])[: 2 * width]:
                new = ((*ids, token), total + row[token])
                (completed if token in eos else grown).append(new)
        grown.sort(key=lambda beam: -score(*beam, eos, length_penalty))
        beams = grown[:width]
    completed = sorted(completed + beams, key=lambda beam: -score(*beam, eos, length_penalty))
    return completed[:width]


def all_sequences(logprobs, prompt, max_tokens, eos=()):
    """Every possible output with its log-probability."""
    found = []
    for length in range(1, max_tokens + 1):
        for output in itertools.product(range(len(logprobs(tuple(prompt)))), repeat=length):
            is_end = output[-1] in eos or length == max_tokens
            if is_end and not set(output[:-1]) & set(eos):
                prefixes = [(*prompt, *output[:i]) for i in range(length)]
                total = sum(logprobs(p)[t] for p, t in zip(prefixes, output, strict=True))
                found.append(((*prompt, *output), total))
    return found


def transformers_search(path, prompt, params, **options):
    """Sequences and scores by transformers."""
    result = reference_model(path).generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        num_beams=params.beam_width,
        num_return_sequences=params.beam_width,
        max_new_tokens=params.max_tokens,
        do_sample=False,
        length_penalty=params.length_penalty,
        early_stopping="never",
        return_dict_in_generate=True,
        output_scores=True,
        pad_token_id=0,
        **options,
    )
    scores = result.sequences_scores.tolist() if params.beam_width > 1 else []
    return result.sequences.tolist(), scores


def assert_found(output, expected, eos=()):
    """Check an output's (tokens, log-probability) pairs, and its finish reasons."""
    found = output.sequences
    assert [tuple(beam.tokens) for beam in found] == [ids for ids, _ in expected]
    assert [beam.cum_logprob for beam in found] == pytest.approx([t for _, t in expected], abs=1e-4)
    for beam in found:
        last = beam.tokens[-1]
        reasons = ("stop", last) if last in eos else ("length", None)
        assert (beam.finish_reason, beam.stop_reason) == reasons


# -- the search by itself -------------------------------------------------------------------------


def toy_search(seed, vocab, prompts, params, eos=(), max_model_len=100):
    """`beam_search` in a toy language model, and how many sequences each step asked for."""
    counts = []

    def next_tokens(sequences):
        counts.append(len(sequences))
        rows = [toy_logprobs(seed, vocab, tuple(ids)) for _, ids in sequences]
        best = [sorted(range(vocab), key=lambda t, r=row: -r[t]) for row in rows]
        return [
            {token: row[token] for token in ids[: 2 * params.beam_width]}
            for ids, row in zip(best, rows, strict=True)
        ]

    found = beam_search(
        prompts, params, next_tokens, eos_token_ids=eos, max_model_len=max_model_len
    )
    return [BeamSearchOutput(beams) for beams in found], counts


@pytest.mark.parametrize("length_penalty", [-1.5, 0.0, 0.7, 1.0, 3.0])
@pytest.mark.parametrize("width", [1, 2, 3, 10])
@pytest.mark.parametrize("eos", [(), (4,), (4, 0)], ids=str)
def test_search_is_vllms(eos, width, length_penalty):
    prompts = [[1, 2, 3], [4], [5, 5]]
    params = BeamSearchParams(width, 7, length_penalty=length_penalty)
    for seed in range(4):
        outputs, _ = toy_search(seed, 9, prompts, params, eos)
        for prompt, output in zip(prompts, outputs, strict=True):
            logprobs = functools.partial(toy_logprobs, seed, 9)
            expected = plain_search(logprobs, prompt, width, 7, length_penalty, eos)
            assert_found(output, expected, eos)


@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 1.0, 2.0])
@pytest.mark.parametrize(("eos", "max_tokens"), [((), 3), ((2,), 4), ((0, 2), 6)], ids=str)
def test_search_that_keeps_everything_is_exhaustive(eos, max_tokens, length_penalty):
    """With three tokens at most nine beams go on: none of the best sequences can be missed."""
    params = BeamSearchParams(10, max_tokens, length_penalty=length_penalty)
    for seed in range(3):
        [output], _ = toy_search(seed, 3, [[1, 2]], params, eos)
        logprobs = functools.partial(toy_logprobs, seed, 3)
        every = all_sequences(logprobs, [1, 2], max_tokens, eos)
        every.sort(key=lambda beam: -score(*beam, eos, length_penalty))
        assert len(every) > 10 or len(eos) == 2
        assert_found(output, every[:10], eos)


def test_search_stops_when_nothing_can_become_better():
    """With the same outcome as `plain_search`, which goes on: see `test_search_is_vllms`."""
    for length_penalty, fewer in ((-1.0, True), (0.0, True), (10.0, False)):
        params = BeamSearchParams(2, 40, length_penalty=length_penalty)
        [output], counts = toy_search(0, 4, [[1, 2]], params, (3,))
        logprobs = functools.partial(toy_logprobs, 0, 4)
        assert_found(output, plain_search(logprobs, [1, 2], 2, 40, length_penalty, (3,)), (3,))
        assert counts[:3] == [1, 2, 2]
        assert (len(counts) < 40) is fewer


def test_finished_prompts_ask_for_nothing():
    """The last prompt ends at the model's length, in the middle of the others' search."""
    params = BeamSearchParams(3, 5)
    outputs, counts = toy_search(0, 9, [[1], [2, 2], [3] * 8], params, max_model_len=10)
    assert counts == [3, 9, 6, 6, 6]
    lengths = [{len(beam.tokens) for beam in output.sequences} for output in outputs]
    assert lengths == [{6}, {7}, {10}]
    assert_found(outputs[2], plain_search(functools.partial(toy_logprobs, 0, 9), [3] * 8, 3, 2))


def test_every_candidate_may_end_its_beam():
    params = BeamSearchParams(1, 5)
    [output], counts = toy_search(0, 2, [[1]], params, (0, 1))
    assert counts == [1]
    assert len(output.sequences) == 1
    assert output.sequences[0].finish_reason == "stop"


# -- in the engine --------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 2, 4, 10])
def test_without_ends_it_is_that_of_transformers(width, llm, checkpoint):
    """Scores, too: all outputs are equally long."""
    prompts = [PROMPT, [7] * 20, list(range(40))]
    for length_penalty in (0.0, 1.0):
        params = BeamSearchParams(width, 8, length_penalty=length_penalty)
        outputs = llm.beam_search(prompts, params)
        for prompt, output in zip(prompts, outputs, strict=True):
            sequences, scores = transformers_search(checkpoint, prompt, params)
            assert [beam.tokens for beam in output.sequences] == sequences
            assert {beam.finish_reason for beam in output.sequences} == {"length"}
            ours = [beam.cum_logprob / 8**length_penalty for beam in output.sequences]
            assert ours[: len(scores)] == pytest.approx(scores, abs=1e-4)
    assert_usable(llm, checkpoint)


def test_width_1_is_greedy(llm, checkpoint):
    outputs = llm.beam_search(PROMPTS, BeamSearchParams(1, 9))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        [beam] = output.sequences
        assert beam.tokens == prompt + reference(checkpoint, prompt, 9)
    params = greedy(9, logprobs=0)
    sums = [o.outputs[0].cumulative_logprob for o in llm.generate(PROMPTS, params, False)]
    assert [o.sequences[0].cum_logprob for o in outputs] == pytest.approx(sums, abs=1e-4)


@pytest.fixture(scope="module")
def ending(checkpoint, tmp_path_factory):
    """A checkpoint whose end-of-sequence tokens are likely somewhere."""
    path = copy_checkpoint(checkpoint, tmp_path_factory.mktemp("ending") / "model")
    expected = reference(checkpoint, PROMPT, 9)
    edit_json(path / "generation_config.json", eos_token_id=[expected[2], expected[6]])
    return path


@pytest.mark.parametrize("overlap", [False, True], ids=["synchronous", "overlap"])
def test_ends_are_those_of_vllm(overlap, ending):
    prompts = [PROMPT, [3, 4], PROMPT[:3]]
    reasons = set()
    with LLM(ending, overlap=overlap, **SMALL) as llm:
        eos = llm.eos_token_ids
        logprobs = functools.partial(model_logprobs, ending)
        for width, length_penalty in ((1, 1.0), (3, 0.0), (3, 1.0), (4, 2.5)):
            params = BeamSearchParams(width, 9, length_penalty=length_penalty)
            for prompt, output in zip(prompts, llm.beam_search(prompts, params), strict=True):
                expected = plain_search(logprobs, prompt, width, 9, length_penalty, eos)
                assert_found(output, expected, eos)
                reasons |= {beam.finish_reason for beam in output.sequences}
        ignored = llm.beam_search(prompts, BeamSearchParams(3, 9, ignore_eos=True))
        for prompt, output in zip(prompts, ignored, strict=True):
            assert_found(output, plain_search(logprobs, prompt, 3, 9))
        assert_idle(llm)
    assert reasons == {"stop", "length"}


def test_ends_are_at_least_as_likely_as_in_transformers(ending):
    """transformers gives up candidates that would end a beam, see above. Some here are good."""
    prompts = [PROMPT, [3, 4], PROMPT[:3]]
    params = BeamSearchParams(3, 9, length_penalty=0.0)
    with LLM(ending, **SMALL) as llm:
        outputs = llm.beam_search(prompts, params)
        eos = sorted(llm.eos_token_ids)
    gains = []
    for prompt, output in zip(prompts, outputs, strict=True):
        _, scores = transformers_search(ending, prompt, params, eos_token_id=eos)
        ours = [beam.cum_logprob for beam in output.sequences]
        gains += [a - b for a, b in zip(ours, scores, strict=True)]
    assert min(gains) > -1e-4 and max(gains) > 0.1


TEXTS = ["1 2 3 4 5", "the ", "a b c"]


@pytest.fixture(scope="module")
def tiny_llm():
    with LLM(TINY, **SMALL) as llm:
        yield llm


def test_embedded_checkpoint_is_that_of_transformers(tiny_llm):
    """Here all ends are among the most likely candidates, and both are the same."""
    params = BeamSearchParams(4, 12, length_penalty=0.0)
    outputs = tiny_llm.beam_search(TEXTS, params)
    ends = set()
    for text, output in zip(TEXTS, outputs, strict=True):
        sequences, scores = transformers_search(TINY, list(text.encode()), params)
        for beam, ids, total in zip(output.sequences, sequences, scores, strict=True):
            end = ids.index(258) + 1 if 258 in ids else len(ids)  # it pads
            assert beam.tokens == ids[:end]
            assert beam.cum_logprob == pytest.approx(total, abs=1e-3)
            assert (beam.finish_reason == "stop") is (beam.stop_reason == 258) is (258 in ids)
            ends.add(beam.finish_reason)
    assert ends == {"stop", "length"}


def test_text_has_prompt_and_special_tokens(tiny_llm):
    [output] = tiny_llm.beam_search("1 2 3 4 5", BeamSearchParams(2, 4, length_penalty=0.0))
    assert [beam.text for beam in output.sequences] == [
        "1 2 3 4 5<|im_end|>",
        "1 2 3 4 5 6<|im_end|>",
    ]


def test_every_form_of_prompt(llm, tiny_llm):
    params = BeamSearchParams(2, 3)
    forms = [{"prompt": "a b"}, {"prompt_token_ids": list(b"a b")}, list(b"a b"), "a b"]
    outputs = tiny_llm.beam_search(forms, params)
    for form in forms[1:]:
        outputs += tiny_llm.beam_search(form, params)
    texts = [[beam.text for beam in output.sequences] for output in outputs]
    assert texts == [["a b56 ", "a b566"]] * 7
    assert tiny_llm.beam_search([], params) == []
    [bare] = llm.beam_search(PROMPT, params)  # without tokenizer
    assert [beam.text for beam in bare.sequences] == ["", ""]


def test_more_beams_than_the_vocabulary_has_tokens(tmp_path):
    path = make_checkpoint(tmp_path / "model", vocab_size=3)
    logprobs = functools.partial(model_logprobs, path)
    every = sorted(all_sequences(logprobs, [1, 2], 3), key=lambda beam: -beam[1])
    assert len(every) == 27
    with LLM(path, **SMALL) as llm:
        [output] = llm.beam_search([1, 2], BeamSearchParams(10, 3))
    assert_found(output, every[:10])


@pytest.mark.parametrize(
    ("limits", "room"),
    [({"max_model_len": 24}, 24), ({"num_kvcache_blocks": 2, "max_model_len": 64}, 32)],
    ids=["context", "pool"],
)
def test_search_ends_with_the_room_there_is(limits, room, checkpoint):
    """The beams wait for each other where the pool has no room for all."""
    prompts = [list(range(room - 3)), PROMPT[:2]]
    with LLM(checkpoint, **{**SMALL, **limits}) as llm:
        outputs = llm.beam_search(prompts, BeamSearchParams(3, 5))
        assert_idle(llm)
    logprobs = functools.partial(model_logprobs, checkpoint)
    for prompt, output, count in zip(prompts, outputs, (3, 5), strict=True):
        assert_found(output, plain_search(logprobs, prompt, 3, count))


def test_prefix_cache_serves_the_beams(llm):
    """Two whole blocks of 40 tokens are served; only the first step computes all."""
    llm.beam_search(list(range(40)), BeamSearchParams(4, 3))
    assert llm.metrics()["num_prefill_tokens"] == 40 + 4 * 9 + 4 * 10


def test_progress_is_silent_or_shows_steps(llm, capfd):
    llm.beam_search(PROMPTS, BeamSearchParams(2, 3))
    assert capfd.readouterr() == ("", "")
    llm.beam_search(PROMPTS, BeamSearchParams(2, 3), use_tqdm=True)
    out, err = capfd.readouterr()
    assert out == "" and "Beam search" in err and "3/3" in err and "Generating" not in err


# -- what is refused ------------------------------------------------------------------------------

NAN, INF = math.nan, math.inf
REFUSED = [
    ("beam_width", ValueError, "be between 1 and 10", [0, -1, 11]),
    ("beam_width", TypeError, "be an integer", [2.0, True, None, "2"]),
    ("max_tokens", ValueError, "be at least 1", [0, -1]),
    ("max_tokens", TypeError, "be an integer", [2.0, True, None]),
    ("ignore_eos", TypeError, "be True or False", [1, None]),
    ("temperature", ValueError, "be finite", [NAN, INF]),
    ("temperature", TypeError, "be a number", [None, "0", False]),
    ("length_penalty", ValueError, "be finite and -10 to 10", [NAN, -INF, 10.5, -11, 10**400]),
    ("length_penalty", TypeError, "be a number", [None, True, "1"]),
]


@pytest.mark.parametrize(
    ("name", "error", "rule", "value"),
    [(name, error, rule, value) for name, error, rule, values in REFUSED for value in values],
    ids=lambda item: str(item)[:20],
)
def test_wrong_value_is_named(name, error, rule, value):
    with pytest.raises(error) as caught:
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 3, name: value})
    assert str(caught.value) == f"`{name}` must {rule}, got {value!r}"


@pytest.mark.parametrize("value", [0.7, -1, 1e-9])
def test_temperature_is_0(value):
    with pytest.raises(ValueError) as caught:
        BeamSearchParams(2, 3, temperature=value)
    assert str(caught.value) == (
        f"`temperature` must be 0, got {value!r}: beams are the most likely sequences, generate() "
        "draws others"
    )


def test_every_parameter_has_a_wrong_value():
    assert {name for name, *_ in REFUSED} == {field.name for field in fields(BeamSearchParams)}


def test_parameters_are_plain_and_frozen():
    params = BeamSearchParams(np.int8(10), np.uint16(300), True, length_penalty=np.float32(0.5))
    assert params == BeamSearchParams(10, 300, ignore_eos=True, length_penalty=0.5, temperature=0)
    assert [type(value) for value in vars(params).values()] == [int, int, bool, float, float]
    assert pickle.loads(pickle.dumps(params)) == params
    with pytest.raises(FrozenInstanceError):
        params.beam_width = 3
    with pytest.raises(TypeError, match="positional arguments"):
        BeamSearchParams(2, 3, False, 0.0)
    with pytest.raises(TypeError, match="include_stop_str_in_output"):
        BeamSearchParams(2, 3, include_stop_str_in_output=True)


def test_mistakes_queue_nothing(llm, checkpoint):
    params = BeamSearchParams(2, 3)
    before = llm.metrics()
    for wrong in (SamplingParams(), None, {"beam_width": 2}, [params]):
        with pytest.raises(TypeError, match=r"^`params` must be a BeamSearchParams, got "):
            llm.beam_search(PROMPT, wrong)
    with pytest.raises(ValueError, match=r"^`prompts\[1\]` must leave room for one token"):
        llm.beam_search([PROMPT, [1] * 128], params)
    with pytest.raises(TypeError, match=r"^`sampling_params` must be a SamplingParams"):
        llm.generate(PROMPT, params)
    assert llm.metrics() == before
    request_id = llm.add_request(PROMPT, greedy(3))
    with pytest.raises(RuntimeError, match="without other requests"):
        llm.beam_search(PROMPT, params)
    assert llm.abort(request_id)
    assert_usable(llm, checkpoint)


def test_closed_engine_says_so(checkpoint):
    llm = LLM(checkpoint, **SMALL)
    llm.exit()
    with pytest.raises(RuntimeError, match="this engine is closed"):
        llm.beam_search([], BeamSearchParams(2, 3))
