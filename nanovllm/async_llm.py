"""`AsyncLLM`: an `LLM` for asyncio, in notebooks and small services."""

import asyncio
import queue
import threading
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import ExitStack, aclosing, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch
from typing_extensions import Self, Unpack

from nanovllm.adapters.given import AnyAdapter
from nanovllm.config import FOREIGN_ARGUMENTS, Options, takes_options
from nanovllm.llm import (
    LLM,
    ONE_TOKEN,
    SCORED,
    check_embedding,
    classification_of,
    embedding_of,
    label_tokens,
    score_of,
)
from nanovllm.outputs import (
    ClassificationOutput,
    EmbeddingRequestOutput,
    RequestOutput,
    ScoreOutput,
)
from nanovllm.requests.chat import ChatRenderer, Conversation, Tool
from nanovllm.requests.inputs import max_characters
from nanovllm.requests.news import AllNews, News
from nanovllm.requests.renderings import fetching_threads
from nanovllm.sampling.structured_output import Grammar
from nanovllm.sampling_params import SamplingParams
from nanovllm.threads.daemons import Daemons
from nanovllm.threads.fair_lock import FairLock
from nanovllm.threads.turn import Turn
from nanovllm.tracing.recorder import DEFAULT_PATH
from nanovllm.updates.hold import Version
from nanovllm.updates.interface import (
    FOREIGN_FINISH,
    FOREIGN_SLEEP,
    FOREIGN_START,
    FOREIGN_UPDATE,
    NamesOfVllm,
)
from nanovllm.updates.updating import Tensors
from nanovllm.utils.checks import check_int
from nanovllm.utils.options import Absent, takes_foreign

Told: TypeAlias = "RequestOutput | BaseException"
Tell: TypeAlias = "Callable[[Told], _Mailbox | None]"
T = TypeVar("T")

WAKE_AT_ONCE = 16  # coroutines
COMPILING_FORMS = 2  # at once
TURN_SECONDS = 0.01  # that a loop waits for its turn


class AsyncLLM(NamesOfVllm):
    """An engine that completes the prompts of many coroutines at once: they share its steps.

    The engine runs in a thread of its own, which alone touches it. Use it as an asynchronous
    context manager, or call `exit()`, to free the memory at a known time. A forked process cannot
    use it: its methods raise RuntimeError there.

    Args:
        model: directory of a Hugging Face checkpoint, or its name on the hub.
        options: options of the engine, see `nanovllm.config.Config`.

    Attributes:
        tokenizer: the tokenizer, see `LLM.get_tokenizer`.
        max_model_len: the most tokens of prompt and output together.
        max_chars: maximum number of characters of so many tokens; None without a tokenizer.

    Raises:
        TypeError, ValueError: as `LLM`.
    """

    @takes_options
    def __init__(self, model: str | Path, **options: Unpack[Options]) -> None:
        llm = LLM(model, **options)
        llm._begins_again = True
        self._show = llm.__repr__  # of what is merged now, say
        self._check_alive = llm._check_alive
        self.tokenizer, self.max_model_len = llm.get_tokenizer(), llm.max_model_len
        self.max_chars: int | None = None
        if self.tokenizer is not None:
            self.max_chars = max_characters(self.tokenizer, self.max_model_len)
        self._image_prompts, self._intake = llm.image_prompts, llm._intake
        # Seconds of some, for which the work of the loops' own threads must not wait.
        self._fetching = fetching_threads()
        self._compiling = Daemons("nanovllm-forms", COMPILING_FORMS)
        self._default_params = llm.get_default_sampling_params()
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._lock = FairLock()  # no command may be queued after the end
        self._thread = threading.Thread(target=_serve, args=(llm, self._commands), daemon=True)
        self._thread.start()
        self._close = weakref.finalize(self, self._commands.put, None)

    def __repr__(self) -> str:
        if "_close" not in vars(self):  # half built
            return "AsyncLLM()"
        return f"AsyncLLM({self._show()})"

    @takes_foreign(FOREIGN_ARGUMENTS)
    def generate(
        self, prompt: Any, sampling_params: SamplingParams | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete a prompt, and yield all its output so far after each step, as vLLM's does.

        The last output is the one that `LLM.generate` returns. Earlier ones make their long
        attributes when these are read; they are the caller's to keep, and do not change. Leaving
        the loop, or cancelling its task, aborts the request.

        Args:
            prompt: text, token ids or a dictionary.
            sampling_params: sampling parameters; None: `get_default_sampling_params`.

        Raises:
            TypeError, ValueError: naming the argument that is wrong.
            RuntimeError: if the engine is closed, or a step fails, which ends all requests.
        """
        return self._listen(prompt, sampling_params, AllNews())

    @takes_foreign(FOREIGN_ARGUMENTS)
    def stream(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        *,
        interval: int | None = 1,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete a prompt, and yield only new output after each step, as `LLM.stream` does.

        To a caller who comes back late, one output has the news of all steps since then.

        Args:
            prompt: as for `generate`.
            sampling_params: as for `generate`.
            interval: number of new tokens that wake the caller, after the first news and before
                the last; None: one output has all, at the end. Fewer outputs cost less.
        """
        if interval is not None:
            check_int("interval", interval, 1)
        return self._listen(prompt, sampling_params, News(), interval)

    async def _listen(
        self,
        prompt: Any,
        params: SamplingParams | None,
        news: News,
        interval: int | None = 1,
        pooling: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete a prompt, and yield its news."""
        mailbox = _Mailbox(asyncio.get_running_loop(), news, interval)
        commands, tell = self._commands, mailbox.tell
        grammars = None
        if self._intake.has_form(params):  # not in the engine's thread, where all would wait
            compile_form = partial(self._intake.compile_form, params)
            grammars = await asyncio.wrap_future(self._compiling.submit(compile_form))
        self._ask(lambda jobs: jobs.add(prompt, params, tell, pooling, grammars))
        try:
            while True:
                output = await mailbox.take()
                yield output
                if output.finished:
                    return
        finally:
            commands.put(partial(_Jobs.drop, tell=tell))

    async def _last(
        self, prompt: Any, params: SamplingParams, pooling: str | None = None
    ) -> RequestOutput:
        """The finished output of a prompt."""
        async with aclosing(self._listen(prompt, params, News(), None, pooling)) as outputs:
            return await anext(outputs)

    @takes_foreign(FOREIGN_ARGUMENTS)
    async def render(
        self,
        messages: Conversation,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Tool] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """A conversation as a prompt for `generate` and `stream`. It is made in another thread.

        Args:
            messages: one conversation. All arguments are those of `LLM.chat`.
            chat_template: a Jinja template; None for the checkpoint's own.
            add_generation_prompt: end the prompt with the beginning of an answer.
            continue_final_message: leave the last message open.
            tools: functions that the model may call.
            chat_template_kwargs: variables of the template.

        Raises:
            TypeError, ValueError: naming the argument that is wrong.
        """
        renderer = ChatRenderer(
            self.tokenizer,
            self._image_prompts,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
            max_chars=self.max_chars,
        )
        if not renderer.may_fetch(messages):
            return await asyncio.to_thread(renderer.render, messages, "messages")
        render = partial(renderer.render, messages, "messages")
        return await asyncio.wrap_future(self._fetching.submit(render))

    async def tokenize(self, prompt: Any) -> list[int]:
        """The tokens of a prompt as the model reads it, with those of its images. It is read in
        another thread.

        Args:
            prompt: a prompt for `generate`, or what `render` returns.

        Raises:
            TypeError, ValueError: naming the mistake, which may be its length.
        """
        return (await asyncio.to_thread(self._intake.read_prompt, prompt)).token_ids

    @takes_foreign(FOREIGN_ARGUMENTS)
    async def chat(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Tool] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer a conversation, and yield all of the answer so far, as `generate` does. For new
        output only, `stream` takes what `render` returns. Arguments are those of `LLM.chat`.
        """
        prompt = await self.render(
            messages,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
        )
        async with aclosing(self.generate(prompt, sampling_params)) as outputs:
            async for output in outputs:
                yield output

    async def score(self, prompt: Any) -> ScoreOutput:
        """The log-probabilities of a text, see `LLM.score`."""
        return score_of(await self._last(prompt, SCORED))

    async def classify(self, prompt: Any, labels: Sequence[str | int]) -> ClassificationOutput:
        """The probabilities of labels as the next token, see `LLM.classify`."""
        tokens = label_tokens(self.tokenizer, labels)
        params = replace(ONE_TOKEN, logprob_token_ids=tokens)
        return classification_of(await self._last(prompt, params), tokens)

    async def embed(
        self, prompt: Any, pooling: str = "last", *, normalize: bool = True
    ) -> EmbeddingRequestOutput:
        """A text as a vector, see `LLM.embed`."""
        check_embedding(pooling, normalize)
        return embedding_of(await self._last(prompt, ONE_TOKEN, pooling), normalize)

    async def get_tokenizer(self) -> Any:
        """The tokenizer, see `LLM.get_tokenizer`."""
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The default parameters, see `LLM.get_default_sampling_params`."""
        return self._default_params

    async def metrics(self) -> dict[str, Any]:
        """The metrics, see `LLM.metrics`."""
        return await self._call(LLM.metrics)

    async def check_health(self) -> None:
        """Raise RuntimeError if the engine cannot compute any more, as vLLM's does. A long step is
        not waited for, and a worker's death is known before a request meets it.
        """
        self._check_open()
        self._check_alive()

    # -- weights that change --------------------------------------------------------------------

    @takes_foreign(FOREIGN_UPDATE)
    async def update_weights(self, tensors: Tensors, *, version: Version | None = None) -> None:
        """Replace all weights, see `LLM.update_weights`. Requests that run meanwhile lose their
        place in the KV cache, and go on by the new weights, which compute all their tokens so far
        again.
        """
        _wait_for_writers()
        await self._call(lambda llm: llm.update_weights(tensors, version=version))

    @takes_foreign(FOREIGN_UPDATE)
    async def update_weights_ipc(
        self, message: Mapping[str, Any], *, version: Version | None = None
    ) -> None:
        """The same by another process's tensors, see `LLM.update_weights_ipc`."""
        await self._call(lambda llm: llm.update_weights_ipc(message, version=version))

    @takes_foreign(FOREIGN_START)
    async def start_weight_update(self) -> None:
        """Begin an update of several calls, see `LLM.start_weight_update`. Until it ends nothing is
        computed, and new requests are refused.
        """
        await self._call(LLM.start_weight_update)

    @takes_foreign(FOREIGN_FINISH)
    async def finish_weight_update(self, weight_version: Version | None = None) -> None:
        """End an update of several calls, see `LLM.finish_weight_update`."""
        await self._call(lambda llm: llm.finish_weight_update(weight_version))

    async def load_adapter(self, adapter: AnyAdapter | Sequence[AnyAdapter]) -> None:
        """Merge a LoRA adapter into the checkpoint's weights, see `LLM.load_adapter`. Requests that
        run go on by the new weights.
        """
        _wait_for_writers()
        await self._call(lambda llm: llm.load_adapter(adapter))

    async def unload_adapter(self) -> None:
        """Go back to the checkpoint's own weights, see `LLM.unload_adapter`."""
        await self._call(LLM.unload_adapter)

    async def get_weight_version(self) -> Version:
        """The version of the weights, see `LLM.weight_version`."""
        return await self._call(LLM.get_weight_version)

    @takes_foreign(FOREIGN_SLEEP)
    async def sleep(self, level: int = 1) -> None:
        """Give the GPU's memory back, see `LLM.sleep`. Requests that run wait, and are computed
        again.
        """
        await self._call(lambda llm: llm.sleep(level))

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take it again, see `LLM.wake_up`."""
        await self._call(lambda llm: llm.wake_up(tags))

    async def is_sleeping(self) -> bool:
        """Whether weights or KV cache have no memory."""
        return await self._call(LLM.is_sleeping)

    weight_version = Absent("await get_weight_version()")
    reset_prefix_cache = Absent("updates of the weights forget cached prefixes by themselves")

    @asynccontextmanager
    async def trace(self, path: str | Path = DEFAULT_PATH) -> AsyncGenerator[None, None]:
        """Record a timeline, see `LLM.trace`: `async with llm.trace(path)`."""
        recording = ExitStack()
        try:
            await self._call(lambda llm: recording.enter_context(llm.trace(path)))
            yield
        finally:
            if not self.is_closed:  # its closing has ended the recording
                await self._call(lambda llm: recording.close())

    async def _call(self, method: Callable[[LLM], T]) -> T:
        """Call a method in the engine's thread."""
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
            except BaseException as error:  # of a caller's iterable, which runs in this thread
                found = _as_told(error)
                if jobs.llm.is_closed:  # a worker has died, say
                    jobs.fail(error)
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
        """Whether `exit` was called. An engine closed by an error raises when it is used."""
        return not self._close.alive

    def _check_open(self) -> None:
        if self.is_closed:
            raise RuntimeError("this engine is closed: build a new AsyncLLM")

    def exit(self) -> None:
        """End all requests and free the memory. May be called again."""
        if self._lock.is_forked:  # engine and thread are the parent's
            return
        with self._lock:
            self._close()
        self._thread.join()

    def shutdown(self) -> None:
        """Call `exit`, by vLLM's name."""
        self.exit()

    async def __aenter__(self) -> Self:
        with self._lock:
            self._check_open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.exit)


def _wait_for_writers() -> None:
    """Wait for this thread's work on the GPU: the engine's thread does not know of it."""
    if torch.cuda.is_initialized():
        torch.cuda.current_stream().synchronize()


def _as_told(error: BaseException) -> Exception:
    """The error that a coroutine gets for one in the engine's thread: another one where this would
    end its loop (SystemExit), or cannot come out of a future (StopIteration).
    """
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    told = RuntimeError(f"the engine's thread met {type(error).__name__}: {error}")
    told.__cause__ = error
    return told


class _Mailbox:
    """The place where a coroutine waits for the news of its request.

    Args:
        loop: event loop of the coroutine.
        news: collector of the request's news.
        interval: see `AsyncLLM.stream`.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, news: News, interval: int | None = 1
    ) -> None:
        self.loop, self._news, self._interval = loop, news, interval
        self._num_new = interval or 0  # tokens since it was due; the first news is, at once
        self._is_due = self._is_told = False
        self._error: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None

    def tell(self, told: Told) -> "_Mailbox | None":
        """Add news, in the engine's thread. Returns itself if the loop must `wake` the coroutine
        for it, and does not yet.
        """
        if isinstance(told, BaseException):
            self._error = told
        else:
            self._news.add(told)
            self._num_new += sum(len(part.token_ids) for part in told.outputs)
            is_enough = self._interval is not None and self._num_new >= self._interval
            if not (is_enough or told.finished):
                return None
            self._num_new, self._is_due = 0, True  # after the news: it is there when it is due
        if self._is_told:
            return None
        self._is_told = True
        return self

    def wake(self) -> None:
        """Wake the coroutine, in its loop."""
        self._is_told = False  # before it looks: later news is told again
        if self._waiter is not None and not self._waiter.done():  # it waits, and is not cancelled
            self._waiter.set_result(None)

    async def take(self) -> RequestOutput:
        """All the news so far; waits until there is some."""
        while True:
            error = self._error  # read first: it comes after all the news
            ends = error is not None and self._interval is not None
            if self._news.has_some and (self._is_due or ends):
                self._is_due = False  # before it is taken: later news may be due again
                return self._news.take()
            if error is not None:
                raise error
            self._waiter = self.loop.create_future()
            await self._waiter


class _Waker:
    """Wakes the coroutines of a loop that have news.

    A few at a time: others get a turn in between, and the objects of those woken are gone before
    the next ones' (see `nanovllm.requests.news`). While it is the engine's turn, it waits; then
    the engine's steps do not, and a coroutine takes the news of several of them if the loop is
    late.

    Args:
        turn: turn of the engine.

    Attributes:
        told: mailboxes of coroutines that are to be woken. The engine's thread appends to it.
    """

    def __init__(self, turn: Turn) -> None:
        self.told: deque[_Mailbox] = deque()
        self._turn, self._is_called = turn, False

    def call(self, loop: asyncio.AbstractEventLoop) -> None:
        """Have the loop wake them, unless it does already.

        Raises:
            RuntimeError: if the loop has been closed.
        """
        if loop.is_closed():  # with calls that will not come, perhaps
            raise RuntimeError("the loop is closed")
        if self.told and not self._is_called:
            self._is_called = True
            loop.call_soon_threadsafe(self._wake, loop)

    def _wake(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            self._turn.wait(TURN_SECONDS)
            for _ in range(min(len(self.told), WAKE_AT_ONCE)):
                self.told[0].wake()
                self.told.popleft()  # after that: Ctrl-C leaves it to the next call
        finally:  # also after Ctrl-C: a notebook's loop goes on
            if self.told:
                loop.call_soon(self._wake, loop)
            else:
                self._is_called = False
                self.call(loop)  # those that the engine's thread appended before it could see that


class _Jobs:
    """The requests of an engine, by the function that tells their listener. Used by one thread.

    Coroutines are woken by one call of their loop for each step, at most. If the device is not the
    host, the call waits until the device computes the next step, if one follows: Python runs one
    thread at a time, and the engine's has nothing to do then. None follows where the engine is
    held, which has booked the steps in flight.
    """

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self._ids: dict[Tell, int] = {}
        self._wakers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Waker]
        self._wakers = weakref.WeakKeyDictionary()
        self._has_device = llm._describe()["device"] != "cpu"  # else a launch is the step itself
        if self._has_device:
            llm.core.meanwhile = self._wake

    def add(
        self,
        prompt: Any,
        params: SamplingParams | None,
        tell: Tell,
        pooling: str | None = None,
        grammars: list[Grammar | None] | None = None,
    ) -> None:
        try:
            listener = partial(self._tell, tell)
            self._ids[tell] = self.llm._enter(prompt, params, pooling, listener, grammars)
        except BaseException as error:  # a panic of a tokenizer in Rust is no Exception
            self._tell(tell, _as_told(error))
            self._wake()

    def drop(self, tell: Tell) -> None:
        if tell in self._ids:
            self.llm.abort(self._ids.pop(tell))

    def step(self) -> None:
        self.llm.step()

    def run(self, command: "Callable[[_Jobs], None]") -> None:
        """Run a command, and wake those whom it has told something, unless the next step will."""
        try:
            command(self)
        except BaseException as error:  # it may have dropped any request; the thread goes on
            self.fail(error)
        core = self.llm.core
        if core.is_held or not (self._has_device and core.requests):
            self._wake()

    def fail(self, error: BaseException) -> None:
        """End all requests with an error: RuntimeError, because the type of any other might tell a
        caller that the mistake is his.
        """
        with suppress(BaseException):  # the error may have closed the engine
            self.llm.abort_all()
        told = error
        if not isinstance(error, RuntimeError) or isinstance(error, RecursionError):
            told = RuntimeError(f"the engine has failed ({type(error).__name__}: {error})")
            told.__cause__ = error
        for tell in self._ids:
            self._tell(tell, told)
        self._ids.clear()
        self._wake()

    def _tell(self, tell: Tell, told: Told) -> None:
        mailbox = tell(told)
        if mailbox is not None:
            waker = self._wakers.get(mailbox.loop)
            if waker is None:
                waker = self._wakers[mailbox.loop] = _Waker(self.llm.core.turn)
            waker.told.append(mailbox)

    def _wake(self) -> None:
        """Have each loop wake the coroutines that have news."""
        for loop, waker in list(self._wakers.items()):
            try:
                waker.call(loop)
            except RuntimeError:  # the loop has been closed: nobody listens
                del self._wakers[loop]
                tells = [mailbox.tell for mailbox in waker.told]
                left = {self._ids.pop(tell) for tell in tells if tell in self._ids}
                self.llm.core.abort_later(left)  # not now: this may be in a step


Command: TypeAlias = "Callable[[_Jobs], None] | None"


def _serve(llm: LLM, commands: "queue.SimpleQueue[Command]") -> None:
    """Run commands, and steps in between, until the command None."""
    jobs = _Jobs(llm)
    with llm:
        while True:
            try:
                waits = llm.is_closed or llm.core.is_held or llm.is_finished()
                command = commands.get(block=waits)
            except queue.Empty:
                command = _Jobs.step
            if command is None:
                break
            jobs.run(command)
            del command  # it would keep a request until the next one
        jobs.fail(RuntimeError("this engine is closed: build a new AsyncLLM"))
