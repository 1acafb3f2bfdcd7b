"""`EngineCore`: the requests of an engine, and the loop that computes them.

A `step` is three verbs: schedule, launch, postprocess. Everything else here keeps the books.
Imports no torch.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from nanovllm.engine.in_flight import InFlightStep
from nanovllm.engine.metrics import Latencies, Metrics
from nanovllm.engine.request import Request
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import ScheduledSequence

if TYPE_CHECKING:
    from nanovllm.engine.executor import Executor


class EngineCore:
    """Computes requests, step by step. Not thread-safe: `LLMEngine` holds a lock.

    Args:
        executor: started.
        scheduler: of as many blocks as the executor has.
        lookahead: steps to launch ahead of the one that is booked: 1 to let the device compute
            while the host books, 0 to book each step before the next is chosen.

    Attributes:
        requests: unfinished requests by their ids.
        finished: finished requests without a listener, until `forget_finished`.
        in_flight: steps that are launched and not booked, the oldest first.
        metrics: counters of the work done.
        abort_later: takes a set of ids. The next call of the engine aborts these requests first.
            Streams use it: Python may collect their generator in the middle of another call, where
            aborting is unsafe.
    """

    def __init__(self, executor: Executor, scheduler: Scheduler, lookahead: int) -> None:
        self._executor, self._scheduler, self._lookahead = executor, scheduler, lookahead
        self.requests: dict[int, Request] = {}
        self.finished: list[Request] = []
        self.in_flight: deque[InFlightStep] = deque()
        self.metrics, self._latencies = Metrics(), Latencies()
        self._launching = False  # still True when a launch has failed
        self._booked_at = 0.0  # seconds of time.perf_counter
        self._left: deque[set[int]] = deque()
        # deque.append itself, not a wrapper: Ctrl-C can strike on entry to a Python function.
        self.abort_later = self._left.append

    def add(self, request: Request) -> None:
        """Queue a request."""
        with self.reset_on_error():
            self.requests[request.request_id] = request
            for seq in request.seqs:
                self._scheduler.add(seq)

    def step(self) -> None:
        """Launch a step, and book the step before it (or the same one, see `lookahead`)."""
        self._drop_left()
        scheduled = self._schedule()
        if scheduled:
            self._launch(scheduled)
        self._book(leave=self._lookahead if scheduled else 0)

    def _schedule(self) -> list[ScheduledSequence]:
        # A failed launch is repeated, and the device's table of last tokens may be newer than the
        # repeated step needs: book all steps in flight first, so that the host sends the tokens.
        # After Ctrl-C in a wait, there is one step more in flight than `lookahead` allows.
        books_only = self.in_flight and (self._launching or len(self.in_flight) > self._lookahead)
        with self.reset_on_error():
            return [] if books_only else self._scheduler.schedule()

    def _launch(self, scheduled: list[ScheduledSequence]) -> None:
        self._launching, launched_at = True, time.perf_counter()
        newest = self.in_flight[-1] if self.in_flight else None
        tokens = self._executor.run(scheduled, newest)
        with self.reset_on_error():
            self._scheduler.advance(scheduled)
            self.in_flight.append(InFlightStep(scheduled, tokens, launched_at))
        self._launching = False

    def _book(self, leave: int) -> None:
        """Book the steps in flight, the oldest first, all but `leave`."""
        while len(self.in_flight) > leave:
            step = self.in_flight[0]
            token_ids = self._executor.wait(step.tokens)
            with self.reset_on_error():
                self.in_flight.popleft()
                step.take_results()
                num_sampled = sum(not seq.is_finished for seq in step.sampled())
                finished = self._scheduler.postprocess(step.scheduled, token_ids)
                listened = self._listened(step)
                for request_id in dict.fromkeys(seq.request_id for seq in finished):
                    if self.requests[request_id].is_finished:
                        self._end(self.requests.pop(request_id))
            now = time.perf_counter()
            seconds = now - max(step.launched_at, self._booked_at)
            prefill, decode = self.metrics.count_step(step.scheduled, num_sampled, seconds)
            self._latencies.add_step(seconds, prefill, decode)
            self._booked_at = now
            self._drop_unneeded_steps()
            for request in listened:  # last: a listener may call the engine
                request.tell()

    def _listened(self, step: InFlightStep) -> list[Request]:
        """The requests of a step that have a listener, each once."""
        ids = dict.fromkeys(item.seq.request_id for item in step.scheduled)
        requests = (self.requests.get(request_id) for request_id in ids)
        return [request for request in requests if request and request.listener is not None]

    def _end(self, request: Request) -> None:
        if request.listener is None:
            self.finished.append(request)
        self.metrics.count_finished(request)
        self._latencies.add_finished(request.metrics())

    def _drop_unneeded_steps(self) -> None:
        """Drop the steps in flight once no request is left: nobody will read their tokens."""
        if self._scheduler.is_finished():
            self.in_flight.clear()
            self._scheduler.forget_steps()

    def forget_finished(self) -> None:
        """Drop the finished requests, which the caller has taken."""
        self.finished.clear()

    def is_idle(self) -> bool:
        """Whether no request is unfinished, and none waits to be taken by the caller."""
        self._drop_left()
        return self._scheduler.is_finished() and not self.finished

    def abort(self, request_ids: Iterable[int]) -> int:
        """Drop the unfinished ones of these requests. Returns how many there were."""
        found = [self.requests[i] for i in request_ids if i in self.requests]
        with self.reset_on_error():
            self._scheduler.abort(seq for request in found for seq in request.seqs)
            for request in found:
                del self.requests[request.request_id]
                self.metrics.num_aborted += 1
            self._drop_unneeded_steps()
        return len(found)

    def abort_all(self) -> None:
        """Drop all requests, the finished ones too."""
        self.abort(list(self.requests))
        self.forget_finished()

    def _drop_left(self) -> None:
        """Abort the requests that `abort_later` was given."""
        while self._left:
            self.abort(self._left[0])
            self._left.popleft()

    @contextmanager
    def reset_on_error(self) -> Iterator[None]:
        """An error half-way through an update leaves the books inconsistent: start new ones."""
        try:
            yield
        except BaseException:  # Ctrl-C too
            self.reset()
            raise

    def reset(self) -> None:
        """Drop every request, and with them the books of the KV blocks."""
        self.metrics.num_aborted += len(self.requests)
        self.in_flight.clear()
        self.finished.clear()
        self.requests.clear()
        self._launching = False
        self._scheduler.reset()

    def describe(self) -> dict[str, Any]:
        """Counters and times, for `LLMEngine.metrics`."""
        self._drop_left()
        return {
            "overlap": bool(self._lookahead),
            **self._scheduler.describe(),
            **self.metrics.as_dict(),
            "prefix_cache_hit_rate": self.metrics.prefix_cache_hit_rate,
            **self._latencies.as_dict(),
        }
