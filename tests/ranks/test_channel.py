"""The channel to the workers: every message whole, in order, to each reader, none overwritten."""

import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from faults import shared_memory, wait_until
from nanovllm.ranks.channel import NUM_SLOTS, Channel

CAPACITY = 100
SEED = 23


@pytest.fixture(params=[1, 2, 7])
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[Channel, list[Channel]]]:
    """A writer, and readers that have maps of their own, as in other processes."""
    writer, fd = Channel.create(request.param, CAPACITY)
    readers = [Channel(fd, request.param, CAPACITY) for _ in range(request.param)]
    os.close(fd)
    yield writer, readers
    for end in (writer, *readers):
        end.close()


def test_readers_at_different_paces_get_every_message(
    ends: tuple[Channel, list[Channel]],
) -> None:
    """Many times around the ring, with messages of all lengths, the empty and the longest too."""
    writer, readers = ends
    print("seed", SEED)
    rng = random.Random(SEED)
    sent: list[bytes] = []
    taken = [0] * len(readers)
    was_full = 0
    while len(sent) < 50 * NUM_SLOTS:
        if writer.has_room() and rng.random() < 0.6:
            length = rng.choice([0, 1, 63, 64, CAPACITY - 1, CAPACITY, rng.randint(0, CAPACITY)])
            sent.append(rng.randbytes(length))
            writer.write(sent[-1])
        was_full += not writer.has_room()
        assert writer.has_room() == (len(sent) - min(taken) < NUM_SLOTS)
        reader = rng.randrange(len(readers))
        if taken[reader] < len(sent) and rng.random() < 0.6:
            assert readers[reader].read(reader) == sent[taken[reader]]
            taken[reader] += 1
    assert was_full > 0


def test_the_slowest_reader_keeps_its_messages(ends: tuple[Channel, list[Channel]]) -> None:
    """A worker that lags must not find its next step overwritten by a later one."""
    writer, readers = ends
    for i in range(NUM_SLOTS):
        assert writer.has_room()
        writer.write(b"%d" % i)
    for number, reader in enumerate(readers):
        assert not writer.has_room()
        assert [reader.read(number) for _ in range(NUM_SLOTS - 1)] == [b"0", b"1", b"2"]
    assert writer.has_room()
    writer.write(b"next")
    assert [reader.read(number) for number, reader in enumerate(readers)] == [b"3"] * len(readers)
    assert [reader.read(i) for i, reader in enumerate(readers)] == [b"next"] * len(readers)


def test_a_message_of_the_capacity_fits_and_a_longer_one_is_refused(
    ends: tuple[Channel, list[Channel]],
) -> None:
    """And it leaves its neighbours alone, in every slot."""
    writer, readers = ends
    for i in range(2 * NUM_SLOTS):
        writer.write(bytes([i]) * CAPACITY)
        with pytest.raises(AssertionError, match="101 bytes for 100"):
            writer.write(b"x" * (CAPACITY + 1))
        writer.write(b"short")
        for number, reader in enumerate(readers):
            assert reader.read(number) == bytes([i]) * CAPACITY
            assert reader.read(number) == b"short"


def test_readers_in_other_threads(ends: tuple[Channel, list[Channel]]) -> None:
    """The engine's use: the reader is woken, the writer asks for room."""
    writer, readers = ends
    messages = [b"%d" % i * (i % 30) for i in range(500)]
    woken = [threading.Semaphore(0) for _ in readers]
    received: list[list[bytes]] = [[] for _ in readers]

    def read(number: int) -> None:
        for _ in messages:
            assert woken[number].acquire(timeout=30)
            received[number].append(readers[number].read(number))

    threads = [threading.Thread(target=read, args=(i,)) for i in range(len(readers))]
    for thread in threads:
        thread.start()
    for message in messages:
        while not writer.has_room():
            os.sched_yield()
        writer.write(message)
        for semaphore in woken:
            semaphore.release()
    for thread in threads:
        thread.join(timeout=30)
    assert received == [messages] * len(readers)


def test_channels_have_no_name_to_meet_or_to_leave_behind() -> None:
    """Defect 12: a second engine attached to the first one's memory."""
    before = shared_memory()
    (first, first_fd), (second, second_fd) = (Channel.create(1, CAPACITY) for _ in range(2))
    wait_until(lambda: shared_memory() <= before)
    reader = Channel(second_fd, 1, CAPACITY)
    first.write(b"first")
    second.write(b"second")
    assert reader.read(0) == b"second"
    for fd in (first_fd, second_fd):
        os.close(fd)
    for end in (first, second, reader):
        end.close()


READER = """
import sys
from nanovllm.ranks.channel import Channel
channel = Channel(int(sys.argv[1]), 1, 100)
while True:
    for position in (254, 255):
        channel._num_messages = position
        channel.read(0)
"""


def test_another_process_never_sees_half_a_position() -> None:
    """It was seen as 0 for an instant, so that room which had been there was gone."""
    writer, fd = Channel.create(1, CAPACITY)
    command = [sys.executable, "-c", READER, str(fd)]
    with subprocess.Popen(command, pass_fds=[fd]) as reader:
        os.close(fd)
        writer._num_messages = 256
        while not writer.has_room():  # until the reader is there
            assert reader.poll() is None
        try:
            assert all(writer.has_room() for _ in range(100_000))
        finally:
            reader.kill()
    writer.close()
