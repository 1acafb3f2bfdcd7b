"""Pieces of memory whose contents go and come, at addresses that stay, as CUDA graphs know them.

On a GPU it is the driver's virtual memory, on a CPU an anonymous mapping.
"""

import mmap
import sys
import weakref

import torch

from nanovllm.device_memory import driver
from nanovllm.utils.device import wait_for_device


class Piece:
    """A piece of memory, which is there at first and all zero.

    Args:
        num_bytes: size in bytes.
        device: torch.device of the memory.

    Attributes:
        bytes: [num_bytes] uint8; not to be read or written between `give_back` and `take`.
        is_there: whether it has memory.

    Raises:
        MemoryError, OSError, torch.OutOfMemoryError: if there is no such memory.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.num_bytes, self._device = num_bytes, device
        if device.type == "cpu":
            # Physical pages come with the first use. Those of a shared mapping would never go.
            private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            self._mapping = mmap.mmap(-1, max(num_bytes, 1), flags=private)
            self.bytes = torch.frombuffer(self._mapping, dtype=torch.uint8)[:num_bytes]
            self.is_there = True
            return
        index = torch.cuda.current_device() if device.index is None else device.index
        with torch.cuda.device(device):
            wait_for_device(device)  # the driver's calls need PyTorch's context
            self._reserved = driver.ReservedMemory(num_bytes, index)
            finalizer = weakref.finalize(self, self._reserved.close)
            finalizer.atexit = False  # the driver frees all then
            self.is_there = False
            self.take()
            whole = driver.as_tensor(self._reserved.address, self._reserved.num_bytes, device)
            self.bytes = whole[:num_bytes]
        self.zero()

    def zero(self) -> None:
        """Fill it with zeros."""
        if self._device.type == "cuda":
            self.bytes.zero_()

    def give_back(self) -> None:
        """Have no memory. On a GPU nothing may use it any more."""
        if not self.is_there:
            return
        if self._device.type == "cpu":
            self._mapping.madvise(mmap.MADV_DONTNEED)  # the next use finds zeros
        else:
            with torch.cuda.device(self._device):
                self._reserved.give_back()
        self.is_there = False

    def take(self) -> None:
        """Have memory again, of arbitrary contents.

        Raises:
            torch.OutOfMemoryError: if there is none left.
        """
        if self.is_there:
            return
        if self._device.type == "cuda":
            with torch.cuda.device(self._device):
                self._reserved.take()
        self.is_there = True


def refusal(device: torch.device) -> str | None:
    """The reason why there are no such pieces on a device; None if there are."""
    if device.type == "cpu" and sys.platform != "linux":
        return f"needs Linux, not {sys.platform}"
    if torch.version.hip is not None:
        return "needs CUDA, not ROCm"
    return None
