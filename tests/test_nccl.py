"""`Nccl` with a library in NCCL's place that takes arguments as NCCL's header says."""

import ctypes
import os
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_void_p
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from faults import DEADLINE, listeners, wait_until
from nanovllm.distributed import nccl
from nanovllm.distributed.group import Group, LostContactError, join, listen
from nanovllm.distributed.nccl import Nccl

HANDLE, STREAM = 0x1234_5678_9ABC, 0x7777_0000_0001
ID = bytes(range(128))
BYTES = {0: 1, 6: 2, 7: 4, 9: 2}  # of ncclDataType_t
OK, INTERNAL_ERROR = 0, 3
MESSAGE, DETAIL = (ctypes.create_string_buffer(b) for b in (b"internal error", b"of the last call"))


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
    "ncclGetErrorString": (c_char_p, c_int),
    "ncclGetLastError": (c_char_p, c_void_p),
}


class Library:
    """Its functions are attributes, as those of a `ctypes.CDLL`. For two ranks with the same x."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.functions: list[Any] = []
        self.waits_in = ""  # the name of a function that does not come back until it is aborted
        self.before_handle: Callable[[], object] = lambda: None
        self.group = threading.local()  # of each thread, `calls`: what its end does
        self.is_waiting, self.aborted, self.freed = (threading.Event() for _ in range(3))
        self.socket: socket.socket | None = None
        for name, (result, *args) in PROTOTYPES.items():
            method = re.sub("([A-Z])", r"_\1", name.removeprefix("nccl")).lower()
            returned = c_void_p if result is c_char_p else result
            function = ctypes.CFUNCTYPE(returned, *args)(
                self._recorded(name, getattr(self, method))
            )
            self.functions.append(function)  # they must not be collected
            address = ctypes.cast(function, c_void_p).value
            setattr(self, name, ctypes.CFUNCTYPE(result)(address))  # knows no types of arguments

    def _recorded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            self.calls.append(name)
            if name == self.waits_in and name != "ncclCommInitRank":
                return self._wait()
            return function(*args)

        return call

    def _wait(self) -> int:
        self.is_waiting.set()
        assert self.aborted.wait(DEADLINE)
        assert not self.freed.wait(0.1), "freed while it is in use"
        return INTERNAL_ERROR

    def _get_unique_id(self, unique_id: Any) -> int:
        ctypes.memmove(unique_id, ID, len(ID))
        return OK

    def _comm_init_rank(self, handle: Any, size: int, unique_id: UniqueId, rank: int) -> int:
        assert (size, rank, bytes(unique_id)) == (2, 1, ID)
        self.before_handle()
        handle[0] = HANDLE
        self.group.calls.append(self._connect)
        return OK

    def _connect(self) -> int:
        assert os.environ["NCCL_RUNTIME_CONNECT"] == "0"
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
        summed = {7: torch.float32, 6: torch.float16, 9: torch.bfloat16}[dtype]
        data = (ctypes.c_byte * (count * BYTES[dtype])).from_address(x)
        torch.frombuffer(data, dtype=summed).mul_(2)
        return OK

    def _all_gather(self, x: int, out: int, count: int, dtype: int, comm: int, stream: int) -> int:
        assert (comm, stream) == (HANDLE, STREAM)
        for rank in range(2):
            ctypes.memmove(out + rank * count * BYTES[dtype], x, count * BYTES[dtype])
        return OK

    def _broadcast(
        self, x: int, out: int, count: int, dtype: int, root: int, comm: int, stream: int
    ) -> int:
        assert (x, root, comm, stream) == (out, 0, HANDLE, STREAM)
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
        return max(call() for call in self.group.__dict__.pop("calls"))

    def _free(self) -> int:
        self.freed.set()
        return OK

    def _get_error_string(self, result: int) -> int:
        assert result == INTERNAL_ERROR
        return ctypes.addressof(MESSAGE)

    def _get_last_error(self, handle: Any) -> int:
        return ctypes.addressof(DETAIL)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    made = Library()
    monkeypatch.setattr(nccl, "_library", lambda: made)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    current = SimpleNamespace(cuda_stream=STREAM)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setenv("NCCL_RUNTIME_CONNECT", "1")
    yield made
    assert os.environ["NCCL_RUNTIME_CONNECT"] == "1"
    if made.socket is not None:
        made.socket.close()


def test_collectives(library: Library) -> None:
    communicator = Nccl(torch.device("cuda", 1))
    communicator.connect(nccl.get_unique_id(), rank=1, size=2)
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
    communicator.abort()
    assert library.freed.is_set()
    with pytest.raises(RuntimeError, match="aborted"):
        communicator.all_reduce(torch.zeros(3))
    assert library.calls.count("ncclAllReduce") == 3


def test_defect_13_abort_while_nccl_connects(library: Library) -> None:
    """NCCL waited for the dead for ever, or a minute, and what it had connected was lost."""
    library.waits_in = "ncclCommInitRank"
    group, errors = Group(1, 2), []
    store = SimpleNamespace(values={})
    store.set = store.values.__setitem__
    store.get = lambda name: store.values[name].encode()

    def meet() -> None:
        try:
            group.connect(store, torch.device("cuda", 1))  # type: ignore[arg-type]
        except LostContactError as error:
            errors.append(str(error))

    with ExitStack() as others:
        plain = others.enter_context(socket.socket())
        plain.bind(("127.0.0.1", 0))
        plain.listen()  # before NCCL connects
        before = listeners()
        thread = threading.Thread(target=meet, daemon=True)
        thread.start()
        assert library.is_waiting.wait(DEADLINE)
        assert len(listeners() - before) == 1
        server = others.enter_context(socket.create_server(("127.0.0.1", 0)))
        local = others.enter_context(socket.socket(socket.AF_UNIX))
        local.bind(f"\0{os.getpid()}")
        local.listen()
        other_store, port = listen()  # of another engine
        before = listeners()
        gloo = Group(1, 2)
        meeting = threading.Thread(target=lambda: gloo.connect(join(port), torch.device("cpu")))
        meeting.start()
        wait_until(lambda: listeners() - before)
        before = listeners()
        group.abort()
        thread.join(DEADLINE)
        assert not thread.is_alive(), "waits for the dead"
        assert len(before - listeners()) == 1
        Group(0, 2).connect(other_store, torch.device("cpu"))
        meeting.join(DEADLINE)
        for sock in (plain, server, local):
            with socket.socket(sock.family) as client:
                client.connect(sock.getsockname())
                sock.accept()[0].close()
    group.close()
    assert library.freed.is_set()
    [error] = errors
    assert "ncclGroupEnd: internal error of the last call" in error


def test_defect_13_abort_while_a_call_waits(library: Library) -> None:
    """A kernel is launched only when there is room for it, which the dead may prevent."""
    communicator, errors = Nccl(torch.device("cuda", 1)), []
    communicator.connect(nccl.get_unique_id(), rank=1, size=2)
    library.waits_in = "ncclAllReduce"

    def call() -> None:
        try:
            communicator.all_reduce(torch.zeros(1))
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    assert library.is_waiting.wait(DEADLINE)
    communicator.abort()
    thread.join(DEADLINE)
    assert library.freed.is_set() and len(errors) == 1


def test_abort_when_nccl_begins_to_connect(library: Library) -> None:
    """What there is to abort is known a moment later."""
    library.waits_in, begins = "ncclCommInitRank", threading.Event()
    communicator = Nccl(torch.device("cuda", 1))

    def before_handle() -> None:
        begins.set()
        wait_until(lambda: communicator._is_aborted)

    library.before_handle = before_handle
    errors = []

    def meet() -> None:
        try:
            communicator.connect(ID, rank=1, size=2)
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=meet, daemon=True)
    thread.start()
    assert begins.wait(DEADLINE)
    communicator.abort()
    thread.join(DEADLINE)
    assert library.freed.is_set() and len(errors) == 1


def test_abort_before_nccl_connects(library: Library) -> None:
    communicator = Nccl(torch.device("cuda", 1))
    communicator.abort()
    with pytest.raises(RuntimeError, match="aborted"):
        communicator.connect(ID, rank=1, size=2)
    assert not communicator.is_connected
    assert library.calls == []


def test_a_crash_leaves_no_file_of_nccl(
    library: Library, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """NCCL's shared memory had names until its orderly end."""
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    theirs.touch()
    monkeypatch.setattr(
        nccl, "_opened", lambda: {str(path) for path in (theirs, ours) if path.exists()}
    )
    library.before_handle = ours.touch
    Nccl(torch.device("cuda", 1)).connect(ID, rank=1, size=2)
    assert theirs.exists() and not ours.exists()
