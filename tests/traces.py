"""Traces of steps that a test makes up, and headless Chromium to look at pages."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

from nanovllm import TINY
from nanovllm.benchmark.shapes import SHAPES
from nanovllm.tracing.trace_events import (
    BEGAN,
    SequenceRecord,
    StepRecord,
    image_event,
    images_waiting_event,
    names,
    recording_event,
)
from nanovllm.tracing.trace_file import TraceFile

H200: dict[str, Any] = {
    "model": "qwen3-0.6b",
    "architecture": "Qwen3ForCausalLM",
    "attention_backend": "triton",
    "device": "cuda:0",
    "device_name": "NVIDIA H200",
    "dtype": "bfloat16",
    "quantization": "none",
    "kv_cache_dtype": "bfloat16",
    "tensor_parallel_size": 1,
    "data_parallel_size": 1,
    "cuda_graphs": 36,
    "overlap": True,
    "max_num_seqs": 512,
    "max_num_batched_tokens": 16384,
    "kvcache_block_size": 256,
    "enable_prefix_caching": True,
    "windows": [],
    "config": SHAPES["qwen3-0.6b"],
    "wall_clock": 1_790_000_000.0,
}
CPU = {
    **H200,
    "device": "cpu",
    "device_name": "CPU",
    "dtype": "float32",
    "kv_cache_dtype": "float32",
    "config": json.loads(Path(TINY, "config.json").read_text()),
}


class MadeTrace:
    """Steps one after the other, and the sequences that ended meanwhile.

    Args:
        facts: of the engine.
        pid: its number.
        begin: of its first step, seconds.
    """

    def __init__(self, facts: dict[str, Any] = H200, pid: int = 0, begin: float = 1e4) -> None:
        self.facts, self.pid, self.now, self.begin = facts, pid, begin, begin
        self.lines: list[str] = []
        self.num_sequences = 0

    def step(
        self,
        seconds: float,
        *,
        prefill: int = 0,
        decode: int = 0,
        gpu: float | None = 0.97,
        running: int | None = None,
        held_by: str = "",
        used: int = 100,
        preempted: int = 0,
        context: int = 600,
        host: float = 0.1,
    ) -> "MadeTrace":
        """A step.

        Args:
            gpu: the share of its time that the GPU computes.
            context: tokens that a decode sees, and a prefill has as well.
            host: the share of its time that the host works, a quarter each in the four phases
                beside the wait.
        """
        begin, end = self.now, self.now + seconds
        part = host * seconds / 4
        device = None
        if gpu is not None and self.facts["device"] != "cpu":
            device = (begin, begin + gpu * seconds, gpu * seconds)
        rows = decode + bool(prefill)
        pairs = decode * context + prefill * (prefill + 1) // 2
        record = StepRecord(
            *(begin, begin + part, begin + 2 * part, begin + 2 * part, end - 2 * part, end - part),
            *(begin, rows, prefill, decode, decode + bool(prefill)),
            *(rows if running is None else running, 20 if held_by else 0, held_by),
            *(used, 1000 - used, preempted),
            *([rows * context], [pairs], device),
        )
        record = record._replace(booked_at=end)
        self.lines += record.events(self.pid)
        self.now = end
        return self

    def images(
        self, waiting: int, prepared: int = 0, seconds: float = 0.02, wait: float = 0.0
    ) -> "MadeTrace":
        """From now on so many requests wait for images; some have been prepared. Then the engine
        waits.
        """
        self.lines.append(images_waiting_event(self.now, waiting, 0))
        for _ in range(prepared):
            self.lines.append(image_event(2, "prepare", self.now - seconds, self.now))
        self.now += wait
        return self

    def sequence(
        self, prompt: int = 400, generated: int = 200, cached: int = 0, seconds: float = 1.0
    ) -> "MadeTrace":
        """One that ends now, and has arrived so long ago."""
        arrived = self.now - seconds
        record = SequenceRecord(
            *(self.num_sequences, self.num_sequences, 0),
            *(arrived, arrived + seconds / 10, arrived + seconds / 5, self.now),
            *(prompt, cached, generated, [], "length"),
        )
        self.num_sequences += 1
        self.lines += record.events(self.pid)
        return self


def write_trace(path: Path, *made: MadeTrace) -> Path:
    """A whole file."""
    file = TraceFile(str(path))
    for each in made:
        name = "engine" if len(made) == 1 else f"replica {each.pid}"
        file.write(
            [*names(each.pid, name, (1, 2, 3)), recording_event(BEGAN, each.facts, each.pid)]
        )
        file.write(each.lines)
    file.end()
    return path


def chromium() -> str | None:
    """The browser, if there is one."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


def browse(page: Path, scratch: Path, *more: str, query: str = "") -> tuple[str, list[str]]:
    """Open a page in headless Chromium.

    Returns:
        What the document is when its scripts have run, and what they have written to the console.
    """
    command = [
        *(chromium() or "", "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic"),
        *("--no-first-run", "--disable-background-networking", "--disable-component-update"),
        *("--disable-sync", f"--user-data-dir={scratch / 'profile'}", "--enable-logging=stderr"),
        *("--virtual-time-budget=20000", "--dump-dom", *more, page.as_uri() + query),
    ]
    environment = {**os.environ, "HOME": str(scratch)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return done.stdout, re.findall(r"CONSOLE.*", done.stderr)
