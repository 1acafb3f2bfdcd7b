"""`BlockManager`: the owners of KV blocks, and the prefixes in them. No tensors here.

A block is in one of three states:

    free      no content anyone could use        in `free_block_ids`, to be taken from its end
    cached    ref_count 0, published content     in `cached_block_ids`, oldest first
    in use    ref_count >= 1                     in the block tables of its holders

If every layer slides over a `window`, a sequence gives back blocks older than that while it runs.
Their ids stay in its table: a kernel's tile that begins before the window may read them, masked. If
only some layers slide, they have blocks of their own: `SlidingBlockManager`.

Invariants (the tests verify them after every step):

1. A block is published (findable by hash) only when it is full *and* its KV is computed.
2. A block that others can read (shared or published) is never written: a sequence writes KV at
   positions >= num_computed_tokens only, and a published block lies wholly below that.
3. At least one token of every admitted sequence is left to compute, for its logits: a prompt of
   exactly k blocks can share k - 1 of them.
4. Two blocks with an equal `chain_id` hold the KV of equal token chains from position 0. A hit
   needs the same tokens *and* the parent's chain id, so by induction the whole chain is verified
   and a hash collision can never serve another prefix.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from nanovllm.engine.sequence import ScheduledSequence, Sequence
from nanovllm.utils.integers import cdiv

NO_HASH = -1
ROOT_CHAIN = 0  # the chain id before the first block


class Block:
    """`block_size` slots of the KV cache."""

    __slots__ = ("block_id", "chain_id", "hash", "parent_chain_id", "ref_count", "token_ids")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.reset()

    def reset(self) -> None:
        """Forget the content."""
        self.hash = NO_HASH  # of the chain up to here; NO_HASH: cannot be found
        self.token_ids: list[int] | None = None
        self.chain_id = ROOT_CHAIN  # of the chain up to here, once computed
        self.parent_chain_id = ROOT_CHAIN


class BlockManager:
    """Hands out the blocks of a pool of `num_blocks`, sharing equal prefixes by reference count.

    Args:
        window: tokens that any layer sees, itself and those before it; 0: all.
    """

    def __init__(
        self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True, window: int = 0
    ) -> None:
        assert num_blocks > 0, "the pool needs a block"
        self.block_size, self.window = block_size, window
        self.enable_prefix_caching = enable_prefix_caching
        self.blocks = [Block(i) for i in range(num_blocks)]
        self.reset()

    def reset(self) -> None:
        """Free all blocks and empty the prefix cache, in any state of the books.

        The blocks stay the same objects: thousands of new ones, at each update of the weights, had
        Python search the whole process for cycles every tenth time, which takes 0.1 s.
        """
        for block in self.blocks:
            block.ref_count = 0
            block.reset()
        # A stack: blocks that have been used are taken before those that never were, so a process
        # on a CPU, where untouched memory costs nothing, stays as small as its sequences allow.
        self.free_block_ids = list(reversed(range(len(self.blocks))))
        self.cached_block_ids: OrderedDict[int, None] = OrderedDict()  # oldest first
        self.hash_to_block_id: dict[int, int] = {}
        self._computing: dict[int, int] = {}  # hash of a block being computed -> seq_id
        self._last_chain_id = ROOT_CHAIN

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool."""
        return len(self.blocks)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody holds, cached ones included."""
        return len(self.free_block_ids) + len(self.cached_block_ids)

    @property
    def num_used_blocks(self) -> int:
        return self.num_blocks - self.num_free_blocks

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
        """The published blocks that hold the longest known prefix of `seq` (invariant 3, 4)."""
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
        while hits and seq.cuts_an_image(len(hits) * self.block_size):
            hits.pop()
        return hits

    @staticmethod
    def _holds(block: Block, parent_chain_id: int, token_ids: list[int]) -> bool:
        return block.parent_chain_id == parent_chain_id and block.token_ids == token_ids

    def postpones(self, seq: Sequence, hits: list[Block]) -> bool:
        """Whether `seq` should wait, as a running sequence computes the next block that it could
        share, after the `hits` of `find_prefix`.

        That costs a step or a few; starting now computes the same block twice.
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
        if known_id is not None:
            known = self.blocks[known_id]
            if self._holds(known, parent, token_ids):
                block.chain_id = known.chain_id  # a twin: the older one stays the one to find
                return
            self._unpublish(known)  # a collision, or a chain whose parent is gone
        self._last_chain_id += 1
        block.hash, block.token_ids = chain_hash, token_ids
        block.chain_id, block.parent_chain_id = self._last_chain_id, parent
        self.hash_to_block_id[chain_hash] = block.block_id

    def _forget(self, block: Block) -> None:
        """The content of a published block goes: it is not found any more."""
        del self.hash_to_block_id[block.hash]
        block.hash = NO_HASH

    def _unpublish(self, block: Block) -> None:
        self._forget(block)
        if block.ref_count == 0:
            del self.cached_block_ids[block.block_id]
            self.free_block_ids.append(block.block_id)

    # -- allocation -----------------------------------------------------------------------------

    def _take_free_block(self) -> int:
        """A block to write: one without content if there is, else the oldest cached one."""
        if self.free_block_ids:
            block = self.blocks[self.free_block_ids.pop()]
        else:
            block_id, _ = self.cached_block_ids.popitem(last=False)
            block = self.blocks[block_id]
            self._forget(block)
        assert block.ref_count == 0, f"block {block.block_id} is free and held"
        block.reset()
        block.ref_count = 1
        return block.block_id

    def _share(self, block: Block) -> int:
        """Hold a published block, too."""
        if block.ref_count == 0:
            del self.cached_block_ids[block.block_id]  # revived: the same block, its content
        block.ref_count += 1
        return block.block_id

    def _give_back(self, block: Block) -> None:
        block.ref_count -= 1
        if block.ref_count == 0:
            if block.hash == NO_HASH:
                self.free_block_ids.append(block.block_id)
            else:
                self.cached_block_ids[block.block_id] = None

    def can_allocate(
        self, seq: Sequence, hits: list[Block] | None = None, end: int | None = None
    ) -> bool:
        """Whether the blocks that `allocate` takes are there, cached prefixes counted once."""
        hits = self.find_prefix(seq) if hits is None else hits
        num_revived = sum(block.ref_count == 0 for block in hits)
        return seq.num_blocks - len(hits) <= self.num_free_blocks - num_revived

    def allocate(
        self, seq: Sequence, hits: list[Block] | None = None, end: int | None = None
    ) -> int:
        """Give `seq` blocks for all its tokens, those that hold the prefix found in the cache
        among them.

        Args:
            seq: a sequence without blocks.
            hits: result of `find_prefix`, if the caller has asked already.
            end: number of tokens up to the end of the first step, for `SlidingBlockManager`.

        Returns:
            The number of tokens that the cache has computed.

        Raises:
            RuntimeError: when the pool is too small; nothing has changed then.
        """
        assert not seq.kv.table, f"{seq!r} already holds blocks"
        hits = self.find_prefix(seq) if hits is None else hits
        if not self.can_allocate(seq, hits, end):
            raise RuntimeError(f"{seq!r} needs more blocks than {self.num_free_blocks} free ones")
        self._share_prefix(seq, hits)
        for chain_hash in seq.kv.hashes[len(hits) : seq.num_blocks]:
            self._computing.setdefault(chain_hash, seq.seq_id)
        self.may_append(seq, end)
        return len(hits) * self.block_size

    def _share_prefix(self, seq: Sequence, hits: list[Block]) -> None:
        seq.kv.table += [self._share(block) for block in hits]

    def deallocate(self, seq: Sequence) -> None:
        """Give the blocks of `seq` back. Published ones stay cached until the pool needs them."""
        kv = seq.kv
        for chain_hash in kv.hashes:
            if self._computing.get(chain_hash) == seq.seq_id:
                del self._computing[chain_hash]
        # Tail first: the end of a chain is useless without its beginning, so it ages first.
        for block_id in reversed(kv.table[kv.num_dropped :]):
            self._give_back(self.blocks[block_id])
        # The same for blocks that came back before, if they still hold the chain.
        dropped = zip(kv.table[: kv.num_dropped], kv.hashes, strict=False)
        for block_id, chain_hash in reversed(list(dropped)):
            if block_id in self.cached_block_ids and self.blocks[block_id].hash == chain_hash:
                self.cached_block_ids.move_to_end(block_id)
        kv.table.clear()
        kv.num_dropped = 0

    def drop_before_window(self, seq: Sequence, num_computed: int) -> bool:
        """Give back the blocks that no token of `seq` from `num_computed` on sees. Returns
        whether there are any.
        """
        first = self.first_seen_block(num_computed)
        if first <= seq.kv.num_dropped:
            return False
        self._drop(seq, first)
        seq.kv.num_dropped = first
        return True

    def _drop(self, seq: Sequence, end: int) -> None:
        for block_id in seq.kv.table[seq.kv.num_dropped : end]:
            self._give_back(self.blocks[block_id])

    def first_seen_block(self, num_computed: int | NDArray[np.int64]) -> Any:
        """The first block that a sequence keeps once so many of its tokens are computed."""
        last_full = num_computed // self.block_size - 1  # stays: the next one's chain id needs it
        seen = (num_computed - self.window + 1) // self.block_size
        first = seen + (last_full - seen) * (last_full < seen)  # the lesser, of numbers and arrays
        return first * (first > 0)

    def is_short(self, seq: Sequence) -> bool:
        """Whether `seq` lacks a block for its newest token.

        A new block is needed only when the tokens outgrow the blocks held, which is right after
        a block has been filled: `num_tokens % block_size == 1`. In all other steps the slot lies
        in the last block, and a full pool is no obstacle.
        """
        return len(seq.kv.table) < seq.num_blocks

    def can_append(self, *seqs: Sequence, end: int | None = None) -> bool:
        """Whether the KV of the next tokens of all `seqs` has, or can get, slots.

        Args:
            end: number of tokens up to the end of the next step, for `SlidingBlockManager`.
        """
        missing = sum(seq.num_blocks - len(seq.kv.table) for seq in seqs)
        return missing <= self.num_free_blocks

    def may_append(self, seq: Sequence, end: int | None = None) -> None:
        """Take the blocks that `seq` lacks (see `can_append`)."""
        while len(seq.kv.table) < seq.num_blocks:
            seq.kv.table.append(self._take_free_block())
            seq.kv.version += 1

    # -- snapshots of states: nothing here, see `SnapshotBlockManager` --------------------------

    def cut(
        self, scheduled: list[ScheduledSequence], waiting: Iterable[Sequence]
    ) -> list[ScheduledSequence]:
        """These items of prompts, or the parts of them after which a snapshot is taken for those
        that wait.
        """
        return scheduled

    def booked(self, item: ScheduledSequence) -> None:
        """The snapshot of an item is there, and its blocks are published."""

    def dropped(self, item: ScheduledSequence) -> None:
        """The snapshot of an item will not be used: its sequence has ended."""

    def drop_all_saves(self) -> None:
        """No snapshot of a step on its way will be used."""

    def describe(self) -> dict[str, int]:
        """The counts of snapshots, for `LLMEngine.metrics`."""
        return {}

    # -- memory, for admission: in pages, each a block ------------------------------------------

    block_pages = 1
    num_pages, num_free_pages = num_blocks, num_free_blocks

    def pages_at(self, num_tokens: Any) -> Any:
        """The most pages that a decoding sequence holds.

        Args:
            num_tokens: its tokens; an int, or an array of int64.
        """
        num_blocks = cdiv(num_tokens, self.block_size)
        if not self.window:
            return num_blocks
        return num_blocks - self.first_seen_block(num_tokens - 2)  # a step may be in flight

    def pages_at_start(self, seq: Sequence, end: int) -> int:
        """Pages that a sequence without blocks gets (see `allocate`)."""
        return seq.num_blocks

    def pages_of(self, seq: Sequence) -> int:
        """Pages that a sequence holds."""
        return len(seq.kv.table) - seq.kv.num_dropped

    def pages_of_alone(self, seq: Sequence, but: Collection[int]) -> int:
        """Pages that a sequence holds alone, without the blocks `but`."""
        held = seq.kv.table[seq.kv.num_dropped :]
        return sum(self.blocks[b].ref_count == 1 and b not in but for b in held)
