"""`KeySet`: a compact set of rows' keys, with a small value for each."""

KEY_BYTES = 16
EMPTY = bytes(KEY_BYTES)


class KeySet:
    """A set of keys of 16 bytes, each with a value of fixed size, for millions of rows.

    A table with open addressing, at most two thirds full: it needs 1.5 to 3 times the bytes of key
    and value for each key (half as many again while it grows), where Python's own set needs some
    100. A job has two: for the rows in the sink, and for the `custom_id`s read so far.

    Args:
        value_bytes: size of a value in bytes; 0: there are none.
    """

    def __init__(self, value_bytes: int = 0) -> None:
        self._width = KEY_BYTES + value_bytes
        self._slots, self._mask, self._count = bytearray(1024 * self._width), 1023, 0

    def add(self, key: bytes, value: bytes = b"") -> bool:
        """Add a key, and return whether it is new. A key that is not new keeps its value."""
        assert len(key) == KEY_BYTES and key != EMPTY, "keys are hashes of 16 bytes"
        assert len(key) + len(value) == self._width, "values are of one size"
        at = self._place(key)
        if self._slots[at : at + KEY_BYTES] == key:
            return False
        self._slots[at : at + self._width] = key + value
        self._count += 1
        if 3 * self._count > 2 * self._mask:
            self._grow()
        return True

    def __contains__(self, key: bytes) -> bool:
        at = self._place(key)
        return self._slots[at : at + KEY_BYTES] == key

    def value(self, key: bytes) -> bytes:
        """The value of a key in the set."""
        at = self._place(key)
        return bytes(self._slots[at + KEY_BYTES : at + self._width])

    def __len__(self) -> int:
        return self._count

    def _place(self, key: bytes) -> int:
        """The offset of a key, or the one where it would be put."""
        slot = int.from_bytes(key[:8], "little") & self._mask
        while True:
            at = slot * self._width
            found = self._slots[at : at + KEY_BYTES]
            if found in (key, EMPTY):
                return at
            slot = (slot + 1) & self._mask

    def _grow(self) -> None:
        old, self._mask = self._slots, 2 * self._mask + 1
        self._slots = bytearray((self._mask + 1) * self._width)
        for begin in range(0, len(old), self._width):
            key = bytes(old[begin : begin + KEY_BYTES])
            if key != EMPTY:
                at = self._place(key)
                self._slots[at : at + self._width] = old[begin : begin + self._width]
