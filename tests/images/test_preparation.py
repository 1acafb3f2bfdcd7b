"""Images of waiting requests: in threads, within a bound on memory, each once."""

import gc
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from nanovllm.images import preparation as module
from nanovllm.images.image import Image
from nanovllm.images.picture import READING, Picture, PlacedPicture, SizedPicture
from nanovllm.images.preparation import Preparation
from nanovllm.images.processor import ImageProcessor
from nanovllm.outputs import Mistake

PROCESSOR = ImageProcessor(4, 2, "bicubic", min_pixels=64, max_pixels=10_000)
BYTES = 3 * 8 * 8  # of an image of 8 x 8
COST = BYTES + READING * 8 * 8  # while it is prepared


class Pictures:
    """Pictures whose reading waits for the test, and which counts what is read."""

    def __init__(self):
        self.gates, self.begun, self.lock = {}, [], threading.Lock()
        self.changed = threading.Condition(self.lock)

    def make(self, name, error=None):
        gate = self.gates.setdefault(name, threading.Event())

        def read():
            with self.changed:
                self.begun.append(name)
                self.changed.notify_all()
            assert gate.wait(60), "the test did not go on"
            if error is not None:
                raise error
            return np.full((8, 8, 3), len(name), np.uint8)

        return SizedPicture(Picture(8, 8, name, read), 8, 8, 1, 1)

    def has_begun(self, *names):
        with self.changed:
            assert self.changed.wait_for(lambda: set(names) <= set(self.begun), 60)

    def open(self, *names):
        for name in names:
            self.gates[name].set()


@pytest.fixture
def pictures():
    return Pictures()


@pytest.fixture
def prepare():
    """Makes preparations, which are closed at the end."""
    made = []

    def make(num_threads=2, max_bytes=100 * BYTES, **options):
        made.append(Preparation(PROCESSOR, num_threads, max_bytes=max_bytes, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("images")]


def placed(*pictures):
    return tuple(PlacedPicture(10 * i, each) for i, each in enumerate(pictures))


def ready(preparation, count):
    """The next requests that become ready."""
    found = []
    while len(found) < count:
        found += preparation.take_ready()
        if len(found) < count:
            preparation.wait(60)
    return found


def drain(preparation):
    """Wait until nothing is held. Nobody is told of anything."""
    while preparation.held_bytes:
        preparation.wait(60)
        assert not preparation.take_ready()


def test_others_pass_a_request_that_waits(pictures, prepare):
    preparation = prepare()
    preparation.add(0, placed(pictures.make("slow")))
    preparation.add(1, placed(pictures.make("fast"), pictures.make("other")))
    assert preparation.num_images_waiting == 3
    pictures.open("fast", "other")
    [first] = ready(preparation, 1)
    assert first.request_id == 1 and first.error is None
    assert [each.offset for each in first.images] == [0, 10]
    assert first.images[0].image.pixels[0, 0, 0] == len("fast")
    expected = Image.of(np.full((8, 8, 3), len("fast"), np.uint8), 4, 1)
    assert first.images[0].image.key == expected.key
    assert preparation.num_images_waiting == 1 and not preparation.take_ready()
    pictures.open("slow")
    [second] = ready(preparation, 1)
    assert second.request_id == 0
    assert preparation.counts.num_images_prepared == 3 and preparation.counts.image_seconds > 0


def test_an_image_of_several_requests_is_prepared_once(pictures, prepare):
    preparation = prepare()
    for request_id in range(3):
        preparation.add(request_id, placed(pictures.make("a"), pictures.make("a")))
    pictures.open("a")
    found = ready(preparation, 3)
    assert pictures.begun == ["a"] and preparation.counts.num_images_prepared == 1
    images = [each.image for one in found for each in one.images]
    assert len(images) == 6 and all(image is images[0] for image in images)
    assert preparation.held_bytes == BYTES
    preparation.add(3, placed(pictures.make("a")))  # one comes later
    assert ready(preparation, 1)[0].images[0].image is images[0]
    preparation.release([0, 1, 2])
    assert preparation.held_bytes == BYTES, "held for the last"
    preparation.release([3])
    assert preparation.held_bytes == 0 and not preparation.admitted


def test_a_bad_image_is_the_error_of_its_requests(pictures, prepare):
    preparation = prepare()
    broken = pictures.make("broken", ValueError("`image` cannot be read: it is broken"))
    preparation.add(0, placed(pictures.make("never"), broken))
    preparation.add(1, placed(pictures.make("good")))
    odd = pictures.make("odd", MemoryError("no room"))
    preparation.add(2, placed(odd))
    preparation.add(3, placed(broken))
    preparation.add(4, placed(pictures.make("good"), odd))
    pictures.open("broken", "good", "odd")
    found = {each.request_id: each for each in ready(preparation, 5)}
    assert found[0].error == "`image[1]` cannot be read: it is broken" and not found[0].images
    assert found[3].error == "`image` cannot be read: it is broken", "it has no other"
    assert isinstance(found[0].error, Mistake) and not isinstance(found[2].error, Mistake)
    assert found[1].error is None and len(found[1].images) == 1
    assert found[2].error == "`image` cannot be prepared (MemoryError: no room)"
    assert found[4].error == "`image[1]` cannot be prepared (MemoryError: no room)"
    assert preparation.counts.num_images_failed == 2
    preparation.release(range(5))
    pictures.open("never")
    drain(preparation)


def test_requests_wait_for_others_whose_images_are_prepared(pictures, prepare, monkeypatch):
    """Until there is enough for a step, or as few are left as there are threads, or too long."""
    monkeypatch.setattr(module, "MERGE_SECONDS", 1000.0)
    preparation = prepare()
    for i, name in enumerate("abcde"):
        preparation.add(i, placed(pictures.make(name)))
    pictures.open("a")
    while preparation.num_images_waiting > 4:
        preparation.wait(60)
        assert not preparation.take_ready(enough=2)
    pictures.open("b")
    found = []
    while not found:
        preparation.wait(60)
        found = preparation.take_ready(enough=2)
    assert [each.request_id for each in found] == [0, 1], "enough"
    pictures.open("c")
    found = []
    while not found:
        preparation.wait(60)
        found = preparation.take_ready(enough=2)
    assert [each.request_id for each in found] == [2], "no more are left than two threads have"
    for i, name in enumerate("fgh", 5):
        preparation.add(i, placed(pictures.make(name)))
    pictures.open("d")
    while preparation.num_images_waiting > 4:
        preparation.wait(60)
        assert not preparation.take_ready(enough=2)
    monkeypatch.setattr(module, "MERGE_SECONDS", 0.0)
    assert [each.request_id for each in preparation.take_ready(enough=2)] == [3], "too long"
    pictures.open(*"efgh")
    ready(preparation, 4)


def test_nobody_waits_for_images_that_have_no_memory(pictures, prepare, monkeypatch):
    """Those that are ready have to end before there are others."""
    monkeypatch.setattr(module, "MERGE_SECONDS", 1000.0)
    preparation = prepare(num_threads=1, max_bytes=COST)
    for i, name in enumerate("abc"):
        preparation.add(i, placed(pictures.make(name)))
    pictures.open(*"abc")
    for i in range(3):
        while preparation.is_running:
            preparation.wait(60)
            preparation.book()
        [found] = preparation.take_ready(enough=1000)
        assert found.request_id == i
        preparation.release([i])
        assert not preparation.take_ready(enough=1000)


@pytest.mark.parametrize("num_bytes", [100 * COST, 6 * COST], ids=["for all", "for some"])
def test_all_threads_help_a_caller_who_waits(num_bytes, pictures, prepare):
    """Else a few work, and the others leave Python to the engine. The oldest pictures come first,
    also those that wait for the few, which may have all the memory.
    """
    preparation = prepare(num_threads=5, num_beside=2, max_bytes=num_bytes)
    names = [f"p{i}" for i in range(2 * module.AHEAD + 4)]
    for i, name in enumerate(names):
        preparation.add(i, placed(pictures.make(name)))
    pictures.has_begun("p0", "p1")
    assert len(pictures.begun) == 2
    held = preparation.held_bytes
    preparation.wait(0)
    pictures.has_begun(*names[:5])
    assert len(pictures.begun) == 5
    assert held <= preparation.held_bytes <= num_bytes
    pictures.open(*names)
    threads = set()
    preparation.note = lambda prepared: threads.add(prepared.thread)
    done = []
    while len(done) < len(names):
        done += (found := [each.request_id for each in ready(preparation, 1)])
        preparation.release(found)
    assert sorted(done) == [*range(len(names))]
    assert threads >= {0, 1} and threads - {0, 1} and max(threads) < 5
    assert preparation.held_bytes == 0 and not preparation.is_running


def test_memory_is_bounded(pictures, prepare):
    """Two that are ready fit, and one that is prepared."""
    preparation = prepare(num_threads=8, max_bytes=2 * BYTES + COST)
    names = [f"{i:02}" for i in range(10)]
    for i, name in enumerate(names):
        preparation.add(i, placed(pictures.make(name)))
    pictures.open(*names)
    done, alive, most = [], [], 0
    while len(done) < 10:
        if not (found := preparation.take_ready()):
            preparation.wait(60)
        most = max(most, preparation.held_bytes)
        assert len(pictures.begun) <= len(done) + len(found) + 2, "not all at once"
        done += found
        alive += [each.request_id for each in found]
        preparation.release(alive[:-2])
        alive = alive[-2:]
    assert BYTES + COST <= most <= 2 * BYTES + COST
    assert sorted(each.request_id for each in done) == [*range(10)]


def test_one_request_may_need_more_than_there_is(pictures, prepare):
    preparation = prepare(max_bytes=BYTES)
    names = ["a", "b", "c"]
    preparation.add(0, placed(*(pictures.make(name) for name in names)))
    pictures.open(*names)
    assert ready(preparation, 1)[0].error is None
    assert preparation.held_bytes == 3 * BYTES
    # Another waits until this one has ended.
    preparation.add(1, placed(pictures.make("d")))
    pictures.open("d")
    assert not preparation.take_ready() and "d" not in pictures.begun
    preparation.release([0])
    assert ready(preparation, 1)[0].request_id == 1


def test_images_held_for_requests_that_wait_for_others_do_not_block(pictures, prepare):
    """Two requests have one image of two, and memory for no third: they are alone, so it comes."""
    preparation = prepare(num_threads=1, max_bytes=2 * BYTES)
    for name in "abcd":
        pictures.make(name)
    preparation.add(0, placed(pictures.make("a")))
    preparation.add(1, placed(pictures.make("b")))
    preparation.add(2, placed(pictures.make("a"), pictures.make("c")))
    preparation.add(3, placed(pictures.make("b"), pictures.make("d")))
    pictures.open(*"abcd")
    found = ready(preparation, 1)
    preparation.release([0])
    found += ready(preparation, 1)
    preparation.release([1])
    assert preparation.held_bytes == 2 * BYTES
    found += ready(preparation, 1)
    preparation.release([2])
    found += ready(preparation, 1)
    assert [each.request_id for each in found] == [0, 1, 2, 3]


def test_encoded_data_count_as_long_as_they_are_there(pictures, prepare):
    preparation = prepare()
    sized = pictures.make("a")
    sized = replace(sized, picture=replace(sized.picture, source_bytes=1000))
    preparation.add(0, placed(sized))
    assert preparation.held_bytes == COST + 1000
    pictures.open("a")
    ready(preparation, 1)
    assert preparation.held_bytes == BYTES + 1000
    preparation.release([0])
    assert preparation.held_bytes == 0


def test_encoded_data_that_wait_count_for_those_who_add(pictures, prepare):
    """They keep no other picture from a thread: what is there already does not go by waiting."""
    preparation = prepare(num_threads=1, max_bytes=3 * COST)
    for name in "abcd":
        sized = pictures.make(name)
        sized = replace(sized, picture=replace(sized.picture, source_bytes=COST))
        assert preparation.has_room == (name in "ab")
        preparation.add(ord(name), placed(sized))
    assert preparation.held_bytes == 2 * COST and preparation.waiting_bytes == 3 * COST
    preparation.release([ord("c")])
    pictures.open("a", "b", "d")
    for name in "ab":
        assert ready(preparation, 1)[0].request_id == ord(name)
        preparation.release([ord(name)])
    assert ready(preparation, 1)[0].request_id == ord("d") and preparation.has_room
    assert preparation.waiting_bytes == 0, "neither of the dropped one nor of the last"
    preparation.add(0, placed(replace(pictures.make("e"), picture=sized.picture)))
    preparation.close()
    assert preparation.waiting_bytes == 0


def test_released_before_it_is_ready(pictures, prepare):
    preparation = prepare(num_threads=1)
    for i, name in enumerate("abc"):
        preparation.add(i, placed(pictures.make(name)))
    pictures.has_begun("a")
    preparation.release([0, 2])
    pictures.open("a", "b", "c")
    assert [each.request_id for each in ready(preparation, 1)] == [1]
    assert preparation.num_images_waiting == 0
    preparation.release([1])
    drain(preparation)
    assert pictures.begun == ["a", "b"], "nobody wants the last, which was given to the thread"


def test_released_while_it_is_read(pictures, prepare):
    """Its memory is given back when the thread is done, and what waits behind it at once."""
    preparation = prepare(num_threads=1)
    for i, name in enumerate("abcdef"):
        preparation.add(i, placed(pictures.make(name)))
    pictures.has_begun("a")
    preparation.release(range(6))
    assert not preparation._queue and preparation.is_running and preparation.held_bytes
    pictures.open(*"abcdef")
    while preparation.is_running:
        preparation.wait(60)
        preparation.book()
    assert preparation.held_bytes == 0


def test_close_amid_the_work(pictures, prepare):
    preparation = prepare(num_threads=1)
    for i, name in enumerate("abcde"):
        preparation.add(i, placed(pictures.make(name)))
    pictures.has_begun("a")
    closing = threading.Thread(target=preparation.close)
    closing.start()
    pictures.open(*"abcde")
    closing.join(60)
    assert not closing.is_alive() and pictures.begun == ["a"]
    assert preparation.held_bytes == 0 and preparation.num_images_waiting == 0
    preparation.add(9, placed(pictures.make("e")))  # it may be used again
    assert ready(preparation, 1)[0].request_id == 9


def test_threads_end_with_their_owner(pictures):
    preparation = Preparation(PROCESSOR, 2, max_bytes=BYTES * 10)
    preparation.add(0, placed(pictures.make("a")))
    pictures.open("a")
    ready(preparation, 1)
    threads = [t for t in threading.enumerate() if t.name.startswith("images")]
    assert threads
    del preparation
    gc.collect()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)


def test_wait_ends(prepare):
    before = time.perf_counter()
    prepare().wait(1000)
    assert time.perf_counter() - before < 100, "nothing to wait for"
