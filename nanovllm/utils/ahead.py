"""Compiling kernels ahead of their use, in threads: Triton compiles one when it is first called."""

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import ModuleType
from typing import Any

import torch

_replacing, _replaced = threading.Lock(), threading.Event()


def keep_apart(build: Any, kernel: Any) -> None:
    """Replace two functions of Triton, for the whole process, so that threads may load kernels at
    the same time (docs/experiments.md, 45). May be called again.

    A launcher passes a kernel its arguments. Up to Triton 3.6 it is a C module, all of one name:
    when Python loads a file again, it reuses the last module of that name, so a thread could get
    another kernel's launcher. Now each load gets a module of its own. And from 3.5 on a kernel has
    its launcher before its function: a second thread launched None. Now it waits.

    Args:
        build, kernel: the module `triton.runtime.build` and the class `CompiledKernel`.
    """
    one_at_a_time, run = threading.Lock(), vars(kernel).get("run")
    load: Any = getattr(build, "_load_module_from_path", None)

    def load_own(name: str, path: str) -> ModuleType:
        own = ModuleType(name)
        with one_at_a_time:
            vars(own).update(vars(load(name, path)))
        return own

    def run_whole(self: Any) -> Any:
        if self.function is None:
            with vars(self).setdefault("_loading", threading.RLock()):
                try:
                    return run.fget(self)
                except BaseException:
                    self._run = None  # not to be launched
                    raise
        return run.fget(self)

    if load is not None:
        build._load_module_from_path = load_own
    if isinstance(run, property):
        kernel.run = property(run_whole)


def hash_callees_first(finder: Any) -> None:
    """Replace a function of Triton, for the whole process, so that a kernel's key in the compile
    cache is the same in every process.

    A key covers the values of the globals that a kernel and the functions it calls refer to. Up to
    Triton 3.6 a callee's were taken over before it was hashed, so they were missing unless another
    kernel had called it before: the key depended on the order of first uses, and a second start
    compiled half of its kernels again (docs/experiments.md, 49). May be called again.

    Args:
        finder: the class `triton.runtime.jit.DependenciesFinder`.
    """
    update = finder._update_hash

    def update_whole(self: Any, callee: Any) -> None:
        callee.cache_key  # noqa: B018  a property that computes what `update` reads
        update(self, callee)

    finder._update_hash = update_whole


def _mend_triton() -> None:
    from triton.compiler import CompiledKernel
    from triton.runtime import build, jit

    with _replacing:
        if not _replaced.is_set():
            keep_apart(build, CompiledKernel)
            hash_callees_first(jit.DependenciesFinder)
            _replaced.set()


def _enter(stream: torch.cuda.Stream) -> None:
    """Work on a stream in this thread, which begins with the first device and its default stream,
    and without a CUDA context: descriptors, which need one, cannot be made in it.
    """
    torch.cuda.set_device(stream.device)
    torch.cuda.set_stream(stream)
    torch.zeros(1, device=stream.device)  # takes the context


class CompileAhead:
    """Threads that make calls. The end of a `with` block drops those that have not begun, and waits
    for the others; what they raise is raised by `wait` only.

    Args:
        device: that of the calls, on its current stream.
    """

    def __init__(self, device: torch.device) -> None:
        prepare = None
        if device.type == "cuda":
            prepare = partial(_enter, torch.cuda.current_stream(device))
            _mend_triton()
        self._pool = ThreadPoolExecutor(initializer=prepare)
        self._made: list[Future[object]] = []

    def submit(self, calls: Iterable[Callable[[], object]]) -> None:
        """Have threads make these calls."""
        self._made += [self._pool.submit(call) for call in calls]

    def wait(self) -> None:
        """Until all calls are made.

        Raises:
            Exception: that of a call.
        """
        for call in self._made:
            call.result()
        self._made.clear()

    def __enter__(self) -> "CompileAhead":
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(cancel_futures=True)
