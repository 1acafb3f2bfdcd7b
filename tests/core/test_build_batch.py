"""`plan_step` and `build_batch` against a slow oracle, and the shapes of the warm-up batch."""

import random

import numpy as np
import pytest
from host import FakeModel, make_scheduler, make_seq

from nanovllm.engine.plan import Batch
from nanovllm.engine.sequence import ScheduledSequence
from nanovllm.sizing.activations import warmup_batch


def check(batch: Batch, scheduled: list[ScheduledSequence], block_size: int) -> None:
    """Compare with the definitions, one token at a time."""
    ids, positions, slots, sample_rows, cu_q, cu_k = [], [], [], [], [0], [0]
    num_decodes = 0
    while num_decodes < len(scheduled) and scheduled[num_decodes].num_tokens == 1:
        num_decodes += 1
    for i, (seq, start, count, samples, _) in enumerate(scheduled):
        for position in range(start, start + count):
            ids.append(seq.token_ids[position])
            positions.append(position)
            block = seq.block_table[position // block_size]
            slots.append(block * block_size + position % block_size)
            if position == seq.num_tokens - 1:
                assert samples
                sample_rows.append(len(ids) - 1)
        if i >= num_decodes:
            cu_q.append(cu_q[-1] + count)
            cu_k.append(cu_k[-1] + start + count)
    used = [-(-(item.start + item.num_tokens) // block_size) for item in scheduled]
    assert batch.num_decodes == num_decodes
    assert batch.all_sample == (len(scheduled) == len(sample_rows))
    assert batch.input_ids.tolist() == ids
    assert batch.positions.tolist() == positions
    assert batch.slot_mapping.tolist() == slots
    assert not batch.window_slot_mapping.size and not batch.window_tables.size
    assert batch.context_lens.tolist() == [item.start + item.num_tokens for item in scheduled]
    assert batch.block_tables.tolist() == [
        item.seq.block_table[:n] + [0] * (max(used) - n)
        for item, n in zip(scheduled, used, strict=True)
    ]
    assert (batch.cu_seqlens_q.tolist(), batch.cu_seqlens_k.tolist()) == (cu_q, cu_k)
    assert batch.sample_rows.tolist() == sample_rows
    assert len(sample_rows) == sum(item.samples for item in scheduled)
    assert batch.samples.tolist() == [item.samples for item in scheduled]
    assert batch.slots.tolist() == [seq.slot for seq, *_ in scheduled]
    rows = [i for i, item in enumerate(scheduled) for _ in range(item.num_tokens)]
    assert batch.token_rows.tolist() == rows
    temperatures = [seq.sampling_params.temperature for seq, *_ in scheduled]
    assert batch.facts["temperatures"].tolist() == temperatures
    keys = [seq.random_key for seq, *_ in scheduled]
    assert batch.facts["random_keys"].tolist() == [list(key) for key in keys]
    others = ("samples", "facts", "num_decodes", "prefixes", "images")
    assert batch.prefixes is None and batch.images is None
    assert all(x.dtype == np.int32 for k, x in batch._asdict().items() if k not in others)
    assert len(set(slots)) == len(slots), "two tokens in one slot"


@pytest.mark.parametrize("seed", range(6))
def test_batches_of_random_steps_agree_with_the_definitions(seed):
    print(f"seed {seed}")
    rng = random.Random(seed)
    block_size = rng.choice([1, 3, 4, 16])
    scheduler = make_scheduler(
        -(-120 // block_size), block_size, max_num_seqs=7, max_num_batched_tokens=rng.randint(7, 20)
    )
    model, kinds = FakeModel(scheduler), set()
    for _ in range(150):
        if rng.random() < 0.3:
            prompt = [1, 2, 3, 4] * rng.randint(0, 3) + [rng.randint(5, 9)] * rng.randint(1, 20)
            scheduler.add(make_seq(prompt, max_tokens=rng.randint(1, 12), block_size=block_size))
        if scheduled := scheduler.schedule():
            batch = model.lay_out(scheduled)
            check(batch, scheduled, block_size)
            kinds.add((batch.num_decodes > 0, len(batch.cu_seqlens_q) > 1))
            tokens = model.run(scheduled)
            scheduler.advance(scheduled)
            scheduler.postprocess(scheduled, tokens)
    assert {(True, False), (True, True), (False, True)} <= kinds, "all kinds of steps"


def test_a_chunk_of_one_token_among_prefills():
    """It stands after a longer chunk, so it belongs to the prefills; it may not sample."""
    scheduler = make_scheduler(10, max_num_batched_tokens=8)
    scheduler.add(make_seq(7))
    scheduler.add(make_seq(5))
    scheduled = scheduler.schedule()
    assert [item.num_tokens for item in scheduled] == [7, 1]
    batch = FakeModel(scheduler).lay_out(scheduled)
    check(batch, scheduled, 4)
    assert batch.cu_seqlens_q.tolist() == [0, 7, 8]
    assert batch.sample_rows.tolist() == [6]


def test_batch_in_which_nothing_samples():
    scheduler = make_scheduler(max_num_batched_tokens=8)
    scheduler.add(make_seq(12))
    scheduled = scheduler.schedule()
    batch = FakeModel(scheduler).lay_out(scheduled)
    check(batch, scheduled, 4)
    assert batch.sample_rows.shape == (0,)


@pytest.mark.parametrize(
    ("num_seqs", "num_tokens", "max_model_len", "lens"),
    [
        (4, 16, 100, [4, 4, 4, 4]),
        (3, 17, 100, [6, 6, 5]),
        (4, 4, 100, [1, 1, 1, 1]),
        (2, 64, 10, [10, 10]),
        (1, 9, 9, [9]),
    ],
)
def test_warmup_batch(num_seqs, num_tokens, max_model_len, lens):
    """As many tokens as a step may have, spread evenly; nothing is stored."""
    batch = warmup_batch(num_seqs, num_tokens, max_model_len, 4)
    assert batch.num_decodes == 0 and batch.all_sample
    assert batch.context_lens.tolist() == lens
    assert batch.input_ids.shape == batch.positions.shape == (sum(lens),)
    assert batch.positions.tolist() == [i for n in lens for i in range(n)]
    assert (batch.slot_mapping == -1).all() and batch.slot_mapping.shape == (sum(lens),)
    assert batch.block_tables.shape == (num_seqs, -(-max(lens) // 4))
    assert not batch.block_tables.any()
    assert np.diff(batch.cu_seqlens_q).tolist() == np.diff(batch.cu_seqlens_k).tolist() == lens
    assert batch.sample_rows.tolist() == (np.cumsum(lens) - 1).tolist()
    assert batch.samples.all()
    assert len(batch.facts) == len(batch.slots) == num_seqs
