"""`Timeline`: records an engine's steps and requests, for viewers of traces (docs/timeline.md).

While the engine runs, values are appended to a list; they become events when there are
`MAX_RECORDS` of them, when a second has passed, and when no request is left. They contain no text
of prompts or completions.

Times are those of `time.perf_counter`, which is CLOCK_MONOTONIC on Linux: one clock for all
processes, so recordings of replicas need no shift. Imports no torch.
"""

import time
from collections.abc import Callable, Iterable
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias

from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import NO_IMAGES, Encoded, InFlightStep, ScheduledSequence, Sequence
from nanovllm.requests.request import Request
from nanovllm.tracing.trace_events import (
    BEGAN,
    DEVICE,
    HOST,
    STEPS,
    SequenceRecord,
    StepRecord,
    names,
    recording_event,
)

MAX_RECORDS = 32  # to be written at once: a millisecond of work, beside a step on the device
FLUSH_SECONDS = 1.0  # longest time between two writes
LONG_WAIT = 1e-4  # seconds: such a wait ends when the device does; a shorter one may come too late
Write: TypeAlias = Callable[[list[str]], None]
Process: TypeAlias = tuple[int, str]
ENGINE: Process = (0, "engine")
_start, _num_tokens = itemgetter(1), itemgetter(2)  # fields of a ScheduledSequence


class Launched(NamedTuple):
    """The state noted when a step has been launched; see `StepRecord`."""

    began_at: float
    launched_at: float
    running: int
    waiting: int
    held_by: str
    used_blocks: int
    preempted: int
    paused: tuple[float, float] | None
    encoded: Encoded


class Timeline:
    """A recorder of an engine's steps, and of the sequences that end.

    Args:
        scheduler: scheduler of the engine.
        write: function that gets events, each a JSON object.
        stop_timing: function called at the end.
        facts: facts about the engine, for the report: `engine_facts`.
        process: number of the process in all events, and its name in viewers.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        write: Write,
        stop_timing: Callable[[], None],
        facts: dict[str, Any],
        process: Process = ENGINE,
    ) -> None:
        self._scheduler, self._write, self._stop_timing = scheduler, write, stop_timing
        self._windows: list[int] = facts["windows"]
        self._records: list[StepRecord | SequenceRecord] = []
        self._preempted: dict[int, list[float]] = {}  # times of preemption, by seq_id
        self._num_preemptions = scheduler.num_preemptions
        self._flushed_at = self._mark = self._began_at = time.perf_counter()
        self._device_end = 0.0  # end of the previous step on the device
        self._is_closed = False
        self._pid, name = process
        tracks = (STEPS, HOST, DEVICE) if str(facts["device"]).startswith("cuda") else (STEPS, HOST)
        write([*names(self._pid, name, tracks), recording_event(BEGAN, facts, self._pid)])

    # -- calls from the engine ------------------------------------------------------------------

    def begin(self) -> None:
        """Note that the host begins to choose a step."""
        self._mark = self._began_at = time.perf_counter()

    def launch(
        self, scheduled: list[ScheduledSequence], waited: tuple[float, float], encoded: Encoded
    ) -> Launched:
        """Note a step that has been launched, with none booked since it was chosen. `waited` and
        `encoded` are the Executor's.
        """
        preempted, held_by = self._find_preempted(), ""
        scheduler, waiting = self._scheduler, len(self._scheduler.waiting)
        if waiting:
            if preempted or scheduler.waits_for_blocks:
                held_by = "blocks"  # the pool has none for the first in the queue
            elif len(scheduler.running) == scheduler.max_num_seqs:
                held_by = "sequences"  # no more may run
            elif sum(map(_num_tokens, scheduled)) == scheduler.max_num_batched_tokens:
                held_by = "tokens"  # the step had no room for it
            else:
                held_by = "prefix"  # another sequence computes the beginning of its prompt
        self._mark = time.perf_counter()
        return Launched(
            began_at=self._began_at,
            launched_at=self._mark,
            running=len(scheduler.running),
            waiting=waiting,
            held_by=held_by,
            used_blocks=scheduler.block_manager.num_used_blocks,
            preempted=preempted,
            paused=waited if waited[0] > self._began_at else None,
            encoded=encoded,
        )

    def book(
        self,
        step: InFlightStep,
        tokens: tuple[int, int, int],
        times: tuple[float, float, float],
        finished: Iterable[Sequence],
    ) -> None:
        """Record a step that has been booked.

        Args:
            step: step that has been booked.
            tokens: numbers of tokens that it computed for prefills, that it computed for decodes,
                and that sequences got from it.
            times: start of the time charged to it (the end of the previous step, if they overlap),
                and the times when its tokens had arrived and when they were booked.
            finished: sequences that it ended.
        """
        since, waited_at, booked_at = times
        prefill, decode, sampled = tokens
        waits_at = min(self._mark, waited_at)
        manager = self._scheduler.block_manager
        noted = step.noted or self._not_noted(step)
        keys, pairs = self._attention(step.scheduled, decode)
        device = step.tokens.device_seconds()
        self._records.append(
            StepRecord(
                began_at=noted.began_at,
                chosen_at=step.launched_at,
                launched_at=noted.launched_at,
                waits_at=waits_at,
                waited_at=waited_at,
                booked_at=booked_at,
                since=since,
                rows=len(step.scheduled),
                prefill=prefill,
                decode=decode,
                sampled=sampled,
                running=noted.running,
                waiting=noted.waiting,
                held_by=noted.held_by,
                used_blocks=noted.used_blocks,
                free_blocks=manager.num_blocks - noted.used_blocks,
                preempted=noted.preempted,
                keys=keys,
                pairs=pairs,
                device=device and self._place(step.launched_at, waits_at, waited_at, *device),
                paused=noted.paused,
                encoded=noted.encoded,
                encoding=step.tokens.encoding_seconds() if noted.encoded.num_images else None,
            )
        )
        self._mark = booked_at
        for seq in finished:
            self._end(seq, seq.finish_reason or "", seq.finished_at)
        self._flush_if_due(booked_at)

    def drop(self, requests: Iterable[Request]) -> None:
        """Record requests that have ended without a result."""
        now = time.perf_counter()
        for request in requests:
            for seq in request.seqs:
                if seq.finish_reason is None:
                    self._end(seq, "aborted", now)
        self._flush_if_due(now)

    def close(self) -> None:
        """Write the rest, and the sequences that have not ended. May be called again."""
        if self._is_closed:
            return
        self._is_closed = True
        self._stop_timing()
        self._find_preempted()
        now = time.perf_counter()
        for seq in (*self._scheduler.running, *self._scheduler.waiting):
            self._end(seq, "unfinished", now)
        self._flush()

    # -- records --------------------------------------------------------------------------------

    def _find_preempted(self) -> int:
        """Note which sequences were preempted. Returns their number since the last call."""
        scheduler = self._scheduler
        count = scheduler.num_preemptions - self._num_preemptions
        if count:
            self._num_preemptions += count
            now = time.perf_counter()
            for seq in scheduler.waiting:
                if not seq.num_preemptions:  # the preempted are the first
                    break
                times = self._preempted.setdefault(seq.seq_id, [])
                times += [now] * (seq.num_preemptions - len(times))
        return count

    def _not_noted(self, step: InFlightStep) -> Launched:
        """The present state, for a step that was launched before the recording began."""
        return Launched(
            began_at=step.launched_at,
            launched_at=step.launched_at,
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            held_by="",
            used_blocks=self._scheduler.block_manager.num_used_blocks,
            preempted=0,
            paused=None,
            encoded=NO_IMAGES,
        )

    def _attention(
        self, scheduled: list[ScheduledSequence], num_decodes: int
    ) -> tuple[list[int], list[int]]:
        """The `keys` and `pairs` of a step, whose decodes come first."""
        chunks = [(start, start + count) for _, start, count, *_ in scheduled[num_decodes:]]
        decoded = sum(map(_start, scheduled[:num_decodes])) + num_decodes
        keys, pairs = [decoded + sum(end for _, end in chunks)], [decoded + _pairs(chunks, 0)]
        for window in self._windows:
            seen = [min(start + count, window) for _, start, count, *_ in scheduled]
            keys.append(sum(seen))
            pairs.append(sum(seen[:num_decodes]) + _pairs(chunks, window))
        return keys, pairs

    def _place(
        self, chosen_at: float, waits_at: float, waited_at: float, idle: float, busy: float
    ) -> tuple[float, float, float]:
        """The begin and the end of a step on the device, by the host's clock, and its duration.

        The device tells how long it was `idle` before the step and `busy` with it. After a long
        wait of the host, the end of the wait is the end of the step. Otherwise the step follows the
        one before it, but ends no later than its wait: the two clocks drift apart by some
        microseconds each second.
        """
        end = waited_at
        if waited_at - waits_at < LONG_WAIT:
            end = min(waited_at, max(self._device_end + idle, chosen_at) + busy)
        start = max(self._device_end, end - busy)
        self._device_end = max(start, end)
        return start, self._device_end, busy

    def _end(self, seq: Sequence, reason: str, ended_at: float) -> None:
        self._records.append(
            SequenceRecord(
                seq_id=seq.seq_id,
                request_id=seq.request_id,
                completion=seq.index,
                arrived_at=seq.arrived_at,
                started_at=seq.started_at,
                first_token_at=seq.first_token_at,
                ended_at=ended_at,
                prompt=seq.num_prompt_tokens,
                cached=seq.num_cached_tokens,
                generated=seq.num_known_tokens - seq.num_prompt_tokens,
                preempted_at=self._preempted.pop(seq.seq_id, []),
                reason=reason,
            )
        )

    def _flush_if_due(self, now: float) -> None:
        is_due = len(self._records) >= MAX_RECORDS or now - self._flushed_at > FLUSH_SECONDS
        if is_due or self._scheduler.is_finished():
            self._flush()

    def _flush(self) -> None:
        records, self._records = self._records, []
        lines: list[str] = []
        for record in records:
            lines += record.events(self._pid)
        self._write(lines)
        self._flushed_at = time.perf_counter()


def _pairs(chunks: Iterable[tuple[int, int]], window: int) -> int:
    """Pairs of a query in a chunk and a key that it sees."""

    def before(end: int) -> int:
        begin = min(end, window) if window else end
        return begin * (begin + 1) // 2 + (end - begin) * window

    return sum(before(end) - before(start) for start, end in chunks)
