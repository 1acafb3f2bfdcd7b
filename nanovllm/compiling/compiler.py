"""`Compiler`: compilation, by other processes, of kernels that this one is going to launch."""

import contextlib
import functools
import hashlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Pipe
from typing import Any

import torch

from nanovllm.compiling.absent_gpu import Target
from nanovllm.compiling.mends import mend
from nanovllm.compiling.server import Job, hash_triton
from nanovllm.threads.interrupts import uninterrupted
from nanovllm.utils import cgroup
from nanovllm.utils.device import capturing

logger = logging.getLogger(__name__)

MAX_PROCESSES = 32
SERVER = "nanovllm.compiling.server"
ENDED = "the compile server has ended"
ANY_MEMORY = 1 << 30  # the launch of a kernel finds out whether the GPU has the memory
_compilers: "list[Compiler]" = []  # those that are not closed
_hooking, _one_rehearsal = threading.RLock(), threading.Lock()


def target_of(device: torch.device) -> Target:
    """The target for a GPU; for NVIDIA's without Triton's driver, which takes time to make."""
    if torch.version.hip is None:
        facts = torch.cuda.get_device_properties(device)
        return Target("cuda", 10 * facts.major + facts.minor, 32, ANY_MEMORY)
    from triton.runtime import driver

    target = driver.active.get_current_target()
    return Target(target.backend, target.arch, target.warp_size, ANY_MEMORY)


def _load_driver() -> None:
    """Make Triton's driver, for which a C compiler runs if the cache is empty."""
    from triton.runtime import driver

    with contextlib.suppress(Exception):  # the launch of the first kernel meets the same error
        driver.active.utils  # noqa: B018


def num_processes(num_ranks: int) -> int:
    """The number of compiling processes for each of the machine's ranks: together half of its
    logical cores, and at most a container's quota of CPUs. Two logical cores usually share a
    physical one: with a process on each, the largest kernel takes half as long again
    (docs/experiments.md, 51).
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    usable = int(min((cores or 2) // 2, cgroup.cpus()))
    return max(1, min(MAX_PROCESSES, usable // num_ranks))


class Compiler:
    """A server process, whose child processes compile kernels into Triton's cache.

    A thread that launches a kernel waits for it while it is compiled there. If that fails, Triton
    compiles the kernel here, at the launch, as without a server.

    Args:
        target: GPU to compile for.
        max_processes: maximum number of processes that compile.

    Raises:
        OSError: if no process can be started.

    Attributes:
        rehearsed: kernels that would have been launched, and their functions, in order of launch.
        failed: kernels that the processes could not compile, and the reasons.
    """

    def __init__(self, target: Target, max_processes: int) -> None:
        self.rehearsed: dict[Job, Any] = {}
        self.failed: dict[Job, str] = {}
        self._jobs: list[Job] = []  # by number
        self._pending: dict[Job, int] = {}  # numbers of the jobs, in order
        self._changed = threading.Condition()  # guards these three, and messages to the server
        self._is_over = False  # whether the server has ended
        self._rehearsing: int | None = None  # id of the rehearsing thread
        self._num_rehearsals = 0
        self._looks: list[Future[None]] = []  # look-ups in the cache, of the last rehearsal
        self._loader: threading.Thread | None = None
        self._first_uses: list[threading.Thread] = []  # threads that use Triton for the first time
        self._is_closed = False
        with ExitStack() as undo:
            with uninterrupted():
                self._directory = tempfile.mkdtemp(prefix="nanovllm-compile-")
                undo.callback(shutil.rmtree, self._directory, ignore_errors=True)
                self._connection, theirs = Pipe()
                undo.callback(self._connection.close)
                with theirs:  # the server starts while Triton is imported here
                    self._process = _start(theirs.fileno(), target, max_processes, self._directory)
                self._receiver = threading.Thread(target=self._receive, daemon=True)
                self._receiver.start()
                undo.callback(self.close)
            from triton import knobs

            self._send(knobs.cache.dir)
            mend()
            # The slow parts of Triton's first use here run beside, mostly without Python's lock.
            self._hashing = threading.Thread(target=hash_triton, daemon=True)
            self._loading_driver = threading.Thread(target=_load_driver, daemon=True)
            for thread in (self._hashing, self._loading_driver):
                thread.start()
                self._first_uses.append(thread)
            _listen(self)
            undo.pop_all()

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Launch no kernel in this thread; have those compiled that Triton's cache does not have,
        after those of earlier rehearsals.

        Other operators run. Uninitialised integer tensors are filled with zeros, as they may be
        indices.
        """
        from triton.runtime.jit import JITFunction

        self._loading_driver.join()
        thread, self._looks = threading.get_ident(), []
        # One rehearsal at a time in this process, as functions are replaced. Another thread looks
        # into the cache: this one releases Python's lock wherever libraries take long.
        with _one_rehearsal, ThreadPoolExecutor(1, "nanovllm-compile-look") as self._looker:
            self._looker.submit(self._hashing.join)
            run = JITFunction.run

            def without_launch(function: Any, *args: Any, warmup: bool, **options: Any) -> Any:
                is_ours = threading.get_ident() == thread
                return run(function, *args, warmup=warmup or is_ours, **options)

            self._num_rehearsals += 1
            try:
                JITFunction.run, self._rehearsing = without_launch, thread
                with _zeros(thread):
                    yield
            finally:
                JITFunction.run, self._rehearsing = run, None
            for look in self._looks:
                look.result()

    def meets(self, job: Job, function: Any, how: dict[str, Any]) -> bool:
        """Whether a kernel that is new to this process is rehearsed: then it is neither compiled
        here nor launched. Otherwise wait for it, if others compile it.
        """
        if threading.get_ident() == self._rehearsing:
            if job not in self.rehearsed:
                self.rehearsed[job] = function
                self._looks.append(self._looker.submit(self._look, job, function, how))
            return True
        self.wait(job)
        return False

    def _look(self, job: Job, function: Any, how: dict[str, Any]) -> None:
        if not is_cached(function, how):
            self.submit(job)

    def submit(self, job: Job) -> None:
        """Queue a kernel, in the group of the last rehearsal."""
        with self._changed:
            if self._is_over:
                self.failed[job] = ENDED
            elif job not in self._pending:
                self._pending[job] = len(self._jobs)
                self._jobs.append(job)
                self._send((self._pending[job], job, self._num_rehearsals))

    @property
    def num_compiled(self) -> int:
        """The number of kernels that Triton's cache did not have, and has now."""
        with self._changed:
            return sum(not (job in self._pending or job in self.failed) for job in self._jobs)

    def finish(self) -> None:
        """Tell the server that no more will be submitted: the processes end when they are done."""
        with self._changed:
            self._send(None)

    def load(self, device: torch.device) -> None:
        """Load kernels that were rehearsed and not launched so far, in a thread, as soon as they
        are compiled: their first launch need not.
        """
        name = "nanovllm-load-kernels"
        self._loader = threading.Thread(target=self._load, args=(device,), name=name, daemon=True)
        self._loader.start()

    def _load(self, device: torch.device) -> None:
        torch.cuda.set_device(device)
        for job, function in self.rehearsed.items():
            self.wait(job)
            if self._is_closed:
                return
            if job in self.failed:  # a compilation here would hold up the engine
                continue
            key = json.loads(job.specialization)["key"]
            if key in function.device_caches[device.index or 0][0]:
                continue
            try:
                with capturing:  # it may wait for the device
                    function.preload(job.specialization)._init_handles()
            except Exception:  # its launch meets the same error
                logger.debug("%s was not loaded ahead", job.function, exc_info=True)

    def wait(self, job: Job) -> None:
        """Wait until a kernel is compiled, if it is queued; it goes before others."""
        with self._changed:
            if job in self._pending:
                self._send(self._pending[job])
            self._changed.wait_for(lambda: job not in self._pending)

    def wait_for_all(self) -> None:
        """Wait until all kernels are compiled, and loaded if `load` was called."""
        for job in self._jobs:
            self.wait(job)
        if self._loader is not None:
            self._loader.join()

    @property
    def num_pending(self) -> int:
        """The number of kernels that are still to be compiled."""
        return len(self._pending)

    def _send(self, message: object) -> None:
        with contextlib.suppress(OSError):  # the server has ended, which `_receive` sees
            self._connection.send(message)

    def _receive(self) -> None:
        """Receive answers, in a thread, until the server ends. Then release all that wait."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                number, error = self._connection.recv()
                with self._changed:
                    job = self._jobs[number]
                    del self._pending[job]
                    if error is not None:
                        self.failed[job] = error
                        logger.debug("%s was not compiled ahead: %s", job.function, error)
                    self._changed.notify_all()
        with self._changed:
            self._is_over, count = True, len(self._pending)
            self.failed.update(dict.fromkeys(self._pending, ENDED))
            self._pending.clear()
            self._changed.notify_all()
        self._end_processes()  # or the server would be a zombie as long as the engine lives
        if count and not self._is_closed:
            logger.warning(
                "the compile server has ended: %d kernels will be compiled at their first launch, "
                "which takes longer",
                count,
            )

    def _end_processes(self) -> None:
        with self._changed:
            if self._process.returncode is None:  # its group is still its own
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)  # its session has no others
                self._process.wait()

    def close(self) -> None:
        """End the processes at once, and remove their files. May be called again."""
        self._is_closed = True
        _forget(self)
        self._end_processes()
        self._receiver.join()
        self._connection.close()
        shutil.rmtree(self._directory, ignore_errors=True)
        for thread in self._first_uses:
            thread.join()
        if self._loader is not None:
            self._loader.join()


def _start(
    fd: int, target: Target, max_processes: int, directory: str
) -> "subprocess.Popen[bytes]":
    """Start the server, in a session of its own, so that Ctrl-C does not reach it.

    It finds modules where this process does, whatever is in its working directory.

    Raises:
        OSError: if Python cannot be started.
    """
    if not sys.executable or getattr(sys, "frozen", False):  # by PyInstaller: it is our program
        raise OSError("this program has no Python executable to start")
    path = [entry for entry in sys.path if isinstance(entry, str)]
    asked = f"{fd}, {json.dumps(target)!r}, {max_processes}"
    code = f"import sys; sys.path[:] = {path!r}; from {SERVER} import main; main({asked})"
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "TMPDIR": directory},
        pass_fds=[fd],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )


def _listen(compiler: Compiler) -> None:
    """Have Triton notify a compiler of kernels that it is about to compile in this process. An
    earlier hook stays active.
    """
    from triton import knobs

    with _hooking:
        _compilers.append(compiler)
        before = knobs.runtime.jit_cache_hook
        if getattr(before, "is_ours", False):
            return

        def hook(*, fn: Any, compile: dict[str, Any], **others: Any) -> bool:
            job = Job(fn.module, fn.name, compile["specialization_data"])
            here = threading.get_ident()
            # A rehearsing thread does not wait for kernels of other compilers.
            for one in sorted(_compilers, key=lambda one: one._rehearsing != here):
                if one.meets(job, fn.jit_function, compile):
                    return True
            return bool(before and before(fn=fn, compile=compile, **others))

        hook.is_ours = True  # type: ignore[attr-defined]
        knobs.runtime.jit_cache_hook = hook


def _forget(compiler: Compiler) -> None:
    with _hooking:
        if compiler in _compilers:
            _compilers.remove(compiler)


def is_cached(function: Any, how: dict[str, Any]) -> bool:
    """Whether Triton's cache has a kernel, where `triton.compiler.compile` looks for it.

    Args:
        function: Triton's JITFunction.
        how: arguments that it passes to `jit_cache_hook`.
    """
    try:
        from triton._C.libtriton import get_cache_invalidating_env_vars
        from triton.runtime.cache import get_cache_key, get_cache_manager
    except ImportError:  # another version: the compiling process will find out
        return False
    backend = function.device_caches[how["device"]][3]
    source = function.ASTSource(function, how["signature"], how["constants"], how["configs"][0])
    given = json.loads(how["specialization_data"])["options"]
    options = {name: tuple(x) if isinstance(x, list) else x for name, x in given.items()}
    parsed = backend.parse_options({**options, **source.parse_options()})
    key = get_cache_key(source, backend, parsed, env_vars=get_cache_invalidating_env_vars())
    manager = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
    name = f"{source.name[:150]}.json"
    return name in (manager.get_group(name) or {})


@contextmanager
def _zeros(thread: int) -> Iterator[None]:
    """Fill new integer tensors of this thread with zeros."""
    names = "empty", "empty_like"
    makers = {name: getattr(torch, name) for name in names}

    def filled(make: Callable[..., torch.Tensor], *args: Any, **options: Any) -> torch.Tensor:
        made = make(*args, **options)
        if threading.get_ident() == thread and not made.dtype.is_floating_point:
            made.zero_()
        return made

    try:
        for name, make in makers.items():
            setattr(torch, name, functools.partial(filled, make))
        yield
    finally:
        for name, make in makers.items():
            setattr(torch, name, make)
