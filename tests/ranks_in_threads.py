"""Ranks as threads of the test process, so that a test sees the logits and the memory of each.

Those of an engine take turns and exchange in memory, in less than half of the time with Gloo, which
is for ranks in processes, and for the groups of `connected_groups`.
"""

import pickle
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from operator import attrgetter
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import distributed as dist

from nanovllm import LLM
from nanovllm.checkpoint.model_config import ModelConfig
from nanovllm.config import Config
from nanovllm.distributed import gloo, group
from nanovllm.distributed.group import Group, LostContactError
from nanovllm.engine.executor import Executor
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.plan import mark_sent, plan_step
from nanovllm.engine.sequence import NO_IMAGES, Encoded, InFlightStep, ScheduledSequence
from nanovllm.engine.step_inputs import PendingTokens
from nanovllm.scheduling.encoder_cache import encoding_of
from nanovllm.startup.builder import Builder

T = TypeVar("T")
PATIENCE = 60  # seconds, after which a rank that waits for one that failed gives up


def on_all_ranks(size: int, function: Callable[[int], T]) -> list[T]:
    """Results of `function` for each rank, called on all at once. An error of one is raised; that
    others have lost contact to it is none of its own.
    """
    with ThreadPoolExecutor(size, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        calls: list[Future[T]] = [pool.submit(function, rank) for rank in range(size)]
        errors = [error for call in wait(calls).done if (error := call.exception())]
        for error in sorted(errors, key=lambda error: isinstance(error, LostContactError)):
            raise error
        return [call.result() for call in calls]


def connected_groups(size: int) -> list[Group]:
    """Groups that have met, by rank."""
    groups = [Group(rank, size) for rank in range(size)]
    if size > 1:
        store, patience = dist.HashStore(), timedelta(seconds=PATIENCE)
        with mock.patch.object(gloo, "FOREVER", patience):
            on_all_ranks(size, lambda rank: groups[rank].connect(store, torch.device("cpu")))
    return groups


class Turns:
    """The ranks of an engine, of which one computes at a time: side by side, each would wait for
    Python's lock at every operator.

    Args:
        size: number of ranks.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._turn = threading.Lock()
        self._everyone = threading.Barrier(size, action=self._copy)
        self._parts: dict[int, torch.Tensor] = {}
        self._copies: list[torch.Tensor] = []

    def call(self, function: Callable[[int], T]) -> list[T]:
        """Results of `function` for each rank."""

        def in_turn(rank: int) -> T:
            with self._turn:
                try:
                    return function(rank)
                except BaseException:
                    self._everyone.abort()
                    raise

        return on_all_ranks(self.size, in_turn)

    def exchange(self, rank: int, x: torch.Tensor) -> list[torch.Tensor]:
        """Copies of all ranks' x, by rank. Others compute until all have come.

        Raises:
            RuntimeError: another rank has failed.
        """
        self._parts[rank] = x
        self._turn.release()
        try:
            self._everyone.wait(PATIENCE)
        finally:
            self._turn.acquire()
        return self._copies

    def _copy(self) -> None:
        self._copies = [self._parts[rank].clone() for rank in range(self.size)]


class Exchange:
    """The collectives of a rank, as `Gloo` has them, among ranks that take turns."""

    def __init__(self, turns: Turns, store: dist.Store, rank: int, size: int) -> None:
        self._exchange = partial(turns.exchange, rank)

    def all_reduce(self, x: torch.Tensor) -> None:
        x.copy_(torch.stack(self._exchange(x)).sum(0))

    def all_gather(self, out: torch.Tensor, x: torch.Tensor) -> None:
        torch.stack(self._exchange(x), out=out)

    def broadcast(self, x: torch.Tensor) -> None:
        x.copy_(self._exchange(x)[0])

    def abort(self) -> None:
        """Do nothing: who fails is waited for no more."""


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
        self._turns = Turns(self._config.tensor_parallel_size)
        self.runners = self._turns.call(self._build)
        for runner in self.runners:
            step = runner.built.step
            self.samplers.append(RecordingSampler(step.sampler))
            step.sampler = self.samplers[-1]  # type: ignore[assignment]
        return self.runners[0]

    def _build(self, rank: int) -> ModelRunner:
        own = Group(rank, self._turns.size)
        if own.size > 1:
            with mock.patch.object(group, "Gloo", partial(Exchange, self._turns)):
                own.connect(dist.HashStore(), torch.device("cpu"))
        return ModelRunner(self._config, Builder(self._config, self._model_config, own).build())

    def run(self, scheduled: list[ScheduledSequence], newest: InFlightStep | None) -> PendingTokens:
        plan, self.encoded = plan_step(scheduled), NO_IMAGES
        if plan.placed.size and (images := encoding_of(scheduled)) is not None:
            since = time.perf_counter()
            with self.on_all_ranks("encode", *images) as runner:
                runner.encode(*images)
            self.encoded = Encoded(len(images.pixels), since, time.perf_counter())
        message = pickle.dumps(plan, protocol=pickle.HIGHEST_PROTOCOL)

        def run(rank: int) -> PendingTokens:
            runner = self.runners[rank]
            launched = runner.launch(pickle.loads(message))
            controls = self._controls_of(plan, scheduled, newest) if rank == 0 else None
            return runner.finish(launched, controls)

        tokens = self._turns.call(run)
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

    def all_could(self, method: str, *args: Any) -> bool:
        return min(attrgetter(method)(runner)(*args) for runner in self.runners)

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
