"""Profile of a step: its kernels, by time.

    python benchmarks/kernels/profile_step.py --dummy qwen3-0.6b --decode 1 64 256 --prefill

Decode steps have B sequences with prompts of 100 to 1024 tokens (128 for B = 1); prefill is the
workload of that name. Kernels run one after the other here, without dependent launch, so that their
times add up to the step's; "as it runs" is the time of a step with it.
"""

import argparse
import collections
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.workloads import make, measure
from nanovllm import LLM, SamplingParams
from nanovllm.benchmark import harness
from nanovllm.cli import bench
from nanovllm.kernels import device_features as hopper

STEPS = 8  # profiled
TOP = 14  # kernels shown


def kernels(events: profile, steps: int) -> dict[str, Any]:
    """Print and return the longest kernels of one step: microseconds, calls, name."""
    times: collections.Counter[str] = collections.Counter()
    calls: collections.Counter[str] = collections.Counter()
    for event in events.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times[event.name] += event.device_time
            calls[event.name] += 1
    total, count = sum(times.values()) / steps / 1e3, sum(calls.values()) / steps
    print(f"  {total:10.3f} ms in {count:.0f} kernels")
    rows = [(t / steps, calls[name] / steps, name) for name, t in times.most_common(TOP)]
    for t, n, name in rows:
        print(f"  {t:10.1f} us = {n:6.1f} x {t / n:8.2f} us  {name[:90]}")
    return {"total_ms": total, "kernels": count, "longest": rows}


def decode_step(llm: LLM, steps: int) -> float:
    """Milliseconds of a step, the mean of `steps`."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        llm.step()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / steps * 1e3


def decode(llm: LLM, B: int, profiled: bool) -> dict[str, Any]:
    """One batch size, profiled or timed."""
    rng = random.Random(0)
    params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=60)
    for _ in range(B):
        length = 128 if B == 1 else rng.randint(100, 1024)
        prompt = [rng.randrange(10000) % llm.model_config.vocab_size for _ in range(length)]
        llm.add_request(prompt, params)
    decode_step(llm, 20)  # prefill, and the first decodes
    if profiled:
        print(f"decode of {B}, one kernel after the other:")
        with profile(activities=[ProfilerActivity.CUDA]) as events:
            decode_step(llm, STEPS)
        result = kernels(events, STEPS)
    else:
        result = {"ms": decode_step(llm, 3 * STEPS)}
        print(f"decode of {B}: {result['ms']:.3f} ms a step as it runs")
    while not llm.is_finished():
        llm.step()
    return result


def prefill(llm: LLM, profiled: bool) -> dict[str, Any]:
    """The workload of that name, profiled or timed."""
    workload = make("prefill", llm.model_config.vocab_size)
    seconds = min(measure(llm, workload) for _ in range(3))
    print(f"prefill: {seconds * 1e3:.1f} ms")
    if not profiled:
        return {"ms": seconds * 1e3}
    with profile(activities=[ProfilerActivity.CUDA]) as events:
        measure(llm, workload)
    return kernels(events, 1)


def main() -> None:
    """Time with dependent launch, then profile without."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    bench.add_options(parser, dummy="qwen3-0.6b")
    parser.add_argument(
        "--decode",
        nargs="*",
        type=bench.positive,
        default=[1, 64, 256],
        help="batch sizes (1 64 256)",
    )
    parser.add_argument("--prefill", action="store_true", help="the step of a prefill, too")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device, PyTorch sees none")
    results: dict[str, Any] = {}
    for profiled in (False, True):
        hopper.dependent_launch = not profiled
        llm, _ = bench.build(args)
        for B in args.decode:
            results.setdefault(f"decode {B}", {}).update(decode(llm, B, profiled))
        if args.prefill:
            results.setdefault("prefill", {}).update(prefill(llm, profiled))
        conditions = harness.conditions(llm)
        llm.exit()
    result = {"benchmark": "profile_step", "model": bench.model_name(args), "results": results}
    harness.publish({**result, **conditions}, args.save)


if __name__ == "__main__":
    main()
