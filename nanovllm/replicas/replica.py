"""A replica: a process that runs a whole engine for some of another engine's requests. `Replicas`
starts it with `main`.
"""

import logging
import pickle
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Any

from nanovllm.adapters.adapter import Given
from nanovllm.config import Config
from nanovllm.engine.engine_core import EngineCore
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.outputs import RequestOutput
from nanovllm.ranks.processes import live, receive_object, send_object
from nanovllm.replicas.messages import (
    Answer,
    Description,
    Facts,
    Failure,
    News,
    Recorded,
    Setup,
)
from nanovllm.replicas.remote_request import Order
from nanovllm.updates.parcel import Parcel

NEWS_SECONDS = 0.2  # between two messages with counters alone


class Replica(LLMEngine):
    """An engine whose requests come from another process. Used by one thread.

    Args:
        config: options of the engine.
        tell: function that sends a message to that process.
    """

    core: EngineCore

    def __init__(self, config: Config, tell: Callable[[Any], None]) -> None:
        options = asdict(config)
        super().__init__(options.pop("model"), **options)
        self._tell = tell
        self._news: list[RequestOutput] = []
        self._told_prompts: set[int] = set()  # requests whose prompt_logprobs have been sent
        self._told_at = 0.0  # seconds of time.monotonic
        self._recorded: Callable[[], None] = lambda: None  # ends the recording

    def facts(self) -> Facts:
        """Facts that the other process needs."""
        built = self.model_runner.built
        return Facts(
            built.build.max_model_len,
            built.pool.max_num_seqs,
            built.num_blocks,
            built.pool_tokens,
            self.model_runner.describe(),
            self._memory.expected(),
        )

    def take(self, orders: list[Order]) -> None:
        """Queue requests."""
        for order in orders:
            checked = self._intake.read_again(order.token_ids, order.params, order.images)
            listener = self._news.append if order.has_listener else None
            self.core.add(self._intake.make(checked, order.pooling, listener, order.ticket))

    def drop(self, request_ids: list[int]) -> None:
        """Stop computing requests."""
        self.core.abort(request_ids)

    def forget(self) -> None:
        """Drop all requests and all cached blocks."""
        self.core.reset()
        self._news.clear()

    def answer(self, question: int, method: str, *args: Any) -> None:
        """Send what a method returns, or the error of a question that cannot be answered."""
        try:
            value, error = getattr(self, method)(*args), None
        except (TypeError, ValueError, RuntimeError) as refused:
            if self.executor.is_broken:
                raise
            value, error = None, refused
        self._tell(Answer(question, value, error))

    def describe(self) -> Description:
        """A description of this engine."""
        return Description(self.metrics(), self.core.latencies)

    def record(self, number: int) -> None:
        """Record this engine's steps and requests, as those of replica `number`."""
        self._recorded = self.core.record(
            lambda lines: self._tell(Recorded(lines)), self._facts(), (number, f"replica {number}")
        )

    def stop_recording(self) -> None:
        """Stop recording, and send what is left of the recording."""
        self.core.timeline = None
        self._recorded()

    # -- updates of the weights -----------------------------------------------------------------

    def hold(self) -> None:
        """Compute nothing until `release`; see `Core.hold`."""
        self.core.hold()
        self._send(self._take_finished())

    def release(self, version: int | str) -> None:
        """Go on, with weights of this version."""
        self.core.release(version)

    def check_parcel(self, parcel: Parcel) -> None:
        """Refuse the tensors of another process, before any replica has written them."""
        self._memory.check_parcel(parcel)

    def fill_parcel(self, parcel: Parcel) -> None:
        """Fill the weights from the tensors of another process."""
        self._memory.fill_parcel(parcel, lambda: None)

    def end_update(self) -> None:
        """Fill what comes last."""
        self._memory.end_update()

    def give_up_update(self) -> None:
        """Forget what an update that has failed has left half done."""
        self._memory.give_up_update()

    def reload_ranks(self, adapters: Sequence[Given]) -> None:
        """Fill the weights from the checkpoint again, with these adapters."""
        self._memory.reload(adapters)

    def sleep_ranks(self, level: int) -> None:
        """Give the memory back."""
        self._memory.sleep(level)

    def wake_ranks(self, tags: list[str]) -> None:
        """Take it again."""
        self._memory.wake(tags)

    # -- steps ----------------------------------------------------------------------------------

    def advance(self) -> None:
        """Compute a step, and send the news."""
        self._send(self.step())

    def _send(self, finished: list[RequestOutput]) -> None:
        """Send the news of a step."""
        outputs = [self._short(output) for output in (*self._news, *finished)]
        self._news.clear()
        now = time.monotonic()
        if outputs or now - self._told_at > NEWS_SECONDS:
            self._tell(News(outputs, self.core.metrics))
            self._told_at = now

    def _short(self, output: RequestOutput) -> RequestOutput:
        """An output without the prompt, and with `prompt_logprobs` only the first time."""
        short = {**vars(output), "prompt_token_ids": []}
        if output.prompt_logprobs is not None:
            if output.request_id in self._told_prompts:
                short["prompt_logprobs"] = None
            self._told_prompts.add(output.request_id)
        if output.finished:
            self._told_prompts.discard(output.request_id)
        return RequestOutput(**short)


class _LogSender(logging.Handler):
    """A handler that sends log records to the process that started this one, for its handlers."""

    def __init__(self, number: int, tell: Callable[[Any], None]) -> None:
        super().__init__()
        self._number, self._tell = number, tell

    def emit(self, record: logging.LogRecord) -> None:
        message = f"replica {self._number}: {self.format(record)}"
        plain = {**vars(record), "msg": message, "args": None, "exc_info": None, "exc_text": None}
        try:
            self._tell(logging.makeLogRecord(plain))
        except Exception:  # as handlers do: the record cannot be sent, or that process is gone
            self.handleError(record)


def main(fd: int, parent: int) -> None:
    """Serve the process `parent` at the other end of the socket `fd`, until it closes the socket or
    is gone. Does not return.
    """
    live(fd, parent, _serve, _report)


def _report(error: BaseException, text: str) -> Failure:
    if isinstance(error, (TypeError, ValueError)):
        with suppress(Exception):  # some exceptions cannot be unpickled
            return Failure(text, pickle.loads(pickle.dumps(error)))
    return Failure(text, None)


def _serve(sock: socket.socket, setup: Setup) -> None:
    import torch

    torch.set_num_threads(setup.num_threads)
    sending = threading.Lock()

    def tell(message: Any) -> None:
        with sending:
            send_object(sock, message)

    log = logging.getLogger("nanovllm")
    log.setLevel(setup.log_level)
    log.addHandler(_LogSender(setup.number, tell))
    commands: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()
    with Replica(setup.config, tell) as replica:
        tell(replica.facts())
        threading.Thread(target=partial(_listen, sock, commands), daemon=True).start()
        while True:
            try:
                command = commands.get(block=replica.core.is_held or replica.is_finished())
            except queue.Empty:
                replica.advance()
                continue
            if command is None:
                break
            method, *args = command
            getattr(replica, method)(*args)


def _listen(sock: socket.socket, commands: "queue.SimpleQueue[tuple[Any, ...] | None]") -> None:
    try:
        while True:
            commands.put(receive_object(sock))
    except (EOFError, OSError):
        commands.put(None)
