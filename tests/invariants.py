"""The books of the scheduler and the block manager, verified. No torch."""

from collections.abc import Iterable

from nanovllm.engine.block_manager import NO_HASH, BlockManager
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence, SequenceStatus


def check_blocks(manager: BlockManager, holders: Iterable[Sequence]) -> None:
    """Verify the books against `holders`, all sequences that hold blocks."""
    holders = list(holders)
    counts = [0] * len(manager.blocks)
    for seq in holders:
        held = seq.held_blocks
        assert len(set(held)) == len(held), f"{seq!r} holds a block twice"
        assert seq.num_computed_tokens < seq.num_tokens, f"{seq!r} has nothing to compute"
        for i, block_id in enumerate(held, seq.num_dropped_blocks):
            counts[block_id] += 1
            if i >= seq.num_computed_tokens // manager.block_size:  # will be written
                block = manager.blocks[block_id]
                assert block.ref_count == 1, f"{seq!r} would write shared block {block_id}"
                assert block.hash == NO_HASH, f"{seq!r} would write published block {block_id}"
    assert counts == [block.ref_count for block in manager.blocks], "wrong reference counts"
    free, cached = set(manager.free_block_ids), set(manager.cached_block_ids)
    assert len(free) == len(manager.free_block_ids), "a block is free twice"
    for block in manager.blocks:
        is_cached = block.ref_count == 0 and block.hash != NO_HASH
        assert (block.block_id in cached) == is_cached, f"block {block.block_id}: cached?"
        is_free = block.ref_count == 0 and block.hash == NO_HASH
        assert (block.block_id in free) == is_free, f"block {block.block_id}: free?"
        if block.hash != NO_HASH:
            assert manager.hash_to_block_id[block.hash] == block.block_id, "lost from the index"
            assert len(block.token_ids) == manager.block_size, "published before it is full"
    assert len(manager.hash_to_block_id) == sum(b.hash != NO_HASH for b in manager.blocks)
    computing = {h for seq in holders for h in seq.block_hashes}
    assert set(manager._computing) <= computing, "nobody computes this block any more"


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
