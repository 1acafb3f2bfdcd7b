"""`Workers`: the processes of ranks 1 and up, as rank 0 starts, calls, watches and ends them.

A thread per worker answers its questions while the ranks meet, and notices its end.
"""

import contextlib
import os
import pickle
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from nanovllm.checkpoint.model_config import ModelConfig
from nanovllm.config import Config
from nanovllm.engine.plan import max_plan_bytes
from nanovllm.ranks.channel import Channel
from nanovllm.ranks.letter import Letter
from nanovllm.ranks.processes import (
    EXIT_TIMEOUT,
    WorkerError,
    receive_object,
    send_object,
    start_python,
    wait_for_end,
)
from nanovllm.ranks.worker import Report, Setup

# Seconds to wait for the rank that really died before blaming one that only lost its connection.
BLAME_TIMEOUT = 1.0
WORKER = "nanovllm.ranks.worker"
OVERHEAD = 4096  # bytes of a message beside the plan's arrays


class _Worker(NamedTuple):
    rank: int
    process: subprocess.Popen[bytes]
    socket: socket.socket
    watcher: threading.Thread


class Workers:
    """The workers, one for each rank but 0. The constructor starts them.

    Args:
        config, model_config: options and model of the engine, the same for all workers.
        num_threads: threads of PyTorch on the CPU, in each worker.
        on_failure: function called when a worker has died, in a thread of this class.

    Attributes:
        failure: reason why the workers cannot be used any more, once one has died; else None.
    """

    def __init__(
        self,
        config: Config,
        model_config: ModelConfig,
        num_threads: int,
        on_failure: Callable[[], None],
    ) -> None:
        self.failure: WorkerError | None = None
        self._on_failure = on_failure
        self._blame = threading.Lock()  # held by the thread that decides which worker is the cause
        self._blamed, self._failed = threading.Event(), threading.Event()
        self._closing = self._killed = False  # set by `close`
        self._told: dict[str, bytes] = {}  # values of the ranks' `Store`s
        self._workers: list[_Worker] = []
        ranks = range(1, config.tensor_parallel_size)
        max_len = config.longest(model_config.max_position_embeddings)
        plan_bytes = max_plan_bytes(
            config.max_num_seqs,
            config.max_num_batched_tokens,
            max_blocks=-(-max_len // config.kvcache_block_size),
            num_tables=2 if any(layer.window for layer in model_config.layers) else 1,
            has_images=model_config.vision is not None,
        )
        message_bytes = plan_bytes + OVERHEAD
        self._channel, channel_fd = Channel.create(len(ranks), message_bytes)
        try:
            for rank in ranks:
                self._start(
                    Setup(rank, config, model_config, channel_fd, message_bytes, num_threads)
                )
        except BaseException:
            self.close(kill=True)
            raise
        finally:
            os.close(channel_fd)

    def _start(self, setup: Setup) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = start_python(
                    WORKER, theirs.fileno(), setup.channel_fd, environment={"TQDM_DISABLE": "1"}
                )
            except BaseException:
                ours.close()
                raise
        with contextlib.suppress(OSError):  # it has died already: `_watch` reports it
            send_object(ours, setup)
        watcher = threading.Thread(
            target=self._watch, args=(setup.rank, process, ours), daemon=True
        )
        self._workers.append(_Worker(setup.rank, process, ours, watcher))
        watcher.start()

    def call(self, method: str, *args: Any) -> None:
        """Call a method of every worker's `ModelRunner`, without waiting for it. The channel must
        have room.

        Raises:
            WorkerError: if a worker has died.
            ConnectionError: if that has not been noticed yet; see `reason_of`.
        """
        self._send(method, args)

    def call_together(self, method: str, args: Letter) -> None:
        """The same for a method that all ranks run at once, with arguments of any size: afterwards
        each worker waits for all ranks. The method may be one of the runner's parts, by a path with
        dots.
        """
        self._send(method, args)

    def _send(self, method: str, args: "tuple[Any, ...] | Letter") -> None:
        self.check()
        self._channel.write(pickle.dumps((method, args), protocol=pickle.HIGHEST_PROTOCOL))
        for worker in self._workers:
            worker.socket.send(b"\1", socket.MSG_NOSIGNAL)

    def wait_for_room(self) -> None:
        """Wait until the channel has room for a call: a worker may lag by some steps.

        Raises:
            WorkerError: if a worker has died.
        """
        while not self._channel.has_room():
            self.check()
            time.sleep(1e-4)

    def ask(self, key: str, value: bytes | None) -> bytes | None:
        """Set or get a value, on behalf of rank 0's `Store`.

        Raises:
            RuntimeError: if a worker has died, or after `close`.
        """
        if self._closing or self.failure is not None:
            # Not `failure` itself: it would keep alive the frames of whoever waits here.
            raise RuntimeError("the ranks' rendezvous is closed")
        return self._tell(key, value)

    def _tell(self, key: str, value: bytes | None) -> bytes | None:
        if value is not None:
            self._told[key] = value
        return self._told.get(key)

    def check(self) -> None:
        """Raise WorkerError if a worker has died."""
        if self.failure is not None:
            raise self.failure

    def reason_of(self, error: BaseException) -> BaseException:
        """The death of a worker that led to `error`, if there is one; else `error`."""
        from nanovllm.distributed.group import LostContactError

        if isinstance(error, (LostContactError, ConnectionError)):
            self._failed.wait(BLAME_TIMEOUT + EXIT_TIMEOUT)  # the death is about to be noticed
        elif not isinstance(error, RuntimeError):
            return error  # not from the device: all ranks meet the same mistake in a checkpoint
        return self.failure or error

    def _watch(self, rank: int, process: subprocess.Popen[bytes], sock: socket.socket) -> None:
        """Answer a worker's `Store`, and wait for its end. The first worker to end for another
        reason than lost contact is to blame.
        """
        report = Report("", lost_contact=False)
        with contextlib.suppress(EOFError, OSError):  # it left no report
            while not isinstance(message := receive_object(sock), Report):
                key, value = message
                send_object(sock, self._tell(key, value))
            report = message
        if report.lost_contact:
            self._blamed.wait(BLAME_TIMEOUT)
        with self._blame:
            self._blamed.set()
            exit_code = wait_for_end(process)
            expected = self._killed or (self._closing and exit_code == 0)
            if expected or self.failure is not None:
                return
            self.failure = WorkerError(rank, exit_code, report.traceback)
        for other in self._workers:
            other.process.kill()
        self._failed.set()
        self._on_failure()

    def close(self, kill: bool) -> None:
        """End all workers, once they have finished their calls or, with `kill`, at once. A worker
        that fails meanwhile is the `failure`. May be called again.
        """
        self._closing = True
        self._failed.set()  # nobody needs to wait any more
        if kill:
            self._kill()
        for worker in self._workers:
            with contextlib.suppress(OSError):  # it has ended already
                worker.socket.shutdown(socket.SHUT_WR)
        deadline = time.monotonic() + EXIT_TIMEOUT
        self._join_watchers(deadline)
        self._kill()  # those that are stuck
        self._join_watchers()
        for worker in self._workers:
            worker.process.wait()
            worker.socket.close()
        self._workers = []
        self._channel.close()

    def _kill(self) -> None:
        self._killed = True
        for worker in self._workers:
            worker.process.kill()

    def _join_watchers(self, deadline: float = float("inf")) -> None:
        for worker in self._workers:
            if worker.watcher.is_alive() and worker.watcher is not threading.current_thread():
                left = max(0.0, deadline - time.monotonic())
                worker.watcher.join(min(left, threading.TIMEOUT_MAX))
