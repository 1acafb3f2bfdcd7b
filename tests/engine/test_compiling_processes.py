"""Processes that compile kernels: how they start, and what comes of it if they cannot, or end."""

import logging
import os
import subprocess
import sys
import tempfile
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nanovllm import LLM, TINY
from nanovllm.compiling.compiler import num_processes
from nanovllm.engine import llm_engine
from nanovllm.startup import builder
from nanovllm.startup.builder import Builder
from nanovllm.utils import cgroup

triton = pytest.importorskip("triton")

SERVE = """
import os, signal, threading
from nanovllm.compiling.absent_gpu import Target
from nanovllm.compiling.compiler import Compiler
from nanovllm.compiling.server import Job

compiler = Compiler(Target("cuda", 90, 32, 1 << 30), 1)
job = Job("nanovllm.kernels.norm", "no_such_kernel", "{}")
compiler.submit(job)
compiler.wait(job)
print(compiler.failed[job])
os.kill(compiler._process.pid, signal.SIGKILL)
compiler._receiver.join(60)
print(compiler._process.returncode, "no zombie")
compiler.submit(job._replace(function="another"))
print(list(compiler.failed.values())[1])
compiler.close()
"""


def test_modules_beside_the_user_are_not_imported(tmp_path: Path) -> None:
    """`python -m` puts the working directory before the standard library: with a json.py there the
    server ended at its start.
    """
    where, script = tmp_path / "with a space", tmp_path / "scripts" / "serve.py"
    where.mkdir()
    script.parent.mkdir()
    (where / "json.py").write_text("raise SystemExit('the wrong json')")
    script.write_text(SERVE)
    ended = subprocess.run(
        [sys.executable, str(script)],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=where,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    unknown, zombie, over = ended.stdout.splitlines()
    assert unknown.startswith("AttributeError: "), "it was imported, and has no such kernel"
    assert zombie == "-9 no zombie" and over == "the compile server has ended"
    assert "wrong json" not in ended.stderr


@pytest.mark.parametrize("executable", ["", None])
def test_where_no_python_can_be_started_kernels_are_compiled_at_launch(
    executable: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Programs that embed Python are such a case. Nothing is left behind."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(builder, "triton_refusal", lambda device: None)
    monkeypatch.setattr(builder, "target_of", lambda device: ("cuda", 90, 32, 1 << 30))
    monkeypatch.setattr(sys, "executable", executable)
    one: Any = SimpleNamespace(
        device=torch.device("cuda"),
        group=SimpleNamespace(size=1),
        config=SimpleNamespace(data_parallel_size=1),
    )
    with caplog.at_level(logging.WARNING):
        assert Builder.start_compiler(one) is None
    assert "the compile server cannot be started (this program" in caplog.text
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("cores", "quota", "num_ranks", "most"),
    [
        (16, inf, 1, 8),
        (16, 5.5, 1, 5),
        (16, 0.5, 1, 1),
        (16, inf, 4, 2),
        (2, inf, 8, 1),
        (256, inf, 1, 32),
    ],
)
def test_processes_take_half_of_the_cores_and_no_more_than_a_quota(
    cores: int, quota: float, num_ranks: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(cores), raising=False)
    monkeypatch.setattr(cgroup, "cpus", lambda: quota)
    assert num_processes(num_ranks) == most


def test_the_tokenizer_and_the_weights_are_loaded_while_kernels_compile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The rehearsal has found these kernels by then."""
    calls = list[str]()

    def note(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def noted(*args: Any) -> Any:
            calls.append(name)
            return original(*args)

        monkeypatch.setattr(owner, name, noted)

    for owner, name in (
        (Builder, "build_model"),
        (Builder, "rehearse"),
        (llm_engine, "load_tokenizer"),
        (Builder, "load"),
        (Builder, "allocate_kv_cache"),
    ):
        note(owner, name)
    with LLM(TINY, num_kvcache_blocks=4):
        pass
    order = ["build_model", "rehearse", "load_tokenizer", "load", "allocate_kv_cache"]
    assert calls == order
