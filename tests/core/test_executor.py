"""The end of an engine that has lost a rank."""

import dataclasses
import gc
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from nanovllm.distributed.group import Group
from nanovllm.engine.executor import Executor
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.step import Built


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
    graphs = Mock()
    facts: dict[str, Any] = dict.fromkeys(each.name for each in dataclasses.fields(Built))
    runner.built = Built(**{**facts, "device": torch.device("cuda", 0), "graphs": graphs})
    kept, graphs = weakref.ref(graphs), None
    held = []

    def synchronize(device: torch.device) -> None:
        held.append(runner.graphs)
        if fails:
            raise RuntimeError("the device has failed")

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    with pytest.raises(RuntimeError) if fails else nullcontext():
        runner.drop_graphs()
    assert len(held) == 1 and held.pop() is not None
    gc.collect()
    assert runner.graphs is kept() is None, "nothing else holds them"


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
