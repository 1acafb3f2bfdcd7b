"""Memory on each GPU that the other ranks can write: `PeerRegion`, and `PeerMemory` for kernels.

The memory is allocated and opened through the CUDA driver (`cuIpcGetMemHandle`,
`cuIpcOpenMemHandle`), because PyTorch has no stable interface for it. The driver frees it with the
process, so nothing remains.
"""

import ctypes
from collections.abc import Callable
from contextlib import ExitStack

import torch

from nanovllm.device_memory import driver
from nanovllm.utils.device import capturing, wait_for_device

REMEDY = "disable_custom_all_reduce=True does without it"
ALIGNMENT = 16  # bytes of a vector store: rows begin at multiples of it

Share = Callable[[bytes], list[bytes]]  # maps this rank's value to the values of all ranks


class PeerRegion:
    """A region on each GPU.

    Args:
        rank: number of this rank.
        device: torch.device of this rank, a GPU.
        num_bytes: size of the region in bytes, a multiple of 8.
        fill: initial value of its bytes.
        abort: [1] int64 in pinned memory; kernels stop waiting when it is not 0. The host sets it
            without the driver, which may itself be waiting for such a kernel.
        share: function through which ranks exchange the handles that open the regions.

    Attributes:
        words: [num_bytes / 8] int64, this rank's region.
        addresses: address of each rank's region in this process.
        abort_address: address of `abort` for kernels.
    """

    def __init__(
        self,
        rank: int,
        device: torch.device,
        num_bytes: int,
        fill: int,
        abort: torch.Tensor,
        share: Share,
    ) -> None:
        self._device = device
        self.num_bytes = num_bytes
        self._opened: list[int] = []
        with capturing:
            torch.cuda.synchronize(device)  # the driver's calls need PyTorch's context
            torch.cuda.empty_cache()  # and may need memory that PyTorch caches
        self._own = driver.allocate(num_bytes, REMEDY)
        start, size = ctypes.c_uint64(self._own), ctypes.c_size_t(num_bytes)
        self.call("cuMemsetD8_v2", start, ctypes.c_ubyte(fill), size)
        wait_for_device(device)
        try:
            own = driver.export(self._own, REMEDY)
            self.addresses = [
                self._own if peer == rank else self._open(handle)
                for peer, handle in enumerate(share(own))
            ]
        except BaseException:  # another rank may have died meanwhile
            self.close()
            raise
        self.words = torch.as_tensor(driver.Raw(self._own, num_bytes // 8), device=device)
        self.abort_address = abort.data_ptr()  # the same for host and GPU

    def _open(self, handle: bytes) -> int:
        self._opened.append(driver.open_memory(handle, REMEDY))
        return self._opened[-1]

    @staticmethod
    def call(name: str, *args: object) -> None:
        """Call a function of the driver. RuntimeError if it fails."""
        driver.call(name, *args, remedy=REMEDY)

    def close(self) -> None:
        """Free the region. No rank may use it any more."""
        with torch.cuda.device(self._device), ExitStack() as finally_:  # all of it, if parts fail
            finally_.callback(driver.free, self._own)
            for address in self._opened:
                finally_.callback(driver.close_memory, address)
            self._opened = []


class PeerMemory:
    """Memory for up to `max_rows` rows that each rank passes to each other rank, inside kernels.

    A rank's region holds two buffers, used by calls in alternation, for a row from each rank:

        [2, size, max_rows, row_bytes]

    Each program of a kernel exchanges one row (`kernels/all_reduce.py`): it writes its row, or a
    sum, into the ranks' regions, and polls its own. A slot whose row has not arrived has all bits
    set.

    Args:
        rank, size: number of this rank, and of ranks.
        device: torch.device of this rank, a GPU.
        max_rows: rows of the largest exchange.
        row_bytes: bytes of a row, a multiple of 16.
        abort, share: see `PeerRegion`.

    Attributes:
        addresses: [size + 2] int64, the addresses of each rank's region, of `abort`, and of a word
            in which the first kernel that sees `abort` tells later ones.
        epochs: [max_rows] int64, number of calls so far that exchanged each row.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        device: torch.device,
        max_rows: int,
        row_bytes: int,
        abort: torch.Tensor,
        share: Share,
    ) -> None:
        self.rank, self.size, self.max_rows, self.row_bytes = rank, size, max_rows, row_bytes
        num_bytes = 2 * size * max_rows * row_bytes
        self.region = PeerRegion(rank, device, num_bytes, 0xFF, abort, share)
        self._seen = torch.zeros(1, dtype=torch.int64, device=device)
        addresses = [*self.region.addresses, self.region.abort_address, self._seen.data_ptr()]
        self.addresses = torch.tensor(addresses, dtype=torch.int64, device=device)
        self.epochs = torch.zeros(max_rows, dtype=torch.int64, device=device)
