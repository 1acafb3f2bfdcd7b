"""When sequences begin that wait for snapshots of states, and where those are taken."""

from functools import partial
from itertools import pairwise

import pytest
from host import FakeModel, Loop, make_scheduler, make_seq

from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.recurrent.snapshots import SnapshotBlockManager

STEM = list(range(100, 200))


def starts(scheduler: Scheduler, *seqs: Sequence) -> list[int]:
    """The step in which each of these begins."""
    loop, found, step = Loop(scheduler, FakeModel(scheduler)), [0] * len(seqs), 0
    for seq in seqs:
        scheduler.add(seq)
    while not scheduler.is_finished():
        loop.step()
        step += 1
        found = [at or (step if seq.started_at else 0) for at, seq in zip(found, seqs, strict=True)]
    return found


@pytest.mark.parametrize("budget", [5, 8, 15, 16, 17])
def test_nobody_waits_for_what_is_not_taken(budget: int) -> None:
    """Chunks of 15 and of 5 leave a prompt's last token to a decode, which takes no snapshot at
    the prompt's end; another, which goes on from there, begins when it would without states.
    """
    begins = []
    for num_snapshots in (None, 4):
        scheduler = make_scheduler(
            64, 4, max_num_seqs=4, max_num_batched_tokens=budget, num_snapshots=num_snapshots
        )
        first = make_seq(STEM[:16], max_tokens=40)
        begins.append(starts(scheduler, first, make_seq([*STEM[:16], 7, 8, 9], max_tokens=3)))
    assert begins[0] == begins[1] and begins[0][1] < 8


def test_nobody_waits_for_a_row_that_is_not_free() -> None:
    """The only snapshot is of use to one that waits, so two others cannot be taken."""
    begins = {}
    for num_snapshots in (1, 4):
        scheduler = make_scheduler(
            200, 4, max_num_seqs=2, max_num_batched_tokens=64, num_snapshots=num_snapshots
        )
        shared = list(range(500, 508))
        starts(scheduler, *(make_seq([*shared, i, i], max_tokens=2) for i in (1, 3)))
        assert len(scheduler.block_manager.snapshots) >= 1
        owner = make_seq(STEM[:40], max_tokens=80)
        waiting = [[*shared, 5, 6], [*STEM[:12], 1, 2, 3], [*STEM[:24], 1, 2, 3]]
        others = [make_seq(each, max_tokens=3) for each in waiting]
        begins[num_snapshots] = starts(scheduler, make_seq(3, max_tokens=6), owner, *others)
    assert max(begins[1]) < 20 and max(begins[4]) < 20, begins


@pytest.mark.parametrize("order", [1, -1])
def test_snapshots_of_a_prompt_keep_their_distance(
    order: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight prompts leave another after 4, 8, ... 32 of its tokens."""
    scheduler = make_scheduler(200, 4, max_num_seqs=16, max_num_batched_tokens=256)
    scheduler.block_manager = SnapshotBlockManager(200, 4, range(17, 40), unit=1, distance=16)
    scheduler.keeps_states = True
    taken, save = [], partial(SnapshotBlockManager.booked, scheduler.block_manager)
    monkeypatch.setattr(
        scheduler.block_manager,
        "booked",
        lambda item: (taken.append((item.seq.seq_id, item.end)), save(item)),
    )
    owner = make_seq(STEM, max_tokens=2)
    others = [make_seq([*STEM[: 4 * i], i, 1], max_tokens=2) for i in range(1, 9)]
    starts(scheduler, owner, *others[::order])
    ends = sorted(end for seq_id, end in taken if seq_id == owner.seq_id)
    assert 2 <= len(ends) <= 3
    assert all(b - a >= 16 for a, b in pairwise(ends)), ends
