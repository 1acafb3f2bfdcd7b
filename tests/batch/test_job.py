"""`run`: rows in, results out, in a window; and the same with an engine."""

import inspect
import itertools
import json
import queue
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from engine import StandIn
from hypothesis import given
from hypothesis import strategies as st

import nanovllm.batch
from nanovllm import LLM, SamplingParams, StructuredOutputsParams
from nanovllm.batch import Result, ResumableSink, job, run
from nanovllm.batch.ahead import Ahead
from nanovllm.batch.identity import default_params, describe_job, describe_model, differences
from nanovllm.batch.job import BETWEEN_STEPS, MAX_HELD
from nanovllm.batch.rows import as_rows
from nanovllm.config import Config
from nanovllm.requests.json_params import PARAMETERS

GREEDY = SamplingParams(temperature=0, max_tokens=8)


def texts(results):
    return {result.row.number: result.answer()["generated_text"] for result in results}


@given(st.integers(0, 60), st.sets(st.integers(0, 60)), st.booleans(), st.integers(1, 5))
def test_each_row_has_one_result(count, bad, ordered, max_num_seqs):
    llm = StandIn(max_num_seqs)
    rows = [f"{i} bad" if i in bad else f"{i} good" for i in range(count)]
    results = [*run(llm, rows, ordered=ordered)]
    numbers = [result.row.number for result in results]
    assert sorted(numbers) == [*range(count)]
    assert not ordered or numbers == sorted(numbers)
    for result in results:
        if result.row.number in bad:
            assert result.error == "`prompt` must be good, got a bad one"
            assert result.output is None
        else:
            assert result.error is None
            assert result.answer()["generated_text"] == f"{result.row.number} good"[::-1]


def test_the_window_is_bounded_and_filled_a_few_rows_at_a_time():
    llm, read = StandIn(max_num_seqs=40, rate=0.2), itertools.count()
    rows = ({"prompt": f"p{next(read)}"} for _ in range(1000))
    assert sum(1 for _ in run(llm, rows)) == 1000
    growth = [now - before for before, now in itertools.pairwise(llm.counts)]
    assert max(llm.counts) == 80 and max(growth) <= BETWEEN_STEPS
    assert min(llm.counts[5:40]) >= 40
    wide = StandIn(max_num_seqs=400, rate=0.2)
    assert sum(1 for _ in run(wide, (f"p{i}" for i in range(3000)))) == 3000
    assert wide.counts[0] == 2 * BETWEEN_STEPS  # the first step does not wait for all
    assert min(wide.counts[5:30]) >= 400  # and later ones always have what they can run


def test_fields_that_look_like_parameters_are_named_once_for_a_job(caplog, monkeypatch):
    llm = StandIn(max_num_seqs=2)
    rows = [
        {"prompt": "a", "temprature": None, "maxTokens": 4, "label": 1, None: 2, "max_tokens": 3},
        {"prompt": "b", "maxTokens": 4, "temprature": 1},
    ]
    for _ in range(2):
        assert [result.error for result in run(llm, rows)] == [None, None]
        said = [message.split("`")[1::2] for message in caplog.messages]
        assert said == [["maxTokens", "max_tokens"], ["temprature", "temperature"]]
        caplog.clear()
    monkeypatch.setattr(job, "MAX_NAMES", len(PARAMETERS) + 3)  # those of rows without an end, say
    assert len([*run(llm, [{"prompt": "a", "x": 1, "y": 2, "maxTokens": 3}])]) == 1
    assert caplog.messages == []


def test_fields_that_name_an_adapter_are_warned_of(caplog):
    """They were copied without a word, and all rows had the job's."""
    names = "lora_request", "adapter", "loraPath"
    rows = [{"prompt": "a", **dict.fromkeys(names, "x"), "adapted": 1}] * 2
    assert [result.error for result in run(StandIn(), rows)] == [None, None]
    said = "rows have a field `%s`, which has no effect and is copied to the results; a job has one"
    for message, name in zip(caplog.messages, names, strict=True):
        assert message.startswith(said % name) and "--adapter" in message


def test_results_that_wait_for_their_turn_are_bounded():
    """The first row takes long: others pile up behind it, but not all."""
    llm, read, given = StandIn(max_num_seqs=2), itertools.count(), 0
    ahead = []

    def rows():
        for number in range(400):
            ahead.append(next(read) - given)
            yield {"prompt": "slow" if number == 0 else f"p{number}"}

    for result in run(llm, rows(), ordered=True):
        assert result.row.number == given
        given += 1
    assert given == 400
    assert 2 * 4 < max(ahead) <= MAX_HELD * 4


def test_leaving_and_stopping_drop_what_is_not_finished():
    llm = StandIn()
    results = run(llm, [f"p{i}" for i in range(50)])
    next(results)
    results.close()
    assert llm.is_finished()
    asked = itertools.count()
    found = [*run(llm, [f"p{i}" for i in range(50)], stop=lambda: next(asked) >= 5)]
    assert 0 < len(found) < 50 and llm.is_finished()
    llm.add_request("p", GREEDY)
    with pytest.raises(RuntimeError, match="without other requests"):
        run(llm, ["p"])


def test_slow_rows_do_not_keep_results_waiting():
    """Each row is sent after the result of the one before it is there."""
    source = queue.Queue()
    rows = Ahead(as_rows(iter(source.get, None)))
    source.put("p0")
    count = 0
    for result in run(StandIn(), rows):
        count += 1
        assert result.row.number == count - 1
        source.put(f"p{count}" if count < 5 else None)
    assert count == 5


def test_what_reading_ahead_raises_is_raised():
    def rows():
        yield from as_rows(["p"])
        raise OSError("gone")

    ahead = Ahead(rows())
    assert next(ahead).number == 0
    for _ in range(2):
        with pytest.raises(OSError, match="gone"):
            next(ahead)


def test_rows_without_a_seed_get_one_of_their_own():
    llm = StandIn()
    drawn = SamplingParams(temperature=1, max_tokens=5)
    rows = ["p0", "p1", {"prompt": "p2", "seed": 7}, {"prompt": "p3", "temperature": 0}]
    rows += [{"prompt": "p4", "seed": -1, "max_tokens": 3}]  # another name for none
    [*run(llm, rows, drawn)]
    seeds = [params.seed for _, params in llm.asked]
    assert seeds[2:4] == [7, None]
    assert len({*seeds[:2], seeds[4]} - {None}) == 3
    assert llm.asked[4][1].max_tokens == 3
    again = StandIn()
    [*run(again, rows, drawn)]
    assert [params.seed for _, params in again.asked] == seeds
    other = StandIn()
    other.config.seed = 1
    [*run(other, rows, drawn)]
    assert other.asked[0][1].seed != seeds[0]


@pytest.mark.slow
def test_memory_grows_by_a_row_s_key_alone(tmp_path):
    """A key in a set has some 100 bytes; a row that is kept has many times as many."""
    most = []
    for count in (20_000, 200_000):
        command = [sys.executable, str(Path(__file__).with_name("engine.py")), str(count)]
        (directory := tmp_path / str(count)).mkdir()
        done = subprocess.run(
            command, cwd=directory, capture_output=True, text=True, check=True
        ).stdout
        most.append(int(done))
    print(most)
    assert 1024 * (most[1] - most[0]) < 150 * 180_000


# -- what a job is ------------------------------------------------------------------------------


def test_a_job_is_known_by_what_its_results_depend_on(tiny, tmp_path):
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in Path(tiny).iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    job = describe_job(Config(tiny), GREEDY, shard="1/1")
    assert describe_job(Config(str(copy), max_num_seqs=7), GREEDY, shard="1/1") == job
    weights = bytearray((copy / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (copy / "model.safetensors").write_bytes(weights)
    [changed] = differences(job["model"], describe_model(copy))
    assert changed.startswith("weights was")
    for config, params, name in (
        (Config(tiny, dtype="float16"), GREEDY, "engine.dtype"),
        (Config(tiny, seed=1), GREEDY, "engine.seed"),
        (Config(tiny), replace(GREEDY, top_k=2), "sampling.top_k"),
        (
            Config(tiny),
            replace(GREEDY, structured_outputs=StructuredOutputsParams(regex="a")),
            "sampling.structured_outputs",
        ),
    ):
        [changed] = differences(job, describe_job(config, params, shard="1/1"))
        assert changed.startswith(f"{name} was"), changed
    assert json.loads(json.dumps(job)) == job


def test_a_job_of_a_version_without_some_options_goes_on_with_their_defaults(tiny, tmp_path):
    """Refused is only what asks for something else than that version did."""
    job = describe_job(Config(tiny), GREEDY)
    old = json.loads(json.dumps(job))
    del old["engine"]["logprobs_mode"]
    for name in ("logprobs_mode", "logprob_token_ids", "return_sampling_mask"):
        del old["sampling"][name]
    path, [row] = tmp_path / "out.jsonl", as_rows(["1+1="])
    with ResumableSink(path, old) as sink:
        sink.write(Result(row, error="none"))
    with ResumableSink(path, job) as sink:
        assert [*sink.unfinished(iter([row]))] == []
    other = describe_job(Config(tiny, logprobs_mode="processed_logprobs"), GREEDY)
    with pytest.raises(ValueError, match=r'engine\.logprobs_mode was "raw_logprobs" and is'):
        ResumableSink(path, other)


def test_defaults_are_the_checkpoints_under_those_given(tmp_path):
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.25, "top_k": 9}')
    params = default_params(Config(str(tmp_path)), {"top_k": 3})
    assert (params.temperature, params.top_k) == (0.25, 3)
    plain = default_params(Config(str(tmp_path), generation_config="vllm"), {})
    assert plain == SamplingParams()
    with pytest.raises(ValueError, match="`top_p`"):
        default_params(Config(str(tmp_path)), {"top_p": 3})


# -- with an engine -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llm(tiny):
    with LLM(tiny, device="cpu", max_num_seqs=8, max_num_batched_tokens=256) as llm:
        yield llm


def test_answers_are_those_of_generate(llm):
    prompts = [f"{i}+{7 * i}=" for i in range(40)]
    expected = [each.outputs[0].text for each in llm.generate(prompts, GREEDY, use_tqdm=False)]
    assert texts(run(llm, prompts, GREEDY)) == dict(enumerate(expected))
    conversations = [[{"role": "user", "content": prompt}] for prompt in prompts[:9]]
    expected = [each.outputs[0].text for each in llm.chat(conversations, GREEDY, use_tqdm=False)]
    assert texts(run(llm, prompts[:9], GREEDY, chat=True)) == dict(enumerate(expected))
    rows = [{"messages": each} for each in conversations]
    assert texts(run(llm, rows, GREEDY)) == dict(enumerate(expected))


def test_a_conversation_may_have_arguments_of_its_own(llm):
    template = "{{ x }}{{ messages[0].content }}={{ 'on' if add_generation_prompt else 'off' }}"
    options = {"chat_template": template, "chat_template_kwargs": {"x": 1}}
    message = [{"role": "user", "content": "m"}]
    rows = [
        {"messages": message},
        {"messages": message, "chat_template_kwargs": {"x": 2}},
        {"messages": message, "add_generation_prompt": False},
        {"messages": "none"},
    ]
    results = sorted(run(llm, rows, GREEDY, **options), key=lambda result: result.row.number)
    prompts = [result.output and result.output.prompt for result in results]
    assert prompts == ["1m=on", "2m=on", "1m=off", None]
    assert results[3].error == "`messages` must be a list of messages, got str"
    with pytest.raises(ValueError, match="`chat_template` must be the text"):
        run(llm, rows, GREEDY, chat=True, chat_template="")


def test_a_row_that_is_too_long_is_an_error_and_the_others_go_on(llm):
    results = [*run(llm, ["1+1=", "x" * 5000, {"prompt_token_ids": [10**6]}, "2+2="], GREEDY)]
    errors = {result.row.number: result.error for result in results}
    assert errors[0] is None and errors[3] is None
    assert "max_model_len" in errors[1] and "vocabulary" in errors[2]


def test_sampled_rows_are_those_of_a_job_that_was_not_interrupted(llm, tmp_path):
    """Killed twice, with other rows beside them each time."""
    prompts = [f"count from {i}:" for i in range(30)]
    drawn = SamplingParams(temperature=1.5, max_tokens=6)
    whole = texts(run(llm, prompts, drawn))
    for most in (7, 9, 30):
        with ResumableSink(tmp_path / "out.jsonl") as sink:
            results = run(llm, sink.unfinished(as_rows(prompts)), drawn)
            for result in itertools.islice(results, most):
                sink.write(result)
            results.close()
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert {line["_row"]: line["generated_text"] for line in lines} == whole
    assert len(set(whole.values())) > 20, "they are drawn"


def test_all_completions_and_log_probabilities_are_written(llm):
    rows = [{"prompt": "1+1=", "n": 2, "temperature": 1, "logprobs": 1, "prompt_logprobs": 0}]
    [result] = run(llm, rows, GREEDY)
    line = json.loads(result.to_line())
    assert [each["index"] for each in line["outputs"]] == [0, 1]
    assert line["num_generated_tokens"] == sum(len(each["token_ids"]) for each in line["outputs"])
    assert line["outputs"][0]["logprobs"][0][0]["logprob"] <= 0
    assert len(line["prompt_logprobs"]) == line["num_prompt_tokens"]
    assert [*line][:: len(line) - 1] == ["_key", "error"]


def test_the_example_of_the_package_runs_and_goes_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("prompts.jsonl").write_text('{"prompt": "127+345="}\n')
    document = inspect.getdoc(nanovllm.batch)
    code = inspect.cleandoc(document.split("\n\n", 1)[1].split("\n\nThe same")[0])
    exec(code, {})
    with Path("prompts.jsonl").open("a") as file:
        file.write('{"prompt": "reverse: hello ="}\n')
    exec(code, {})
    lines = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    assert [line["generated_text"] for line in lines] == ["472", "olleh"]
