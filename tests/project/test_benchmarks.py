"""The scripts of benchmarks/ at tiny size on a CPU, and the roofline against hand computation."""

import argparse
import contextlib
import copy
import gc
import json
import math
import os
import random
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mxfp4_checkpoints
import pytest
import torch
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from benchmarks import (
    accuracy,
    cpu_vs_transformers,
    first_use,
    page,
    roofline,
    sampling_controls,
    startup,
    streams,
    workloads,
)
from benchmarks.kernels import products
from checkpoints import SMALL as SMALL_ENGINE
from checkpoints import make_checkpoint, rare, reference_model
from faults import wait_until
from nanovllm import LLM, TINY, SamplingParams
from nanovllm.benchmark import choices, harness, limits
from nanovllm.benchmark.limits import Itemsizes
from nanovllm.checkpoint.fp8 import Fp8
from nanovllm.checkpoint.int4 import Int4
from nanovllm.checkpoint.model_config import ExpertConfig, ModelConfig
from nanovllm.checkpoint.modules import Modules
from nanovllm.checkpoint.quantization import Quantization, Rule
from nanovllm.cli.main import main

with contextlib.suppress(ImportError):  # Linux has Triton
    import triton.language as tl

SMALL: dict[str, Any] = {
    "rated": lambda rng: workloads.uniform(workloads.many(rng, 3, 20), 4, True),
    "timed": lambda rng: workloads.uniform(workloads.many(rng, 2, 30), 1, False),
    "shared": lambda rng: workloads.uniform([[1] * 64 + [i] for i in range(4)], 3, False, 64),
}


def run(main: Any, monkeypatch: pytest.MonkeyPatch, *args: str) -> None:
    monkeypatch.setattr(sys, "argv", ["script", *args])
    main()


def saved(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# -- harness.py -----------------------------------------------------------------------------------


def test_figures_name_their_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what has changed since; of an installed package there is none, wherever it is."""

    def git(*args: str) -> str:
        names = ("-c", "user.name=A", "-c", "user.email=a@b.c")
        done = subprocess.run(
            ["git", *names, *args], cwd=tmp_path, check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    monkeypatch.setattr(harness, "ROOT", tmp_path)
    (tmp_path / "pyproject.toml").write_text("1")
    assert harness.commit() is None
    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message", "first")
    git("tag", "--annotate", "--message", "a release", "v1")
    assert harness.commit() == git("rev-parse", "--short", "HEAD")
    (tmp_path / "results").touch()
    assert harness.commit() == git("rev-parse", "--short", "HEAD")
    (tmp_path / "pyproject.toml").write_text("2")
    assert harness.commit() == git("rev-parse", "--short", "HEAD") + "-dirty"
    (tmp_path / "site-packages").mkdir()  # of an environment in somebody's clone
    monkeypatch.setattr(harness, "ROOT", tmp_path / "site-packages")
    assert harness.commit() is None


def test_figures_name_their_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 580.1 $1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"a GPU, {device}")
    found = harness.machine("cuda:0")
    assert found["driver"] == "580.1 --query-gpu=driver_version"
    assert found["hardware"] == "a GPU, cuda:0"
    assert found["cores"] == len(os.sched_getaffinity(0)) and found["torch"] == torch.__version__
    assert harness.machine("cpu")["driver"] is None
    program.unlink()
    assert harness.machine("cuda:0")["driver"] is None


# -- limits.py ------------------------------------------------------------------------------------


@pytest.fixture(name="config")
def config_fixture(checkpoint: Path) -> ModelConfig:
    """M 64, I 96, 2 layers, 4 query and 2 KV heads of 32, vocabulary 128."""
    return ModelConfig.from_pretrained(str(checkpoint))


LAYER = 64 * (4 + 2 + 2) * 32 + 4 * 32 * 64 + 3 * 64 * 96  # q, k, v; o; gate, up, down
HEAD = 128 * 64
BF16 = Itemsizes(2, 2, 2, 2)


@pytest.mark.parametrize(
    ("num_shared", "sizes"),
    [
        (0, BF16),
        (8, Itemsizes(1.25, 2, 2, 2)),
        (0, Itemsizes(1.25, 1, 2, 2)),
        (0, Itemsizes(1.25, 1, 2, 1)),
    ],
)
def test_work_is_the_sum_over_tokens(
    config: ModelConfig, num_shared: int, sizes: Itemsizes
) -> None:
    """Counted here token by token, with Python's integers; products in 8 bits count as half."""
    prompts, outputs = [10, 12, 9], [4, 1, 6]
    layer = LAYER if sizes.linear == 1 else 2 * LAYER  # operations
    prefill = sum(2 * layer * (n - num_shared) + 2 * HEAD for n in prompts)
    # q k^T and p v: 2 operations a product, 4 heads of 32, 2 layers; n^2 / 2 pairs as is usual
    prefill += sum(2 * 2 * 4 * 32 * 2 * (n * n - num_shared**2) // 2 for n in prompts)
    flops, steps = [], []
    for step in range(1, 6):
        contexts = [n + step for n, out in zip(prompts, outputs, strict=True) if out > step]
        flops.append(sum(2 * (layer + HEAD) + 4 * 4 * 32 * 2 * n for n in contexts))
        read = sum(n - num_shared for n in contexts) + num_shared
        weights = sizes.linear * 2 * LAYER + sizes.head * HEAD  # bytes
        steps.append(weights + sizes.kv * (2 * 2 * 2 * 32) * read)
    work = limits.work(config, sizes, prompts, outputs, num_shared)
    assert work.prefill_flops == prefill
    assert work.step_flops.tolist() == flops
    assert work.step_bytes.tolist() == steps
    # A step takes the longer of the two: arithmetic on the first device, reading on the second.
    assert work.seconds(limits.Hardware(1e30, 10.0)) == pytest.approx(
        (prefill / 10, sum(flops) / 10)
    )
    assert work.seconds(limits.Hardware(10.0, 1e30))[1] == pytest.approx(sum(steps) / 10)


def test_work_of_layers_that_are_not_quantised(config: ModelConfig) -> None:
    """The first layer's MLP, and all output projections: they are read in 16 bits, and multiplied
    at the rate of these.
    """
    plain = Modules.named("ignore", ["model.layers.0.mlp", "o_proj"])
    found = Quantization(Fp8((1, 0), "weight_scale"), "fp8", (Rule("ignore", plain),))
    mixed = replace(config, quantization=found)
    sizes = limits.itemsizes(mixed, 2, "bfloat16", "fp8")
    num_plain = 3 * 64 * 96 + 2 * 4 * 32 * 64
    num_fp8 = 2 * LAYER - num_plain
    work = limits.work(mixed, sizes, [10], [2])
    assert work.prefill_flops == 10 * (num_fp8 + 2 * num_plain) + 2 * HEAD + 2 * 2 * 4 * 32 * 100
    assert work.step_flops == num_fp8 + 2 * num_plain + 2 * HEAD + 2 * 4 * 4 * 32 * 11
    assert work.step_bytes == num_fp8 + 2 * num_plain + 2 * HEAD + 2 * 2 * (2 * 2 * 32) * 11
    sizes = limits.itemsizes(mixed, 4, "float32", "none")  # dequantised
    for found, wanted in zip(
        limits.work(mixed, sizes, [10], [2]), limits.work(config, sizes, [10], [2]), strict=True
    ):
        assert found == wanted


def test_work_of_windows_and_experts(config: ModelConfig) -> None:
    """One layer slides, the other has experts: again counted token by token."""
    names = "gate_proj", "up_proj", "down_proj"
    sparse = ExpertConfig(4, 2, 24, True, False, 0.0, False, False, False, "mlp.experts", names)
    first, second = config.layers
    layers = replace(first, window=8), replace(second, is_sparse=True)
    mixed = replace(config, layers=layers, experts=sparse)
    attention, router, expert = LAYER - 3 * 64 * 96, 64 * 4, 3 * 64 * 24
    prompts, outputs, num_shared = [10, 12], [3, 4], 6
    token = 2 * (LAYER + attention + router + 2 * expert)
    prefill = sum(token * (n - num_shared) + 2 * HEAD for n in prompts)
    for n in prompts:
        pairs = n * n / 2 - num_shared**2 / 2  # of the layer that sees all
        pairs += 8 * 8 / 2 + (n - 8) * 8 - num_shared**2 / 2  # a query beyond the window sees 8
        prefill += 4 * 4 * 32 * pairs
    flops, sizes = [], []
    for step in range(1, 4):
        contexts = [n + step for n, out in zip(prompts, outputs, strict=True) if out > step]
        flops.append(sum(token + 2 * HEAD + 4 * 4 * 32 * (n + min(n, 8)) for n in contexts))
        seen = [set(range(6)) | {(i, j) for j in range(6, n)} for i, n in enumerate(contexts)]
        slid = [
            set(range(n - 8, 6)) | {(i, j) for j in range(n) if j >= max(6, n - 8)}
            for i, n in enumerate(contexts)
        ]
        read = len(set().union(*seen)) + len(set().union(*slid))
        taken = 4 * (1 - 0.5 ** len(contexts))  # of 4 experts, each by half of the tokens
        sizes.append(2 * (LAYER + attention + router + HEAD + taken * expert + 2 * 2 * 32 * read))
    work = limits.work(mixed, BF16, prompts, outputs, num_shared)
    assert work.prefill_flops == prefill
    assert work.step_flops.tolist() == flops
    assert work.step_bytes.tolist() == sizes
    in_fp8 = limits.work(mixed, Itemsizes(2, 1, 2, 2), prompts, outputs, num_shared)
    halves = LAYER + attention + 2 * expert  # but the router
    assert in_fp8.prefill_flops == prefill - halves * sum(n - num_shared for n in prompts)
    halves = [LAYER + attention + (4 - 4 * 0.5**n) * expert for n in (2, 2, 1)]
    assert in_fp8.step_bytes.tolist() == [
        size - half for size, half in zip(sizes, halves, strict=True)
    ]


def test_limits_of_the_published_shapes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One sequence reads all weights and its own KV each step: by hand for Qwen3-0.6B."""
    run(roofline.main, monkeypatch, "--dummy", "qwen3-0.6b", "--only", "bs1", "bench-0")
    out = capsys.readouterr().out
    weights = 2 * (596_049_920 - 28 * (2 * 1024 + 2 * 128) - 1024)  # all parameters but the norms
    steps = 511 * weights + 114_688 * sum(range(129, 640))  # bytes
    flops = 2 * (weights / 2 * 128 - 151_936 * 1024 * 127) + 4 * 28 * 16 * 128 * 128**2 / 2
    rate = 512 / (steps / 4.3e12 + flops / 790e12)
    lines = {line.split()[0]: line.split() for line in out.splitlines()}
    assert int(lines["bs1"][-2]) == round(rate)
    assert int(lines["bench-0"][-2]) == 36414


def test_limits_of_experts_in_8_bits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One sequence reads half as much, but for keys and values."""
    for more in ((), ("--quantization", "fp8")):
        run(roofline.main, monkeypatch, "--dummy", "qwen3-30b-a3b", "--only", "bs1", *more)
    plain, fp8 = (int(line.split()[-2]) for line in capsys.readouterr().out.splitlines()[1::2])
    assert 1.9 * plain < fp8 < 2 * plain


def test_roofline_of_any_checkpoint_and_workload(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], checkpoint: Path
) -> None:
    args = ["--model", str(checkpoint), "--only", "bs1", "--uniform", "1", "10", "2"]
    with pytest.raises(SystemExit):  # float32: the H200's operations are those of bf16
        run(roofline.main, monkeypatch, *args)
    assert "--bandwidth" in capsys.readouterr().err
    run(roofline.main, monkeypatch, *args, "--bandwidth", "1e6", "--flops", "1e30")
    line = capsys.readouterr().out.splitlines()[-1].split()
    size = 4 * (2 * LAYER + HEAD + 2 * 2 * 2 * 32 * 11)
    assert line[:2] == ["uniform", "prefill"]
    assert float(line[-4]) == pytest.approx(size / 1e6, abs=1e-3)


def test_experts_that_a_step_touches(tmp_path: Path) -> None:
    """Those that the last tokens of prompts choose in transformers, in the mean of the layers."""
    shape = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    path = make_checkpoint(tmp_path / "model", "qwen3_moe", head_dim=16, **shape)
    rng = random.Random(3)
    prompts = [[rng.randrange(100) for _ in range(n)] for n in (5, 20, 33, 60, 7)]
    with LLM(path, **SMALL_ENGINE) as llm:
        found = choices.touched(llm, prompts)
        again = choices.touched(llm, prompts)
    assert found == again and found is not None and found.num_tokens == 5
    model, layers = reference_model(path), [set[int](), set[int]()]
    for prompt in prompts:
        logits = model(torch.tensor([prompt]), output_router_logits=True).router_logits
        for chosen, of_layer in zip(layers, logits, strict=True):
            chosen.update(of_layer[-1].topk(2).indices.tolist())
    assert found.experts == sum(map(len, layers)) / 2
    assert found.independent == pytest.approx(16 * (1 - (14 / 16) ** 5))


def test_a_checkpoint_in_8_bits_keeps_its_head(config: ModelConfig) -> None:
    """A head in INT8 is of models that were quantised while they were loaded."""
    assert limits.itemsizes(config, 2, "bfloat16", "none") == BF16
    assert limits.itemsizes(config, 2, "float8_e4m3fn", "fp8") == (1 + 1 / 32, 1, 2, 1, 2)
    fp8 = Quantization(Fp8((128, 128), "weight_scale_inv"), "fp8")
    published = replace(config, quantization=fp8)
    assert limits.itemsizes(published, 2, "bfloat16", "fp8") == (2, 1, 2, 2, 2)
    int4 = Quantization(Int4(32, "qweight", "scales", "qzeros"), "gptq")
    published = replace(config, quantization=int4)
    assert limits.itemsizes(published, 2, "bfloat16", "int4") == (2, 0.5 + 4 / 32, 2, 2, 2)


def test_unknown_hardware_has_no_limit() -> None:
    assert limits.hardware("NVIDIA H200", 2) == limits.Hardware(4.3e12, 790e12)
    assert limits.hardware("NVIDIA H200", 2, bandwidth=4e12) == limits.Hardware(4e12, 790e12)
    assert limits.hardware("NVIDIA H200", 4) is None
    assert limits.hardware("a CPU", 2) is None
    assert limits.hardware("a CPU", 2, bandwidth=1e10) is None
    assert limits.hardware("a CPU", 4, 1e10, 1e11) == limits.Hardware(1e10, 1e11)


def test_several_gpus_have_the_limits_of_all(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for size in (1, 2):
        args = ("--dummy", "qwen3-8b", "--only", "bs1", "--tensor-parallel-size", str(size))
        run(roofline.main, monkeypatch, *args)
    one, two = capsys.readouterr().out.splitlines()[1::2]
    seconds = [float(line.split(" limit ")[1].split(" s")[0]) for line in (one, two)]
    assert seconds[0] == pytest.approx(2 * seconds[1], abs=0.002)


# -- the scripts ----------------------------------------------------------------------------------


def test_bench_reports_its_share(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tiny: str,
    tmp_path: Path,
) -> None:
    """Without the limits of the device there is a bandwidth, and no share of anything."""
    monkeypatch.setattr(harness, "run_once", lambda llm, prompts, params, progress: (100, 2.0))
    file = tmp_path / "results.jsonl"
    args = ["bench", "--model", tiny, "--device", "cpu", "--num-seqs", "2", "--save", str(file)]
    assert main(args) == 0
    plain = capsys.readouterr().out.splitlines()
    assert "GB/s" in plain[-2] and "roofline" not in plain[-2]
    assert main([*args, "--bandwidth", "1e9", "--flops", "1e30"]) == 0
    line, last = capsys.readouterr().out.splitlines()[-2:]
    without, result = saved(file)
    assert result == json.loads(last) and without == json.loads(plain[-1])
    assert without["roofline_share"] is None and without["roofline_s"] is None
    assert result["roofline_s"] == pytest.approx(result["bytes_per_s"] * 2 / 1e9, rel=1e-3)
    assert result["roofline_share"] == pytest.approx(result["roofline_s"] / 2, rel=1e-3)
    assert line.endswith(f"{result['roofline_share']:.1%} of the roofline")


def test_workloads_are_measured_and_saved(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tiny: str,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(workloads, "WORKLOADS", SMALL)
    cached: list[int] = []
    measure = workloads.measure

    def recording(llm: LLM, workload: workloads.Workload) -> float:
        seconds = measure(llm, workload)
        cached.append(llm.metrics()["num_cached_tokens"])
        return seconds

    monkeypatch.setattr(workloads, "measure", recording)
    file = tmp_path / "results.jsonl"
    limit = ("--bandwidth", "1e9", "--flops", "1e10")
    options = ("--device", "cpu", "--kvcache-block-size", "64", "--repeat", "2")
    run(workloads.main, monkeypatch, "--model", tiny, *options, *limit, "--save", str(file))
    assert cached == [0] * 6 + [4 * 64, 8 * 64, 12 * 64]
    (record,) = saved(file)
    assert record == json.loads(capsys.readouterr().out.splitlines()[-1])
    assert record["benchmark"] == "workloads" and record["model"] == tiny
    for key in ("commit", "torch", "hardware", "attention_backend"):
        assert key in record
    results = record["results"]
    assert {name: result["unit"] for name, result in results.items()} == {
        "rated": "tok/s",
        "timed": "s",
        "shared": "s",
    }
    for name, tokens in (("rated", 12), ("timed", None), ("shared", None)):
        result = results[name]
        low, high = result["runs"]
        assert 0 < low <= result["median"] <= high
        seconds = tokens / result["median"] if tokens else result["median"]
        share = result["roofline_s"] / seconds
        assert result["roofline_share"] == pytest.approx(share, rel=1e-3, abs=1e-4)
        assert ("flops_per_s" in result) == (name == "timed")
        assert ("bytes_per_s" in result) == (name != "timed")


def test_streams_are_measured_beside_generate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tiny: str, tmp_path: Path
) -> None:
    drawn: list[tuple[int, list[list[int]]]] = []

    def workload(num_seqs: int, seed: int, vocab_size: int) -> Any:
        rng = random.Random(seed)
        prompts = [[rng.randrange(vocab_size) for _ in range(9)] for _ in range(num_seqs)]
        drawn.append((num_seqs, prompts))
        return prompts, [SamplingParams(max_tokens=3 + i, ignore_eos=True) for i in range(num_seqs)]

    monkeypatch.setattr(harness, "workload", workload)
    file = tmp_path / "results.jsonl"
    args = ("--model", tiny, "--device", "cpu", "--num-requests", "1", "4", "--max-tokens", "5")
    run(streams.main, monkeypatch, *args, "--repeat", "2", "--save", str(file))
    (record,) = saved(file)
    assert record == json.loads(capsys.readouterr().out.splitlines()[-1])
    assert record["benchmark"] == "streams" and record["device"] == "cpu"
    assert [num_seqs for num_seqs, _ in drawn] == [1, 4]
    assert record["results"].keys() == {"1", "4"}
    for ways in record["results"].values():
        assert ways.keys() == streams.WAYS.keys() and ways["generate"]["share"] == 1
        for result in ways.values():
            low, high = result["runs"]
            assert 0 < low <= result["median"] <= high
    run(streams.main, monkeypatch, *args, "--only", "async-stream", "--repeat", "1")
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["results"]["4"].keys() == {"generate", "async-stream"}
    one = streams.one_stream

    async def losing(*args: Any) -> int:
        return await one(*args) - 1

    monkeypatch.setitem(streams.WAYS, "async-stream", streams.in_tasks(losing))
    with pytest.raises(RuntimeError, match="async-stream: 2 tokens instead of 3"):
        run(streams.main, monkeypatch, *args, "--only", "async-stream", "--repeat", "1")


@pytest.mark.slow
def test_startup_times_fresh_processes(
    monkeypatch: pytest.MonkeyPatch, tiny: str, tmp_path: Path
) -> None:
    caches: list[str] = []
    popen = startup.subprocess.run

    def recording(command: list[str], env: dict[str, str], **options: Any) -> Any:
        cache = env.get("TRITON_CACHE_DIR")
        caches.append(
            "kept" if cache == "kept" else "empty" if not list(Path(cache).iterdir()) else ""
        )
        return popen(command, env=env, **options)

    monkeypatch.setenv("TRITON_CACHE_DIR", "kept")
    monkeypatch.setattr(startup.subprocess, "run", recording)
    file = tmp_path / "results.jsonl"
    monkeypatch.setattr(startup, "PAGE_CACHE", tmp_path / "drop_caches")
    startup.PAGE_CACHE.touch()
    args = ("--model", tiny, "--device", "cpu", "--repeat", "1", "--first", "--save", str(file))
    run(startup.main, monkeypatch, *args)
    assert caches == ["kept", "kept", "empty", "empty"]
    assert startup.PAGE_CACHE.read_text() == "3"
    (record,) = saved(file)
    assert record["benchmark"] == "startup" and record["device"] == "cpu"
    assert set(record["results"]) == {"warm", "cold", "first"}
    log = [f"LLM(...) to {line}" for line in ("weights", "KV cache", "attention")]
    for name, parts in record["results"].items():
        compiled = parts.pop("kernels", None)
        assert compiled == (None if name == "warm" else {"median": 0, "unit": ""})
        assert [*parts] == [*startup.PARTS[:3], *log, startup.PARTS[3], "in all"]
        medians = {part: values["median"] for part, values in parts.items()}
        assert all(0 < median < 60 for median in medians.values())
        assert medians["in all"] == pytest.approx(sum(medians[part] for part in startup.PARTS))
        assert sorted(medians[line] for line in log) == [medians[line] for line in log]
        assert medians[log[-1]] <= medians["LLM(...)"]


# -- first_use.py ---------------------------------------------------------------------------------

TINY_WORK = first_use.Size(num_seqs=6, group=2, prefix=64, prompt=16, output=10)
SHORT_STEPS = {"max_num_batched_tokens": 64, "max_num_seqs": 32, "kvcache_block_size": 16}


COUNTED = [
    *("plain", "one prompt", "arriving prompts", "long prompts", "prefix of all prompts"),
    *("prefix of a group", "prefixes of groups", "samples of prompts", "min_tokens"),
]


@pytest.mark.parametrize("names", [COUNTED, rare([*first_use.KINDS])], ids=["counted", "all"])
def test_work_is_anew_the_second_time(
    names: list[str], tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each kind computes as many tokens of prompts again, and is what it is called."""
    counted: list[dict[str, int]] = []
    timed = first_use.timed

    def counting(work: Any, kernels: Any) -> dict[str, Any]:
        before = llm.metrics()
        result = timed(work, kernels)
        counts = {key: value for key, value in llm.metrics().items() if key.startswith("num_")}
        counted.append({key: value - before[key] for key, value in counts.items()})
        return result

    monkeypatch.setattr(first_use, "timed", counting)
    kinds: dict[str, dict[str, int]] = {}
    with LLM(tiny, device="cpu", **SHORT_STEPS) as llm:
        for name in names:
            counted.clear()
            result = first_use.measure(llm, name, TINY_WORK, first_use.Compilations())
            assert {*result} == {"first", "second", "allowed", "is_quick"}, name
            first, second = counted
            assert first["num_prefill_tokens"] == second["num_prefill_tokens"] > 0, name
            assert first["num_cached_tokens"] == second["num_cached_tokens"], name
            kinds[name] = first
    own = 6 * 16  # tokens that are no prompt's but its own
    assert kinds["plain"]["num_prefill_tokens"] == kinds["arriving prompts"]["num_prefill_tokens"]
    assert kinds["plain"]["num_prefill_tokens"] == own
    assert kinds["plain"]["num_generated_tokens"] == kinds["min_tokens"]["num_generated_tokens"]
    assert kinds["arriving prompts"]["num_steps"] == 8 + 10  # each half takes ten, two of both
    assert kinds["long prompts"]["num_prefill_tokens"] == 2 * 128 == 4 * 64  # four steps' worth
    assert kinds["one prompt"]["num_finished"] == 1
    assert kinds["samples of prompts"]["num_generated_tokens"] == 2 * 2 * 10
    shared = {name: kinds[name]["num_prompt_tokens"] for name in kinds if "prefix" in name}
    assert shared == {
        "prefix of all prompts": 6 * (64 + 16),
        "prefix of a group": 2 * (64 + 16),
        "prefixes of groups": 4 * (8 + 8 + 16),
    }
    assert all(kinds[name]["num_cached_tokens"] > 0 for name in shared)


def test_work_that_cannot_be_done_says_why(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def left_out(name: str) -> str:
        result = first_use.measure(llm, name, TINY_WORK, first_use.Compilations())
        assert startup.row_of(name, result) == f"| {name} | left out: {result['left_out']} | | |"
        return result["left_out"]

    with LLM(str(checkpoint), device="cpu", max_model_len=60, **SHORT_STEPS) as llm:
        assert left_out("bad_words") == "the checkpoint has no tokenizer"
        assert left_out("structured output") == "the checkpoint has no tokenizer"
        assert "max_model_len 60" in left_out("long prompts")
        monkeypatch.setattr(llm, "tokenizer", "one")
        monkeypatch.setattr(first_use.importlib.util, "find_spec", lambda name: None)
        assert left_out("structured output") == "llguidance is not installed"


def stored(x_ptr, N):  # type: ignore[no-untyped-def]
    tl.store(x_ptr, N)


def test_kernels_are_compiled_once_and_found_then(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Triton compiles for a GPU that is not there; another listener still hears."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime.jit import JITFunction

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    heard: list[bool] = []
    listener = lambda cache_hit, **_: heard.append(cache_hit)  # noqa: E731
    monkeypatch.setattr(triton.knobs.compilation, "listener", listener)
    kernels = first_use.Compilations()
    kernels.listen()

    def compile_for(value: int) -> dict[str, list[str]]:
        signature = {"x_ptr": "*i32", "N": "constexpr"}
        source = ASTSource(JITFunction(stored), signature, constexprs={"N": value})
        triton.compile(source, target=GPUTarget("cuda", 90, 32))
        return kernels.take()

    assert compile_for(1) == compile_for(2) == {"compiled": ["stored"], "found": []}
    assert startup.num_kernels(str(tmp_path)) == 2
    assert compile_for(1) == {"compiled": [], "found": ["stored"]}
    assert heard == [False, False, True]


def turn(seconds: float, *compiled: str, collector: float = 0.0) -> dict[str, Any]:
    """Made up."""
    return {
        "seconds": seconds, "collector": collector, "compiled": [*compiled], "found": []
    }  # fmt: skip


@pytest.mark.slow
def test_first_uses_begin_with_an_empty_cache(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one process, or in one for each kind."""
    caches: list[Path] = []
    popen = startup.subprocess.Popen

    def recording(command: list[str], env: dict[str, str], **options: Any) -> Any:
        cache = Path(env["TRITON_CACHE_DIR"])
        assert cache not in caches and not list(cache.iterdir())
        caches.append(cache)
        return popen(command, env=env, **options)

    monkeypatch.setattr(startup.subprocess, "Popen", recording)
    args = ("--model", tiny, "--device", "cpu", "--first-use", "--num-seqs", "4")
    args += ("--only", "top_k", "plain", "--save", str(tmp_path / "saved"))
    run(startup.main, monkeypatch, *args)
    assert len(caches) == 1
    run(startup.main, monkeypatch, *args, "--apart")
    assert len(caches) == 3
    lines: list[str] = []
    for record in saved(tmp_path / "saved"):
        assert record["benchmark"] == "first_use" and record["device"] == "cpu"
        assert [*record["results"]] == ["LLM(...)", "top_k", "plain"]
        for name in ("top_k", "plain"):
            result = record["results"][name]
            first, second = (
                result[turn]["seconds"] - result[turn]["collector"] for turn in ("first", "second")
            )
            assert result["allowed"] == pytest.approx(1.1 * second + 0.05)
            assert result["is_quick"] == (first <= result["allowed"])
        slow = [name for name in ("top_k", "plain") if not record["results"][name]["is_quick"]]
        lines.append(f"second and 50 ms: {', '.join(slow) or 'none'}")
    out = capsys.readouterr().out
    assert re.findall(r"second and 50 ms: .*$", out, re.M) == lines
    assert out.count("\n| top_k | ") == out.count("\n| LLM(...) | ") == 2


def test_the_first_time_may_take_a_little_more(monkeypatch: pytest.MonkeyPatch) -> None:
    paused = turn(1.34, collector=0.2), turn(1.3, collector=0.3)
    turns = iter([turn(1.14), turn(1.0), turn(1.16), turn(1.0), *paused, turn(1.14), *paused[1:]])
    llm = SimpleNamespace(model_config=SimpleNamespace(vocab_size=9))
    monkeypatch.setattr(first_use, "timed", lambda work, kernels: next(turns))
    monkeypatch.setattr(first_use, "KINDS", {"nothing": lambda job: None})
    results = [
        first_use.measure(llm, "nothing", TINY_WORK, first_use.Compilations()) for _ in range(4)
    ]
    assert [result["is_quick"] for result in results] == [True, False, True, True]


def test_pauses_of_the_collector_are_told_apart() -> None:
    for collect, is_paused in ((gc.collect, True), (lambda: None, False)):
        times = first_use.timed(collect, first_use.Compilations())
        assert 0 <= times["collector"] <= times["seconds"] and (times["collector"] > 0) == is_paused
    assert not [each for each in gc.callbacks if "collector_pauses" in repr(each)]


def test_rows_name_what_was_compiled() -> None:
    result = {"first": turn(3.5, "_a", "_b"), "second": turn(0.25, "_c")}
    assert startup.row_of("top_p", result) == "| top_p | 3.500 s | 0.250 s | 2: _a, _b; then _c |"
    result["second"] = turn(0.45, collector=0.2)
    assert startup.row_of("top_p", result) == (
        "| top_p | 3.500 s | 0.450 s (0.20 of it the collector's) | 2: _a, _b |"
    )


# -- page.py --------------------------------------------------------------------------------------


def test_commands_of_the_page_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parsers of their scripts take them, and the page keeps their results. Limits go to those
    that give shares of them.
    """
    limits: dict[str, tuple[float | None, float | None]] = {}

    class TakenError(Exception):
        pass

    def taking(parser: argparse.ArgumentParser, *args: Any) -> Any:
        namespace, unknown = parse(parser, *args)
        assert namespace.save == "FILE" and not unknown
        limits[script] = namespace.bandwidth, namespace.flops
        raise TakenError

    parse = argparse.ArgumentParser.parse_known_args  # which parse_args calls
    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", taking)
    tables = page.with_limits(3.35e12, None)
    assert page.with_limits(None, None) == page.TABLES and tables.keys() == page.TABLES.keys()
    for command in (each for table in tables.values() for each in table.columns.values()):
        program, script, *args = shlex.split(command)
        assert program == "python"
        monkeypatch.setattr(sys, "argv", [script, *args, "--save", "FILE"])
        with pytest.raises(TakenError):
            runpy.run_path(str(harness.ROOT / script), run_name="__main__")
    with_shares = {script for script in limits if limits[script] == (3.35e12, None)}
    assert with_shares == {"bench.py", "benchmarks/workloads.py"}
    assert {limits[script] for script in limits.keys() - with_shares} == {(None, None)}


MEASURED = {
    "hardware": "a GPU", "driver": "1.2", "cpu": "a CPU", "cores": 16, "torch": "2.11",
    "cuda": "13", "triton": "3.6", "python": "3.12", "nanovllm": "0.1.0", "commit": "abc",
    "date": "2026-01-02T03:04:05+00:00",
}  # fmt: skip


def test_the_page_shows_medians_and_where_they_are_from() -> None:
    """Medians of made-up records of all kinds, side by side; missing ones have a reason."""
    columns = {"A": "python a", "B": "python b", "C": "python c", "D": "python d"}
    starts = {"A": "python start", "B": "python use", "C": "python streams"}
    tables = [page.Table("Title", columns), page.Table("Starts", starts)]
    rate = {"median": 28867.4, "runs": [28000.0, 29000.0], "unit": "tok/s", "roofline_share": 0.834}
    time = {"median": 0.0019, "runs": [0.0017, 0.0022], "unit": "s", "roofline_share": None}
    works = {"benchmark": "workloads", "construction_s": 8.84}
    both = {**works, "results": {"bench-0": rate, "first-token": time}, **MEASURED}
    own = {"benchmark": "bench", "seed": 0, "tok_per_s_median": 5.0, "tok_per_s_range": [4.0, 6.0]}
    start = {"benchmark": "startup", "results": {"cold": {
        "in all": {"median": 23.94, "runs": [23.9, 25.0], "unit": "s"},
        "kernels": {"median": 49, "unit": ""},
    }}}  # fmt: skip
    use = {"benchmark": "first_use", "results": {
        "LLM(...)": {"first": turn(5.0, "_a")},
        "top_k": {"first": turn(3.66, "_a", "_b"), "second": turn(0.21)},
        "bad_words": {"left_out": "no tokenizer"},
    }}  # fmt: skip
    assert page.WAYS.keys() == streams.WAYS.keys()
    streamed = {"benchmark": "streams", "results": {"1": {"async-stream": {**rate, "share": 0.98}}}}
    entries = {
        "python a": {"record": both},
        "python b": {"record": {**own, **MEASURED, "commit": "def"}},
        "python c": {"error": "failed with exit code 3"},
        "python start": {"record": {**start, **MEASURED}},
        "python use": {"record": {**use, **MEASURED}},
        "python streams": {"record": {**streamed, **MEASURED}},
    }
    assert page.render(tables, entries).splitlines() == [
        "## Title", "",
        "| | A | B | C | D |", "|---|---|---|---|---|",
        "| bench, seed 0 | 28,867 tok/s (28,000–29,000), 83 % | 5 tok/s (4–6) |  |  |",
        "| first token of 128 | 1.9 ms (1.7–2.2) |  |  |  |",
        "| `LLM(...)` | 8.8 s |  |  |  |", "",
        "- A: `python a` (2026-01-02, machine 1)",
        "- B: `python b` (2026-01-02, machine 2)",
        "- C: `python c` (failed with exit code 3)",
        "- D: `python d` (not measured yet)", "",
        "## Starts", "",
        "| | A | B | C |", "|---|---|---|---|",
        "| cold: in all | 23.9 s (23.9–25.0) |  |  |",
        "| cold: kernels | 49 |  |  |",
        "| LLM(...) |  | 5.00 s; 1 kernel |  |",
        "| top_k |  | 3.66 s, then 0.21 s; 2 kernels |  |",
        "| bad_words |  | left out: no tokenizer |  |",
        "| 1 request, `AsyncLLM.stream` |  |  | "
        "28,867 tok/s (28,000–29,000), 0.980 of `generate` |", "",
        "- A: `python start` (2026-01-02, machine 1)",
        "- B: `python use` (2026-01-02, machine 1)",
        "- C: `python streams` (2026-01-02, machine 1)", "",
        "## Machines", "",
        *(
            f"{number}. a GPU (driver 1.2), 16 cores of a CPU, PyTorch 2.11 (CUDA 13), Triton 3.6, "
            f"Python 3.12, nanovllm 0.1.0 at {commit}"
            for number, commit in ((1, "abc"), (2, "def"))
        ),
    ]  # fmt: skip


def is_running(pid: int) -> bool:
    """One that nobody has waited for is not."""
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_the_page_goes_on_where_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A command fails, and takes the place of nothing that was measured; one is cut off, with its
    processes; what was measured is not measured again.
    """
    script = tmp_path / "script.py"
    script.write_text(
        "import json, pathlib, subprocess, sys\n"
        "kind, folder, *_, file = sys.argv[1:]\n"
        "seen, child = pathlib.Path(folder, kind), pathlib.Path(folder, 'child')\n"
        "seen.write_text(seen.read_text() + '.' if seen.is_file() else '.')\n"
        "if kind == 'hangs' and not child.is_file():\n"
        "    wait = [sys.executable, '-c', 'import threading; threading.Event().wait()']\n"
        "    process = subprocess.Popen(wait)\n"
        "    child.write_text(f'{process.pid}.')\n"
        "    process.wait()\n"
        "if kind == 'fails': sys.exit(3)\n"
        f"record = {{**{MEASURED!r}, 'benchmark': 'bench', 'seed': 0, 'tok_per_s_median': 5.0,\n"
        "          'tok_per_s_range': [4.0, 6.0]}\n"
        "pathlib.Path(file).write_text(json.dumps(record))\n"
    )
    monkeypatch.setattr(harness, "commit", lambda: "abc")
    kinds = ("works", "fails", "hangs")
    columns = {kind: f"python {script} {kind} {tmp_path}" for kind in kinds}
    monkeypatch.setattr(page, "TABLES", {"t": page.Table("Title", columns)})
    args = ("--output", str(tmp_path / "found"))

    def measure(*more: str) -> tuple[list[int], str]:
        """Number of runs of each command so far, and the page."""
        with pytest.raises(SystemExit, match="1"):
            run(page.main, monkeypatch, *args, *more)
        times = [len((tmp_path / kind).read_text()) for kind in kinds]
        return times, (tmp_path / "found.md").read_text("utf-8")

    child, waits = tmp_path / "child", page.subprocess.Popen.wait

    def until_it_hangs(process: Any, timeout: float | None = None) -> int:
        if timeout is not None and process.args[2] == "hangs":
            assert 0 < timeout <= 600
            wait_until(lambda: child.is_file() and child.read_text().endswith("."))
            raise page.subprocess.TimeoutExpired(process.args, timeout)
        return waits(process)

    monkeypatch.setattr(page.subprocess.Popen, "wait", until_it_hangs)
    times, text = measure("--minutes", "10")
    assert times == [1, 1, 1]
    assert "fails: " in text and "failed with exit code 3" in text
    assert "not done in the time that was left" in text
    wait_until(lambda: not is_running(int(child.read_text()[:-1])))
    times, text = measure()
    assert times == [1, 2, 2]
    assert "| bench, seed 0 | 5 tok/s (4–6) |  | 5 tok/s (4–6) |" in text
    with (tmp_path / "found.jsonl").open("a") as file:  # as of an earlier commit
        entry = {"command": columns["fails"], "record": {**MEASURED, "commit": "old"}}
        entry["record"] |= {
            "benchmark": "bench", "seed": 0, "tok_per_s_median": 7.0, "tok_per_s_range": [7.0, 7.0]
        }  # fmt: skip
        file.write(json.dumps(entry) + "\n")
    times, text = measure()
    assert times == [1, 3, 2]
    assert "| bench, seed 0 | 5 tok/s (4–6) | 7 tok/s (7–7) | 5 tok/s (4–6) |" in text
    assert "1 of the commands missing" in capsys.readouterr().out


def test_cpu_comparison_counts_useful_tokens(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    small = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 48, "head_dim": 16}
    monkeypatch.setattr(cpu_vs_transformers, "SHAPE", {**cpu_vs_transformers.SHAPE, **small})
    file = tmp_path / "results.jsonl"
    sizes = ("--num-seqs", "5", "--longest", "24", "--layers", "1", "--batch-sizes", "2", "5")
    options = ("--threads", "1", "--repeat", "1", "--save", str(file))
    run(cpu_vs_transformers.main, monkeypatch, *sizes, *options)
    (record,) = saved(file)
    prompts, counts = cpu_vs_transformers.workload(5, 24)
    assert record["tokens"] == sum(counts) and len(prompts) == 5
    assert 16 <= min(counts) < max(counts) <= 24
    assert len(record["results"]) == 4
    for name, result in record["results"].items():
        assert result["equal_outputs"] == 5, name
        assert result["median"] > 0
    assert "5 of 5 outputs equal ours" in capsys.readouterr().out


# -- plot.py --------------------------------------------------------------------------------------


def record_of(model: str, hardware: str = "NVIDIA H200") -> dict[str, Any]:
    """A made-up record, as workloads.py might save one."""
    results = {
        "bench-0": {"median": 20000.0, "unit": "tok/s", "roofline_share": 0.5},
        "prefill": {"median": 0.5, "unit": "s", "roofline_share": 0.4},
    }
    record = {"benchmark": "workloads", "model": model, "hardware": hardware, "results": results}
    return record | UNQUANTISED


UNQUANTISED = {"quantization": "none", "dtype": "bfloat16", "kv_cache_dtype": "bfloat16"}


def test_plot_draws_bars_to_scale(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plot = pytest.importorskip("benchmarks.plot", reason="matplotlib is not installed")
    file, picture = tmp_path / "results.jsonl", tmp_path / "picture.png"
    results = {"num_seqs": 256, "tok_per_s_median": 25000.0, "roofline_share": 0.6}
    own = {"benchmark": "bench", "model": "qwen3-0.6b", "hardware": "NVIDIA H200", "seed": 0}
    own |= UNQUANTISED
    # The last four are not to be drawn.
    records = [record_of("qwen3-0.6b"), {**own, **results}, {"record": record_of("qwen3-8b")}]
    records += [{"benchmark": "startup", **UNQUANTISED}, {**own, **results, "num_seqs": 3}]
    records += [{**own, **results, "quantization": "fp8", "tok_per_s_median": 30000.0}]
    records += [{"command": "python bench.py", "error": "failed with exit code 1"}]
    file.write_text("\n".join(map(json.dumps, records)))
    run(plot.main, monkeypatch, str(file), "--output", str(picture))
    assert plot.read_results([str(file)], "NVIDIA H200")["qwen3-0.6b"] == {
        "bench-0": {"median": 25000.0, "unit": "tok/s", "roofline_share": 0.6},  # the last
        "prefill": records[0]["results"]["prefill"],
    }
    data = picture.read_bytes()
    assert data.startswith(b"\x89PNG") and len(data) < 100_000
    peers = {"A": {"bench-0": [8000, 10000], "prefill": [1.0, 1.25]}, "B": {"bench-0": [24000]}}
    drawn = plot.bars(records[0]["results"], peers)
    assert drawn == {
        "A": [(0.25, "10.0k"), (0.2, "1.00")],  # a peer's best
        "B": [(0.6, "24.0k"), None],
        plot.OURS: [(0.5, "20.0k"), (0.4, "0.50")],
    }


def test_plot_compares_like_with_like(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plot = pytest.importorskip("benchmarks.plot", reason="matplotlib is not installed")
    file = tmp_path / "results.jsonl"
    for record, message in (
        (record_of("qwen3-0.6b", "another GPU"), "hardware, NVIDIA H200, got another GPU"),
        (record_of("a model"), r"no model of \['a model'\]"),
    ):
        file.write_text(json.dumps(record))
        with pytest.raises(SystemExit):
            run(plot.main, monkeypatch, str(file), "--output", str(tmp_path / "picture.png"))
        assert re.search(message, capsys.readouterr().err)


def test_sampling_controls_are_measured_beside_none(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling_controls, "PROMPT", 20)
    monkeypatch.setattr(sampling_controls, "OUTPUT", 4)
    args = ("--model", tiny, "--device", "cpu", "--num-seqs", "2", "--repeat", "1")
    kept = ("--only", "one", "--save", str(tmp_path / "saved"))
    run(sampling_controls.main, monkeypatch, *args, *kept)
    [result] = saved(tmp_path / "saved")
    assert result["results"].keys() == {"none", "one"}
    assert all(row["median"] > 0 for row in result["results"].values())
    assert result["results"]["none"]["cost"] == 0


def test_a_quantised_checkpoint_is_measured_as_it_is(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    accuracy.round_to_int4(Path(tiny), tmp_path / "int4")
    (tmp_path / "text").write_text("127+345=472 count from 17: 18 19 20")
    args = ["--model", str(tmp_path / "int4"), "--text", str(tmp_path / "text"), "--device", "cpu"]
    with pytest.raises(SystemExit):
        run(accuracy.main, monkeypatch, *args, "--settings", "bfloat16", accuracy.INT4)
    assert "the weights are quantised: leave it out" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run(accuracy.main, monkeypatch, "--model", str(tmp_path / "text"))
    assert "must be the directory of a checkpoint or a name" in capsys.readouterr().err
    kept = {"float32", "float16", "bfloat16", "float32, FP8 KV", "bfloat16, FP8 KV"}
    run(accuracy.main, monkeypatch, *args, "--save", str(tmp_path / "saved"))
    [result] = saved(tmp_path / "saved")
    assert result["results"].keys() == kept


@pytest.mark.parametrize(
    ("quantization", "bits"), [(None, 16), ("fp8", 8), ("compressed-tensors", 8), ("awq", 4.25)]
)
def test_dummies_are_in_as_many_bits(
    quantization: str | None,
    bits: float,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A thousand steps of one sequence read all weights of the 8B shape, the head in 16 bits or in
    8.
    """
    options = () if quantization is None else ("--quantization", quantization)
    run(
        roofline.main,
        monkeypatch,
        "--dummy",
        "qwen3-8b",
        "--only",
        "bs1",
        "--uniform",
        "1",
        "1",
        "1001",
        *options,
    )
    line = next(line for line in capsys.readouterr().out.splitlines() if "uniform" in line)
    seconds = float(line.split("decode")[1].split()[0])
    head = 151936 * 4096 * (1 if quantization == "fp8" else 2)
    matrices = 36 * 4096 * (6144 + 4096 + 3 * 12288) * bits / 8
    assert seconds == pytest.approx(1000 * (head + matrices) / 4.3e12, rel=0.05)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_products_of_a_layer(family: str, tmp_path: Path) -> None:
    """Every product once, with the bytes of its weights; of experts those that tokens choose."""
    shape = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
    path = make_checkpoint(tmp_path, family, **(shape if family == "qwen3_moe" else {}))
    with LLM(str(path), **SMALL_ENGINE) as llm, torch.inference_mode():
        built = llm.model_runner.built
        [layer, *_] = built.step.model.model.layers
        found = products.products(layer, 3, built.build.dtype, built.device)
        M = llm.model_config.hidden_size
        for product in found:
            product.call()
    names = [product.name for product in found]
    of_mlp = ["mlp.experts", "mlp.gate"] if family == "qwen3_moe" else ["mlp.gate_up_proj"]
    assert len(names) == 4 and {*names} >= {*of_mlp, "self_attn.qkv_proj", "self_attn.o_proj"}
    if family == "qwen3_moe":
        [experts] = [product for product in found if product.name == "mlp.experts"]
        assert experts.num_operations == 6 * 3 * 2 * M * 40
        of_one = 3 * M * 40 * 4
        assert experts.num_bytes % of_one == 0 and 2 * of_one <= experts.num_bytes <= 6 * of_one


def test_accuracy_of_experts_in_4_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Numbers that MXFP4 has exactly stay as they are; others err. No other rounding fits."""
    packed, plain = mxfp4_checkpoints.checkpoints(tmp_path)
    accuracy.round_to_mxfp4(plain, tmp_path / "again")
    of_both = [accuracy.read_tensors(directory) for directory in (packed, tmp_path / "again")]
    assert of_both[0].keys() == of_both[1].keys()
    for name in of_both[0]:
        if name.endswith("_blocks"):
            values = [
                convert_moe_packed_tensors(each[name], each[name.replace("_blocks", "_scales")])
                for each in of_both
            ]
            assert values[0].equal(values[1])
    tensors = accuracy.read_tensors(plain)
    torch.manual_seed(0)
    noise = {name: x + torch.randn(x.shape) / 50 for name, x in tensors.items() if "_proj" in name}
    save_file(tensors | noise, plain / "model.safetensors")
    for directory in (packed, plain):
        shutil.copy(Path(TINY, "tokenizer.json"), directory)
        shutil.copy(Path(TINY, "tokenizer_config.json"), directory)
    (tmp_path / "text").write_text("127+345=472 count from 17: 18 19 20")
    args = ["--text", str(tmp_path / "text"), "--device", "cpu", "--save", str(tmp_path / "saved")]
    run(accuracy.main, monkeypatch, "--model", str(plain), *args)
    [result] = saved(tmp_path / "saved")
    rows = result["results"]
    assert accuracy.INT4 not in rows and "bfloat16, FP8 weights" not in rows
    assert rows[accuracy.MXFP4]["mean_error"] > rows["bfloat16"]["mean_error"] > 0


def test_accuracy_against_transformers(
    reference: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Perplexity, likeliest tokens and errors, by transformers with weights in both dtypes."""
    text = tmp_path / "text"
    text.write_text("127+345=472 count from 17: 18 19 20, or not?" * 3)
    args = ("--text", str(text), "--length", "50", "--device", "cpu")
    settings = ("--settings", "bfloat16", "float32, FP8 KV")
    run(accuracy.main, monkeypatch, *args, *settings, "--save", str(tmp_path / "saved"))
    [result] = saved(tmp_path / "saved")
    logprobs, greedy = {}, {}
    ids = list(text.read_bytes())  # the tokenizer is one of bytes
    for dtype in (torch.float32, torch.bfloat16):
        model = copy.deepcopy(reference).to(dtype)
        parts = [ids[begin : begin + 50] for begin in range(0, len(ids), 50)]
        with torch.inference_mode():
            rows = [model(torch.tensor([part])).logits[0, :-1].float() for part in parts]
        following = [torch.tensor(part[1:])[:, None] for part in parts]
        found = [r.log_softmax(-1).gather(1, f) for r, f in zip(rows, following, strict=True)]
        logprobs[dtype], greedy[dtype] = torch.cat(found), torch.cat(rows).argmax(-1)
    exact, rounded = logprobs.values()
    assert result["tokens"] == len(exact)
    rows = result["results"]
    assert rows["float32"]["perplexity"] == pytest.approx(math.exp(-exact.mean()), rel=1e-3)
    assert rows["float32"]["max_error"] == 0 and rows["float32"]["greedy_agreement"] == 1
    agreement = (greedy[torch.float32] == greedy[torch.bfloat16]).float().mean().item()
    assert rows["bfloat16"]["greedy_agreement"] == pytest.approx(agreement, abs=3 / len(exact))
    error = (exact - rounded).abs().mean().item()
    assert 0.5 * error < rows["bfloat16"]["mean_error"] < 2 * error
    assert rows["float32, FP8 KV"]["mean_error"] > 1e-3
    assert rows.keys() == {"float32", *settings[1:]}
