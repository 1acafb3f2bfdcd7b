"""`Workers`: the processes of ranks 1 and up, seen from rank 0: started, called, watched, ended.

They are processes of their own (`python -c`), not forks, and do not import the caller's script, so
a script needs no `if __name__ == "__main__"`. A worker ends when its socket to rank 0 is closed, or
when rank 0's process is gone; a thread here notices when a worker ends.
"""

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from nanovllm.config import Config
from nanovllm.engine.channel import Channel
from nanovllm.engine.worker import Report, Setup, receive_object, send_object
from nanovllm.model_config import ModelConfig

GRACE = 1.0  # seconds for a death to explain another one's lost contact
PATIENCE = 3.0  # seconds that a worker has to end by itself


class WorkerError(RuntimeError):
    """A worker of a tensor-parallel engine has died. The engine is closed.

    Attributes:
        rank: of the worker.
        exit_code: of its process; -9 if it was killed by signal 9.
        worker_traceback: of the error that ended it, "" if it left none.
    """

    def __init__(self, rank: int, exit_code: int, worker_traceback: str) -> None:
        self.rank, self.exit_code, self.worker_traceback = rank, exit_code, worker_traceback
        how = f"ended with exit code {exit_code}"
        if exit_code < 0:
            how = f"was killed by {signal.Signals(-exit_code).name} (exit code {exit_code})"
            if exit_code == -signal.SIGKILL:
                how += "; the system does that when memory runs out"
        super().__init__(
            f"the worker of rank {rank} {how}. This engine is closed: build a new LLM."
            + (f" The worker's traceback:\n{worker_traceback}" if worker_traceback else "")
        )


class _Worker(NamedTuple):
    rank: int
    process: subprocess.Popen[bytes]
    socket: socket.socket


class Workers:
    """Starts a worker for each rank but 0.

    Args:
        config, model_config: what each gets, the same for all.
        port: of the store through which the ranks meet.
        num_threads: of PyTorch in each, on the CPU.
        message_bytes: the longest message of `call`.

    Attributes:
        failure: why the workers cannot be used any more, once one has died.
        on_failure: called then, from a thread of ours.
    """

    def __init__(
        self,
        config: Config,
        model_config: ModelConfig,
        port: int,
        num_threads: int,
        message_bytes: int,
    ) -> None:
        self.failure: WorkerError | None = None
        self.on_failure: Callable[[], None] = lambda: None
        self._failed, self._closing = threading.Event(), False
        self._workers: list[_Worker] = []
        ranks = range(1, config.tensor_parallel_size)
        self._channel, channel_fd = Channel.create(len(ranks), message_bytes)
        try:
            for rank in ranks:
                setup = Setup(
                    rank, config, model_config, port, channel_fd, message_bytes, os.getpid(),
                    num_threads,
                )  # fmt: skip
                self._workers.append(_start(setup))
        except BaseException:
            self.close()
            raise
        finally:
            os.close(channel_fd)
        self._watchers = [
            threading.Thread(target=self._watch, args=(worker,), daemon=True)
            for worker in self._workers
        ]
        for watcher in self._watchers:
            watcher.start()

    def call(self, method: str, *args: Any) -> None:
        """Call a method of every worker's `ModelRunner`, without waiting for it.

        Raises:
            WorkerError: if a worker has died.
        """
        message = pickle.dumps((method, args), protocol=pickle.HIGHEST_PROTOCOL)
        while not self._channel.has_room():  # a worker is some steps behind
            self.check()
            time.sleep(1e-4)
        self._channel.write(message)
        try:
            for worker in self._workers:
                worker.socket.send(b"\1")
        except OSError:  # its end is closed
            self._failed.wait(PATIENCE)
        self.check()

    def check(self) -> None:
        """WorkerError if a worker has died."""
        if self.failure is not None:
            raise self.failure

    def reason_of(self, error: BaseException) -> BaseException:
        """The death of a worker that led to `error`, if there is one; else `error`."""
        from nanovllm.distributed.group import LostContactError

        if isinstance(error, LostContactError):
            self._failed.wait(PATIENCE)  # the death is about to be noticed
        return self.failure or error

    def _watch(self, worker: _Worker) -> None:
        report = Report("", lost_contact=False)
        with contextlib.suppress(EOFError, OSError):  # it left none
            report = receive_object(worker.socket)
        if report.lost_contact:
            self._failed.wait(GRACE)
        if self._closing or self.failure is not None:
            return
        exit_code = _end(worker.process)
        self.failure = WorkerError(worker.rank, exit_code, report.traceback)
        self._failed.set()
        for other in self._workers:
            other.process.kill()
        self.on_failure()

    def close(self) -> None:
        """End all workers. May be called again."""
        self._closing = True
        for worker in self._workers:
            with contextlib.suppress(OSError):  # it has ended already
                worker.socket.shutdown(socket.SHUT_RDWR)
        for worker in self._workers:
            _end(worker.process)
        for watcher in self._watchers:
            if watcher is not threading.current_thread():
                watcher.join()
        for worker in self._workers:
            worker.socket.close()
        self._workers = []
        self._channel.close()


def _start(setup: Setup) -> _Worker:
    ours, theirs = socket.socketpair()
    with theirs:
        fd = theirs.fileno()
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; "
            f"from nanovllm.engine.worker import main; main({fd})"
        )
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            pass_fds=(fd, setup.channel_fd),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "TQDM_DISABLE": "1"},
            start_new_session=True,  # Ctrl-C is for rank 0
        )
    send_object(ours, setup)
    return _Worker(setup.rank, process, ours)


def _end(process: subprocess.Popen[bytes]) -> int:
    """Wait for a process that should end, and kill it if it does not. Returns its exit code."""
    try:
        return process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()
