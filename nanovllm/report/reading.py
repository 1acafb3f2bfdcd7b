"""`read_trace`: a file of `tracing/trace_file.py` as arrays of steps and sequences.

Reads line by line, so the file of a killed process is read as far as it goes.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nanovllm.tracing.trace_events import BEGAN, ENDED, FULL, IMAGES_WAITING

Floats = NDArray[np.float64]
US = 1e-6  # seconds
COUNTS = (
    *("rows", "prefill_tokens", "decode_tokens", "sampled_tokens", "running", "waiting"),
    *("used_blocks", "free_blocks", "preempted"),
)
PHASES = ("schedule_us", "launch_us", "wait_us", "book_us")
IMAGE = "image"  # category
WANTED = (  # in lines
    *('"cat":"step"', '"cat":"recording"', '"args":{"request":', '"process_name"'),
    *(f'"cat":"{IMAGE}"', f'"name":"{IMAGES_WAITING}"'),
)


@dataclass
class Engine:
    """A process of a trace: an engine, or a replica of one.

    Attributes:
        name: name of the process in viewers.
        facts: facts about the engine, see `engine_facts`.
        steps: columns of [steps] float64 under the names of a step's args; times are in seconds,
            their names without `_us`. `begin` counts from the trace's first step. `seconds` is the
            time since the end of the previous step, unless the engine had no request then; `own`
            is the step's own time, as in `metrics()`. `gpu` is NaN if the device is the host.
        held_by: [steps] reason why the first waiting sequence did not run.
        images_waiting: [steps] requests that waited for their images when the step began, or the
            time without one before it.
        keys, pairs: [steps, 1 + windows] keys and pairs in the rows' attention, see `StepRecord`.
    """

    name: str
    facts: dict[str, Any]
    steps: dict[str, Floats]
    held_by: NDArray[np.str_]
    images_waiting: Floats
    keys: Floats
    pairs: Floats

    def __getitem__(self, column: str) -> Floats:
        return self.steps[column]

    @property
    def num_blocks(self) -> int:
        """Number of blocks in the engine's KV pool."""
        return int(self["used_blocks"][0] + self["free_blocks"][0])


@dataclass
class Trace:
    """The contents of a file.

    Attributes:
        image_seconds: time that threads took for each image that they prepared.
        engines: engines that computed a step, in the order of their numbers.
        sequences: args of the finished sequences, with `arrived` in seconds on the steps' clock.
        has_ended: whether the recording is complete; else its process was killed.
        is_full: whether the file reached its size limit.
    """

    engines: list[Engine]
    image_seconds: Floats
    sequences: list[dict[str, Any]]
    has_ended: bool
    is_full: bool

    @property
    def seconds(self) -> float:
        """Time from the first step's begin to the last step's end."""
        return max(float((each["begin"] + each["seconds"]).max()) for each in self.engines)

    def total(self, column: str) -> float:
        """The sum of a column over all steps of all engines."""
        return sum(float(each[column].sum()) for each in self.engines)


@dataclass
class _Process:
    name: str = "engine"
    facts: dict[str, Any] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)
    sequences: list[dict[str, Any]] = field(default_factory=list)


def read_trace(path: str) -> Trace:
    """Read a file.

    Raises:
        ValueError: if it cannot be read, is not a trace of ours, or has no step.
    """
    processes: dict[int, _Process] = {}
    seen: set[str] = set()
    image_us: list[float] = []
    counted: list[tuple[float, float]] = []  # times, and requests that wait for images from then on
    try:
        for each in _events(path):
            name, args = each["name"], each["args"]
            process = processes.setdefault(each["pid"], _Process())
            if each.get("cat") == IMAGE and name == "prepare":
                image_us.append(each["dur"])
            elif name == IMAGES_WAITING:
                counted.append((each["ts"] * US, args["requests waiting"]))
            elif each.get("cat") == "step":
                process.steps.append(each)
            elif name == "request":
                process.sequences.append({**args, "arrived": each["ts"]})
            elif name == "process_name":
                process.name = args["name"]
            elif name in (BEGAN, ENDED, FULL):
                seen.add(name)
                process.facts = args if name == BEGAN else process.facts
        busy = [processes[pid] for pid in sorted(processes) if processes[pid].steps]
        origin = min((step["ts"] for process in busy for step in process.steps), default=0.0)
        sequences = [seq for process in processes.values() for seq in process.sequences]
        for sequence in sequences:
            sequence["arrived"] = (sequence["arrived"] - origin) * US
        engines = [_engine(process, origin, sorted(counted)) for process in busy]
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except (KeyError, TypeError, ValueError, RecursionError):
        raise _no_trace(path) from None
    if BEGAN not in seen:
        raise _no_trace(path)
    if not engines:
        raise ValueError(
            f"{path} has no step: nothing was computed during the recording, or its process was "
            "killed within a second"
        )
    seconds = np.array(image_us, np.float64) * US
    return Trace(engines, seconds, sequences, ENDED in seen, FULL in seen)


def _no_trace(path: str) -> ValueError:
    return ValueError(
        f"{path} must be a trace of nanovllm, as `LLM(model, trace={path!r})` or `with "
        f"llm.trace({path!r})` records one"
    )


def _events(path: str) -> Iterator[dict[str, Any]]:
    """The events that a report needs. The last line may be incomplete."""
    with Path(path).open(encoding="utf-8") as file:
        torn: ValueError | None = None
        for line in file:
            if torn is not None:
                raise torn
            if any(mark in line for mark in WANTED):
                try:
                    yield json.loads(line.strip().rstrip(","))
                except ValueError as error:
                    torn = error


def _engine(process: _Process, origin: float, counted: list[tuple[float, float]]) -> Engine:
    process.steps.sort(key=lambda step: step["ts"])
    args = [step["args"] for step in process.steps]
    times = {"begin": "ts", "seconds": "dur"}
    columns = {name: _column(process.steps, key) * US for name, key in times.items()}
    columns["begin"] -= origin * US
    columns |= {name: _column(args, name) for name in COUNTS}
    columns |= {name.removesuffix("_us"): _column(args, name) * US for name in PHASES}
    columns["gpu"] = _timed(_column(args, "gpu_us") * US, columns["seconds"])
    gaps = _gaps(columns["begin"], columns["seconds"], process.sequences)
    columns |= {"own": columns["seconds"], "seconds": columns["seconds"] + gaps}
    columns["begin"] = columns["begin"] - gaps
    return Engine(
        process.name,
        process.facts,
        columns,
        np.array([each["held_by"] for each in args]),
        _images_waiting(columns["begin"] + origin * US, counted),
        np.array([each["keys"] for each in args], np.float64),
        np.array([each["pairs"] for each in args], np.float64),
    )


def _images_waiting(begin: Floats, counted: list[tuple[float, float]]) -> Floats:
    """[steps] the count that held at each time."""
    times = np.array([at for at, _ in counted], np.float64)
    counts = np.array([0.0, *(count for _, count in counted)], np.float64)
    return counts[np.searchsorted(times, begin, "right")]


def _timed(gpu: Floats, seconds: Floats) -> Floats:
    """GPU time of each step. A step launched before the recording began was not timed and counts
    as an average one.
    """
    known = ~np.isnan(gpu)
    if known.any():
        gpu = np.where(known, gpu, seconds * gpu[known].sum() / seconds[known].sum())
    return gpu


def _gaps(begin: Floats, seconds: Floats, sequences: list[dict[str, Any]]) -> Floats:
    """[steps] time before each step without a step under way, but with an open sequence."""
    ends = np.concatenate([begin[:1], (begin + seconds)[:-1]])
    arrived = np.sort([seq["arrived"] for seq in sequences])
    ended = np.sort([seq["arrived"] + seq["total_us"] * US for seq in sequences])
    num_open = np.searchsorted(arrived, ends, "right") - np.searchsorted(ended, ends, "right")
    return np.where(num_open > 0, np.maximum(begin - ends, 0.0), 0.0)


def _column(rows: list[dict[str, Any]], key: str) -> Floats:
    """A column of args as float64, NaN for null."""
    return np.array([row[key] for row in rows], np.float64)
