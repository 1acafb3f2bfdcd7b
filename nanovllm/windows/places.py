"""The places of layers' blocks in the pages of the KV pool.

A page is as large as the blocks of a few layers, one for each of its places. Layers of the same
place share a tensor [pages, ...], and each has rows of its own: a layer that has page i of a slab
sees the tensor from row i on, so that the number of the slab's first page is the id of its block.
"""

from typing import NamedTuple

from nanovllm.layers.base import State
from nanovllm.utils.integers import cdiv
from nanovllm.windows.pages import BlockKind


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
    have pages of 5, of which a block of the first takes 6.
    """
    windows = [max((each.window for each in kept.values()), default=0) for kept in states]
    shapes = {tuple((name, *each[:2]) for name, each in kept.items()) for kept in states if kept}
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

    def num_used(num_places: int) -> int:
        return (1 + cdiv(most, num_places)) * num_places

    num_places = min(range(fewest, most + 1), key=num_used)
    places = [None] * len(states)
    for layers in (whole, sliding):
        for number, i in enumerate(layers):
            places[i] = number % num_places, number // num_places
    kinds = (
        BlockKind(0, cdiv(len(whole), num_places)),
        BlockKind(max(windows), cdiv(len(sliding), num_places)),
    )
    return Places(kinds, num_places, places)
