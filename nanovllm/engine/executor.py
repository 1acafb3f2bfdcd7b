"""`Executor`: runs steps on all ranks: in this process, and in the workers' if there are any."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from operator import attrgetter
from typing import Any

import torch

from nanovllm.checkpoint.model_config import ModelConfig
from nanovllm.config import Config
from nanovllm.distributed.group import Group
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.plan import StepPlan, mark_sent, plan_step
from nanovllm.engine.sequence import (
    NO_IMAGES,
    Encoded,
    InFlightStep,
    Pending,
    ScheduledSequence,
)
from nanovllm.engine.step_inputs import PendingTokens
from nanovllm.ranks.letter import letter
from nanovllm.ranks.meeting import Meeting
from nanovllm.ranks.processes import WorkerError, clear_frames
from nanovllm.ranks.workers import Workers
from nanovllm.sampling.control_table import ControlTable, LastTokens
from nanovllm.sampling.controls import Controls
from nanovllm.scheduling.encoder_cache import Encoding, encoding_of
from nanovllm.startup.builder import Builder
from nanovllm.threads.forks import check_threads
from nanovllm.threads.interrupts import uninterrupted
from nanovllm.utils.device import host_array, resolve_device
from nanovllm.utils.modes import without_modes


class Executor:
    """`launch` starts the workers; `start` then builds this process's own rank beside them.

    Attributes:
        model_runner: runner of rank 0, once started.
        is_broken: whether an error has left the ranks in different states.
        failure: a worker's death, also before a call has met it.
        waited: begin and end of the last wait of `run` for tokens, by time.perf_counter.
        encoded: number of images that the last step encoded, and since when and until when that was
            launched.
    """

    def __init__(self, config: Config, model_config: ModelConfig) -> None:
        self._config, self._model_config = config, model_config
        self.is_broken, self.waited = False, (0.0, 0.0)
        self.encoded = NO_IMAGES
        self.model_runner: ModelRunner | None = None
        self._group = Group(0, config.tensor_parallel_size)
        self._device = resolve_device(config.device, 0, config.tensor_parallel_size)
        self._controls = ControlTable(
            config.max_num_seqs + 1, model_config.vocab_size, partial(host_array, self._device)
        )
        self._workers: Workers | None = None
        self._meeting: Meeting | None = None
        if config.tensor_parallel_size > 1 and not hasattr(os, "memfd_create"):
            raise ValueError(
                f"`tensor_parallel_size` must be 1 on {sys.platform}: workers need Linux, "
                f"got {config.tensor_parallel_size}"
            )

    @property
    def failure(self) -> WorkerError | None:
        workers = self._workers  # which `close` takes away
        return None if workers is None else workers.failure

    def launch(self) -> None:
        """Start the workers, if there are any. Does not wait for them."""
        config, size = self._config, self._config.tensor_parallel_size
        if size == 1:
            return
        with uninterrupted():
            self._workers = Workers(
                config,
                self._model_config,
                max(1, torch.get_num_threads() // size),
                on_failure=self._group.abort,
            )

    def start(self, beside: Callable[[bool], None]) -> ModelRunner:
        """Build rank 0, and with all ranks whatever takes them all.

        Args:
            beside: function, see `Builder.build`.

        Raises:
            WorkerError: if a worker dies meanwhile.
        """
        with self._all_or_none(), without_modes():
            if self._device.type == "cpu":
                check_threads()
            # No name for what is half built: an error's frames would hold it.
            self.model_runner = ModelRunner(
                self._config,
                Builder(self._config, self._model_config, self._group).build(self._connect, beside),
            )
            if self._workers is not None:
                self._workers.check()
        return self.model_runner

    def _connect(self) -> None:
        """Meet the workers, if there are any; see `Meeting.hold`."""
        if self._workers is not None:
            self._meeting = Meeting(self._group, self._device, self._workers)
            self._meeting.hold()

    def run(self, scheduled: list[ScheduledSequence], newest: InFlightStep | None) -> PendingTokens:
        """Launch a step on all ranks, which samples one token for each sequence that `samples`:
        launch the model, make the controls while the device computes, finish with them.

        Args:
            scheduled: the step.
            newest: the step before it, if that is still in flight.

        Raises:
            WorkerError: if a worker has died.
        """
        assert self.model_runner is not None, "not started"
        plan, self.encoded = plan_step(scheduled), NO_IMAGES
        if plan.placed.size and (images := encoding_of(scheduled)) is not None:
            self._encode(images)
        if self._workers is not None:
            with self._all_or_none(Exception):  # Ctrl-C does no harm here
                self._workers.wait_for_room()
        with uninterrupted(), self._all_or_none(), without_modes():
            if self._workers is not None:
                self._workers.call("run", plan)
            try:
                launched = self.model_runner.launch(plan)
                controls = self._controls_of(plan, scheduled, newest)
                tokens = self.model_runner.finish(launched, controls)
            except BaseException:
                self._controls.forget()
                raise
            mark_sent(scheduled)
        return tokens

    def _encode(self, images: Encoding) -> None:
        """Launch what encodes images, on all ranks: each has the whole tower."""
        assert self.model_runner is not None, "not started"
        since = time.perf_counter()
        if self._workers is not None:
            with self.on_all_ranks("encode", *images) as runner:
                runner.encode(*images)
        else:
            with uninterrupted(), without_modes():
                self.model_runner.encode(*images)
        self.encoded = Encoded(len(images.pixels), since, time.perf_counter())

    def _controls_of(
        self, plan: StepPlan, scheduled: list[ScheduledSequence], newest: InFlightStep | None
    ) -> Controls | None:
        """Controls of a step; None without any. Waits for `newest` if they depend on its tokens."""
        if not plan.controlled.any():
            return None
        last_tokens: LastTokens = {}
        if self._controls.needs_tokens(scheduled):
            assert newest is not None, "tokens are pending without a step in flight"
            since = time.perf_counter()
            last_tokens = dict(zip(newest.sampled(), self.wait(newest.tokens), strict=True))
            self.waited = since, time.perf_counter()
        return self._controls.controls(plan, scheduled, last_tokens)

    @contextmanager
    def on_all_ranks(self, method: str, *args: Any) -> Iterator[ModelRunner]:
        """Have the workers call a method of their `ModelRunner`, or of its parts by a path with
        dots, while the block does the same with this rank's. Ends when all ranks have done it.

        Raises:
            WorkerError: if a worker has died.
        """
        assert self.model_runner is not None, "not started"
        with uninterrupted(), self._all_or_none(), without_modes(), letter(args) as sent:
            if self._workers is not None:
                self._workers.wait_for_room()
                self._workers.call_together(method, sent)
            yield self.model_runner
            self._group.minimum(0)

    def all_could(self, method: str, *args: Any) -> bool:
        """Have all ranks call a method of their `ModelRunner`, or of its parts by a path with dots,
        that returns whether it could do its work. Returns whether all could.

        Raises:
            WorkerError: if a worker has died.
        """
        assert self.model_runner is not None, "not started"
        with uninterrupted(), self._all_or_none(), without_modes(), letter(args) as sent:
            if self._workers is not None:
                self._workers.wait_for_room()
                self._workers.call_together(method, sent)
            could = attrgetter(method)(self.model_runner)(*args)
            return self._group.minimum(int(could)) > 0

    def time_steps(self, on: bool) -> None:
        """Time steps on the device of rank 0 from now on, or no more."""
        if self.model_runner is not None:
            self.model_runner.time_steps(on)

    def wait(self, tokens: Pending) -> list[int]:
        """The tokens that a step has sampled.

        Raises:
            WorkerError: if a worker has died.
        """
        with self._all_or_none(Exception):  # Ctrl-C does no harm here
            token_ids = tokens.wait()
            if self._workers is not None:
                self._workers.check()  # its death ends the wait, too
        return token_ids

    @contextmanager
    def _all_or_none(self, harm: type[BaseException] = BaseException) -> Iterator[None]:
        """All ranks do what the block does. With workers, an error breaks the engine: the ranks
        are in different states then.
        """
        try:
            yield
        except harm as error:
            if self._workers is None:
                raise
            self.is_broken = True
            reason = self._workers.reason_of(error)
            if isinstance(reason, WorkerError):
                clear_frames(error)  # a caller who keeps the error keeps no tensors or sockets
            if reason is error:
                raise
            raise reason from error

    def close(self) -> None:
        """End the workers, and give the memory back. May be called again.

        Raises:
            WorkerError: if a worker has died, and no other call has said so.
        """
        runner, workers = self.model_runner, self._workers
        in_order = runner is not None and not self.is_broken
        with uninterrupted(), ExitStack() as finally_:  # runs in reverse order
            finally_.callback(self._group.close)
            if self._meeting is not None:
                finally_.callback(self._meeting.end)
            if workers is not None:
                self._workers = None
                in_order = in_order and workers.failure is None
                finally_.callback(workers.close, kill=not in_order)
            if runner is not None:  # before the workers end: a step in flight needs all ranks
                finally_.callback(runner.exit)
            if workers is not None and not in_order:
                if runner is not None:
                    finally_.callback(runner.drop_graphs)
                finally_.callback(self._group.abort)
        if workers is not None and runner is not None and not self.is_broken:
            workers.check()
