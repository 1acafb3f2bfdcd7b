"""Plans: what the ranks are told about a step, bounded in size and never more than what is new."""

import pickle
import random

import numpy as np
import pytest
from host import FakeModel, Loop, make_scheduler, make_seq, reference

from checkpoints import rare
from nanovllm.engine.plan import (
    Batch,
    SlotTable,
    StepPlan,
    build_batch,
    mark_sent,
    max_plan_bytes,
    plan_step,
)
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import ScheduledSequence, Sequence
from nanovllm.outputs import TokenLogprobs
from nanovllm.ranks.workers import OVERHEAD
from nanovllm.sampling_params import SamplingParams
from nanovllm.windows.pages import ALL_LAYERS, BlockKind


def message_bytes(plan: StepPlan) -> int:
    """The length of a plan's message to the workers."""
    return len(pickle.dumps(("run", (plan,)), protocol=pickle.HIGHEST_PROTOCOL))


def assert_equal(a: Batch, b: Batch) -> None:
    for name, x, y in zip(Batch._fields, a, b, strict=True):
        assert np.array_equal(x, y), name


class WatchedModel(FakeModel):
    """Follows what the ranks are told, slot by slot, and compares it with the block tables."""

    def __init__(self, scheduler: Scheduler, max_bytes: int) -> None:
        super().__init__(scheduler)
        self.max_bytes = max_bytes
        self.stays: dict[int, tuple[int, int]] = {}  # slot -> sequence, how often preempted
        self.told: dict[int, dict[tuple[int, int], int]] = {}  # slot -> table, column -> block
        self.num_sent = self.num_resumed = self.longest = 0

    def lay_out(self, scheduled: list[ScheduledSequence]) -> Batch:
        plan = plan_step(scheduled)
        self.longest = max(self.longest, message_bytes(plan))
        assert self.longest <= self.max_bytes
        stays = {item.seq.slot: (item.seq.seq_id, item.seq.num_preemptions) for item in scheduled}
        new = [slot for slot, stay in stays.items() if self.stays.get(slot) != stay]
        assert sorted(plan.joined.tolist()) == sorted(new), "who joins is told once"
        self.num_resumed += sum(stays[slot][1] > 0 for slot in new)
        self.stays |= stays
        self.told |= {slot: {} for slot in new}
        for which, slot, column, block in plan.new_blocks.T.tolist():
            assert (which, column) not in self.told[slot], "sent twice"
            self.told[slot][which, column] = block
            self.num_sent += 1
        for seq, *_ in scheduled:
            tables = enumerate((seq.kv.table, seq.kv.window_table))
            blocks = {(i, j): block for i, table in tables for j, block in enumerate(table)}
            assert self.told[seq.slot] == blocks
        return super().lay_out(scheduled)


@pytest.mark.parametrize("lookahead", [0, 1], ids=["synchronous", "overlap"])
@pytest.mark.parametrize("seed", [0, 1, rare(2), rare(3)])
def test_defect_11_plans_are_bounded_and_send_what_is_new_once(seed: int, lookahead: int) -> None:
    """Random requests under preemption, prefix hits and chunks; the tokens stay right."""
    print("seed", seed)
    num_resumed = watch(seed, lookahead, 60, ALL_LAYERS)
    num_resumed += watch(seed, lookahead, 24, (BlockKind(), BlockKind(6, pages=3)))
    assert num_resumed > 0, "no preempted sequence was told anew"


def watch(seed: int, lookahead: int, pool_tokens: int, kinds: tuple[BlockKind, ...]) -> int:
    """Run requests. Returns how often the ranks were told anew of a preempted sequence."""
    rng = random.Random(seed)
    block_size, max_num_seqs = rng.choice([1, 2, 4]), rng.randint(2, 9)
    budget = rng.randint(max_num_seqs, 40)
    scheduler = make_scheduler(
        -(-pool_tokens // block_size), block_size, max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget, max_model_len=48, kinds=kinds,
    )  # fmt: skip
    longest = scheduler.max_model_len
    scheduler.lengths.remaining = lambda seq: 1  # type: ignore[method-assign]
    bound = max_plan_bytes(max_num_seqs, budget, -(-48 // block_size), len(kinds)) + OVERHEAD
    model = WatchedModel(scheduler, bound)
    loop, seqs = Loop(scheduler, model, lookahead), []
    for _ in range(120):
        if rng.random() < 0.4:
            prompt = [1, 2, 3, 4] * rng.randint(0, 6) + [rng.randint(5, 9)] * rng.randint(1, 20)
            prompt, most = prompt[: longest - 1], rng.randint(1, 25)
            seqs.append(make_seq(prompt, max_tokens=most, block_size=block_size))
            scheduler.add(seqs[-1])
        loop.step()
    while not scheduler.is_finished():
        loop.step()
    for seq in seqs:
        assert (seq.completion_token_ids, seq.finish_reason) == reference(seq, longest, kinds)
    assert model.num_sent > len(seqs) > 20
    assert any(seq.num_cached_tokens for seq in seqs)
    return model.num_resumed


def worst_case(max_num_seqs: int, budget: int, max_blocks: int) -> list[ScheduledSequence]:
    """All sequences join at once, each with all its blocks, in a full step."""
    scheduled = []
    for slot in range(max_num_seqs):
        count = budget // max_num_seqs + (slot < budget % max_num_seqs)
        seq = make_seq(max_blocks + 1, block_size=1)  # a chunk, after which the prompt goes on
        seq.slot, seq.kv.table, seq.kv.version = slot, list(range(max_blocks)), 1
        seq.sampling_params = SamplingParams(prompt_logprobs=0)
        seq.results.prompt_logprobs, seq.pooling = TokenLogprobs(0, str), "mean"
        scheduled.append(ScheduledSequence(seq, max_blocks - count, count, True))
    return scheduled


@pytest.mark.parametrize(
    ("max_num_seqs", "budget", "max_blocks"),
    [(1, 1, 1), (1, 8, 8), (64, 64, 256), (64, 4096, 300), (512, 512, 2), (512, 1024, 16)],
)
def test_the_largest_plan_just_fits(max_num_seqs: int, budget: int, max_blocks: int) -> None:
    """Defect 11: the memory of a message must hold every step that the configuration allows."""
    plan = plan_step(worst_case(max_num_seqs, budget, max_blocks))
    assert len(plan.joined) == max_num_seqs
    assert plan.new_blocks.shape == (4, max_num_seqs * max_blocks)
    assert plan.token_ids.shape == (budget,)
    bound = max_plan_bytes(max_num_seqs, budget, max_blocks)
    assert sum(array.nbytes for array in plan) <= bound
    assert 0.8 * bound <= message_bytes(plan) <= bound + OVERHEAD


def decode(seq: Sequence) -> ScheduledSequence:
    return ScheduledSequence(seq, seq.num_tokens - 1, 1, True)


@pytest.mark.parametrize("num_seqs", [1, 64])
def test_the_length_of_a_prompt_does_not_show_in_a_decode(num_seqs: int) -> None:
    lengths = []
    for num_blocks in (1, 4096):
        scheduled = [decode(seq) for seq, *_ in worst_case(num_seqs, num_seqs, num_blocks)]
        mark_sent(scheduled)
        plan = plan_step(scheduled)
        assert plan.new_blocks.shape == (4, 0) and not len(plan.joined)
        lengths.append(message_bytes(plan))
    assert lengths[0] == lengths[1] < num_seqs * 32 + 2048


def test_a_plan_that_was_not_sent_is_planned_again_and_sending_twice_is_harmless() -> None:
    """A launch that failed is repeated, maybe after the ranks have heard of it."""
    scheduler = make_scheduler(20)
    for n in (9, 5, 1):
        scheduler.add(make_seq(n))
    scheduled = scheduler.schedule()
    table = SlotTable(9, 20)
    plans = [plan_step(scheduled), plan_step(scheduled)]
    for a, b in zip(*plans, strict=True):
        assert np.array_equal(a, b)
    assert plans[0].new_blocks.shape[1] == 3 + 2 + 1 and len(plans[0].joined) == 3
    table.update(plans[0])
    once = build_batch(plans[0], table, 4)
    table.update(plans[1])
    assert_equal(build_batch(plans[1], table, 4), once)
    mark_sent(scheduled)
    assert plan_step(scheduled).new_blocks.shape == (4, 0)


def test_a_slot_that_changes_hands_keeps_nothing_that_is_read() -> None:
    """The short successor of a long sequence sees its own blocks, temperature and key only."""
    table = SlotTable(1, 8)
    batches = []
    for blocks, temperature in (([7, 6, 5, 4], 1.0), ([2], 0.5)):
        seq = make_seq(len(blocks) * 4)
        seq.sampling_params = SamplingParams(temperature=temperature)
        seq.slot, seq.kv.table, seq.kv.version = 0, blocks, 1
        plan = plan_step([ScheduledSequence(seq, 0, len(seq), True)])
        table.update(plan)
        batches.append((seq, build_batch(plan, table, 4)))
    seq, batch = batches[1]
    assert batch.block_tables.tolist() == [[2]]
    assert batch.slot_mapping.tolist() == [8, 9, 10, 11]
    assert batch.facts["temperatures"].tolist() == [0.5]
    assert batch.facts["random_keys"].tolist() == [list(seq.random_key)]
    assert seq.random_key != batches[0][0].random_key
