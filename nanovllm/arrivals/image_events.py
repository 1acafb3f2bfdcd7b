"""`ImageEvents`: the preparation of images in a recording (`tracing.timeline`)."""

import time

from nanovllm.images.preparation import Preparation, Prepared
from nanovllm.tracing.timeline import Write
from nanovllm.tracing.trace_events import (
    IMAGES,
    image_event,
    image_track,
    images_waiting_event,
    names,
)

WAITS = 1  # track of times when the engine has nothing but images to wait for
FIRST_THREAD = 2  # track of the first thread
FLUSH_SECONDS = 1.0  # longest time between two writes


class ImageEvents:
    """The events of one recording, in a process of their own.

    Args:
        write: function that gets events, each a JSON object; None: there is no recording.
    """

    def __init__(self, write: Write | None = None) -> None:
        self._write = write
        self._lines = [] if write is None else names(IMAGES, "images", ())
        self._tracks: set[int] = set()
        self._counted = (0, 0)
        self._flushed_at = time.perf_counter()

    def prepared(self, prepared: Prepared) -> None:
        """A picture has been prepared, or could not be."""
        name = "prepare" if prepared.error is None else "cannot prepare"
        track = FIRST_THREAD + prepared.thread
        self._slice(track, f"thread {prepared.thread}", name, prepared.began_at, prepared.ended_at)

    def waited(self, began_at: float, ended_at: float) -> None:
        """The engine had no request whose images were ready."""
        self._slice(WAITS, "engine", "wait for images", began_at, ended_at)

    def count(self, num_requests: int, preparation: Preparation) -> None:
        """Requests wait for images, and images take up memory."""
        counted = num_requests, preparation.held_bytes
        if self._write is not None and counted != self._counted:
            self._counted = counted
            self._add(images_waiting_event(time.perf_counter(), *counted))

    def flush(self) -> None:
        """Write what is left."""
        if self._write is not None and self._lines:
            lines, self._lines = self._lines, []
            self._write(lines)
            self._flushed_at = time.perf_counter()

    def _slice(self, track: int, of: str, name: str, began_at: float, ended_at: float) -> None:
        if self._write is None:
            return
        if track not in self._tracks:
            self._tracks.add(track)
            self._lines += image_track(track, of)
        self._add(image_event(track, name, began_at, ended_at))

    def _add(self, line: str) -> None:
        self._lines.append(line)
        if time.perf_counter() - self._flushed_at > FLUSH_SECONDS:
            self.flush()
