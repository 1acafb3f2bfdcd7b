"""`Executor`: runs steps on all ranks: in this process, and in the workers' if there are any."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from contextlib import contextmanager
from types import FrameType

import torch
from torch.distributed import Store

from nanovllm.config import Config
from nanovllm.distributed.group import Group, listen
from nanovllm.engine.model_runner import ModelRunner, resolve_device
from nanovllm.engine.plan import mark_sent, max_plan_bytes, plan_step
from nanovllm.engine.scheduler import ScheduledSequence
from nanovllm.engine.step_inputs import PendingTokens
from nanovllm.engine.workers import Workers
from nanovllm.model_config import ModelConfig

OVERHEAD = 4096  # bytes of a message beside the plan's arrays


class Executor:
    """Starts the workers; `start` then builds this process's own rank beside them.

    Attributes:
        model_runner: that of rank 0, once started.
        is_broken: whether an error has left the ranks in different states.
    """

    def __init__(self, config: Config, model_config: ModelConfig) -> None:
        self._config, self._model_config = config, model_config
        self.is_broken = False
        self.model_runner: ModelRunner | None = None
        self._group = Group(0, config.tensor_parallel_size)
        self._device = resolve_device(config.device, self._group)
        self._workers: Workers | None = None
        self._store: Store | None = None
        if config.tensor_parallel_size > 1:
            if not hasattr(os, "memfd_create"):
                raise ValueError(
                    f"`tensor_parallel_size` must be 1 on {sys.platform}: workers need Linux, "
                    f"got {config.tensor_parallel_size}"
                )
            self._store, port = listen()
            max_len = min(config.max_model_len, model_config.max_position_embeddings)
            plan_bytes = max_plan_bytes(
                config.max_num_seqs,
                config.max_num_batched_tokens,
                -(-max_len // config.kvcache_block_size),
            )
            num_threads = max(1, torch.get_num_threads() // config.tensor_parallel_size)
            self._workers = Workers(config, model_config, port, num_threads, plan_bytes + OVERHEAD)
            self._workers.on_failure = self._group.abort

    def start(self) -> ModelRunner:
        """Build rank 0, and with all ranks whatever takes them all.

        Raises:
            WorkerError: if a worker dies meanwhile.
        """
        with self._all_or_none():
            if self._workers is not None:
                self._connect(self._workers)
            self.model_runner = ModelRunner(self._config, self._model_config, self._group)
        return self.model_runner

    def _connect(self, workers: Workers) -> None:
        """Meet the workers; in a thread, which nothing can interrupt if one of them never comes."""
        met: Future[None] = Future()

        def meet() -> None:
            try:
                assert self._store is not None
                self._group.connect(self._store, self._device)
                met.set_result(None)
            except BaseException as error:
                met.set_exception(error)

        threading.Thread(target=meet, daemon=True).start()
        while True:
            try:
                return met.result(0.02)
            except NotYet:
                workers.check()

    def run(self, scheduled: list[ScheduledSequence]) -> PendingTokens:
        """Launch a step on all ranks. Samples one token for each of the sequences that `samples`.

        Raises:
            WorkerError: if a worker has died.
        """
        assert self.model_runner is not None, "not started"
        plan = plan_step(scheduled)
        with _uninterrupted(), self._all_or_none():
            if self._workers is not None:
                self._workers.call("run", plan)
            tokens = self.model_runner.run(plan)
            mark_sent(scheduled)
        return tokens

    def wait(self, tokens: PendingTokens) -> list[int]:
        """What a step has sampled.

        Raises:
            WorkerError: if a worker has died.
        """
        with self._all_or_none():
            token_ids = tokens.wait()
            if self._workers is not None:
                self._workers.check()  # its death ends the wait, too
        return token_ids

    @contextmanager
    def _all_or_none(self) -> Iterator[None]:
        """All ranks do what happens here. An error on one of them ends an engine of several."""
        try:
            yield
        except Exception as error:
            if self._workers is None:
                raise
            self.is_broken = True
            reason = self._workers.reason_of(error)
            if reason is error:
                raise
            raise reason from error

    def close(self) -> None:
        """End the workers, and give the memory back. May be called again."""
        runner, workers = self.model_runner, self._workers
        if workers is not None:
            if runner is None or self.is_broken or workers.failure is not None:
                self._group.abort()
            else:
                runner.synchronize()  # a step under way needs all ranks to end
            workers.close()
        if runner is not None:
            runner.exit()
        self._group.close()
        self._workers = self._store = None


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Hold Ctrl-C back until the end of the block: half a step must not be repeated."""
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield  # no handler of Python's would run in here
        return
    held: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda *args: held.append(args))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if held:
        handler(*held[0])
