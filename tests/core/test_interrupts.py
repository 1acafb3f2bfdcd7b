"""Ctrl-C is held back: in the middle of a launch it would leave half of the ranks with a step."""

import signal
import threading

import pytest

from nanovllm.threads import interrupts
from nanovllm.threads.interrupts import uninterrupted


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


def test_a_block_that_hangs_ends_by_another_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts, "PATIENCE", 0.0)
    done = []
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        interrupt()
        done.append("held back")
        with uninterrupted():
            interrupt()
            done.append("for ever")
    assert done == ["held back"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_block_inside_another_holds_back_to_the_end_of_both() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        with uninterrupted():
            interrupt()
        done.append("the rest")
    assert done == ["the rest"]


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
