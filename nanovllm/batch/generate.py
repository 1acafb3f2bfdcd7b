"""`Generate`: answers rows of data frames (pandas, Arrow, Spark, Daft); `RayGenerate`: of Ray Data.

The engine runs in a thread of its own and answers the rows of all batches that it has been given:
the end of one batch, when few of its rows are left, runs beside the beginning of the next.
"""

import asyncio
import json
import os
import queue
import threading
import traceback
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import Self, Unpack

from nanovllm.batch.ahead import Ahead
from nanovllm.batch.job import run
from nanovllm.batch.params import wants_outputs
from nanovllm.batch.results import Result
from nanovllm.batch.rows import Row, make_row
from nanovllm.batch.tables import Batch, columns_of, read_column, read_images, with_columns
from nanovllm.config import Options
from nanovllm.requests.chat import ChatRenderer
from nanovllm.requests.json_params import from_json
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.as_json import as_json

if TYPE_CHECKING:
    from nanovllm.llm import LLM

CLOSED = "this engine is closed: build a new Generate"


class Generate:
    """An engine that answers the rows of batches: `generate(batch)` returns it with added columns.

    A batch is a dictionary of numpy arrays, a `pandas.DataFrame`, a `pyarrow.Table` or a
    `pyarrow.RecordBatch`; the result is of the same kind. The columns added, or replaced, are
    `generated_text`, `finish_reason`, `num_prompt_tokens`, `num_generated_tokens` and `error`: the
    reason why a row has no answer; its other columns then have no value. If `sampling_params` ask
    for more than one text (`n`, `logprobs`, `logprob_token_ids`, `return_sampling_mask`,
    `detokenize=False`), `outputs` has all completions as JSON.

    A column `sampling_params`, if there is one, has the parameters of each row: a dictionary or
    JSON text, which takes precedence over the constructor's; null stands for those. Rows that are
    sampled at random and have no `seed` get a random one, or with `id_column` one made of the id:
    so a row that is computed twice has the same answer.

    It may be called from many threads: the engine answers their rows together. Arguments are plain
    values, so that other processes can build it: the engine belongs to the process that does.

    Args:
        model: directory of a checkpoint, or its name on the hub.
        prompt_column: name of the column with prompts, as text or as token ids; default: "prompt".
        messages_column: name of a column with conversations instead, for the chat template: lists
            of dictionaries with `role` and `content`, or JSON text of them.
        image_column: name of a column with the image of each row, or a list of them: paths, bytes
            of files, arrays, or structs of `bytes` and `path` as Hugging Face's datasets have;
            null: none. Prompts have a placeholder for each; with `chat` they need none.
        id_column: name of a column with a string or an integer that identifies a row.
        sampling_params: a `SamplingParams`, or a dictionary of its fields, which take precedence
            over the checkpoint's.
        chat: whether prompts are messages of a user, for the chat template.
        chat_template: template, as in `LLM.chat`.
        chat_template_kwargs: variables of the template, as in `LLM.chat`.
        engine: options of `LLM`.

    Raises:
        TypeError, ValueError: as `LLM`, and naming an argument that is wrong.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        prompt_column: str | None = None,
        messages_column: str | None = None,
        image_column: str | None = None,
        id_column: str | None = None,
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        chat: bool = False,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **engine: Unpack[Options],
    ) -> None:
        if prompt_column is not None and messages_column is not None:
            raise ValueError(
                "`prompt_column` must be left out with `messages_column`, got "
                f"{prompt_column!r} and {messages_column!r}"
            )
        given = {} if sampling_params is None else sampling_params
        if not isinstance(given, SamplingParams):
            if not isinstance(given, Mapping):
                raise TypeError(
                    f"`sampling_params` must be a SamplingParams or a dictionary, got {given!r}"
                )
            given = from_json(given)
            SamplingParams(**given)  # raises for a mistake before a model is loaded
        from nanovllm.llm import LLM

        self._field = "prompt" if messages_column is None else "messages"
        self._column = messages_column or prompt_column or "prompt"
        self._id_column, self._image_column = id_column, image_column
        llm = LLM(model, **engine)
        if not isinstance(given, SamplingParams):
            given = replace(llm.get_default_sampling_params(), **given)
        self._has_outputs = wants_outputs(given)
        # Rows that `map` keeps in the engine.
        self._max_held = 2 * llm.config.max_num_seqs * llm.config.data_parallel_size
        job = {
            "chat": chat,
            "chat_template": chat_template,
            "chat_template_kwargs": chat_template_kwargs,
        }
        if chat or messages_column is not None:
            try:
                _check_template(llm, chat_template, chat_template_kwargs)
            except BaseException:
                llm.exit()
                raise
        self._engine = _Engine()
        threading.Thread(target=self._engine.serve, args=(llm, given, job), daemon=True).start()
        self._close = weakref.finalize(self, self._engine.rows.put, None)

    def __call__(self, batch: Batch) -> Batch:
        """The batch with its answers.

        Raises:
            TypeError, ValueError: if it is not a batch, or lacks a column.
            RuntimeError: if the engine is closed; and whatever ends the engine.
        """
        return self._finish(batch, self._submit(batch))

    def map(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Batches with their answers, in order, as `mapInPandas` and `mapInArrow` of Spark need
        them. The next batches are read while one is answered.

        Raises:
            TypeError, ValueError, RuntimeError: as for a call.
        """
        held: deque[tuple[Batch, list[Future[Result]]]] = deque()
        for batch in batches:
            held.append((batch, self._submit(batch)))
            while sum(_num_rows(each) for each, _ in list(held)[1:]) >= self._max_held:
                yield self._finish(*held.popleft())
        while held:
            yield self._finish(*held.popleft())

    def _submit(self, batch: Any) -> "list[Future[Result]]":
        """Give the engine the rows of a batch."""
        names = columns_of(batch)
        for name in (self._column, self._id_column, self._image_column):
            if name is not None and name not in names:
                raise ValueError(f"a batch must have a column {name!r}, got {', '.join(names)}")
        columns = {self._field: read_column(batch, self._column)}
        if "sampling_params" in names:
            columns["sampling_params"] = read_column(batch, "sampling_params")
        if self._id_column is not None:
            columns["custom_id"] = read_column(batch, self._id_column)
        if self._image_column is not None:
            images = read_images(batch, self._image_column)
            columns["multi_modal_data"] = [None if x is None else {"image": x} for x in images]
        rows = (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))
        return self._engine.add([_read_row(values) for values in rows])

    def _finish(self, batch: Batch, results: "list[Future[Result]]") -> Batch:
        """The batch with its answers, once all results are there."""
        answers = [result.result().answer() for result in results]
        names = ["generated_text", "finish_reason", "num_prompt_tokens", "num_generated_tokens"]
        added = {name: [answer[name] for answer in answers] for name in (*names, "error")}
        if self._has_outputs:
            outputs = (answer.get("outputs") for answer in answers)
            added["outputs"] = [each and as_json(each) for each in outputs]
        return with_columns(batch, added)

    def exit(self) -> None:
        """Finish calls in progress, and free the memory. May be called again."""
        self._close()
        self._engine.ended.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.exit()


class RayGenerate(Generate):
    """`Generate` for `ray.data.Dataset.map_batches`, which calls it for several batches at once.

    If the engine fails (a GPU is lost, say), the process ends with exit code 1 and logs its
    traceback: Ray starts another and computes the rows again. If a call raised, or an actor ended
    in order, the whole job would end. Mistakes of the caller are raised as usual.
    """

    async def __call__(self, batch: Batch) -> AsyncGenerator[Batch, None]:  # type: ignore[override]
        results = self._submit(batch)
        try:
            await asyncio.gather(*map(asyncio.wrap_future, results))
        except Exception:
            traceback.print_exc()
            os._exit(1)
        yield self._finish(batch, results)


@dataclass
class _Engine:
    """The state that the engine's thread shares with callers.

    Attributes:
        rows: rows to be answered; None ends the thread.
        waiting: results to come, by the numbers of their rows.
        error: reason why it accepts no more rows; None: it does.
        ended: event, set once its memory is free.
    """

    rows: "queue.SimpleQueue[Row | None]" = field(default_factory=queue.SimpleQueue)
    waiting: "dict[int, Future[Result]]" = field(default_factory=dict)
    error: BaseException | None = None
    ended: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _num_rows: int = 0

    def add(self, rows: list[Row]) -> "list[Future[Result]]":
        """Queue the rows of a batch. Returns their results to come."""
        results: list[Future[Result]] = [Future() for _ in rows]
        with self._lock:
            for row, result in zip(rows, results, strict=True):
                result.set_running_or_notify_cancel()  # from now on it cannot be cancelled
                if self.error is not None:
                    result.set_exception(self.error)
                    continue
                self.waiting[self._num_rows] = result
                self.rows.put(replace(row, number=self._num_rows))
                self._num_rows += 1
        return results

    def serve(self, llm: "LLM", params: SamplingParams, job: dict[str, Any]) -> None:
        """Answer rows until None comes, or the engine fails."""
        error: BaseException = RuntimeError(CLOSED)
        try:
            with llm:
                for result in run(llm, Ahead(iter(self.rows.get, None)), params, **job):
                    self.waiting.pop(result.row.number).set_result(result)
        except BaseException as failure:
            error = failure
        with self._lock:
            self.error = error
        for waiting in self.waiting.values():
            waiting.set_exception(error)
        self.waiting.clear()
        self.ended.set()


def _read_row(values: dict[str, Any]) -> Row:
    """A row; anything unreadable in it becomes its error."""
    error = None
    for name in ("messages", "sampling_params"):
        if isinstance(text := values.get(name), str):
            try:
                values[name] = json.loads(text)
            except ValueError as failure:
                error = f"`{name}` must be JSON where it is text, got {text!r}: {failure}"
    if values.get("custom_id") is None:
        return Row(0, os.urandom(16), values, error)  # its seed is made of this key
    return make_row(0, b"", values, error)


def _check_template(llm: "LLM", template: str | None, variables: Mapping[str, Any] | None) -> None:
    """Raise if conversations cannot be rendered at all."""
    ChatRenderer(
        llm.tokenizer,
        llm.image_prompts,
        chat_template=template,
        add_generation_prompt=True,
        continue_final_message=False,
        tools=None,
        chat_template_kwargs=variables,
    )


def _num_rows(batch: Any) -> int:
    return len(next(iter(batch.values()), ())) if isinstance(batch, Mapping) else len(batch)
