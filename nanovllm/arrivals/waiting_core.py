"""`WaitingCore`: a core before the core, in which requests wait until their images are ready.

The inner core gets a request when nothing of it is missing any more, so scheduling knows
nothing of files and threads. Imports no torch.
"""

import time
from collections import ChainMap
from collections.abc import Callable, Iterable, MutableMapping
from typing import Any, Protocol

from nanovllm.arrivals.image_events import ImageEvents
from nanovllm.engine.core import Core
from nanovllm.images.preparation import Preparation
from nanovllm.outputs import RequestOutput
from nanovllm.requests.intake import Intake
from nanovllm.requests.request import CheckedRequest, Listener, Refusal, Ticket
from nanovllm.requests.text import Decoder
from nanovllm.threads.interrupts import uninterrupted
from nanovllm.tracing.timeline import ENGINE, Process, Write

WAIT_SECONDS = 0.01  # longest wait in a step, so that callers can add requests in between


class Make(Protocol):
    """A maker of requests of the inner core."""

    def __call__(
        self,
        checked: CheckedRequest,
        pooling: str | None = None,
        listener: Listener | None = None,
        ticket: Ticket | None = None,
    ) -> Any: ...


class WaitingRequest:
    """A request whose images are not ready.

    Args:
        checked: request of the caller.
        ticket: its ids.
        pooling: "last" or "mean", for embeddings.
        listener: function that gets outputs, see `LLMEngine.add_request`.

    Attributes:
        error: reason why it never will be; None: nothing is wrong so far.
    """

    weight_version: int | str = 0

    def __init__(
        self,
        checked: CheckedRequest,
        ticket: Ticket,
        pooling: str | None,
        listener: Listener | None,
    ) -> None:
        self.checked, self.ticket = checked, ticket
        self.pooling, self.listener = pooling, listener
        self.request_id = ticket.request_id
        self.error: str | None = None

    def output(self, decode: Decoder) -> RequestOutput:
        """The result of a request that has failed."""
        assert self.error is not None, f"request {self.request_id} has not failed"
        checked = self.checked
        return RequestOutput(
            self.request_id, checked.text, checked.token_ids, [], True, 0, error=self.error
        )


class WaitingCore(Core[Any]):
    """A core whose requests wait for their images, in front of the one that computes them.

    Args:
        core: core that computes.
        intake: intake of the engine.
        make: maker of requests for `core`.
        preparation: preparation of images.
        max_num_batched_tokens: maximum number of tokens of a step.
    """

    def __init__(
        self,
        core: Core[Any],
        intake: Intake,
        make: Make,
        preparation: Preparation,
        max_num_batched_tokens: int,
    ) -> None:
        self._core, self._intake, self._make = core, intake, make
        self._preparation = preparation
        self._max_num_batched_tokens = max_num_batched_tokens
        self._waiting: dict[int, WaitingRequest] = {}
        self._failed: list[WaitingRequest] = []  # with listeners, which have not been told
        self._events = ImageEvents()  # of a recording
        self._ended = 0  # requests that had ended when memory was last released
        super().__init__()
        self.requests: MutableMapping[int, Any] = ChainMap(self._waiting, core.requests)  # type: ignore[assignment]
        self.finished, self.metrics = core.finished, core.metrics
        self.turn = core.turn

    def make(
        self,
        checked: CheckedRequest,
        pooling: str | None = None,
        listener: Listener | None = None,
    ) -> Any:
        """Make a request; one with images that are not ready waits here."""
        if not checked.pictures:
            return self._make(checked, pooling, listener)
        ticket = self._intake.ticket(checked.params.n)
        return WaitingRequest(checked, ticket, pooling, listener)

    def add(self, request: Any) -> None:
        """Queue a request, or have its images prepared first."""
        if not isinstance(request, WaitingRequest):
            self._core.add(request)
            return
        with self.reset_on_error():
            request.weight_version = self.weight_version
            self._waiting[request.request_id] = request
            self._preparation.add(request.request_id, request.checked.pictures)
            self._events.count(len(self._waiting), self._preparation)

    def with_images(
        self, checked: list[CheckedRequest | Refusal]
    ) -> list[CheckedRequest | Refusal]:
        """The same prompts with their images ready; a `Refusal` replaces a prompt with a broken
        image. Their memory counts until they are ready.
        """
        assert self.is_idle(), "others wait for images"
        found, places = [*checked], {}
        with self.reset_on_error():
            for i, item in enumerate(checked):
                if isinstance(item, CheckedRequest) and item.pictures:
                    request_id = self._intake.ticket(0).request_id
                    places[request_id] = i, item
                    self._preparation.add(request_id, item.pictures)
            while places:
                for ready in self._preparation.take_ready():
                    i, item = places.pop(ready.request_id)
                    self._preparation.release([ready.request_id])
                    if ready.error is None:
                        found[i] = item._replace(images=ready.images, pictures=())
                    else:
                        found[i] = Refusal(item.text, ready.error)
                if places:
                    self._preparation.wait(WAIT_SECONDS)
        return found

    def step(self) -> None:
        """Queue the requests whose images have become ready, and let the core go on."""
        self._drop_left()
        with self.reset_on_error():
            self._admit()
        if self._waiting and not self._core.requests and not self._failed:
            began = time.perf_counter()
            self._preparation.wait(WAIT_SECONDS)
            self._events.waited(began, time.perf_counter())
            with self.reset_on_error():
                self._admit()
        self._events.count(len(self._waiting), self._preparation)
        self._core.step()
        self._release()
        self._events.count(len(self._waiting), self._preparation)
        self._tell()

    def _admit(self) -> None:
        """Queue what is ready."""
        if not self._waiting and not self._preparation.is_running:
            return
        for ready in self._preparation.take_ready(self._max_num_batched_tokens):
            request = self._waiting.pop(ready.request_id)
            if ready.error is None:
                checked = request.checked._replace(images=ready.images, pictures=())
                self._core.add(
                    self._make(checked, request.pooling, request.listener, request.ticket)
                )
            else:
                self._fail(request, ready.error)

    def _fail(self, request: WaitingRequest, error: str) -> None:
        """End a request that has an image which cannot be read."""
        request.error = error
        self._preparation.release([request.request_id])
        self.metrics.num_finished += 1
        self.metrics.num_finished_by_error += request.checked.params.n
        if request.listener is None:
            self.finished.append(request)
        else:
            self._failed.append(request)

    def _tell(self) -> None:
        """Tell listeners of requests that have failed. Comes last: they may call the engine."""
        while self._failed:
            request = self._failed.pop(0)
            assert request.listener is not None, "told of by the engine"
            request.listener(request.output(self._intake.decoder))

    def _release(self) -> None:
        """Give back the memory of requests that have ended."""
        ended = self.metrics.num_finished + self.metrics.num_aborted
        if ended != self._ended:
            with uninterrupted():
                self._ended = ended
                self._preparation.release(
                    [i for i in self._preparation.admitted if i not in self._core.requests]
                )

    @property
    def has_room(self) -> bool:
        return self._preparation.has_room

    def is_idle(self) -> bool:
        """Whether no request is unfinished, and none waits to be taken by the caller."""
        self._drop_left()
        return not self._waiting and not self._failed and self._core.is_idle()

    def abort(self, request_ids: Iterable[int]) -> int:
        """Drop the unfinished ones of these requests. Returns how many there were."""
        request_ids = list(request_ids)
        own = [self._waiting[i] for i in request_ids if i in self._waiting]
        if own:
            self._abort(own)
        self._failed = [each for each in self._failed if each.request_id not in request_ids]
        count = len(own) + self._core.abort(request_ids)
        self._release()
        return count

    def _abort(self, requests: list[WaitingRequest]) -> None:
        with self.reset_on_error():
            for request in requests:
                del self._waiting[request.request_id]
                self._preparation.release([request.request_id])
                self.metrics.num_aborted += 1

    def reset(self) -> None:
        """Drop every request, end the threads, and forget what is cached."""
        self.metrics.num_aborted += len(self._waiting)
        self._waiting.clear()
        self._failed.clear()
        self._preparation.close()
        self._core.reset()

    def prepare_to_hold(self) -> None:
        self._core.prepare_to_hold()

    def hold(self) -> None:
        """Compute nothing until `release`. Images are prepared meanwhile."""
        self._drop_left()
        self._core.hold()

    def release(self, version: int | str) -> None:
        """Go on, with weights of this version."""
        self._core.release(version)
        for request in self._waiting.values():
            request.weight_version = version

    def record(
        self, write: Write, facts: dict[str, Any], process: Process = ENGINE
    ) -> Callable[[], None]:
        """Record what happens from now on. Returns what ends that."""
        stop = self._core.record(write, facts, process)
        self._events = ImageEvents(write)
        self._preparation.note = self._events.prepared

        def stop_both() -> None:
            self._preparation.note = lambda prepared: None
            self._events.flush()
            self._events = ImageEvents()
            stop()

        return stop_both

    def describe(self) -> dict[str, Any]:
        """Counters and times, for `LLMEngine.metrics`."""
        self._drop_left()
        self._preparation.book()
        counts = self._preparation.counts
        return {
            **self._core.describe(),
            "num_images_waiting": self._preparation.num_images_waiting,
            "num_images_prepared": counts.num_images_prepared,
            "num_images_failed": counts.num_images_failed,
            "image_seconds": counts.image_seconds,
            "image_bytes": self._preparation.held_bytes + self._preparation.waiting_bytes,
        }

    # -- what callers read and set in the inner core -------------------------------------------

    @property
    def timeline(self) -> Any:
        return self._core.timeline

    @timeline.setter
    def timeline(self, timeline: Any) -> None:
        self._core.timeline = timeline

    @property
    def meanwhile(self) -> Callable[[], None]:
        return self._core.meanwhile

    @meanwhile.setter
    def meanwhile(self, meanwhile: Callable[[], None]) -> None:
        self._core.meanwhile = meanwhile

    @property
    def is_held(self) -> bool:
        return self._core.is_held

    @is_held.setter
    def is_held(self, is_held: bool) -> None:
        self._core.is_held = is_held

    @property
    def weight_version(self) -> int | str:
        return self._core.weight_version

    @weight_version.setter
    def weight_version(self, version: int | str) -> None:
        self._core.weight_version = version
