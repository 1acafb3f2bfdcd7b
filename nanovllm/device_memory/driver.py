"""The CUDA driver: memory that other processes open, for which PyTorch has no stable interface."""

import ctypes
import functools
from typing import Any

import torch

HANDLE_BYTES = 64  # of CUipcMemHandle
OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY


class Raw:
    """Device memory at an address, as `torch.as_tensor` accepts it: int64 words."""

    def __init__(self, address: int, num_words: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_words,), "typestr": "<i8", "data": (address, False), "version": 3
        }  # fmt: skip


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_byte * HANDLE_BYTES)]


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def call(name: str, *args: object, remedy: str = "") -> None:
    """Call a function of the driver, in PyTorch's context, which must be current.

    Args:
        name: name of the function.
        args: its arguments, of ctypes.
        remedy: remedy for an error.

    Raises:
        RuntimeError: if it fails; torch.OutOfMemoryError for want of memory.
    """
    result = getattr(_driver(), name)(*args)
    if result:
        message = ctypes.c_char_p()
        _driver().cuGetErrorString(result, ctypes.byref(message))
        reason = (message.value or b"unknown error").decode()
        error = torch.OutOfMemoryError if result == OUT_OF_MEMORY else RuntimeError
        raise error(f"{name}: {reason}{remedy and '; ' + remedy}")


def allocate(num_bytes: int, remedy: str = "") -> int:
    """Allocate memory on the current device. Returns its address."""
    address = ctypes.c_uint64()
    call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(num_bytes), remedy=remedy)
    return address.value


def free(address: int) -> None:
    """Free memory that `allocate` has given."""
    call("cuMemFree_v2", ctypes.c_uint64(address))


def export(address: int, remedy: str = "") -> bytes:
    """The handle by which other processes open memory that `allocate` has given."""
    handle = _Handle()
    call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address), remedy=remedy)
    return bytes(handle)


def open_memory(handle: bytes, remedy: str = "") -> int:
    """Open another process's memory, on any device that the current one can reach. Returns its
    address here.
    """
    address, found = ctypes.c_uint64(), _Handle.from_buffer_copy(handle)
    lazy_enable_peer_access = 1
    call(
        "cuIpcOpenMemHandle_v2",
        ctypes.byref(address),
        found,
        lazy_enable_peer_access,
        remedy=remedy,
    )
    return address.value


def close_memory(address: int) -> None:
    """Close memory that was opened."""
    call("cuIpcCloseMemHandle", ctypes.c_uint64(address))


def as_tensor(address: int, num_bytes: int, device: torch.device) -> torch.Tensor:
    """A tensor of bytes at an address, which does not own them; `num_bytes` is a multiple of 8."""
    words: Any = torch.as_tensor(Raw(address, num_bytes // 8), device=device)
    return words.view(torch.uint8)


# -- addresses that stay while their memory goes ---------------------------------------------------

_PINNED, _ON_DEVICE, _READ_AND_WRITE = 1, 1, 3  # of CUmemAllocationType and so on


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]  # CUmemLocation


class _Properties(ctypes.Structure):
    _fields_ = [  # CUmemAllocationProp
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]


class _Access(ctypes.Structure):
    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]  # CUmemAccessDesc


class ReservedMemory:
    """Addresses of a device, and memory at them that can be given back and taken again (the
    driver's virtual memory management).

    Args:
        num_bytes: size in bytes, rounded up to what the driver divides memory into.
        index: index of the device, which must be the current one.

    Attributes:
        address: first address.
        num_bytes: size in bytes.
    """

    def __init__(self, num_bytes: int, index: int) -> None:
        location = _Location(_ON_DEVICE, index)
        self._properties = _Properties(type=_PINNED, location=location)
        self._access = _Access(location, _READ_AND_WRITE)
        unit, address, recommended = ctypes.c_size_t(), ctypes.c_uint64(), 1
        call(
            "cuMemGetAllocationGranularity",
            ctypes.byref(unit),
            ctypes.byref(self._properties),
            recommended,
        )
        self.num_bytes = -(-num_bytes // unit.value) * unit.value
        size, any_address = ctypes.c_size_t(self.num_bytes), ctypes.c_uint64(0)
        no_alignment, no_flags = ctypes.c_size_t(0), ctypes.c_ulonglong(0)
        call(
            "cuMemAddressReserve",
            ctypes.byref(address),
            size,
            no_alignment,
            any_address,
            no_flags,
        )
        self.address, self._index, self._is_mapped = address.value, index, False

    def take(self) -> None:
        """Have memory at the addresses, of arbitrary contents.

        Raises:
            torch.OutOfMemoryError: if the device has none left.
        """
        handle, size, start = ctypes.c_uint64(), ctypes.c_size_t(self.num_bytes), self._start
        none, offset = ctypes.c_ulonglong(0), ctypes.c_size_t(0)
        call("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(self._properties), none)
        try:
            call("cuMemMap", start, size, offset, handle, none)
        finally:
            call("cuMemRelease", handle)  # it stays while it is mapped
        self._is_mapped = True
        call("cuMemSetAccess", start, size, ctypes.byref(self._access), ctypes.c_size_t(1))

    def give_back(self) -> None:
        """Have no memory at the addresses. Nothing on the device may use it any more."""
        call("cuMemUnmap", self._start, ctypes.c_size_t(self.num_bytes))
        self._is_mapped = False

    def close(self) -> None:
        """Give up the addresses, and the memory at them."""
        with torch.cuda.device(self._index):
            torch.cuda.synchronize()
            if self._is_mapped:
                self.give_back()
            call("cuMemAddressFree", self._start, ctypes.c_size_t(self.num_bytes))

    @property
    def _start(self) -> ctypes.c_uint64:
        return ctypes.c_uint64(self.address)
