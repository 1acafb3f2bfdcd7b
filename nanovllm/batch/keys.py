"""`KeySet`: which rows are known, in few bytes each."""

KEY_BYTES = 16
EMPTY = bytes(KEY_BYTES)


class KeySet:
    """A set of keys of 16 bytes, for millions of rows.

    A table with open addressing, at most two thirds full: 24 to 48 bytes for each key (half as many
    again while it grows), where Python's own set takes some 100. A job has two: of the rows that
    the sink has, and of the `custom_id`s that were read.
    """

    def __init__(self) -> None:
        self._slots, self._mask, self._count = bytearray(1024 * KEY_BYTES), 1023, 0

    def add(self, key: bytes) -> bool:
        """Whether the key is new."""
        assert len(key) == KEY_BYTES and key != EMPTY, "keys are hashes of 16 bytes"
        at = self._place(key)
        if self._slots[at : at + KEY_BYTES] == key:
            return False
        self._slots[at : at + KEY_BYTES] = key
        self._count += 1
        if 3 * self._count > 2 * self._mask:
            self._grow()
        return True

    def __contains__(self, key: bytes) -> bool:
        at = self._place(key)
        return self._slots[at : at + KEY_BYTES] == key

    def __len__(self) -> int:
        return self._count

    def _place(self, key: bytes) -> int:
        """Where the key is, or where it would be."""
        slot = int.from_bytes(key[:8], "little") & self._mask
        while True:
            at = slot * KEY_BYTES
            found = self._slots[at : at + KEY_BYTES]
            if found in (key, EMPTY):
                return at
            slot = (slot + 1) & self._mask

    def _grow(self) -> None:
        old, self._mask = self._slots, 2 * self._mask + 1
        self._slots = bytearray((self._mask + 1) * KEY_BYTES)
        for begin in range(0, len(old), KEY_BYTES):
            key = bytes(old[begin : begin + KEY_BYTES])
            if key != EMPTY:
                at = self._place(key)
                self._slots[at : at + KEY_BYTES] = key
