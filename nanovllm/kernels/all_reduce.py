"""Sums over the GPUs of a model, inside kernels: of a row-parallel product in the norm after it.

Each program exchanges one row, or one word: it writes its own into the memory of the other ranks
(`PeerMemory`; a word into its own, too), and polls its own memory until theirs have arrived. With
many rows, each row has an owner, one of the ranks, which adds it up and sends the sum to the
others.

The data is its own flag, as in the "Lamport" all-reduce of TensorRT-LLM. A slot holds EMPTY (all
bits set) until a row arrives; the reader polls until no element is EMPTY, then writes EMPTY back.
Elements may arrive in any order, since each arrives whole: no fence and no separate flag are
needed.

Calls alternate between two buffers. One buffer could be overwritten before it is read: a rank may
be one call ahead of another. It cannot be two ahead, because each call waits for every rank's row,
or for a sum that contains it.

Every rank must make the same calls in the same order, and a kernel must call `device_features.wait`
before it exchanges. Polling programs occupy the GPU without deadlock: a GPU starts the programs of
a grid in order, so the lowest row that some rank has not finished has started on all of them.
"""

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from nanovllm.distributed.peer_memory import PeerMemory


EMPTY = tl.constexpr(-1)
# Polls between two checks whether the group was aborted: of a word in the GPU's memory (0.7 ms) and
# of one in the host's (46 ms). All programs of a waiting kernel check at once, which seems to take
# 1 ms for the host's: with checks every 0.7 ms, ranks delayed each other alternately, and a step
# took 80 ms more (docs/experiments.md, 44).
POLLS, POLLS_OF_HOST = tl.constexpr(1 << 10), tl.constexpr(1 << 16)
TWO_SHOT_MIN_BYTES = 1 << 18  # saved by sending to owners, to make up for a second round trip


def peer_options(peers: "PeerMemory | None", x: torch.Tensor) -> dict[str, Any]:
    """Keyword arguments of a kernel that exchanges with `peers`. Without peers (None) the kernel
    reads none of the pointers, and x takes their place.
    """
    if peers is None:
        return {"peers_ptr": x, "epochs_ptr": x, "ROW_BYTES": 0, "ROWS": 0, "RANK": 0, "SIZE": 1}
    return {
        "peers_ptr": peers.addresses,
        "epochs_ptr": peers.epochs,
        "ROW_BYTES": peers.row_bytes,
        "ROWS": peers.max_rows,
        "RANK": peers.rank,
        "SIZE": peers.size,
    }


def sums_by_owner(peers: "PeerMemory | None", num_rows: int) -> bool:
    """Whether each row should be summed by one rank, its owner (see `all_reduce_row`): that pays if
    the bytes saved take longer than the second trip. (Four GPUs: from 22 rows of 8 KiB on. Two:
    never. Measured on three and four.)
    """
    if peers is None:
        return False
    N = peers.size  # a rank sends N - 1 rows for each row, or with owners 2 (N - 1) / N
    return num_rows * peers.row_bytes * (N - 1) * (N - 2) >= TWO_SHOT_MIN_BYTES * N


@triton.jit
def _place(
    peers_ptr, rank, giver, row, epoch, dtype: tl.constexpr,
    ROW_BYTES: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """The address of `giver`'s row in the memory of `rank`, in the buffer of call `epoch`."""
    offset = (((epoch & 1) * SIZE + giver) * ROWS + row) * ROW_BYTES
    address = tl.load(peers_ptr + rank) + offset
    return tl.multiple_of(address.to(tl.pointer_type(dtype)), 16)


@triton.jit
def _is_aborted(peers_ptr, polls, SIZE: tl.constexpr):
    """Whether the group has been aborted. The first program that sees it in the host's memory,
    which is slow to read, writes it to the GPU's, for all later waits.
    """
    seen_ptr = tl.load(peers_ptr + SIZE + 1).to(tl.pointer_type(tl.int64))
    aborted = tl.load(seen_ptr, volatile=True) != 0
    if polls % POLLS_OF_HOST == 0:
        abort_ptr = tl.load(peers_ptr + SIZE).to(tl.pointer_type(tl.int64))
        aborted |= tl.load(abort_ptr, volatile=True) != 0
        tl.store(seen_ptr, 1, mask=aborted)
    return aborted.to(tl.int32)


@triton.jit
def _bits(x):
    """The bits of x as integers, never EMPTY."""
    BITS: tl.constexpr = tl.int16 if x.dtype.primitive_bitwidth == 16 else tl.int32
    # EMPTY is one of the many NaNs: every NaN (x != x) becomes another one.
    return tl.where(x == x, x, float("nan")).to(BITS, bitcast=True)  # noqa: PLR0124


@triton.jit
def _take(ptrs, wanted, peers_ptr, SIZE: tl.constexpr):
    """Poll until every wanted element has arrived; return them, and write EMPTY back."""
    given = tl.load(ptrs, mask=wanted, other=0, volatile=True)
    polls = 0
    aborted = 0
    while tl.max((given == EMPTY).to(tl.int32) - aborted) > 0:
        given = tl.load(ptrs, mask=wanted, other=0, volatile=True)
        polls += 1
        if polls % POLLS == 0:
            aborted = _is_aborted(peers_ptr, polls, SIZE)
    tl.debug_barrier()  # every thread has read
    tl.store(ptrs, tl.full(given.shape, EMPTY, given.dtype), mask=wanted)
    return given


@triton.jit
def _take_sum(
    own, places, dtype: tl.constexpr, cols, mask, peers_ptr,
    ROW_BYTES: tl.constexpr, ROWS: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Receive a row from each other rank (rank 0's slot is at `places`), and add them to this
    rank's `own` in float32, in the order of ranks, so that sums are the same on all.
    """
    # A few rows at a time: all would not fit the registers.
    AT_ONCE: tl.constexpr = 2 if SIZE == 2 or cols.shape[0] > 4096 else 4
    stride = ROWS * ROW_BYTES // (dtype.primitive_bitwidth // 8)
    total = tl.zeros(cols.shape, tl.float32)
    for first in range(0, SIZE, AT_ONCE):
        giver = first + tl.arange(0, AT_ONCE)[:, None]
        wanted = (giver < SIZE) & (giver != RANK) & mask[None, :]
        given = _take(places + giver * stride + cols[None, :], wanted, peers_ptr, SIZE)
        given = tl.where(giver == RANK, own[None, :], given)
        total += tl.sum(given.to(dtype, bitcast=True).to(tl.float32), 0)
    return total.to(dtype)


@triton.jit
def _give_row(
    bits, to, peers_ptr, row, epoch, cols, mask,
    ROW_BYTES: tl.constexpr, ROWS: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Write a row to the memory of rank `to`."""
    place = _place(peers_ptr, to, RANK, row, epoch, bits.dtype, ROW_BYTES, ROWS, SIZE)
    tl.store(place + cols, bits, mask=mask)


@triton.jit
def _give_others(
    bits, peers_ptr, row, epoch, cols, mask,
    ROW_BYTES: tl.constexpr, ROWS: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    for to in tl.static_range(SIZE):
        if to != RANK:
            _give_row(bits, to, peers_ptr, row, epoch, cols, mask, ROW_BYTES, ROWS, RANK, SIZE)


@triton.jit
def all_reduce_row(
    x, peers_ptr, epochs_ptr, row, cols, mask, BY_OWNER: tl.constexpr,
    ROW_BYTES: tl.constexpr, ROWS: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """The sum over the ranks of x: [BLOCK], 0 beyond the mask, in x's dtype, the same on all.

    Each rank sends its row to the others and adds those that it receives ("one-shot"). With
    BY_OWNER it sends the row to the owner, which adds and sends the sum back ("two-shot"): two
    trips, but less data.

    BLOCK must be at least the program's number of threads, so that no two threads poll, and then
    empty, the same element.
    """
    epoch = tl.load(epochs_ptr + row)
    bits = _bits(x)
    places = _place(peers_ptr, RANK, 0, row, epoch, bits.dtype, ROW_BYTES, ROWS, SIZE)
    if BY_OWNER:
        owner = row % SIZE
        if owner == RANK:
            bits = _bits(
                _take_sum(bits, places, x.dtype, cols, mask, peers_ptr, ROW_BYTES, ROWS, RANK, SIZE)
            )
            _give_others(bits, peers_ptr, row, epoch, cols, mask, ROW_BYTES, ROWS, RANK, SIZE)
        else:
            _give_row(bits, owner, peers_ptr, row, epoch, cols, mask, ROW_BYTES, ROWS, RANK, SIZE)
            place = _place(peers_ptr, RANK, owner, row, epoch, bits.dtype, ROW_BYTES, ROWS, SIZE)
            bits = _take(place + cols, mask, peers_ptr, SIZE)
        total = bits.to(x.dtype, bitcast=True)
    else:
        _give_others(bits, peers_ptr, row, epoch, cols, mask, ROW_BYTES, ROWS, RANK, SIZE)
        total = _take_sum(bits, places, x.dtype, cols, mask, peers_ptr, ROW_BYTES, ROWS, RANK, SIZE)
    tl.store(epochs_ptr + row, epoch + 1)
    return total


@triton.jit
def give_word(
    word, peers_ptr, row, epoch,
    ROW_BYTES: tl.constexpr, ROWS: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Send all ranks an int64 that is not -1, in the slot of a row."""
    for rank in tl.static_range(SIZE):
        place = _place(peers_ptr, rank, RANK, row, epoch, tl.int64, ROW_BYTES, ROWS, SIZE)
        tl.store(place, word)


@triton.jit
def given_word(
    peers_ptr, giver, row, epoch,
    ROW_BYTES: tl.constexpr, ROWS: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Receive the word that a rank sends by `give_word`."""
    place = _place(peers_ptr, RANK, giver, row, epoch, tl.int64, ROW_BYTES, ROWS, SIZE)
    word = tl.load(place, volatile=True)
    polls = 0
    aborted = 0
    while (word == EMPTY) & (aborted == 0):
        word = tl.load(place, volatile=True)
        polls += 1
        if polls % POLLS == 0:
            aborted = _is_aborted(peers_ptr, polls, SIZE)
    tl.debug_barrier()  # every thread has read
    tl.store(place, EMPTY)
    return word


@triton.jit
def _wait_flag(flag_ptr, epoch, abort_ptr):
    """Wait until a flag has reached `epoch`, or the word at `abort_ptr` is set."""
    polls = 0
    seen = tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys")
    while seen < epoch:
        seen = tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys")
        polls += 1
        if polls % POLLS == 0:  # only one program checks: that delays no rank
            seen = tl.where(tl.load(abort_ptr, volatile=True) != 0, epoch, seen)


@triton.jit
def _pointer(address):
    # Triton passes small integers as int32, so the cast to int64 comes first.
    return address.to(tl.int64).to(tl.pointer_type(tl.int64))


@triton.jit(do_not_specialize=["address", "epoch"])
def _signal_kernel(address, epoch):
    flag_ptr = _pointer(address)
    tl.atomic_xchg(flag_ptr, epoch.to(tl.int64), sem="release", scope="sys")


def signal(address: int, epoch: int) -> None:
    """Set the flag at `address`, in the memory of any GPU, after the work launched so far."""
    _signal_kernel[(1,)](address, epoch, num_warps=1)


@triton.jit(do_not_specialize=["flag", "abort", "epoch"])
def _wait_kernel(flag, abort, epoch):
    _wait_flag(_pointer(flag), epoch.to(tl.int64), _pointer(abort))


def wait_for(flag: int, epoch: int, abort: int) -> None:
    """Make the work launched next wait until the flag at address `flag` has reached `epoch`, or the
    word at address `abort` is set.
    """
    _wait_kernel[(1,)](flag, abort, epoch, num_warps=1)
