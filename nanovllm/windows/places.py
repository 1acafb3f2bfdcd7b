"""The places of layers' blocks in the pages of the KV pool.

A page is as large as the blocks of a few layers, one for each of its places. Layers of the same
place share a tensor [pages, ...], and each has rows of its own: a layer that has page i of a slab
sees the tensor from row i on, so that the number of the slab's first page is the id of its block.
"""

from typing import NamedTuple

from nanovllm.layers.base import State
from nanovllm.utils.integers import cdiv
from nanovllm.windows.pages import BlockKind

BLOCKS_PER_PART = 4  # of a sequence for which pages are divided


class Places(NamedTuple):
    """The division of pages among layers.

    Attributes:
        kinds: kinds of blocks.
        num_places: number of layers whose blocks lie in one page.
        places: place of each layer, and its page within a block; of a layer without blocks None.
    """

    kinds: tuple[BlockKind, ...]
    num_places: int
    places: list[tuple[int, int] | None]


def divide_pages(states: list[dict[str, State]]) -> Places:
    """Divide pages among layers with these states by block.

    Layers that slide get blocks of their own if others see all tokens, and if the blocks of all are
    of one shape. Pages have so many places that few stay empty: 29 layers that slide and 5 others
    have pages of 5, of which a block of the first takes 6. A place in blocks counts as four in
    parts, as sequences of a few windows have so many more blocks.
    """
    windows = [_window_of(kept) for kept in states]
    shapes = {
        tuple(sorted((name, each.shape, str(each.dtype)) for name, each in kept.items()))
        for kept in states
        if kept
    }
    with_blocks = [i for i, kept in enumerate(states) if kept]
    sliding = [i for i in with_blocks if windows[i]]
    whole = [i for i in with_blocks if not windows[i]]
    if not sliding or not whole or len(shapes) > 1:
        window = max(windows, default=0) if sliding and not whole else 0
        places: list[tuple[int, int] | None] = [None] * len(states)
        for place, i in enumerate(with_blocks):
            places[i] = place, 0
        return Places((BlockKind(window),), len(with_blocks), places)
    fewest, most = sorted((len(whole), len(sliding)))

    def cost(num_places: int) -> int:
        of_block, of_part = cdiv(len(whole), num_places), cdiv(len(sliding), num_places)
        return (BLOCKS_PER_PART * of_block + of_part) * num_places

    num_places = min(range(fewest, most + 1), key=cost)
    places = [None] * len(states)
    for layers in (whole, sliding):
        for number, i in enumerate(layers):
            places[i] = number % num_places, number // num_places
    kinds = (
        BlockKind(0, cdiv(len(whole), num_places)),
        BlockKind(max(windows), cdiv(len(sliding), num_places)),
    )
    return Places(kinds, num_places, places)


def _window_of(kept: dict[str, State]) -> int:
    """The window of a layer: the widest of its states; 0: all tokens."""
    windows = [each.window for each in kept.values()]
    return max(windows, default=0) if all(windows) else 0
