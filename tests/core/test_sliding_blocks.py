"""Blocks of layers that slide beside others: what they keep, and what a prefix needs of them."""

import pytest
from host import BLOCK_SIZE
from invariants import check_blocks
from test_block_manager import TAIL, A, B, compute, num_hits, run_and_free, start

from nanovllm.engine.sequence import Sequence
from nanovllm.windows.pages import BlockKind
from nanovllm.windows.sliding_blocks import SlidingBlockManager

# As many layers of each kind, or more of one.
KINDS = [
    (BlockKind(), BlockKind(6)),
    (BlockKind(), BlockKind(6, pages=3)),
    (BlockKind(pages=2), BlockKind(6)),
]


@pytest.mark.parametrize("kinds", KINDS)
def test_a_prefix_is_found_where_layers_that_slide_have_what_they_see(kinds):
    """Parts are given back while a sequence runs, and taken by others: a prompt that leaves the
    chain there computes it again; one that goes on at its end does not.
    """
    manager = SlidingBlockManager(10, BLOCK_SIZE, True, *kinds)
    prompt = list(range(8 * BLOCK_SIZE + 1))
    seq = start(manager, prompt)
    for _ in range(8):
        compute(manager, seq, BLOCK_SIZE)
        manager.drop_before_window(seq, seq.num_computed_tokens)
        check_blocks(manager, [seq])
    manager.deallocate(seq)
    assert [num_hits(manager, prompt[: n * BLOCK_SIZE + 1]) for n in range(9)] == list(range(9))
    others: list[Sequence] = []
    while num_hits(manager, prompt[: 3 * BLOCK_SIZE + 1]):  # until the oldest parts are taken
        others.append(start(manager, 1))
        check_blocks(manager, others)
    assert num_hits(manager, prompt) == 8
    left = {manager.blocks[manager.hash_to_block_id[h]].chain_id: i
            for i, h in enumerate(seq.kv.hashes)}  # fmt: skip
    there = {left[chain_id] for chain_id in manager.published_parts}
    for n in range(9):  # the first token after n blocks sees 6 tokens: 5 of them before it
        wanted = max(k for k in range(n + 1) if {*range(max(0, k - 2), k)} <= there)
        assert num_hits(manager, prompt[: n * BLOCK_SIZE + 1]) == wanted
    again = start(manager, prompt)
    assert again.num_computed_tokens == 8 * BLOCK_SIZE
    assert again.kv.num_dropped == 6 and len(again.kv.window_table) == 9
    check_blocks(manager, [*others, again])


def test_an_evicted_block_takes_its_part_along():
    manager = SlidingBlockManager(4, BLOCK_SIZE, True, *KINDS[0])
    run_and_free(manager, A + B + TAIL)
    assert len(manager.published_parts) == len(manager.hash_to_block_id) == 2
    seq = start(manager, 4 * BLOCK_SIZE)
    assert not manager.published_parts and not manager.hash_to_block_id
    check_blocks(manager, [seq])
