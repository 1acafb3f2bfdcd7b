"""`Replicas`: the processes of a data-parallel engine, as the caller's process starts, calls,
watches, restarts and ends them.

Each runs a whole engine (`replica.py`). A thread per replica takes its messages, and notices its
end.
"""

import contextlib
import logging
import queue
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch

from nanovllm.config import Config
from nanovllm.ranks.processes import (
    EXIT_TIMEOUT,
    WorkerError,
    receive_object,
    send_object,
    start_python,
    wait_for_end,
)
from nanovllm.replicas.messages import (
    Answer,
    Ended,
    Facts,
    Failure,
    News,
    Recorded,
    Setup,
)
from nanovllm.threads.interrupts import uninterrupted
from nanovllm.utils.device import device_shares

logger = logging.getLogger(__name__)

REPLICA = "nanovllm.replicas.replica"
MAX_RESTARTS = 3  # restarts of one replica, since it last finished a request
ANSWER_SECONDS = 5.0


class _Replica:
    """A started process.

    Attributes:
        outbox: messages to it, sent by a thread of its own, so that nobody waits for a process that
            hangs; None ends it.
        answers: answers to questions; None when it has ended.
        facts: facts about its engine; None until it is ready.
        threads: two threads, one for its messages and one for the outbox.
    """

    def __init__(self, process: "subprocess.Popen[bytes]", sock: socket.socket) -> None:
        self.process, self.socket = process, sock
        self.outbox: SimpleQueue[Any] = SimpleQueue()
        self.answers: SimpleQueue[Answer | None] = SimpleQueue()
        self.facts: Facts | None = None
        self.threads: list[threading.Thread] = []

    def join(self) -> None:
        """Wait for the end of its threads, once its process has ended."""
        for thread in self.threads:
            if thread is not threading.current_thread():
                thread.join()

    def send(self) -> None:
        """Send the messages in the outbox."""
        try:
            while (message := self.outbox.get()) is not None:
                send_object(self.socket, message)
            self.socket.shutdown(socket.SHUT_WR)
        except OSError:  # it has ended: its watcher reports it
            pass
        except BaseException:  # it would wait for the rest of the message
            self.process.kill()
            raise


class Replicas:
    """The replicas of an engine, `config.data_parallel_size` processes.

    Args:
        config: options of the engine. `model` must be a directory.

    Attributes:
        is_broken: whether no replica is left.
        failure: end of the last replica, if none is left and none may be restarted.
        num_restarts: number of restarts of all replicas together.
    """

    def __init__(self, config: Config) -> None:
        count = config.data_parallel_size
        if sys.platform != "linux":
            raise ValueError(
                f"`data_parallel_size` must be 1 on {sys.platform}, as replicas need Linux, "
                f"got {count}"
            )
        self._config = replace(config, revision=None, trace=False)
        self._shares = device_shares(config.device, count, config.tensor_parallel_size)
        self._replicas: dict[int, _Replica] = {}  # those that have not ended
        self._tries = [0] * count  # starts of each replica since it last finished a request
        self._num_starts = 0
        self._inbox: deque[tuple[int, Any]] = deque()
        self._has_come = threading.Event()
        self._num_questions = 0
        self._write: Callable[[list[str]], None] | None = None  # writes their recordings
        self.is_broken, self._restarts = False, True
        self._ended: list[int] | None = None  # to be restarted later; None: at once
        self._last_end: tuple[int, Ended] | None = None

    @property
    def num_restarts(self) -> int:
        return max(0, self._num_starts - len(self._shares))

    @property
    def failure(self) -> WorkerError | None:
        lives = any(each.process.poll() is None for each in [*self._replicas.values()])
        may_go_on = lives or (self._restarts and not self.is_broken)
        return None if may_go_on or self._last_end is None else self.error(*self._last_end)

    @property
    def ready(self) -> list[int]:
        """Numbers of the replicas that accept requests."""
        return sorted(i for i, replica in self._replicas.items() if replica.facts is not None)

    @property
    def are_starting(self) -> bool:
        """Whether any replica is not ready yet."""
        return len(self.ready) < len(self._replicas)

    @property
    def are_held(self) -> bool:
        """Whether all compute nothing, see `hold`."""
        return self._ended is not None

    def launch(self) -> None:
        """Start all processes. Does not wait for them."""
        for number in range(len(self._shares)):
            self._start(number)

    def start(self, beside: Callable[[bool], None]) -> Facts:
        """Wait until all replicas are ready. Returns the facts that hold for all of them.

        Args:
            beside: function that is called with True while they start, and may take its time.

        Raises:
            TypeError, ValueError: for a mistake of the caller's that only they can find.
            WorkerError: if one dies for another reason.
        """
        beside(True)
        while len(self.ready) < len(self._shares):
            self.wait(None)
            number, message = self.pop()
            if isinstance(message, Ended):
                error = self.error(number, message)
                if message.failure.error is not None:
                    raise message.failure.error from error
                raise error
        facts = [replica.facts for replica in self._replicas.values() if replica.facts is not None]
        return facts[0]._replace(
            max_model_len=min(each.max_model_len for each in facts),
            max_num_seqs=min(each.max_num_seqs for each in facts),
            num_blocks=min(each.num_blocks for each in facts),
            pool_tokens=min(each.pool_tokens for each in facts),
        )

    def _start(self, number: int) -> None:
        setup = Setup(
            number,
            self._config,
            max(1, torch.get_num_threads() // len(self._shares)),
            logging.getLogger("nanovllm").getEffectiveLevel(),
        )
        quiet = {"TQDM_DISABLE": "1"} if number or self._tries[number] else {}
        self._tries[number] += 1
        self._num_starts += 1
        with uninterrupted():
            ours, theirs = socket.socketpair()
            with theirs:
                try:
                    process = start_python(
                        REPLICA, theirs.fileno(), environment={**self._shares[number], **quiet}
                    )
                except BaseException:
                    ours.close()
                    raise
            replica = _Replica(process, ours)
            replica.outbox.put(setup)
            try:
                for target in (partial(self._watch, number, replica), replica.send):
                    thread = threading.Thread(target=target, daemon=True)
                    thread.start()
                    replica.threads.append(thread)
            except BaseException:  # there can be no more threads
                process.kill()
                raise
            self._replicas[number] = replica

    def start_again(self, number: int) -> bool:
        """Restart a replica that has ended, unless it has failed too often or the weights are no
        longer the checkpoint's: at once, or when `go_on` is called. Returns whether.
        """
        again = self._restarts and self._tries[number] <= MAX_RESTARTS
        if again and self._ended is not None:
            self._ended.append(number)
        elif again:
            try:
                self._start(number)
            except (OSError, RuntimeError):  # no memory, no process, no thread
                logger.warning("replica %d cannot be restarted", number, exc_info=True)
                again = False
        self.is_broken = not self._replicas
        return again

    def _watch(self, number: int, replica: _Replica) -> None:
        failure = Failure("", None)
        try:
            while True:
                message = receive_object(replica.socket)
                if isinstance(message, Failure):
                    failure = message
                elif isinstance(message, Answer):
                    replica.answers.put(message)
                elif isinstance(message, logging.LogRecord):
                    _log(message)
                elif isinstance(message, Recorded):
                    if (write := self._write) is not None:
                        write(message.lines)
                else:
                    self._put(number, message)
        except (EOFError, OSError):  # the end
            pass
        except Exception:  # it has sent something that cannot be read here
            failure = Failure(traceback.format_exc(), None)
            replica.process.kill()
        finally:
            replica.outbox.put(None)
            ended = Ended(wait_for_end(replica.process), failure)
            self._last_end = number, ended
            self._put(number, ended)
            replica.answers.put(None)

    def _put(self, number: int, message: Any) -> None:
        self._inbox.append((number, message))
        self._has_come.set()

    # -- messages from replicas -----------------------------------------------------------------

    def wait(self, seconds: float | None) -> int:
        """Wait for a message, or `seconds`. Returns the number of messages to `pop`."""
        self._has_come.clear()
        if not self._inbox:
            self._has_come.wait(seconds)
        return len(self._inbox)

    def pop(self) -> tuple[int, Any]:
        """Take the first message, with the number of its replica. Notes which replicas are ready
        and which have ended.
        """
        number, message = self._inbox.popleft()
        if isinstance(message, Facts):
            self._replicas[number].facts = message
            if self._write is not None:
                self.tell(number, "record", number)
        elif isinstance(message, News):
            if any(output.finished for output in message.outputs):
                self._tries[number] = 1
        elif isinstance(message, Ended):
            replica = self._replicas.pop(number, None)
            if replica is not None:  # its start was complete
                replica.join()
                replica.socket.close()
        return number, message

    @staticmethod
    def error(number: int, ended: Ended) -> WorkerError:
        """The error for a replica's end, where the engine cannot go on without it."""
        return WorkerError(number, ended.exit_code, ended.failure.traceback, "replica")

    # -- messages to replicas -------------------------------------------------------------------

    def tell(self, number: int, method: str, *args: Any) -> None:
        """Call a method of a replica without waiting for it. If it has ended, nothing happens."""
        self._replicas[number].outbox.put((method, *args))

    def record(self, write: Callable[[list[str]], None]) -> None:
        """Have all replicas record their steps, including those that are restarted."""
        self._write = write
        for number in self.ready:
            self.tell(number, "record", number)

    def stop_recording(self) -> None:
        """Have all replicas send the rest of their recordings."""
        try:
            self.ask("stop_recording")
        finally:
            self._write = None

    def ask(
        self, method: str, *args: Any, seconds: float | None = ANSWER_SECONDS
    ) -> dict[int, Any]:
        """Ask all replicas that are ready what a method of theirs returns. The result lacks those
        that end meanwhile or do not answer in time (None: there is no hurry).

        Raises:
            TypeError, ValueError, RuntimeError: if the question cannot be answered.
        """
        self._num_questions += 1
        found: dict[int, Any] = {}
        asked = [(number, self._replicas[number].answers) for number in self.ready]
        for number, _ in asked:
            self.tell(number, "answer", self._num_questions, method, *args)
        deadline = None if seconds is None else time.monotonic() + seconds
        errors = []
        for number, answers in asked:
            with contextlib.suppress(queue.Empty):
                while number not in found:  # answers to earlier questions may come first
                    left = None if deadline is None else max(0.0, deadline - time.monotonic())
                    answer = answers.get(timeout=left)
                    if answer is None:
                        answers.put(None)  # for the next question
                        break
                    if answer.question == self._num_questions:
                        found[number] = answer.value
                        errors += [answer.error] if answer.error is not None else []
        for error in errors:
            raise error
        return found

    def tell_all(self, method: str, *args: Any) -> None:
        """Have all replicas run a method, and wait for that.

        Raises:
            TypeError, ValueError, RuntimeError: if one refuses.
            WorkerError: if none is left, for the end of the last.
        """
        if not self.ask(method, *args, seconds=None):
            self.is_broken = True
            assert self._last_end is not None, "all replicas are starting"
            raise self.error(*self._last_end)

    def hold(self) -> None:
        """Have all replicas compute nothing, and restart none until `go_on`: it would miss what the
        others are told, and take memory that has been given back. All must be ready.
        """
        self.tell_all("hold")
        self._ended = []

    def go_on(self, version: int | str) -> None:
        """Have all go on, with weights of this version, and restart those that have ended."""
        self.tell_all("release", version)
        ended, self._ended = self._ended or [], None
        for number in ended:
            if self._restarts:
                self.start_again(number)
            else:
                logger.warning("replica %d is not restarted: the weights have been updated", number)

    def keep_as_they_are(self) -> None:
        """Restart no replica from now on: its weights would be those of the checkpoint. None may be
        starting, see `hold`.
        """
        self._restarts = False

    def close(self) -> None:
        """End all replicas. May be called again."""
        with uninterrupted():
            replicas, self._replicas = list(self._replicas.values()), {}
            for replica in replicas:
                if replica.facts is None or self.is_broken:
                    replica.process.kill()
                replica.outbox.put(None)
            deadline = time.monotonic() + EXIT_TIMEOUT
            for replica in replicas:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    replica.process.wait(max(0.0, deadline - time.monotonic()))
                replica.process.kill()
                replica.process.wait()
                with contextlib.suppress(OSError):
                    replica.socket.shutdown(socket.SHUT_RDWR)  # a fork may hold the other end
                replica.join()
                replica.socket.close()


def _log(record: logging.LogRecord) -> None:
    try:
        logging.getLogger(record.name).handle(record)
    except Exception:  # from a filter or a handler of the caller's
        logger.warning("a message of a replica could not be logged", exc_info=True)
