"""Exchange between the GPUs of a model, inside kernels.

One program exchanges one row: it pushes its own into the memory of the others (`PeerMemory`), tells
them by a flag, and waits for theirs. Rows have counters of their own, so programs do not wait for
each other, and there are two buffers that the calls take in turn: a rank can be a call ahead of
another, not two, since it waits for the other's flag in every call.

Every rank must make the same calls in the same order, and a kernel must wait for its predecessor
(`hopper.wait`) before it exchanges. Programs that wait keep their place on the GPU, which is no
deadlock: a GPU starts programs in the order of the grid, so the lowest row that some rank has not
finished is running, or has run, on all.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from nanovllm.distributed.peer_memory import PeerMemory


def peer_options(peers: PeerMemory | None, x: torch.Tensor) -> dict[str, Any]:
    """Keyword arguments of a kernel that pushes rows of the dtype of x; `peers` None: to nobody."""
    if peers is None:
        return {"peers_ptr": x, "epochs_ptr": x, "WIDTH": 0, "ROWS": 0, "RANK": 0, "SIZE": 1}
    return {
        "peers_ptr": peers.addresses,
        "epochs_ptr": peers.epochs,
        "WIDTH": peers.row_bytes // x.itemsize,
        "ROWS": peers.max_rows,
        "RANK": peers.rank,
        "SIZE": peers.size,
    }


@triton.jit
def _flags(peers_ptr, rank):
    return tl.load(peers_ptr + rank).to(tl.pointer_type(tl.int64))


@triton.jit
def _data(peers_ptr, rank, dtype: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr):
    address = tl.load(peers_ptr + rank) + 8 * ROWS * SIZE
    return tl.multiple_of(address.to(tl.pointer_type(dtype)), 16)


@triton.jit
def wait_flag(flag_ptr, epoch, abort_ptr):
    """Wait until a flag has reached `epoch`, or the word at `abort_ptr` is set.

    That word is in the host's memory, so it is looked at seldom.
    """
    polls = 0
    seen = tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys")
    while seen < epoch:
        seen = tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys")
        polls += 1
        if polls % 1024 == 0:
            seen = tl.where(tl.load(abort_ptr, volatile=True) != 0, epoch, seen)


@triton.jit
def push_row(
    x, peers_ptr, row, epoch, cols, mask,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Give x: [BLOCK] to all other ranks, and wait until theirs has come.

    WIDTH is the length of a row of the memory in elements of x.
    """
    offset = (((epoch & 1) * SIZE + RANK) * ROWS + row) * WIDTH
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            tl.store(_data(peers_ptr, peer, x.dtype, ROWS, SIZE) + offset + cols, x, mask=mask)
    tl.debug_barrier()  # all of the row, before the flag
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            flag_ptr = _flags(peers_ptr, peer) + row * SIZE + RANK
            tl.atomic_xchg(flag_ptr, epoch, sem="release", scope="sys")
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            wait_flag(_flags(peers_ptr, RANK) + row * SIZE + peer, epoch, _flags(peers_ptr, SIZE))
    tl.debug_barrier()


@triton.jit
def pushed_row(
    peers_ptr, peer, row, epoch, cols, mask, dtype: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """What `peer` has given to this rank: [BLOCK]."""
    offset = (((epoch & 1) * SIZE + peer) * ROWS + row) * WIDTH
    ptrs = _data(peers_ptr, RANK, dtype, ROWS, SIZE) + offset + cols
    return tl.load(ptrs, mask=mask, other=0, cache_modifier=".cg")


@triton.jit
def all_reduce_row(
    x, peers_ptr, epochs_ptr, row, cols, mask,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """The sum over ranks of x: [BLOCK], in float32 and in the order of the ranks."""
    epoch = tl.load(epochs_ptr + row) + 1
    push_row(x, peers_ptr, row, epoch, cols, mask, WIDTH, ROWS, RANK, SIZE)
    total = tl.zeros(x.shape, tl.float32)
    for peer in tl.static_range(SIZE):
        if peer == RANK:
            total += x.to(tl.float32)
        else:
            total += pushed_row(
                peers_ptr, peer, row, epoch, cols, mask, x.dtype, WIDTH, ROWS, RANK, SIZE
            ).to(tl.float32)
    tl.store(epochs_ptr + row, epoch)
    return total


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
    wait_flag(_pointer(flag), epoch.to(tl.int64), _pointer(abort))


def wait_for(flag: int, epoch: int, abort: int) -> None:
    """Let what is launched next wait until the flag at an address has reached `epoch`, or the word
    at address `abort` is set.
    """
    _wait_kernel[(1,)](flag, abort, epoch, num_warps=1)
