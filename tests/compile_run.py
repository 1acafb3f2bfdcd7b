"""A process that has kernels compiled for an absent GPU: `python compile_run.py DIRECTORY`.

Prints, as JSON, what came of each case, by its name. Writes modules of kernels to DIRECTORY. They
are fine in this process; where others compile, one ends the process as it is imported, and two
never return.
"""

import contextlib
import importlib
import json
import logging
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from process_groups import num_running
from triton.runtime.jit import JITFunction

from nanovllm.cli.stand_in import CARDS, GPU, META, OnCard, put_in
from nanovllm.compiling.absent_gpu import AbsentGPU
from nanovllm.compiling.compiler import Compiler
from nanovllm.kernels.activation import act_and_mul
from nanovllm.kernels.norm import rms_norm
from nanovllm.kernels.tokens import fill_in

CARD = CARDS["9.0"]
IN_OTHERS = 'type(sys.modules["torch"]).__name__ == "MagicMock"'
MODULE = """import os, signal, sys
import triton, triton.language as tl

if {condition}:
    {action}

@triton.jit
def {name}_kernel(x_ptr):
    {body}
"""
MODULES = {  # what happens where others compile, and the kernel
    "dies": ("os._exit(1)", "tl.store(x_ptr, 1.0)"),
    "hangs": ("signal.pause()", "tl.store(x_ptr, 2.0)"),
    "stays": ("signal.pause()", "tl.store(x_ptr, 3.0)"),
    "late": ("pass", "tl.store(x_ptr, 4.0)"),
    "wrong": ("pass", 'tl.static_assert(False, "wrong")'),
}
launched: list[str] = []
heard: list[tuple[str, bool]] = []
warnings: list[str] = []


class Recording(AbsentGPU):
    """A GPU that says what is launched."""

    def launcher_cls(self, source: Any, metadata: object) -> Callable[..., None]:
        return lambda *args: launched.append(source.name)


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.ones(*shape, dtype=dtype, device=GPU)


def fill() -> None:
    ids = tensor(4, dtype=torch.int32)
    fill_in(ids, ids, ids)


# Kernels of ours, in the order in which they are rehearsed.
OURS: dict[str, Callable[[], object]] = {
    "_rms_norm_kernel": lambda: rms_norm(tensor(4, 1024), tensor(1024), 1e-6),
    "_act_and_mul_kernel": lambda: act_and_mul(tensor(4, 256)),
    "_fill_in_kernel": fill,
}


def of(name: str) -> Callable[[], object]:
    """A launch of the kernel of one of MODULES."""
    kernel = getattr(importlib.import_module(name), f"{name}_kernel")
    return lambda: kernel[(1,)](tensor(1))


def in_thread(work: Callable[[], object]) -> threading.Thread:
    def run() -> None:
        with OnCard(META):  # which this thread has not
            work()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


@contextlib.contextmanager
def compiler(most: int = 1) -> Iterator[Compiler]:
    made = Compiler(CARD.target, most)
    try:
        yield made
    finally:
        made.close()


def forget() -> None:
    """Have no kernel in this process; the cache on disk stays."""
    from nanovllm.kernels import activation, norm, tokens

    for function in (
        norm._rms_norm_kernel,
        activation._act_and_mul_kernel,
        tokens._fill_in_kernel,
        *(getattr(importlib.import_module(name), f"{name}_kernel") for name in MODULES),
    ):
        function.device_caches.clear()
    heard.clear()
    launched.clear()


def rehearse(own: Compiler, *works: Callable[[], object]) -> list[str]:
    """Kernels found by a rehearsal of these."""
    with own.rehearsal():
        for work in works:
            work()
    return [job.function for job in own.rehearsed]


def launched_while_it_is_pending() -> dict[str, Any]:
    """Launch the last of our kernels as soon as all are rehearsed."""
    with compiler() as own:
        server = own._process.pid
        os.kill(server, signal.SIGSTOP)  # it compiles nothing while the others are rehearsed
        found: dict[str, Any] = {"rehearsed": rehearse(own, *OURS.values())}
        found |= {"pending": own.num_pending, "launched in it": [*launched]}
        send: Callable[[object], None] = own._send

        def send_and_go_on(message: object) -> None:
            send(message)
            os.kill(server, signal.SIGCONT)  # somebody waits

        vars(own)["_send"] = send_and_go_on
        [*others, last] = OURS.values()
        last()
        found["first"] = [*launched]
        for work in others:
            work()
        return found | {"compiled": compiled(triton.knobs.cache.dir), "heard": [*heard]}


def compiled_in_order() -> dict[str, list[str]]:
    """Compile in one process, which finds all others waiting behind the first."""
    norm, act, fill = OURS.values()
    return {
        "longest first": compiled_of([act, fill, norm]),
        "rehearsal by rehearsal": compiled_of([fill, act], [norm]),
    }


@contextlib.contextmanager
def cache_in(directory: str) -> Iterator[None]:
    knobs = triton.knobs.cache
    before, knobs.dir = knobs.dir, directory
    try:
        yield
    finally:
        knobs.dir = before


def compiled_of(*rehearsals: list[Callable[[], object]]) -> list[str]:
    forget()
    with tempfile.TemporaryDirectory() as cache, cache_in(cache), compiler() as own:
        os.kill(own._process.pid, signal.SIGSTOP)
        for works in rehearsals:
            rehearse(own, *works)
        os.kill(own._process.pid, signal.SIGCONT)
        while own.num_pending:
            os.sched_yield()
        return compiled(cache)


def compiled(cache: str) -> list[str]:
    """The kernels in Triton's cache, in the order in which they came there."""
    files = Path(cache).glob("*/_[!_]*.json")
    return [path.stem for path in sorted(files, key=lambda path: path.stat().st_mtime_ns)]


def rehearsed_again() -> dict[str, Any]:
    """Kernels that this process has, which other threads go on to launch; then, those on disk."""
    [first, *others] = OURS.values()
    launched.clear()
    makers = torch.empty, torch.empty_like
    with compiler() as own:
        with own.rehearsal():
            first()
            in_thread(others[0]).join()
            full = torch.full((4096,), 7, dtype=torch.int32)
            del full
            zeros = [torch.empty(4096, dtype=torch.int32) for _ in range(4)]
            zeros += [torch.empty_like(x) for x in zeros]
        found: dict[str, Any] = {
            "has": [job.function for job in own.rehearsed],
            "launched": [*launched],
            "zeros": not any(x.any() for x in zeros),
            "restored": makers == (torch.empty, torch.empty_like),
        }
        forget()
        return found | {"on disk": rehearse(own, *OURS.values()), "pending": own.num_pending}


def compiled_badly() -> dict[str, Any]:
    """Compile with a process that ends, a wrong kernel, one that never returns; then end."""
    heard.clear()
    launched.clear()
    with compiler(2) as own:
        found: dict[str, Any] = {"rehearsed": rehearse(own, of("dies"), of("hangs"), of("wrong"))}
        of("dies")()
        try:
            of("wrong")()
        except triton.CompilationError as error:
            found["error"] = type(error).__name__
        found |= {"launched": [*launched], "heard": [*heard]}
        waiting = in_thread(of("hangs"))
        waiting.join(0.2)
        directory = Path(own._directory)
        found |= {"waits": waiting.is_alive(), "pending": own.num_pending}
        found["there"] = [directory.exists(), num_running(own._process.pid) > 1]
    waiting.join()
    while num_running(own._process.pid):  # they have been killed
        os.sched_yield()
    return found | {"at last": launched[1:], "left": directory.exists()}


def served_by_nobody() -> dict[str, Any]:
    """The server is killed while a kernel is compiled, and still asked for another."""
    forget()
    with compiler() as own:
        rehearse(own, of("stays"), OURS["_fill_in_kernel"])
        while num_running(own._process.pid) < 2:  # it begins
            os.sched_yield()
        os.kill(own._process.pid, signal.SIGKILL)
        of("stays")()
        rehearse(own, of("late"))
        of("late")()
        found = {"launched": [*launched], "pending": own.num_pending, "warnings": [*warnings]}
    while num_running(own._process.pid):  # they have been killed
        os.sched_yield()
    return found


def rehearsed_side_by_side() -> dict[str, Any]:
    """Rehearse with two engines in two threads, of which the second would end after the first."""
    inside, go_on = threading.Event(), threading.Event()
    run, make = JITFunction.run, torch.empty
    forget()
    with compiler() as one, compiler() as other:

        def second() -> None:
            with other.rehearsal():
                inside.set()
                go_on.wait()
                OURS["_fill_in_kernel"]()

        with one.rehearsal():
            thread = in_thread(second)
            inside.wait(0.2)
        go_on.set()
        thread.join()
    return {"restored": JITFunction.run is run and torch.empty is make, "launched": [*launched]}


CASES = (
    launched_while_it_is_pending,
    rehearsed_again,
    compiled_badly,
    served_by_nobody,
    rehearsed_side_by_side,
    compiled_in_order,
)


class Warnings(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        warnings.append(record.getMessage())


if __name__ == "__main__":
    put_in(CARD)
    triton.runtime.driver.set_active(Recording(CARD.target))
    triton.knobs.compilation.listener = lambda *, src, cache_hit, **others: heard.append(
        (src.name, cache_hit)
    )
    logging.getLogger("nanovllm").addHandler(Warnings(logging.WARNING))
    tempfile.tempdir = sys.argv[1]
    for name, (action, body) in MODULES.items():
        text = MODULE.format(condition=IN_OTHERS, action=action, name=name, body=body)
        Path(sys.argv[1], f"{name}.py").write_text(text)
    sys.path.append(sys.argv[1])
    with OnCard(META):
        chosen = sys.argv[2:] or [case.__name__ for case in CASES]
        print(json.dumps({name: globals()[name]() for name in chosen}))
