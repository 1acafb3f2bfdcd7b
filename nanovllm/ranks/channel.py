"""`Channel`: messages from rank 0 to all workers, through shared memory. No torch here.

The memory has no name: it is an anonymous file (`memfd_create`), and workers inherit its
descriptor. So nothing can remain in /dev/shm, and engines cannot meet by accident.

    reader positions, a cache line each | slot 0 | slot 1 | ...        slot: length, message

Message n lies in slot n % NUM_SLOTS. The writer wakes each reader by one byte through a socket (see
`Workers`), and waits before it overwrites a message that some reader has not read yet.
"""

import mmap
import os

LINE = 64  # bytes of a cache line
NUM_SLOTS = 4
NUMBER = 8  # bytes of a position or a length


class Channel:
    """One end of the channel.

    Args:
        fd: file descriptor of the memory.
        num_readers: number of workers that read.
        capacity: length of the longest message, in bytes.
    """

    def __init__(self, fd: int, num_readers: int, capacity: int) -> None:
        self._num_readers, self._capacity = num_readers, capacity
        self._slot_size = self._slot_bytes(capacity)
        self._memory = mmap.mmap(fd, self.num_bytes(num_readers, capacity))
        # Whole words, each stored at once: `struct` would store zeros first, for readers to see.
        self._numbers = memoryview(self._memory).cast("q")
        self._num_messages = 0  # messages sent or received at this end

    @staticmethod
    def _slot_bytes(capacity: int) -> int:
        return -(-(NUMBER + capacity) // LINE) * LINE

    @classmethod
    def num_bytes(cls, num_readers: int, capacity: int) -> int:
        """The memory that a channel needs, in bytes."""
        return num_readers * LINE + NUM_SLOTS * cls._slot_bytes(capacity)

    @classmethod
    def create(cls, num_readers: int, capacity: int) -> tuple["Channel", int]:
        """The writer's end, and the file descriptor for the readers, which the caller closes."""
        fd = os.memfd_create("nanovllm")
        try:
            os.ftruncate(fd, cls.num_bytes(num_readers, capacity))
            return cls(fd, num_readers, capacity), fd
        except BaseException:
            os.close(fd)
            raise

    def _slot(self) -> int:
        return self._num_readers * LINE + self._num_messages % NUM_SLOTS * self._slot_size

    def has_room(self) -> bool:
        """Whether all readers have read the message that the next one overwrites."""
        oldest = min(self._numbers[i * LINE // NUMBER] for i in range(self._num_readers))
        return self._num_messages - oldest < NUM_SLOTS

    def write(self, message: bytes) -> None:
        """Put a message into the next slot, which must have room."""
        assert self.has_room(), "a message that a reader has not taken would be lost"
        assert len(message) <= self._capacity, f"{len(message)} bytes for {self._capacity}"
        slot = self._slot()
        self._numbers[slot // NUMBER] = len(message)
        self._memory[slot + NUMBER : slot + NUMBER + len(message)] = message
        self._num_messages += 1

    def read(self, reader: int) -> bytes:
        """Take the next message, which must have been written."""
        slot = self._slot()
        length = self._numbers[slot // NUMBER]
        message = self._memory[slot + NUMBER : slot + NUMBER + length]
        self._num_messages += 1
        self._numbers[reader * LINE // NUMBER] = self._num_messages
        return message

    def close(self) -> None:
        """Unmap the memory."""
        self._numbers.release()
        self._memory.close()
