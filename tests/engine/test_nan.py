"""NaN in logits ends a request with an error that says so, and no other.

The embedded checkpoint with a broken row: the digit 9 has no embedding, so whatever has read a 9
has NaN. Where that is, the same engine with the whole checkpoint tells.
"""

import asyncio
import functools
import json
import logging
import math
from dataclasses import replace

import pytest
import torch
from invariants import check_scheduler
from ranks_in_threads import ranks_of
from safetensors.torch import load_file

from checkpoints import assert_idle, copy_checkpoint, edit_tensors, rare
from nanovllm import LLM, TINY, AsyncLLM, BeamSearchParams, SamplingParams
from nanovllm.batch import read_rows, run
from nanovllm.layers.embed_head import local_vocab
from nanovllm.sampling_params import StructuredOutputsParams

NINE = ord("9")
OPTIONS = {
    "device": "cpu",
    "kvcache_block_size": 16,
    "num_kvcache_blocks": 24,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 24,
    "max_model_len": 128,
}
STARTS = [100, 193, 200, 6, 240, 17, 900, 302, 26, 110]
PROMPTS = [f"count from {start}: " for start in STARTS]
GREEDY = SamplingParams(temperature=0, max_tokens=24)
DRAWN = SamplingParams(temperature=0.7, max_tokens=24, seed=3)


def break_row(path, name, row):
    """A checkpoint with NaN in a row of a matrix; its head is apart from its embedding."""
    copy_checkpoint(TINY, path)
    whole = load_file(path / "model.safetensors")["model.embed_tokens.weight"]
    tensors = {"model.embed_tokens.weight": whole.clone(), "lm_head.weight": whole.clone()}
    tensors[name][row] = torch.nan
    edit_tensors(path, **{key.replace(".", "__"): tensor for key, tensor in tensors.items()})
    return path


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    path = tmp_path_factory.mktemp("broken") / "model"
    return break_row(path, "model.embed_tokens.weight", NINE)


def until_nan(prompt, token_ids):
    """The tokens that there are before NaN, and whether that comes."""
    for i, token in enumerate([*prompt, *token_ids[:-1]]):  # the last is not read
        if token == NINE:
            return token_ids[: max(0, i + 1 - len(prompt))], True
    return token_ids, False


def params_of(kind):
    """Sampling parameters of one of KINDS."""
    if kind == "structured":
        pytest.importorskip("llguidance", reason='pip install ".[structured-outputs]"')
    return KINDS[kind]


def complete(path, params, prompts=PROMPTS, **options):
    """The outputs, with the engine's books checked after each step."""
    with LLM(path, **{**OPTIONS, **options}) as llm:
        ids = [llm.add_request(prompt, params) for prompt in prompts]
        found = {}
        while not llm.is_finished():
            found.update((output.request_id, output) for output in llm.step())
            check_scheduler(llm.scheduler)
        assert_idle(llm)
        return [found[i] for i in ids], llm.metrics()


def assert_only_nan_ends(found, wanted):
    """Each completion of `wanted` up to its NaN. Returns how many tokens those with one have."""
    ended = []
    for output, whole in zip(found, wanted, strict=True):
        has_nan = []
        for mine, theirs in zip(output.outputs, whole.outputs, strict=True):
            tokens, is_lost = until_nan(output.prompt_token_ids, theirs.token_ids)
            assert mine.token_ids == tokens
            assert mine.finish_reason == ("error" if is_lost else theirs.finish_reason)
            assert mine.text == (bytes(tokens).decode() if is_lost else theirs.text)
            assert mine.logprobs is None or len(mine.logprobs) == len(tokens)
            has_nan.append(is_lost)
            ended += [len(tokens)] * is_lost
        assert (output.error is not None) == any(has_nan)
        assert output.error is None or "the model computed NaN for this request" in output.error
    return ended


KINDS = {
    "greedy": GREEDY,
    "drawn": DRAWN,
    "filters": SamplingParams(temperature=0.7, top_p=0.9, top_k=8, max_tokens=24, seed=3),
    "edits": SamplingParams(
        temperature=0, max_tokens=24, repetition_penalty=1.01, min_tokens=3, logit_bias={65: 1.0}
    ),
    "words": SamplingParams(temperature=0.5, max_tokens=24, seed=1, bad_words=["11 12"]),
    "log-probabilities": SamplingParams(temperature=0, max_tokens=24, logprobs=3),
    "structured": SamplingParams(
        temperature=0.3,
        max_tokens=24,
        seed=2,
        structured_outputs=StructuredOutputsParams(regex=r"[1-9][0-9]*( [0-9]+)+"),
    ),
    "stop": SamplingParams(temperature=0, max_tokens=24, stop=["7 ", "12"]),
    "several": SamplingParams(temperature=1.0, max_tokens=16, seed=5, n=3),
}


@functools.cache
def whole_answers(kind):
    """Outputs of the whole checkpoint."""
    return complete(TINY, params_of(kind))[0]


SYNCHRONOUS = [
    (kind, False) if kind in ("greedy", "structured") else rare(kind, False) for kind in KINDS
]


@pytest.mark.parametrize(("kind", "overlap"), [*((kind, True) for kind in KINDS), *SYNCHRONOUS])
def test_nan_ends_its_request_and_no_other(kind, overlap, broken):
    """It became token 0, or ended the whole call where a grammar did not allow that."""
    params = params_of(kind)
    found, metrics = complete(broken, params, overlap=overlap)
    ended = assert_only_nan_ends(found, whole_answers(kind))
    assert 0 in ended and max(ended) > 1, "at once, and in the middle"
    assert len(ended) < len(PROMPTS) * params.n
    assert metrics["num_finished_by_error"] == len(ended)
    assert metrics["num_finished"] == len(PROMPTS)
    assert metrics["num_generated_tokens"] == metrics["num_sampled_tokens"]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_nan_on_a_gpu(kind, broken):
    """In CUDA graphs, too."""
    options = {"device": "cuda", "dtype": "float32"}
    wanted, _ = complete(TINY, params_of(kind), **options)
    found, metrics = complete(broken, params_of(kind), **options)
    ended = assert_only_nan_ends(found, wanted)
    assert metrics["num_finished_by_error"] == len(ended) > 0
    assert metrics["num_graph_replays"] > 0


def test_the_engine_goes_on_and_says_it_once(broken, caplog):
    """Also in blocks that have had NaN."""
    short = SamplingParams(temperature=0, max_tokens=8)
    clean = [PROMPTS[0], PROMPTS[2], PROMPTS[4]]
    with caplog.at_level(logging.WARNING, "nanovllm"), LLM(broken, **OPTIONS) as llm:
        first = llm.generate(clean, short, use_tqdm=False)
        llm.generate(["9" * 90] * 2 + ["1" * 30 + "9" * 60] * 2, GREEDY, use_tqdm=False)
        assert llm.metrics()["num_finished_by_error"] == 4
        llm.reset_prefix_cache()
        again = llm.generate(clean, short, use_tqdm=False)
    assert [o["token_ids"] for o in again] == [o["token_ids"] for o in first]
    assert len([r for r in caplog.records if "computed NaN" in r.message]) == 1


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("model.embed_tokens.weight", NINE),
        ("lm_head.weight", 3),  # of the first rank's part of the vocabulary
        ("lm_head.weight", 270),  # of the other's
    ],
)
@pytest.mark.parametrize("kind", ["greedy", "drawn", rare("filters"), rare("structured")])
@pytest.mark.usefixtures("threads")
def test_nan_that_one_of_two_ranks_sees(kind, name, row, tmp_path):
    path = break_row(tmp_path / "model", name, row)
    with LLM(path, tensor_parallel_size=2, overlap=True, **OPTIONS) as llm:
        found = llm.generate(PROMPTS, params_of(kind), use_tqdm=False)
        assert len(ranks_of(llm).runners) == 2
    assert 3 in local_vocab(272, 0, 2) and 270 in local_vocab(272, 1, 2)
    if name == "lm_head.weight":
        assert {o["finish_reason"] for o in found} == {"error"}
        assert all(not output["token_ids"] for output in found)
    else:
        assert_only_nan_ends(found, complete(TINY, params_of(kind))[0])


def test_a_stream_ends_with_the_error(broken):
    [whole] = complete(TINY, GREEDY, ["count from 6: "])[0]
    tokens, is_lost = until_nan(whole.prompt_token_ids, whole.outputs[0].token_ids)
    assert is_lost and len(tokens) > 3
    params = replace(GREEDY, stop=["9 is never followed by this"])  # so the 9 is held back
    with LLM(broken, **OPTIONS) as llm:
        news = list(llm.stream("count from 6: ", params))
    assert [t for output in news for t in output.outputs[0].token_ids] == tokens
    assert "".join(output.outputs[0].text for output in news) == bytes(tokens).decode()
    assert [output.finished for output in news] == [False] * (len(news) - 1) + [True]
    assert [output.error is None for output in news] == [True] * (len(news) - 1) + [False]
    assert news[-1].outputs[0].finish_reason == "error"


def test_of_several_completions_in_a_stream_each_end_is_told_once(broken):
    params = SamplingParams(temperature=2.5, max_tokens=16, seed=5, n=6)
    [whole] = complete(TINY, params, ["count from 100: "])[0]
    with LLM(broken, **OPTIONS) as llm:
        told = [each for news in llm.stream("count from 100: ", params) for each in news.outputs]
    ends = {}
    for i, completion in enumerate(whole.outputs):
        mine = [each for each in told if each.index == i]
        tokens, is_lost = until_nan(whole.prompt_token_ids, completion.token_ids)
        assert [t for each in mine for t in each.token_ids] == tokens
        reasons = [each.finish_reason for each in mine]
        ends[i] = "error" if is_lost else completion.finish_reason
        assert reasons == [None] * (len(mine) - 1) + [ends[i]]
    assert len(set(ends.values())) == 2, "all end alike"


@pytest.mark.parametrize("method", [AsyncLLM.generate, AsyncLLM.stream])
def test_async(method, broken):
    """In the middle, at once (an end is all there is to tell then), and not at all."""
    prompts = ["count from 6: ", "count from 9: ", "count from 100: "]

    async def ask():
        async with AsyncLLM(broken, **OPTIONS) as llm:
            return [await all_of(method(llm, prompt, GREEDY)) for prompt in prompts]

    async def all_of(outputs):
        return [output async for output in outputs]

    num_tokens = []
    for outputs, whole in zip(asyncio.run(ask()), complete(TINY, GREEDY, prompts)[0], strict=True):
        tokens, is_lost = until_nan(whole.prompt_token_ids, whole.outputs[0].token_ids)
        last, news = outputs[-1], outputs[-1:] if method is AsyncLLM.generate else outputs
        assert [token for output in news for token in output.outputs[0].token_ids] == tokens
        assert last.finished and (last.error is not None) == is_lost
        assert last.outputs[0].finish_reason == ("error" if is_lost else "length")
        num_tokens.append(len(tokens))
    assert num_tokens[1] == 0 < num_tokens[0] < num_tokens[2] == GREEDY.max_tokens


@pytest.mark.slow  # errors of requests come from replicas as their outputs do
def test_replicas(broken):
    wanted, _ = complete(TINY, GREEDY)
    with LLM(broken, data_parallel_size=2, **OPTIONS) as llm:
        found = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        news = list(llm.stream("count from 6: ", GREEDY))
        metrics = llm.metrics()
    ended = assert_only_nan_ends(found, wanted)
    assert news[-1].finished and "computed NaN" in news[-1].error
    assert metrics["num_finished_by_error"] == len(ended) + 1
    assert metrics["num_replica_restarts"] == 0


def test_rows_of_a_file(broken, tmp_path):
    wanted, _ = complete(TINY, GREEDY)
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    request = {"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "9"}}
    (tmp_path / "requests.jsonl").write_text(json.dumps(request))
    with LLM(broken, **OPTIONS) as llm:
        results = list(run(llm, read_rows(source), GREEDY))
        [answer] = run(llm, read_rows(tmp_path / "requests.jsonl"), GREEDY)
    assert answer.to_dict()["response"]["status_code"] == 500
    assert answer.to_dict()["error"]["code"] == "server_error"
    rows = [result.to_dict() for result in sorted(results, key=lambda result: result.row.number)]
    for row, whole in zip(rows, wanted, strict=True):
        _, is_lost = until_nan(whole.prompt_token_ids, whole.outputs[0].token_ids)
        if is_lost:
            assert "computed NaN" in row["error"] and row["generated_text"] is None
        else:
            assert row["error"] is None and row["generated_text"] == whole["text"]


def test_scores(broken):
    """NaN in the middle of a text, and at its end."""
    texts = ["1 2 3", "1 9 3", "9", "12", "1 2 9"]
    with LLM(broken, **OPTIONS) as llm, LLM(TINY, **OPTIONS) as whole:
        scores = llm.score(texts, use_tqdm=False)
        wanted = whole.score(texts, use_tqdm=False)
    for text, score, want in zip(texts, scores, wanted, strict=True):
        if "9" in text:
            assert "computed NaN" in score.error and math.isnan(score.total_logprob)
            assert score.logprobs == score.ranks == []
        else:
            assert score == want


def test_prompt_logprobs_of_a_row_that_is_nan_in_one_column(tmp_path):
    """No log-probability is right then, and none was NaN."""
    path = break_row(tmp_path / "model", "lm_head.weight", 200)
    with LLM(path, **OPTIONS) as llm:
        [score] = llm.score(["1 2 3"], use_tqdm=False)
    assert "computed NaN" in score.error


def lose_first_row(llm):
    """Have the first hidden state of the next step be NaN, after all layers: no other sees it."""
    norm = llm.model_runner.model.model.norm
    compute = norm.whole_forward

    def with_nan(*args):
        norm.whole_forward = compute
        hidden = compute(*args).clone()
        hidden[0] = torch.nan
        return hidden

    norm.whole_forward = with_nan


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_vectors(pooling):
    """Vectors of texts in two chunks. The last hidden state is right here: only the mean is NaN."""
    with LLM(TINY, **OPTIONS) as llm:
        lose_first_row(llm)
        [lost] = llm.embed(["1" * 40], pooling, use_tqdm=False)
        [right] = llm.embed(["2" * 40], pooling, use_tqdm=False)
        assert llm.metrics()["num_finished_by_error"] == (pooling == "mean")
    assert right.error is None and len(right.outputs.embedding) == 128
    assert (lost.error is None) == (pooling == "last")
    assert (lost.outputs.embedding == []) == (pooling == "mean")


def test_a_score_of_which_one_token_is_lost():
    """The first, in the first of two chunks: the next token is right."""
    with LLM(TINY, **OPTIONS) as llm:
        lose_first_row(llm)
        lost, right = (llm.score([each * 40], use_tqdm=False)[0] for each in "12")
        assert llm.metrics()["num_finished_by_error"] == 1
    assert "computed NaN" in lost.error and lost.logprobs == lost.ranks == []
    assert right.error is None and len(right.logprobs) == 39


def test_a_vector_without_a_next_token(tmp_path):
    """A model with a broken head gives nothing."""
    path = break_row(tmp_path / "model", "lm_head.weight", 200)
    with LLM(path, **OPTIONS) as llm:
        [lost] = llm.embed(["1 2 3"], use_tqdm=False)
    assert "computed NaN" in lost.error and lost.outputs.embedding == []


def test_beams(broken):
    params = BeamSearchParams(beam_width=2, max_tokens=6)
    with LLM(broken, **OPTIONS) as llm:
        lost, right = llm.beam_search(["count from 195: ", "count from 100: "], params)
    assert "computed NaN" in lost.error and lost.sequences == []
    assert right.error is None and len(right.sequences) == 2
