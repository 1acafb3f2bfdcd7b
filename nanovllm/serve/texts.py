"""`Texts`: the endpoint of chats, or that of completions, whole and as streams."""

import asyncio
import sys
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from nanovllm.openai.answers import Answer, dumps
from nanovllm.openai.asks import Ask, read_ask
from nanovllm.openai.bodies import Fields
from nanovllm.outputs import RequestOutput
from nanovllm.requests.news import News
from nanovllm.serve.errors import RefusedError, last_events, log_refusal, mistakes, raise_error
from nanovllm.serve.guard import REQUEST_ID
from nanovllm.serve.served import Place, Served
from nanovllm.utils.checks import shown

T = TypeVar("T")

EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # for nginx
]


class Texts:
    """An ASGI application: one endpoint.

    Args:
        served: engine that is served.
        is_chat: whether it answers chats.
    """

    def __init__(self, served: Served, *, is_chat: bool) -> None:
        self._served, self._is_chat = served, is_chat

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        served, request = self._served, Request(scope, receive)
        request_id = request.state.request_id
        with served.waiting.admit() as place:
            fields = await served.read(request)
            with mistakes():
                answer_id = _take_id(fields) or request_id
                ask = await read_ask(
                    served.llm, fields, is_chat=self._is_chat, interval=served.interval
                )
            num_choices = len(ask.prompts) * ask.params.n
            place.hold(num_choices)
            answer = Answer(ask, served.names[0], answer_id, served.llm.tokenizer)
            try:
                async with aclosing(self._news(ask, fields, place)) as news:
                    if ask.streams:
                        await self._stream(news, answer, request_id, send)
                    else:
                        whole = answer.whole(await _joined(news, len(ask.prompts)))
                        response = Response(dumps(whole), media_type="application/json")
                        await response(scope, receive, send)
            except asyncio.CancelledError:  # the client has gone, or the server ends
                served.metrics.count_aborts(num_choices - place.num_ended)
                raise

    async def _stream(
        self,
        news: AsyncGenerator[tuple[int, RequestOutput], None],
        answer: Answer,
        request_id: str,
        send: Send,
    ) -> None:
        """Send events as they come. A mistake before the first of them has a status."""

        async def write(text: str, *, more: bool = True) -> None:
            if text or not more:
                body = {"type": "http.response.body", "body": text.encode(), "more_body": more}
                await send(body)

        first = await anext(news)
        await send({"type": "http.response.start", "status": 200, "headers": EVENT_HEADERS})
        try:
            await write(answer.events(*first))
            async for number, output in news:
                await write(answer.events(number, output))
            end = answer.end()
        except RefusedError as refused:  # by the mistake in another prompt
            log_refusal(request_id, refused)
            end = last_events(refused.status, str(refused))
        except Exception as error:  # the status is sent: the rest is said here
            told = await self._served.fault(request_id, error)
            end = last_events(told.status, str(told))
        await write(end, more=False)

    def _news(
        self, ask: Ask, fields: Fields, place: Place
    ) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """New outputs of all prompts, each with the number of its prompt."""
        each = [self._news_of(i, ask, fields, place) for i in range(len(ask.prompts))]
        return each[0] if len(each) == 1 else merge(each)

    async def _news_of(
        self, number: int, ask: Ask, fields: Fields, place: Place
    ) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """New outputs of a prompt; all after the first at the end, if the answer is no stream."""
        interval = ask.interval if ask.streams else sys.maxsize
        metrics, started_at = self._served.metrics, time.perf_counter()
        news = self._served.llm.stream(ask.prompts[number], ask.params, interval=interval)
        async with aclosing(news) as outputs:
            with mistakes(fields.names):  # which are found before there is any output
                output = await anext(outputs)
            place.release(ask.params.n)
            if output.error is None:
                metrics.count_first(time.perf_counter() - started_at)
            while True:
                place.num_ended += metrics.count(output, ask.params)
                raise_error(output)
                yield number, output
                if output.finished:
                    return
                output = await anext(outputs)


def _take_id(fields: Fields) -> str | None:
    """The client's own id of an answer; None without one."""
    own_id = fields.take("request_id")
    if own_id is not None and not (isinstance(own_id, str) and REQUEST_ID.fullmatch(own_id)):
        raise ValueError(
            "`request_id` must be 1 to 128 ASCII letters, digits, underscores, dots or dashes, "
            f"got {shown(own_id)}"
        )
    return own_id


async def _joined(
    news: AsyncGenerator[tuple[int, RequestOutput], None], count: int
) -> list[RequestOutput]:
    """The finished outputs of so many prompts."""
    joined = [News() for _ in range(count)]
    async for number, output in news:
        joined[number].add(output)
    return [each.take() for each in joined]


async def merge(generators: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """The items of generators, as they come. A reader who is late has one of each to come."""
    coming = {asyncio.ensure_future(anext(each)): each for each in generators}
    try:
        while coming:
            done, _ = await asyncio.wait(coming, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                generator = coming.pop(task)
                try:
                    item = task.result()
                except StopAsyncIteration:
                    continue
                yield item
                coming[asyncio.ensure_future(anext(generator))] = generator
    finally:
        for task in coming:
            task.cancel()
        await asyncio.gather(*coming, return_exceptions=True)
        for generator in generators:
            await generator.aclose()
