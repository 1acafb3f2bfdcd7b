"""`AsyncLLM`: an `LLM` for asyncio, in notebooks and small services."""

import asyncio
import queue
import threading
import weakref
from collections.abc import AsyncGenerator, Callable
from contextlib import ExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

from typing_extensions import Self, Unpack

from nanovllm.config import FOREIGN_ARGUMENTS, Options, takes_options
from nanovllm.engine.recorder import DEFAULT_PATH
from nanovllm.llm import LLM
from nanovllm.news import Whole, joined
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.checks import takes_foreign
from nanovllm.utils.fair_lock import FairLock

News: TypeAlias = "RequestOutput | BaseException"
Tell: TypeAlias = Callable[[News], None]
T = TypeVar("T")


class AsyncLLM:
    """Completes the prompts of many coroutines at once: they share the engine's steps.

    The engine runs in a thread of its own, which alone touches it. Use it as an asynchronous
    context manager, or call `exit()`, to give the memory back at a known time. A forked process
    cannot use it: its methods raise RuntimeError there.

    Args:
        model: directory of a Hugging Face checkpoint.
        options: see `nanovllm.config.Config`.

    Raises:
        TypeError, ValueError: as `LLM`.
    """

    @takes_options
    def __init__(self, model: str | Path, **options: Unpack[Options]) -> None:
        llm = LLM(model, **options)
        self._shown = repr(llm)
        self._tokenizer = llm.get_tokenizer()
        self._default_params = llm.get_default_sampling_params()
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._lock = FairLock()  # nothing may be asked behind the end
        self._thread = threading.Thread(target=_serve, args=(llm, self._commands), daemon=True)
        self._thread.start()
        self._close = weakref.finalize(self, self._commands.put, None)

    def __repr__(self) -> str:
        if "_close" not in vars(self):  # half built
            return "AsyncLLM()"
        return f"AsyncLLM({self._shown}{', closed' if self.is_closed else ''})"

    @takes_foreign(FOREIGN_ARGUMENTS)
    def generate(
        self, prompt: Any, sampling_params: SamplingParams | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete a prompt, and give all that there is after each step, as vLLM's does.

        The last output is the one that `LLM.generate` returns. Leaving the loop, or cancelling its
        task, aborts the request.

        Args:
            prompt: text, token ids or a dictionary.
            sampling_params: None for those of `get_default_sampling_params`.

        Raises:
            TypeError, ValueError: naming the argument that is wrong.
            RuntimeError: if the engine is closed; and whatever ends a step ends all requests.
        """
        return self._listen(prompt, sampling_params, Whole().add)

    @takes_foreign(FOREIGN_ARGUMENTS)
    def stream(
        self, prompt: Any, sampling_params: SamplingParams | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """The same, but each output has only what is new, as those of `LLM.stream`.

        To a caller who comes back late, one output has the news of all steps since then.
        """
        return self._listen(prompt, sampling_params, joined)

    async def _listen(
        self,
        prompt: Any,
        params: SamplingParams | None,
        join: Callable[[list[RequestOutput]], RequestOutput],
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete a prompt, and give what `join` makes of the news that are there."""
        mailbox = _Mailbox()
        tell = mailbox.put
        self._ask(partial(_Jobs.add, prompt=prompt, params=params, tell=tell, loop=mailbox.loop))
        commands = self._commands
        try:
            while True:
                output = join(await mailbox.take())
                yield output
                if output.finished:
                    return
        finally:
            commands.put(partial(_Jobs.drop, tell=tell))

    async def get_tokenizer(self) -> Any:
        """See `LLM.get_tokenizer`."""
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """See `LLM.get_default_sampling_params`."""
        return self._default_params

    async def metrics(self) -> dict[str, Any]:
        """See `LLM.metrics`."""
        return await self._call(LLM.metrics)

    @asynccontextmanager
    async def trace(self, path: str | Path = DEFAULT_PATH) -> AsyncGenerator[None, None]:
        """See `LLM.trace`: `async with llm.trace(path)`."""
        recording = ExitStack()
        try:
            await self._call(lambda llm: recording.enter_context(llm.trace(path)))
            yield
        finally:
            if not self.is_closed:  # that has ended it
                await self._call(lambda llm: recording.close())

    async def _call(self, method: Callable[[LLM], T]) -> T:
        """Have the engine's thread call it."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def give(found: T | Exception) -> None:
            if answer.done():  # cancelled
                return
            if isinstance(found, Exception):
                answer.set_exception(found)
            else:
                answer.set_result(found)

        def ask(jobs: "_Jobs") -> None:
            found: T | Exception
            try:
                found = method(jobs.llm)
            except Exception as error:
                found = error
            with suppress(RuntimeError):  # the loop has been closed: nobody listens
                loop.call_soon_threadsafe(give, found)

        self._ask(ask)
        return await answer

    def _ask(self, command: "Command") -> None:
        with self._lock:
            self._check_open()
            self._commands.put(command)

    @property
    def is_closed(self) -> bool:
        """Whether `exit` was called. An engine that an error has closed says so when it is used."""
        return not self._close.alive

    def _check_open(self) -> None:
        if self.is_closed:
            raise RuntimeError("this engine is closed: build a new AsyncLLM")

    def exit(self) -> None:
        """End all requests and give the memory back. May be called again."""
        if self._lock.is_forked:  # all that is the parent's
            return
        with self._lock:
            self._close()
        self._thread.join()

    def shutdown(self) -> None:
        """`exit`, as vLLM calls it."""
        self.exit()

    async def __aenter__(self) -> Self:
        with self._lock:
            self._check_open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.exit)


class _Mailbox:
    """News for one coroutine. Used by its loop's thread."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._news: list[RequestOutput] = []
        self._error: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: News) -> None:
        """Leave news, or the error that ends the request."""
        if isinstance(item, BaseException):
            self._error = item
        else:
            self._news.append(item)
        if self._waiter is not None and not self._waiter.done():  # else it was cancelled
            self._waiter.set_result(None)

    async def take(self) -> list[RequestOutput]:
        """All that is there; waits until there is something."""
        if not self._news and self._error is None:
            self._waiter = self.loop.create_future()
            await self._waiter
        if not self._news:
            assert self._error is not None, "woken for nothing"
            raise self._error
        news, self._news = self._news, []
        return news


def _put_all(post: list[tuple[Tell, News]]) -> None:
    """Called by a loop."""
    for tell, item in post:
        tell(item)


class _Job(NamedTuple):
    """A request of an engine: its number there, and who is told about it, in the engine's thread."""

    request_id: int
    listener: Tell


class _Jobs:
    """The requests of an engine, by whom to tell about them. Used by one thread."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self._jobs: dict[Tell, _Job] = {}
        self._posts: dict[asyncio.AbstractEventLoop, list[tuple[Tell, News]]] = {}
        llm.core.meanwhile = self.send

    def add(
        self,
        prompt: Any,
        params: SamplingParams | None,
        tell: Tell,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        """Queue a request. `tell` is called by the loop, or here if there is none."""
        listener = tell if loop is None else partial(self._post, loop, tell)
        try:
            self._jobs[tell] = _Job(self.llm.add_request(prompt, params, listener=listener), listener)
        except Exception as error:
            listener(error)

    def drop(self, tell: Tell) -> None:
        if tell in self._jobs:
            self.llm.abort(self._jobs.pop(tell).request_id)

    def step(self) -> None:
        self.llm.step()
        if self.llm.core.requests:  # the next step sends them, once the device is busy
            return
        self.send()

    def fail(self, error: BaseException) -> None:
        """End all requests."""
        with suppress(Exception):  # the error may have closed the engine
            self.llm.abort_all()
        for job in self._jobs.values():
            job.listener(error)
        self._jobs.clear()

    def _post(self, loop: asyncio.AbstractEventLoop, tell: Tell, item: News) -> None:
        self._posts.setdefault(loop, []).append((tell, item))

    def send(self) -> None:
        """Have each loop tell what has been posted, all in one call."""
        for loop in list(self._posts):
            post = self._posts.pop(loop)
            try:
                loop.call_soon_threadsafe(_put_all, post)
            except RuntimeError:  # the loop has been closed: nobody listens
                for tell, _ in post:
                    self.drop(tell)


Command: TypeAlias = "Callable[[_Jobs], None] | None"


def _serve(llm: LLM, commands: "queue.SimpleQueue[Command]") -> None:
    """Do what is asked, a step after the other, until the command None."""
    jobs = _Jobs(llm)
    with llm:
        while True:
            try:
                command = commands.get(block=llm.is_closed or llm.is_finished())
            except queue.Empty:
                command = _Jobs.step
            if command is None:
                break
            try:
                command(jobs)
            except Exception as error:  # which may have dropped any request
                jobs.fail(error)
            if command is not _Jobs.step:
                jobs.send()
            del command  # it would keep a request until the next one
        jobs.fail(RuntimeError("this engine is closed: build a new AsyncLLM"))
        jobs.send()
