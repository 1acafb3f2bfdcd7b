"""Time to the first token of a process: the imports, `LLM(...)`, and the first request.

Each run is a fresh process, because compiled kernels and the CUDA context live as long as one.

    warm    Triton's compile cache as earlier runs left it (one run that is not timed fills it)
    cold    an empty compile cache; files stay in the page cache
    first   as on a machine that has just started: nothing in the page cache either (with --first,
            and the right to empty it: root, on Linux)

    python benchmarks/startup.py --dummy qwen3-0.6b [--repeat 3] [--first] [--save FILE]

Prints median and range, of `LLM(...)` also how long it took until each line of its log. With
--first-use, kinds of work are timed instead, each for the first time and for the second, in one
process with an empty compile cache, or, with --apart, in one for each:

    python benchmarks/startup.py --dummy qwen3-0.6b --first-use [--apart] [--only KIND ...]

This prints a table for Markdown, with the kernels that the work itself compiled, and names the
rows whose first time is more than 1.1 times the second and 50 ms, pauses of Python's collector left
out of both. The last line is JSON.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.first_use import KINDS, RATIO, SLACK, Size
from benchmarks.sampling_controls import write_tokenizer
from nanovllm.benchmark import harness
from nanovllm.benchmark.shapes import SHAPES
from nanovllm.cli import bench

CHILD = """
import json, logging, sys, time
times = [time.perf_counter()]
import torch
times.append(time.perf_counter())
from nanovllm import LLM, SamplingParams
times.append(time.perf_counter())
log = []
logger, handler = logging.getLogger("nanovllm"), logging.Handler()
def emit(record):
    name = record.getMessage().split(":")[0]
    if name in ("weights", "states", "KV cache", "attention"):  # others come if something is slow
        log.append([name, time.perf_counter()])
handler.emit = emit
logger.setLevel(logging.INFO)
logger.addHandler(handler)
llm = LLM(sys.argv[1], **json.loads(sys.argv[2]))
times.append(time.perf_counter())
llm.generate([[1, 2, 3]], SamplingParams(max_tokens=1), use_tqdm=False)
times.append(time.perf_counter())
from nanovllm.benchmark.harness import conditions
seconds = [b - a for a, b in zip(times, times[1:])]
print(json.dumps([seconds, {name: at - times[2] for name, at in log}, conditions(llm)]))
"""
FIRST_USE = """
import json, sys
from benchmarks.first_use import Size, run
model, options, names, size, settles = json.loads(sys.argv[1])
run(model, options, names, Size(*size), settles)
"""
PARTS = ("import torch", "import nanovllm", "LLM(...)", "first request")
PAGE_CACHE = Path("/proc/sys/vm/drop_caches")


class Start(NamedTuple):
    """A start that was timed.

    Attributes:
        seconds: times of each of `PARTS`.
        log: seconds that `LLM(...)` took until a line of its log, by how the line begins.
        conditions: conditions of the engine.
    """

    seconds: list[float]
    log: dict[str, float]
    conditions: dict[str, Any]

    @property
    def parts(self) -> dict[str, float]:
        """Seconds by name, those within `LLM(...)` after it, and the sum."""
        parts = dict(zip(PARTS, self.seconds, strict=True))
        within = {f"LLM(...) to {name}": seconds for name, seconds in self.log.items()}
        request = {PARTS[-1]: parts.pop(PARTS[-1])}
        return {**parts, **within, **request, "in all": sum(self.seconds)}


def environment(cache: str | None) -> dict[str, str]:
    """Environment of a timed process; `cache` is Triton's directory, None: the default."""
    path = [str(harness.ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    return env if cache is None else env | {"TRITON_CACHE_DIR": cache}


def start(directory: str, options: dict[str, Any], cache: str | None) -> Start:
    """Time a fresh process."""
    command = [sys.executable, "-c", CHILD, directory, json.dumps(options)]
    env = environment(cache)
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"the process that was timed failed with exit code {done.returncode}")
    return Start(*json.loads(done.stdout.splitlines()[-1]))


def empty_page_cache() -> None:
    """Have the next process read its files from the disk."""
    os.sync()
    PAGE_CACHE.write_text("3")


def num_kernels(cache: str) -> int:
    """Kernels that Triton has put into its cache, from whichever process."""
    return sum(not path.name.startswith("__grp__") for path in Path(cache).rglob("*.json"))


def time_starts(args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """Results and conditions of starts with a warm and with a cold cache."""
    results: dict[str, dict[str, Any]] = {}
    with bench.checkpoint(args) as (directory, options):
        start(directory, options, None)  # fills the compile cache
        for name in ("warm", "cold", *["first"] * args.first):
            starts, compiled = [], 0
            for _ in range(args.repeat):
                with tempfile.TemporaryDirectory() as empty:
                    if name == "first":
                        empty_page_cache()
                    starts.append(start(directory, options, None if name == "warm" else empty))
                    compiled = num_kernels(empty)
            for part in starts[0].parts:
                values = [each.parts[part] for each in starts]
                low, median, high = min(values), statistics.median(values), max(values)
                print(f"{name:5s} {part:22s} {median:7.2f} s  ({low:.2f}-{high:.2f})", flush=True)
                entry = {"median": median, "runs": sorted(values), "unit": "s"}
                results.setdefault(name, {})[part] = entry
            if name != "warm":
                print(f"{name:5s} kernels {compiled:17d}", flush=True)
                results[name]["kernels"] = {"median": compiled, "unit": ""}
    return results, starts[-1].conditions


def lines_of(directory: str, options: dict[str, Any], names: list[str], args: Any) -> Iterator[Any]:
    """Lines from a fresh process with an empty compile cache, one for each kind of work."""
    given = [directory, options, names, Size.of(args.num_seqs), args.settle]
    with tempfile.TemporaryDirectory() as empty:
        command = [sys.executable, "-c", FIRST_USE, json.dumps(given)]
        with subprocess.Popen(
            command, env=environment(empty), stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            yield from map(json.loads, process.stdout)
    if process.returncode:
        sys.exit(f"the process that was timed failed with exit code {process.returncode}")


def collected(result: dict[str, Any]) -> str:
    """The collector's pauses within a time, if they are of 10 ms and more."""
    return (
        f" ({result['collector']:.2f} of it the collector's)" if result["collector"] >= 0.01 else ""
    )


def row_of(name: str, result: dict[str, Any]) -> str:
    """A row of the table, for Markdown."""
    if "left_out" in result:
        return f"| {name} | left out: {result['left_out']} | | |"
    times = [result[turn] for turn in ("first", "second") if turn in result]
    cells = [f"{each['seconds']:.3f} s{collected(each)}" for each in times]
    kernels = [", ".join(each["compiled"]) or "none" for each in times]
    if len(kernels) > 1 and kernels[1] == "none":
        kernels.pop()
    counts = f"{len(times[0]['compiled'])}: " if times[0]["compiled"] else ""
    return f"| {name} | {cells[0]} | {' '.join(cells[1:])} | {counts}{'; then '.join(kernels)} |"


def time_first_uses(args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """Results of the kinds of work, and conditions."""
    results: dict[str, Any] = {}
    parts = [[name] for name in args.only] if args.apart else [args.only]
    with bench.checkpoint(args) as (directory, options):
        if options.get("load_format") == "dummy":  # a directory of our own, never the user's
            write_tokenizer(directory, SHAPES[args.dummy])
        print("| work | first | second | kernels that it compiled |\n|---|---|---|---|", flush=True)
        for names in parts:
            for name, result in lines_of(directory, options, names, args):
                if name == "conditions":
                    conditions = result
                elif name not in results:  # each process has its LLM(...)
                    results[name] = result
                    print(row_of(name, result), flush=True)
    slow = [name for name, result in results.items() if not result.get("is_quick", True)]
    rule = f"{RATIO} times the second and {1000 * SLACK:.0f} ms"
    print(f"first time longer than {rule}: {', '.join(slow) or 'none'}")
    return results, conditions


def main() -> None:
    """Time starts, or kinds of work."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    bench.add_options(parser)
    parser.add_argument("--repeat", type=bench.positive, default=3, help="starts of each kind (3)")
    parser.add_argument("--first", action="store_true", help="starts without the page cache, too")
    parser.add_argument(
        "--first-use", action="store_true", help="kinds of work for the first time, in its place"
    )
    parser.add_argument(
        "--only", nargs="+", choices=[*KINDS], default=[*KINDS], metavar="KIND", help="(all)"
    )
    parser.add_argument("--apart", action="store_true", help="a process for each kind of work")
    parser.add_argument(
        "--settle",
        choices=("second", "start", "never"),
        default="second",
        help="wait for kernels that compile in the background before each kind's second time "
        "(default), once at the start, or never",
    )
    parser.add_argument("--num-seqs", type=bench.positive, default=256, help="prompts (256)")
    args = parser.parse_args()
    if args.first and not os.access(PAGE_CACHE, os.W_OK):
        parser.error(f"--first needs root on Linux: {PAGE_CACHE} cannot be written")
    results, conditions = (time_first_uses if args.first_use else time_starts)(args)
    name = "first_use" if args.first_use else "startup"
    result = {"benchmark": name, "model": bench.model_name(args), "results": results}
    harness.publish({**result, **conditions}, args.save)


if __name__ == "__main__":
    main()
