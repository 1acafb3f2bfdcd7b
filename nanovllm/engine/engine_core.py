"""`EngineCore`: the requests of an engine, and the loop that computes them.

A `step` is three verbs: schedule, launch, postprocess. Everything else here keeps the books.
Imports no torch.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from nanovllm.engine.core import Core
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import InFlightStep, ScheduledSequence, Sequence
from nanovllm.requests.request import Request
from nanovllm.threads.interrupts import uninterrupted
from nanovllm.tracing.metrics import Latencies
from nanovllm.tracing.timeline import ENGINE, Process, Timeline, Write

if TYPE_CHECKING:
    from nanovllm.engine.executor import Executor


class EngineCore(Core[Request]):
    """Computes requests, step by step.

    Args:
        executor: executor, started.
        scheduler: scheduler over as many blocks as the executor has.
        lookahead: steps to launch ahead of the one that is booked: 1 to let the device compute
            while the host books, 0 to book each step before the next is chosen.

    Attributes:
        in_flight: steps that are launched and not booked, the oldest first.
        latencies: histograms of the times of steps and requests.
    """

    def __init__(self, executor: Executor, scheduler: Scheduler, lookahead: int) -> None:
        super().__init__()
        self._executor, self._scheduler, self._lookahead = executor, scheduler, lookahead
        self.in_flight: deque[InFlightStep] = deque()
        self.latencies = Latencies()
        self._launching = False  # a step is chosen and not in flight: its launch may have failed
        self._booked_at = 0.0  # seconds of time.perf_counter

    def add(self, request: Request) -> None:
        """Queue a request."""
        with self.reset_on_error():
            self.requests[request.request_id] = request
            request.weight_version = self.weight_version
            for seq in request.seqs:
                self._scheduler.add(seq)

    def step(self) -> None:
        """Launch a step, and book the step before it (or the same one, see `lookahead`)."""
        self._drop_left()
        if self.timeline is not None:
            self.timeline.begin()
        self._take_turn()
        try:
            scheduled = self._schedule()
            if scheduled:
                self._launch(scheduled)
            self.meanwhile()
            self._book(leave=self._lookahead if scheduled else 0)
        finally:
            self.turn.give()

    def hold(self) -> None:
        self._drop_left()
        try:
            self._book(leave=0)
        finally:
            self.turn.give()
        with self.reset_on_error():
            self._scheduler.compute_all_again()
            self._launching = False
        self.is_held = True

    def _schedule(self) -> list[ScheduledSequence]:
        # A failed launch is repeated, and the device's table of last tokens may be newer than the
        # repeated step needs: book all steps in flight first, so that the host sends the tokens.
        # After Ctrl-C in a wait, there is one step more in flight than `lookahead` allows.
        books_only = self.in_flight and (self._launching or len(self.in_flight) > self._lookahead)
        with self.reset_on_error():
            if books_only:
                return []
            if self._launching:
                self._scheduler.compute_again()
            scheduled = self._scheduler.schedule()
            self._launching = bool(scheduled)
            return scheduled

    def _launch(self, scheduled: list[ScheduledSequence]) -> None:
        launched_at = time.perf_counter()
        newest = self.in_flight[-1] if self.in_flight else None
        tokens = self._executor.run(scheduled, newest)
        with self.reset_on_error():
            self._scheduler.advance(scheduled)
            noted = None
            if self.timeline is not None:
                executor = self._executor
                noted = self.timeline.launch(scheduled, executor.waited, executor.encoded)
            self.in_flight.append(InFlightStep(scheduled, tokens, launched_at, noted))
        self._launching = False

    def _book(self, leave: int) -> None:
        """Book the steps in flight, the oldest first, all but `leave`."""
        while len(self.in_flight) > leave:
            step = self.in_flight[0]
            self.turn.give()
            token_ids = self._executor.wait(step.tokens)
            waited_at = time.perf_counter()
            self._take_turn()
            with self.reset_on_error():
                self.in_flight.popleft()
                if step.tokens.extras is not None:
                    step.tokens.extras.give(step.scheduled, token_ids)
                num_sampled = _num_sampled(step, token_ids)
                finished = self._scheduler.postprocess(step.scheduled, token_ids)
                listened = self._listened(step)
                for request_id in dict.fromkeys(seq.request_id for seq in finished):
                    if self.requests[request_id].is_finished:
                        self._end(self.requests.pop(request_id))
            self._account(step, num_sampled, finished, waited_at)
            self._drop_unneeded_steps()
            for request in listened:  # last: a listener may call the engine
                request.tell()

    def _take_turn(self) -> None:
        if self._lookahead:  # else a launch may be the computation, for which nobody should wait
            self.turn.take()

    def _account(
        self, step: InFlightStep, num_sampled: int, finished: list[Sequence], waited_at: float
    ) -> None:
        """Count a step that has been booked, and its time: since the end of the one before it, if
        they overlap.
        """
        now = time.perf_counter()
        since = max(step.launched_at, self._booked_at)
        prefill, decode = self.metrics.count_step(step.scheduled, num_sampled, now - since)
        self.latencies.add_step(now - since, prefill, decode)
        self._booked_at = now
        if self.timeline is not None:
            times, tokens = (since, waited_at, now), (prefill, decode, num_sampled)
            self.timeline.book(step, tokens, times, finished)

    def _listened(self, step: InFlightStep) -> list[Request]:
        """The requests of a step that have a listener, each once."""
        ids = dict.fromkeys(item.seq.request_id for item in step.scheduled)
        requests = (self.requests.get(request_id) for request_id in ids)
        return [request for request in requests if request and request.listener is not None]

    def _end(self, request: Request) -> None:
        if request.listener is None:
            self.finished.append(request)
        self.metrics.count_finished(request)
        self.latencies.add_finished(request.metrics())

    def _drop_unneeded_steps(self) -> None:
        """Drop the steps in flight once no request is left: nobody will read their tokens."""
        if self._scheduler.is_finished():
            self.in_flight.clear()
            self._scheduler.forget_steps()

    def _abort(self, requests: list[Request]) -> None:
        self._scheduler.abort(seq for request in requests for seq in request.seqs)
        if self.timeline is not None:
            self.timeline.drop(requests)
        self._drop_unneeded_steps()

    def reset(self) -> None:
        """Drop every request, and with them the books of the KV blocks."""
        with uninterrupted():  # blocks and their index must not be of two times
            dropped = list(self.requests.values())
            super().reset()
            self.in_flight.clear()
            self._launching = False
            self._scheduler.reset()
            if self.timeline is not None:
                self.timeline.drop(dropped)

    def record(
        self, write: Write, facts: dict[str, Any], process: Process = ENGINE
    ) -> Callable[[], None]:
        """Record what happens from now on (see `Timeline`). Returns what ends that."""
        self._executor.time_steps(True)
        stop_timing = partial(self._executor.time_steps, False)
        facts = {**facts, "overlap": bool(self._lookahead)}
        self.timeline = Timeline(self._scheduler, write, stop_timing, facts, process)
        return self.timeline.close

    def describe(self) -> dict[str, Any]:
        """Counters and times, for `LLMEngine.metrics`."""
        self._drop_left()
        return {
            "overlap": bool(self._lookahead),
            **self._scheduler.describe(),
            **self.metrics.as_dict(),
            "prefix_cache_hit_rate": self.metrics.prefix_cache_hit_rate,
            **self.latencies.as_dict(),
        }


def _num_sampled(step: InFlightStep, token_ids: list[int]) -> int:
    """Tokens that go on with a sequence, before they are booked."""
    return sum(
        not seq.is_finished and token_id >= 0
        for seq, token_id in zip(step.sampled(), token_ids, strict=True)
    )
