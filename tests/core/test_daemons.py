"""`Daemons`: how many calls go on at once, their results, and the calls that are dropped."""

import subprocess
import sys
import threading
from concurrent.futures import CancelledError

import pytest

from nanovllm.threads.daemons import Daemons

PATIENCE = 60  # seconds, for what would hang for ever


def test_calls_and_their_results() -> None:
    gate, running = threading.Event(), threading.Semaphore(0)

    def call() -> int:
        running.release()
        assert gate.wait(PATIENCE)
        return threading.get_ident()

    with Daemons("test", 2) as daemons:
        first = [daemons.submit(call) for _ in range(2)]
        for _ in first:
            assert running.acquire(timeout=PATIENCE)
        later, cancelled, left = (daemons.submit(call) for _ in range(3))
        assert cancelled.cancel()
        assert not running.acquire(blocking=False), "more calls at once than threads"
        gate.set()
        assert len({each.result(PATIENCE) for each in first}) == 2
        assert later.result(PATIENCE) and left.result(PATIENCE)
        failing = daemons.submit(lambda: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            failing.result(PATIENCE)
        assert daemons.submit(lambda: 7).result(PATIENCE) == 7, "after its threads have ended"


def test_calls_that_have_not_begun_are_dropped_at_the_end() -> None:
    gate, begun = threading.Event(), threading.Event()

    def call() -> bool:
        begun.set()
        return gate.wait(PATIENCE)

    with Daemons("test", 1) as daemons:
        first, second = daemons.submit(call), daemons.submit(call)
        assert begun.wait(PATIENCE)
    gate.set()
    assert first.result(PATIENCE)
    with pytest.raises(CancelledError):
        second.result(PATIENCE)


def test_the_process_ends_before_its_calls() -> None:
    code = (
        "import threading; from nanovllm.threads.daemons import Daemons\n"
        "begun = threading.Event()\n"
        "Daemons('test', 1).submit(lambda: begun.set() or threading.Event().wait())\n"
        "assert begun.wait(60)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE)
