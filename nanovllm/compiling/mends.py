"""Repairs of two faults of Triton, for the whole process."""

import threading
from types import ModuleType
from typing import Any

_mending, _mended = threading.Lock(), threading.Event()


def mend() -> None:
    """Repair Triton in this process. May be called again."""
    from triton.compiler import CompiledKernel
    from triton.runtime import build, jit

    with _mending:
        if not _mended.is_set():
            keep_apart(build, CompiledKernel)
            hash_callees_first(jit.DependenciesFinder)
            _mended.set()


def keep_apart(build: Any, kernel: Any) -> None:
    """Replace two functions of Triton, for the whole process, so that threads may load kernels at
    the same time (docs/experiments.md, 45). May be called again.

    A launcher passes a kernel its arguments. Up to Triton 3.6 it is a C module, and all have the
    same name: when Python loads a file again, it reuses the last module of that name, so a thread
    could get another kernel's launcher. Now each load gets its own module. And from 3.5 on, a
    kernel has its launcher before its function: a second thread launched None. Now it waits.

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
    Triton 3.6, a callee's were copied before it was hashed, so they were missing unless another
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
