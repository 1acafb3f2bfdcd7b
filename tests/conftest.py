"""Shared set-up: devices, markers, checkpoints, their engines, and their reference in transformers.

Fixtures import what they need: most tests need no transformers.
"""

import contextlib
import functools
import gc
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# The models are tiny: threads would only wait for each other, those of processes that tests start
# as well. Before numpy and torch are imported.
os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

from nanovllm import TINY

FIRST = ("test_workers.py", "test_replicas.py")


@functools.cache  # tests hide it
def has_cuda() -> bool:
    """Whether there is a GPU."""
    import torch

    return torch.cuda.is_available()


def pytest_xdist_auto_num_workers() -> int:
    """A GPU is for one process: tests measure its memory, and engines take all of it."""
    return 0 if has_cuda() else min(4, os.cpu_count() or 1)


def pytest_configure(config: pytest.Config) -> None:
    """Prepare a process that runs tests: the main one of pytest-xdist would import torch before it
    starts the others.
    """
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        return
    # Imports, and how pytest rewrites tests, leave no garbage. It would be looked for in all of
    # torch and transformers again and again: a third of the time until the first test runs.
    gc.disable()
    if not has_cuda():
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported: kernels run on the CPU
        with contextlib.suppress(ImportError):  # Linux has Triton
            from interpreter import make_faster, round_to_fp8

            make_faster()
            round_to_fp8()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    count = torch.cuda.device_count()
    for item in items:
        for marker, needed in (("gpu", 1), ("multi_gpu", 2)):
            if item.get_closest_marker(marker) and count < needed:
                reason = f"needs {needed} CUDA device(s), PyTorch sees {count}"
                item.add_marker(pytest.mark.skip(reason=reason))
    # The longest first, and each by one process: at the end, another would wait for it, or start
    # the replicas that all of a module's tests share once more.
    items.sort(key=lambda item: [*FIRST, item.path.name].index(item.path.name))


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # or libraries tell of leaks as the interpreter ends


@pytest.fixture(autouse=True)
def freeze_what_is_there() -> None:
    """Engines collect garbage when they end; they need not search all of torch, transformers and
    the earlier tests for it: that was a fifth of the time of all tests. Cycles through an engine
    that several tests share are not collected then; its `exit` needs none.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def cpu_unless_marked_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests without the marker mean the CPU by `device="auto"`, wherever they run; modules with a
    DEVICE and tests with a `kernel_device` choose it themselves.
    """
    import torch

    chooses = hasattr(request.module, "DEVICE") or "kernel_device" in request.fixturenames
    if not request.node.get_closest_marker("gpu") and not chooses:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def kernel_device() -> str:
    """Device of the kernels: a CPU runs them in Triton's interpreter."""
    return "cuda" if has_cuda() else "cpu"


@pytest.fixture(autouse=True)
def ctrl_c_raises() -> None:
    """Background jobs ignore it, and a test that interrupts at any line leaves another handler."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def set_capability(
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Callable[[tuple[int, int]], None]]:
    """Have PyTorch say that its GPUs are of a compute capability."""
    import torch

    from nanovllm.utils import device

    def forget() -> None:
        device.capability.cache_clear()
        device.triton_refusal.cache_clear()

    def set_(capability: tuple[int, int]) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=None: capability)
        forget()

    yield set_
    forget()


@pytest.fixture(scope="session")
def tiny() -> str:
    """Directory of the embedded checkpoint."""
    return TINY


@pytest.fixture(scope="session")
def reference() -> Any:
    """The embedded checkpoint in transformers' own Qwen3, float32 on the CPU: the oracle."""
    import torch
    from transformers import Qwen3ForCausalLM

    return Qwen3ForCausalLM.from_pretrained(TINY, torch_dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint without tokenizer. Tests copy it to change it."""
    from checkpoints import make_checkpoint

    return make_checkpoint(tmp_path_factory.mktemp("checkpoint") / "qwen3")


@pytest.fixture
def llm(checkpoint: Path) -> Iterator[Any]:
    """A fresh engine."""
    from checkpoints import SMALL
    from nanovllm import LLM

    with LLM(checkpoint, **SMALL) as llm:
        yield llm


@pytest.fixture(params=[False, True], ids=["synchronous", "overlap"])
def either_llm(checkpoint: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A fresh engine without and with overlap; with it most faults find a step under way."""
    from checkpoints import SMALL
    from nanovllm import LLM

    with LLM(checkpoint, overlap=request.param, **SMALL) as llm:
        yield llm


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines have their ranks in threads."""
    from ranks_in_threads import ThreadedExecutor

    from nanovllm.engine import llm_engine

    monkeypatch.setattr(llm_engine, "Executor", ThreadedExecutor)


@pytest.fixture
def low_guesses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Admission that expects one token of everybody, so that preemption has work."""
    from nanovllm.scheduling.admission import LengthEstimator

    monkeypatch.setattr(LengthEstimator, "remaining", lambda self, seq: 1)


@pytest.fixture
def inject(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that makes calls in worker processes fail, see `faults.injector`."""
    from faults import injector

    return injector(tmp_path, monkeypatch)
