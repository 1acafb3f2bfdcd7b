"""Ctrl-C in the middle of a launch, which must not leave half of the ranks with a step; and the end
of an engine that has lost a rank.
"""

import signal
import threading
from collections.abc import Callable
from contextlib import nullcontext
from unittest.mock import Mock

import pytest
import torch

from nanovllm.distributed.group import Group
from nanovllm.engine.executor import Executor
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.utils.interrupts import uninterrupted


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def test_ctrl_c_waits_for_the_end_of_the_block() -> None:
    """A step that the workers have and rank 0 has not would leave them waiting for each other."""
    done = []
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        interrupt()
        interrupt()
        done.append("the rest")
    assert done == ["the rest"]
    with pytest.raises(KeyboardInterrupt):
        interrupt()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_without_ctrl_c_nothing_happens() -> None:
    with uninterrupted():
        pass
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_callers_own_handler_is_called_once_and_afterwards() -> None:
    calls: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: calls.append(number))
    handler = signal.getsignal(signal.SIGINT)
    with uninterrupted():
        interrupt()
        assert not calls
    assert calls == [signal.SIGINT]
    assert signal.getsignal(signal.SIGINT) is handler


def test_an_error_inside_wins() -> None:
    """The error says what has happened to the engine; it must not be replaced by Ctrl-C."""
    with pytest.raises(BaseException) as caught, uninterrupted():
        interrupt()
        raise ZeroDivisionError
    assert caught.type is ZeroDivisionError
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ignored_signals_stay_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with uninterrupted():
        interrupt()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_another_thread_leaves_the_handler_alone() -> None:
    """Python sets handlers in the main thread only: an engine in another one must work, too."""
    seen: list[object] = []

    def run() -> None:
        with uninterrupted():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(timeout=30)
    assert seen == [signal.default_int_handler]


class Recorder:
    """Says in what order its methods were called."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self._name, self._calls = name, calls
        self.failure = None

    def __getattr__(self, method: str) -> Callable[..., None]:
        return lambda *args, **kwargs: self._calls.append(f"{self._name}.{method}")


def test_a_broken_engine_ends_kernels_that_wait_before_it_drops_their_graphs() -> None:
    """The other way round the graph's end waited for a kernel that nobody could end any more."""
    calls: list[str] = []
    executor = object.__new__(Executor)
    executor.is_broken = True
    executor.model_runner = Recorder("runner", calls)  # type: ignore[assignment]
    executor._workers = Recorder("workers", calls)  # type: ignore[assignment]
    executor._group = Recorder("group", calls)  # type: ignore[assignment]
    executor._meeting = None
    executor.close()
    assert calls == [
        "group.abort", "runner.drop_graphs", "runner.exit", "workers.close", "group.close"
    ]  # fmt: skip


@pytest.mark.parametrize("fails", [False, True])
def test_graphs_are_dropped_when_the_device_has_nothing_to_do(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = object.__new__(ModelRunner)
    runner.device, runner.graphs = torch.device("cuda", 0), Mock()
    held = []

    def synchronize(device: torch.device) -> None:
        held.append(runner.graphs)
        if fails:
            raise RuntimeError("the device has failed")

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    with pytest.raises(RuntimeError) if fails else nullcontext():
        runner.drop_graphs()
    assert held != [None] and len(held) == 1 and runner.graphs is None


def test_abort_waits_for_nothing() -> None:
    """NCCL's own waits for what the caller does next; `close` waits for it."""
    may_end, ended = threading.Event(), []

    def abort() -> None:
        assert may_end.wait(60)
        ended.append(True)

    group = Group(0, 2)
    group._backend = Mock(abort=abort)
    group.abort()
    group.abort()
    assert not ended
    may_end.set()
    group.close()
    assert ended == [True]
