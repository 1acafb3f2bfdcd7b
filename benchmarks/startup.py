"""How long until the first token: the imports, `LLM(...)`, and the first request.

Each run is a fresh process, because compiled kernels and the CUDA context live as long as one.

    warm    Triton's compile cache as earlier runs left it (one run that is not timed fills it)
    cold    an empty compile cache; files stay in the page cache
    first   as on a machine that has just started: nothing in the page cache either (with --first,
            and the right to empty it: root, on Linux)

    python benchmarks/startup.py --dummy qwen3-0.6b [--repeat 3] [--first] [--save FILE]

Prints median and range; the last line is JSON.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from nanovllm.benchmark import harness
from nanovllm.cli import bench

CHILD = """
import json, sys, time
times = [time.perf_counter()]
import torch
times.append(time.perf_counter())
from nanovllm import LLM, SamplingParams
times.append(time.perf_counter())
llm = LLM(sys.argv[1], **json.loads(sys.argv[2]))
times.append(time.perf_counter())
llm.generate([[1, 2, 3]], SamplingParams(max_tokens=1), use_tqdm=False)
times.append(time.perf_counter())
from nanovllm.benchmark.harness import conditions
print(json.dumps([[b - a for a, b in zip(times, times[1:])], conditions(llm)]))
"""
PARTS = ("import torch", "import nanovllm", "LLM(...)", "first request")
PAGE_CACHE = Path("/proc/sys/vm/drop_caches")


def start(
    directory: str, options: dict[str, Any], cache: str | None
) -> tuple[list[float], dict[str, Any]]:
    """Seconds of each of `PARTS` in a fresh process, and its conditions."""
    path = [str(harness.ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    if cache is not None:
        env["TRITON_CACHE_DIR"] = cache
    command = [sys.executable, "-c", CHILD, directory, json.dumps(options)]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"the process that was timed failed with exit code {done.returncode}")
    seconds, conditions = json.loads(done.stdout.splitlines()[-1])
    return seconds, conditions


def empty_page_cache() -> None:
    """Have the next process read its files from the disk."""
    os.sync()
    PAGE_CACHE.write_text("3")


def main() -> None:
    """Time starts with a warm and with a cold cache."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    bench.add_options(parser)
    parser.add_argument("--repeat", type=bench.positive, default=3, help="starts of each kind (3)")
    parser.add_argument("--first", action="store_true", help="starts without the page cache, too")
    args = parser.parse_args()
    if args.first and not os.access(PAGE_CACHE, os.W_OK):
        parser.error(f"--first needs root on Linux: {PAGE_CACHE} cannot be written")
    results: dict[str, dict[str, Any]] = {}
    with bench.checkpoint(args) as (directory, options):
        start(directory, options, None)  # fills the compile cache
        for name in ("warm", "cold", *["first"] * args.first):
            runs = []
            for _ in range(args.repeat):
                with tempfile.TemporaryDirectory() as empty:
                    cache = None if name == "warm" else empty
                    if name == "first":
                        empty_page_cache()
                    seconds, conditions = start(directory, options, cache)
                runs.append(seconds)
            parts = [*zip(*runs, strict=True), [sum(run) for run in runs]]
            for part, values in zip((*PARTS, "in all"), parts, strict=True):
                low, median, high = min(values), statistics.median(values), max(values)
                print(f"{name:5s} {part:16s} {median:7.2f} s  ({low:.2f}-{high:.2f})", flush=True)
                entry = {"median": median, "runs": sorted(values), "unit": "s"}
                results.setdefault(name, {})[part] = entry
    result = {"benchmark": "startup", "model": bench.model_name(args), "results": results}
    harness.publish({**result, **conditions}, args.save)


if __name__ == "__main__":
    main()
