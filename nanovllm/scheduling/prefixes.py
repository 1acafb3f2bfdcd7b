"""Prefixes that several decodes share, so that attention reads their blocks once for all of them.

Groups of decodes that share their first blocks form trees: many share a system prompt, and after it
the samples of a prompt share that. Each decode shares the prefix of one of its groups, chosen so
that few tokens are read: never more than with one group per first block.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from nanovllm.utils.arrays import Int32

Ints: TypeAlias = NDArray[np.intp]
Bools: TypeAlias = NDArray[np.bool_]

MIN_MEMBERS = 4  # decodes of a group
MIN_SAVED = 4096  # tokens of a step that are not read again; fewer are not worth a kernel
MAX_LEVELS = 8  # of a tree, to bound the time for it


class SharedPrefixes(NamedTuple):
    """Tiles of decodes that share their first blocks.

    Attributes:
        lens: [B] int32, number of tokens that each decode shares, in whole blocks; 0: none.
        rows: [n] int32, decodes of all tiles.
        begins, ends: [t] int32, bounds of each tile in `rows`.
    """

    lens: Int32
    rows: Int32
    begins: Int32
    ends: Int32


def max_tiles(num_decodes: int, members: int) -> int:
    """The maximum number of tiles, of at most `members` decodes each, for `num_decodes` decodes."""
    return num_decodes // MIN_MEMBERS + -(-num_decodes // members)


def find_shared_prefixes(
    block_tables: Int32, context_lens: Int32, block_size: int, members: int
) -> SharedPrefixes | None:
    """Find groups of decodes that begin with the same blocks, and divide them into tiles.

    Args:
        block_tables: [B, W] int32, zeros past a decode's blocks.
        context_lens: [B] int32, numbers of tokens, that of this step included.
        block_size: tokens per block.
        members: maximum number of decodes of a tile.

    Returns:
        The tiles; None if too little is shared.
    """
    if len(context_lens) < MIN_MEMBERS:  # a single sequence waits for the host
        return None
    # A decode writes to its last block, which no other decode shares. The blocks before are full.
    levels = list(_levels(block_tables, (context_lens - 1) // block_size))
    if not levels:
        return None
    leaving, saved = _divide(levels, members)
    if saved * block_size < MIN_SAVED:
        return None
    groups, counts = _assign(levels, leaving, len(context_lens))
    lens = counts[groups] * block_size
    rows = np.argsort(groups, kind="stable")
    rows = rows[lens[rows] > 0]
    bounds = np.flatnonzero(np.diff(groups[rows], prepend=-1, append=-1)).tolist()
    begins = [i for begin, end in pairwise(bounds) for i in range(begin, end, members)]
    arrays = lens, rows, begins, [*begins[1:], len(rows)]
    return SharedPrefixes(*(np.array(array, np.int32) for array in arrays))


class _Level(NamedTuple):
    """The groups of a tree level, each of at least MIN_MEMBERS decodes.

    Attributes:
        rows: [n] decodes, those of a group adjacent.
        sizes: [g] number of decodes of each group.
        counts: [g] number of blocks with which all of them begin.
        parents: [g] index of the parent in the level before.
    """

    rows: Ints
    sizes: Ints
    counts: Ints
    parents: Ints


def _levels(block_tables: Int32, num_whole: Int32) -> Iterator[_Level]:
    """Groups with the same first block; then, within each, groups that also have the same block
    after the last that the whole group shares; and so on.

    Args:
        num_whole: [B] int32, number of blocks of each decode that others may share.
    """
    rows = np.flatnonzero(num_whole > 0)
    parents, columns = np.zeros(len(rows), np.int64), np.zeros(len(rows), np.int64)
    for _ in range(MAX_LEVELS):
        keys = (parents << 32) + block_tables[rows, columns]
        order = np.argsort(keys, kind="stable")
        keys, rows = keys[order], rows[order]
        firsts = np.flatnonzero(np.diff(keys, prepend=-1))
        sizes = np.diff(firsts, append=len(keys))
        large = sizes >= MIN_MEMBERS
        if not large.any():
            return
        rows = rows[np.repeat(large, sizes)]
        sizes, parents = sizes[large], keys[firsts[large]] >> 32
        begins, groups = np.cumsum(sizes) - sizes, np.repeat(np.arange(len(sizes)), sizes)
        tables, whole = block_tables[rows], num_whole[rows]
        differ = tables != tables[begins[groups]]
        same = np.where(differ.any(1), differ.argmax(1), whole)
        counts = np.minimum.reduceat(np.minimum(same, whole), begins)
        yield _Level(rows, sizes, counts, parents)
        further = whole > counts[groups]
        rows, parents = rows[further], groups[further]
        columns = counts[parents]


def _divide(levels: list[_Level], members: int) -> tuple[list[Bools], int]:
    """Decide for each level which groups leave their parents. Returns these flags, and the number
    of blocks that are not read again.

    A group leaves if it saves more by itself than its decodes save in the parent, where one decode
    in `members` reads the shared blocks. Groups leave a parent only if they and the rest of it
    together save more than the whole parent does.
    """
    below, leaving = levels[-1], list[Bools]()
    saved = _saved(below.sizes, below.counts, members)
    for level in reversed(levels[:-1]):
        staying = below.sizes * level.counts[below.parents] * (members - 1)
        leave = saved * members > staying
        moved, gained = np.zeros((2, len(level.sizes)), np.int64)
        np.add.at(moved, below.parents, below.sizes * leave)
        np.add.at(gained, below.parents, saved * leave)
        whole = _saved(level.sizes, level.counts, members)
        divided = gained + _saved(level.sizes - moved, level.counts, members)
        leaving.append(leave & (divided > whole)[below.parents])
        below, saved = level, np.maximum(whole, divided)
    leaving.append(np.ones(len(below.sizes), bool))
    return leaving[::-1], int(saved.sum())


def _assign(levels: list[_Level], leaving: list[Bools], num_rows: int) -> tuple[Ints, Ints]:
    """The group of each decode: the last that has left with it, -1 for none. And the number of
    blocks that each group shares: 0 if too few decodes are left in it. A last 0 is for no group.
    """
    groups, first, left = np.full(num_rows, -1), 0, np.ones(1, bool)
    for level, leave in zip(levels, leaving, strict=True):
        left = leave & left[level.parents]
        end, moves = first + len(left), np.repeat(left, level.sizes)
        groups[level.rows[moves]] = np.repeat(np.arange(first, end), level.sizes)[moves]
        first = end
    counts = np.concatenate([*(level.counts for level in levels), [0]])
    sizes = np.bincount(groups % len(counts), minlength=len(counts))
    return groups, np.where(sizes < MIN_MEMBERS, 0, counts)


def _saved(sizes: Ints, counts: Ints, members: int) -> Ints:
    """The number of blocks that groups of `sizes` decodes, which share `counts` blocks, do not read
    again.
    """
    return np.where(sizes < MIN_MEMBERS, 0, (sizes - -(-sizes // members)) * counts)
