"""Compiling kernels ahead of their use, in threads: Triton compiles one when it is first called."""

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, partial
from types import ModuleType
from typing import Any

import torch


def keep_apart(build: Any, kernel: Any) -> None:
    """Let threads load kernels at the same time, which Triton's do not (docs/experiments.md, 45).

    Until 3.6 launchers are C modules of one name. Kernels with the same kinds of arguments share a
    file, and when Python loads it again, it puts what is in it into the last module of that name:
    a thread could take the launcher of another thread's kernel from there. And a kernel shows its
    launcher before its function is loaded: another thread launched None.

    Args:
        build, kernel: `triton.runtime.build` and `triton.compiler.CompiledKernel`, or such.
    """
    one_at_a_time, run = threading.Lock(), kernel.run.fget
    load: Any = getattr(build, "_load_module_from_path", None)

    def load_own(name: str, path: str) -> ModuleType:
        own = ModuleType(name)
        with one_at_a_time:
            vars(own).update(vars(load(name, path)))
        return own

    def run_loaded(self: Any) -> Any:
        made = vars(self)
        if "loaded" not in made:
            with made.setdefault("loading", threading.Lock()):
                made["loaded"] = run(self)
        return made["loaded"]

    if load is not None:
        build._load_module_from_path = load_own
    kernel.run = property(run_loaded)


@cache
def _keep_triton_apart() -> None:
    from triton.compiler import CompiledKernel
    from triton.runtime import build

    keep_apart(build, CompiledKernel)


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
            _keep_triton_apart()
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
