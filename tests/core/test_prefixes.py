"""Which decodes share what they begin with, against one pair of them at a time."""

import random

import numpy as np
import pytest

from nanovllm.engine import prefixes
from nanovllm.engine.prefixes import MIN_MEMBERS, find_shared_prefixes, most_tiles

BLOCK = 16


def draw(rng: random.Random) -> tuple[np.ndarray, np.ndarray]:
    """Tables of decodes that begin with one of a few chains, and context lengths."""
    chains = [[100 * i + j for j in range(rng.randint(0, 6))] for i in range(1, 5)]
    free, tables, lens = iter(range(1000, 9000)), [], []
    for _ in range(rng.randint(1, 60)):
        chain = rng.choice(chains)
        table = chain[: rng.randint(0, len(chain))]
        table += [next(free) for _ in range(rng.randint(1, 4))]
        tables.append(table)
        lens.append((len(table) - 1) * BLOCK + rng.randint(1, BLOCK))
    block_tables = np.zeros((len(tables), max(map(len, tables))), np.int32)
    for row, table in zip(block_tables, tables, strict=True):
        row[: len(table)] = table
    return block_tables, np.array(lens, np.int32)


@pytest.mark.parametrize("seed", range(4))
def test_prefixes_are_whole_blocks_that_all_of_a_tile_have(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    print(f"seed {seed}")
    monkeypatch.setattr(prefixes, "MIN_SAVED", 1)
    rng, num_found = random.Random(seed), 0
    for _ in range(200):
        tables, context_lens = draw(rng)
        members = rng.choice([1, 3, 16])
        found = find_shared_prefixes(tables, context_lens, BLOCK, members)
        # By definition: those with the same first block, the blocks that all of them have.
        wanted = np.zeros(len(tables), np.int32)
        for i, table in enumerate(tables):
            whole = (context_lens - 1) // BLOCK
            group = [j for j in range(len(tables)) if tables[j, 0] == table[0] and whole[j] > 0]
            if i in group and len(group) >= MIN_MEMBERS:
                count = 0
                while all(whole[j] > count and tables[j, count] == table[count] for j in group):
                    count += 1
                wanted[i] = count * BLOCK
        if found is None:
            # Each tile still reads what it has.
            assert members == 1 or not wanted.any()
            continue
        num_found += 1
        assert found.lens.tolist() == wanted.tolist()
        assert sorted(found.rows.tolist()) == np.flatnonzero(wanted).tolist()
        assert len(found.begins) <= most_tiles(len(tables), members)
        assert found.ends.tolist() == [*found.begins[1:].tolist(), len(found.rows)]
        for begin, end in zip(found.begins, found.ends, strict=True):
            tile = found.rows[begin:end]
            assert 1 <= len(tile) <= members and len(set(tables[tile, 0].tolist())) == 1
    assert num_found > 20


def test_little_is_not_worth_a_kernel() -> None:
    tables = np.array([[1, 2, 10 + i] for i in range(8)], np.int32)
    lens = np.full(8, 40, np.int32)
    assert find_shared_prefixes(tables, lens, BLOCK, 8) is None
    found = find_shared_prefixes(tables, lens * 32, BLOCK * 32, 8)
    assert found is not None and found.lens.tolist() == [1024] * 8
