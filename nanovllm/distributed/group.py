"""`Group`: the ranks that hold a model together, and what they do together.

NCCL between GPUs, Gloo between processes on a CPU. The process groups are built directly, without
`init_process_group`: that has one group for a whole process, and here each engine has its own.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist

from nanovllm.distributed.bulk import BulkExchange
from nanovllm.distributed.peer_memory import ALIGNMENT, PeerMemory, PeerRegion

MEETING = timedelta(seconds=10)  # of Gloo: for an address once, for a connection five times
FOREVER = timedelta(days=365)  # a rank that has died is noticed by its process, not by a time limit
SETTLE = 0.02  # seconds
PATIENCE = 3.0  # seconds for NCCL to end in order

NCCL_ENVIRONMENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # would end the caller's process with a worker's
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # the same
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",  # would ask the store every second, and warn at its end
    "NCCL_RUNTIME_CONNECT": "0",  # all connections at once: waiting for one cannot be aborted
}

_connecting_nccl = threading.Lock()  # one at a time: the environment is the whole process's


class LostContactError(RuntimeError):
    """A collective has failed, most likely because another rank has died."""


class Group:
    """One rank's view of the ranks.

    Attributes:
        rank: 0 is the caller's process.
        size: how many ranks.
        name: what sums large results: "nccl", "gloo", or "none" for a single rank.
        peers: the ranks' memory for exchanges inside kernels; None where there is none.
        bulk: the same for large steps.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size
        self.peers: PeerMemory | None = None
        self.bulk: BulkExchange | None = None
        self.name = "none"
        self._backend: Any = None  # a process group of torch.distributed
        self._abort_lock, self._is_aborted = threading.Lock(), False
        self._aborting: threading.Thread | None = None
        self._abort_word: torch.Tensor | None = None  # a word that kernels which wait look at
        self._listened: set[int] | None = None  # while NCCL connects: the sockets before it

    def connect(self, store: dist.Store, device: torch.device) -> None:
        """Meet the other ranks, which must be there (`arrival`)."""
        self._device = device
        self.name = "nccl" if device.type == "cuda" else "gloo"
        if self.name == "nccl":
            with _connecting_nccl, _environment(NCCL_ENVIRONMENT):
                self._connect_nccl(store)
        else:
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
            options._timeout = MEETING  # one that dies now would be waited for
            with self._losing_contact():
                self._backend = dist.ProcessGroupGloo(store, self.rank, self.size, options)
            self.all_reduce(torch.zeros(1))
            self._backend._set_default_timeout(FOREVER)

    def _connect_nccl(self, store: dist.Store) -> None:
        before = _nccl_memory()
        self._listened = {_inode(sock) for sock in _nccl_listening()}
        try:
            options = dist.ProcessGroupNCCL.Options()
            self._backend = dist.ProcessGroupNCCL(store, self.rank, self.size, options)
            self.all_reduce(torch.zeros(1, device=self._device)).item()  # connects all ranks
        finally:
            self._listened = None
            for name in _nccl_memory() - before:  # a crash would leave the names in /dev/shm
                with suppress(FileNotFoundError):  # another rank was first
                    os.unlink(name)

    def open_peer_memory(
        self,
        dtype: torch.dtype,
        hidden_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
    ) -> None:
        """Let kernels exchange rows, if every GPU can reach every other. Called on all ranks."""
        others = [peer for peer in range(self.size) if peer != self.rank]
        possible = all(torch.cuda.can_device_access_peer(self._device, peer) for peer in others)
        row_bytes = hidden_size * dtype.itemsize
        if self.minimum(int(possible and row_bytes % ALIGNMENT == 0)):
            who = self.rank, self.size, self._device
            self._abort_word = torch.zeros(1, dtype=torch.int64, pin_memory=True)
            how = self._abort_word, self._share
            self.peers = PeerMemory(*who, max_num_seqs, row_bytes, *how)
            self.bulk = BulkExchange(*who, max_num_batched_tokens, hidden_size, dtype, *how)

    @property
    def _regions(self) -> list[PeerRegion]:
        return [part.region for part in (self.peers, self.bulk) if part is not None]

    @property
    def peer_bytes(self) -> int:
        """Memory of this rank's GPU for exchanges."""
        outgoing = 0 if self.bulk is None else self.bulk.outgoing_bytes
        return outgoing + sum(region.num_bytes for region in self._regions)

    def describe(self) -> str:
        """How the ranks' results are summed."""
        return self.name if self.peers is None else f"peer memory and {self.name}"

    def can_exchange(self, x: torch.Tensor) -> bool:
        """Whether kernels can sum x: [T, M] over the ranks."""
        return self.peers is not None and len(x) <= self.peers.max_rows

    def bulk_for(self, x: torch.Tensor) -> BulkExchange | None:
        """What sums x: [T, M] if that is too large for `can_exchange`."""
        return None if self.can_exchange(x) else self.bulk

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Replace x by its sum over the ranks."""
        if self._backend is not None:
            with self._losing_contact():
                self._backend.allreduce([x]).wait()
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """The ranks' x, stacked: [size, ...]."""
        if self._backend is None:
            return x.unsqueeze(0)
        parts = [torch.empty_like(x) for _ in range(self.size)]
        with self._losing_contact():
            self._backend.allgather([parts], [x.contiguous()]).wait()
        return torch.stack(parts)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Replace x by that of rank 0."""
        if self._backend is not None:
            with self._losing_contact():
                self._backend.broadcast([x]).wait()
        return x

    def minimum(self, value: int) -> int:
        """The smallest of the ranks' values."""
        if self.size == 1:
            return value
        return int(self.all_gather(torch.tensor([value], device=self._device)).min())

    def _share(self, data: bytes) -> list[bytes]:
        own = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self._device)
        return [bytes(row) for row in self.all_gather(own).cpu().numpy()]

    @contextmanager
    def _losing_contact(self) -> Iterator[None]:
        self.check()  # NCCL would try to meet the others again, for ever
        try:
            yield
        except RuntimeError as error:
            raise LostContactError(f"lost contact with another rank: {error}") from error

    def abort(self) -> None:
        """End what waits for the other ranks, since one of them has died. From any thread.

        Waits for nothing: NCCL, once it has ended its kernels, waits for the end of CUDA graphs
        that hold such, and the end of those that still run is waited for without letting other
        threads go on. So first `abort`, then wait for the device, then drop the graphs.

        While NCCL connects, PyTorch has nothing to abort, and NCCL would wait for the dead, for
        ever: the sockets on which it listens are shut.
        """
        with self._abort_lock:
            if self._is_aborted:
                return
            self._is_aborted = True
            if self._abort_word is not None:
                self._abort_word.numpy()[0] = 1
            if self.name == "nccl" and self._backend is not None:
                self._aborting = threading.Thread(
                    target=self._abort_nccl, args=(self._backend,), daemon=True
                )
                self._aborting.start()

    def _abort_nccl(self, backend: Any) -> None:
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            time.sleep(SETTLE)  # until a call that has not seen the mark is on its way
            listened = self._listened
            backend.abort()
            if listened is None:
                return
            for sock in _nccl_listening():
                if _inode(sock) not in listened:
                    with suppress(OSError):  # it is shut
                        sock.shutdown(socket.SHUT_RDWR)

    def check(self) -> None:
        """LostContactError after `abort`, for work that does not talk to the other ranks."""
        if self._is_aborted:
            raise LostContactError("another rank has died")

    def close(self) -> None:
        """Give memory and connections back. The other ranks must have ended."""
        self.abort()  # NCCL's own end would warn and wait
        if self._aborting is not None:
            self._aborting.join(PATIENCE)
        with ExitStack() as finally_:  # all of it, whatever fails
            for region in self._regions:
                finally_.callback(region.close)
        self.peers = self.bulk = self._backend = self._abort_word = None


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


def _nccl_memory() -> set[str]:
    """The files of shared memory that NCCL has opened in this process and that have a name."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        paths = {line.split(maxsplit=5)[-1].rstrip("\n") for line in maps}
    return {path for path in paths if path.startswith("/dev/shm/nccl-") and os.path.exists(path)}


def _nccl_listening() -> Iterator[socket.socket]:
    """The sockets on which NCCL listens in this process, each while the iteration is at it: TCP,
    without the option that servers, stores and Gloo set to take a port again.
    """
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed meanwhile
            if not os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                continue
            with socket.fromfd(int(fd), socket.AF_INET, socket.SOCK_STREAM) as sock:  # a duplicate
                domain, listens, reuses = (
                    sock.getsockopt(socket.SOL_SOCKET, option)
                    for option in (socket.SO_DOMAIN, socket.SO_ACCEPTCONN, socket.SO_REUSEADDR)
                )
                if domain in (socket.AF_INET, socket.AF_INET6) and listens and not reuses:
                    yield sock


def _inode(sock: socket.socket) -> int:
    return os.fstat(sock.fileno()).st_ino


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
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
