"""`main`: the compile server, a process that `Compiler` starts.

It imports Triton and the modules of our kernels once, and forks processes that compile, one kernel
each at a time, as jobs come through a socket. A kernel's module needs PyTorch for its host part
only, and that takes seconds to import: a stand-in has its name here.

Messages from `Compiler`: first the directory of Triton's cache; then a number, its `Job` and its
group; the number of a job that is waited for, which goes first; None: no more will come. Among
queued jobs the first group's go first, and of these the longest. Answers: a job's number, and the
reason of its failure or None. If the connection ends, all processes end.
"""

import functools
import importlib
import json
import os
import pkgutil
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, NamedTuple

from nanovllm.compiling.absent_gpu import AbsentGPU, Target
from nanovllm.compiling.mends import mend

NICENESS = 5  # the engine has priority
WAITED_FOR = -1, 0  # rank before those of all groups


class Job(NamedTuple):
    """A kernel to compile.

    Attributes:
        module, function: names of the module and the function with its source.
        specialization: types, constants and options, as serialised by Triton.
    """

    module: str
    function: str
    specialization: str


def import_without_torch(backend: str = "cuda") -> None:
    """Import the modules of all kernels, as they are for a backend of Triton. Triton must have been
    imported before.
    """
    from unittest.mock import MagicMock

    torch = MagicMock(name="torch")
    torch.version.hip = "any" if backend == "hip" else None
    names = {"torch": torch, "torch.nn": torch.nn, "torch.nn.functional": torch.nn.functional}
    sys.modules.update(names)
    kernels = importlib.import_module("nanovllm.kernels")
    for module in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}."):
        importlib.import_module(module.name)


def needs_launchers(target: Target) -> bool:
    """Whether launchers of kernels are compiled, too: Triton up to 3.6 has, for NVIDIA's GPUs, one
    launcher for each kind of arguments.
    """
    import triton

    version = tuple(map(int, triton.__version__.split(".")[:2]))
    return target.backend == "cuda" and version <= (3, 6)


def launcher_of(target: Target) -> Callable[..., object] | None:
    """The function that compiles launchers for a target, with a C compiler and NVIDIA's library.
    None if that is not needed, or if the library is missing.
    """
    if not needs_launchers(target):
        return None
    from triton.backends.nvidia import driver

    try:
        driver.library_dirs()
    except (AssertionError, OSError):  # no libcuda.so.1 on this machine
        return None
    launcher: Callable[..., object] = driver.CudaLauncher
    return launcher


def prepare(target: Target) -> None:
    """Prepare this process, and those that it forks, to compile."""
    import triton  # noqa: F401  before PyTorch's stand-in, of which it would ask much

    hashing = threading.Thread(target=hash_triton)
    hashing.start()
    import_without_torch(target.backend)
    from triton.runtime import driver

    mend()
    driver.set_active(AbsentGPU(target, launcher_of(target)))
    hashing.join()  # a process with threads must not fork


def hash_triton() -> None:
    """Hash Triton's own files, once for all processes. This takes half a second."""
    try:
        from triton.runtime.cache import triton_key
    except ImportError:  # before 3.6
        from triton.compiler.compiler import triton_key
    triton_key()


@functools.cache
def source_length(function: Any) -> int:
    """The number of characters in the source of a kernel and of all functions that it calls: the
    time to compile it roughly follows this.
    """
    from triton.runtime.jit import JITFunction

    known, waiting = {function}, [function]
    while waiting:
        caller = waiting.pop().fn
        named = map(caller.__globals__.get, caller.__code__.co_names)
        called = {each for each in named if isinstance(each, JITFunction)} - known
        known |= called
        waiting += called
    return sum(len(each.src) for each in known)


def compile_job(job: Job) -> None:
    """Compile a kernel, and its launcher, into Triton's cache."""
    function = getattr(importlib.import_module(job.module), job.function)
    function.preload(job.specialization)._init_handles()


def _work(connection: Connection) -> None:
    """Compile for the server, until it ends."""
    while True:
        try:
            number, job = connection.recv()
        except EOFError:
            return
        error = None
        try:
            compile_job(job)
        except Exception as reason:
            error = f"{type(reason).__name__}: {reason}"
        connection.send((number, error))


def _fork(others: Iterable[Connection]) -> Connection:
    """Fork a process that compiles. Returns the connection to it. The process closes the server's
    `others`, so that the end of the server is seen at the other end of each.
    """
    ours, theirs = Pipe()
    if os.fork():
        theirs.close()
        return ours
    for connection in (ours, *others):
        connection.close()
    try:
        _work(theirs)
    finally:
        os._exit(0)


def serve(asks: Connection, max_processes: int) -> None:
    """Have up to `max_processes` compile, until all is done and no more jobs will come."""
    jobs: dict[int, tuple[Job, tuple[int, int]]] = {}  # with their ranks: the least begins first
    idle: list[Connection] = []
    busy: dict[Connection, int] = {}
    is_open = True
    while is_open or jobs or busy:
        while jobs and (idle or len(busy) < max_processes):
            worker = idle.pop() if idle else _fork((asks, *busy))
            busy[worker] = number = min(jobs, key=lambda number: jobs[number][1])
            worker.send((number, jobs.pop(number)[0]))
        for ready in wait([asks, *busy]):
            if ready is asks:
                match asks.recv():
                    case None:
                        is_open = False
                    case int(number):
                        if number in jobs:
                            jobs[number] = jobs[number][0], WAITED_FOR
                    case number, job, group:
                        jobs[number] = job, (group, -_length(job))
                continue
            assert isinstance(ready, Connection)
            number = busy.pop(ready)
            try:
                answer = ready.recv()
                idle.append(ready)
            except EOFError:
                answer = number, "the process that compiled it has ended"
            asks.send(answer)


def _length(job: Job) -> int:
    """The length of a job's source; 0 if its module is not imported here (other processes will
    import it), or if it is no plain kernel.
    """
    from triton.runtime.jit import JITFunction

    function = getattr(sys.modules.get(job.module), job.function, None)
    return source_length(function) if isinstance(function, JITFunction) else 0


def main(fd: int, target: str, max_processes: int) -> None:
    """Serve the process that has started this one. No others are in this process's session.

    Args:
        fd: file descriptor of our end of the socket.
        target: `Target` as JSON.
        max_processes: maximum number of processes that compile.
    """
    os.nice(NICENESS)
    asks = Connection(fd)
    try:
        prepare(Target(*json.loads(target)))
        os.environ["TRITON_CACHE_DIR"] = asks.recv()
        serve(asks, max_processes)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os.killpg(0, signal.SIGKILL)  # compiling processes, their children, and this one
