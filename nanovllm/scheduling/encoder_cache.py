"""`EncoderCache`: the images in the store of embeddings, and their places. No tensors here.

An image is encoded whole, in the step that first computes one of its placeholders, and stays until
another needs its rows: the one that was used least recently goes first. While a sequence has
computed some of an image's placeholders and not all, or is about to, the image is held. Steps on
their way need not be waited for: the device encodes and computes in the order of the steps.

Invariants (the tests verify them after every step):

1. Each row of the store is free, or of one image.
2. Only images that no sequence holds give up their rows.
3. No sequence that waits or has finished holds any.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nanovllm.images.image import Image, PlacedImage
from nanovllm.images.positions import three_positions
from nanovllm.images.stored import ImageState, Stored
from nanovllm.utils.arrays import Int32

if TYPE_CHECKING:
    from nanovllm.engine.sequence import ScheduledSequence, Sequence

FIRST_STAND_IN = -2  # -1 is for tokens that are pending


class ImageFacts(NamedTuple):
    """The facts of a model's images that scheduling needs.

    Attributes:
        capacity: embeddings that the store holds, and that a step encodes at most.
        merge: patches on each side of the square that becomes one embedding.
        three_axes: whether tokens of images have positions of three axes.
        are_whole: whether the tokens of an image see each other, so that no chunk and no prefix
            of the cache may end inside one.
    """

    capacity: int
    merge: int = 1
    three_axes: bool = False
    are_whole: bool = False


class EncoderCache:
    """The books of the store.

    Args:
        facts: facts of the model's images; None: it has no tower.

    Attributes:
        num_encoded, num_hits: images that were encoded for a sequence, and that were there: in the
            store, or as keys and values in the prefix cache.
    """

    def __init__(self, facts: ImageFacts | None = None) -> None:
        self._facts = facts or ImageFacts(0)
        self._numbers: dict[bytes, int] = {}  # of all images so far, by key
        self.num_encoded = self.num_hits = 0
        self.forget()

    def forget(self) -> None:
        """Forget all that is in the store. No sequence may hold anything."""
        self._stored: OrderedDict[bytes, Stored] = OrderedDict()  # least recently used first
        self._free_rows = list(reversed(range(self._facts.capacity)))
        self._num_held_rows = 0
        self._budget = 0

    # -- sequences ------------------------------------------------------------------------------

    def join(self, seq: Sequence) -> None:
        """Know a sequence that is new."""
        if not seq.images:
            return
        numbers = self._numbers
        keys = [placed.image.key for placed in seq.images]
        stand_ins = [numbers.setdefault(key, FIRST_STAND_IN - len(numbers)) for key in keys]
        positions = None
        if self._facts.three_axes:
            positions, seq.position_delta = three_positions(
                seq.num_prompt_tokens, seq.images, self._facts.merge
            )
        seq.image_state = ImageState(stand_ins, positions, self._facts.are_whole)

    def release(self, seq: Sequence) -> None:
        """A sequence holds nothing any more."""
        if seq.image_state is not None:
            for i in [*seq.image_state.held]:
                self._let_go(seq.image_state, i)

    def _let_go(self, state: ImageState, i: int) -> None:
        stored = state.held.pop(i)
        stored.num_holders -= 1
        if not stored.num_holders:
            self._num_held_rows -= len(stored.rows)

    # -- a step ---------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Nothing has been chosen for the next step."""
        self._budget = self._facts.capacity

    def close(self) -> None:
        """Let nobody else encode images in this step: an older sequence waits for room."""
        self._budget = 0

    def reach(self, seq: Sequence, start: int, end: int) -> int:
        """The index up to which a step can compute a sequence: `end`, or the beginning of an image
        before it that the step cannot encode, or may not cut; `start` if that is nothing.
        """
        budget = self._budget
        room = self._facts.capacity - self._num_held_rows
        counted: set[bytes] = set()
        for i, placed in overlapping(seq, start, end):
            if self._facts.are_whole and placed.end > end:
                return max(start, placed.offset)
            key, count = placed.image.key, placed.image.num_tokens
            assert seq.image_state is not None, f"{seq!r} has not joined"
            if i in seq.image_state.held or key in counted:
                continue
            stored = self._stored.get(key)
            if stored is None:
                budget -= count
            if stored is None or not stored.num_holders:
                room -= count
            if budget < 0 or room < 0:
                return max(start, placed.offset)
            counted.add(key)
        return end

    def take(self, item: ScheduledSequence) -> None:
        """Have the sequence of an item hold the images that it computes tokens of."""
        seq, state = item.seq, item.seq.image_state
        if state is None:
            return
        needed = [
            (i, placed.image)
            for i, placed in overlapping(seq, item.start, item.end)
            if i not in state.held
        ]
        # Those in the store first: rows for the others must not be theirs.
        for i, image in needed:
            if (stored := self._stored.get(image.key)) is not None:
                self._hold(state, i, stored)
                self.num_hits += 1
        for i, image in needed:
            if i not in state.held:
                stored = self._stored.get(image.key)  # it may be there twice
                self._hold(state, i, self._reserve(image) if stored is None else stored)

    def _hold(self, state: ImageState, i: int, stored: Stored) -> None:
        if not stored.num_holders:
            self._num_held_rows += len(stored.rows)
        stored.num_holders += 1
        state.held[i] = stored
        self._stored.move_to_end(stored.image.key)

    def _reserve(self, image: Image) -> Stored:
        """Rows for an image, those of the least recently used ones if too few are free."""
        count = image.num_tokens
        while len(self._free_rows) < count:
            unheld = (key for key, stored in self._stored.items() if not stored.num_holders)
            key = next(unheld, None)
            assert key is not None, "`reach` has promised room"
            self._free_rows += self._stored.pop(key).rows.tolist()
        rows = self._free_rows[-count:]
        del self._free_rows[-count:]
        self._budget -= count
        stored = self._stored[image.key] = Stored(image, np.array(rows, np.int32))
        return stored

    def started(self, seq: Sequence) -> None:
        """Count the images whose tokens the prefix cache has."""
        self.num_hits += sum(placed.end <= seq.num_computed_tokens for placed in seq.images)

    def launched(self, scheduled: Iterable[ScheduledSequence]) -> None:
        """The step has been launched: its images are encoded, and sequences let those go whose last
        token it computes.
        """
        if not self._num_held_rows:
            return
        for item in scheduled:
            state = item.seq.image_state
            if state is None or not state.held:
                continue
            for i, placed in overlapping(item.seq, item.start, item.end):
                stored = state.held[i]
                self.num_encoded += not stored.is_encoded
                stored.is_encoded = True
                if placed.end <= item.end:
                    self._let_go(state, i)

    def describe(self) -> dict[str, int]:
        """Counters, for `LLMEngine.metrics`; none without a tower."""
        if not self._facts.capacity:
            return {}
        return {"num_images_encoded": self.num_encoded, "num_image_hits": self.num_hits}


def overlapping(seq: Sequence, start: int, end: int) -> Iterator[tuple[int, PlacedImage]]:
    """The images with placeholders among these tokens, with their indices in the prompt."""
    if start >= seq.images_end:
        return
    for i, placed in enumerate(seq.images):
        if placed.offset >= end:
            return
        if placed.end > start:
            yield i, placed


class Encoding(NamedTuple):
    """The images that a step encodes.

    Attributes:
        pixels: [H, W, 3] uint8 of each.
        rows: [num_tokens] of each, rows of the store.
    """

    pixels: list[NDArray[np.uint8]]
    rows: list[Int32]


def encoding_of(scheduled: Iterable[ScheduledSequence]) -> Encoding | None:
    """The images that a step must encode first, each once; None: there are none."""
    found: dict[int, Stored] = {}
    for item in scheduled:
        state = item.seq.image_state
        if state is not None and state.held:
            for i, _ in overlapping(item.seq, item.start, item.end):
                stored = state.held[i]
                if not stored.is_encoded:
                    found[id(stored)] = stored
    if not found:
        return None
    return Encoding([s.image.pixels for s in found.values()], [s.rows for s in found.values()])


def placed_rows(scheduled: list[ScheduledSequence]) -> Int32:
    """The rows of a step up to the last image of their prompt, from the first item on.

    Returns:
        [6, n]: row of the step; row of the store and number of the image, -1 for tokens of text;
        three positions.
    """
    parts, row, number = [np.zeros((6, 0), np.int32)], 0, 0
    if not any(item.seq.images for item in scheduled):
        return parts[0]
    for item in scheduled:
        seq, start = item.seq, item.start
        if start < seq.images_end:
            assert seq.image_state is not None, f"{seq!r} has not joined"
            end = min(item.end, seq.images_end)
            part = np.empty((6, end - start), np.int32)
            part[0] = np.arange(row, row + end - start)
            part[1:3] = -1
            for i, placed in overlapping(seq, start, end):
                first, last = max(start, placed.offset), min(end, placed.end)
                rows = seq.image_state.held[i].rows[first - placed.offset : last - placed.offset]
                part[1, first - start : last - start] = rows
                part[2, first - start : last - start] = number
                number += 1
            part[3:] = seq.image_state.positions_of(start, end)
            parts.append(part)
        row += item.num_tokens
    return np.concatenate(parts, axis=1)
