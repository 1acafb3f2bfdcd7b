"""`Preparation`: threads that read and resize the images of waiting requests, ahead of their turn.

Pillow and PyTorch let other threads run meanwhile, but not always: with many of them, the engine's
waits for Python's lock at each operator, and the device for it. So a few go on beside the engine,
and the others help while it has nothing to do but to wait for them. One thread, the engine's, calls
the methods; the others run `_prepare` alone. Imports torch only in these.
"""

import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

from nanovllm.images.image import Image, PlacedImage
from nanovllm.images.picture import OF_ROW, PlacedPicture, SizedPicture
from nanovllm.images.processor import ImageProcessor
from nanovllm.outputs import Mistake
from nanovllm.threads.interrupts import uninterrupted
from nanovllm.utils.cgroup import cpus

MAX_BYTES = 4 * 2**30  # of images that are prepared or being prepared, and of pictures being read
MAX_THREADS = 32
BESIDE = 4  # threads that go on while an engine computes
AHEAD = 32  # pictures given to these, for each of them: a step may take as long
MERGE_SECONDS = 0.1  # that a request whose images are ready waits for others


class Prepared(NamedTuple):
    """A picture that has been prepared.

    Attributes:
        image: the image; None if there is an error.
        error: the error, in a sentence; a `Mistake` if the picture has it.
        began_at, ended_at: seconds of time.perf_counter.
        thread: number of the thread, from 0.
    """

    image: Image | None
    error: str | None
    began_at: float
    ended_at: float
    thread: int


class Ready(NamedTuple):
    """A request whose images are ready, or one of which cannot be.

    Attributes:
        request_id: id of the request.
        images: its images.
        error: the error of one of them, with its index if there are several; None: all are ready.
    """

    request_id: int
    images: tuple[PlacedImage, ...]
    error: str | None = None


@dataclass(eq=False)
class _Job:
    """A picture that some requests wait for, or have.

    Attributes:
        sized: the picture.
        users: ids of these requests.
        held: bytes counted for it now.
        is_running: whether a thread has it.
        prepared: result; None: none yet.
    """

    sized: SizedPicture
    users: set[int] = field(default_factory=set)
    held: int = 0
    is_running: bool = False
    prepared: Prepared | None = None


@dataclass
class PreparationCounts:
    """Counters of an engine's preparation.

    Attributes:
        num_images_prepared: images prepared, those of several prompts once.
        num_images_failed: pictures that could not be read.
        image_seconds: time that threads took for these, all together.
    """

    num_images_prepared: int = 0
    num_images_failed: int = 0
    image_seconds: float = 0.0


class Preparation:
    """The images of an engine's requests, from their arrival to the requests' end.

    Pictures are prepared in the order of the requests, each once for all requests that have it. The
    memory of those being prepared, of the images of waiting requests and of those that the engine
    has is bounded; beyond the bound the oldest request goes on while no other one can end and give
    memory back.

    Args:
        processor: processor of the model.
        num_threads: threads; 0: as many as there are processors.
        num_beside: number of those that go on while the engine computes, at most.
        max_bytes: bound on the memory.

    Attributes:
        counts: counters.
        held_bytes: memory that is counted now.
        waiting_bytes: memory of encoded data whose pictures no thread has had. It is there before
            any thread can do something about it, so it is counted apart: see `has_room`.
        note: function that is called with each picture that has been prepared.
        admitted: requests that have been taken as ready, and not released.
    """

    def __init__(
        self,
        processor: ImageProcessor,
        num_threads: int = 0,
        num_beside: int = BESIDE,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._processor = processor
        self._num_threads = num_threads or default_threads()
        self._num_beside = min(num_beside, self._num_threads)
        self._max_bytes = max_bytes
        self.counts, self.held_bytes, self.waiting_bytes = PreparationCounts(), 0, 0
        self.note: Callable[[Prepared], None] = lambda prepared: None
        # Threads beside the engine, and threads that help; started for the first picture.
        self._threads: tuple[ThreadPoolExecutor, ThreadPoolExecutor] | None = None
        self._done: queue.SimpleQueue[tuple[_Job, Prepared]] = queue.SimpleQueue()
        self._has_done = threading.Event()
        self._jobs: dict[Hashable, _Job] = {}  # by source and size
        self._queue: deque[_Job] = deque()  # not given to a thread, the oldest first
        # Given to the threads beside the engine, the oldest first: most of it waits there.
        self._beside: dict[_Job, Future[Prepared]] = {}
        self._num_helping = 0  # pictures that the others have
        self._requests: dict[int, tuple[PlacedPicture, ...]] = {}
        self._missing: dict[int, int] = {}  # pictures that a waiting request lacks
        self._ready: deque[int] = deque()
        self._ready_since = 0.0  # seconds of time.perf_counter, of the first
        self.admitted: set[int] = set()

    def add(self, request_id: int, pictures: tuple[PlacedPicture, ...]) -> None:
        """Have the pictures of a request prepared."""
        assert request_id not in self._requests, f"request {request_id} is there"
        jobs = {self._job(placed.sized) for placed in pictures}
        self._requests[request_id] = pictures
        for job in jobs:
            job.users.add(request_id)
        self._missing[request_id] = sum(job.prepared is None for job in jobs)
        if not self._missing[request_id] or any(map(_has_failed, jobs)):
            self._add_ready(request_id)
        self._start()

    def take_ready(self, enough: int = 0) -> list[Ready]:
        """The requests whose images have become ready, in this order. Their memory counts until
        `release`.

        Args:
            enough: tokens of images that are worth a step. While there are fewer, and more pictures
                to prepare than threads, requests wait for others, for `MERGE_SECONDS` at most; not
                if threads have none, because there is no memory.
        """
        self.book()
        # Text alone gives no memory back, so it does not count as somebody to wait for.
        is_stuck = not (self.admitted or self._ready or self.is_running)
        self._start(even_beyond=is_stuck)
        if self._waits_for_others(enough):
            return []
        ready = []
        while self._ready:
            request_id = self._ready.popleft()
            if self._missing.pop(request_id, None) is not None:
                self.admitted.add(request_id)
                ready.append(self._images(request_id))
        return ready

    def book(self) -> None:
        """Count what the threads have done."""
        self._has_done.clear()
        while not self._done.empty():
            self._book(*self._done.get())

    def wait(self, seconds: float) -> None:
        """Wait until a picture has been prepared, or this time has passed, while all threads work.
        Ctrl-C may come here.
        """
        with uninterrupted():
            self._start(all_help=True)
        if self.is_running:
            self._has_done.wait(seconds)

    def release(self, request_ids: Iterable[int]) -> None:
        """Forget requests, ready or not: they have ended. Unknown ones are passed over."""
        for request_id in request_ids:
            self._missing.pop(request_id, None)
            self.admitted.discard(request_id)
            for placed in self._requests.pop(request_id, ()):
                job = self._jobs.get(_key(placed.sized))
                if job is None:
                    continue  # a picture that the request has twice
                job.users.discard(request_id)
                if not job.users:
                    del self._jobs[_key(placed.sized)]
                    self._withdraw(job)
                    if not job.is_running:
                        self._hold(job, 0)
        while self._queue and not self._queue[0].users:
            self._next()  # with what the caller passed

    def close(self) -> None:
        """End the threads, and forget everything. May be called again, and used again then."""
        threads, self._threads = self._threads, None
        for pool in threads or ():
            pool.shutdown(cancel_futures=True)
        while not self._done.empty():
            self._done.get()
        books = self._jobs, self._queue, self._requests, self._missing, self._ready, self.admitted
        for book in (*books, self._beside):
            book.clear()
        self._num_helping = self.held_bytes = self.waiting_bytes = 0

    @property
    def has_room(self) -> bool:
        """Whether callers that can wait should add requests."""
        return self.held_bytes + self.waiting_bytes < self._max_bytes

    @property
    def num_images_waiting(self) -> int:
        """Pictures that requests wait for."""
        return sum(job.prepared is None for job in self._jobs.values())

    @property
    def is_running(self) -> bool:
        """Whether threads have pictures, also those that nobody wants any more."""
        return self._num_running > 0

    # -- the books ------------------------------------------------------------------------------

    @property
    def _num_running(self) -> int:
        return len(self._beside) + self._num_helping

    def _add_ready(self, request_id: int) -> None:
        if not self._ready:
            self._ready_since = time.perf_counter()
        self._ready.append(request_id)

    def _waits_for_others(self, enough: int) -> bool:
        num_left = len(self._queue) + self._num_running
        if not self.is_running or num_left <= self._num_threads:
            return False
        pictures = (placed for i in self._ready for placed in self._requests.get(i, ()))
        is_enough = sum(placed.sized.num_tokens for placed in pictures) >= enough
        return not is_enough and time.perf_counter() < self._ready_since + MERGE_SECONDS

    def _job(self, sized: SizedPicture) -> _Job:
        job = self._jobs.get(_key(sized))
        if job is None:
            job = self._jobs[_key(sized)] = _Job(sized)
            self._queue.append(job)
            self.waiting_bytes += sized.picture.source_bytes
        return job

    def _next(self) -> _Job:
        """Take the first picture from the queue."""
        job = self._queue.popleft()
        self.waiting_bytes -= job.sized.picture.source_bytes
        return job

    def _hold(self, job: _Job, num_bytes: int) -> None:
        self.held_bytes += num_bytes - job.held
        job.held = num_bytes

    def _start(self, even_beyond: bool = False, all_help: bool = False) -> None:
        """Give pictures to the threads while there is memory for them. With `even_beyond` the first
        one needs none. Those that help begin with what waits for the others: it is older, and may
        have all the memory.
        """
        num_helpers = self._num_threads - self._num_beside if all_help else 0
        for job in [*self._beside]:
            if self._num_helping >= num_helpers:
                break
            if self._withdraw(job):
                self._submit(job, helps=True)
        while self._queue:
            helps = self._num_helping < num_helpers
            if not helps and len(self._beside) >= AHEAD * self._num_beside:
                return
            job = self._queue[0]
            if job.users:
                fits = self.held_bytes + job.sized.cost <= self._max_bytes
                if not fits and not even_beyond and self.held_bytes:
                    return
                even_beyond = False
                self._submit(job, helps=helps)
            self._next()

    def _submit(self, job: _Job, *, helps: bool) -> None:
        if self._threads is None:
            others = max(1, self._num_threads - self._num_beside)
            self._threads = (
                ThreadPoolExecutor(self._num_beside, "images"),  # images_0 ...
                ThreadPoolExecutor(others, "images"),
            )
        done, has_done = self._done, self._has_done
        sized = job.sized

        def tell(future: Future[Prepared]) -> None:
            if not future.cancelled():
                done.put((job, future.result()))
                has_done.set()

        self._hold(job, sized.cost)
        job.is_running = True
        first = self._num_beside if helps else 0
        future = self._threads[helps].submit(_prepare, sized, self._processor, first)
        if helps:
            self._num_helping += 1
        else:
            self._beside[job] = future
        future.add_done_callback(tell)

    def _withdraw(self, job: _Job) -> bool:
        """Take a picture back that waits for a thread beside the engine. Returns whether it did."""
        future = self._beside.get(job)
        if future is None or not future.cancel():  # a thread has it, or has had it
            return False
        del self._beside[job]
        job.is_running = False
        return True

    def _book(self, job: _Job, prepared: Prepared) -> None:
        if self._beside.pop(job, None) is None:
            self._num_helping -= 1
        job.is_running, job.prepared = False, prepared
        is_kept = prepared.image is not None and job.users
        self._hold(job, job.sized.num_bytes if is_kept else 0)
        self.counts.num_images_prepared += prepared.image is not None
        self.counts.num_images_failed += prepared.image is None
        self.counts.image_seconds += prepared.ended_at - prepared.began_at
        self.note(prepared)
        for request_id in sorted(job.users & self._missing.keys()):
            self._missing[request_id] -= 1
            if not self._missing[request_id] or prepared.image is None:
                self._add_ready(request_id)

    def _images(self, request_id: int) -> Ready:
        images, pictures = [], self._requests[request_id]
        for i, placed in enumerate(pictures):
            prepared = self._jobs[_key(placed.sized)].prepared
            if prepared is not None and prepared.image is not None:
                images.append(PlacedImage(placed.offset, prepared.image))
            elif prepared is not None and prepared.error is not None:
                error = prepared.error if len(pictures) == 1 else _numbered(prepared.error, i)
                return Ready(request_id, (), error)
        return Ready(request_id, tuple(images))


def default_threads() -> int:
    """As many threads as this process has processors, within reason."""
    affinity = getattr(os, "sched_getaffinity", None)
    count = len(affinity(0)) if affinity else os.cpu_count() or 1
    return int(max(1, min(count, cpus(), MAX_THREADS)))


def _key(sized: SizedPicture) -> Hashable:
    return sized.picture.source, sized.height, sized.width


def _has_failed(job: _Job) -> bool:
    return job.prepared is not None and job.prepared.image is None


def _numbered(error: str, index: int) -> str:
    """The error of a picture with its index among those of a prompt."""
    return type(error)(error.replace(f"`{OF_ROW}`", f"`{OF_ROW}[{index}]`", 1))


def _prepare(sized: SizedPicture, processor: ImageProcessor, first: int) -> Prepared:
    """Read and resize a picture, in a thread of a pool whose first has this number. Any error is
    that of the picture's requests.
    """
    from nanovllm.images.resizing import resize

    began_at = time.perf_counter()
    image: Image | None = None
    error: str | None = None
    try:
        pixels = resize(sized.picture.read(), sized.height, sized.width, processor.resample)
        image = Image.of(pixels, processor.patch_size, sized.num_tokens)
    except ValueError as refused:
        error = Mistake(refused)
    except Exception as failed:  # out of memory, say
        error = f"`{OF_ROW}` cannot be prepared ({type(failed).__name__}: {failed})"
    thread = first + int(threading.current_thread().name.rpartition("_")[2])
    return Prepared(image, error, began_at, time.perf_counter(), thread)
