"""Shared prefixes of decodes, one pair and one group of them at a time."""

import random
from itertools import islice, takewhile

import numpy as np
import pytest

from nanovllm.scheduling import prefixes
from nanovllm.scheduling.prefixes import (
    MAX_LEVELS,
    MIN_MEMBERS,
    MIN_SAVED,
    find_shared_prefixes,
    max_tiles,
)

BLOCK = 16


def draw(rng: random.Random) -> tuple[np.ndarray, np.ndarray]:
    """Tables of decodes that begin with a path through a tree of blocks, and context lengths."""
    free, tables, lens = iter(range(1000, 9000)), [], []
    for _ in range(rng.randint(1, 60)):
        table = [1] * (rng.random() < 0.7)
        while rng.random() < 0.8 and len(table) < 6:
            table.append(10 * table[-1] + rng.randint(1, 2) if table else rng.randint(2, 3))
        table += [next(free) for _ in range(rng.randint(1, 4))]
        tables.append(table)
        lens.append((len(table) - 1) * BLOCK + rng.randint(1, BLOCK))
    return as_array(tables), np.array(lens, np.int32)


def as_array(tables: list[list[int]]) -> np.ndarray:
    out = np.zeros((len(tables), max(map(len, tables))), np.int32)
    for row, table in zip(out, tables, strict=True):
        row[: len(table)] = table
    return out


def saved_by_first_blocks(heads: list[tuple[int, ...]], members: int) -> int:
    """Blocks that are not read again if decodes with the same first block are one group; `heads`
    are the blocks that each may share.
    """
    groups: dict[int, list[tuple[int, ...]]] = {}
    for head in heads:
        if head:
            groups.setdefault(head[0], []).append(head)
    total = 0
    for group in groups.values():
        if len(group) >= MIN_MEMBERS:
            columns = zip(*group, strict=False)
            common = len([*takewhile(lambda blocks: len(set(blocks)) == 1, columns)])
            total += (len(group) - -(-len(group) // members)) * common
    return total


@pytest.mark.parametrize("seed", range(4))
def test_groups_begin_with_whole_blocks_that_all_of_them_have(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    print(f"seed {seed}")
    monkeypatch.setattr(prefixes, "MIN_SAVED", 1)
    rng, num_found, num_divided = random.Random(seed), 0, 0
    for _ in range(200):
        tables, context_lens = draw(rng)
        members = rng.choice([1, 3, 16, 64])
        found = find_shared_prefixes(tables, context_lens, BLOCK, members)
        whole = (context_lens - 1) // BLOCK
        heads = [tuple(table[:n].tolist()) for table, n in zip(tables, whole, strict=True)]
        least = saved_by_first_blocks(heads, members)
        if found is None:
            assert least == 0
            continue
        num_found += 1
        shared = (found.lens // BLOCK).tolist()
        assert sorted(found.rows.tolist()) == np.flatnonzero(found.lens).tolist()
        assert len(found.begins) <= max_tiles(len(tables), members)
        assert found.ends.tolist() == [*found.begins[1:].tolist(), len(found.rows)]
        saved, groups = 0, {}
        for begin, end in zip(found.begins, found.ends, strict=True):
            tile = found.rows[begin:end].tolist()
            assert 1 <= len(tile) <= members
            [begun] = {heads[i][: shared[i]] for i in tile}
            assert len(begun) == shared[tile[0]]
            saved += (len(tile) - 1) * len(begun)
            groups[begun] = groups.get(begun, 0) + len(tile)
        assert saved >= least and min(groups.values()) >= MIN_MEMBERS
        num_divided += len({begun[0] for begun in groups}) < len(groups)
    assert num_found > 20 and num_divided > 20


def nested(groups: list[tuple[int, list[int]]]) -> tuple[np.ndarray, np.ndarray]:
    """Tables and lengths of decodes, so many that each begin with the same blocks of a list."""
    free, tables = iter(range(1000, 99999)), []
    for count, blocks in groups:
        tables += [[*blocks, next(free)] for _ in range(count)]
    return as_array(tables), np.array([len(table) * 1024 for table in tables], np.int32)


def test_a_common_system_prompt_leaves_samples_what_they_share() -> None:
    """Groups of 8 prompts with 4 samples each, and of one with nothing else in common with them."""
    prompts = [(4, [1, *range(10 * p, 10 * p + 8)]) for p in range(1, 9)]
    found = find_shared_prefixes(*nested([*prompts, (1, [1])]), 1024, 16)
    assert found is not None and found.lens.tolist() == [9 * 1024] * 32 + [0]
    assert found.begins.tolist() == list(range(0, 32, 4))


@pytest.mark.parametrize(
    ("parts", "wanted"),
    [
        # (prompts, samples of each, own blocks), after 40 common blocks. Only the long one leaves:
        ([(15, 4, 1), (1, 4, 100)], [(60, 40), (4, 140)]),
        ([(32, 4, 1), (1, 16, 200)], [(128, 40), (16, 240)]),
        # All leave, some leave, none does.
        ([(4, 8, 40)], [(32, 80)]),
        ([(4, 3, 40), (1, 5, 60)], [(12, 40), (5, 100)]),
        ([(6, 4, 1)], [(24, 40)]),
    ],
)
def test_what_saves_more_leaves_its_group(
    parts: list[tuple[int, int, int]], wanted: list[tuple[int, int]]
) -> None:
    own, groups = iter(range(100000, 999999)), []
    for num_prompts, num_samples, num_own in parts:
        for _ in range(num_prompts):
            groups.append((num_samples, [*range(1, 41), *islice(own, num_own)]))
    found = find_shared_prefixes(*nested(groups), 1024, 32)
    assert found is not None
    assert found.lens.tolist() == [n * 1024 for count, n in wanted for _ in range(count)]


def test_each_level_may_leave_the_one_before() -> None:
    """Up to the last that is looked at; what goes on stays there."""
    chain = list(range(1, 2 ** (MAX_LEVELS + 1)))
    groups = [(8, chain[: 2**level]) for level in range(MAX_LEVELS + 1)]
    found = find_shared_prefixes(*nested(groups), 1024, 32)
    assert found is not None
    wanted = [2 ** min(level, MAX_LEVELS - 1) for level in range(MAX_LEVELS + 1) for _ in range(8)]
    assert (found.lens // 1024).tolist() == wanted


@pytest.mark.parametrize(
    ("others", "own", "wanted"),
    [
        (92, 100, [40] * 92 + [100] * 8),  # they pay for leaving all others, as two groups
        (92, 42, [40] * 100),  # neither they nor the two groups save enough
        (3, 53, [40] * 11),  # as two groups they save more, but not what all of them do
    ],
)
def test_a_group_leaves_for_what_its_parts_save(others: int, own: int, wanted: list[int]) -> None:
    """Decodes share 40 blocks; eight of them share one more, and each four of these yet more."""
    common = list(range(1, 41))
    fours = [[*common, 50, *range(first, first + own - 41)] for first in (100, 500)]
    singles = [(1, [*common, 60 + i]) for i in range(others)]
    tables, lens = nested([*singles, *((4, four) for four in fours)])
    found = find_shared_prefixes(tables, lens, 1024, 32)
    assert found is not None and (found.lens // 1024).tolist() == wanted


def test_few_decodes_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "_levels", None)
    assert find_shared_prefixes(*nested([(3, [1, 2])]), 1024, 8) is None


def test_little_is_not_worth_a_kernel() -> None:
    tables, lens = nested([(8, [1, 2])])
    assert find_shared_prefixes(tables, lens // 1024 * BLOCK, BLOCK, 8) is None
    for size, is_enough in ((MIN_SAVED // 4, True), (MIN_SAVED // 4 - 1, False)):
        tables, lens = nested([(5, [1])])  # four read a block less
        found = find_shared_prefixes(tables, lens // 1024 * size, size, 8)
        assert (found is not None) == is_enough
