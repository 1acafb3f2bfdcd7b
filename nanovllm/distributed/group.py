"""`Group`: the ranks that hold a model together, and what they do together.

NCCL between GPUs, Gloo between processes on a CPU. The process groups are built directly, without
`init_process_group`: that has one group for a whole process, and here each engine has its own.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist

from nanovllm.distributed.peer_memory import PeerMemory

MEETING = timedelta(seconds=30)  # for ranks that are all there to connect
FOREVER = timedelta(days=365)  # a rank that has died is noticed by its process, not by a time limit


class LostContactError(RuntimeError):
    """A collective has failed, most likely because another rank has died."""


class Group:
    """One rank's view of the ranks.

    Attributes:
        rank: 0 is the caller's process.
        size: how many ranks.
        name: what sums large results: "nccl", "gloo", or "none" for a single rank.
        peers: the ranks' memory for exchanges inside kernels; None where there is none.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size
        self.peers: PeerMemory | None = None
        self.name = "none"
        self._backend: Any = None  # a process group of torch.distributed
        self._store: dist.Store | None = None
        self._is_aborted = False

    def connect(self, store: dist.Store, device: torch.device) -> None:
        """Meet the other ranks, which must be there (`arrival`)."""
        self._store = store
        self.name = "nccl" if device.type == "cuda" else "gloo"
        if self.name == "nccl":
            with _environment(
                TORCH_NCCL_ASYNC_ERROR_HANDLING="0", TORCH_NCCL_ENABLE_MONITORING="0"
            ):
                # Its threads would end the caller's process when a worker dies.
                options = dist.ProcessGroupNCCL.Options()
                self._backend = dist.ProcessGroupNCCL(store, self.rank, self.size, options)
        else:
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
            options._timeout = MEETING  # one that dies now would be waited for
            with _losing_contact():
                self._backend = dist.ProcessGroupGloo(store, self.rank, self.size, options)
        self.all_reduce(torch.zeros(1, device=device))  # NCCL connects at the first call
        if self.name == "gloo":
            self._backend._set_default_timeout(FOREVER)

    def open_peer_memory(self, device: torch.device, max_rows: int, row_bytes: int) -> None:
        """Let kernels exchange rows, if every GPU can reach every other. Called on all ranks."""
        others = [peer for peer in range(self.size) if peer != self.rank]
        reachable = all(torch.cuda.can_device_access_peer(device, peer) for peer in others)
        if self.minimum(int(reachable), device):
            self.peers = PeerMemory(
                self.rank, self.size, device, max_rows, row_bytes,
                lambda handle: self._share(handle, device),
            )  # fmt: skip

    def describe(self) -> str:
        """How the ranks' results are summed."""
        return self.name if self.peers is None else f"peer memory and {self.name}"

    def can_exchange(self, x: torch.Tensor) -> bool:
        """Whether kernels can sum x: [T, M] over the ranks."""
        return self.peers is not None and len(x) <= self.peers.max_rows

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Replace x by its sum over the ranks."""
        if self._backend is not None:
            with _losing_contact():
                self._backend.allreduce([x]).wait()
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """The ranks' x, stacked: [size, ...]."""
        if self._backend is None:
            return x.unsqueeze(0)
        parts = [torch.empty_like(x) for _ in range(self.size)]
        with _losing_contact():
            self._backend.allgather([parts], [x.contiguous()]).wait()
        return torch.stack(parts)

    def minimum(self, value: int, device: torch.device) -> int:
        """The smallest of the ranks' values."""
        if self.size == 1:
            return value
        return int(self.all_gather(torch.tensor([value], device=device)).min())

    def _share(self, data: bytes, device: torch.device) -> list[bytes]:
        own = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
        return [bytes(row) for row in self.all_gather(own).cpu().numpy()]

    def abort(self) -> None:
        """End what waits for the other ranks, since one of them has died. From any thread."""
        self._is_aborted = True
        if self.peers is not None:
            self.peers.abort()
        if self.name == "nccl" and self._backend is not None:
            self._backend.abort()

    def check(self) -> None:
        """LostContactError after `abort`, for work that does not talk to the other ranks."""
        if self._is_aborted:
            raise LostContactError("another rank has died")

    def close(self) -> None:
        """Give memory and connections back. The other ranks must have ended."""
        if self.peers is not None:
            self.peers.close()
        self.peers = self._backend = self._store = None


def listen() -> tuple[dist.Store, int]:
    """The store through which ranks meet, on this machine only, and its port."""
    listener = socket.create_server(("127.0.0.1", 0))  # a port that nobody uses
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=FOREVER,
        master_listen_fd=listener.detach(),
    )  # fmt: skip
    return store, port


def join(port: int) -> dist.Store:
    """The same store in another process."""
    return dist.TCPStore("127.0.0.1", port, is_master=False, timeout=FOREVER)


def arrival(rank: int) -> str:
    """The key that a rank sets in the store when it is ready to meet the others."""
    return f"rank {rank} is there"


@contextmanager
def _losing_contact() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise LostContactError(f"lost contact with another rank: {error}") from error


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
