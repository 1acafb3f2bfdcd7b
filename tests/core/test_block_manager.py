"""The block manager: what is shared, what is reused, and that it is never the wrong KV."""

from collections import Counter

import pytest
from host import BLOCK_SIZE, HASHES, NUM_BLOCKS, make_scheduler, make_seq, manager_state, run_to_end
from invariants import check_blocks

from nanovllm.engine.block_manager import NO_HASH, BlockManager
from nanovllm.engine.sequence import Sequence

A, B, C, D = ([10 * i + j for j in range(BLOCK_SIZE)] for i in range(1, 5))
TAIL = [7]


def start(manager: BlockManager, tokens: list[int] | int) -> Sequence:
    """A sequence with blocks, nothing computed but what the cache gave."""
    seq = make_seq(tokens)
    seq.num_computed_tokens = manager.allocate(seq)
    return seq


def compute(manager: BlockManager, seq: Sequence, num_tokens: int | None = None) -> Sequence:
    """Compute the rest (then there is a next token), or so many tokens."""
    start = seq.num_computed_tokens
    seq.num_computed_tokens += num_tokens or seq.num_uncomputed_tokens
    manager.publish(seq, start, seq.num_computed_tokens)
    if not seq.num_uncomputed_tokens:
        seq.append_token(1)
    return seq


def run_and_free(manager: BlockManager, tokens: list[int] | int) -> list[int]:
    """Compute a prompt and give its blocks back. Returns the table it had."""
    seq = compute(manager, start(manager, tokens))
    table = list(seq.block_table)
    manager.deallocate(seq)
    check_blocks(manager, [])
    return table


def num_hits(manager: BlockManager, tokens: list[int]) -> int:
    return len(manager.find_prefix(make_seq(tokens)))


@pytest.fixture
def manager() -> BlockManager:
    return BlockManager(NUM_BLOCKS, BLOCK_SIZE)


def test_blocks_are_published_only_when_full_and_computed(manager):
    """#208: a hit on a block whose KV is not there yet reads garbage."""
    seq = start(manager, A + B + TAIL)
    for num_tokens, hits in ((0, 0), (3, 0), (1, 1), (3, 1), (1, 2)):
        if num_tokens:
            compute(manager, seq, num_tokens)
        assert num_hits(manager, A + B + C) == hits, f"{seq.num_computed_tokens} computed"
        check_blocks(manager, [seq])


@pytest.mark.parametrize("window", [0, 8])
def test_the_beginning_of_a_chain_ages_last(window):
    """A window gives it back first; without it the rest of the chain could not be found."""
    manager = BlockManager(12, BLOCK_SIZE, window=window)
    prompt = list(range(8 * BLOCK_SIZE + 1))
    seq = start(manager, prompt)
    for _ in range(8):
        compute(manager, seq, BLOCK_SIZE)
        if window:
            manager.drop_before_window(seq, seq.num_computed_tokens)
    assert seq.kv.num_dropped == (6 if window else 0)
    manager.deallocate(seq)
    check_blocks(manager, [])
    start(manager, 6 * BLOCK_SIZE)
    assert num_hits(manager, prompt) == 6


def test_generated_blocks_are_published_too(manager):
    seq = compute(manager, start(manager, [*A, 1, 1, 1]))
    manager.may_append(seq)
    assert num_hits(manager, [*A, 1, 1, 1, 1, *TAIL]) == 1  # the 4th 1 is not computed
    compute(manager, seq)
    assert num_hits(manager, [*A, 1, 1, 1, 1, *TAIL]) == 2


def test_hit_on_a_freed_block_revives_it(manager):
    table = run_and_free(manager, A + B + TAIL)
    seq = start(manager, A + B + C)
    assert seq.block_table[:2] == table[:2]
    assert seq.num_computed_tokens == 2 * BLOCK_SIZE
    assert [manager.blocks[i].ref_count for i in seq.block_table] == [1, 1, 1]
    check_blocks(manager, [seq])


def test_blocks_without_content_are_taken_before_cached_ones(manager):
    cached = run_and_free(manager, A + B + TAIL)[:2]
    seq = start(manager, (NUM_BLOCKS - 2) * BLOCK_SIZE)
    assert not set(seq.block_table) & set(cached)
    assert num_hits(manager, A + B + TAIL) == 2


def test_as_few_blocks_are_ever_used_as_are_needed_at_once():
    """Each short sequence took fresh memory: on a CPU 4 GiB in the end, for a pool nearly empty."""
    manager, used, needed = BlockManager(100, BLOCK_SIZE), set(), 0
    for length in (2, 5, 11, 3, 7) * 20:  # those of more than a block leave content behind
        seqs = [compute(manager, start(manager, [*A, *B, 7, 7, 7][:length])) for _ in range(2)]
        used |= {block_id for seq in seqs for block_id in seq.block_table}
        needed = max(needed, manager.num_used_blocks + len(manager.cached_block_ids))
        check_blocks(manager, seqs)
        for seq in seqs:
            manager.deallocate(seq)
    assert len(used) == needed < 8


def test_cached_blocks_are_taken_oldest_first_and_tail_before_head(manager):
    a, b = run_and_free(manager, A + B + TAIL)[:2]
    c, d = run_and_free(manager, C + D + TAIL)[:2]
    start(manager, 2 * BLOCK_SIZE)  # the two without content
    assert [start(manager, 1).block_table[0] for _ in range(4)] == [b, a, d, c]


def test_a_hit_makes_a_cached_block_young_again(manager):
    a = run_and_free(manager, A + TAIL)[0]
    b = run_and_free(manager, B + TAIL)[0]
    run_and_free(manager, A + TAIL)
    start(manager, (NUM_BLOCKS - 2) * BLOCK_SIZE)
    assert [start(manager, 1).block_table[0] for _ in range(2)] == [b, a]


@pytest.mark.parametrize("cached", [False, True])
def test_failed_allocation_changes_nothing(manager, cached):
    if cached:
        run_and_free(manager, A + B + TAIL)
    holder = start(manager, 2 * BLOCK_SIZE)
    seq = make_seq(A + B + list(range(200, 200 + 3 * BLOCK_SIZE)))  # 5 blocks, 4 not held
    before = manager_state(manager)
    assert not manager.can_allocate(seq)
    with pytest.raises(RuntimeError, match="needs more blocks"):
        manager.allocate(seq)
    assert manager_state(manager) == before
    assert (seq.block_table, seq.num_computed_tokens) == ([], 0)
    check_blocks(manager, [holder])


def test_cached_hits_are_not_counted_as_free_as_well(manager):
    """Revived blocks leave the free ones, so they cannot also serve the rest of the prompt."""
    run_and_free(manager, A + B + TAIL)
    holder = start(manager, 3 * BLOCK_SIZE)
    assert manager.num_free_blocks == 3
    assert manager.can_allocate(make_seq(A + B + C))
    assert not manager.can_allocate(make_seq(A + B + C + D))
    shared = start(manager, A + B + C)  # hits held by someone are free of charge
    assert not manager.can_allocate(make_seq(A + B + D))
    manager.deallocate(holder)
    assert manager.can_allocate(make_seq(A + B + C + D + TAIL))
    check_blocks(manager, [shared])


@pytest.mark.parametrize("k", [1, 2, 3])
def test_prompt_of_k_blocks_leaves_the_last_one_to_compute(manager, k):
    """#114, #199: with all tokens cached there would be no row to take logits from."""
    tokens = (A + B + C)[: k * BLOCK_SIZE]
    run_and_free(manager, tokens)
    seq = start(manager, tokens)
    assert seq.num_computed_tokens == (k - 1) * BLOCK_SIZE
    assert len(seq.block_table) == k
    check_blocks(manager, [seq])


def test_whole_chain_is_verified(manager):
    """A block in the middle is found after its own prefix only."""
    run_and_free(manager, A + B + TAIL)
    assert num_hits(manager, A + B + TAIL) == 2
    assert num_hits(manager, B + TAIL) == 0
    assert num_hits(manager, C + B + TAIL) == 0
    assert num_hits(manager, A + C + B + TAIL) == 1


@pytest.mark.parametrize("name", HASHES)
def test_hash_collision_never_serves_another_prefix(manager, name):
    manager.compute_hash = HASHES[name]
    first = run_and_free(manager, A + B + TAIL)
    for tokens in (C + B + TAIL, C + D + TAIL, B + A + TAIL):
        assert num_hits(manager, tokens) == 0, tokens
    second = compute(manager, start(manager, C + B + TAIL))
    check_blocks(manager, [second])
    for tokens, table in ((A + B + TAIL, first), (C + B + TAIL, second.block_table)):
        hits = [block.block_id for block in manager.find_prefix(make_seq(tokens))]
        assert hits == table[: len(hits)]
        assert len(hits) == 2 or name != "xxhash"


def test_shared_blocks_are_reference_counted(manager):
    first = compute(manager, start(manager, A + B + TAIL))
    others = [start(manager, A + B + [50 + i]) for i in range(2)]
    assert [manager.blocks[i].ref_count for i in first.block_table] == [3, 3, 1]
    assert manager.num_used_blocks == 5
    check_blocks(manager, [first, *others])
    manager.deallocate(first)
    assert [manager.blocks[i].ref_count for i in others[0].block_table] == [2, 2, 1]
    for seq in others:
        compute(manager, seq)
        assert seq.block_table[-1] not in (others[0].block_table + others[1].block_table)[:2]
        manager.deallocate(seq)
    assert manager.num_used_blocks == 0
    check_blocks(manager, [])


def test_twins_keep_their_blocks_and_the_older_is_found(manager):
    """Two sequences that compute the same blocks at once; the second's extend the first's chain."""
    first, second = start(manager, A + TAIL), start(manager, A + B + TAIL)
    assert first.block_table[0] != second.block_table[0]
    compute(manager, first), compute(manager, second)
    check_blocks(manager, [first, second])
    found = [block.block_id for block in manager.find_prefix(make_seq(A + B + C))]
    assert found == [first.block_table[0], second.block_table[1]]
    twin = second.block_table[0]
    manager.deallocate(second)
    assert twin in manager.free_block_ids  # it cannot be found: no content
    check_blocks(manager, [first])


def test_chain_whose_parent_is_gone_is_replaced():
    """A twin can outlive the block that was found; what hangs on it must not be found by hash."""
    manager = BlockManager(4, BLOCK_SIZE)
    first, second = start(manager, A), start(manager, A + B + TAIL)
    compute(manager, first), compute(manager, second)
    manager.deallocate(first)
    evicting = start(manager, 1)  # takes the A that was found
    assert num_hits(manager, A + B + TAIL) == 0
    manager.deallocate(second), manager.deallocate(evicting)
    third = compute(manager, start(manager, A + B + TAIL))
    assert num_hits(manager, A + B + TAIL) == 2
    check_blocks(manager, [third])


def test_without_prefix_caching_nothing_is_hashed_or_found():
    manager = BlockManager(NUM_BLOCKS, BLOCK_SIZE, enable_prefix_caching=False)
    manager.compute_hash = None  # not callable
    run_and_free(manager, A + B + TAIL)
    assert num_hits(manager, A + B + TAIL) == 0
    assert not manager.hash_to_block_id and not manager.cached_block_ids
    other = make_seq(A + B)
    assert not manager.postpones(other, manager.find_prefix(other))


def test_each_block_is_hashed_once_however_long_the_head_waits():
    """Known defect 20: the waiting head's prompt was hashed in every step."""
    scheduler = make_scheduler()
    calls: Counter[tuple[int, ...]] = Counter()

    def counting(token_ids: list[int], prefix: int = NO_HASH) -> int:
        calls[tuple(token_ids)] += 1
        return BlockManager.compute_hash(token_ids, prefix)

    scheduler.block_manager.compute_hash = counting
    running, waiting = make_seq(14, max_tokens=8), make_seq(16, max_tokens=4)
    steps = run_to_end(scheduler, [running, waiting])
    assert len(steps) > 10, "the head should have waited"
    assert calls and set(calls.values()) == {1}
    assert sum(calls.values()) == sum((len(seq) - 1) // BLOCK_SIZE for seq in (running, waiting))


def test_no_stale_entry_after_a_block_is_reused(manager):
    """#163: the index still named a block whose content had been replaced."""
    run_and_free(manager, A + B + TAIL)
    everything = compute(manager, start(manager, NUM_BLOCKS * BLOCK_SIZE))
    check_blocks(manager, [everything])
    assert num_hits(manager, A + B + TAIL) == 0
    manager.deallocate(everything)
    assert num_hits(manager, A + B + TAIL) == 0


@pytest.mark.parametrize("num_tokens", range(2, 2 * BLOCK_SIZE + 2))
@pytest.mark.parametrize("num_free", [0, 1])
def test_can_append_needs_a_block_only_after_one_was_filled(num_tokens, num_free):
    """Known defect 24: on a full pool a new token fits unless it is the first of a block."""
    manager = BlockManager(-(-(num_tokens - 1) // BLOCK_SIZE) + num_free, BLOCK_SIZE)
    seq = compute(manager, start(manager, num_tokens - 1))
    starts_a_block = num_tokens % BLOCK_SIZE == 1
    assert manager.can_append(seq) == (num_free == 1 or not starts_a_block)
    if manager.can_append(seq):
        manager.may_append(seq)
        assert len(seq.block_table) == seq.num_blocks
        assert manager.num_free_blocks == num_free - starts_a_block
        check_blocks(manager, [seq])
