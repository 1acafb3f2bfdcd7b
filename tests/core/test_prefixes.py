"""Which decodes share what they begin with, against a search through the tree of their blocks."""

import random

import numpy as np
import pytest

from nanovllm.engine import prefixes
from nanovllm.engine.prefixes import MIN_MEMBERS, find_shared_prefixes, most_tiles

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


def most_saved(tables: list[tuple[int, ...]], depth: int, members: int) -> int:
    """Blocks that are not read again if decodes which share `depth` blocks do so as one group, or
    divided by their next block, whatever saves more; each table has the blocks that may be shared.
    """
    if len(tables) < MIN_MEMBERS:
        return 0
    together = (len(tables) - -(-len(tables) // members)) * depth
    parts: dict[int, list[tuple[int, ...]]] = {}
    for table in tables:
        if len(table) > depth:
            parts.setdefault(table[depth], []).append(table)
    return max(together, sum(most_saved(part, depth + 1, members) for part in parts.values()))


@pytest.mark.parametrize("seed", range(4))
def test_groups_begin_with_whole_blocks_that_all_of_them_have(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    print(f"seed {seed}")
    monkeypatch.setattr(prefixes, "MIN_SAVED", 1)
    rng, num_found, num_divided = random.Random(seed), 0, 0
    for _ in range(200):
        tables, context_lens = draw(rng)
        members = rng.choice([1, 3, 16])
        found = find_shared_prefixes(tables, context_lens, BLOCK, members)
        whole = (context_lens - 1) // BLOCK
        heads = [tuple(table[:n].tolist()) for table, n in zip(tables, whole, strict=True)]
        wanted = most_saved(heads, 0, members)
        if found is None:
            assert wanted == 0
            continue
        num_found += 1
        shared = (found.lens // BLOCK).tolist()
        assert sorted(found.rows.tolist()) == np.flatnonzero(found.lens).tolist()
        assert len(found.begins) <= most_tiles(len(tables), members)
        assert found.ends.tolist() == [*found.begins[1:].tolist(), len(found.rows)]
        saved, groups = 0, {}
        for begin, end in zip(found.begins, found.ends, strict=True):
            tile = found.rows[begin:end].tolist()
            assert 1 <= len(tile) <= members
            [begun] = {heads[i][: shared[i]] for i in tile}
            assert len(begun) == shared[tile[0]]
            saved += (len(tile) - 1) * len(begun)
            groups[begun] = groups.get(begun, 0) + len(tile)
        assert saved >= wanted and min(groups.values()) >= MIN_MEMBERS
        num_divided += len({begun[0] for begun in groups}) < len(groups)
    assert num_found > 20 and num_divided > 20


def test_a_common_system_prompt_leaves_samples_what_they_share() -> None:
    """Of 8 prompts with 4 samples each, and of one that has nothing else in common with them."""
    tables = [
        [1, *range(10 * p, 10 * p + 8), 1000 + 4 * p + i] for p in range(1, 9) for i in range(4)
    ]
    tables.append([1, 2000])
    lens = np.array([len(table) * 256 - 9 for table in tables], np.int32)
    found = find_shared_prefixes(as_array(tables), lens, 256, 16)
    assert found is not None and found.lens.tolist() == [9 * 256] * 32 + [0]
    assert found.begins.tolist() == list(range(0, 32, 4))


def test_little_is_not_worth_a_kernel() -> None:
    tables = np.array([[1, 2, 10 + i] for i in range(8)], np.int32)
    lens = np.full(8, 40, np.int32)
    assert find_shared_prefixes(tables, lens, BLOCK, 8) is None
    found = find_shared_prefixes(tables, lens * 32, BLOCK * 32, 8)
    assert found is not None and found.lens.tolist() == [1024] * 8
