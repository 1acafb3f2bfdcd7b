"""`run`: rows in, results out, through an engine that always has enough to do.

Only a window of rows is in the engine, twice as many as it runs at once, and fewer while pictures
in them take up the memory that images may have: memory does not grow with the input. Rows are
read, rendered and tokenised between steps, while the device computes: a few at a time, so that it
does not wait for them, and more while the engine has fewer than it can run. Conversations that name
images of hosts are rendered by threads: a few at a time, and none while pictures take up the
memory; other rows pass meanwhile.
"""

import logging
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from xxhash import xxh3_64_intdigest

from nanovllm.batch.ahead import Ahead
from nanovllm.batch.openai_batch import read_request
from nanovllm.batch.params import names_adapter, names_images, parameter_like
from nanovllm.batch.results import Result
from nanovllm.batch.rows import Ask, Row, as_rows, read_ask
from nanovllm.images.picture import NoPillowError
from nanovllm.images.prompts import ImagePrompts, NoImages
from nanovllm.outputs import RequestOutput
from nanovllm.requests.chat import ChatRenderer
from nanovllm.requests.json_params import PARAMETERS
from nanovllm.requests.renderings import THREADS, fetching_threads
from nanovllm.sampling_params import SamplingParams
from nanovllm.threads.daemons import Daemons

logger = logging.getLogger(__name__)

BETWEEN_STEPS = 16  # rows to read; they should take less time than a step
Results: TypeAlias = Generator[Result, None, None]
AT_ONCE = 2 * THREADS  # rows that threads have, or have fetched the pictures of during a step
WAIT = 0.1  # seconds to wait for a row before `stop` is asked again
MAX_HELD = 8  # windows of results that wait for an earlier one
MAX_NAMES = 1000  # names of fields and parameters to remember
# ImportError: the grammar of a row needs a missing package.
MISTAKES = (TypeError, ValueError, ImportError, RecursionError)


class Engine(Protocol):
    """The part of an `LLM` that jobs use."""

    tokenizer: Any
    config: Any
    image_prompts: ImagePrompts | NoImages
    core: Any

    def add_request(self, prompt: Any, sampling_params: SamplingParams, /) -> int: ...
    def step(self) -> list[RequestOutput]: ...
    def is_finished(self) -> bool: ...
    def abort_all(self) -> None: ...
    def get_default_sampling_params(self) -> SamplingParams: ...
    @property
    def is_closed(self) -> bool: ...


def run(
    llm: Engine,
    rows: Iterable[Row | Mapping[str, Any] | str],
    sampling_params: SamplingParams | None = None,
    *,
    chat: bool = False,
    chat_template: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    ordered: bool = False,
    stop: Callable[[], bool] = lambda: False,
) -> Results:
    """Answer rows.

    Rows that are sampled at random and have no `seed` get one, made of the engine's seed and the
    row's key: so an interrupted job draws what it would have drawn. Leaving the loop drops
    unfinished rows.

    Args:
        llm: engine without other requests.
        rows: rows from `read_rows`; or dictionaries with the fields that `nanovllm.batch.rows`
            names, or prompts. In an `Ahead` they may arrive slowly.
        sampling_params: parameters of rows that have none; None: `get_default_sampling_params`.
        chat: whether to answer prompts as messages of a user, by the chat template.
        chat_template: template, as in `LLM.chat`.
        chat_template_kwargs: variables of the template, as in `LLM.chat`.
        ordered: whether results come in the order of the rows, not as they are finished.
        stop: function asked before each step; True ends the job there.

    Yields:
        One result for each row. A refused row has an `error`.

    Raises:
        TypeError, ValueError: for wrong arguments.
        RuntimeError: if the engine is closed, busy with other requests, or fails.
        ImportError: if a row has images and Pillow is missing; it has no result then.
    """
    if not llm.is_finished():
        raise RuntimeError("run() needs an engine without other requests: finish them")
    params = llm.get_default_sampling_params() if sampling_params is None else sampling_params
    if not isinstance(params, SamplingParams):
        raise TypeError(f"`sampling_params` must be a SamplingParams, got {type(params).__name__}")
    source = rows if isinstance(rows, Ahead) else as_rows(rows)
    template = {"chat_template": chat_template, "chat_template_kwargs": chat_template_kwargs or {}}
    job = _Job(llm, source, params, chat, template, ordered, stop)
    if chat:
        job.renderer({})  # raises for a mistake in the template, which every row would have
    return job.results()


class _Job:
    """A call of `run`, which describes the arguments."""

    def __init__(
        self,
        llm: Engine,
        rows: Iterator[Row],
        params: SamplingParams,
        chat: bool,
        template: Mapping[str, Any],
        ordered: bool,
        stop: Callable[[], bool],
    ) -> None:
        self._llm, self._rows, self._params = llm, rows, params
        self._chat, self._template = chat, template
        self._ordered, self._stop = ordered, stop
        self._renderer: ChatRenderer | None = None
        self._model = Path(llm.config.model).name
        self._max_running = llm.config.max_num_seqs * llm.config.data_parallel_size
        self._in_flight: dict[int, tuple[Row, SamplingParams]] = {}
        self._threads: Daemons | None = None  # in a job whose messages may name hosts
        self._to_render: deque[tuple[Callable[[], Any], Row, SamplingParams]] = deque()
        self._rendering: dict[Future[Any], tuple[Row, SamplingParams]] = {}
        self._order: deque[bytes] = deque()  # keys of rows whose result has not been yielded
        self._ramp = BETWEEN_STEPS  # so that the first steps do not wait for all rows that can run
        self._is_end = False
        self._names = set(PARAMETERS)  # names of fields that need no further look
        self._sees = isinstance(llm.image_prompts, ImagePrompts)

    def results(self) -> Results:
        """The results, in the order that the caller asked for."""
        if not self._ordered:
            yield from self._finished()
            return
        held: dict[bytes, Result] = {}
        for result in self._finished():
            held[result.row.key] = result
            while self._order and self._order[0] in held:
                yield held.pop(self._order.popleft())

    def _finished(self) -> Results:
        """The results as they are finished."""
        with ExitStack() as stack:
            if self._llm.image_prompts.fetches:
                self._threads = stack.enter_context(fetching_threads())
            stack.callback(self._abort)
            while not self._stop():
                yield from self._queue_rendered()
                yield from self._feed()
                self._render_more()
                if self._in_flight:
                    for output in self._llm.step():
                        row, params = self._in_flight.pop(output.request_id)
                        answer = output if output.error is None else None
                        yield Result(row, answer, output.error, params, self._model)
                elif self._rendering:
                    wait(self._rendering, WAIT, FIRST_COMPLETED)
                elif self._is_end:
                    return

    def _abort(self) -> None:
        if not self._llm.is_closed:
            self._llm.abort_all()

    def _feed(self) -> Results:
        """Read rows and queue them. Yields the results of refused rows."""
        self._ramp = min(2 * self._ramp, self._max_running)
        missing = self._max_running - self._count
        for _ in range(max(BETWEEN_STEPS, min(missing, self._ramp))):
            if not self._has_room():
                return
            row = next(self._rows, None)
            if row is None:
                self._is_end = True
                return
            if self._ordered:
                self._order.append(row.key)
            if (refused := self._add(row)) is not None:
                yield refused

    @property
    def _count(self) -> int:
        """Number of rows that have been read and have no result."""
        return len(self._in_flight) + len(self._rendering) + len(self._to_render)

    def _has_room(self) -> bool:
        """Whether there is room for another row, and perhaps a row."""
        count, window = self._count, 2 * self._max_running
        if self._is_end or count >= window:
            return False
        if count and (len(self._order) >= MAX_HELD * window or not self._llm.core.has_room):
            return False
        rows = self._rows
        return not isinstance(rows, Ahead) or rows.wait(0 if count else WAIT)

    def _add(self, row: Row) -> Result | None:
        """Queue a row, for the engine or for the threads. Returns its result if it is refused."""
        if row.error is not None:
            return Result(row, error=row.error)
        try:
            ask = self._ask(row)
            if ask.messages is None:
                self._queue(ask.prompt, row, ask.params)
                return None
            renderer = self.renderer(ask.chat)
            if renderer.may_fetch(ask.messages):
                self._to_render.append((partial(_render, renderer, ask), row, ask.params))
            else:
                self._queue(_render(renderer, ask), row, ask.params)
        except NoPillowError:
            raise  # every row with images would fail, and count as finished
        except MISTAKES as error:
            return Result(row, error=str(error))
        return None

    def _render_more(self) -> None:
        """Give rows to the threads: a few, since the bytes that they fetch count once queued."""
        while self._threads is not None and self._to_render and len(self._rendering) < AT_ONCE:
            if (self._in_flight or self._rendering) and not self._llm.core.has_room:
                return
            render, row, params = self._to_render.popleft()
            self._rendering[self._threads.submit(render)] = row, params

    def _queue_rendered(self) -> Results:
        """Queue the rows that threads have rendered. Yields the results of refused ones."""
        for prompt in [each for each in self._rendering if each.done()]:
            row, params = self._rendering.pop(prompt)
            try:
                self._queue(prompt.result(), row, params)
            except NoPillowError:
                raise
            except MISTAKES as error:
                yield Result(row, error=str(error))

    def _queue(self, prompt: Any, row: Row, params: SamplingParams) -> None:
        request_id = self._llm.add_request(prompt, params)
        self._in_flight[request_id] = row, params

    def _ask(self, row: Row) -> Ask:
        """The request of a row."""
        seed = xxh3_64_intdigest(row.key, self._llm.config.seed) >> 1
        if row.is_openai:
            return read_request(row.fields, self._params, seed)
        self._look_at_names(row.fields)
        return read_ask(row.fields, self._params, seed, self._chat)

    def _look_at_names(self, fields: Mapping[str, Any]) -> None:
        """Warn, once for each, of the caller's own fields whose names promise an effect."""
        for name, value in fields.items():
            if value is None or name in self._names or len(self._names) >= MAX_NAMES:
                continue
            self._names.add(name)
            remedy = None
            if (parameter := parameter_like(name)) is not None:
                remedy = f"did you mean the sampling parameter `{parameter}`?"
            elif self._sees and names_images(name) and "multi_modal_data" not in fields:
                remedy = 'did you mean "multi_modal_data": {"image": ...}?'
            elif names_adapter(name):
                remedy = "a job has one adapter for all rows: --adapter, or LLM(model, adapter=...)"
            if remedy is not None:
                logger.warning(
                    "rows have a field `%s`, which has no effect and is copied to the results; %s",
                    name,
                    remedy,
                )

    def renderer(self, own: Mapping[str, Any]) -> ChatRenderer:
        """The renderer for conversations whose rows have these arguments of their own."""
        if self._renderer is not None and not own:
            return self._renderer
        variables = own.get("chat_template_kwargs") or {}
        if isinstance(variables, Mapping):
            variables = {**self._template["chat_template_kwargs"], **variables}
        renderer = ChatRenderer(
            self._llm.tokenizer,
            self._llm.image_prompts,
            chat_template=self._template["chat_template"],
            add_generation_prompt=own.get("add_generation_prompt", True),
            continue_final_message=own.get("continue_final_message", False),
            tools=own.get("tools"),
            chat_template_kwargs=variables,
        )
        if not own:
            self._renderer = renderer
        return renderer


def _render(renderer: ChatRenderer, ask: Ask) -> Any:
    """The prompt of a row with messages."""
    prompt = renderer.render(ask.messages, "messages", ask.images)
    return prompt if ask.limits is None else {**prompt, "mm_processor_kwargs": ask.limits}
