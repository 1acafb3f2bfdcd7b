"""`Pages`: the memory of the KV pool, handed out in blocks of two sizes.

The layers of a model are of up to two kinds: those that see all tokens, and those that slide over a
window. Each kind has blocks of its own (`BlockKind`) in the same memory, so that it serves short
sequences, which have as many blocks of either kind, and long ones, of which layers that slide keep
a window.

The blocks of one kind are a page each; those of the other, which has more layers, a slab of `ratio`
pages. Pages of a slab that is not a block are blocks of the first kind. With a single kind, or two
of equal size, a slab is a page. No tensors here.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import NamedTuple

from nanovllm.utils.integers import cdiv


class BlockKind(NamedTuple):
    """The blocks of some of a model's layers.

    Attributes:
        window: number of tokens that these layers see, the newest included; 0: all.
        pages: pages of a block: 1, or all of a slab.
    """

    window: int = 0
    pages: int = 1


ALL_LAYERS = (BlockKind(),)  # the kinds of a model whose layers all keep the same tokens


def num_slabs(num_blocks: int, kinds: Iterable[BlockKind]) -> int:
    """The number of slabs that hold so many blocks of each kind."""
    kinds = tuple(kinds)
    ratio = max(kind.pages for kind in kinds)
    return sum(cdiv(num_blocks * kind.pages, ratio) for kind in kinds)


def max_blocks_of_one(num_blocks: int, kinds: tuple[BlockKind, ...], max_with_window: int) -> int:
    """The number of blocks of the longest sequence that fits a pool alone.

    Args:
        num_blocks: number of blocks, of each kind, that the pool has memory for.
        kinds: kinds of blocks.
        max_with_window: number of blocks that it has at most for layers that slide, if these have
            blocks of their own.
    """
    if len(kinds) == 1 or num_blocks <= max_with_window:
        return num_blocks
    whole, sliding = kinds
    ratio = max(whole.pages, sliding.pages)
    left = num_slabs(num_blocks, kinds) - cdiv(max_with_window * sliding.pages, ratio)
    return left * ratio // whole.pages


class Pages:
    """Pages in slabs. A slab is empty, or holds content, or is in use, wholly or in part.

    Args:
        num_slabs: number of slabs.
        ratio: pages of a slab.
        evict: function called with the first page of a block whose content goes.
    """

    def __init__(self, num_slabs: int, ratio: int, evict: Callable[[int], None]) -> None:
        self.ratio, self.num_pages = ratio, num_slabs * ratio
        self._evict = evict
        self._num_used = [0] * num_slabs  # pages of each slab that are in use
        self._content: set[int] = set()  # first pages of blocks that are not in use, with content
        # Slabs of which nothing is in use: empty ones, a stack, as in any `BlockManager`; and those
        # with content, the oldest first.
        self.empty = list(reversed(range(num_slabs)))
        self.idle: OrderedDict[int, None] = OrderedDict()
        # Pages that are not in use, of slabs of which others are: without content, and with.
        self._spare: dict[int, None] = {}
        self._spare_idle: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Pages that are not in use, those with content included."""
        slabs = len(self.empty) + len(self.idle)
        return slabs * self.ratio + len(self._spare) + len(self._spare_idle)

    def has_room(
        self, needs: Iterable[tuple[int, int]], revived: Iterable[tuple[int, int]] = ()
    ) -> bool:
        """Whether blocks can be taken, in any order.

        Args:
            needs: sizes in pages, and how many of each.
            revived: first page and size of blocks with content, which are to stay.
        """
        slabs, spare_idle = len(self.empty) + len(self.idle), len(self._spare_idle)
        split: set[int] = set()  # slabs that revived blocks bring into use
        for page, size in revived:
            slab = page // self.ratio
            if self._num_used[slab] or slab in split:
                spare_idle -= 1
            else:
                split.add(slab)
                slabs, spare_idle = slabs - 1, spare_idle + self.ratio - size
        whole, pages = 0, -len(self._spare)
        for size, count in needs:
            if size == self.ratio:
                whole += count
            else:
                pages += count
        if whole == 0:
            pages -= spare_idle
        # Else single pages may take whole slabs first, see `take`.
        return whole + cdiv(max(0, pages), self.ratio) <= slabs

    def take(self, size: int) -> int:
        """The first page of a block to write: one without content if there is, else the oldest. A
        page is rather one of a slab in use than the first of another slab with content.
        """
        if size == self.ratio:
            slab = self._take_slab()
            self._num_used[slab] = size
            return slab * size
        if self._spare:
            page, _ = self._spare.popitem()
        elif self._spare_idle and not self.empty:
            page, _ = self._spare_idle.popitem(last=False)
            self._lose(page)
        else:
            page = self._take_slab() * self.ratio
            self._spare.update(dict.fromkeys(range(page + 1, page + self.ratio)))
        self._num_used[page // self.ratio] += 1
        return page

    def _take_slab(self) -> int:
        if self.empty:
            return self.empty.pop()
        slab, _ = self.idle.popitem(last=False)
        for page in self._pages_of(slab):
            if page in self._content:
                self._lose(page)
        return slab

    def _lose(self, page: int) -> None:
        self._content.remove(page)
        self._evict(page)

    def _pages_of(self, slab: int) -> range:
        return range(slab * self.ratio, (slab + 1) * self.ratio)

    def revive(self, page: int, size: int) -> None:
        """A block with content is in use again."""
        slab = page // self.ratio
        self._content.remove(page)
        if self._num_used[slab]:
            del self._spare_idle[page]
        else:
            del self.idle[slab]
            if size < self.ratio:
                for other in self._pages_of(slab):
                    if other in self._content:
                        self._spare_idle[other] = None
                    elif other != page:
                        self._spare[other] = None
        self._num_used[slab] += size

    def give_back(self, page: int, size: int, has_content: bool) -> None:
        """A block is not in use any more."""
        slab = page // self.ratio
        self._num_used[slab] -= size
        if has_content:
            self._content.add(page)
        if self._num_used[slab]:
            spare = self._spare_idle if has_content else self._spare
            spare[page] = None
            return
        if size < self.ratio:
            for other in self._pages_of(slab):
                self._spare.pop(other, None)
                self._spare_idle.pop(other, None)
        self._set_unused(slab)

    def drop_content(self, page: int) -> None:
        """The content of a block that is not in use is of no use."""
        slab = page // self.ratio
        self._content.remove(page)
        if self._num_used[slab]:
            del self._spare_idle[page]
            self._spare[page] = None
        elif self._content.isdisjoint(self._pages_of(slab)):
            del self.idle[slab]
            self.empty.append(slab)

    def _set_unused(self, slab: int) -> None:
        if self._content.isdisjoint(self._pages_of(slab)):
            self.empty.append(slab)
        else:
            self.idle[slab] = None

    def has_content(self, page: int) -> bool:
        """Whether a block is not in use, and its content is there."""
        return page in self._content
