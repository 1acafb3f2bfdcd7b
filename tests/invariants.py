"""The books of the scheduler and the block manager, verified. No torch."""

from collections import Counter
from collections.abc import Iterable

from nanovllm.engine.block_manager import NO_HASH, ROOT_CHAIN, BlockManager
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence, SequenceStatus
from nanovllm.recurrent.snapshots import SnapshotBlockManager
from nanovllm.windows.sliding_blocks import SlidingBlockManager


def check_blocks(manager: BlockManager, holders: Iterable[Sequence]) -> None:
    """Verify the books against `holders`, all sequences that hold blocks."""
    holders = list(holders)
    slides = isinstance(manager, SlidingBlockManager)
    counts = [0] * len(manager.blocks)
    for seq in holders:
        num_dropped = 0 if slides else seq.kv.num_dropped
        held = seq.kv.table[num_dropped:]
        assert len(set(held)) == len(held), f"{seq!r} holds a block twice"
        assert seq.num_computed_tokens < seq.num_tokens, f"{seq!r} has nothing to compute"
        for i, block_id in enumerate(held, num_dropped):
            counts[block_id] += 1
            if i >= seq.num_computed_tokens // manager.block_size:  # will be written
                block = manager.blocks[block_id]
                assert block.ref_count == 1, f"{seq!r} would write shared block {block_id}"
                assert block.hash == NO_HASH, f"{seq!r} would write published block {block_id}"
        if manager.window:  # what the next token sees is there
            seen = max(0, seq.num_computed_tokens - manager.window + 1) // manager.block_size
            assert seq.kv.num_dropped <= seen, f"{seq!r} has given back what it sees"
    assert counts == [block.ref_count for block in manager.blocks], "wrong reference counts"
    for block in manager.blocks:
        if block.hash != NO_HASH:
            assert manager.hash_to_block_id[block.hash] == block.block_id, "lost from the index"
            assert len(block.token_ids) == manager.block_size, "published before it is full"
    assert len(manager.hash_to_block_id) == sum(b.hash != NO_HASH for b in manager.blocks)
    computing = {h for seq in holders for h in seq.kv.hashes}
    assert set(manager._computing) <= computing, "nobody computes this block any more"
    if isinstance(manager, SlidingBlockManager):
        check_parts(manager, holders)
        check_pages(manager)
        return
    if isinstance(manager, SnapshotBlockManager):
        check_snapshots(manager, holders)
    free, cached = set(manager.free_block_ids), set(manager.cached_block_ids)
    assert len(free) == len(manager.free_block_ids), "a block is free twice"
    for block in manager.blocks:
        is_cached = block.ref_count == 0 and block.hash != NO_HASH
        assert (block.block_id in cached) == is_cached, f"block {block.block_id}: cached?"
        is_free = block.ref_count == 0 and block.hash == NO_HASH
        assert (block.block_id in free) == is_free, f"block {block.block_id}: free?"


def check_snapshots(manager: SnapshotBlockManager, holders: Iterable[Sequence]) -> None:
    """Verify the books of the snapshots."""
    rows = [*manager._free_rows, *manager.snapshots.values(), *manager._saving]
    assert sorted(rows) == list(manager.rows), "rows are lost or shared"
    chains = {manager.blocks[i].chain_id for i in manager.hash_to_block_id.values()}
    assert manager.snapshots.keys() <= chains, "a snapshot cannot be found without its block"
    known = {seq_id: each.seq for seq_id, each in manager._holders.items()}
    assert known == {seq.seq_id: seq for seq in holders}, "who holds blocks?"
    leaving = {seq_id for seq_id, each in manager._holders.items() if each.positions}
    assert leaving <= manager._leaving.keys() <= manager._holders.keys(), "who leaves snapshots?"
    saving = {seq_id for seq_id, each in manager._holders.items() if each.saved_at}
    assert saving <= set(manager._saving.values()), "a snapshot that no step takes"
    for each in manager._holders.values():
        assert all(stop <= each.seq.num_tokens for stop in each.stops), "a stop beyond the prompt"


def check_parts(manager: SlidingBlockManager, holders: Iterable[Sequence]) -> None:
    """Verify the books of the parts."""
    counts = [0] * len(manager.parts)
    for seq in holders:
        held = seq.kv.window_table[seq.kv.num_dropped :]
        assert len(set(held)) == len(held), f"{seq!r} holds a part twice"
        for i, part_id in enumerate(held, seq.kv.num_dropped):
            counts[part_id] += 1
            if i >= seq.num_computed_tokens // manager.block_size:  # will be written
                part = manager.parts[part_id]
                assert part.ref_count == 1, f"{seq!r} would write shared part {part_id}"
                assert part.chain_id == ROOT_CHAIN, f"{seq!r} would write published {part_id}"
    assert counts == [part.ref_count for part in manager.parts], "wrong reference counts"
    published = {part.chain_id: part.block_id for part in manager.parts if part.chain_id}
    assert manager.published_parts == published, "a part is lost"
    chains = {manager.blocks[i].chain_id for i in manager.hash_to_block_id.values()}
    assert published.keys() <= chains, "a part cannot be found without its block"


def check_pages(manager: SlidingBlockManager) -> None:
    """Verify the books of the pages."""
    pages = manager.pages
    used = {b.block_id: manager.whole.pages for b in manager.blocks if b.ref_count}
    in_parts = {p.block_id: manager.sliding.pages for p in manager.parts if p.ref_count}
    assert not used.keys() & in_parts.keys(), "a page is a block and a part"
    used |= in_parts
    in_use = [page for first, size in used.items() for page in range(first, first + size)]
    assert len(set(in_use)) == len(in_use), "blocks overlap"
    assert pages.num_free == pages.num_pages - len(in_use), "pages are lost"
    content = {b.block_id for b in manager.blocks if b.hash != NO_HASH and b.ref_count == 0}
    content |= {p.block_id for p in manager.parts if p.chain_id and p.ref_count == 0}
    assert pages._content == content, "content that is not cached, or lost"
    for slab in range(pages.num_pages // pages.ratio):
        own = set(range(slab * pages.ratio, (slab + 1) * pages.ratio))
        num_used = len(own.intersection(in_use))
        assert pages._num_used[slab] == num_used, f"slab {slab} is counted wrongly"
        assert (slab in pages.idle) == (not num_used and bool(own & content)), "idle?"
        assert pages.empty.count(slab) == (not num_used and not own & content), "empty?"
        rest = own.difference(in_use) if num_used else set()
        assert own & set(pages._spare_idle) == rest & content, "spare, with content?"
        assert own & set(pages._spare) == rest - content, "spare?"


def check_scheduler(scheduler: Scheduler) -> None:
    """Verify the queues and the block manager's books."""
    running = scheduler.running
    assert len(running) <= scheduler.max_num_seqs, "too many running sequences"
    assert running == sorted(running, key=lambda seq: seq.seq_id), "running is out of order"
    for seq in running:
        assert seq.status is SequenceStatus.RUNNING, repr(seq)
        assert len(seq.block_table) * seq.block_size >= seq.num_tokens - 1, repr(seq)
        assert seq.num_pending <= scheduler._num_in_flight, repr(seq)
    slots = [seq.slot for seq in running] + scheduler._free_slots
    assert sorted(slots) == list(range(1, scheduler.max_num_seqs + 1)), "slots are lost or shared"
    for seq in scheduler.waiting:
        assert seq.status is SequenceStatus.WAITING, repr(seq)
        assert not seq.num_pending, repr(seq)
        assert not seq.block_table, f"{seq!r} waits and holds blocks"
    check_blocks(scheduler.block_manager, running)
    check_images(scheduler)


def check_images(scheduler: Scheduler) -> None:
    """Verify the books of the store of embeddings."""
    cache, held = scheduler.images, Counter()
    stored = list(cache._stored.values())
    rows = [row for each in stored for row in each.rows.tolist()]
    assert sorted(rows + cache._free_rows) == list(range(cache._facts.capacity)), "rows"
    for seq in scheduler.running:
        for i, each in seq.image_state.held.items() if seq.image_state else ():
            assert seq.images[i].end > seq.num_computed_tokens, f"{seq!r} is done with image {i}"
            assert cache._stored[seq.images[i].image.key] is each, "held, and not in the store"
            held[id(each)] += 1
    for seq in scheduler.waiting:
        assert not (seq.image_state and seq.image_state.held), f"{seq!r} waits and holds images"
    assert all(each.num_holders == held[id(each)] for each in stored), "wrong counts of holders"
    assert cache._num_held_rows == sum(len(each.rows) for each in stored if each.num_holders)
