"""The endpoints: `make_app` makes an ASGI application of an engine."""

import asyncio
import base64
import json
import logging
import sys
import time
from array import array
from collections.abc import AsyncGenerator, Collection, Coroutine, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from nanovllm import __version__
from nanovllm.async_llm import AsyncLLM
from nanovllm.batch.rows import CHAT_FIELDS
from nanovllm.openai.answers import Answer, dumps
from nanovllm.openai.asks import Ask, encode_prompts, read_ask, refuse, take_bool
from nanovllm.outputs import RequestOutput
from nanovllm.requests.inputs import check_vocabulary, whole_numbers
from nanovllm.requests.news import News
from nanovllm.serve.guard import (
    REQUEST_ID,
    Guard,
    RefusedError,
    error_response,
    last_events,
)
from nanovllm.serve.metrics import CONTENT_TYPE, ServerMetrics
from nanovllm.utils.options import only

logger = logging.getLogger(__name__)
T = TypeVar("T")

EVENT_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # the latter for nginx
INTERNAL = "internal error: the log of the server has more about request {}"
NO_DIMENSIONS = {"dimensions": (only(None), "vectors have the size of the model")}


def make_app(
    llm: AsyncLLM,
    names: Sequence[str],
    *,
    keys: Sequence[str] = (),
    hosts: Collection[str] = (),
    max_waiting: int = 1024,
    interval: int = 1,
) -> Guard:
    """An application that answers by an engine.

    Args:
        llm: engine.
        names: names of its model; answers have the first.
        keys: keys of which a request must have one; none: it needs none.
        hosts: names by which requests may call the server, see `Guard`.
        max_waiting: number of sequences that may wait for their first token.
        interval: tokens that make a piece of a stream, see `AsyncLLM.stream`.
    """
    service = Service(llm, names, max_waiting, interval)
    post = {
        "/v1/chat/completions": service.chat,
        "/v1/completions": service.complete,
        "/v1/embeddings": service.embed,
        "/tokenize": service.tokenize,
        "/detokenize": service.detokenize,
    }
    get = {
        "/v1/models": service.models,
        "/v1/models/{name:path}": service.model,
        "/health": service.health,
        "/version": service.version,
        "/metrics": service.page,
    }
    routes = [Route(path, endpoint, methods=["POST"]) for path, endpoint in post.items()]
    routes += [Route(path, endpoint, methods=["GET"]) for path, endpoint in get.items()]
    handlers: dict[Any, Any] = {HTTPException: _refuse, RefusedError: _refuse, Exception: _fail}
    return Guard(Starlette(routes=routes, exception_handlers=handlers), keys, hosts)


def _refuse(_: Request, error: Exception) -> Response:
    """The answer to a mistake of the client."""
    if isinstance(error, HTTPException):  # of routes: no such path, or another method
        response = error_response(error.status_code, error.detail)
        response.headers.update(error.headers or {})
        return response
    assert isinstance(error, RefusedError)
    return error_response(error.status, str(error))


def _fail(request: Request, error: Exception) -> Response:
    """The answer to a fault of ours: its text is for the log, where paths and addresses may be."""
    request_id = request.state.request_id
    logger.error("request %s has failed by %s: %s", request_id, type(error).__name__, error)
    return error_response(500, INTERNAL.format(request_id))


@contextmanager
def mistakes() -> Iterator[None]:
    """Errors about what a client has passed, as his mistakes; others are faults of ours."""
    try:
        yield
    except (TypeError, ValueError, ImportError) as error:  # the last for a missing package
        raise RefusedError(400, str(error).replace("`sampling_params.", "`")) from error
    except RecursionError as error:
        raise RefusedError(400, "a field of the body is nested too deeply") from error


class AdmissionSlot:
    """A request's places among the sequences that wait, from its arrival to their first tokens.

    A request is admitted while fewer wait than may, and waits with all its sequences: so those of
    one request at most are beyond the bound, and none has too many ever to be admitted.
    """

    def __init__(self, service: "Service") -> None:
        self._service, self._count = service, 0
        self.resize(1)  # until its body is read

    def resize(self, count: int) -> None:
        """Wait with so many sequences.

        Raises:
            RefusedError: too many others wait.
        """
        service = self._service
        others = service.num_waiting - self._count
        if others >= service.max_waiting:
            service.metrics.num_refused += 1
            raise RefusedError(429, f"{others} sequences wait already: try again later")
        service.num_waiting, self._count = others + count, count

    def release(self, count: int) -> None:
        """Wait with fewer: so many have their first tokens."""
        self._service.num_waiting -= count
        self._count -= count

    def end(self) -> None:
        """Wait no longer. May be called again."""
        self.release(self._count)


class Service:
    """The methods that answer. Arguments are those of `make_app`.

    Attributes:
        num_waiting: sequences without a first token.
        metrics: counters of what was answered.
    """

    def __init__(
        self, llm: AsyncLLM, names: Sequence[str], max_waiting: int, interval: int
    ) -> None:
        self._llm, self._names, self._interval = llm, names, interval
        self._tokenizer = llm.tokenizer
        self._started_at = int(time.time())
        self.num_waiting, self.max_waiting = 0, max_waiting
        self.metrics = ServerMetrics(names[0])

    # -- texts ------------------------------------------------------------------------------------

    async def chat(self, request: Request) -> Response:
        """`/v1/chat/completions`."""
        return await self._generate(request, is_chat=True)

    async def complete(self, request: Request) -> Response:
        """`/v1/completions`."""
        return await self._generate(request, is_chat=False)

    async def _generate(self, request: Request, *, is_chat: bool) -> Response:
        slot, streams = AdmissionSlot(self), False
        try:
            body = await self._body(request)
            request_id = body.pop("request_id", None) or request.state.request_id
            with mistakes():
                if not isinstance(request_id, str) or not REQUEST_ID.fullmatch(request_id):
                    raise ValueError(
                        "`request_id` must be up to 128 letters, digits, dots and dashes, "
                        f"got {request_id!r}"
                    )
                ask = await read_ask(
                    self._llm, self._tokenizer, body, is_chat=is_chat, interval=self._interval
                )
            slot.resize(len(ask.prompts) * ask.params.n)
            answer = Answer(ask, self._names[0], request_id, self._tokenizer)
            if not ask.streams:
                outputs = await _all([self._whole(prompt, ask, slot) for prompt in ask.prompts])
                return _json(answer.whole(outputs))
            events = self._events(ask, answer, slot)
            first = await anext(events)
            streams = True
            return Events(first, events, request.state.request_id)
        finally:
            if not streams:
                slot.end()

    async def _outputs(
        self, prompt: Any, ask: Ask, slot: AdmissionSlot
    ) -> AsyncGenerator[RequestOutput, None]:
        """New output of a prompt; all after the first at the end, if the answer is not a stream."""
        interval = ask.interval if ask.streams else sys.maxsize
        news = self._llm.stream(prompt, ask.params, interval=interval)
        try:
            async with aclosing(news) as outputs:
                with mistakes():  # which are found before there is any output
                    output = await anext(outputs)
                slot.release(ask.params.n)
                while True:
                    self.metrics.count(output, ask.params)
                    if output.error is not None:
                        # Images are read late, so the mistake in one comes as an output. Like any
                        # other it begins with what it is about, and there is no completion.
                        if output.error.startswith("`") and not output.outputs:
                            raise RefusedError(400, output.error)
                        raise RuntimeError(output.error)
                    yield output
                    if output.finished:
                        return
                    output = await anext(outputs)
        except (asyncio.CancelledError, GeneratorExit):
            self.metrics.count_abort()
            raise

    async def _whole(self, prompt: Any, ask: Ask, slot: AdmissionSlot) -> RequestOutput:
        news = News()
        async with aclosing(self._outputs(prompt, ask, slot)) as outputs:
            async for output in outputs:
                news.add(output)
        return news.take()

    async def _events(
        self, ask: Ask, answer: Answer, slot: AdmissionSlot
    ) -> AsyncGenerator[str, None]:
        """The events of a stream; some come together."""
        generators = [self._outputs(prompt, ask, slot) for prompt in ask.prompts]
        try:
            if len(generators) == 1:
                async with aclosing(generators[0]) as outputs:
                    async for output in outputs:
                        if events := answer.events(0, output):
                            yield events
            else:
                async with aclosing(_merge(generators)) as merged:
                    async for number, output in merged:
                        if events := answer.events(number, output):
                            yield events
            yield answer.end()
        finally:
            slot.end()

    # -- vectors and tokens -----------------------------------------------------------------------

    async def embed(self, request: Request) -> Response:
        """`/v1/embeddings`."""
        slot = AdmissionSlot(self)
        try:
            body = await self._body(request)
            with mistakes():
                form, given = body.pop("encoding_format", None) or "float", body.pop("input", None)
                if form not in ("float", "base64"):
                    raise ValueError(f"`encoding_format` must be float or base64, got {form!r}")
                body.pop("user", None)
                refuse(body, NO_DIMENSIONS)
                _check_all_read(body, request.url.path)
                if given is None:
                    raise ValueError("`input` must be given, got none")
                prompts = await encode_prompts(self._tokenizer, given, "input")
            slot.resize(len(prompts))
            with mistakes():
                outputs = await _all([self._llm.embed(prompt) for prompt in prompts])
        finally:
            slot.end()
        data, num_tokens = [], 0
        for index, output in enumerate(outputs):
            vector: Any = output.outputs.embedding
            if form == "base64":
                vector = base64.b64encode(array("f", vector).tobytes()).decode()
            data.append({"object": "embedding", "index": index, "embedding": vector})
            num_tokens += len(output.prompt_token_ids)
        usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        return _json({"object": "list", "data": data, "model": self._names[0], "usage": usage})

    async def tokenize(self, request: Request) -> Response:
        """`/tokenize`, of a prompt or of messages."""
        body = await self._body(request)
        with mistakes():
            shows = take_bool(body, "return_token_strs")
            if (messages := body.pop("messages", None)) is None:
                adds = take_bool(body, "add_special_tokens", True)
                text = body.pop("prompt", None)
                if not isinstance(text, str):
                    raise TypeError(f"`prompt` must be a text, got {text!r}")
                _check_all_read(body, request.url.path)
                [prompt] = await encode_prompts(
                    self._tokenizer, text, "prompt", add_special_tokens=adds
                )
            else:
                options = {name: body.pop(name) for name in CHAT_FIELDS if name in body}
                _check_all_read(body, request.url.path)
                prompt = await self._llm.render(messages, **options)
            tokens = prompt["prompt_token_ids"]
        texts = self._tokenizer.convert_ids_to_tokens(tokens) if shows else None
        most = self._llm.max_model_len
        return _json(
            {"count": len(tokens), "max_model_len": most, "tokens": tokens, "token_strs": texts}
        )

    async def detokenize(self, request: Request) -> Response:
        """`/detokenize`."""
        body = await self._body(request)
        with mistakes():
            tokens = body.pop("tokens", None)
            _check_all_read(body, request.url.path)
            if not isinstance(tokens, list):
                raise TypeError(f"`tokens` must be a list of token ids, got {tokens!r}")
            if self._tokenizer is None:
                raise ValueError("`tokens` have no text: the model has no tokenizer")
            tokens = whole_numbers(tokens, "tokens")
            check_vocabulary("tokens", tokens, len(self._tokenizer))
        return _json({"prompt": self._tokenizer.decode(tokens)})

    # -- facts ------------------------------------------------------------------------------------

    async def models(self, _: Request) -> Response:
        """`/v1/models`."""
        return _json({"object": "list", "data": [self._model(name) for name in self._names]})

    async def model(self, request: Request) -> Response:
        """`/v1/models/NAME`."""
        self._check_model(request.path_params["name"])
        return _json(self._model(request.path_params["name"]))

    def _model(self, name: str) -> dict[str, Any]:
        own = {"id": name, "object": "model", "created": self._started_at, "owned_by": "nanovllm"}
        return {**own, "max_model_len": self._llm.max_model_len}

    async def health(self, _: Request) -> Response:
        """`/health`: 200 while the engine can compute."""
        try:
            await self._llm.check_health()
        except RuntimeError as error:
            return error_response(503, str(error))
        return Response()

    async def version(self, _: Request) -> Response:
        """`/version`."""
        return _json({"version": __version__})

    async def page(self, _: Request) -> Response:
        """`/metrics`."""
        text = self.metrics.page(await self._llm.metrics())
        return Response(text, media_type=CONTENT_TYPE)

    # -- bodies -----------------------------------------------------------------------------------

    async def _body(self, request: Request) -> dict[str, Any]:
        """The fields of a request, without `model`, which is checked."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # forms of web pages elsewhere may send any other
            raise RefusedError(
                415, f"the header `Content-Type` must be application/json, got {kind!r}"
            )
        try:
            body = json.loads(await request.body(), parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            raise RefusedError(400, f"the body must be JSON: {error}") from error
        if not isinstance(body, dict):
            raise RefusedError(400, f"the body must be an object, got a {type(body).__name__}")
        self._check_model(body.pop("model", None) or self._names[0])
        return body

    def _check_model(self, name: Any) -> None:
        if name not in self._names:
            raise RefusedError(
                404, f"`model` must be one of {', '.join(self._names)}, got {name!r}"
            )


class Events(Response):
    """A response of events that come.

    Args:
        first: events that are there.
        rest: generator of those that follow.
        request_id: id of the request.
    """

    def __init__(self, first: str, rest: AsyncGenerator[str, None], request_id: str) -> None:
        super().__init__(media_type="text/event-stream", headers=EVENT_HEADERS)
        del self.headers["content-length"]
        self._first, self._rest, self._request_id = first, rest, request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send them."""

        async def write(text: str, more: bool = True) -> None:
            message = {"type": "http.response.body", "body": text.encode(), "more_body": more}
            await send(message)

        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async with aclosing(self._rest) as rest:
            await write(self._first)
            try:
                async for events in rest:
                    await write(events)
            except RefusedError as refused:  # by the mistake in another prompt
                await write(last_events(refused.status, str(refused)))
            except Exception:  # the status is sent: what is left to say is said here
                logger.exception("the stream of request %s has ended by an error", self._request_id)
                await write(last_events(500, INTERNAL.format(self._request_id)))
        await write("", more=False)


def _json(value: Any) -> Response:
    return Response(dumps(value), media_type="application/json")


def _check_all_read(body: dict[str, Any], path: str) -> None:
    if body:
        raise ValueError(f"`{min(body)}` is not supported for {path}: leave it out")


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


async def _all(jobs: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of jobs side by side; where one fails, the others end."""
    tasks = [asyncio.ensure_future(job) for job in jobs]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _merge(
    generators: Sequence[AsyncGenerator[T, None]],
) -> AsyncGenerator[tuple[int, T], None]:
    """The items of generators with their numbers, as they come."""
    found: asyncio.Queue[tuple[int, T] | None] = asyncio.Queue()
    room = asyncio.Semaphore(len(generators))  # bounds the items, so that the end always fits

    async def put_all(number: int, generator: AsyncGenerator[T, None]) -> None:
        async with aclosing(generator) as items:
            async for item in items:
                await room.acquire()
                found.put_nowait((number, item))

    work = asyncio.ensure_future(_all([put_all(*each) for each in enumerate(generators)]))
    work.add_done_callback(lambda _: found.put_nowait(None))
    try:
        while (item := await found.get()) is not None:
            yield item
            room.release()
        await work
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
