"""The tables of docs/performance.md, as one dated run.

    python benchmarks/page.py [--only TABLE ...] [--minutes M] [--output NAME]
                              [--bandwidth B] [--flops F]

Each column of a table is a command, run in a process of its own. Its result is kept in
NAME.jsonl at once, with commit, machine and date, and NAME.md is written anew: tables for the page,
their commands and the machines. A command that fails is said to have failed, and the next one runs.

Tables of several GPUs are left out where there is one, if --only does not name them. --bandwidth
and --flops are the limits of a GPU that is not known, for the commands that give shares
of them. The same call again goes on with what NAME.jsonl does not have of this commit, so that it
can be done in calls of M minutes (a command that is not done by then is ended, and begins anew in
the next). The exit code is 1 while something is missing.
"""

import argparse
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.startup import PAGE_CACHE, collected
from nanovllm.benchmark import harness
from nanovllm.cli.options import new_file, rate

FP8 = "--quantization fp8 --kv-cache-dtype fp8"
BENCH, WORKLOADS = "python bench.py", "python benchmarks/workloads.py"
STARTUP, STREAMS = "python benchmarks/startup.py", "python benchmarks/streams.py"
SIX = "bench-0 bench-1 bs1 prefill shared-prefix wide"
# Nothing in the page cache either, where that may be emptied.
FIRST = f"{STARTUP} --first" if os.access(PAGE_CACHE, os.W_OK) else STARTUP
FIRST_USE = f"{STARTUP} --first-use --settle start --max-model-len 16384"
SEVERAL = ("gpus",)  # tables of two GPUs


class Table(NamedTuple):
    """A table of the page.

    Attributes:
        heading: heading of its section.
        columns: commands by the heads of their columns.
    """

    heading: str
    columns: dict[str, str]


TABLES = {
    "bf16": Table(
        "One GPU, in bf16",
        {
            "Qwen3-0.6B shape": f"{WORKLOADS} --dummy qwen3-0.6b --only {SIX}",
            "Qwen3-8B shape": f"{WORKLOADS} --dummy qwen3-8b --only {SIX}",
        },
    ),
    "arriving": Table(
        "More prompts than places, and the first token",
        {
            "1,024 sequences, 256 at once": (
                f"{BENCH} --dummy qwen3-0.6b --num-seqs 1024 --max-num-seqs 256 --repeat 3"
            ),
            "one prompt": f"{WORKLOADS} --dummy qwen3-0.6b --only first-token --repeat 9",
        },
    ),
    "fp8": Table(
        "In 8 bits",
        {
            "Qwen3-8B shape, both": f"{WORKLOADS} --dummy qwen3-8b {FP8} --only {SIX}",
            "Qwen3-0.6B shape, KV cache": (
                f"{WORKLOADS} --dummy qwen3-0.6b --kv-cache-dtype fp8 --only bench-0 bench-1"
            ),
        },
    ),
    "long": Table(
        "Prompts longer than a step",
        {
            "Qwen3-8B shape, both": (
                f"{WORKLOADS} --dummy qwen3-8b {FP8} --max-model-len 32768 --only long"
            )
        },
    ),
    "int4": Table(
        "In 4 bits",
        {
            "Qwen3-8B shape, AWQ": (
                f"{WORKLOADS} --dummy qwen3-8b --quantization awq --only bench-0 bs1 prefill"
            )
        },
    ),
    "experts": Table(
        "Mixtures of experts",
        {
            "Qwen3-30B-A3B shape": (
                f"{WORKLOADS} --dummy qwen3-30b-a3b --only bench-0 bs1 prefill shared-prefix"
            ),
            "FP8": (
                f"{WORKLOADS} --dummy qwen3-30b-a3b --quantization fp8 --only bench-0 bs1 prefill"
            ),
            "gpt-oss-20b shape": f"{WORKLOADS} --dummy gpt-oss-20b --only bench-0 bs1 prefill",
            "gpt-oss-120b shape": f"{WORKLOADS} --dummy gpt-oss-120b --only bench-0 bs1 prefill",
        },
    ),
    "states": Table(
        "Layers with a state",
        {
            "Qwen3.5-0.8B shape": f"{WORKLOADS} --dummy qwen3.5-0.8b --only bench-0 bs1 prefill",
            "Qwen3.5-9B shape": (
                f"{WORKLOADS} --dummy qwen3.5-9b --only bench-0 bs1 prefill shared-prefix"
            ),
            "Qwen3.5-35B-A3B shape, FP8": (
                f"{WORKLOADS} --dummy qwen3.5-35b-a3b --quantization fp8 --only bench-0 bs1 prefill"
            ),
        },
    ),
    "start": Table(
        "Start-up",
        {
            "Qwen3-0.6B shape": f"{FIRST} --dummy qwen3-0.6b --max-model-len 4096",
            "Qwen3-8B shape, FP8": f"{FIRST} --dummy qwen3-8b --quantization fp8",
        },
    ),
    "first-use": Table(
        "Work for the first time",
        {
            "Qwen3-0.6B shape": f"{FIRST_USE} --dummy qwen3-0.6b",
            "Qwen3-8B shape, FP8": f"{FIRST_USE} --dummy qwen3-8b --quantization fp8",
        },
    ),
    "streams": Table(
        "Tokens as they come",
        {"Qwen3-0.6B shape": f"{STREAMS} --dummy qwen3-0.6b --num-requests 1 64 256"},
    ),
    "gpus": Table(
        "Several GPUs",
        {
            "2 GPUs": (
                f"{WORKLOADS} --dummy qwen3-8b --tensor-parallel-size 2 "
                "--only bench-0 bs1 prefill shared-prefix"
            ),
            "2 GPUs, FP8": (
                f"{WORKLOADS} --dummy qwen3-8b --tensor-parallel-size 2 {FP8} --only bench-0"
            ),
            "2 replicas": (
                f"{BENCH} --dummy qwen3-8b --data-parallel-size 2 --num-seqs 512 --repeat 3"
            ),
        },
    ),
}
ROWS = {  # of the page, by names of workloads
    "bench-0": "bench, seed 0",
    "bench-1": "bench, seed 1",
    "bench-2": "bench, seed 2",
    "bs1": "one sequence",
    "prefill": "prefill of 131,072 tokens",
    "shared-prefix": "256 prompts sharing 2048 tokens",
    "wide": "1024 short prompts",
    "first-token": "first token of 128",
    "long": "four prompts of 32,000 tokens",
}
WAYS = {  # of streams.py
    "generate": "`LLM.generate`",
    "stream": "`LLM.stream`",
    "async-stream": "`AsyncLLM.stream`",
    "async-generate": "`AsyncLLM.generate`",
}


def with_limits(bandwidth: float | None, flops: float | None) -> dict[str, Table]:
    """`TABLES`, with a GPU's limits for the commands that give shares of the roofline."""
    limits = {"bandwidth": bandwidth, "flops": flops}
    flags = "".join(f" --{name} {value:g}" for name, value in limits.items() if value is not None)

    def limited(command: str) -> str:
        return command + flags if command.startswith((BENCH, WORKLOADS)) else command

    return {
        name: Table(heading, {head: limited(command) for head, command in columns.items()})
        for name, (heading, columns) in TABLES.items()
    }


# -- cells ----------------------------------------------------------------------------------------


def figure(median: float, runs: Iterable[float], unit: str) -> str:
    """A median and its range, as the page has them."""
    values, digits = [median, min(runs), max(runs)], 0
    if unit == "s" and median < 0.1:
        values, unit, digits = [1000 * value for value in values], "ms", 1
    elif unit == "s":
        digits = 3 if median < 10 else 1
    middle, low, high = (f"{value:,.{digits}f}" for value in values)
    return f"{middle} {unit} ({low}–{high})"


def cells(record: dict[str, Any]) -> dict[str, str]:
    """Results of a command, by row."""
    kind = record["benchmark"]
    if kind == "bench":
        row = f"bench, seed {record['seed']}"
        return {row: figure(record["tok_per_s_median"], record["tok_per_s_range"], "tok/s")}
    results = record["results"]
    if kind == "workloads":
        found = {ROWS.get(name, name): _with_share(result) for name, result in results.items()}
        return {**found, "`LLM(...)`": f"{record['construction_s']:.1f} s"}
    if kind == "startup":
        return {
            f"{name}: {part}": figure(entry["median"], entry["runs"], "s")
            if entry["unit"]
            else f"{entry['median']}"
            for name, parts in results.items()
            for part, entry in parts.items()
        }
    if kind == "streams":
        return {
            f"{count} request{'s' if count != '1' else ''}, {WAYS[way]}": _with_base(result)
            for count, ways in results.items()
            for way, result in ways.items()
        }
    return {name: _first_and_second(result) for name, result in results.items()}


def _with_share(result: dict[str, Any]) -> str:
    """A workload, with its share of the roofline where that is known."""
    share = result.get("roofline_share")
    of_roofline = "" if share is None else f", {100 * share:.0f} %"
    return figure(result["median"], result["runs"], result["unit"]) + of_roofline


def _with_base(result: dict[str, Any]) -> str:
    """A way of streams.py, with what it has of the rate of `generate`."""
    rate = figure(result["median"], result["runs"], result["unit"])
    return f"{rate}, {result['share']:.3f} of `generate`"


def _first_and_second(result: dict[str, Any]) -> str:
    """A kind of work, with the kernels that it compiled."""
    if "left_out" in result:
        return f"left out: {result['left_out']}"
    turns = [result[turn] for turn in ("first", "second") if turn in result]
    times = ", then ".join(f"{turn['seconds']:.2f} s{collected(turn)}" for turn in turns)
    count = sum(len(turn["compiled"]) for turn in turns)
    return f"{times}; {count} kernel{'s' if count != 1 else ''}" if count else times


# -- the page -------------------------------------------------------------------------------------


def describe_machine(record: dict[str, Any]) -> str:
    """The machine and the versions of a command's run."""
    driver, cuda = record.get("driver"), record.get("cuda")
    facts = [
        f"{record['hardware']}" + (f" (driver {driver})" if driver else ""),
        f"{record['cores']} cores of {record['cpu']}",
        f"PyTorch {record['torch']}" + (f" (CUDA {cuda})" if cuda else ""),
        f"Triton {record['triton']}",
        f"Python {record['python']}",
        f"nanovllm {record['nanovllm']} at {record['commit'] or 'no commit'}",
    ]
    return ", ".join(facts)


def render(tables: Iterable[Table], entries: dict[str, dict[str, Any]]) -> str:
    """The page's tables, by what has become of each command."""
    machines: list[str] = []
    parts = []
    for heading, columns in tables:
        found = {head: entries.get(command, {}) for head, command in columns.items()}
        measured = [cells(entry["record"]) if "record" in entry else {} for entry in found.values()]
        lines = [f"## {heading}", ""]
        if rows := list(dict.fromkeys(row for column in measured for row in column)):
            lines += [f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
            for row in rows:
                lines.append(f"| {row} | {' | '.join(each.get(row, '') for each in measured)} |")
            lines.append("")
        for head, entry in found.items():
            state = entry.get("error", "not measured yet")
            if "record" in entry:
                machine = describe_machine(entry["record"])
                if machine not in machines:
                    machines.append(machine)
                date = entry["record"]["date"][:10]
                state = f"{date}, machine {machines.index(machine) + 1}"
            lines.append(f"- {head}: `{columns[head]}` ({state})")
        parts.append("\n".join(lines))
    told = [f"{number}. {machine}" for number, machine in enumerate(machines, 1)]
    return "\n\n".join([*parts, "\n".join(["## Machines", "", *told])]) + "\n"


# -- running --------------------------------------------------------------------------------------


def run(command: str, seconds: float | None) -> dict[str, Any]:
    """The `record` of a command, or the `error` by which it has none.

    Args:
        command: command line that begins with python and takes --save.
        seconds: time limit.
    """
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "record"
        argv = [sys.executable, *shlex.split(command)[1:], "--save", str(file)]
        # A group of its own, so that all its processes end with it, and give the GPU back.
        process = subprocess.Popen(argv, cwd=harness.ROOT, start_new_session=True)
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            return {"error": "not done in the time that was left"}
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if code:
            return {"error": f"failed with exit code {code}"}
        return {"record": json.loads(file.read_text("utf-8").splitlines()[-1])}


class Book:
    """Results of the commands: NAME.jsonl, and the page made from it."""

    def __init__(self, name: str, tables: dict[str, Table]) -> None:
        self._tables = tables
        self.records, self.page = Path(f"{name}.jsonl"), Path(f"{name}.md")
        text = self.records.read_text("utf-8") if self.records.is_file() else ""
        self._entries: dict[str, dict[str, Any]] = {}
        for line in text.splitlines():
            self._keep(json.loads(line))
        self.page.write_text(render(self._tables.values(), self._entries), "utf-8")

    def has(self, command: str, commit: str | None) -> bool:
        """Whether it was measured of this commit."""
        record = self._entries.get(command, {}).get("record")
        return record is not None and record["commit"] == commit

    def write(self, entry: dict[str, Any]) -> None:
        """Add what has become of a command."""
        with self.records.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(entry) + "\n")
        self._keep(entry)
        self.page.write_text(render(self._tables.values(), self._entries), "utf-8")

    def _keep(self, entry: dict[str, Any]) -> None:
        """The last one counts, but no error in the place of a measurement."""
        command = entry["command"]
        if "record" in entry or "record" not in self._entries.get(command, {}):
            self._entries[command] = entry


def main() -> None:
    """Measure what is missing, and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    measurable = [name for name in TABLES if torch.cuda.device_count() > 1 or name not in SEVERAL]
    parser.add_argument(
        "--only", nargs="+", choices=[*TABLES], default=measurable, help="tables to measure (all)"
    )
    parser.add_argument("--minutes", type=rate, help="the most that this call may take")
    parser.add_argument("--bandwidth", type=rate, help="the GPU's limit, bytes per second")
    parser.add_argument("--flops", type=rate, help="its limit, operations per second")
    parser.add_argument(
        "--output",
        type=new_file,
        default="performance",
        metavar="NAME",
        help="NAME.jsonl and NAME.md (performance, in the current directory)",
    )
    args = parser.parse_args()
    deadline = math.inf if args.minutes is None else time.monotonic() + 60 * args.minutes
    tables = with_limits(args.bandwidth, args.flops)
    book, commit, missing = Book(args.output, tables), harness.commit(), 0
    for command in (each for name in args.only for each in tables[name].columns.values()):
        left = deadline - time.monotonic()
        if book.has(command, commit):
            continue
        if left <= 0:
            missing += 1
            continue
        print(f"\n{command}", flush=True)
        entry = run(command, None if left == math.inf else left)
        book.write({"command": command, **entry})
        if "error" in entry:
            missing += 1
            print(f"{command}: {entry['error']}", file=sys.stderr)
    print(f"\n{book.page} and {book.records}: {missing or 'none'} of the commands missing")
    sys.exit(int(missing > 0))


if __name__ == "__main__":
    main()
