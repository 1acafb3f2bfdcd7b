"""Results as callers keep and look at them: dictionaries, tables, and what is printed of them."""

import dataclasses
import json
import math

import pandas as pd
import pytest

import nanovllm
from checkpoints import SMALL, TINY, greedy
from nanovllm import (
    LLM,
    BeamSearchOutput,
    BeamSearchParams,
    BeamSearchSequence,
    ClassificationOutput,
    CompletionOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    Logprob,
    RequestMetrics,
    RequestOutput,
    SamplingParams,
    ScoreOutput,
)
from nanovllm.utils.record import Record

TEXT = "127+345="
CLASSES = [value for value in map(vars(nanovllm).get, nanovllm.__all__) if isinstance(value, type)]
OUTPUTS = [value for value in CLASSES if issubclass(value, Record)]


@pytest.fixture(scope="module", name="results")
def results_fixture():
    """Results of every call, the last one refused."""
    params = [SamplingParams(1.5, 4, n=2, seed=1, logprobs=2, prompt_logprobs=1), greedy(9)] * 2
    texts, options = [TEXT, TEXT + "\u2028é", "", "a" * 500], {"on_error": "return"}
    with LLM(TINY, **SMALL) as llm:
        return {
            "generate": llm.generate(texts, params, use_tqdm=False, **options),
            "stream": list(llm.stream(texts, params, **options)),
            "score": llm.score(texts, use_tqdm=False, **options),
            "classify": llm.classify(texts, ["a", "b"], use_tqdm=False, **options),
            "embed": llm.embed(texts, use_tqdm=False, **options),
            "beam_search": llm.beam_search(texts, BeamSearchParams(2, 4), **options),
        }


def test_outputs_survive_json(results):
    for outputs in results.values():
        for output in outputs:
            kept = output.to_dict()
            assert json.loads(json.dumps(kept, allow_nan=False)) == kept
            assert rebuilt(type(output), kept) == output
    assert {type(o) for outputs in results.values() for o in outputs} == {
        *(RequestOutput, ScoreOutput, ClassificationOutput, EmbeddingRequestOutput),
        BeamSearchOutput,
    }
    # without a dictionary of its own JSON has no way for a mapping
    [first, *_] = results["generate"]
    with pytest.raises(TypeError, match="not JSON serializable"):
        json.dumps(first)
    text = json.dumps({"all": results["generate"]}, default=lambda output: output.to_dict())
    assert json.loads(text) == {"all": [output.to_dict() for output in results["generate"]]}


def test_what_could_not_come_is_null_in_json():
    labels = list(b"ab")
    params = SamplingParams(
        max_tokens=1,
        top_k=1,
        seed=1,
        logprob_token_ids=labels,
        logprobs_mode="processed_logprobs",
    )
    with LLM(TINY, **SMALL) as llm:
        [output] = llm.generate([TEXT], params, use_tqdm=False)
    [place] = output.outputs[0].logprobs
    assert [place[label].logprob for label in labels] == [-math.inf] * 2
    kept = output.to_dict()
    assert json.loads(json.dumps(kept, allow_nan=False)) == kept
    [place] = kept["outputs"][0]["logprobs"]
    found = {item["token_id"]: item["logprob"] for item in place}
    assert [found[label] for label in labels] == [None] * 2


def rebuilt(kind, kept):
    """The output that a dictionary was made of."""
    parts = {
        "outputs": lambda value: (
            [rebuilt(CompletionOutput, item) for item in value]
            if isinstance(value, list)
            else rebuilt(EmbeddingOutput, value)
        ),
        "sequences": lambda value: [rebuilt(BeamSearchSequence, item) for item in value],
        "metrics": lambda value: RequestMetrics(**value),
        "prompt_logprobs": places,
        "logprobs": places if kind is CompletionOutput else list,
    }
    return kind(**{k: v if v is None or k not in parts else parts[k](v) for k, v in kept.items()})


def places(kept):
    return [
        place and {item.pop("token_id"): Logprob(**item) for item in map(dict, place)}
        for place in kept
    ]


def test_outputs_are_rows_of_a_table(results):
    outputs = results["generate"]
    frame = pd.DataFrame(map(dict, outputs))
    assert list(frame) == [
        *("request_id", "prompt", "text", "token_ids", "finish_reason", "num_prompt_tokens"),
        *("num_generated_tokens", "num_cached_tokens", "error"),
    ]
    for row, output in zip(frame.itertuples(), outputs, strict=True):
        assert (row.request_id, row.prompt) == (output.request_id, output.prompt)
        assert row.num_prompt_tokens == len(output.prompt_token_ids)
        if output.error is None:
            first = output.outputs[0]  # of two
            assert (row.text, row.token_ids) == (first.text, first.token_ids)
            assert (row.finish_reason, row.num_generated_tokens) == (
                first.finish_reason,
                len(first.token_ids),
            )
    assert frame.error.isna().tolist() == [True, True, False, False]
    assert frame.finish_reason[2:].tolist() == ["error"] * 2
    assert frame.num_generated_tokens.sum() == sum(len(o["token_ids"]) for o in outputs)
    frames = {name: pd.DataFrame(map(dict, outputs)) for name, outputs in results.items()}
    assert [o.perplexity for o in results["score"][:2]] == frames["score"].perplexity[:2].tolist()
    assert frames["score"].is_greedy.dtype == bool
    assert len(frames["embed"].embedding[0]) == len(results["embed"][0].outputs.embedding) > 0
    best = results["beam_search"][0].sequences[0]
    assert frames["beam_search"].text[0] == best.text
    assert frames["beam_search"].cum_logprob[0] == best.cum_logprob
    assert math.isnan(frames["beam_search"].cum_logprob[2])
    for name, frame in frames.items():
        assert not dataclasses.is_dataclass(results[name][0])  # pandas before 3.1 takes the fields
        pd.testing.assert_frame_equal(pd.DataFrame(results[name]), frame, check_like=True)


def test_reprs_are_short_and_say_what_matters(results):
    for outputs in results.values():
        for output in outputs:
            shown = repr(output)
            assert len(shown) < 600 and "\n" not in shown and "\u2028" not in shown
            assert type(output).__name__ in shown
            assert str(output) == shown
    sampled, drawn, _, refused = results["generate"]
    assert len(sampled.outputs) == repr(sampled).count("CompletionOutput(") == 2
    for part in (f"request_id={drawn.request_id}", "prompt_token_ids=<13 items>", "'stop'"):
        assert part in repr(drawn)
    assert repr(sampled).startswith(f"RequestOutput(request_id=0, prompt={TEXT!r}, ")
    assert "error='`prompts[3]` must" in repr(refused) and "aaa...aaa" in repr(refused)
    many = RequestOutput(1, "x\n" * 9999, [7] * 9999, sampled.outputs * 99, True, 0)
    assert len(repr(many)) < 900 and "<195 more>" in repr(many)
    long = sampled.outputs[0].logprobs[:1] * 9
    assert repr(CompletionOutput(0, "a", [1] * 9, None, logprobs=long)).count("items>") == 2
    assert repr(results["generate"][0].prompt_logprobs).count("Logprob(") < 10
    for outputs in results.values():  # pytest explains what differs
        with pytest.raises(AssertionError, match="Differing"):
            assert outputs[0] == outputs[1]


@pytest.mark.parametrize("kind", OUTPUTS)
def test_repr_of_what_is_half_built(kind):
    """A debugger meets such objects in the middle of unpickling."""
    assert len(OUTPUTS) == 10
    assert repr(object.__new__(kind)).startswith(f"{kind.__name__}(")
