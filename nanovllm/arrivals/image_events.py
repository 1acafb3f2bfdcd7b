"""`ImageEvents`: the preparation of images in a recording (`tracing.timeline`)."""

import time

from nanovllm.images.preparation import Preparation, Prepared
from nanovllm.tracing.timeline import ENGINE, Process, Write
from nanovllm.tracing.trace_events import counter_event, slice_event, track_name

FIRST_TRACK = 10  # that of the first thread; those of the engine are below
WAITS = 9  # track of times when the engine has nothing but images to wait for
FLUSH_SECONDS = 1.0


class ImageEvents:
    """The events of one recording.

    Args:
        write: function that gets events, each a JSON object; None: there is no recording.
        process: process in all of them.
    """

    def __init__(self, write: Write | None = None, process: Process = ENGINE) -> None:
        self._write, self._pid = write, process[0]
        self._lines: list[str] = []
        self._tracks: set[int] = set()
        self._counted = (-1, -1)
        self._flushed_at = time.perf_counter()

    def prepared(self, prepared: Prepared) -> None:
        """A picture has been prepared, or could not be."""
        if self._write is None:
            return
        track = FIRST_TRACK + prepared.thread
        self._name(track, f"images, thread {prepared.thread + 1}")
        name = "prepare" if prepared.error is None else "cannot prepare"
        self._add(slice_event(self._pid, track, name, prepared.began_at, prepared.ended_at))

    def wait(self, began_at: float, ended_at: float) -> None:
        """The engine had no request whose images were ready."""
        if self._write is not None:
            self._name(WAITS, "waits for images")
            self._add(slice_event(self._pid, WAITS, "wait", began_at, ended_at))

    def count(self, num_requests: int, preparation: Preparation) -> None:
        """Requests wait for images, which take up memory."""
        counts = num_requests, preparation.held_bytes >> 20
        if self._write is not None and counts != self._counted:
            self._counted = counts
            self._add(
                counter_event(
                    self._pid,
                    "images",
                    time.perf_counter(),
                    {"waiting": counts[0], "MiB": counts[1]},
                )
            )

    def flush(self) -> None:
        """Write what is left."""
        if self._write is not None and self._lines:
            lines, self._lines = self._lines, []
            self._write(lines)
            self._flushed_at = time.perf_counter()

    def _name(self, track: int, name: str) -> None:
        if track not in self._tracks:
            self._tracks.add(track)
            self._lines += track_name(self._pid, track, name)

    def _add(self, line: str) -> None:
        self._lines.append(line)
        if time.perf_counter() - self._flushed_at > FLUSH_SECONDS:
            self.flush()
