"""Exchange between the GPUs of a model, inside kernels.

One program exchanges one row, or one word: it pushes its own into the memory of all ranks
(`PeerMemory`), this one among them, and waits until theirs have come; where there are many rows,
one rank adds, another for each row, and the others wait for the sum. No flag says that something
has come, so nothing needs to be ordered before a flag: a place waits EMPTY, with all bits set, each
element arrives as a whole, in whatever order, and who has read them all leaves EMPTY behind. (The
data is its own flag in the "Lamport" all-reduce of TensorRT-LLM, too.)

There are two buffers that the calls take in turn: a rank can be a call ahead of another, not two,
since it waits in every call for the other's row, or for a sum that has it. So nobody writes where
another has yet to read, or to leave EMPTY.

Every rank must make the same calls in the same order, and a kernel must wait for its predecessor
(`hopper.wait`) before it exchanges. Programs that wait keep their place on the GPU, which is no
deadlock: a GPU starts programs in the order of the grid, so the lowest row that some rank has not
finished is running, or has run, on all.
"""

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from nanovllm.distributed.peer_memory import PeerMemory


EMPTY = tl.constexpr(-1)
WORTH_A_WAY = 1 << 18  # bytes that a rank need not give


def peer_options(peers: "PeerMemory | None", x: torch.Tensor) -> dict[str, Any]:
    """Keyword arguments of a kernel that exchanges with `peers`; None: with nobody, and x stands
    for the pointers.
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
    """Whether each row should be summed by one rank, its owner (see `all_reduce_row`): where what
    that saves takes longer than the second way. (Four GPUs: from 22 rows of 8 KiB on. Two: never.
    Measured on three and four.)
    """
    if peers is None:
        return False
    N = peers.size  # each rank gives N - 1 rows for each, or 2 (N - 1) / N
    return num_rows * peers.row_bytes * (N - 1) * (N - 2) >= WORTH_A_WAY * N


@triton.jit
def _place(
    peers_ptr, rank, giver, row, epoch, dtype: tl.constexpr,
    ROW_BYTES: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Where `giver`'s row lies in the memory of `rank`, in the buffer of a call."""
    offset = (((epoch & 1) * SIZE + giver) * ROWS + row) * ROW_BYTES
    address = tl.load(peers_ptr + rank) + offset
    return tl.multiple_of(address.to(tl.pointer_type(dtype)), 16)


@triton.jit
def _is_aborted(peers_ptr, SIZE: tl.constexpr):
    """Whether waiting is in vain. That word is in the host's memory, so it is looked at seldom."""
    abort_ptr = tl.load(peers_ptr + SIZE).to(tl.pointer_type(tl.int64))
    return (tl.load(abort_ptr, volatile=True) != 0).to(tl.int32)


@triton.jit
def _bits(x):
    """x, bit by bit, and never EMPTY."""
    BITS: tl.constexpr = tl.int16 if x.dtype.primitive_bitwidth == 16 else tl.int32
    # One NaN of many has all bits set. None of them equals itself.
    return tl.where(x == x, x, float("nan")).to(BITS, bitcast=True)  # noqa: PLR0124


@triton.jit
def _take(ptrs, wanted, peers_ptr, SIZE: tl.constexpr):
    """Wait until all that is wanted has come, take it, and leave EMPTY behind."""
    given = tl.load(ptrs, mask=wanted, other=0, volatile=True)
    polls = 0
    aborted = 0
    while tl.max((given == EMPTY).to(tl.int32) - aborted) > 0:
        given = tl.load(ptrs, mask=wanted, other=0, volatile=True)
        polls += 1
        if polls % 1024 == 0:
            aborted = _is_aborted(peers_ptr, SIZE)
    tl.debug_barrier()  # all have read
    tl.store(ptrs, tl.full(given.shape, EMPTY, given.dtype), mask=wanted)
    return given


@triton.jit
def _take_sum(
    places, dtype: tl.constexpr, cols, mask, peers_ptr,
    ROW_BYTES: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Take a row from each rank, at `places` and on, and add them in float32."""
    # A few rows at a time: more would not fit the registers.
    AT_ONCE: tl.constexpr = 2 if SIZE == 2 or cols.shape[0] > 4096 else 4
    stride = ROWS * ROW_BYTES // (dtype.primitive_bitwidth // 8)
    total = tl.zeros(cols.shape, tl.float32)
    for first in range(0, SIZE, AT_ONCE):
        giver = first + tl.arange(0, AT_ONCE)[:, None]
        ptrs = places + giver * stride + cols[None, :]
        given = _take(ptrs, (giver < SIZE) & mask[None, :], peers_ptr, SIZE)
        total += tl.sum(given.to(dtype, bitcast=True).to(tl.float32), 0)
    return total.to(dtype)


@triton.jit
def _give_row(
    bits, to, peers_ptr, row, epoch, cols, mask,
    ROW_BYTES: tl.constexpr, ROWS: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Push a row to the rank `to`."""
    place = _place(peers_ptr, to, RANK, row, epoch, bits.dtype, ROW_BYTES, ROWS, SIZE)
    tl.store(place + cols, bits, mask=mask)


@triton.jit
def all_reduce_row(
    x, peers_ptr, epochs_ptr, row, cols, mask, BY_OWNER: tl.constexpr,
    ROW_BYTES: tl.constexpr, ROWS: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """The sum over ranks of x: [BLOCK], in x's dtype, the same on all.

    Each rank gives its row to all, and adds what comes ("one-shot"); BY_OWNER it gives it to one,
    another for each row, which gives the sum to the others ("two-shot"): two ways, but less data.

    BLOCK is at least the program's number of threads: no element has two that wait for it.
    """
    epoch = tl.load(epochs_ptr + row)
    bits = _bits(x)
    places = _place(peers_ptr, RANK, 0, row, epoch, bits.dtype, ROW_BYTES, ROWS, SIZE)
    if BY_OWNER:
        owner = row % SIZE
        _give_row(bits, owner, peers_ptr, row, epoch, cols, mask, ROW_BYTES, ROWS, RANK, SIZE)
        if owner == RANK:
            bits = _bits(_take_sum(places, x.dtype, cols, mask, peers_ptr, ROW_BYTES, ROWS, SIZE))
            for to in tl.static_range(SIZE):
                if to != RANK:
                    _give_row(
                        bits, to, peers_ptr, row, epoch, cols, mask, ROW_BYTES, ROWS, RANK, SIZE
                    )
        else:
            place = _place(peers_ptr, RANK, owner, row, epoch, bits.dtype, ROW_BYTES, ROWS, SIZE)
            bits = _take(place + cols, mask, peers_ptr, SIZE)
        total = bits.to(x.dtype, bitcast=True)
    else:
        for to in tl.static_range(SIZE):
            _give_row(bits, to, peers_ptr, row, epoch, cols, mask, ROW_BYTES, ROWS, RANK, SIZE)
        total = _take_sum(places, x.dtype, cols, mask, peers_ptr, ROW_BYTES, ROWS, SIZE)
    tl.store(epochs_ptr + row, epoch + 1)
    return total


@triton.jit
def give_word(
    word, peers_ptr, row, epoch,
    ROW_BYTES: tl.constexpr, ROWS: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Give all ranks an int64 that is not -1, instead of a row."""
    for rank in tl.static_range(SIZE):
        place = _place(peers_ptr, rank, RANK, row, epoch, tl.int64, ROW_BYTES, ROWS, SIZE)
        tl.store(place, word)


@triton.jit
def given_word(
    peers_ptr, giver, row, epoch,
    ROW_BYTES: tl.constexpr, ROWS: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Wait for what a rank gives by `give_word`, and take it."""
    place = _place(peers_ptr, RANK, giver, row, epoch, tl.int64, ROW_BYTES, ROWS, SIZE)
    word = tl.load(place, volatile=True)
    polls = 0
    aborted = 0
    while (word == EMPTY) & (aborted == 0):
        word = tl.load(place, volatile=True)
        polls += 1
        if polls % 1024 == 0:
            aborted = _is_aborted(peers_ptr, SIZE)
    tl.debug_barrier()  # all threads have read
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
        if polls % 1024 == 0:
            seen = tl.where(tl.load(abort_ptr, volatile=True) != 0, epoch, seen)


@triton.jit
def _pointer(address):
    return address.to(tl.int64).to(tl.pointer_type(tl.int64))  # Triton takes low ones for int32


@triton.jit(do_not_specialize=["address", "epoch"])
def _signal_kernel(address, epoch):
    flag_ptr = _pointer(address)
    tl.atomic_xchg(flag_ptr, epoch.to(tl.int64), sem="release", scope="sys")


def signal(address: int, epoch: int) -> None:
    """Set the flag at an address, in any GPU's memory, once what was launched before has ended."""
    _signal_kernel[(1,)](address, epoch, num_warps=1)


@triton.jit(do_not_specialize=["flag", "abort", "epoch"])
def _wait_kernel(flag, abort, epoch):
    _wait_flag(_pointer(flag), epoch.to(tl.int64), _pointer(abort))


def wait_for(flag: int, epoch: int, abort: int) -> None:
    """Let what is launched next wait until the flag at an address has reached `epoch`, or the word
    at address `abort` is set.
    """
    _wait_kernel[(1,)](flag, abort, epoch, num_warps=1)
