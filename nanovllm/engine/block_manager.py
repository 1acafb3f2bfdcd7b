"""`BlockManager`: who holds which KV block, and which block holds which prefix. No tensors here.

A block is in one of three states:

    free      no content anyone could use
    cached    ref_count 0, published content
    in use    ref_count >= 1, in the tables of its holders

`Pages` has the memory, and takes a free block before the oldest cached one. Blocks have the KV of
all layers, or of those that see all tokens: then layers that slide over a window have blocks beside
them, `parts`, for the same tokens. While a sequence runs, it gives back what is older than the
window: these parts, or whole blocks if all layers slide. Their ids stay in its table: a kernel's
tile that begins before the window may read them, masked.

Invariants (the tests verify them after every step):

1. A block is published (findable by hash) only when it is full *and* its KV is computed.
2. A block that others can read (shared or published) is never written: a sequence writes KV at
   positions >= num_computed_tokens only, and a published block lies wholly below that.
3. At least one token of every admitted sequence is left to compute, for its logits: a prompt of
   exactly k blocks can share k - 1 of them.
4. Two blocks with an equal `chain_id` hold the KV of equal token chains from position 0. A hit
   needs the same tokens *and* the parent's chain id, so by induction the whole chain is verified
   and a hash collision can never serve another prefix. A published part has its block's chain id.
5. A prefix is found as far as its blocks are there, and the parts that its next token sees.
"""

from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from nanovllm.engine.pages import ALL_LAYERS, BlockKind, Pages, num_slabs
from nanovllm.engine.sequence import KVBlocks, Sequence
from nanovllm.utils.integers import cdiv

NO_HASH = -1
ROOT_CHAIN = 0  # the chain id before the first block


class Block:
    """The KV of `block_size` tokens, in all layers or in those of a kind.

    Attributes:
        block_id: number of its first page.
        is_published: whether it can be found.
        hash: hash of the chain of tokens up to here; NO_HASH: not to be found by it.
        chain_id: identity of the chain up to here, once computed.
    """

    __slots__ = (
        "block_id",
        "chain_id",
        "hash",
        "is_published",
        "parent_chain_id",
        "ref_count",
        "token_ids",
    )

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.reset()

    def reset(self) -> None:
        """Forget the content."""
        self.is_published = False
        self.hash = NO_HASH
        self.token_ids: list[int] = []
        self.chain_id = ROOT_CHAIN
        self.parent_chain_id = ROOT_CHAIN


class BlockManager:
    """Hands out the blocks of a pool, sharing equal prefixes by reference count.

    Args:
        num_blocks: number of blocks, of each kind, for which there is memory.
        block_size: tokens of a block.
        enable_prefix_caching: whether prefixes are shared.
        kinds: blocks of all layers; or those of layers that see all tokens, and those of layers
            that slide.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        kinds: tuple[BlockKind, ...] = ALL_LAYERS,
    ) -> None:
        assert num_blocks > 0, "the pool needs a block"
        self.num_blocks, self.block_size, self.kinds = num_blocks, block_size, kinds
        self.enable_prefix_caching = enable_prefix_caching
        self.window = kinds[-1].window
        self.has_parts = len(kinds) > 1
        ratio = max(kind.pages for kind in kinds)
        self.pages = Pages(num_slabs(num_blocks, kinds), ratio, self._forget)
        self.blocks = [Block(page) for page in range(self.pages.num_pages)]
        self.hash_to_block_id: dict[int, int] = {}
        self.parts: dict[int, int] = {}  # ids of published parts, by chain id
        self._computing: dict[int, int] = {}  # hash of a block being computed -> seq_id
        self._last_chain_id = ROOT_CHAIN

    @property
    def num_used_blocks(self) -> int:
        """Blocks that somebody holds; of several kinds, those that would take as much memory."""
        used = self.pages.num_pages - self.pages.num_free
        return cdiv(used, sum(kind.pages for kind in self.kinds))

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody holds, cached ones included."""
        return self.num_blocks - self.num_used_blocks

    # -- prefix cache ---------------------------------------------------------------------------

    @staticmethod
    def compute_hash(token_ids: list[int], prefix: int = NO_HASH) -> int:
        """xxhash64 over the previous block's hash (if any) and the token ids."""
        h = xxhash.xxh64()
        if prefix != NO_HASH:
            h.update(prefix.to_bytes(8, "little"))
        h.update(np.asarray(token_ids, dtype=np.int32).tobytes())
        return h.intdigest()

    def _hash_full_blocks(self, seq: Sequence) -> None:
        """Extend `seq.kv.hashes` to all full blocks. Tokens only grow: each is hashed once."""
        hashes = seq.kv.hashes
        for i in range(len(hashes), seq.num_known_tokens // self.block_size):
            hashes.append(self.compute_hash(seq.block(i), hashes[-1] if hashes else NO_HASH))

    def _max_shared_blocks(self, seq: Sequence) -> int:
        if not self.enable_prefix_caching or seq.needs_whole_prompt:
            return 0
        return (seq.num_tokens - 1) // self.block_size

    def find_prefix(self, seq: Sequence) -> list[Block]:
        """The published blocks that hold the longest known prefix of `seq` (invariants 3 to 5)."""
        if not self.enable_prefix_caching:
            return []
        self._hash_full_blocks(seq)
        hits: list[Block] = []
        for i in range(self._max_shared_blocks(seq)):
            block_id = self.hash_to_block_id.get(seq.kv.hashes[i])
            parent = hits[-1].chain_id if hits else ROOT_CHAIN
            if block_id is None or not self._holds(self.blocks[block_id], parent, seq.block(i)):
                break
            hits.append(self.blocks[block_id])
        return hits[: self._num_usable(hits)] if self.has_parts else hits

    def _num_usable(self, hits: list[Block]) -> int:
        """The number of first `hits` after which a token finds the parts that it sees."""
        num_usable = num_with_parts = 0
        for i, block in enumerate(hits, 1):
            num_with_parts = num_with_parts + 1 if block.chain_id in self.parts else 0
            if num_with_parts >= i - self.first_seen_block(i * self.block_size):
                num_usable = i
        return num_usable

    def _parts_of(self, hits: list[Block]) -> list[Block]:
        """The parts that the first token after `hits` sees."""
        if not self.has_parts:
            return []
        first = self.first_seen_block(len(hits) * self.block_size)
        return [self.blocks[self.parts[block.chain_id]] for block in hits[first:]]

    @staticmethod
    def _holds(block: Block, parent_chain_id: int, token_ids: list[int]) -> bool:
        return block.parent_chain_id == parent_chain_id and block.token_ids == token_ids

    def is_being_computed(self, seq: Sequence, hits: list[Block]) -> bool:
        """Whether a running sequence is computing the next block that `seq` could share, after
        the `hits` of `find_prefix`.

        Waiting for it costs a step or a few; starting now computes the same block twice.
        """
        num_hits = len(hits)
        return (
            num_hits < self._max_shared_blocks(seq) and seq.kv.hashes[num_hits] in self._computing
        )

    def publish(self, seq: Sequence, start: int, end: int) -> None:
        """The tokens of `seq` from `start` to `end` are computed: publish the blocks they fill."""
        first, last = start // self.block_size, end // self.block_size
        if not self.enable_prefix_caching or first == last:
            return
        self._hash_full_blocks(seq)
        for i in range(first, last):
            self._publish_block(seq, i)

    def _publish_block(self, seq: Sequence, i: int) -> None:
        block = self.blocks[seq.kv.table[i]]
        chain_hash, token_ids = seq.kv.hashes[i], seq.block(i)
        parent = self.blocks[seq.kv.table[i - 1]].chain_id if i else ROOT_CHAIN
        if self._computing.get(chain_hash) == seq.seq_id:
            del self._computing[chain_hash]
        known_id = self.hash_to_block_id.get(chain_hash)
        known = None if known_id is None else self.blocks[known_id]
        if known is not None and self._holds(known, parent, token_ids):
            block.chain_id = known.chain_id  # a twin: the older one stays the one to find
        else:
            if known is not None:  # a collision, or a chain whose parent is gone
                self._unpublish(known)
            self._last_chain_id += 1
            block.hash, block.token_ids, block.is_published = chain_hash, token_ids, True
            block.chain_id, block.parent_chain_id = self._last_chain_id, parent
            self.hash_to_block_id[chain_hash] = block.block_id
        if self.has_parts and block.chain_id not in self.parts:
            part = self.blocks[seq.kv.window_table[i]]
            part.chain_id, part.is_published = block.chain_id, True
            self.parts[block.chain_id] = part.block_id

    def _unpublish(self, block: Block) -> None:
        """Have a block found no more."""
        if self.pages.has_content(block.block_id):
            self.pages.drop_content(block.block_id)
        self._forget(block.block_id)

    def _forget(self, block_id: int) -> None:
        """The content of a block goes: it is in no index any more, nor is its part."""
        block = self.blocks[block_id]
        block.is_published = False
        if block.hash == NO_HASH:  # a part
            del self.parts[block.chain_id]
            return
        del self.hash_to_block_id[block.hash]
        block.hash = NO_HASH
        if block.chain_id in self.parts:
            self._unpublish(self.blocks[self.parts[block.chain_id]])

    # -- allocation -----------------------------------------------------------------------------

    def _tables(self, kv: KVBlocks) -> Iterator[tuple[BlockKind, list[int], int]]:
        """The kinds, with a sequence's table for each, and the number of blocks dropped from it."""
        *others, sliding = self.kinds
        for kind in others:
            yield kind, kv.table, 0
        yield sliding, kv.window_table if others else kv.table, kv.num_dropped

    def held_blocks(self, seq: Sequence) -> Iterator[tuple[BlockKind, list[int]]]:
        """The blocks of each kind that a sequence has not given back."""
        for kind, table, num_dropped in self._tables(seq.kv):
            yield kind, table[num_dropped:]

    def num_pages_of(self, seq: Sequence, but: Collection[int] | None = None) -> int:
        """Pages of the blocks that a sequence holds.

        Args:
            but: blocks that do not count, nor do those that other sequences hold; None: all count.
        """
        if but is None:
            return sum(kind.pages * len(block_ids) for kind, block_ids in self.held_blocks(seq))
        return sum(
            kind.pages
            for kind, block_ids in self.held_blocks(seq)
            for block_id in block_ids
            if self.blocks[block_id].ref_count == 1 and block_id not in but
        )

    def num_pages_at_start(self, seq: Sequence, end: int) -> int:
        """Pages that a sequence without blocks gets for a first step up to token `end`."""
        return sum(kind.pages * count for kind, count in self._missing(seq, end))

    def _missing(self, seq: Sequence, end: int) -> list[tuple[BlockKind, int]]:
        """The kinds, and how many more blocks of each a sequence needs for its first `end` tokens.
        Those of a table for all kinds, or for layers without a window, are needed for all tokens.
        """
        missing, kv = [], seq.kv
        for kind, table, _ in self._tables(kv):
            by_chunks = table is kv.window_table
            num_blocks = cdiv(end, self.block_size) if by_chunks else seq.num_blocks
            missing.append((kind, max(0, num_blocks - len(table))))
        return missing

    def _take(self, kind: BlockKind) -> int:
        block = self.blocks[self.pages.take(kind.pages)]
        assert block.ref_count == 0, f"block {block.block_id} is free and held"
        block.reset()
        block.ref_count = 1
        return block.block_id

    def _share(self, block: Block, kind: BlockKind) -> int:
        if block.ref_count == 0:
            self.pages.revive(block.block_id, kind.pages)
        block.ref_count += 1
        return block.block_id

    def _give_back(self, block_id: int, kind: BlockKind) -> None:
        block = self.blocks[block_id]
        block.ref_count -= 1
        if block.ref_count == 0:
            self.pages.give_back(block_id, kind.pages, block.is_published)

    def can_allocate(
        self, seq: Sequence, hits: list[Block] | None = None, end: int | None = None
    ) -> bool:
        """Whether the blocks that `allocate` takes are there, cached prefixes counted once."""
        hits = self.find_prefix(seq) if hits is None else hits
        found = [hits, self._parts_of(hits)]
        first = len(hits)  # parts before those found are not needed
        needs = [
            (kind.pages, count - first)
            for kind, count in self._missing(seq, seq.num_tokens if end is None else end)
        ]
        revived = [
            (block.block_id, kind.pages)
            for kind, blocks in zip(self.kinds, found, strict=False)
            for block in blocks
            if block.ref_count == 0
        ]
        return self.pages.has_room(needs, revived)

    def allocate(
        self, seq: Sequence, hits: list[Block] | None = None, end: int | None = None
    ) -> int:
        """Give `seq` blocks for all its tokens, those found in the cache among them.

        Args:
            seq: a sequence without blocks.
            hits: result of `find_prefix`, if the caller has asked already.
            end: number of tokens for which layers that slide need blocks now, if these have blocks
                of their own; None: for all.

        Returns:
            The number of tokens that the cache has computed.

        Raises:
            RuntimeError: when the pool is too small; nothing has changed then.
        """
        kv = seq.kv
        assert not kv.table, f"{seq!r} already holds blocks"
        hits = self.find_prefix(seq) if hits is None else hits
        end = seq.num_tokens if end is None else end
        if not self.can_allocate(seq, hits, end):
            raise RuntimeError(f"{seq!r} needs more blocks than {self.num_free_blocks} free ones")
        parts = self._parts_of(hits)
        kv.table += [self._share(block, self.kinds[0]) for block in hits]
        if self.has_parts:
            kv.num_dropped = len(hits) - len(parts)
            kv.window_table += [0] * kv.num_dropped
            kv.window_table += [self._share(part, self.kinds[1]) for part in parts]
        for chain_hash in kv.hashes[len(hits) : seq.num_blocks]:
            self._computing.setdefault(chain_hash, seq.seq_id)
        self.may_append(seq, end)
        return len(hits) * self.block_size

    def deallocate(self, seq: Sequence) -> None:
        """Give the blocks of `seq` back. Published ones stay cached until the pool needs them."""
        kv = seq.kv
        for chain_hash in kv.hashes:
            if self._computing.get(chain_hash) == seq.seq_id:
                del self._computing[chain_hash]
        # Tail first: the end of a chain is useless without its beginning, so it ages first.
        for kind, block_ids in reversed(list(self.held_blocks(seq))):
            for block_id in reversed(block_ids):
                self._give_back(block_id, kind)
        # Likewise those that came back before, if they still hold the chain.
        if not self.has_parts:
            dropped = zip(kv.table[: kv.num_dropped], kv.hashes, strict=False)
            for block_id, chain_hash in reversed(list(dropped)):
                if self.pages.has_content(block_id) and self.blocks[block_id].hash == chain_hash:
                    self.pages.touch(block_id)
        kv.table.clear()
        kv.window_table.clear()
        kv.num_dropped = 0

    def drop_before_window(self, seq: Sequence, num_computed: int) -> None:
        """Give back the blocks that no token of `seq` from `num_computed` on sees, as far as layers
        slide.
        """
        first = self.first_seen_block(num_computed)
        if first > seq.kv.num_dropped:
            *_, (kind, table, num_dropped) = self._tables(seq.kv)
            for block_id in table[num_dropped:first]:
                self._give_back(block_id, kind)
            seq.kv.num_dropped = first

    def first_seen_block(self, num_computed: int | NDArray[np.int64]) -> Any:
        """The first block that a sequence keeps for layers that slide, once so many of its tokens
        are computed.
        """
        last_full = num_computed // self.block_size - 1  # stays: the next one's chain id needs it
        seen = (num_computed - self.window + 1) // self.block_size
        first = seen + (last_full - seen) * (last_full < seen)  # the lesser, of numbers and arrays
        return first * (first > 0)

    def is_short(self, seq: Sequence) -> bool:
        """Whether the tokens of `seq` lack a block."""
        num_blocks = seq.num_blocks
        short = len(seq.kv.table) < num_blocks
        return short or (self.has_parts and len(seq.kv.window_table) < num_blocks)

    def can_append(self, *seqs: Sequence, end: int | None = None) -> bool:
        """Whether the blocks that `may_append` takes for all of `seqs` are there.

        A decode needs one only when the tokens outgrow the blocks held, which is right after a
        block has been filled: `num_tokens % block_size == 1`. In all other steps the slot lies in
        the last block, and a full pool is no obstacle.
        """
        missing = (self._missing(seq, seq.num_tokens if end is None else end) for seq in seqs)
        needs = [(kind.pages, count) for counts in missing for kind, count in counts]
        return self.pages.has_room(needs)

    def may_append(self, seq: Sequence, end: int | None = None) -> None:
        """Take the blocks that `seq` lacks (see `can_append`).

        Args:
            seq: a sequence that runs.
            end: as for `allocate`.
        """
        missing = self._missing(seq, seq.num_tokens if end is None else end)
        for (kind, count), (_, table, _) in zip(missing, self._tables(seq.kv), strict=True):
            table += [self._take(kind) for _ in range(count)]
