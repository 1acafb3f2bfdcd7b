"""`TokenSets`: sets of tokens at the places of a text, such as those that could have been drawn.

Written as bytes, which are few: 4 for each token of a set, or a bit for each token of the
vocabulary, whichever is less.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


class TokenSets(Sequence[list[int] | None]):
    """A set of tokens for each place of a text, as a sorted list of ids; None: all tokens of the
    vocabulary.

    Reads like a list of these lists, but holds bytes and makes a list when it is asked for. It
    compares as such a list does.

    Args:
        vocab_size: vocabulary size V.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._places: list[bytes | None] = []

    def put(self, place: int, packed: bytes | None) -> None:
        """Add the set at a place after all others, one of `pack`. Those between have all tokens."""
        self.extend_to(place)
        self._places.append(packed)

    def extend_to(self, length: int) -> None:
        """Give places up to `length` all tokens, where they have no set."""
        self._places += [None] * (length - len(self._places))

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: Any) -> Any:
        """The list at a place, or a list of them."""
        if isinstance(index, slice):
            return [self._unpack(packed) for packed in self._places[index]]
        return self._unpack(self._places[index])

    def _unpack(self, packed: bytes | None) -> list[int] | None:
        if packed is None:
            return None
        if len(packed) < 4 * num_words(self._vocab_size):
            return np.frombuffer(packed, np.int32).tolist()
        bits = np.unpackbits(np.frombuffer(packed, np.uint8), bitorder="little")
        return np.flatnonzero(bits).tolist()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        sizes = ("all" if each is None else str(len(each)) for each in self[:4])
        more = ", ..." if len(self) > 4 else ""
        return f"<sets of {', '.join(sizes)}{more} tokens at {len(self)} places>"


def num_words(vocab_size: int) -> int:
    """Words of 32 bits that have a bit for each token."""
    return -(-vocab_size // 32)


def pack(words: NDArray[np.int32], vocab_size: int) -> list[bytes | None]:
    """Sets of tokens for `TokenSets`.

    Args:
        words: [m, W], bit t % 32 of word t // 32 for token t; no bits beyond the vocabulary.
        vocab_size: vocabulary size V.
    """
    W = num_words(vocab_size)
    every = np.zeros(32 * W, np.uint8)
    every[:vocab_size] = 1
    all_tokens = np.packbits(every, bitorder="little").tobytes()
    is_few = np.count_nonzero(words, axis=1) < W  # others have W tokens at least
    few = words if is_few.all() else words[is_few]
    rows, columns = np.divmod(np.flatnonzero(few.ravel() != 0), W)
    found = few[rows, columns, None].view(np.uint8)  # [K, 4]
    which, lanes = np.unpackbits(found, axis=1, bitorder="little").nonzero()
    ids = (32 * columns[which] + lanes).astype(np.int32)
    ends = np.searchsorted(rows[which], np.arange(1, len(few)))
    listed = iter(np.split(ids, ends))
    packed: list[bytes | None] = []
    for row, has_few in zip(words, is_few.tolist(), strict=True):
        own = next(listed) if has_few else row
        bits = row.tobytes() if len(own) >= W else b""
        packed.append(None if bits == all_tokens else bits or own.tobytes())
    return packed
