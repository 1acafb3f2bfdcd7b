"""Events of Chrome's trace format as text: those of a step, of a sequence, and of a recording.

`nanovllm/report` reads them back. Times are passed as seconds of `time.perf_counter` and written as
microseconds. Imports no torch.
"""

import json
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

from nanovllm.engine.sequence import NO_IMAGES, Encoded
from nanovllm.utils.as_json import as_json

STEPS, HOST, DEVICE = 1, 2, 3  # tracks
# Preparation of images: a process of its own in viewers, and the counter of what waits for it.
IMAGES, IMAGES_WAITING = 999, "images"
BEGAN, ENDED, FULL = "recording began", "recording ended", "recording is full"
TRACKS = {STEPS: "steps", HOST: "host", DEVICE: "GPU"}
_STEP = """\
{"ph":"X","pid":%d,"tid":1,"cat":"step","name":"%s","ts":%s,"dur":%s,"args":{"rows":%d,\
"prefill_tokens":%d,"decode_tokens":%d,"sampled_tokens":%d,"running":%d,"waiting":%d,\
"held_by":"%s","used_blocks":%d,"free_blocks":%d,"preempted":%d,"schedule_us":%s,"launch_us":%s,\
"wait_us":%s,"book_us":%s,"gpu_us":%s,"keys":%s,"pairs":%s%s}}"""
_ENCODED = ',"images":%d,"encode_us":%s'  # of steps that encode images
_HOST = '{"ph":"X","pid":%d,"tid":2,"cat":"host","name":"%s","ts":%s,"dur":%s}'
_DEVICE = '{"ph":"X","pid":%d,"tid":3,"cat":"gpu","name":"%s","ts":%s,"dur":%s}'
_IMAGE = '{"ph":"X","pid":%d,"tid":%d,"cat":"image","name":"%s","ts":%s,"dur":%s,"args":{}}'
_COUNTER = '{"ph":"C","pid":%d,"name":"%s","ts":%s,"args":{"%s":%d,"%s":%d}}'
_PHASE = '{"ph":"%s","pid":%d,"tid":0,"cat":"request","id":"%s","name":"%s","ts":%s%s}'


class StepRecord(NamedTuple):
    """A step that has been booked. Moments are in seconds.

    Attributes:
        began_at: begin of the host's choice of the step.
        chosen_at: end of that choice, and begin of the launch.
        launched_at: end of the launch.
        waits_at: begin of the host's wait for its tokens.
        waited_at: arrival of its tokens.
        booked_at: end of their booking.
        since: start of the time charged to this step (the end of the previous one, if they
            overlap).
        rows: number of its items, each a sequence's decode or a chunk of its prompt.
        prefill, decode: tokens that it computed.
        sampled: tokens that sequences got from it.
        running, waiting: sequences when it was launched.
        held_by: reason why the first waiting sequence did not run, see `Timeline`.
        used_blocks, free_blocks: blocks of the pool when it was launched.
        preempted: number of sequences that lost their blocks before it.
        keys: keys that rows see, each counted once per sequence: for layers that see all, and for
            those with each of the model's windows.
        pairs: pairs of a query and a key that it sees, by window, too.
        device: begin, end and duration of the step on the device; None: not known.
        paused: begin and end of a wait during its launch, for the tokens of the step before it on
            which controls depend; None: there was none.
        encoded: images that it encoded.
        encoding: duration of that on the device; None: not known.
    """

    began_at: float
    chosen_at: float
    launched_at: float
    waits_at: float
    waited_at: float
    booked_at: float
    since: float
    rows: int
    prefill: int
    decode: int
    sampled: int
    running: int
    waiting: int
    held_by: str
    used_blocks: int
    free_blocks: int
    preempted: int
    keys: list[int]
    pairs: list[int]
    device: tuple[float, float, float] | None
    paused: tuple[float, float] | None = None
    encoded: Encoded = NO_IMAGES
    encoding: float | None = None

    def events(self, pid: int) -> list[str]:
        """The step, the work of host and device for it, and the counters beside it.

        If two steps overlap, the later one's slice begins where the other's ends: all slices
        together last as long as `Metrics.step_seconds`.
        """
        name = "mixed" if self.prefill and self.decode else "prefill" if self.prefill else "decode"
        began, chosen, launched, waits, waited, booked, since = map(_ns, self[:7])
        spans = [("schedule", began, chosen)]
        for phase, times in (("encode", self.encoded[1:]), ("wait", self.paused)):
            if times is not None and times != NO_IMAGES[1:]:  # amid the launch
                begin, end = map(_ns, times)
                spans += [("launch", spans[-1][2], begin), (phase, begin, end)]
        spans.append(("launch", spans[-1][2], launched))
        spans += [("wait", waits, waited), ("book", waited, booked)]
        took = dict.fromkeys(("schedule", "launch", "wait", "book", "encode"), 0)
        for phase, begin, end in spans:
            took[phase] += end - begin
        busy = "null" if self.device is None else _us(_ns(self.device[2]))
        encoded, num_images = "", self.encoded.num_images
        if num_images:
            encode = took["encode"] if self.encoding is None else _ns(self.encoding)
            encoded = _ENCODED % (num_images, _us(encode))
        took["launch"] += took.pop("encode")
        more = (*map(_us, took.values()), busy, self.keys, self.pairs, encoded)
        at, pool = _us(chosen), (self.used_blocks, self.free_blocks)
        lines = [
            _STEP % (pid, name, _us(since), _us(booked - since), *self[7:17], *more),
            *[_HOST % (pid, phase, _us(begin), _us(end - begin)) for phase, begin, end in spans],
            _COUNTER % (pid, "sequences", at, "running", self.running, "waiting", self.waiting),
            _COUNTER % (pid, "KV blocks", at, "used", pool[0], "free", pool[1]),
            _COUNTER
            % (pid, "tokens of a step", at, "prefill", self.prefill, "decode", self.decode),
        ]
        if self.device is not None:
            start, end = _ns(self.device[0]), _ns(self.device[1])
            lines.append(_DEVICE % (pid, name, _us(start), _us(end - start)))
        return lines


class SequenceRecord(NamedTuple):
    """A sequence that has ended, or is unfinished as the recording ends. Moments are in seconds; 0
    for one that did not come.

    Attributes:
        seq_id: number of the sequence; those of one request are its completions.
        request_id: number of its request.
        completion: number of the sequence among the completions of the request.
        arrived_at, started_at, first_token_at, ended_at: moments of its life.
        prompt, cached, generated: tokens of the prompt, those of them that the prefix cache served,
            and tokens of the completion.
        preempted_at: moments of its preemptions.
        reason: "stop", "length" or "error", "aborted", or "unfinished" at the end of the recording.
    """

    seq_id: int
    request_id: int
    completion: int
    arrived_at: float
    started_at: float
    first_token_at: float
    ended_at: float
    prompt: int
    cached: int
    generated: int
    preempted_at: list[float]
    reason: str

    def events(self, pid: int) -> list[str]:
        """Events of its life, and of its times queued, before and after its first token."""
        arrived, started, first, end = map(_ns, self[3:7])
        moments = [arrived, started or end, first or end, end]
        phases = zip(("queued", "prefill", "decode"), moments, moments[1:], strict=False)
        names = ("request", "completion", "prompt_tokens", "cached_tokens", "generated_tokens")
        values = (self.request_id, self.completion, self.prompt, self.cached, self.generated)
        args: dict[str, Any] = dict(zip(names, values, strict=True))
        args |= {"preemptions": len(self.preempted_at), "finish_reason": self.reason}
        reached = {"queue_us": started, "first_token_us": first, "total_us": end}
        args |= {name: (at - arrived) / 1e3 if at else None for name, at in reached.items()}
        shown = f',"args":{json.dumps(args, separators=(",", ":"))}'
        key = f"{pid}.{self.seq_id}"
        lines = [_PHASE % ("b", pid, key, "request", _us(arrived), shown)]
        for name, begin, stop in phases:
            if stop > begin:
                lines.append(_PHASE % ("b", pid, key, name, _us(begin), ""))
                lines.append(_PHASE % ("e", pid, key, name, _us(stop), ""))
        if self.cached:
            hit = f',"args":{{"cached_tokens":{self.cached}}}'
            lines.append(_PHASE % ("n", pid, key, "prefix hit", _us(started), hit))
        for at in map(_ns, self.preempted_at):
            lines.append(_PHASE % ("n", pid, key, "preempted", _us(at), ""))
        lines.append(_PHASE % ("e", pid, key, "request", _us(end), ""))
        return lines


def image_event(track: int, name: str, began_at: float, ended_at: float) -> str:
    """Work on the images of prompts, on a track of its own; moments are in seconds."""
    begin, end = _ns(began_at), _ns(ended_at)
    return _IMAGE % (IMAGES, track, name, _us(begin), _us(end - begin))


def images_waiting_event(at: float, waiting: int, num_bytes: int) -> str:
    """Requests that wait for images, and the memory of all images, at a moment in seconds."""
    counts = "requests waiting", waiting, "MiB", num_bytes >> 20
    return _COUNTER % (IMAGES, IMAGES_WAITING, _us(_ns(at)), *counts)


def image_track(track: int, name: str) -> list[str]:
    """The name of such a track in viewers."""
    return [
        _metadata(IMAGES, track, "thread_name", {"name": name}),
        _metadata(IMAGES, track, "thread_sort_index", {"sort_index": track}),
    ]


def recording_event(name: str, args: dict[str, Any], pid: int = 0) -> str:
    """An event at this moment, about the recording itself."""
    now = time.perf_counter_ns() // 1000
    what = {"ph": "i", "s": "p", "cat": "recording", "name": name, "pid": pid, "tid": 0, "ts": now}
    return as_json({**what, "args": args}, separators=(",", ":"))


def names(pid: int, process: str, tracks: Iterable[int]) -> list[str]:
    """The names of a process and of its tracks in viewers."""
    named = [("process_name", 0, process), *(("thread_name", i, TRACKS[i]) for i in tracks)]
    order = [("process_sort_index", 0, pid), *(("thread_sort_index", i, i) for i in tracks)]
    return [
        *(_metadata(pid, tid, kind, {"name": name}) for kind, tid, name in named),
        *(_metadata(pid, tid, kind, {"sort_index": index}) for kind, tid, index in order),
    ]


def _metadata(pid: int, tid: int, kind: str, args: dict[str, Any]) -> str:
    return json.dumps({"ph": "M", "pid": pid, "tid": tid, "name": kind, "args": args})


def _ns(seconds: float) -> int:
    """Integer nanoseconds: by rounding, one of two adjacent slices could otherwise overlap the
    other, and viewers drop such slices.
    """
    return round(seconds * 1e9)


def _us(nanoseconds: int) -> str:
    return f"{nanoseconds // 1000}.{nanoseconds % 1000:03d}"
