"""`SlidingBlockManager`: beside blocks, parts for layers that slide over a window. No tensors here.

Layers that see all tokens have their KV in blocks, as in any `BlockManager`. Layers that slide have
theirs in *parts*, one for each block of tokens, of which a sequence keeps those that its window
reaches. It gets parts chunk by chunk, and gives them back while it runs.

A part is published with its block, by that one's chain id. A prefix is found as far as its blocks
are there, and those parts that the first token after it sees. A part may go before its block does;
a block takes its part along.
"""

from collections.abc import Collection
from typing import Any

from nanovllm.engine.block_manager import NO_HASH, ROOT_CHAIN, Block, BlockManager
from nanovllm.engine.sequence import Sequence
from nanovllm.utils.integers import cdiv
from nanovllm.windows.pages import BlockKind, Pages, num_slabs


def make_block_manager(
    num_blocks: int, block_size: int, enable_prefix_caching: bool, kinds: tuple[BlockKind, ...]
) -> BlockManager:
    """The manager of a pool.

    Args:
        num_blocks: number of blocks, of each kind, for which there is memory.
        block_size: tokens of a block.
        enable_prefix_caching: whether prefixes are shared.
        kinds: blocks of all layers; or those of layers that see all tokens, and those of layers
            that slide.
    """
    if len(kinds) == 1:
        return BlockManager(num_blocks, block_size, enable_prefix_caching, kinds[0].window)
    return SlidingBlockManager(num_blocks, block_size, enable_prefix_caching, *kinds)


class Part:
    """The KV of a block's tokens in layers that slide.

    Attributes:
        block_id: number of its first page.
        ref_count: number of sequences that hold it.
        chain_id: chain of the block with which it is published; ROOT_CHAIN: not published.
    """

    __slots__ = ("block_id", "chain_id", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.chain_id = ROOT_CHAIN


class SlidingBlockManager(BlockManager):
    """Blocks and parts, from the same pages.

    Args:
        num_blocks: number of blocks and parts, each, for which there is memory.
        block_size: tokens of a block.
        enable_prefix_caching: whether prefixes are shared.
        whole, sliding: the kinds of blocks, and of parts.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool,
        whole: BlockKind,
        sliding: BlockKind,
    ) -> None:
        self.whole, self.sliding = whole, sliding
        self.block_pages = whole.pages
        self._num_blocks = num_blocks
        self._num_slabs = num_slabs(num_blocks, (whole, sliding))
        self._ratio = max(whole.pages, sliding.pages)
        num_pages = self._num_slabs * self._ratio
        self.parts = [Part(page) for page in range(num_pages)]
        super().__init__(num_pages, block_size, enable_prefix_caching, sliding.window)

    def reset(self) -> None:
        super().reset()
        self.free_block_ids.clear()  # the pages know
        self.pages = Pages(self._num_slabs, self._ratio, self._forget_page)
        self.published_parts: dict[int, int] = {}  # ids, by chain id
        for part in self.parts:
            part.ref_count, part.chain_id = 0, ROOT_CHAIN

    @property
    def num_blocks(self) -> int:
        """Blocks and parts, each, for which there is memory."""
        return self._num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks with their parts that would take as much memory as nobody holds."""
        pages = self.whole.pages + self.sliding.pages
        used = cdiv(self.pages.num_pages - self.pages.num_free, pages)
        # Pages are whole slabs, so there may be some more of them.
        return max(0, self._num_blocks - used)

    # -- prefix cache ---------------------------------------------------------------------------

    def find_prefix(self, seq: Sequence) -> list[Block]:
        """The published blocks that hold the longest known prefix of `seq` after which a token
        finds the parts that it sees.
        """
        hits = super().find_prefix(seq)
        num_usable = num_with_parts = 0
        for i, block in enumerate(hits, 1):
            num_with_parts = num_with_parts + 1 if block.chain_id in self.published_parts else 0
            end = i * self.block_size
            if num_with_parts >= i - self.first_seen_block(end) and not seq.cuts_an_image(end):
                num_usable = i
        return hits[:num_usable]

    def _parts_of(self, hits: list[Block]) -> list[Part]:
        """The parts that the first token after `hits` sees."""
        first = self.first_seen_block(len(hits) * self.block_size)
        return [self.parts[self.published_parts[block.chain_id]] for block in hits[first:]]

    def _publish_block(self, seq: Sequence, i: int) -> None:
        super()._publish_block(seq, i)
        chain_id = self.blocks[seq.kv.table[i]].chain_id
        if chain_id not in self.published_parts:
            part = self.parts[seq.kv.window_table[i]]
            part.chain_id = chain_id
            self.published_parts[chain_id] = part.block_id

    def _unpublish(self, block: Block) -> None:
        if self.pages.has_content(block.block_id):
            self.pages.drop_content(block.block_id)
        self._forget_page(block.block_id)

    def _forget_page(self, page: int) -> None:
        """The content of a block or part goes: it is in no index any more."""
        block = self.blocks[page]
        if block.hash == NO_HASH:
            self._forget_part(self.parts[page].chain_id)
            return
        self._forget(block)
        if block.chain_id in self.published_parts:
            self._forget_part(block.chain_id)

    def _forget_part(self, chain_id: int) -> None:
        part = self.parts[self.published_parts.pop(chain_id)]
        part.chain_id = ROOT_CHAIN
        if self.pages.has_content(part.block_id):
            self.pages.drop_content(part.block_id)

    # -- allocation -----------------------------------------------------------------------------

    def _take_free_block(self) -> int:
        block = self.blocks[self.pages.take(self.whole.pages)]
        assert block.ref_count == 0, f"block {block.block_id} is free and held"
        block.reset()
        block.ref_count = 1
        return block.block_id

    def _take_part(self) -> int:
        part = self.parts[self.pages.take(self.sliding.pages)]
        assert part.ref_count == 0, f"part {part.block_id} is free and held"
        part.ref_count = 1
        return part.block_id

    def _hold(self, each: Block | Part, kind: BlockKind) -> int:
        """Hold a published block or part, too."""
        if each.ref_count == 0:
            self.pages.revive(each.block_id, kind.pages)
        each.ref_count += 1
        return each.block_id

    def _let_go(self, each: Block | Part, kind: BlockKind, is_published: bool) -> None:
        each.ref_count -= 1
        if each.ref_count == 0:
            self.pages.give_back(each.block_id, kind.pages, is_published)

    def _share(self, block: Block) -> int:
        return self._hold(block, self.whole)

    def _give_back(self, block: Block) -> None:
        self._let_go(block, self.whole, block.hash != NO_HASH)

    def _give_back_part(self, part: Part) -> None:
        self._let_go(part, self.sliding, part.chain_id != ROOT_CHAIN)

    def _num_parts(self, seq: Sequence, end: int | None) -> int:
        """Parts for the tokens of `seq` before `end`; None: for all."""
        return cdiv(seq.num_tokens if end is None else end, self.block_size)

    def can_allocate(
        self, seq: Sequence, hits: list[Block] | None = None, end: int | None = None
    ) -> bool:
        hits = self.find_prefix(seq) if hits is None else hits
        needs = [
            (self.whole.pages, seq.num_blocks - len(hits)),
            (self.sliding.pages, self._num_parts(seq, end) - len(hits)),
        ]
        revived = [(block.block_id, self.whole.pages) for block in hits if not block.ref_count]
        revived += [
            (part.block_id, self.sliding.pages)
            for part in self._parts_of(hits)
            if not part.ref_count
        ]
        return self.pages.has_room(needs, revived)

    def _share_prefix(self, seq: Sequence, hits: list[Block]) -> None:
        kv, parts = seq.kv, self._parts_of(hits)
        kv.num_dropped = len(hits) - len(parts)
        kv.window_table += [0] * kv.num_dropped
        kv.window_table += [self._hold(part, self.sliding) for part in parts]
        super()._share_prefix(seq, hits)

    def deallocate(self, seq: Sequence) -> None:
        kv = seq.kv
        for part_id in reversed(kv.window_table[kv.num_dropped :]):
            self._give_back_part(self.parts[part_id])
        kv.window_table.clear()
        kv.num_dropped = 0  # counts parts: all blocks are held
        super().deallocate(seq)

    def _drop(self, seq: Sequence, end: int) -> None:
        for part_id in seq.kv.window_table[seq.kv.num_dropped : end]:
            self._give_back_part(self.parts[part_id])

    def is_short(self, seq: Sequence) -> bool:
        return super().is_short(seq) or len(seq.kv.window_table) < seq.num_blocks

    def can_append(self, *seqs: Sequence, end: int | None = None) -> bool:
        """Whether the blocks and parts that `may_append` takes for all `seqs` are there."""
        blocks = parts = 0
        for seq in seqs:
            blocks += seq.num_blocks - len(seq.kv.table)
            parts += max(0, self._num_parts(seq, end) - len(seq.kv.window_table))
        return self.pages.has_room([(self.whole.pages, blocks), (self.sliding.pages, parts)])

    def may_append(self, seq: Sequence, end: int | None = None) -> None:
        """Take the blocks that `seq` lacks, and the parts for its tokens before `end`."""
        super().may_append(seq)
        num_parts = self._num_parts(seq, end)
        while len(seq.kv.window_table) < num_parts:
            seq.kv.window_table.append(self._take_part())
            seq.kv.version += 1

    # -- memory, for admission ------------------------------------------------------------------

    @property
    def num_pages(self) -> int:
        return self.pages.num_pages

    @property
    def num_free_pages(self) -> int:
        return self.pages.num_free

    def pages_at(self, num_tokens: Any) -> Any:
        num_blocks = cdiv(num_tokens, self.block_size)
        num_parts = num_blocks - self.first_seen_block(num_tokens - 2)  # a step may be in flight
        return num_blocks * self.whole.pages + num_parts * self.sliding.pages

    def pages_at_start(self, seq: Sequence, end: int) -> int:
        return seq.num_blocks * self.whole.pages + cdiv(end, self.block_size) * self.sliding.pages

    def pages_of(self, seq: Sequence) -> int:
        num_parts = len(seq.kv.window_table) - seq.kv.num_dropped
        return len(seq.kv.table) * self.whole.pages + num_parts * self.sliding.pages

    def pages_of_alone(self, seq: Sequence, but: Collection[int]) -> int:
        kv = seq.kv
        blocks = sum(self.blocks[b].ref_count == 1 and b not in but for b in kv.table)
        parts = sum(self.parts[p].ref_count == 1 for p in kv.window_table[kv.num_dropped :])
        return blocks * self.whole.pages + parts * self.sliding.pages
