"""The endpoints: `make_app` makes an ASGI application of an engine."""

import asyncio
import base64
import struct
import time
from collections.abc import Collection, Coroutine, Sequence
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from nanovllm import __version__
from nanovllm.async_llm import AsyncLLM
from nanovllm.openai.answers import dumps
from nanovllm.openai.asks import MAX_IDS, encode_prompts, read_messages
from nanovllm.requests.inputs import check_vocabulary
from nanovllm.serve.errors import (
    RefusedError,
    error_response,
    log_refusal,
    mistakes,
    raise_error,
)
from nanovllm.serve.guard import Guard
from nanovllm.serve.metrics import CONTENT_TYPE
from nanovllm.serve.served import Served
from nanovllm.serve.texts import Texts
from nanovllm.utils.checks import check_choice, shown
from nanovllm.utils.options import only

T = TypeVar("T")

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
    served = Served(llm, names, max_waiting, interval)
    service = Service(served)
    routes = [
        Route("/v1/chat/completions", Texts(served, is_chat=True), methods=["POST"]),
        Route("/v1/completions", Texts(served, is_chat=False), methods=["POST"]),
        Route("/v1/embeddings", service.embed, methods=["POST"]),
        Route("/tokenize", service.tokenize, methods=["POST"]),
        Route("/detokenize", service.detokenize, methods=["POST"]),
        Route("/v1/models", service.models),
        Route("/v1/models/{name:path}", service.model),
        Route("/health", service.health),
        Route("/version", service.version),
        Route("/metrics", service.page),
    ]
    handlers: dict[Any, Any] = {HTTPException: _refuse, RefusedError: _refuse}
    handlers[Exception] = service.fail
    return Guard(Starlette(routes=routes, exception_handlers=handlers), keys, hosts)


def _refuse(request: Request, error: Exception) -> Response:
    """The answer to a mistake of the client."""
    if isinstance(error, HTTPException):  # of routes: no such path, or another method
        detail = error.detail
        if error.status_code == 404:
            paths = ", ".join(route.path for route in request.app.routes)
            detail += f": this server has {paths.replace('{name:path}', 'NAME')}"
        refused = RefusedError(error.status_code, detail)
        headers = error.headers or {}
    else:
        assert isinstance(error, RefusedError)
        refused = error
        headers = {}
    log_refusal(request.state.request_id, refused)
    response = error_response(refused.status, str(refused))
    response.headers.update(headers)
    return response


class Service:
    """The endpoints but those of texts, of an engine that is served."""

    def __init__(self, served: Served) -> None:
        self._served, self._llm = served, served.llm
        self._started_at = int(time.time())

    async def fail(self, request: Request, error: Exception) -> Response:
        """The answer to a fault of ours, which Starlette raises again."""
        told = await self._served.fault(request.state.request_id, error)
        request.state.is_answered = True
        return error_response(told.status, str(told))

    # -- vectors and tokens -----------------------------------------------------------------------

    async def embed(self, request: Request) -> Response:
        """`/v1/embeddings`."""
        with self._served.waiting.admit() as place:
            fields = await self._served.read(request)
            with mistakes():
                form = fields.take("encoding_format")
                form = "float" if form is None else form
                check_choice("encoding_format", form, ("float", "base64"))
                fields.take("user")
                fields.refuse(NO_DIMENSIONS)
                given = fields.take_given("input")
                fields.end(request.url.path)
                prompts = await encode_prompts(self._llm, given, "input")
            place.hold(len(prompts))
            with mistakes(fields.names):
                outputs = await _all([self._llm.embed(prompt) for prompt in prompts])
        data, num_tokens = [], 0
        for index, output in enumerate(outputs):
            raise_error(output)
            vector: Any = output.outputs.embedding
            if form == "base64":
                vector = base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
            data.append({"object": "embedding", "index": index, "embedding": vector})
            num_tokens += len(output.prompt_token_ids)
        usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        return _json(
            {"object": "list", "data": data, "model": self._served.names[0], "usage": usage}
        )

    async def tokenize(self, request: Request) -> Response:
        """`/tokenize`, of a prompt or of messages."""
        fields = await self._served.read(request)
        with mistakes(fields.names):
            shows = fields.take_bool("return_token_strs")
            text = fields.take("prompt")
            has_messages = not fields.take_if("messages", None)
            if has_messages == (text is not None):
                given = "both" if has_messages else "neither"
                raise ValueError(f"`prompt` or `messages` must be given, got {given}")
            if has_messages:
                messages, options = read_messages(self._llm, fields)
                fields.end(request.url.path)
                prompt = await self._llm.render(messages, **options)
                if "multi_modal_data" in prompt:
                    prompt["prompt_token_ids"] = await self._llm.tokenize(prompt)
            else:
                adds = fields.take_bool("add_special_tokens", True)
                if not isinstance(text, str):
                    raise TypeError(f"`prompt` must be a text, got {shown(text)}")
                fields.end(request.url.path)
                [prompt] = await encode_prompts(self._llm, text, "prompt", add_special_tokens=adds)
        tokens = prompt["prompt_token_ids"]
        found = {
            "count": len(tokens),
            "max_model_len": self._llm.max_model_len,
            "tokens": tokens,
            "token_strs": self._llm.tokenizer.convert_ids_to_tokens(tokens) if shows else None,
        }
        return _json(found)

    async def detokenize(self, request: Request) -> Response:
        """`/detokenize`."""
        fields = await self._served.read(request)
        tokenizer = self._llm.tokenizer
        with mistakes():
            tokens = fields.take("tokens")
            fields.end(request.url.path)
            if not isinstance(tokens, list):
                raise TypeError(f"`tokens` must be a list of token ids, got {shown(tokens)}")
            if len(tokens) > MAX_IDS:
                raise ValueError(
                    f"`tokens` must hold at most {MAX_IDS} token ids, got {len(tokens)}"
                )
            if tokenizer is None:
                raise ValueError("`tokens` have no text: the model has no tokenizer")
            if wrong := [item for item in tokens if type(item) is not int]:
                raise TypeError(
                    f"`tokens` must be a list of token ids, got {shown(wrong[0])} in it"
                )
            check_vocabulary("tokens", tokens, len(tokenizer))
        return _json({"prompt": await asyncio.to_thread(tokenizer.decode, tokens)})

    # -- facts ------------------------------------------------------------------------------------

    async def models(self, _: Request) -> Response:
        """`/v1/models`."""
        return _json({"object": "list", "data": [self._model(name) for name in self._served.names]})

    async def model(self, request: Request) -> Response:
        """`/v1/models/NAME`."""
        name = request.path_params["name"]
        self._served.check_model(name)
        return _json(self._model(name))

    def _model(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._started_at,
            "owned_by": "nanovllm",
            "max_model_len": self._llm.max_model_len,
        }

    async def health(self, _: Request) -> Response:
        """`/health`: 200 while the engine can compute."""
        await self._served.check_engine()
        return Response()

    async def version(self, _: Request) -> Response:
        """`/version`."""
        return _json({"version": __version__})

    async def page(self, _: Request) -> Response:
        """`/metrics`."""
        await self._served.check_engine()
        num_refused = self._served.waiting.num_refused
        text = self._served.metrics.page(await self._llm.metrics(), num_refused)
        return Response(text, media_type=CONTENT_TYPE)


def _json(value: Any) -> Response:
    return Response(dumps(value), media_type="application/json")


async def _all(jobs: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of jobs side by side; where one fails, the others end."""
    tasks = [asyncio.ensure_future(job) for job in jobs]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
