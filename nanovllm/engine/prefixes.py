"""Which decodes begin with the same blocks, so that attention reads these once for all of them."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nanovllm.layers.controls import Int32

MIN_MEMBERS = 4  # decodes that share
MIN_SAVED = 4096  # tokens that are not read again, in a step; fewer are not worth a kernel


class SharedPrefixes(NamedTuple):
    """Tiles of decodes, which share the blocks at their beginning.

    Attributes:
        lens: [B] tokens of each decode that it shares, of whole blocks; 0: none.
        rows: [n] the decodes of all tiles.
        begins, ends: [t] where in `rows` each tile begins and ends.
    """

    lens: Int32
    rows: Int32
    begins: Int32
    ends: Int32


def most_tiles(num_decodes: int, members: int) -> int:
    """Tiles that so many decodes have at most, of `members` each."""
    return num_decodes // MIN_MEMBERS + -(-num_decodes // members)


def find_shared_prefixes(
    block_tables: Int32, context_lens: Int32, block_size: int, members: int
) -> SharedPrefixes | None:
    """Of decodes that begin with the same block, the blocks that all of them share.

    Args:
        block_tables: [B, W], zeros past a decode's blocks.
        context_lens: [B], the token of this step included.
        members: decodes of a tile at most.

    Returns:
        None where too little is shared.
    """
    if len(context_lens) < MIN_MEMBERS:
        return None
    # A decode writes to its last block, which no other decode shares; those before it are full.
    num_whole = (context_lens - 1) // block_size
    lens = np.zeros(len(context_lens), np.int32)
    rows: list[NDArray[np.intp]] = []
    for group in _groups(block_tables[:, 0], num_whole > 0):
        most = int(num_whole[group].min())
        tables = block_tables[group, :most]
        differ = (tables != tables[0]).any(0)
        count = int(differ.argmax()) if differ.any() else most
        lens[group] = count * block_size
        rows.extend(group[i : i + members] for i in range(0, len(group), members))
    if not rows or int(lens.sum()) - int(sum(lens[tile[0]] for tile in rows)) < MIN_SAVED:
        return None
    ends = np.cumsum([len(tile) for tile in rows])
    begins = ends - [len(tile) for tile in rows]
    joined = np.concatenate(rows).astype(np.int32)
    return SharedPrefixes(lens, joined, begins.astype(np.int32), ends.astype(np.int32))


def _groups(first: Int32, whole: NDArray[np.bool_]) -> list[NDArray[np.intp]]:
    """The decodes that have the same first block, and have it whole, if they are enough."""
    there = np.flatnonzero(whole)
    order = there[np.argsort(first[there], kind="stable")]
    if len(order) < MIN_MEMBERS:
        return []
    bounds = np.flatnonzero(np.diff(first[order], prepend=-1, append=-1))
    large = np.flatnonzero(np.diff(bounds) >= MIN_MEMBERS)
    return [order[bounds[i] : bounds[i + 1]] for i in large]
