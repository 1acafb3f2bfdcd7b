"""The books of the scheduler and the block manager, verified. No torch."""

from collections.abc import Iterable

from nanovllm.engine.block_manager import NO_HASH, BlockManager
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence, SequenceStatus


def check_blocks(manager: BlockManager, holders: Iterable[Sequence]) -> None:
    """Verify the books against `holders`, all sequences that hold blocks."""
    holders = list(holders)
    counts, used = [0] * len(manager.blocks), dict[int, int]()
    for seq in holders:
        assert seq.num_computed_tokens < seq.num_tokens, f"{seq!r} has nothing to compute"
        for kind, table, num_dropped in manager._tables(seq.kv):
            held = table[num_dropped:]
            assert len(set(held)) == len(held), f"{seq!r} holds a block twice"
            for i, block_id in enumerate(held, num_dropped):
                counts[block_id] += 1
                used[block_id] = kind.pages
                if i >= seq.num_computed_tokens // manager.block_size:  # will be written
                    block = manager.blocks[block_id]
                    assert block.ref_count == 1, f"{seq!r} would write shared block {block_id}"
                    assert not block.is_published, f"{seq!r} would write published {block_id}"
            if kind.window and num_dropped:  # what the next token sees is there
                seen = max(0, seq.num_computed_tokens - kind.window + 1) // manager.block_size
                assert num_dropped <= seen, f"{seq!r} has given back what it sees"
    assert counts == [block.ref_count for block in manager.blocks], "wrong reference counts"
    check_pages(manager, used)
    published = [block for block in manager.blocks if block.is_published]
    for block in published:
        if block.hash == NO_HASH:
            assert manager.parts[block.chain_id] == block.block_id, "a part is lost"
        else:
            assert manager.hash_to_block_id[block.hash] == block.block_id, "lost from the index"
            assert len(block.token_ids) == manager.block_size, "published before it is full"
    assert len(manager.hash_to_block_id) == sum(block.hash != NO_HASH for block in published)
    assert len(manager.parts) == sum(block.hash == NO_HASH for block in published)
    chains = {manager.blocks[i].chain_id for i in manager.hash_to_block_id.values()}
    assert manager.parts.keys() <= chains, "a part cannot be found without its block"
    computing = {h for seq in holders for h in seq.kv.hashes}
    assert set(manager._computing) <= computing, "nobody computes this block any more"


def check_pages(manager: BlockManager, used: dict[int, int]) -> None:
    """Verify the books of the pages.

    Args:
        used: sizes of the blocks that are in use, by first page.
    """
    pages = manager.pages
    in_use = [page for first, size in used.items() for page in range(first, first + size)]
    assert len(set(in_use)) == len(in_use), "blocks overlap"
    assert pages.num_free == pages.num_pages - len(in_use), "pages are lost"
    content = {b.block_id for b in manager.blocks if b.is_published and b.ref_count == 0}
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
