"""`Served`: the state that all endpoints share. `Waiting`: sequences without their first token."""

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from starlette.requests import Request

from nanovllm.async_llm import AsyncLLM
from nanovllm.openai.bodies import Fields
from nanovllm.serve.errors import DEAD, INTERNAL, RefusedError
from nanovllm.serve.metrics import ServerMetrics
from nanovllm.utils.checks import shown

logger = logging.getLogger(__name__)


class Waiting:
    """A count of sequences.

    A request is admitted while fewer wait than may, and waits with all its sequences: so those of
    one request at most are beyond the bound, and none has too many ever to be admitted.

    Args:
        max_waiting: maximum number of sequences that wait.

    Attributes:
        count: sequences that wait.
        num_refused: requests that were refused.
    """

    def __init__(self, max_waiting: int) -> None:
        self.max_waiting, self.count, self.num_refused = max_waiting, 0, 0

    @contextmanager
    def admit(self) -> Iterator["Place"]:
        """Admit a request for the block, as one sequence until its body is read.

        Raises:
            RefusedError: too many others wait.
        """
        place = Place(self)
        place.hold(1)
        try:
            yield place
        finally:
            place.release(place.count)


class Place:
    """A request's place among those that wait.

    Attributes:
        count: its sequences that wait.
        num_ended: its sequences that have ended.
    """

    def __init__(self, waiting: Waiting) -> None:
        self._waiting, self.count, self.num_ended = waiting, 0, 0

    def hold(self, count: int) -> None:
        """Wait with so many sequences.

        Raises:
            RefusedError: too many others wait.
        """
        others = self._waiting.count - self.count
        if others >= self._waiting.max_waiting:
            self._waiting.num_refused += 1
            raise RefusedError(429, f"{others} sequences wait already: try again later")
        self._waiting.count, self.count = others + count, count

    def release(self, count: int) -> None:
        """Wait with fewer: so many have their first tokens."""
        self._waiting.count -= count
        self.count -= count


class Served:
    """An engine that is served.

    Args:
        llm: engine.
        names: names of its model; answers have the first.
        max_waiting: number of sequences that may wait for their first token.
        interval: tokens that make a piece of a stream, see `AsyncLLM.stream`.

    Attributes:
        waiting: the sequences that wait.
        metrics: counters of what was answered.
    """

    def __init__(
        self, llm: AsyncLLM, names: Sequence[str], max_waiting: int, interval: int
    ) -> None:
        self.llm, self.names, self.interval = llm, names, interval
        self.waiting = Waiting(max_waiting)
        self.metrics = ServerMetrics(names[0], llm.max_model_len)
        self._end_logged = 0  # of the engine: 1 for its reason, 2 for an error with its traceback

    async def check_engine(self) -> None:
        """RefusedError if the engine cannot compute any more."""
        try:
            await self.llm.check_health()
        except RuntimeError as error:
            self._log_end(error, trace=None)
            raise RefusedError(503, DEAD) from error

    async def fault(self, request_id: str, error: Exception) -> RefusedError:
        """The refusal that a client gets for an error of ours; the log has the error itself, once
        if it has ended the engine.
        """
        try:
            await self.llm.check_health()
        except RuntimeError:
            self._log_end(error, trace=error)
            return RefusedError(503, DEAD)
        logger.error("request %s has failed", request_id, exc_info=error)
        return RefusedError(500, INTERNAL.format(request_id))

    def _log_end(self, error: Exception, trace: Exception | None) -> None:
        known = 1 if trace is None else 2
        if self._end_logged < known:
            self._end_logged = known
            logger.error("the engine has failed: %s", error, exc_info=trace)

    async def read(self, request: Request) -> Fields:
        """The fields of a request, without `model`, which is checked.

        Raises:
            RefusedError: the body is none, or the engine has failed.
        """
        await self.check_engine()
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # forms of web pages elsewhere may send any other
            raise RefusedError(
                415, f"the header `Content-Type` must be application/json, got {shown(kind)}"
            )
        try:
            body = json.loads(await request.body(), parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            raise RefusedError(400, f"the body must be JSON: {error}") from error
        if not isinstance(body, dict):
            raise RefusedError(400, f"the body must be an object, got a {type(body).__name__}")
        fields = Fields(body)
        name = fields.take("model")
        self.check_model(self.names[0] if name is None else name)
        return fields

    def check_model(self, name: Any) -> None:
        """RefusedError unless the model has this name, which may be any JSON value."""
        if name not in self.names:
            raise RefusedError(
                404, f"`model` must be one of {', '.join(self.names)}, got {shown(name)}"
            )


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")
