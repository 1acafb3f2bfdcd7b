"""Threads that wait for a CPU are noticed, and nothing is said of those that do not."""

import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from faults import wait_until
from nanovllm import LLM, TINY, SamplingParams
from nanovllm.utils import cpu_wait
from nanovllm.utils.cpu_wait import PERIOD, SHARE, CpuWait, seconds_waited


def test_long_waits_are_said_once(tmp_path, monkeypatch, caplog):
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(cpu_wait, "TASKS", tmp_path)
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    for thread in ("1", "2", "3"):
        (tmp_path / thread).mkdir()
    (tmp_path / "3" / "schedstat").write_text("")  # it ends
    waited = 0.0

    def passed(seconds, more):
        """Look when so much time has passed, in which the threads have waited for more."""
        nonlocal waited
        clock.now, waited = clock.now + seconds, waited + more
        (tmp_path / "1" / "schedstat").write_text(f"7 {round(waited * 0.25e9)} 9\n")
        (tmp_path / "2" / "schedstat").write_text(f"7 {round(waited * 0.75e9)} 9\n")
        watch.look()
        return len(caplog.messages)

    watch = CpuWait()
    assert passed(PERIOD, 0.9 * SHARE * PERIOD) == 0
    assert passed(0.9 * PERIOD, 10 * PERIOD) == 0, "too early"
    waited -= 10 * PERIOD
    assert passed(1.1 * PERIOD, 1.9 * SHARE * PERIOD) == 0, "since the last look"
    assert passed(PERIOD, 1.1 * SHARE * PERIOD) == 1
    assert passed(PERIOD, 2 * PERIOD) == 1
    assert "waited 1.4 s for a CPU in the last 5.0 s" in caplog.text


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts it")
def test_the_system_counts_waits():
    """Two processes on one core."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    before = seconds_waited()
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])  # on the same core
    try:
        wait_until(lambda: sum(range(10**5)) and seconds_waited() > before + 0.05)
    finally:
        os.sched_setaffinity(0, cores)
        other.kill()
        other.wait()


@pytest.mark.parametrize(("num_threads", "count"), [(1, 0), (2, 1)])
def test_engines_on_cpus_look_after_their_threads(num_threads, count, monkeypatch, caplog):
    """One thread has no others that wait for it."""
    monkeypatch.setattr(cpu_wait, "PERIOD", 0.0)
    monkeypatch.setattr(cpu_wait, "SHARE", -1.0)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        with LLM(TINY, device="cpu", num_kvcache_blocks=4) as llm:
            llm.generate("1+1=", SamplingParams(max_tokens=4), use_tqdm=False)
    finally:
        torch.set_num_threads(before)
    assert sum("OMP_NUM_THREADS" in message for message in caplog.messages) == count
