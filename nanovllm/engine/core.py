"""`Core`: the requests of an engine, wherever they are computed. No torch here.

`EngineCore` computes them in this process, `ReplicatedCore` has replicas that do.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, Protocol, TypeVar

from nanovllm.outputs import RequestOutput
from nanovllm.requests.request import CheckedRequest, Refusal
from nanovllm.requests.text import Decoder
from nanovllm.threads.turn import Turn
from nanovllm.tracing.metrics import Metrics
from nanovllm.tracing.timeline import ENGINE, Process, Timeline, Write


class AnyRequest(Protocol):
    """A request that a caller waits for."""

    request_id: int
    weight_version: int | str

    def output(self, decode: Decoder) -> RequestOutput: ...


R = TypeVar("R", bound=AnyRequest)


class Core(ABC, Generic[R]):
    """The state and the interface of a core. Not thread-safe: `LLMEngine` holds a lock.

    Attributes:
        requests: unfinished requests by their ids.
        finished: finished requests without a listener, until `forget_finished`.
        metrics: counters of the work done.
        timeline: recording of this process's work; None: no recording.
        abort_later: function of a set of ids. The next call of the engine aborts them first.
            Streams use it: Python may collect their generator in the middle of another call, where
            aborting is unsafe.
        meanwhile: function called in each step before the wait for its results: its work, in
            any thread, goes on while the device computes.
        turn: sign by which other threads wait while a step is prepared or booked, where the device
            computes meanwhile.
        is_held: whether nothing is computed until `release`.
        weight_version: version of the weights, see `LLM.update_weights`.
    """

    def __init__(self) -> None:
        self.requests: dict[int, R] = {}
        self.finished: list[R] = []
        self.metrics = Metrics()
        self.timeline: Timeline | None = None
        self._left: deque[set[int]] = deque()
        # deque.append itself, not a wrapper: Ctrl-C can strike on entry to a Python function.
        self.abort_later = self._left.append
        self.meanwhile: Callable[[], None] = lambda: None
        self.turn = Turn()
        self.is_held = False
        self.weight_version: int | str = 0

    @abstractmethod
    def add(self, request: R) -> None:
        """Queue a request."""

    def with_images(
        self, checked: list[CheckedRequest | Refusal]
    ) -> list[CheckedRequest | Refusal]:
        """The same prompts with their images ready, for a caller that queues each several times.
        Only without requests: it waits.
        """
        return checked

    @abstractmethod
    def step(self) -> None:
        """Go on with the requests."""

    def prepare_to_hold(self) -> None:
        """Wait until `hold` takes no longer than a step."""

    @abstractmethod
    def hold(self) -> None:
        """Compute nothing until `release`, and then all requests again from their beginning: their
        memory on the device may go.
        """

    def release(self, version: int | str) -> None:
        """Go on, with weights of this version."""
        self.is_held, self.weight_version = False, version
        for request in self.requests.values():
            request.weight_version = version

    @property
    def has_room(self) -> bool:
        """Whether there is memory for further requests: callers that can wait wait for it."""
        return True

    def is_idle(self) -> bool:
        """Whether no request is unfinished, and none waits to be taken by the caller."""
        self._drop_left()
        return not self.requests and not self.finished

    def forget_finished(self) -> None:
        """Drop the finished requests, which the caller has taken."""
        self.finished.clear()

    def abort(self, request_ids: Iterable[int]) -> int:
        """Drop the unfinished ones of these requests. Returns how many there were."""
        found = [self.requests[i] for i in request_ids if i in self.requests]
        with self.reset_on_error():
            self._abort(found)
            for request in found:
                del self.requests[request.request_id]
                self.metrics.num_aborted += 1
        return len(found)

    @abstractmethod
    def _abort(self, requests: list[R]) -> None:
        """Compute these requests no further."""

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
        """Drop every request, and what is cached."""
        self.metrics.num_aborted += len(self.requests)
        self.finished.clear()
        self.requests.clear()

    @abstractmethod
    def record(
        self, write: Write, facts: dict[str, Any], process: Process = ENGINE
    ) -> Callable[[], None]:
        """Record what happens from now on (see `Timeline`). Returns what ends that."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Counters and times, for `LLMEngine.metrics`."""
