"""nano-vLLM's workload, a run of it, its results, and the conditions that these depend on."""

import json
import os
import platform
import random
import shutil
import subprocess
import time
from datetime import datetime, timezone
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from nanovllm import LLM, SamplingParams, __version__
from nanovllm.benchmark import limits
from nanovllm.utils.device import hardware_name

ROOT = Path(__file__).parents[2]  # root of a clone; otherwise the directory of installed packages


def workload(
    num_seqs: int, seed: int, vocab_size: int
) -> tuple[list[list[int]], list[SamplingParams]]:
    """nano-vLLM's prompts and parameters; ids are reduced modulo `vocab_size`."""
    rng = random.Random(seed)
    prompts = [
        [rng.randint(0, 10000) % vocab_size for _ in range(rng.randint(100, 1024))]
        for _ in range(num_seqs)
    ]
    params = [
        SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=rng.randint(100, 1024))
        for _ in range(num_seqs)
    ]
    return prompts, params


def run_once(
    llm: LLM, prompts: list[list[int]], params: list[SamplingParams], progress: bool
) -> tuple[int, float]:
    """Generated tokens and seconds of one run; the length of every output is checked."""
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=progress)
    seconds = time.perf_counter() - start
    for output, param in zip(outputs, params, strict=True):
        if len(output.outputs[0].token_ids) != param.max_tokens:
            raise RuntimeError(f"request {output.request_id} ended before its full length")
    return sum(num_new_tokens(params)), seconds


def num_new_tokens(params: list[SamplingParams]) -> list[int]:
    """The number of tokens that each of them asks for; `max_tokens` must be set in all."""
    return [param.max_tokens or 0 for param in params]


def commit() -> str | None:
    """The commit of a clone, with `-dirty` if files have changed since; None without a clone."""
    if not (ROOT / "pyproject.toml").is_file() or shutil.which("git") is None:
        return None
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or None


def machine(device: str) -> dict[str, Any]:
    """The machine, its software and the date of a measurement on `device`."""
    driver = None
    if device.startswith("cuda") and shutil.which("nvidia-smi"):
        ask = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
        driver = subprocess.run(ask, capture_output=True, text=True, check=False).stdout.strip()
    own = getattr(os, "sched_getaffinity", None)  # Linux only; a container may not have all cores
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "hardware": hardware_name(device),
        "driver": driver or None,
        "cpu": hardware_name("cpu"),
        "cores": len(own(0)) if own else os.cpu_count(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": version("triton") if find_spec("triton") else None,
        "python": platform.python_version(),
    }


def conditions(llm: LLM) -> dict[str, Any]:
    """The conditions that a measurement depends on."""
    metrics = llm.metrics()
    keys = (
        *("attention_backend", "device", "dtype", "quantization", "kv_cache_dtype"),
        *("data_parallel_size", "tensor_parallel_size", "all_reduce", "overlap", "cuda_graphs"),
        "num_kvcache_blocks",
    )
    return {
        "commit": commit(),
        "nanovllm": __version__,
        **machine(metrics["device"]),
        **{key: metrics[key] for key in keys},
        "mixed_steps": llm.config.mixed_steps,
        "fused_kernels": llm.config.fused_kernels,
        "batch_invariant": llm.config.batch_invariant,
        "num_preemptions": metrics["num_preemptions"],
        "num_cached_tokens": metrics["num_cached_tokens"],
    }


def achieved(
    llm: LLM,
    prompts: list[list[int]],
    params: list[SamplingParams],
    seconds: float,
    *,
    bandwidth: float | None = None,
    flops: float | None = None,
    num_shared: int = 0,
) -> dict[str, Any]:
    """Bandwidth and share of the roofline of a run (`limits.report`).

    Args:
        llm: engine, after the run.
        prompts, params: workload of the run.
        seconds: duration of the run.
        bandwidth: limit of one device in bytes per second; None: the known one.
        flops: limit of one device in operations per second; None: the known one.
        num_shared: number of tokens at the beginning of all prompts that were cached before the
            run.
    """
    metrics = llm.metrics()
    itemsize = 4 if metrics["dtype"] == "float32" else 2
    config = llm.model_config
    sizes = limits.itemsizes(config, itemsize, metrics["kv_cache_dtype"], metrics["quantization"])
    work = limits.work(
        config,
        sizes,
        prompt_lens=[len(prompt) for prompt in prompts],
        output_lens=num_new_tokens(params),
        num_shared=num_shared,
    )
    name = hardware_name(metrics["device"])
    limit = limits.hardware(name, itemsize, bandwidth, flops)
    num_devices = metrics["data_parallel_size"] * metrics["tensor_parallel_size"]
    return limits.report(work, seconds, limit and limit.times(num_devices))


def publish(result: dict[str, Any], file: str | None) -> None:
    """Print the result as the last line, and append it to `file`, one JSON object per line."""
    line = json.dumps(result)
    print(line, flush=True)
    if file is not None:
        with open(file, "a", encoding="utf-8") as stream:
            stream.write(line + "\n")
