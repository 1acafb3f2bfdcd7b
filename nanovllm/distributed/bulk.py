"""`BulkExchange`: sums over the ranks in large steps, overlapped with matrix products.

The T rows of a step are divided into parts, and each rank owns one (sequence parallelism;
Korthikanti et al., 2022). A row-parallel product computes the other ranks' parts first, and the
GPU's copy engines send each part to its owner while the next is computed (`scatter`). The owner
sums and normalises its part, quantises it if the next product takes quantised activations, and
sends it to all others (`gather`) while that column-parallel product begins with the part that has
already arrived. Copies take no multiprocessor time.

Single buffering is safe. `received` and `outgoing` are overwritten only after the owner's
normalised rows have arrived, which proves that the owner has read the last partial results. `rows`
is overwritten, by values or by codes, which share its memory, only after all ranks' next partial
results have arrived, which they computed from these rows.
"""

import ctypes
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from nanovllm.distributed.peer_memory import PeerRegion, Share
from nanovllm.tensors.fp8 import FP8, Codes
from nanovllm.utils.integers import cdiv

FLAG_BYTES = 8
ALIGNMENT = 256  # bytes: rows begin where an allocation may (docs/experiments.md, 44)
ROUND = 16  # the rows of a part are a multiple of it


class Scattered(NamedTuple):
    """Partial results of a row-parallel product, from all ranks, for this rank's part of the rows.

    Attributes:
        partial: [size, n, M], to be summed over the ranks.
        num_rows: T, rows of the step on all ranks together.
        exchange: the exchange that delivered them.
    """

    partial: torch.Tensor
    num_rows: int
    exchange: "BulkExchange"


class Gathered(NamedTuple):
    """Normalised rows of all ranks; those of other ranks may still be arriving.

    Attributes:
        rows: [T, M] values or codes; a part may be read once `parts` has yielded it.
        epoch: number of the exchange.
        exchange: the exchange that delivers them.
    """

    rows: torch.Tensor | Codes
    epoch: int
    exchange: "BulkExchange"

    def parts(self) -> Iterator[slice]:
        """The slices of the rows, as they arrive: this rank's first."""
        return self.exchange.arrivals(len(self.rows), self.epoch)

    @property
    def held(self) -> range:
        """The rows of this rank's part."""
        part = part_of(self.exchange.rank, self.exchange.size, len(self.rows))
        return range(part.start, part.stop)

    def new_empty(self, width: int, dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised buffer for the results of all rows: [T, width]."""
        rows = self.rows.codes if isinstance(self.rows, Codes) else self.rows
        return rows.new_empty(len(rows), width, dtype=dtype)

    def whole(self) -> torch.Tensor:
        """All rows [T, M], after waiting for them; the next step overwrites them."""
        for _ in self.parts():
            pass
        assert isinstance(self.rows, torch.Tensor), "only matrix products take codes"
        return self.rows


def part_of(owner: int, size: int, num_rows: int) -> slice:
    """The rows that rank `owner` of `size` owns. Parts are equal, but the last ones may be shorter
    or empty.
    """
    length = -(-num_rows // (size * ROUND)) * ROUND
    return slice(min(owner * length, num_rows), min((owner + 1) * length, num_rows))


class BulkExchange:
    """The buffers, copies and flags of one rank.

    Its region holds a flag for each kind of arrival from each rank, partial results, and rows:

        flags [2, size] int64, up to 256 bytes | received [size, max_part, M] | rows [max_rows, M]

    Codes occupy at most half of the bytes of `rows`, and their scales begin at the half.

    Args:
        rank, size: number of this rank, and of ranks.
        device: torch.device of this rank, a GPU.
        max_rows: rows of the largest step.
        hidden_size: M, elements of a row.
        dtype: torch.dtype of the rows.
        abort, share: see `PeerRegion`.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        device: torch.device,
        max_rows: int,
        hidden_size: int,
        dtype: torch.dtype,
        abort: torch.Tensor,
        share: Share,
    ) -> None:
        self.rank, self.size, self._epoch = rank, size, 0
        self._order = [(rank + 1 + i) % size for i in range(size)]  # the other ranks, then this one
        max_part = self._part(0, max_rows).stop
        num_rows = size * max_part + max_rows
        flag_bytes = cdiv(2 * size * FLAG_BYTES, ALIGNMENT) * ALIGNMENT
        num_bytes = flag_bytes + num_rows * hidden_size * dtype.itemsize
        self.region = PeerRegion(rank, device, num_bytes, 0, abort, share)
        rows = self.region.words[flag_bytes // FLAG_BYTES :].view(dtype).view(-1, hidden_size)
        # [size, max_part, M]: all ranks' results for our part, ours among them.
        self._received = rows[: size * max_part].view(size, max_part, hidden_size)
        self._rows = rows[size * max_part :]  # [max_rows, M]
        self._codes: Codes | None = None  # views of `_rows`, in the form last asked for
        self._outgoing = torch.empty_like(self._received)  # our results for the others' parts
        # One stream per peer, so that copies overlap; with priority, so that setting a flag does
        # not queue after the programs of a product.
        self._copies = {peer: torch.cuda.Stream(device, priority=-1) for peer in self._order[:-1]}

    @property
    def outgoing_bytes(self) -> int:
        """Bytes of GPU memory beside the region."""
        return self._outgoing.nbytes

    def _part(self, owner: int, num_rows: int) -> slice:
        return part_of(owner, self.size, num_rows)

    def scatter(self, num_rows: int, compute: Callable[[slice, torch.Tensor], object]) -> Scattered:
        """Compute this rank's results for all rows, and send to each owner those of its part.

        Args:
            num_rows: T, rows of the step.
            compute: function that writes the results for a slice of the rows into a tensor [n, M].
        """
        self._epoch += 1
        for owner in self._order:
            rows = self._part(owner, num_rows)
            buffer = self._received[owner] if owner == self.rank else self._outgoing[owner]
            out = buffer[: rows.stop - rows.start]
            if len(out):
                compute(rows, out)
            if owner != self.rank:
                self._push([(out, self._received[self.rank])], owner, 0)
        self._wait(0, [peer for peer in self._order if peer != self.rank], self._epoch)
        own = self._part(self.rank, num_rows)
        return Scattered(self._received[:, : own.stop - own.start], num_rows, self)

    def _all_rows(self, num_rows: int, act_block: int | None) -> torch.Tensor | Codes:
        """The buffer for the normalised rows of all ranks."""
        if act_block is None:
            return self._rows[:num_rows]
        M = self._rows.shape[1]
        width, made = act_block or M, self._codes
        if made is None or (len(made), made.block[1]) != (num_rows, width):
            data = self._rows.view(torch.uint8).view(2, -1)
            codes, scales = data[0].view(FP8), data[1].view(torch.float32)
            scales = scales[: num_rows * cdiv(M, width)].view(num_rows, -1)
            made = self._codes = Codes(codes[: num_rows * M].view(num_rows, M), scales, (1, width))
        return made

    def own_rows(self, num_rows: int, act_block: int | None = None) -> torch.Tensor | Codes:
        """The buffer [n, M] for this rank's normalised rows, to be filled before `gather`. With an
        `act_block`, it holds codes with a scale per `act_block` values of a row (0: per row); None:
        values.
        """
        return self._all_rows(num_rows, act_block)[self._part(self.rank, num_rows)]

    def gather(self, num_rows: int, act_block: int | None = None) -> Gathered:
        """Send this rank's normalised rows to all others."""
        own = self.own_rows(num_rows, act_block)
        parts = [own.codes, own.scales] if isinstance(own, Codes) else [own]
        for peer in self._order[:-1]:
            self._push([(part, part) for part in parts], peer, 1)
        return Gathered(self._all_rows(num_rows, act_block), self._epoch, self)

    def arrivals(self, num_rows: int, epoch: int) -> Iterator[slice]:
        """The non-empty parts of `num_rows` gathered rows, each after its arrival: this rank's
        first, then in the order in which the others send theirs.
        """
        for owner in reversed(self._order):
            if owner != self.rank:
                self._wait(1, [owner], epoch)
            part = self._part(owner, num_rows)
            if part.start < part.stop:
                yield part

    def _wait(self, kind: int, peers: list[int], epoch: int) -> None:
        from nanovllm.kernels.all_reduce import wait_for

        flags = self.region.addresses[self.rank]
        for peer in peers:
            flag = flags + FLAG_BYTES * (kind * self.size + peer)
            wait_for(flag, epoch, self.region.abort_address)

    def _push(self, tensors: list[tuple[torch.Tensor, torch.Tensor]], peer: int, kind: int) -> None:
        """Copy each first tensor of a pair to the peer's counterpart of the second, which lies in
        our region, and then set the peer's flag, concurrently with our kernels.
        """
        from nanovllm.kernels.all_reduce import signal

        copies = self._copies[peer]
        copies.wait_stream(torch.cuda.current_stream())
        theirs, ours = self.region.addresses[peer], self.region.addresses[self.rank]
        with torch.cuda.stream(copies):
            for source, place in tensors:
                if len(source):  # the last parts of a small step may be empty
                    self.region.call(
                        "cuMemcpyDtoDAsync_v2",
                        ctypes.c_uint64(theirs + place.data_ptr() - ours),
                        ctypes.c_uint64(source.data_ptr()),
                        ctypes.c_size_t(source.nbytes),
                        ctypes.c_void_p(copies.cuda_stream),
                    )
            signal(theirs + FLAG_BYTES * (kind * self.size + self.rank), self._epoch)
