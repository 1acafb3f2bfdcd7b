"""Processes of an engine: their start, their messages, their end. Imports no torch.

They are started by `python -c`, not forked, and do not import the caller's script, so a script
needs no `if __name__ == "__main__"`. Each has a socket to the process that started it, and ends
when that socket is closed or that process is gone.
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
import traceback
from collections.abc import Callable, Mapping
from typing import Any

EXIT_TIMEOUT = 3.0  # seconds that a process has to end by itself before it is killed
MAX_REPORT = 20_000  # characters of a traceback
POLL_SECONDS = 0.2


class WorkerError(RuntimeError):
    """A process of an engine has died: the worker of a rank, or the last replica. The engine is
    closed.

    Attributes:
        rank: rank of the worker, or number of the replica.
        exit_code: exit code of its process; -9 if it was killed by signal 9.
        worker_traceback: traceback of the error that ended it; "" if it left none.
    """

    def __init__(
        self, rank: int, exit_code: int, worker_traceback: str, name: str = "the worker of rank"
    ) -> None:
        self.rank, self.exit_code, self.worker_traceback = rank, exit_code, worker_traceback
        self._name = name
        super().__init__(
            f"{name} {rank} {how_ended(exit_code)}. This engine is closed: build a new LLM."
            + (f" The process's traceback:\n{worker_traceback}" if worker_traceback else "")
        )

    def __reduce__(self) -> tuple[type["WorkerError"], tuple[int, int, str, str]]:
        return WorkerError, (self.rank, self.exit_code, self.worker_traceback, self._name)


def how_ended(exit_code: int) -> str:
    """A process's end in words, for messages."""
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    how = f"was killed by {_signal_name(-exit_code)} (exit code {exit_code})"
    if exit_code == -signal.SIGKILL:
        how += "; the system does that when memory runs out"
    return how


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def start_python(
    module: str, fd: int, *more_fds: int, environment: Mapping[str, str]
) -> "subprocess.Popen[bytes]":
    """Start a process that runs `main(fd, parent)` of a module; see `live`.

    Args:
        module: name of the module.
        fd: file descriptor of its end of a socket.
        more_fds: further file descriptors that it inherits.
        environment: variables to set beside those of this process.
    """
    path = [entry for entry in sys.path if isinstance(entry, str)]
    code = (
        f"import sys; sys.path[:] = {path!r}; from {module} import main; main({fd}, {os.getpid()})"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code],
        pass_fds=(fd, *more_fds),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env={**os.environ, **environment},
        start_new_session=True,  # Ctrl-C is for this process alone
    )


def wait_for_end(process: "subprocess.Popen[bytes]") -> int:
    """Wait for a process that should end, and kill it if it does not. Returns its exit code."""
    try:
        return process.wait(EXIT_TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def live(
    fd: int,
    parent: int,
    work: Callable[[socket.socket, Any], None],
    report: Callable[[BaseException, str], Any],
) -> None:
    """Run a started process to its end. Does not return.

    Args:
        fd: file descriptor of its end of the socket.
        parent: id of the process that started it.
        work: function that gets the socket and the first object sent through it, and runs until
            the end.
        report: function that makes, from an error that ended `work` and its traceback, the object
            to send before the end.
    """
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()
    sock = socket.socket(fileno=fd)
    try:
        work(sock, receive_object(sock))
    except BaseException as error:
        text = "".join(traceback.format_exception(error))[-MAX_REPORT:]
        with contextlib.suppress(OSError):  # the parent is gone, too
            send_object(sock, report(error, text))
        os._exit(1)
    os._exit(0)  # at once, whatever the device is doing: the system frees everything


def _end_with_parent(parent: int) -> None:
    """End this process when its parent is gone. The socket says so, too, but the main thread may be
    waiting for the device, and forks of the parent hold the socket open.
    """
    while os.getppid() == parent:
        time.sleep(POLL_SECONDS)
    os._exit(1)


def send_object(sock: socket.socket, value: Any) -> None:
    """Send a value, with its length before it."""
    data = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    sock.sendall(len(data).to_bytes(8, "little") + data, socket.MSG_NOSIGNAL)


def receive_object(sock: socket.socket) -> Any:
    """The next value that `send_object` has sent. EOFError if the other end is closed."""
    return pickle.loads(_receive(sock, int.from_bytes(_receive(sock, 8), "little")))


def _receive(sock: socket.socket, size: int) -> bytearray:
    data = bytearray()
    while len(data) < size:
        part = sock.recv(size - len(data))
        if not part:
            raise EOFError("the other end is closed")
        data += part
    return data


def clear_frames(error: BaseException) -> None:
    """Clear the frames of an error and its causes, so that it keeps nothing else alive."""
    cause: BaseException | None = error
    while cause is not None:
        traceback.clear_frames(cause.__traceback__)
        cause = cause.__cause__ or cause.__context__
