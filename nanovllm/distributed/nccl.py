"""`Nccl`: collectives between GPUs, through NCCL's C interface.

PyTorch's binding (`ProcessGroupNCCL`) has the handle of a communicator only once all ranks are
connected. If one dies before, nothing ends the wait for it, or frees the memory of the connections
made so far. Here the handle is there from the beginning.

Source: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/api.html
"""

from __future__ import annotations

import ctypes
import functools
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

SUM = 0  # ncclRedOp_t
INT8 = 0  # ncclDataType_t
DATA_TYPES = {torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}
POLL_SECONDS = 0.001

ENVIRONMENT = {  # None: not set. NCCL reads the first two once per process
    "NCCL_RUNTIME_CONNECT": "0",  # connections take their memory before the KV cache is sized
    "NCCL_RAS_ENABLE": "0",  # would leave a thread and two ports
    "NCCL_COMM_ID": None,  # would let rank 0 wait for all, and engines on one host meet
    "NCCL_COMM_BLOCKING": None,
}

_connecting = threading.Lock()  # one at a time: the environment belongs to the whole process


class _UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * 128)]  # ncclUniqueId


@functools.cache
def _library() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL("libnccl.so.2")  # the one that PyTorch has loaded
    except OSError as error:
        raise RuntimeError(
            f"several GPUs need NCCL as a shared library ({error}): install PyTorch from PyPI"
        ) from error
    library.ncclGetErrorString.restype = ctypes.c_char_p
    library.ncclGetLastError.restype = ctypes.c_char_p
    return library


def _call(name: str, *args: object) -> None:
    """Call a function of NCCL. RuntimeError if it fails."""
    library = _library()
    result = getattr(library, name)(*args)
    if result:
        reason, detail = library.ncclGetErrorString(result), library.ncclGetLastError(None)
        raise RuntimeError(f"{name}: {reason.decode()} {detail.decode()}".rstrip())


@contextmanager
def _group() -> Iterator[None]:
    """Group calls to NCCL, so that they take effect together, at the end."""
    _call("ncclGroupStart")
    try:
        yield
    finally:
        _call("ncclGroupEnd")


def get_unique_id() -> bytes:
    """The id through which the ranks of a communicator meet.

    A thread of this process waits for them all. Nothing but the end of the process ends it earlier.
    """
    data = _UniqueId()
    with _environment():
        _call("ncclGetUniqueId", ctypes.byref(data))
    return bytes(data)


class Nccl:
    """A communicator of one GPU per rank. Collectives run on PyTorch's current stream.

    All methods raise RuntimeError if NCCL fails, and after `abort`.
    """

    def __init__(self, device: torch.device, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._device = device
        self._handle = ctypes.c_void_p()  # NCCL sets it as soon as it begins to connect
        self._calling = threading.Lock()  # held during a call
        self._is_aborted = False
        self._opened: set[int] = set()  # inodes of sockets that NCCL may have forgotten

    def connect(self, unique_id: bytes) -> None:
        """Meet the other ranks. Returns when all are there."""
        own_id = _UniqueId.from_buffer_copy(unique_id)
        size, rank = ctypes.c_int(self.size), ctypes.c_int(self.rank)
        on_device = torch.cuda.device(self._device)
        with _connecting, _environment(), _no_file_left(), on_device, self._one_call():
            before = {_inode(sock) for sock in _listening()}
            try:
                with _group():  # else NCCL drops the handle if it fails, and leaks its resources
                    _call("ncclCommInitRank", ctypes.byref(self._handle), size, own_id, rank)
            except BaseException:
                self._opened = {_inode(sock) for sock in _listening()} - before
                raise

    def all_reduce(self, x: torch.Tensor) -> None:
        """Replace x (float16, bfloat16 or float32) by its sum over the ranks."""
        count = ctypes.c_size_t(x.numel())
        self._collective("ncclAllReduce", x, x, count, DATA_TYPES[x.dtype], SUM)

    def all_gather(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """Write the ranks' x into out: [size, ...]."""
        self._collective("ncclAllGather", x, out, ctypes.c_size_t(x.nbytes), INT8)

    def broadcast(self, x: torch.Tensor) -> None:
        """Replace x by rank 0's."""
        root = 0
        self._collective("ncclBroadcast", x, x, ctypes.c_size_t(x.nbytes), INT8, root)

    def _collective(self, name: str, x: torch.Tensor, out: torch.Tensor, *args: object) -> None:
        assert x.is_contiguous() and out.is_contiguous(), "NCCL needs contiguous tensors"
        stream = torch.cuda.current_stream(self._device).cuda_stream
        addresses = ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(out.data_ptr())
        with self._one_call():
            _call(name, *addresses, *args, self._handle, ctypes.c_void_p(stream))

    @contextmanager
    def _one_call(self) -> Iterator[None]:
        with self._calling:
            if self._is_aborted:
                raise RuntimeError("NCCL is aborted")
            yield

    def abort(self) -> None:
        """End every wait for the other ranks, and free GPU memory and ports. From any thread, once.

        Returns when no kernel of NCCL runs any more and no CUDA graph contains one.
        """
        self._is_aborted = True
        while self._calling.locked() and not self._handle:  # it is about to be set
            time.sleep(POLL_SECONDS)
        try:
            if self._handle:
                with _group():  # NCCL frees at its end
                    _call("ncclCommAbort", self._handle)
                    with self._calling:  # by then the call of another thread has returned
                        pass
        finally:
            for sock in _listening():
                if _inode(sock) in self._opened:
                    with suppress(OSError):  # it is closed already
                        sock.shutdown(socket.SHUT_RDWR)


@contextmanager
def _environment() -> Iterator[None]:
    before = {name: os.environ.pop(name, None) for name in ENVIRONMENT}
    os.environ.update({name: value for name, value in ENVIRONMENT.items() if value is not None})
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@contextmanager
def _no_file_left() -> Iterator[None]:
    """Unlink the files that NCCL opens in /dev/shm: a crash would leave them there."""
    before = _files()
    try:
        yield
    finally:
        for path in _files() - before:
            with suppress(FileNotFoundError):  # another rank was first
                os.unlink(path)


def _files() -> set[str]:
    with open("/proc/self/maps", encoding="utf-8") as maps:
        paths = {line.split(maxsplit=5)[-1].rstrip("\n") for line in maps}
    return {path for path in paths if path.startswith("/dev/shm/nccl-") and os.path.exists(path)}


def _listening() -> Iterator[socket.socket]:
    """The sockets on which NCCL listens in this process, each valid during its iteration: TCP,
    without SO_REUSEADDR, which servers, stores and Gloo set.
    """
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed meanwhile
            if not os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                continue
            with socket.fromfd(int(fd), socket.AF_INET, socket.SOCK_STREAM) as sock:  # a duplicate
                domain, listens, reuses = (
                    sock.getsockopt(socket.SOL_SOCKET, option)
                    for option in (socket.SO_DOMAIN, socket.SO_ACCEPTCONN, socket.SO_REUSEADDR)
                )
                if domain in (socket.AF_INET, socket.AF_INET6) and listens and not reuses:
                    yield sock


def _inode(sock: socket.socket) -> int:
    return os.fstat(sock.fileno()).st_ino
