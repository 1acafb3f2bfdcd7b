"""`Group`: the ranks that hold a model together, and their exchanges."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import distributed as dist

from nanovllm.distributed.bulk import BulkExchange
from nanovllm.distributed.gloo import Gloo
from nanovllm.distributed.nccl import Nccl, get_unique_id
from nanovllm.distributed.peer_memory import ALIGNMENT, PeerMemory, PeerRegion
from nanovllm.distributed.store import arrival
from nanovllm.tensors.fp8 import Codes

logger = logging.getLogger(__name__)

ABORT_TIMEOUT = 3.0  # seconds to wait for the end of NCCL


class LostContactError(RuntimeError):
    """A collective has failed, most likely because another rank has died."""


def sum_in_order(parts: torch.Tensor) -> torch.Tensor:
    """The sum over the first dimension, in float32, one part after another."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part
    return total


class Group:
    """One rank's view of all ranks.

    Attributes:
        rank: number of this rank; 0 is the caller's process.
        size: number of ranks.
        name: backend that sums large results: "nccl", "gloo", or "none" for a single rank.
        peers: memory of the ranks for exchanges inside kernels; None if there is none.
        bulk: exchange for large steps; None if there is none.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size
        self.peers: PeerMemory | None = None
        self.bulk: BulkExchange | None = None
        self.name = "none"
        self._backend: Nccl | Gloo | None = None
        self._sums_in_order = False
        self._abort_lock, self._is_aborted = threading.Lock(), False
        self._aborting: threading.Thread | None = None
        self._abort_word: torch.Tensor | None = None  # polled by kernels that wait

    def arrive(self, store: dist.Store, device: torch.device) -> None:
        """Tell the other ranks that this one is ready to meet them."""
        # Rank 1 brings NCCL's id, not 0: its thread that waits for all ranks ends with the process.
        brings_id = self.rank == 1 and device.type == "cuda"
        store.set(arrival(self.rank), get_unique_id() if brings_id else b"")  # type: ignore[arg-type]

    def connect(self, store: dist.Store, device: torch.device) -> None:
        """Meet the other ranks, which must have arrived."""
        self._device = device
        if device.type == "cuda":
            self.name, self._backend = "nccl", Nccl(device, self.rank, self.size)
            with self._losing_contact():
                self._backend.connect(store.get(arrival(1)))
        else:
            self.name = "gloo"
            with self._losing_contact():
                self._backend = Gloo(store, self.rank, self.size)

    def open_peer_memory(
        self, dtype: torch.dtype, hidden_size: int, max_num_seqs: int, max_step_rows: int
    ) -> None:
        """Let kernels exchange rows, if every GPU can reach every other. Called on all ranks.

        Args:
            dtype: torch.dtype of the rows.
            hidden_size: elements of a row.
            max_num_seqs: rows of the largest step whose rows kernels sum.
            max_step_rows: rows of the largest step beyond that; 0: NCCL sums such steps.
        """
        others = [peer for peer in range(self.size) if peer != self.rank]
        possible = all(torch.cuda.can_device_access_peer(self._device, peer) for peer in others)
        row_bytes = hidden_size * dtype.itemsize
        if self.minimum(int(possible and row_bytes % ALIGNMENT == 0)):
            rank, size, device = self.rank, self.size, self._device
            self._abort_word = abort = torch.zeros(1, dtype=torch.int64, pin_memory=True)
            self.peers = PeerMemory(rank, size, device, max_num_seqs, row_bytes, abort, self._share)
            if max_step_rows:
                self.bulk = BulkExchange(
                    rank, size, device, max_step_rows, hidden_size, dtype, abort, self._share
                )

    @property
    def _regions(self) -> list[PeerRegion]:
        return [part.region for part in (self.peers, self.bulk) if part is not None]

    @property
    def peer_bytes(self) -> int:
        """Bytes of this rank's GPU memory for exchanges."""
        outgoing = 0 if self.bulk is None else self.bulk.outgoing_bytes
        return outgoing + sum(region.num_bytes for region in self._regions)

    def describe(self) -> str:
        """The means by which the ranks' results are summed, for a log line."""
        return self.name if self.peers is None else f"peer memory and {self.name}"

    def can_exchange(self, x: torch.Tensor | Codes) -> bool:
        """Whether kernels can sum x: [T, M] over the ranks."""
        return self.peers is not None and len(x) <= self.peers.max_rows

    def bulk_for(self, x: torch.Tensor | Codes) -> BulkExchange | None:
        """The exchange that sums x: [T, M], if x is too large for `can_exchange`."""
        return None if self.can_exchange(x) else self.bulk

    def keep_order(self) -> None:
        """Add in the order of ranks from now on. That of libraries depends on the size of x."""
        self._sums_in_order = self.size > 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Replace x (float16, bfloat16 or float32) by its sum over the ranks."""
        if self._sums_in_order:
            return x.copy_(sum_in_order(self.all_gather(x)))
        if self._backend is not None:
            with self._losing_contact():
                self._backend.all_reduce(x)
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """The ranks' x, stacked: [size, ...]."""
        if self._backend is None:
            return x.unsqueeze(0)
        everyone = x.new_empty((self.size, *x.shape))
        with self._losing_contact():
            self._backend.all_gather(everyone, x.contiguous())
        return everyone

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Replace x by rank 0's."""
        if self._backend is not None:
            with self._losing_contact():
                self._backend.broadcast(x)
        return x

    def minimum(self, value: int) -> int:
        """The smallest of the ranks' values."""
        if self.size == 1:
            return value
        own = value.to_bytes(8, "little", signed=True)
        return min(int.from_bytes(data, "little", signed=True) for data in self._share(own))

    def _share(self, data: bytes) -> list[bytes]:
        own = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self._device)
        everyone = [bytes(row) for row in self.all_gather(own).cpu().numpy()]
        self.check()  # an aborted collective returns, too
        return everyone

    @contextmanager
    def _losing_contact(self) -> Iterator[None]:
        self.check()
        try:
            yield
        except RuntimeError as error:
            raise LostContactError(f"communication with the other ranks failed: {error}") from error

    def abort(self) -> None:
        """End every wait for the other ranks, since one of them has died. From any thread.

        Returns at once: NCCL, once it has ended its kernels, waits for the end of CUDA graphs that
        contain such kernels. A graph that is dropped while it runs is waited for, too, and no other
        thread goes on meanwhile. So first `abort`, then wait for the device, then drop the graphs.
        """
        with self._abort_lock:
            if self._is_aborted:
                return
            self._is_aborted = True
            if self._abort_word is not None:
                self._abort_word.numpy()[0] = 1
            if self._backend is not None:
                args = (self._backend,)
                self._aborting = threading.Thread(target=self._end_backend, args=args, daemon=True)
                self._aborting.start()

    def _end_backend(self, backend: Nccl | Gloo) -> None:
        try:
            backend.abort()
        except RuntimeError as error:
            logger.warning(
                "%s did not shut down (%s): its memory and connections are freed with this process",
                self.name, error,
            )  # fmt: skip

    def check(self) -> None:
        """Raise LostContactError after `abort`: for work that does not talk to the other ranks."""
        if self._is_aborted:
            raise LostContactError("another rank has died")

    def close(self) -> None:
        """Free memory and connections. The other ranks must have ended."""
        self.abort()  # an orderly end of NCCL would wait for the others
        if self._aborting is not None:
            self._aborting.join(ABORT_TIMEOUT)
        with ExitStack() as finally_:  # all of it, whatever fails
            for region in self._regions:
                finally_.callback(region.close)
        self.peers = self.bulk = self._backend = self._abort_word = None
