"""`Nccl` with a library in NCCL's place that takes arguments as NCCL's header says."""

import ctypes
import mmap
import os
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from ctypes import POINTER, c_int, c_size_t, c_void_p
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import distributed as dist

from faults import DEADLINE, listeners, wait_until
from nanovllm.distributed import nccl
from nanovllm.distributed.group import Group, LostContactError
from nanovllm.distributed.nccl import Nccl

DEVICE = torch.device("cuda", 1)
HANDLE, STREAM = 0x1234_5678_9ABC, 0x7777_0000_0001
ID = bytes(range(128))
BYTES = {0: 1, 6: 2, 7: 4, 9: 2}  # of ncclDataType_t
OK, INTERNAL_ERROR = 0, 3
MESSAGE, DETAIL = (ctypes.create_string_buffer(b) for b in (b"internal error", b"of the last call"))


OURS = {
    "NCCL_RUNTIME_CONNECT": "0",
    "NCCL_RAS_ENABLE": "0",
    "NCCL_COMM_ID": None,
    "NCCL_COMM_BLOCKING": None,
}
THEIRS = {**OURS, "NCCL_RUNTIME_CONNECT": "1", "NCCL_RAS_ENABLE": None, "NCCL_COMM_ID": "host:1"}


def environment() -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in OURS}


class UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_char * 128)]


PROTOTYPES = {
    "ncclGetUniqueId": (c_int, POINTER(UniqueId)),
    "ncclCommInitRank": (c_int, POINTER(c_void_p), c_int, UniqueId, c_int),
    "ncclAllReduce": (c_int, c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p),
    "ncclAllGather": (c_int, c_void_p, c_void_p, c_size_t, c_int, c_void_p, c_void_p),
    "ncclBroadcast": (c_int, c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p),
    "ncclGroupStart": (c_int,),
    "ncclGroupEnd": (c_int,),
    "ncclCommAbort": (c_int, c_void_p),
    "ncclGetErrorString": (c_void_p, c_int),
    "ncclGetLastError": (c_void_p, c_void_p),
}


class Library:
    """A stand-in for NCCL with functions as attributes, like a `ctypes.CDLL`. Two ranks have the
    same x.

    Attributes:
        calls: the names of functions called.
        errors: mistakes in calls.
        counts: numbers of elements in collectives.
        waits_in: the name of a function that does not come back until it is aborted.
        fails_in: the name of a function that fails.
        free_result: result of freeing a communicator at the end of a group.
        before_handle: called before a communicator's handle is known.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.errors: list[BaseException] = []
        self.counts: list[int] = []
        self.waits_in = self.fails_in = ""
        self.free_result = OK
        self.before_handle: Callable[[], object] = lambda: None
        self.devices: list[torch.device] = []  # the current one, while it is one
        self.group = threading.local()  # of each thread, `calls`: what its end does
        self.is_waiting, self.aborted, self.freed = (threading.Event() for _ in range(3))
        self.socket: socket.socket | None = None
        self._functions = []  # they must not be collected
        for name, (result, *args) in PROTOTYPES.items():
            method = re.sub("([A-Z])", r"_\1", name.removeprefix("nccl")).lower()
            function = ctypes.CFUNCTYPE(result, *args)(self._recorded(name, getattr(self, method)))
            self._functions.append(function)
            address = ctypes.cast(function, c_void_p).value
            setattr(self, name, ctypes.CFUNCTYPE(c_int)(address))  # knows no types

    def _recorded(self, name: str, function: Callable[..., int]) -> Callable[..., int]:
        def call(*args: Any) -> int:
            self.calls.append(name)
            try:
                if name == self.fails_in:
                    return INTERNAL_ERROR
                if name == self.waits_in and name != "ncclCommInitRank":
                    return self._wait()
                return function(*args)
            except BaseException as error:
                self.errors.append(error)
                return INTERNAL_ERROR

        return call

    def _wait(self) -> int:
        self.is_waiting.set()
        assert self.aborted.wait(DEADLINE)
        assert not self.freed.wait(0.1), "freed while it is in use"
        return INTERNAL_ERROR

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        self.devices.append(device)
        yield
        self.devices.remove(device)

    def _get_unique_id(self, unique_id: Any) -> int:
        assert environment() == OURS
        ctypes.memmove(unique_id, ID, len(ID))
        return OK

    def _comm_init_rank(self, handle: Any, size: int, unique_id: UniqueId, rank: int) -> int:
        assert (size, rank, bytes(unique_id)) == (2, 1, ID)
        self.before_handle()
        handle[0] = HANDLE
        self.group.calls.append(self._connect)
        return OK

    def _connect(self) -> int:
        assert environment() == OURS and self.devices == [DEVICE] and nccl._connecting.locked()
        if self.waits_in != "ncclCommInitRank":
            return OK
        self.socket = socket.socket()
        self.socket.bind(("127.0.0.1", 0))
        self.socket.listen()
        return self._wait()

    def _all_reduce(
        self, x: int, out: int, count: int, dtype: int, op: int, comm: int, stream: int
    ) -> int:
        assert (x, op, comm, stream) == (out, 0, HANDLE, STREAM)
        self.counts.append(count)
        if not x:
            return OK
        summed = {7: torch.float32, 6: torch.float16, 9: torch.bfloat16}[dtype]
        data = (ctypes.c_byte * (count * BYTES[dtype])).from_address(x)
        torch.frombuffer(data, dtype=summed).mul_(2)
        return OK

    def _all_gather(self, x: int, out: int, count: int, dtype: int, comm: int, stream: int) -> int:
        assert (comm, stream) == (HANDLE, STREAM)
        self.counts.append(count)
        for rank in range(2 if x else 0):
            ctypes.memmove(out + rank * count * BYTES[dtype], x, count * BYTES[dtype])
        return OK

    def _broadcast(
        self, x: int, out: int, count: int, dtype: int, root: int, comm: int, stream: int
    ) -> int:
        assert (x, root, comm, stream) == (out, 0, HANDLE, STREAM)
        self.counts.append(count)
        if x:
            ctypes.memset(out, 1, count * BYTES[dtype])
        return OK

    def _group_start(self) -> int:
        self.group.calls = []
        return OK

    def _comm_abort(self, handle: int) -> int:
        assert handle == HANDLE
        self.aborted.set()
        self.group.calls.append(self._free)
        return OK

    def _group_end(self) -> int:
        return max((call() for call in self.group.__dict__.pop("calls")), default=OK)

    def _free(self) -> int:
        self.freed.set()
        return self.free_result

    def _get_error_string(self, result: int) -> int:
        assert result == INTERNAL_ERROR
        return ctypes.addressof(MESSAGE)

    def _get_last_error(self, handle: Any) -> int:
        return ctypes.addressof(DETAIL)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    made = Library()
    nccl._library.cache_clear()
    monkeypatch.setattr(ctypes, "CDLL", {"libnccl.so.2": made}.__getitem__)
    monkeypatch.setattr(torch.cuda, "device", made.device)
    current = {DEVICE: SimpleNamespace(cuda_stream=STREAM)}
    monkeypatch.setattr(torch.cuda, "current_stream", current.__getitem__)
    for name, value in THEIRS.items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    yield made
    nccl._library.cache_clear()
    if made.socket is not None:
        made.socket.close()
    for error in made.errors:
        raise error
    assert environment() == THEIRS


def connected() -> Nccl:
    communicator = Nccl(DEVICE, rank=1, size=2)
    communicator.connect(nccl.get_unique_id())
    return communicator


def in_thread(function: Callable[[], object]) -> tuple[threading.Thread, list[Exception]]:
    """A thread that has begun with it, and the error that it will have ended with."""
    errors: list[Exception] = []

    def work() -> None:
        try:
            function()
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread, errors


def test_collectives(library: Library) -> None:
    communicator = connected()
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        x = torch.randn(3, 5, generator=torch.Generator().manual_seed(3)).to(dtype)
        summed = x.clone()
        communicator.all_reduce(summed)
        assert torch.equal(summed, 2 * x)
    for dtype in (torch.uint8, torch.int64, torch.float64, torch.bfloat16):
        x, guard = torch.arange(15).reshape(3, 5).to(dtype), torch.full((3, 3, 5), 9).to(dtype)
        communicator.all_gather(guard[:2], x)
        assert torch.equal(guard[0], x) and torch.equal(guard[1], x) and (guard[2] == 9).all()
        communicator.broadcast(guard[1])
        assert torch.equal(guard[0], x) and (guard[2] == 9).all()
        assert (guard[1].view(torch.uint8) == 1).all()
    with pytest.raises(AssertionError):
        communicator.all_reduce(torch.zeros(3, 5).T)
    with pytest.raises(AssertionError):
        communicator.all_gather(torch.zeros(5, 2).T, torch.zeros(5))
    communicator.abort()
    assert library.freed.is_set()
    with pytest.raises(RuntimeError, match="aborted"):
        communicator.all_reduce(torch.zeros(3))
    assert library.calls.count("ncclAllReduce") == 3


def test_counts_have_64_bits(library: Library) -> None:
    large = torch.empty(5 << 30, dtype=torch.float16, device="meta")
    communicator = connected()
    communicator.all_reduce(large)
    communicator.all_gather(large, large)
    communicator.broadcast(large)
    assert library.counts == [5 << 30, 10 << 30, 10 << 30]


def test_group_gathers_rows_that_are_not_adjacent(library: Library) -> None:
    group = Group(1, 2)
    group._backend = connected()
    x = torch.arange(15).reshape(3, 5)
    assert torch.equal(group.all_gather(x.T), torch.stack([x.T, x.T]))


def test_defect_13_abort_while_nccl_connects(library: Library) -> None:
    """NCCL waited for the dead for ever, or a minute, and what it had connected was lost."""
    library.waits_in = "ncclCommInitRank"
    group, store = Group(1, 2), dist.HashStore()
    group.arrive(store, DEVICE)
    with ExitStack() as others:
        plain = others.enter_context(socket.socket())
        plain.bind(("127.0.0.1", 0))
        plain.listen()  # before NCCL connects
        before = listeners()
        thread, errors = in_thread(lambda: group.connect(store, DEVICE))
        assert library.is_waiting.wait(DEADLINE)
        assert len(listeners() - before) == 1
        server = others.enter_context(socket.create_server(("127.0.0.1", 0)))
        local = others.enter_context(socket.socket(socket.AF_UNIX))
        local.bind(f"\0{os.getpid()}")
        local.listen()
        other_store = dist.HashStore()  # of another engine
        before = listeners()
        gloo = Group(1, 2)
        meeting = threading.Thread(target=lambda: gloo.connect(other_store, torch.device("cpu")))
        meeting.start()
        wait_until(lambda: listeners() - before)
        before = listeners()
        group.abort()
        thread.join(DEADLINE)
        assert not thread.is_alive(), "waits for the dead"
        wait_until(lambda: len(before - listeners()) == 1)
        Group(0, 2).connect(other_store, torch.device("cpu"))
        meeting.join(DEADLINE)
        for sock in (plain, server, local):
            with socket.socket(sock.family) as client:
                client.connect(sock.getsockname())
                sock.accept()[0].close()
    group.close()
    assert library.freed.is_set()
    [error] = errors
    assert isinstance(error, LostContactError)
    assert "ncclGroupEnd: internal error of the last call" in str(error)


def test_defect_13_nobody_waits_for_the_id_of_nccl(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 did, if rank 1 had arrived and died. Who has arrived has brought it."""
    store, ids = dist.HashStore(), []
    store.set_timeout(timedelta(milliseconds=1))
    monkeypatch.setattr(Nccl, "connect", lambda self, unique_id: ids.append(unique_id))
    groups = [Group(rank, 3) for rank in range(3)]
    for group in groups:
        group.arrive(store, DEVICE)
    for group in groups:
        group.connect(store, DEVICE)
    assert ids == [ID] * 3 and library.calls == ["ncclGetUniqueId"]


def test_defect_13_abort_while_a_call_waits(library: Library) -> None:
    """A kernel is launched only when there is room for it, which the dead may prevent."""
    communicator = connected()
    library.waits_in = "ncclAllReduce"
    thread, errors = in_thread(lambda: communicator.all_reduce(torch.zeros(1)))
    assert library.is_waiting.wait(DEADLINE)
    communicator.abort()
    thread.join(DEADLINE)
    assert library.freed.is_set() and len(errors) == 1


def test_defect_14_ports_are_shut_though_nccl_cannot_free(
    library: Library, caplog: pytest.LogCaptureFixture
) -> None:
    library.waits_in = "ncclCommInitRank"
    library.free_result = INTERNAL_ERROR
    group, store, before = Group(1, 2), dist.HashStore(), listeners()
    group.arrive(store, DEVICE)
    thread, _ = in_thread(lambda: group.connect(store, DEVICE))
    assert library.is_waiting.wait(DEADLINE)
    assert len(listeners() - before) == 1
    group.close()
    thread.join(DEADLINE)
    assert library.freed.is_set() and listeners() == before
    [record] = caplog.records
    assert record.getMessage() == (
        "nccl did not shut down (ncclGroupEnd: internal error of the last call): "
        "its memory and connections are freed with this process"
    )


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_nccl_listens_on_either_family(family: socket.AddressFamily) -> None:
    try:
        sock = socket.socket(family)
    except OSError as error:
        pytest.skip(f"this machine has no {family.name}: {error}")
    with sock:
        sock.listen()
        assert nccl._inode(sock) in {nccl._inode(found) for found in nccl._listening()}


def test_abort_when_nccl_begins_to_connect(library: Library) -> None:
    """The thing to abort is known a moment later."""
    library.waits_in, begins = "ncclCommInitRank", threading.Event()
    communicator = Nccl(DEVICE, rank=1, size=2)

    def before_handle() -> None:
        begins.set()
        wait_until(lambda: communicator._is_aborted)

    library.before_handle = before_handle
    thread, errors = in_thread(lambda: communicator.connect(ID))
    assert begins.wait(DEADLINE)
    communicator.abort()
    thread.join(DEADLINE)
    assert library.freed.is_set() and len(errors) == 1


def test_abort_before_nccl_connects(library: Library) -> None:
    communicator = Nccl(DEVICE, rank=1, size=2)
    communicator.abort()
    with pytest.raises(RuntimeError, match="aborted"):
        communicator.connect(ID)
    assert library.calls == []


def test_nccl_that_cannot_begin_to_connect(library: Library) -> None:
    """Its group ends, or the next call of the thread would be part of it."""
    library.fails_in = "ncclCommInitRank"
    communicator = Nccl(DEVICE, rank=1, size=2)
    with pytest.raises(RuntimeError, match="ncclCommInitRank: internal error of the last call"):
        communicator.connect(ID)
    communicator.abort()
    assert library.calls[:3] == ["ncclGroupStart", "ncclCommInitRank", "ncclGetErrorString"]
    assert library.calls.count("ncclGroupEnd") == 1 and "ncclCommAbort" not in library.calls


def test_pytorch_without_a_shared_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    nccl._library.cache_clear()
    monkeypatch.setattr(ctypes, "CDLL", Mock(side_effect=OSError("libnccl.so.2: not there")))
    with pytest.raises(RuntimeError, match=r"libnccl.so.2: not there.*install PyTorch from PyPI"):
        nccl.get_unique_id()


def test_a_crash_leaves_no_file_of_nccl(library: Library) -> None:
    """NCCL's shared memory had names until its orderly end."""
    with ExitStack() as files:
        theirs, ours = (Path(f"/dev/shm/nccl-{os.getpid()}-{i}") for i in range(2))

        def open_and_map(path: Path) -> None:
            path.write_bytes(bytes(4096))
            files.callback(path.unlink, missing_ok=True)
            with path.open("r+b") as file:
                files.enter_context(mmap.mmap(file.fileno(), 4096))

        open_and_map(theirs)
        library.before_handle = lambda: open_and_map(ours)
        connected()
        assert theirs.exists() and not ours.exists()
