"""Threads that wait for a CPU are noticed, and nothing is said of those that do not."""

import os
import subprocess
import sys
import threading
import time
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from faults import wait_until
from nanovllm import LLM, TINY, SamplingParams
from nanovllm.threads import cpu_wait
from nanovllm.threads.cpu_wait import PAUSE, PERIOD, SHARE, CpuWait, seconds_waited


@pytest.fixture
def passed(tmp_path, monkeypatch, caplog):
    """Lets a step pass that takes so much time, in which threads wait for so much. Returns how many
    warnings there are.
    """
    clock, watch, waited = SimpleNamespace(now=100.0), CpuWait(), Counter()
    monkeypatch.setattr(cpu_wait, "TASKS", tmp_path)
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)

    def step(seconds, more, pause=0.0):
        began = clock.now + pause
        clock.now = began + seconds
        waited.update(more)
        for thread in more:
            (tmp_path / thread).mkdir(exist_ok=True)
            (tmp_path / thread / "schedstat").write_text(f"7 {round(waited[thread] * 1e9)} 9\n")
        watch.look(began)
        return len(caplog.messages)

    return step


def test_long_waits_are_said_once(passed, tmp_path, caplog):
    much, little = 1.1 * SHARE * PERIOD, 0.9 * SHARE * PERIOD
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "schedstat").write_text("")
    (tmp_path / "ended" / "schedstat").mkdir(parents=True)
    assert passed(2 * PERIOD, {"a": 9 * PERIOD, "b": 9 * PERIOD}) == 0, "nobody knows since when"
    assert passed(PERIOD, {"a": little, "b": little}) == 0, "they may have waited at once"
    assert passed(0.1 * PERIOD, {"a": 2 * PERIOD}) == 0, "too early"
    assert passed(0.1 * PERIOD, {}, pause=1.1 * PAUSE) == 0
    assert passed(PERIOD, {"a": little}) == 0, "what came before a pause is forgotten"
    assert passed(PERIOD, {"a": little, "new": 9 * PERIOD}) == 0, "it may have waited before"
    assert passed(0.5 * PERIOD, {"a": 0.5 * much}) == 0
    assert passed(0.5 * PERIOD, {"a": 0.5 * much}) == 1
    assert passed(PERIOD, {"a": PERIOD}) == 1
    assert f"waited {much:.1f} s for a CPU in the last {PERIOD:.1f} s" in caplog.text


@pytest.mark.skipif(not any(seconds_waited().values()), reason="this system does not count them")
def test_the_system_counts_waits():
    """Two processes on one core."""
    thread, cores = str(threading.get_native_id()), os.sched_getaffinity(0)
    before = seconds_waited()[thread]
    os.sched_setaffinity(0, {min(cores)})
    try:
        with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
            try:
                wait_until(lambda: sum(range(10**5)) and seconds_waited()[thread] > before + 0.05)
            finally:
                other.kill()
    finally:
        os.sched_setaffinity(0, cores)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_engines_on_cpus_look_after_their_threads(num_threads, monkeypatch):
    """After each step, with the time of its begin; one thread has no others that wait for it."""
    events, before = [], torch.get_num_threads()
    monkeypatch.setattr(CpuWait, "look", lambda _, began: events.append(("look", began)))
    torch.set_num_threads(num_threads)
    try:
        with LLM(TINY, device="cpu", num_kvcache_blocks=4) as llm:
            for owner, name in (
                (llm.model_runner, "launch"),
                (llm.model_runner.built.step, "run_model"),
                (llm.model_runner.built.extras, "compute"),
            ):
                note_calls(monkeypatch, owner, name, events)
            params = SamplingParams(max_tokens=3, logprobs=0)
            llm.generate("1+1=", params, use_tqdm=False)
    finally:
        torch.set_num_threads(before)
    step = ["launch", "run_model", "compute"] + ["look"] * (num_threads > 1)
    assert [name for name, _ in events] == step * 3
    for i in range(0, len(events) if num_threads > 1 else 0, len(step)):
        (_, launch), (_, run), _, (_, began) = events[i : i + len(step)]
        assert launch <= began <= run


def note_calls(monkeypatch, owner, name, events):
    original = getattr(owner, name)

    def noted(*args):
        events.append((name, time.perf_counter()))
        return original(*args)

    monkeypatch.setattr(owner, name, noted)
