"""Ranks as threads of the test process, so that a test sees the logits and the memory of each."""

import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from datetime import timedelta
from operator import attrgetter
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import distributed as dist

from nanovllm import LLM
from nanovllm.checkpoint.model_config import ModelConfig
from nanovllm.config import Config
from nanovllm.distributed import gloo
from nanovllm.distributed.group import Group
from nanovllm.engine.executor import Executor
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.plan import mark_sent, plan_step
from nanovllm.engine.sequence import InFlightStep, ScheduledSequence
from nanovllm.engine.step_inputs import PendingTokens
from nanovllm.startup.builder import Builder

T = TypeVar("T")
PATIENCE = 60  # seconds, after which a rank that waits for one that failed gives up


def on_all_ranks(size: int, function: Callable[[int], T]) -> list[T]:
    """Results of `function` for each rank, called on all at once. The first error is raised."""
    with ThreadPoolExecutor(size, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        calls: list[Future[T]] = [pool.submit(function, rank) for rank in range(size)]
        for call in wait(calls, return_when="FIRST_EXCEPTION").done:
            call.result()
        return [call.result() for call in calls]


def connected_groups(size: int) -> list[Group]:
    """Groups that have met, by rank."""
    groups = [Group(rank, size) for rank in range(size)]
    if size > 1:
        store, patience = dist.HashStore(), timedelta(seconds=PATIENCE)
        with mock.patch.object(gloo, "FOREVER", patience):
            on_all_ranks(size, lambda rank: groups[rank].connect(store, torch.device("cpu")))
    return groups


class RecordingSampler:
    """Samples, and keeps the logits that it saw, one tensor [n, len(vocab)] for each call."""

    def __init__(self, sampler: Callable[..., torch.Tensor]) -> None:
        self.sampler = sampler
        self.logits: list[torch.Tensor] = []

    def __call__(self, logits: torch.Tensor, *args: Any) -> torch.Tensor:
        self.logits.append(logits.clone())
        return self.sampler(logits, *args)


class ThreadedExecutor(Executor):
    """`Executor` with all ranks in this process. Plans are pickled as they are for workers."""

    def __init__(self, config: Config, model_config: ModelConfig) -> None:
        super().__init__(config, model_config)
        self.runners: list[ModelRunner] = []
        self.samplers: list[RecordingSampler] = []

    def launch(self) -> None:
        """No processes here."""

    def start(self, beside: Callable[[bool], None]) -> ModelRunner:
        beside(False)
        size = self._config.tensor_parallel_size
        groups = connected_groups(size)
        self.runners = on_all_ranks(size, lambda rank: self._build(groups[rank]))
        for runner in self.runners:
            step = runner.built.step
            self.samplers.append(RecordingSampler(step.sampler))
            step.sampler = self.samplers[-1]  # type: ignore[assignment]
        return self.runners[0]

    def _build(self, group: Group) -> ModelRunner:
        return ModelRunner(self._config, Builder(self._config, self._model_config, group).build())

    def run(self, scheduled: list[ScheduledSequence], newest: InFlightStep | None) -> PendingTokens:
        plan = plan_step(scheduled)
        message = pickle.dumps(plan, protocol=pickle.HIGHEST_PROTOCOL)

        def run(rank: int) -> PendingTokens:
            runner = self.runners[rank]
            launched = runner.launch(pickle.loads(message))
            controls = self._controls_of(plan, scheduled, newest) if rank == 0 else None
            return runner.finish(launched, controls)

        tokens = on_all_ranks(len(self.runners), run)
        mark_sent(scheduled)
        everyone = [pending.wait() for pending in tokens]
        assert everyone == [everyone[0]] * len(everyone), "the ranks go on with different tokens"
        return tokens[0]

    def wait(self, tokens: PendingTokens) -> list[int]:
        return tokens.wait()

    @contextmanager
    def on_all_ranks(self, method: str, *args: Any) -> Iterator[ModelRunner]:
        message = pickle.dumps(args, protocol=pickle.HIGHEST_PROTOCOL)
        for runner in self.runners[1:]:
            attrgetter(method)(runner)(*pickle.loads(message))
        yield self.runners[0]

    def take_logits(self) -> list[torch.Tensor]:
        """The logits seen since the last call, by rank: [n, len(vocab)]."""
        parts = [torch.cat(sampler.logits) for sampler in self.samplers]
        for sampler in self.samplers:
            sampler.logits.clear()
        return parts

    def close(self) -> None:
        for runner in self.runners:
            runner.exit()
            runner.group.close()
        self.runners = []


def ranks_of(llm: LLM) -> ThreadedExecutor:
    """The ranks of an engine that was built under `threads`."""
    assert isinstance(llm.executor, ThreadedExecutor)
    return llm.executor
