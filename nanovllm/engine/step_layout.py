"""The layout of a step: all its arrays in one buffer of int32, which is copied at once.

`LAYOUT` declares them. `divide` cuts a buffer into them, and `lay_out` fills them with a batch. A
step that is launched kernel by kernel has a buffer of its size; CUDA graphs have one that stays,
with room for more (`graphs.static_inputs`). No torch here.

Letters: T tokens, B sequences, D decodes, P sequences that prefill, N sequences that sample, W
blocks of the longest.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from enum import Enum, auto
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nanovllm.engine.plan import FACTS, Batch, Fact
from nanovllm.utils.integers import cdiv

ALIGNMENT = 4  # words, of where an array begins: kernels are compiled for 16 bytes


class Size(NamedTuple):
    """Room that the arrays of a step have.

    Attributes:
        decodes: D
        tokens: tokens of prompts; T = D + tokens.
        prompts: P; B = D + P.
        samples: N, sequences that sample.
        width: W, blocks of the longest sequence.
        sharing: D if decodes share prefixes, else 0.
        members: decodes of all tiles of `SharedPrefixes`.
        tiles: number of these tiles.
        windowed: whether layers that slide have block tables of their own.
    """

    decodes: int
    tokens: int
    prompts: int
    samples: int
    width: int
    sharing: int = 0
    members: int = 0
    tiles: int = 0
    windowed: bool = False

    @classmethod
    def of(cls, batch: Batch) -> Size:
        """Room for a batch, and none for padding."""
        n, (B, W) = batch.num_decodes, batch.block_tables.shape
        size = cls(n, len(batch.input_ids) - n, B - n, len(batch.sample_rows), W)
        size = size._replace(windowed=bool(batch.window_tables.size))
        if batch.prefixes is None:
            return size
        _, rows, begins, _ = batch.prefixes
        return size._replace(sharing=n, members=len(rows), tiles=len(begins))


class Rows(Enum):
    """Kinds of rows that an array may have."""

    TOKENS = auto()  # [T], those of prompts from D on
    SEQUENCES = auto()  # [B], prompts from D on
    SAMPLES = auto()  # [N]
    WINDOWED_TOKENS = auto()  # as TOKENS and SEQUENCES, for layers that slide
    WINDOWED_SEQUENCES = auto()
    BOUNDS = auto()  # [P + 1]
    SHARING = auto()  # of decodes that share prefixes, as the next two
    MEMBERS = auto()
    TILES = auto()

    @staticmethod
    def counts(size: Size) -> dict[Rows, int]:
        """The number of rows of each kind."""
        return {
            Rows.TOKENS: size.decodes + size.tokens,
            Rows.SEQUENCES: size.decodes + size.prompts,
            Rows.WINDOWED_TOKENS: (size.decodes + size.tokens) * size.windowed,
            Rows.WINDOWED_SEQUENCES: (size.decodes + size.prompts) * size.windowed,
            Rows.SAMPLES: size.samples,
            Rows.BOUNDS: size.prompts + 1,
            Rows.SHARING: size.sharing,
            Rows.MEMBERS: size.members,
            Rows.TILES: size.tiles,
        }


class Array(NamedTuple):
    """An array of a step: [rows].

    Attributes:
        rows: kind of the array's rows.
        padding: value of rows without one: a number, or the last value.
        dtype: numpy dtype of 4 bytes.
        words: values of a row; not 0: the array is [words, rows].
        is_table: whether it is [rows, W].
    """

    rows: Rows
    padding: int | Literal["last"] = 0
    dtype: Any = np.int32
    words: int = 0
    is_table: bool = False

    @classmethod
    def of_fact(cls, fact: Fact) -> Array:
        """The array of a fact of sequences."""
        dtype = np.dtype(fact.dtype)
        assert dtype.base.itemsize == 4 and len(dtype.shape) < 2, f"{dtype} is not a row of words"
        return cls(Rows[fact.rows.upper()], dtype=dtype.base, words=sum(dtype.shape))


WITH_DECODES = Rows.TOKENS, Rows.SEQUENCES, Rows.WINDOWED_TOKENS, Rows.WINDOWED_SEQUENCES
# Padding computes nothing of use: slot mapping -1 is not stored, context length 0 reads nothing,
# and slot 0 belongs to no sequence. Attention leaves any numbers for tokens after those of prompts.
LAYOUT = {
    "input_ids": Array(Rows.TOKENS),
    "positions": Array(Rows.TOKENS),
    "slot_mapping": Array(Rows.TOKENS, padding=-1),
    "context_lens": Array(Rows.SEQUENCES),
    "slots": Array(Rows.SEQUENCES),
    "block_tables": Array(Rows.SEQUENCES, is_table=True),
    "window_slot_mapping": Array(Rows.WINDOWED_TOKENS, padding=-1),
    "window_tables": Array(Rows.WINDOWED_SEQUENCES, is_table=True),
    "sample_rows": Array(Rows.SAMPLES),
    "sample_positions": Array(Rows.SAMPLES),
    "sample_slots": Array(Rows.SAMPLES),
    "cu_seqlens_q": Array(Rows.BOUNDS, padding="last"),
    "cu_seqlens_k": Array(Rows.BOUNDS, padding="last"),
    "prefix_lens": Array(Rows.SHARING),
    "prefix_rows": Array(Rows.MEMBERS),
    "prefix_begins": Array(Rows.TILES),
    "prefix_ends": Array(Rows.TILES),
    **{
        f"sample_{name}" if fact.rows == "samples" else name: Array.of_fact(fact)
        for name, fact in FACTS.items()
    },
}


class Place(NamedTuple):
    """The place of an array in a buffer, and its shape."""

    begin: int
    end: int
    shape: tuple[int, ...]


@functools.lru_cache(1024)
def places(size: Size) -> dict[str, Place]:
    """The places of all arrays: each begins at a multiple of `ALIGNMENT`, the first at 0."""
    found: dict[str, Place] = {}
    end, counts = 0, Rows.counts(size)
    for name, array in LAYOUT.items():
        shape: tuple[int, ...] = (counts[array.rows],)
        if array.is_table:
            shape = *shape, size.width
        elif array.words:
            shape = array.words, *shape
        begin = cdiv(end, ALIGNMENT) * ALIGNMENT
        end = begin + math.prod(shape)
        found[name] = Place(begin, end, shape)
    return found


def num_words(size: Size) -> int:
    """Words of int32 that a buffer needs."""
    return next(reversed(places(size).values())).end


def divide(buffer: Any, size: Size) -> dict[str, Any]:
    """The arrays of a buffer of int32, of numpy or of PyTorch, by name."""
    parts = {}
    for name, place in places(size).items():
        part = buffer[place.begin : place.end]
        parts[name] = part if len(place.shape) == 1 else part.reshape(place.shape)
    return parts


def lay_out(parts: Mapping[str, NDArray[np.int32]], size: Size, batch: Batch) -> None:
    """Write a batch over the one before.

    Args:
        parts: the arrays, on the host.
        size: their room.
        batch: batch that fits it.
    """
    values, n, D = _values(batch, size), batch.num_decodes, size.decodes
    for name, array in LAYOUT.items():
        part, new = parts[name], values[name]
        if array.words:
            part, new = part.T, new.T
        if array.is_table:
            width = new.shape[1]
            part[:, width:] = 0
            part = part[:, :width]
        count = len(new)
        if count == len(part):  # no padding, and so none between decodes and prompts
            part[:] = new
            continue
        head = n if array.rows in WITH_DECODES else count
        part[:head] = new[:head]
        part[head:] = new[-1] if array.padding == "last" else array.padding
        if count > head:
            part[D : D + count - head] = new[head:]


def _values(batch: Batch, size: Size) -> dict[str, NDArray[Any]]:
    """The values of each array of the layout, in words of int32."""
    rows, n = batch.sample_rows, batch.num_decodes
    lens, members, begins, ends = batch.prefixes or [rows[:0]] * 4
    samples = sampling_arrays(batch, batch.samples)
    facts = {}
    for name, fact in FACTS.items():
        if fact.rows != "samples":
            of_rows = batch.facts[name]
            if fact.rows == "tokens":
                of_rows = of_rows[batch.token_rows]
            facts[name] = of_rows.view(np.int32).T
    return {
        "input_ids": batch.input_ids,
        "positions": batch.positions,
        "slot_mapping": batch.slot_mapping,
        "context_lens": batch.context_lens,
        "slots": batch.slots,
        "block_tables": batch.block_tables,
        "window_slot_mapping": batch.window_slot_mapping,
        "window_tables": batch.window_tables,
        "sample_rows": np.where(rows < n, rows, rows + (size.decodes - n)),
        "cu_seqlens_q": batch.cu_seqlens_q,
        "cu_seqlens_k": batch.cu_seqlens_k,
        "prefix_lens": lens,
        "prefix_rows": members,
        "prefix_begins": begins,
        "prefix_ends": ends,
        **facts,
        **{f"sample_{name}": part.view(np.int32) for name, part in samples.items()},
    }


def sampling_arrays(batch: Batch, which: NDArray[np.bool_]) -> dict[str, NDArray[Any]]:
    """The fields of `SamplingMetadata` for the n sequences that `which`: [B] names: [n] float32 or
    int32, or [words, n].
    """
    facts = batch.facts[which]
    arrays = {name: facts[name].T for name, fact in FACTS.items() if fact.rows == "samples"}
    return {
        **{
            name: part if part.dtype == np.float32 else part.view(np.int32)
            for name, part in arrays.items()
        },
        "positions": batch.context_lens[which],
        "slots": batch.slots[which],
    }
