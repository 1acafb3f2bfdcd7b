"""The CUDA driver: memory that other processes open, for which PyTorch has no stable interface."""

import ctypes
import functools
from typing import Any

import torch

HANDLE_BYTES = 64  # of CUipcMemHandle


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
        remedy: what to do about an error.

    Raises:
        RuntimeError: if it fails.
    """
    result = getattr(_driver(), name)(*args)
    if result:
        message = ctypes.c_char_p()
        _driver().cuGetErrorString(result, ctypes.byref(message))
        reason = (message.value or b"unknown error").decode()
        raise RuntimeError(f"{name}: {reason}{remedy and '; ' + remedy}")


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
