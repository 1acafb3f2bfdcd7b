"""A worker: the process of a rank above 0. `Workers` starts it with `main`."""

import contextlib
import logging
import os
import pickle
import socket
import threading
import time
import traceback
from functools import partial
from typing import Any, NamedTuple

from nanovllm.config import Config
from nanovllm.engine.channel import Channel
from nanovllm.model_config import ModelConfig

MAX_REPORT = 20_000  # characters of a traceback
POLL_SECONDS = 0.2


class Setup(NamedTuple):
    """What a worker is told at its start."""

    rank: int
    config: Config
    model_config: ModelConfig
    channel_fd: int
    channel_capacity: int
    num_threads: int  # of PyTorch on the CPU


class Report(NamedTuple):
    """What a worker says before it dies of an error."""

    traceback: str
    lost_contact: bool  # another rank's death may be the cause


def main(fd: int, parent: int) -> None:
    """Serve rank 0, process `parent` at the other end of the socket `fd`, until it closes it or is
    gone. Does not return.
    """
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()
    sock = socket.socket(fileno=fd)
    try:
        _serve(sock, receive_object(sock))
    except BaseException as error:
        from nanovllm.distributed.group import LostContactError

        text = "".join(traceback.format_exception(error))[-MAX_REPORT:]
        with contextlib.suppress(OSError):  # rank 0 is gone, too
            send_object(sock, Report(text, isinstance(error, LostContactError)))
        os._exit(1)
    os._exit(0)  # at once, whatever the device is doing: the system takes everything back


def _serve(sock: socket.socket, setup: Setup) -> None:
    import torch

    from nanovllm.distributed.group import Group
    from nanovllm.distributed.store import Store, arrival
    from nanovllm.engine.model_runner import ModelRunner
    from nanovllm.utils.device import resolve_device

    logging.disable(logging.WARNING)  # rank 0 says it
    torch.set_num_threads(setup.num_threads)
    size = setup.config.tensor_parallel_size
    group = Group(setup.rank, size)
    device = resolve_device(setup.config.device, setup.rank, size)
    store = Store(partial(_ask, sock))
    group.arrive(store, device)
    store.wait([arrival(0)])  # rank 0 is there when all are
    group.connect(store, device)
    runner = ModelRunner(setup.config, setup.model_config, group)
    channel = Channel(setup.channel_fd, size - 1, setup.channel_capacity)
    while sock.recv(1):
        method, args = pickle.loads(channel.read(setup.rank - 1))
        getattr(runner, method)(*args)


def _ask(sock: socket.socket, key: str, value: bytes | None) -> bytes | None:
    """What a worker's `Store` calls: rank 0's `Workers` answer."""
    send_object(sock, (key, value))
    return receive_object(sock)


def _end_with_parent(parent: int) -> None:
    """The socket tells when rank 0 is gone, but the main thread may be waiting for the device, and
    forks of rank 0's process hold the socket open.
    """
    while os.getppid() == parent:
        time.sleep(POLL_SECONDS)
    os._exit(1)


def send_object(sock: socket.socket, value: Any) -> None:
    """Send a value and its length before it."""
    data = pickle.dumps(value)
    sock.sendall(len(data).to_bytes(8, "little") + data, socket.MSG_NOSIGNAL)


def receive_object(sock: socket.socket) -> Any:
    """What `send_object` has sent. EOFError if the other end is closed."""
    return pickle.loads(_receive(sock, int.from_bytes(_receive(sock, 8), "little")))


def _receive(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = sock.recv(size - len(data))
        if not part:
            raise EOFError("the other end is closed")
        data += part
    return data
