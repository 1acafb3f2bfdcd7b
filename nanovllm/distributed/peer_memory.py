"""`PeerMemory`: a piece of memory on each GPU that the kernels of all ranks can write.

It is allocated and opened through the CUDA driver (`cuIpcGetMemHandle`, `cuIpcOpenMemHandle`),
because PyTorch has no stable interface for it, and leaves nothing behind: the driver frees it with
the process.
"""

import ctypes
from collections.abc import Callable

import torch

ABORTED = 1 << 62  # larger than any epoch: kernels that wait see it and go on


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_byte * 64)]  # CUipcMemHandle


def _check(driver: ctypes.CDLL, result: int) -> None:
    if result:
        message = ctypes.c_char_p()
        driver.cuGetErrorString(result, ctypes.byref(message))
        raise RuntimeError(f"CUDA driver: {(message.value or b'unknown error').decode()}")


class _Raw:
    """Device memory at an address, for `torch.as_tensor`."""

    def __init__(self, address: int, num_words: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_words,), "typestr": "<i8", "data": (address, False), "version": 3
        }  # fmt: skip


class PeerMemory:
    """Memory of `max_rows` rows that each rank can push to each other.

    A rank's region holds flags, then two buffers that calls take in turn:

        flags [max_rows, size] int64 | data [2, size, max_rows, row_bytes]

    A program of a kernel exchanges one row (`kernels/peers.py`): it writes its row into the others'
    data, then the number of the call, the epoch, into their flags, and waits for theirs.

    Args:
        rank, size: which of how many ranks this is.
        device: its GPU.
        max_rows: rows of the largest exchange.
        row_bytes: bytes of a row, a multiple of 16.
        share: gives all ranks' values for this rank's: handle -> handles by rank.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        device: torch.device,
        max_rows: int,
        row_bytes: int,
        share: Callable[[bytes], list[bytes]],
    ) -> None:
        self.rank, self.size, self.max_rows, self.row_bytes = rank, size, max_rows, row_bytes
        num_flags = max_rows * size
        num_bytes = 8 * num_flags + 2 * size * max_rows * row_bytes
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._own, self._opened = ctypes.c_uint64(), []
        torch.cuda.synchronize(device)  # the driver's calls need PyTorch's context
        self._call("cuMemAlloc_v2", ctypes.byref(self._own), ctypes.c_size_t(num_bytes))
        self._call("cuMemsetD8_v2", self._own, ctypes.c_ubyte(0), ctypes.c_size_t(num_bytes))
        torch.cuda.synchronize(device)
        handle = _Handle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), self._own)
        addresses = []
        for peer, data in enumerate(share(bytes(handle))):
            address = self._own
            if peer != rank:
                address = ctypes.c_uint64()
                peer_handle = _Handle.from_buffer_copy(data)
                # 1: CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
                self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), peer_handle, 1)
                self._opened.append(address)
            addresses.append(address.value)
        self._flags = torch.as_tensor(_Raw(addresses[rank], num_flags), device=device)
        # [size] int64, where each rank's region begins in our address space.
        self.addresses = torch.tensor(addresses, dtype=torch.int64, device=device)
        # [max_rows] int64, calls so far in which each row was exchanged.
        self.epochs = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._aborted = torch.full((num_flags,), ABORTED, dtype=torch.int64).pin_memory()
        self._stream = torch.cuda.Stream(device)

    def _call(self, name: str, *args: object) -> None:
        _check(self._driver, getattr(self._driver, name)(*args))

    def abort(self) -> None:
        """End our kernels' waiting for the others, from any thread. What they compute is void."""
        with torch.cuda.device(self._stream.device), torch.cuda.stream(self._stream):
            self._flags.copy_(self._aborted, non_blocking=True)  # by DMA: all SMs may be waiting
        self._stream.synchronize()

    def close(self) -> None:
        """Free it. Nobody may use it any more."""
        for address in self._opened:
            self._call("cuIpcCloseMemHandle", address)
        self._call("cuMemFree_v2", self._own)
        self._opened = []
