"""What CUDA graphs are given, without CUDA: buckets, padded buffers, and decode batches only."""

import random
from bisect import bisect_left
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from host import FakeModel, make_scheduler, make_seq

from checkpoints import SMALL, checkpoint_fixture, greedy, reference, tokens  # noqa: F401
from nanovllm import LLM, SamplingParams
from nanovllm.engine import model_runner
from nanovllm.engine.graph_runner import NUM_ROWS, StaticInputs, bucket_sizes, lay_out
from nanovllm.engine.plan import Batch, build_batch
from nanovllm.engine.prefixes import SharedPrefixes
from nanovllm.engine.step_inputs import Computed, to_device
from nanovllm.engine.step_timer import StepTimer
from nanovllm.utils import device

B = 12


@pytest.mark.parametrize("max_num_seqs", [1, 2, 12, 16, 20, 100, 200, 500, 512])
def test_defect_3_every_batch_size_has_a_bucket(max_num_seqs):
    """`max_num_seqs` between two usual buckets ended in StopIteration."""
    sizes = bucket_sizes(max_num_seqs)
    assert sizes == sorted(set(sizes)) and sizes[-1] == max_num_seqs
    for n in range(1, max_num_seqs + 1):
        size = sizes[bisect_left(sizes, n)]
        assert n <= size < n + max(n, 16), "padding is bounded"


def check_layout(rows, tables, before, batch: Batch, size: int) -> None:
    n, width = batch.block_tables.shape
    wanted = [batch.input_ids, batch.positions, batch.slot_mapping, batch.context_lens, batch.slots]
    assert [row[:n].tolist() for row in rows[:5]] == [value.tolist() for value in wanted]
    assert rows[5, :n].view(np.float32).tolist() == batch.temperatures.tolist()
    assert rows[6:8, :n].tolist() == batch.random_keys.tolist()
    for row, value in zip(rows[8:], batch.prefixes or [[]] * 4, strict=True):
        assert row[:size].tolist() == [*value, *[0] * (size - len(value))]
    assert (tables[:n, :width] == batch.block_tables).all()
    assert not tables[:n, width:].any(), "stale columns"
    assert rows[:8, n:size].T.tolist() == [[0, 0, -1, 0, B, 0, 0, 0]] * (size - n)
    assert not tables[n:size].any(), "stale tables of padding"
    assert (rows[:, size:] == before[0][:, size:]).all() and (
        tables[size:] == before[1][size:]
    ).all()


@pytest.mark.parametrize("seed", range(4))
def test_defect_10_nothing_of_the_batch_before_is_left(seed):
    """Stale columns and padding rows read and wrote somebody else's blocks."""
    print(f"seed {seed}")
    rng, noise = random.Random(seed), np.random.default_rng(seed)
    scheduler = make_scheduler(60, max_num_seqs=B, max_num_batched_tokens=40, max_model_len=40)
    model, sizes, seen = FakeModel(scheduler), bucket_sizes(B), set()
    rows, tables = (
        noise.integers(-999, 999, (n, w), np.int32) for n, w in ((NUM_ROWS, B), (B, 10))
    )
    for _ in range(200):
        if rng.random() < 0.15:
            for _ in range(rng.randint(1, 8)):
                seq = make_seq(rng.randint(1, 20))
                length, temperature = rng.randint(1, 20), rng.choice([0, 0.7])
                seq.sampling_params = SamplingParams(temperature, length, ignore_eos=True)
                seq.random_key = (rng.getrandbits(32), rng.getrandbits(32))
                scheduler.add(seq)
        if not (scheduled := scheduler.schedule()):
            continue
        batch, drawn = model.lay_out(scheduled), model.run(scheduled)
        if batch.is_decode:
            n, before = len(scheduled), (rows.copy(), tables.copy())
            size = sizes[bisect_left(sizes, n)]
            if rng.random() < 0.5:
                lens = noise.integers(1, 99, (4, n), np.int32)
                batch = batch._replace(prefixes=SharedPrefixes(*lens[:2], *lens[2:, : n // 2]))
            lay_out(rows, tables, batch, size)
            check_layout(rows, tables, before, batch, size)
            seen.add((n, size))
        scheduler.advance(scheduled)
        scheduler.postprocess(scheduled, drawn)
    assert len(seen) > 5 and any(n < size for n, size in seen) and any(size < B for _, size in seen)
    lay_out(rows, tables, None, 8)
    nothing = [0, 0, -1, 0, B, *[0] * 7]
    assert rows[:, :8].T.tolist() == [nothing] * 8 and not tables[:8].any()


def test_a_chunk_of_one_token_that_does_not_sample_is_no_decode():
    """With a budget of max_num_seqs such steps went to a graph, which sampled for every row."""
    scheduler = make_scheduler(10, max_num_seqs=2, max_num_batched_tokens=2)
    model, kinds = FakeModel(scheduler), []
    for n in (1, 4):
        scheduler.add(make_seq(n))
    for _ in range(5):
        scheduled = scheduler.schedule()
        batch = model.lay_out(scheduled)
        assert len(batch.input_ids) == batch.num_decodes == 2
        kinds.append((batch.samples.tolist(), batch.is_decode))
        drawn = model.run(scheduled)
        scheduler.advance(scheduled)
        scheduler.postprocess(scheduled, drawn)
    assert kinds == [([True, False], False)] * 3 + [([True, True], True)] * 2


class StandIn:
    """`DecodeGraphs` by its contract: it knows decode batches only, and pads them if `padded`."""

    def __init__(self, runner: model_runner.ModelRunner, padded: bool) -> None:
        self.runner, self.padded, self.num_replays = runner, padded, 0
        self.sizes = bucket_sizes(runner.config.max_num_seqs)
        self.inputs = inputs = object.__new__(StaticInputs)  # its constructor pins memory
        inputs._B, inputs._W = runner.config.max_num_seqs, 8
        inputs._device = torch.full((inputs._B * (NUM_ROWS + inputs._W),), 7, dtype=torch.int32)

    def replay(self, batch: Batch, timer: StepTimer | None = None) -> Computed:
        assert batch.is_decode, "this step is not for a graph"
        self.num_replays += 1
        if not self.padded:
            return self.runner.run_model(to_device(batch, self.runner.device))
        n = len(batch.input_ids)
        size = self.sizes[bisect_left(self.sizes, n)]
        lay_out(*self.inputs._split(self.inputs._device.numpy()), batch, size)
        return Computed(*(part[:n] for part in self.runner.run_model(self.inputs.views(size))))


@pytest.mark.parametrize("padded", [False, True], ids=["exact", "padded"])
@pytest.mark.parametrize("overlap", [False, True], ids=["synchronous", "overlap"])
@pytest.mark.parametrize("budget", [3, 64])
def test_graphs_see_decode_steps_only(budget, overlap, padded, checkpoint, monkeypatch):
    """Chunks of one token, which fill the budget beside decodes, must take the other path."""
    prompts = [[9, 8, 7], list(range(20)), [5] * 6, [1, 2], [40, 3, 77, 21], list(range(70, 90))]
    lengths, chunks_of_one = [18, 9, 25, 1, 12, 7], []

    def build(*args):
        batch = build_batch(*args)
        all_single = batch.num_decodes == len(batch.context_lens)
        chunks_of_one.append(all_single and not batch.is_decode)
        return batch

    monkeypatch.setattr(model_runner, "build_batch", build)
    options = {**SMALL, "max_num_seqs": 3, "max_num_batched_tokens": budget, "overlap": overlap}
    with LLM(checkpoint, **options) as llm:
        llm.model_runner.graphs = StandIn(llm.model_runner, padded)
        outputs = llm.generate(prompts, [greedy(n) for n in lengths], use_tqdm=False)
        assert llm.metrics()["num_graph_replays"] > 5
    assert any(chunks_of_one) == (budget == 3)
    assert tokens(outputs) == [
        reference(checkpoint, p, n) for p, n in zip(prompts, lengths, strict=True)
    ]


def test_nobody_waits_for_a_device_while_a_graph_is_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CUDA refuses it, also to other threads: building two engines at once failed now and then."""
    free: list[bool] = []

    def synchronize(_: torch.device) -> None:
        with ThreadPoolExecutor(1) as pool:
            free.append(pool.submit(device.capturing.acquire, blocking=False).result())

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    device.wait_for_device(torch.device("cuda"))
    assert free == [False]
