"""Faults in a worker, and helpers for their tests: leftovers of processes, waits that end."""

import contextlib
import gc
import inspect
import os
import sys
import threading
import time
from pathlib import Path

import tqdm

import nanovllm
from nanovllm.requests.request import Request

DEADLINE = 60  # seconds, only to turn a hang into a failure


def children(parent=0):
    """Processes whose parent that one is (0: this one), zombies among them."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if int(stat.read_text().rpartition(")")[2].split()[1]) == (parent or os.getpid()):
                found.add(int(stat.parent.name))
    return found


def fds(pid="self"):
    """Targets of a process's descriptors."""
    found = []
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # that of the listing itself
            found.append(os.readlink(fd))
    return found


def listeners(pid="self"):
    """Local addresses (hexadecimal) on which a process listens."""
    sockets, found = set(fds(pid)), set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                found.add(fields[1])
    return found


def nccl_threads():
    """Names of the threads that NCCL has in this process. They need NCCL_SET_THREAD_NAME=1."""
    names = (path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm"))
    return {name for name in names if name.startswith("NCCL")}


def shared_memory():
    """Names in /dev/shm but those of semaphores, which are of tqdm: a script that a test kills may
    leave one. Other processes have some there for an instant, so wait for their end.
    """
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")}


def traces():
    """Things that an engine could leave behind, for comparison."""
    gc.collect()
    return {
        "children": children(),
        "listeners": listeners(),
        "threads of NCCL": nccl_threads(),
        "threads": {t for t in threading.enumerate() if not isinstance(t, tqdm.TMonitor)},
    }


def wait_until(condition):
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, "in vain"
        time.sleep(0.001)


def within_deadline(function):
    """Result of `function`; a hang fails the test."""
    results, errors = [], []

    def work():
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(DEADLINE)
    assert not thread.is_alive(), "hangs"
    if errors:
        raise errors.pop()
    return results.pop()


# Runs at the start of every Python process that has its directory on PYTHONPATH, but this one: when
# a module of the library has been imported, it makes one function of it fail on one rank.
SITECUSTOMIZE = """
import importlib.util, sys

def fault():
    import os, time, torch
    from pathlib import Path
    with open({died!r}, "w") as file:
        file.write(str(time.monotonic()))
    {what}

class Finder:
    def find_spec(self, name, path, target=None):
        if name != {module!r}:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module
        def execute_and_patch(module):
            execute(module)
            patch(module)
        spec.loader.exec_module = execute_and_patch
        return spec

def patch(module):
    *path, name = {where!r}.split(".")
    owner = module
    for part in path:
        owner = getattr(owner, part)
    original, calls = getattr(owner, name), []
    def wrapped(*args, **kwargs):
        ranks = [getattr(getattr(arg, "group", arg), "rank", None) for arg in args]
        if {rank} not in ranks:
            return original(*args, **kwargs)
        calls.append(name)
        if len(calls) == {call} and not {after}:
            fault()
        result = original(*args, **kwargs)
        if len(calls) == {call} and {after}:
            fault()
        return result
    setattr(owner, name, wrapped)

sys.meta_path.insert(0, Finder())
"""

SERVE = "nanovllm.ranks.worker:_serve"
CONNECT = "nanovllm.distributed.group:Group.connect"
CONNECT_NCCL = "nanovllm.distributed.nccl:Nccl.connect"
LOAD = "nanovllm.startup.builder:Builder.load"
SIZE = "nanovllm.engine.kv_pool:KVCachePool.how_many_fit"
RUN = "nanovllm.engine.model_runner:ModelRunner.run"

FAULTS = {  # what happens: exit code and what the error says
    "raise": ("raise LookupError('injected')", 1, "LookupError: injected"),
    "host memory": ("raise MemoryError('injected')", 1, "MemoryError: injected"),
    "GPU memory": ("raise torch.OutOfMemoryError('injected')", 1, "OutOfMemoryError: injected"),
    "kill": ("os.kill(os.getpid(), 9)", -9, "was killed by SIGKILL"),
    "abort": ("os.abort()", -6, "was killed by SIGABRT"),
    "leave": ("os._exit(0)", 0, "ended with exit code 0"),
}
PROMISE = 5.0  # seconds from a worker's death to the error


def injector(folder, monkeypatch):
    """A function that makes the k-th call of another fail in workers that start from now on (rank
    None: all).

    Args:
        folder: directory of the test.
    """

    def inject(where, what, *, rank=1, call=1, after=False):
        module, _, where = where.partition(":")
        own = folder / "injected"
        own.mkdir(exist_ok=True)
        died = own / "died"
        code = SITECUSTOMIZE.format(
            died=str(died), what=what, module=module, where=where, rank=rank, call=call, after=after
        )
        (own / "sitecustomize.py").write_text(code)
        path = [str(own), *filter(None, [os.environ.get("PYTHONPATH")])]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
        return died

    return inject


def fail_at(monkeypatch, owner, name, k, error, *, after=False):
    """Make the k-th call of a method raise `error`, once, before or after its work."""
    original, calls = getattr(owner, name), []

    def wrapped(*args, **kwargs):
        calls.append(name)
        if len(calls) == k and not after:
            raise error
        result = original(*args, **kwargs)
        if len(calls) == k:
            raise error
        return result

    monkeypatch.setattr(owner, name, wrapped)
    return calls


FAULT_POINTS = {
    "launch": lambda llm: (llm.model_runner, "launch"),
    "finish": lambda llm: (llm.model_runner, "finish"),
    "schedule": lambda llm: (llm.scheduler, "schedule"),
    "postprocess": lambda llm: (llm.scheduler, "postprocess"),
    "allocate": lambda llm: (llm.scheduler.block_manager, "allocate"),
    "publish": lambda llm: (llm.scheduler.block_manager, "publish"),
    "deallocate": lambda llm: (llm.scheduler.block_manager, "deallocate"),
    "take": lambda llm: (llm.scheduler.block_manager, "_take_free_block"),
    "wait": lambda llm: (llm.executor, "wait"),
    "output": lambda llm: (Request, "output"),
}


class Interrupt:
    """Raises KeyboardInterrupt at the k-th line that runs in the engine's own files, or at the k-th
    call of a function there.
    """

    def __init__(self, k: float, event: str = "line") -> None:
        self.k, self.event, self.count = k, event, 0

    def __enter__(self):
        sys.settrace(self.trace)
        return self

    def __exit__(self, *_):
        sys.settrace(None)

    def trace(self, frame, event, arg):
        if not frame.f_code.co_filename.startswith(ENGINE):
            return None
        if event == self.event == "call" and frame.f_code.co_flags & inspect.CO_GENERATOR:
            return None  # may be its end, which is no call of it
        if event == self.event:
            self.count += 1
            if self.count == self.k:
                raise KeyboardInterrupt
        return self.trace


ROOMS = [
    "engine",
    "requests",
    "sampling",
    "scheduling",
    "graphs",
    "sizing",
    "tracing",
    "ranks",
    "replicas",
]
ENGINE = tuple(f"{Path(nanovllm.__path__[0], room)}{os.sep}" for room in ROOMS)
