"""`Parcel`: tensors packed into one buffer that other processes of this machine can open.

A buffer on a CPU is an anonymous file (memfd), found by the process and the descriptor that have it
open; on a GPU it is memory of the CUDA driver, found by its handle (CUDA IPC). So a parcel is plain
numbers, and nothing remains when its owner ends.
"""

import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import NamedTuple

import torch

from nanovllm.device_memory import driver
from nanovllm.tensors.source import DTYPES
from nanovllm.updates.ledger import Described, Piece
from nanovllm.utils.device import wait_for_device
from nanovllm.utils.integers import cdiv

PARCEL_BYTES = 256 << 20  # of tensors that travel together; a larger one travels alone
PAGE_BYTES = 2 << 20  # of a GPU; others take 9 ms a GB to open memory that is not whole pages
ALIGNMENT = 256  # bytes, at multiples of which tensors begin
TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}
NO_IPC = "pass the tensors on the CPU where processes cannot share a GPU's memory"

Named = tuple[str, torch.Tensor]


class HostMemory(NamedTuple):
    """An anonymous file.

    Attributes:
        pid, fd: process that has it open, and its descriptor there.
        inode: number of the file: the descriptor may become another's.
    """

    pid: int
    fd: int
    inode: int


class DeviceMemory(NamedTuple):
    """Memory of a GPU.

    Attributes:
        handle: bytes by which the CUDA driver finds it, `HANDLE_BYTES`.
    """

    handle: bytes


class Parcel(NamedTuple):
    """A buffer with tensors.

    Attributes:
        tensors: names, shapes and dtypes.
        begins: first byte of each tensor.
        num_bytes: size of the buffer.
        memory: place of its bytes.
        pieces: the model's tensors in each of them; empty: each is one, of its own name.
    """

    tensors: list[Described]
    begins: list[int]
    num_bytes: int
    memory: HostMemory | DeviceMemory
    pieces: Sequence[list[Piece]] = ()

    def views(self, buffer: torch.Tensor) -> Iterator[Named]:
        """The tensors in the buffer: [num_bytes] uint8."""
        own = self.pieces or [[Piece(described.name)] for described in self.tensors]
        for (_, shape, dtype_name), begin, pieces in zip(
            self.tensors, self.begins, own, strict=True
        ):
            dtype = TORCH_DTYPES[dtype_name]
            size = dtype.itemsize
            for n in shape:
                size *= n
            yield from in_pieces(buffer[begin : begin + size].view(dtype).view(shape), pieces)

    @contextmanager
    def opened(self, device: torch.device) -> Iterator[list[Named]]:
        """The tensors, from another process, until the end of the block.

        Args:
            device: torch.device of this process, for a buffer on a GPU.

        Raises:
            RuntimeError: if it cannot be opened here.
        """
        if isinstance(self.memory, HostMemory):
            yield list(self.views(_map(self.memory, self.num_bytes)))
            return
        if device.type != "cuda":
            raise RuntimeError(
                "the tensors are on a GPU, and this engine computes without one: share tensors on "
                "the CPU"
            )
        with torch.cuda.device(device):
            address = driver.open_memory(self.memory.handle, NO_IPC)
            try:
                yield list(self.views(driver.as_tensor(address, self.num_bytes, device)))
                wait_for_device(device)  # copies from it may still run
            finally:
                driver.close_memory(address)


def _map(memory: HostMemory, num_bytes: int) -> torch.Tensor:
    """Another process's anonymous file, or this one's, as bytes."""
    path, fd = f"/proc/{memory.pid}/fd/{memory.fd}", -1
    try:
        fd = os.open(path, os.O_RDONLY)
        if os.fstat(fd).st_ino != memory.inode:
            raise FileNotFoundError
        if os.fstat(fd).st_size < num_bytes:
            raise RuntimeError(
                f"{path} has fewer than {num_bytes} bytes: the message is not that of the process "
                "that shares the tensors"
            )
        private = mmap.mmap(fd, num_bytes, access=mmap.ACCESS_COPY)  # writable, for torch
    except OSError as error:
        raise RuntimeError(
            f"{path} cannot be opened ({error.strerror or 'it is another file now'}): the process "
            "that shares the tensors must be of the same user on this machine, and must not have "
            "ended the sharing"
        ) from None
    finally:
        if fd >= 0:
            os.close(fd)
    return torch.frombuffer(private, dtype=torch.uint8)


class Buffer:
    """Memory of this process that others can open.

    Args:
        num_bytes: size.
        device: torch.device of the memory.

    Attributes:
        memory: place of its bytes.
        bytes: [num_bytes] uint8
    """

    memory: HostMemory | DeviceMemory

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.num_bytes, self.device = num_bytes, device
        if device.type == "cpu":
            fd = os.memfd_create("nanovllm-parcel", os.MFD_CLOEXEC)
            self.memory = HostMemory(os.getpid(), fd, os.fstat(fd).st_ino)
            os.truncate(fd, num_bytes)
            self.bytes = torch.frombuffer(mmap.mmap(fd, num_bytes), dtype=torch.uint8)
            return
        with torch.cuda.device(device):
            wait_for_device(device)  # the driver's calls need PyTorch's context
            self._address = driver.allocate(cdiv(num_bytes, PAGE_BYTES) * PAGE_BYTES, NO_IPC)
            try:
                self.memory = DeviceMemory(driver.export(self._address, NO_IPC))
            except BaseException:
                driver.free(self._address)
                raise
            self.bytes = driver.as_tensor(self._address, num_bytes, device)

    def pack(self, tensors: list[Named]) -> Parcel:
        """Copy tensors into the buffer, which has room for them. Waits for the device."""
        described = [describe(name, tensor) for name, tensor in tensors]
        begins = begins_of(tensor.nbytes for _, tensor in tensors)
        parcel = Parcel(described, begins, self.num_bytes, self.memory)
        for (_, tensor), (_, place) in zip(tensors, parcel.views(self.bytes), strict=True):
            place.copy_(tensor)
        if self.device.type == "cuda":
            wait_for_device(self.device)
        return parcel

    def close(self) -> None:
        """Give the memory back. Those who have opened a buffer on a CPU keep it."""
        del self.bytes
        if isinstance(self.memory, HostMemory):
            os.close(self.memory.fd)
        else:
            with torch.cuda.device(self.device):
                driver.free(self._address)


def describe(name: str, tensor: torch.Tensor) -> Described:
    """A tensor's name, shape and dtype."""
    return Described(name, list(tensor.shape), DTYPES.get(tensor.dtype, str(tensor.dtype)))


def in_pieces(tensor: torch.Tensor, pieces: Iterable[Piece]) -> Iterator[Named]:
    """The model's tensors, with their names, that a tensor has: views."""
    for piece in pieces:
        part = tensor if piece.expert is None else tensor[piece.expert]
        if piece.half is not None:
            part = part.chunk(2)[piece.half]
        yield piece.name, part.mT if piece.is_transposed else part


def room_of(num_bytes: int) -> int:
    """Bytes that a tensor of so many takes of a buffer."""
    return cdiv(max(num_bytes, 1), ALIGNMENT) * ALIGNMENT


def begins_of(sizes: Iterable[int]) -> list[int]:
    """The first byte of each tensor in a buffer, by the bytes that each of them has."""
    return list(accumulate(map(room_of, sizes), initial=0))[:-1]


def parcels(
    tensors: Iterable[Named], num_bytes: int = PARCEL_BYTES
) -> Iterator[tuple[Parcel, list[Named]]]:
    """Pack tensors, in their order, into one parcel after another, of this size or of one tensor.
    Each is for its receivers until the next is asked for.

    Yields:
        A parcel for other processes, and its tensors for this one.
    """
    for some in _loads(tensors, num_bytes):
        buffer = Buffer(sum(room_of(tensor.nbytes) for _, tensor in some), some[0][1].device)
        try:
            parcel = buffer.pack(some)
            yield parcel, list(parcel.views(buffer.bytes))
        finally:
            buffer.close()


def _loads(tensors: Iterable[Named], num_bytes: int) -> Iterator[list[Named]]:
    """Group tensors of one device each, up to a size."""
    load: list[Named] = []
    size = 0
    for name, tensor in tensors:
        room = room_of(tensor.nbytes)
        fits = size + room <= num_bytes and load and load[0][1].device == tensor.device
        if load and not fits:
            yield load
            load, size = [], 0
        load.append((name, tensor))
        size += room
    if load:
        yield load
