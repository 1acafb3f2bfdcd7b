"""A worker: the process of a rank above 0. `Workers` starts it with `main`."""

import logging
import pickle
import socket
from functools import partial
from operator import attrgetter
from typing import NamedTuple

from nanovllm.checkpoint.model_config import ModelConfig
from nanovllm.config import Config
from nanovllm.ranks.channel import Channel
from nanovllm.ranks.letter import Letter
from nanovllm.ranks.processes import live, receive_object, send_object


class Setup(NamedTuple):
    """The first message to a worker."""

    rank: int
    config: Config
    model_config: ModelConfig
    channel_fd: int
    channel_capacity: int
    num_threads: int  # threads of PyTorch on the CPU


class Report(NamedTuple):
    """A worker's last message, if it dies of an error."""

    traceback: str
    lost_contact: bool  # another rank's death may be the cause


def main(fd: int, parent: int) -> None:
    """Serve rank 0, process `parent` at the other end of the socket `fd`, until it closes the
    socket or is gone. Does not return.
    """
    live(fd, parent, _serve, _report)


def _report(error: BaseException, text: str) -> Report:
    from nanovllm.distributed.group import LostContactError

    return Report(text, isinstance(error, LostContactError))


def _serve(sock: socket.socket, setup: Setup) -> None:
    import torch

    from nanovllm.distributed.group import Group
    from nanovllm.distributed.store import Store, arrival
    from nanovllm.engine.model_runner import ModelRunner
    from nanovllm.startup.builder import Builder
    from nanovllm.utils.device import resolve_device

    logging.disable(logging.WARNING)  # rank 0 logs the same
    torch.set_num_threads(setup.num_threads)
    size = setup.config.tensor_parallel_size
    group = Group(setup.rank, size)
    device = resolve_device(setup.config.device, setup.rank, size)
    store = Store(partial(_ask, sock))
    group.arrive(store, device)
    store.wait([arrival(0)])  # rank 0 arrives once all others have
    group.connect(store, device)
    built = Builder(setup.config, setup.model_config, group).build()
    runner = ModelRunner(setup.config, built)
    channel = Channel(setup.channel_fd, size - 1, setup.channel_capacity)
    while sock.recv(1):
        method, args = pickle.loads(channel.read(setup.rank - 1))
        if isinstance(args, Letter):  # all ranks do it together
            could = attrgetter(method)(runner)(*args.read())
            group.minimum(int(could is not False))
        else:
            getattr(runner, method)(*args)


def _ask(sock: socket.socket, key: str, value: bytes | None) -> bytes | None:
    """Ask rank 0's `Workers`, on behalf of a worker's `Store`."""
    send_object(sock, (key, value))
    return receive_object(sock)
