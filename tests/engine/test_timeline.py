"""Timelines: valid files, whose counts are those of `metrics()`, whatever ends the recording."""

import asyncio
import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from host import make_scheduler, make_seq

from checkpoints import (
    PARAMS,
    PROMPTS,
    SMALL,
    copy_checkpoint,
    greedy,
    rare,
)
from faults import fail_at
from nanovllm import LLM, TINY, AsyncLLM, SamplingParams
from nanovllm.engine.sequence import InFlightStep, ScheduledSequence
from nanovllm.tracing import timeline, trace_file
from nanovllm.tracing.step_timer import StepTimer
from nanovllm.tracing.timeline import Timeline
from nanovllm.tracing.trace_events import SequenceRecord, StepRecord
from nanovllm.tracing.trace_file import TraceFile

# Twelve prompts, half of them with a common beginning, in a pool that holds about four.
TIGHT = {**SMALL, "num_kvcache_blocks": 12, "max_num_seqs": 6}
CROWD = [([i + 1] if i % 2 else [99] * 20) + [i] * (6 + i) for i in range(12)]
FACTS = {"device": "cpu", "windows": []}
COUNTED = ("num_steps", "num_prefill_tokens", "num_decode_tokens", "num_sampled_tokens")
ENDED = (
    *("num_finished", "num_aborted", "num_finished_by_stop", "num_finished_by_length"),
    *("num_generated_tokens", "num_prompt_tokens", "num_cached_tokens", "num_preemptions"),
)


def read(path):
    """The events of a whole file."""
    return json.loads(Path(path).read_text())


def select(events, **wanted):
    return [e for e in events if all(e.get(key) == value for key, value in wanted.items())]


def counts(events):
    """Counts in the file, under their names in `metrics()`."""
    steps = [event["args"] for event in select(events, cat="step")]
    seqs = [e["args"] for e in select(events, cat="request", name="request", ph="b")]
    reasons = Counter(seq["finish_reason"] for seq in seqs)
    ended = [seq for seq in seqs if seq["finish_reason"] in ("stop", "length")]
    left = {seq["request"] for seq in seqs} - {seq["request"] for seq in ended}
    finished = {seq["request"] for seq in ended} - {s["request"] for s in seqs if s not in ended}
    return {
        "num_steps": len(steps),
        "num_prefill_tokens": sum(step["prefill_tokens"] for step in steps),
        "num_decode_tokens": sum(step["decode_tokens"] for step in steps),
        "num_sampled_tokens": sum(step["sampled_tokens"] for step in steps),
        "step_seconds": sum(event["dur"] for event in select(events, cat="step")) / 1e6,
        "num_finished": len(finished),
        "num_aborted": len(left) if reasons["aborted"] else 0,
        "num_finished_by_stop": reasons["stop"],
        "num_finished_by_length": reasons["length"],
        "num_generated_tokens": sum(seq["generated_tokens"] for seq in ended),
        "num_prompt_tokens": sum(seq["prompt_tokens"] for seq in ended),
        "num_cached_tokens": sum(seq["cached_tokens"] for seq in ended),
        "num_preemptions": sum(step["preempted"] for step in steps),
    }


def assert_agrees(path, metrics, before=None):
    before = before or dict.fromkeys(metrics, 0)
    found, events = counts(read(path)), read(path)
    wanted = {name: metrics[name] - before[name] for name in (*COUNTED, *ENDED)}
    assert {name: found[name] for name in wanted} == wanted
    seconds = metrics["step_seconds"] - before["step_seconds"]
    assert found["step_seconds"] == pytest.approx(seconds, rel=1e-6)
    assert len(select(events, name="preempted")) == found["num_preemptions"]
    return found


def assert_valid(events):
    """Chrome's format: slices of a track follow or hold each other, asynchronous ones too, and
    viewers are told the names of all processes.
    """
    tracks, opened = defaultdict(list), defaultdict(list)
    for event in events:
        assert event["ph"] in "XiCbenM" and isinstance(event["pid"], int), event
        if event["ph"] == "X":
            assert event["dur"] >= 0
            tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        elif event["ph"] in "ben":
            opened[event["id"]].append(event)
    for slices in tracks.values():
        for (_, end), (begin, _) in pairwise(sorted(slices)):
            assert begin >= end - 5e-4  # a float has no more of so many microseconds
    for own in opened.values():
        stack = []
        for event in own:
            if event["ph"] == "b":
                stack.append((event["name"], event["ts"]))
            elif event["ph"] == "e":
                name, begin = stack.pop()
                assert name == event["name"] and begin <= event["ts"]
        assert not stack
        assert own[0]["name"] == own[-1]["name"] == "request"
        assert all(own[0]["ts"] <= event["ts"] <= own[-1]["ts"] for event in own)
    named = {event["pid"] for event in select(events, name="process_name")}
    assert {event["pid"] for event in events} <= named | {0}
    return len(tracks)


# -- what is in it ---------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [rare(False), True])
def test_counts_are_those_of_metrics(overlap, checkpoint, tmp_path):
    """With preemptions, hits, several completions and aborted requests."""
    path = tmp_path / "run.json"
    with LLM(checkpoint, overlap=overlap, trace=str(path), **TIGHT) as llm:
        llm.generate(CROWD, greedy(2), use_tqdm=False)  # all are expected to be so short
        llm.generate(CROWD, greedy(40), use_tqdm=False)
        llm.generate(CROWD[:3], SamplingParams(n=2, max_tokens=5, seed=1), use_tqdm=False)
        ids = [llm.add_request(prompt, greedy(30)) for prompt in CROWD[:8]]
        for _ in range(3):
            llm.step()
        assert llm.abort(ids[0]) and llm.abort(ids[-1])
        while not llm.is_finished():
            llm.step()
        metrics = llm.metrics()
    found = assert_agrees(path, metrics)
    assert found["num_preemptions"] and found["num_cached_tokens"] and found["num_aborted"] == 2
    events = read(path)
    assert assert_valid(events) == 2, "steps and host"
    args = [event["args"] for event in select(events, cat="step")]
    assert {step["held_by"] for step in args} >= {"blocks", ""}
    assert max(step["running"] for step in args) <= 6
    for event in select(events, name="KV blocks"):
        assert event["args"]["used"] + event["args"]["free"] == 12
    hits = select(events, name="prefix hit")
    assert len(hits) == sum(
        e["args"]["cached_tokens"] > 0 for e in select(events, name="request", ph="b")
    )
    [began] = select(events, name="recording began")
    assert began["args"]["max_num_seqs"] == 6
    assert events[-1]["name"] == "recording ended"


@pytest.mark.parametrize(
    ("prompts", "options", "held_by"),
    [
        ([[i] * 3 for i in range(4)], {"max_num_seqs": 2}, "sequences"),
        ([[i] * 9 for i in range(4)], {"max_num_seqs": 4, "max_num_batched_tokens": 9}, "tokens"),
        ([[7] * 40] * 2, {}, "prefix"),
        ([[i] * 20 for i in range(4)], {"num_kvcache_blocks": 4}, "blocks"),
    ],
)
def test_steps_say_what_the_first_that_waits_waits_for(
    prompts, options, held_by, checkpoint, tmp_path
):
    path = tmp_path / "run.json"
    with LLM(checkpoint, trace=path, **{**SMALL, **options}) as llm:
        llm.generate(prompts, greedy(2), use_tqdm=False)
    steps = [event["args"] for event in select(read(path), cat="step")]
    assert {step["held_by"] for step in steps if step["waiting"]} == {held_by}
    assert not any(step["held_by"] for step in steps if not step["waiting"])


def test_times_are_those_of_the_requests(checkpoint, tmp_path):
    path = tmp_path / "run.json"
    with LLM(checkpoint, trace=path, **SMALL) as llm:
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    phases = defaultdict(dict)
    for event in select(read(path), cat="request"):
        if event["ph"] in "be":
            phases[event["id"]].setdefault(event["name"], []).append(event["ts"] / 1e6)
    for output, own in zip(outputs, (phases[f"0.{i}"] for i in range(len(outputs))), strict=True):
        begin, end = own["request"]
        assert end - begin == pytest.approx(output.metrics.total_seconds, abs=1e-6)
        assert own["queued"] == pytest.approx(
            [begin, begin + output.metrics.queue_seconds], abs=1e-6
        )
        assert own["prefill"][1] - begin == pytest.approx(
            output.metrics.first_token_seconds, abs=1e-6
        )


@pytest.mark.parametrize("overlap", [False, True])
def test_waits_for_tokens_that_controls_need_are_no_part_of_launches(overlap, tmp_path):
    path = tmp_path / "run.json"
    params = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
    with LLM(TINY, overlap=overlap, trace=path, device="cpu", num_kvcache_blocks=8) as llm:
        for own in ({}, {"bad_words": ["xyz"]}):
            llm.generate("127+345=", SamplingParams(**params, **own), use_tqdm=False)
    events = read(path)
    assert_valid(events)
    names = [event["name"] for event in select(events, cat="host")]
    steps = [event["args"] for event in select(events, cat="step")]
    num_paused = 7 if overlap else 0  # of eight steps, but the first
    assert names.count("wait") - len(steps) == names.count("launch") - len(steps) == num_paused
    for name in ("schedule", "launch", "wait", "book"):
        total = sum(event["dur"] for event in select(events, cat="host", name=name))
        assert total == pytest.approx(sum(step[f"{name}_us"] for step in steps), abs=1e-2)


def test_nothing_of_a_text_is_in_it(tmp_path):
    path = tmp_path / "run.json"
    with LLM(TINY, trace=str(path), device="cpu", num_kvcache_blocks=8) as llm:
        llm.generate("reverse: hello =", SamplingParams(temperature=0, stop=["xyzzy"]), False)
    keys = {key for event in read(path) for key in event.get("args", {}) if event["ph"] != "i"}
    assert "hello" not in path.read_text() and "olleh" not in path.read_text()
    assert "xyzzy" not in path.read_text() and str(Path(TINY).parent) not in path.read_text()
    assert not {key for key in keys if "text" in key or "id" in key.split("_") or key == "prompt"}


def test_a_config_with_infinity_is_written_as_json(checkpoint, tmp_path):
    """Python writes and reads it; Perfetto does not."""
    path = tmp_path / "run.json"
    model = copy_checkpoint(checkpoint, tmp_path / "model", time_step_limit=[0.0, math.inf])
    assert "Infinity" in (model / "config.json").read_text()
    with LLM(model, trace=str(path), **SMALL) as llm:
        llm.generate([PROMPTS[0]], greedy(2), use_tqdm=False)
    events = json.loads(path.read_text(), parse_constant=pytest.fail)
    [began] = [event for event in events if event["name"] == "recording began"]
    assert began["args"]["config"]["time_step_limit"] == [0.0, None]


# -- when it begins and ends -----------------------------------------------------------------------


def test_off_records_nothing(checkpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(timeline, "Timeline", None)
    with LLM(checkpoint, **SMALL) as llm:
        llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        assert llm.core.timeline is None and llm.model_runner.timer is None
        assert all(step.noted is None for step in llm.core.in_flight)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("overlap", [False, True])
def test_a_block_is_recorded_alone(overlap, checkpoint, tmp_path):
    """Also one that begins and ends while requests run, when the model's directory is gone."""
    path = tmp_path / "block.json"
    model = shutil.copytree(checkpoint, tmp_path / "model")
    with LLM(str(model), overlap=overlap, **SMALL) as llm:
        shutil.rmtree(model)
        llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        for prompt in PROMPTS:
            llm.add_request(prompt, greedy(12))
        llm.step()
        llm.step()
        before = llm.metrics()
        with llm.trace(path):
            for _ in range(4):
                llm.step()
            after = llm.metrics()
        llm.step()
        assert llm.core.timeline is None
    found = {name: after[name] - before[name] for name in COUNTED}
    events = read(path)
    assert {name: counts(events)[name] for name in COUNTED} == found
    assert_valid(events)
    reasons = {e["args"]["finish_reason"] for e in select(events, name="request", ph="b")}
    assert "unfinished" in reasons


def test_a_block_that_raises_is_written(checkpoint, tmp_path, monkeypatch):
    path = tmp_path / "block.json"
    with LLM(checkpoint, **SMALL) as llm:
        with monkeypatch.context() as patch:
            fail_at(patch, llm.model_runner, "launch", 3, RuntimeError("out of memory"))
            with pytest.raises(RuntimeError, match="out of memory"), llm.trace(path):
                llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        found = assert_agrees(path, llm.metrics())
        assert found["num_aborted"] == len(PROMPTS) - found["num_finished"] > 0
        with llm.trace(path):  # anew
            llm.generate(PROMPTS[:2], PARAMS[:2], use_tqdm=False)
    assert counts(read(path))["num_finished"] == 2


@pytest.mark.parametrize("failing", ["_facts", "core.record"])
def test_a_block_that_cannot_begin_leaves_nothing(failing, checkpoint, tmp_path, monkeypatch):
    """Ctrl-C before it, for one."""
    path = tmp_path / "block.json"
    with LLM(checkpoint, **SMALL) as llm:
        owner = llm.core if "." in failing else llm
        with monkeypatch.context() as patch:
            fail_at(patch, owner, failing.rpartition(".")[2], 1, KeyboardInterrupt())
            with pytest.raises(KeyboardInterrupt), llm.trace(path):
                pass
        with llm.trace(path):
            llm.generate(PROMPTS[:2], PARAMS[:2], use_tqdm=False)
    assert counts(read(path))["num_finished"] == 2


def test_what_is_aborted_is_written_at_once(checkpoint, tmp_path):
    """Nothing may come after it for hours."""
    path = tmp_path / "block.json"
    with LLM(checkpoint, **SMALL) as llm, llm.trace(path):
        llm.add_request(PROMPTS[0], greedy(9))
        llm.step()
        llm.abort_all()
        assert path.read_text().count('"aborted"') == 1
        llm.add_request(PROMPTS[0], greedy(9))
        llm.step()
        llm.core.reset()
        assert path.read_text().count('"aborted"') == 2


def test_steps_are_written_when_a_second_has_passed(checkpoint, tmp_path, monkeypatch):
    path = tmp_path / "block.json"
    with LLM(checkpoint, **SMALL) as llm, llm.trace(path):
        llm.add_request(PROMPTS[0], greedy(9))
        llm.step()
        assert not path.read_text().count('"cat":"step"')
        monkeypatch.setattr(timeline, "FLUSH_SECONDS", 0.0)
        llm.step()
        assert path.read_text().count('"cat":"step"') == 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_leaves_the_file_alone(checkpoint, tmp_path):
    """Also where it leaves the block, or outlives it: then the file is free all the same."""
    path = tmp_path / "block.json"
    parent, (begin, end) = os.getpid(), os.pipe()
    with LLM(checkpoint, **SMALL) as llm:
        try:
            with llm.trace(path):
                llm.generate(PROMPTS[:2], PARAMS[:2], use_tqdm=False)
                child = os.fork()
            if not child:
                os.close(end)
                os.read(begin, 1)  # until the parent closes it
                os._exit(0)
        finally:
            if os.getpid() != parent:
                os._exit(1)
        assert counts(read(path))["num_finished"] == 2
        with llm.trace(path):
            llm.generate(PROMPTS[:1], PARAMS[:1], use_tqdm=False)
        os.close(end)
        assert os.waitpid(child, 0)[1] == 0
        os.close(begin)
    assert counts(read(path))["num_finished"] == 1


def test_an_engine_that_ends_with_requests_says_so(checkpoint, tmp_path):
    path = tmp_path / "run.json"
    llm = LLM(checkpoint, trace=str(path), **SMALL)
    llm.add_request(PROMPTS[0], greedy(9))
    llm.step()
    llm.exit()
    assert counts(read(path))["num_aborted"] == 1
    llm = LLM(checkpoint, trace=str(path), **SMALL)
    llm.add_request(PROMPTS[0], greedy(9))
    llm.step()
    del llm
    [seq] = select(read(path), name="request", ph="b")
    assert seq["args"]["finish_reason"] == "unfinished"


CHILDREN = """if True:
    import os, signal, sys
    from nanovllm import LLM, SamplingParams
    from nanovllm.tracing import timeline
    timeline.MAX_RECORDS = 1
    directory, path, options = sys.argv[1], sys.argv[2], eval(sys.argv[3])
    for end in ("interrupted", "killed"):
        if child := os.fork():
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
            continue
        llm = LLM(directory, **options, trace=os.path.join(path, end))
        llm.add_request([1, 2, 3], SamplingParams(temperature=0, max_tokens=50))
        for _ in range(6):
            llm.step()
        if end == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise KeyboardInterrupt
"""


def test_whatever_ends_the_process_the_file_is_readable(checkpoint, tmp_path):
    command = [sys.executable, "-c", CHILDREN, str(checkpoint), str(tmp_path), repr(SMALL)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert [*map(int, done.stdout.split())] == [-signal.SIGINT, -signal.SIGKILL], done.stderr
    interrupted, killed = ((tmp_path / end).read_text() for end in ("interrupted", "killed"))
    assert interrupted.endswith("]\n") and not killed.endswith("]\n")
    for text in (interrupted, killed + "]"):
        assert len(select(json.loads(text), cat="step")) == 6
    requests = select(json.loads(interrupted), name="request", ph="b")
    assert [e["args"]["finish_reason"] for e in requests]


def test_coroutines_record_too(tmp_path):
    path, block = tmp_path / "run.json", tmp_path / "block.json"

    async def work():
        async with AsyncLLM(TINY, device="cpu", num_kvcache_blocks=8) as llm:
            async with llm.trace(block):
                with pytest.raises(RuntimeError, match=r"recording to .*block.json"):
                    async with llm.trace(path):
                        pass
                outputs = [output async for output in llm.generate("127+345=")]
            assert outputs[-1].finished
            with pytest.raises(ValueError, match="must be a file"):
                async with llm.trace(tmp_path):
                    pass
            async with llm.trace(path):
                await asyncio.to_thread(llm.exit)

    asyncio.run(work())
    assert counts(read(block))["num_finished"] == 1
    assert read(path)[-1]["name"] == "recording ended"


# -- the file --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trace", "match"),
    [
        ("nowhere/run.json", "No such file"),
        ("", "path of a file"),
        (3, "path of a file"),
        (".", "Is a directory"),
    ],
)
def test_a_path_that_cannot_be_is_refused_before_anything_is_loaded(
    trace, match, checkpoint, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((TypeError, ValueError), match=f"`trace` must be .*{match}"):
        LLM(checkpoint, trace=trace, **SMALL)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", [None, True, False])
def test_a_block_wants_a_path(path, checkpoint, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with LLM(checkpoint, **SMALL) as llm:
        with (
            pytest.raises(TypeError, match=f"must be the path of a file, got {path}"),
            llm.trace(path),
        ):
            pass
        assert llm.core.timeline is None
    assert os.listdir() == []


OTHERS = [b"a paper\n", b"[1, 2]", b'[\n{"ph":"X","name":"of another program"}\n]\n', b"\x00\xff"]


@pytest.mark.parametrize("content", OTHERS)
def test_a_file_that_is_no_trace_is_kept(content, checkpoint, tmp_path):
    path = tmp_path / "mine.json"
    path.write_bytes(content)
    message = "`trace` must be a new file or an earlier trace, got .*mine.json', which holds"
    with pytest.raises(ValueError, match=message):
        LLM(checkpoint, trace=path, **SMALL)
    with LLM(checkpoint, **SMALL) as llm:
        with pytest.raises(ValueError, match=message), llm.trace(path):
            pass
        assert path.read_bytes() == content
        path.write_bytes(b"")
        with llm.trace(path):
            llm.generate(PROMPTS[:2], greedy(2), use_tqdm=False)
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])  # of a process that was killed
        with llm.trace(path):
            llm.generate(PROMPTS[:1], greedy(2), use_tqdm=False)
    assert counts(read(path))["num_finished"] == 1


def test_two_engines_do_not_share_a_file(checkpoint, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with LLM(checkpoint, trace=True, **SMALL) as llm:
        with pytest.raises(ValueError, match=r"got 'trace\.json': another engine is writing it"):
            LLM(checkpoint, trace=True, **SMALL)
        with pytest.raises(RuntimeError, match=r"recording to 'trace\.json'"), llm.trace("b.json"):
            pass
        llm.generate(PROMPTS[:1], greedy(2), use_tqdm=False)
    assert counts(read("trace.json"))["num_finished"] == 1
    assert os.listdir() == ["trace.json"]


def test_a_full_file_is_valid_and_says_so(tmp_path, caplog):
    file = TraceFile(str(tmp_path / "t.json"), max_bytes=300)
    for i in range(100):
        file.write([json.dumps({"ph": "i", "n": i}), "{}"])
    file.end()
    events = read(tmp_path / "t.json")
    assert [event["name"] for event in events[-2:]] == ["recording is full", "recording ended"]
    assert 10 < len(events) < 40 and (tmp_path / "t.json").stat().st_size < 800
    assert caplog.text.count("is full") == 1


def test_a_disk_that_fails_ends_the_recording_alone(checkpoint, tmp_path, monkeypatch, caplog):
    def fail(fd, data):
        raise OSError(28, "No space left on device")

    with LLM(checkpoint, trace=str(tmp_path / "t.json"), **SMALL) as llm:
        monkeypatch.setattr(timeline, "MAX_RECORDS", 1)
        monkeypatch.setattr(trace_file.os, "write", fail)
        assert len(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == len(PROMPTS)
    assert caplog.text.count("No space left") == 1


# -- the device ------------------------------------------------------------------------------------


class Scripted:
    """A device's step: idle before it, busy with it."""

    def __init__(self, idle, busy):
        self.device_seconds = lambda: (idle, busy)


def test_the_device_is_placed_by_its_own_clock_between_launch_and_wait():
    steps = [  # chosen, waits, waited, idle, busy -> begin, end
        ((1.0, 1.1, 2.0), (0.0, 0.8), (1.2, 2.0)),  # the wait ended with it
        ((2.1, 3.5, 3.50001), (0.3, 0.5), (2.3, 2.8)),  # it had ended long before
        ((3.6, 3.7, 3.70001), (0.1, 0.05), (3.6, 3.65)),  # not before its launch
        ((3.8, 3.9, 3.90001), (0.2, 0.2), (3.70001, 3.90001)),  # not after its wait
        ((4.0, 4.1, 5.0), (0.0, 2.0), (3.90001, 5.0)),  # not over the one before it
    ]
    lines = []
    recorded = Timeline(make_scheduler(), lines.extend, lambda: None, {**FACTS, "device": "cuda:0"})
    for (chosen, waits, waited), device, _ in steps:
        recorded._mark = waits
        step = InFlightStep([], Scripted(*device), chosen)
        recorded.book(step, (0, 0, 0), (chosen, waited, waited + 0.01), [])
    recorded.close()
    events = [json.loads(line) for line in lines]
    found = [(e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6) for e in select(events, cat="gpu")]
    assert found == [pytest.approx(wanted, abs=1e-6) for *_, wanted in steps]
    assert [e["args"]["gpu_us"] for e in select(events, cat="step")] == [
        busy * 1e6 for _, (_, busy), _ in steps
    ]
    assert select(events, name="thread_name", tid=3)


class FakeEvent:
    """A CUDA event of a device that works while the host does."""

    def __init__(self, enable_timing):
        self.at = None

    def record(self):
        self.at = time.perf_counter()

    def elapsed_time(self, end):
        return (end.at - self.at) * 1e3  # a TypeError, unless both were recorded


@pytest.mark.parametrize("k", [None, 4])
def test_each_step_is_timed_also_after_one_that_failed(k, checkpoint, tmp_path, monkeypatch):
    path = tmp_path / "run.json"
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    with LLM(checkpoint, overlap=True, **SMALL) as llm:
        runner = llm.model_runner
        timers = {True: StepTimer, False: lambda: None}
        monkeypatch.setattr(runner, "time_steps", lambda on: setattr(runner, "timer", timers[on]()))
        if k is not None:
            fail_at(monkeypatch, runner, "finish", k, RuntimeError("out of memory"))
        with llm.trace(path):
            ids = [llm.add_request(*item) for item in zip(PROMPTS, PARAMS, strict=True)]
            while not llm.is_finished():
                with contextlib.suppress(RuntimeError):
                    llm.step()
            assert len(runner.timer._spans) > 3
        assert runner.timer is None and len(ids) == len(PROMPTS)
    events = read(path)
    slices, steps = select(events, cat="gpu"), select(events, cat="step")
    assert len(slices) == len(steps) > 10
    assert_valid(events)
    for own, step in zip(slices, steps, strict=True):
        assert 0 < step["args"]["gpu_us"] < 1e9
        assert own["ts"] + own["dur"] <= step["ts"] + step["dur"] + 5e-4
    busy = sum(step["args"]["gpu_us"] for step in steps)
    assert busy <= sum(step["dur"] for step in steps) * 1.05


def test_slices_that_touch_do_not_overlap_by_what_is_rounded():
    """Viewers drop a slice that begins before another of its track ends."""
    times = [12_345_678.000000123 + i * 1.234567891e-3 for i in range(1000)]
    ends = []
    for begin, end in pairwise(times):
        step = StepRecord(
            *(begin, begin, begin, begin, begin, end, begin), *[1] * 6, "", 1, 1, 0, [1], [1], None
        )
        line = json.loads(step.events(0)[0], parse_float=str)
        digits = [int(line[key].replace(".", "")) for key in ("ts", "dur")]
        assert not ends or digits[0] == ends[-1]
        ends.append(sum(digits))


def test_a_sequence_that_never_started_is_in_the_queue():
    seq = SequenceRecord(3, 1, 0, 5.0, 0.0, 0.0, 7.0, 10, 0, 0, [], "aborted")
    events = [json.loads(line) for line in seq.events(2)]
    assert [(e["ph"], e["name"]) for e in events] == [
        *(("b", "request"), ("b", "queued")),
        *(("e", "queued"), ("e", "request")),
    ]
    assert {e["id"] for e in events} == {"2.3"}


def test_keys_and_pairs_are_those_that_rows_see():
    """Counted here token by token."""
    seq = make_seq(3)
    scheduled = [
        ScheduledSequence(seq, start, count, True)
        for start, count in [(9, 1), (2, 1), (0, 7), (4, 6), (0, 1)]
    ]
    facts = {**FACTS, "windows": [3, 5]}
    recorded = Timeline(make_scheduler(), lambda lines: None, lambda: None, facts)
    keys, pairs = recorded._attention(scheduled, 2)
    for i, window in enumerate((10**9, 3, 5)):
        seen = [
            [min(position + 1, window) for position in range(start, start + count)]
            for _, start, count, *_ in scheduled
        ]
        assert pairs[i] == sum(map(sum, seen))
        assert keys[i] == sum(min(start + count, window) for _, start, count, *_ in scheduled)
