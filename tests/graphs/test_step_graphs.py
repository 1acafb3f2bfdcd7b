"""Inputs of CUDA graphs, without CUDA: buckets, padded buffers, steps that have room."""

import json
import random
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from host import FakeModel, make_scheduler, make_seq

from checkpoints import SMALL, greedy, make_checkpoint, rare, reference, tokens
from nanovllm import LLM, RequestOutput, SamplingParams
from nanovllm.benchmark.shapes import SHAPES
from nanovllm.checkpoint.model_config import ModelConfig
from nanovllm.engine import step_layout
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.plan import FACTS, Batch, Fact, fact_dtype
from nanovllm.engine.step_inputs import Computed, to_device
from nanovllm.engine.step_layout import Array, divide, lay_out, num_words
from nanovllm.graphs import static_inputs
from nanovllm.graphs import step_graphs as graph_runner
from nanovllm.graphs.static_inputs import (
    NOTHING,
    PROMPTS,
    TOKENS,
    Shape,
    StaticInputs,
    max_captured_tokens,
)
from nanovllm.graphs.step_graphs import StepGraphs, bucket_sizes, coarse_sizes
from nanovllm.layers.attention import Attention
from nanovllm.scheduling import prefixes
from nanovllm.scheduling.prefixes import SharedPrefixes, max_tiles
from nanovllm.sizing.memory import RESERVE
from nanovllm.sizing.model_size import model_size
from nanovllm.startup import builder
from nanovllm.startup.builder import Builder
from nanovllm.tracing.step_timer import StepTimer
from nanovllm.utils import device
from nanovllm.utils.context import get_context
from nanovllm.windows.pages import ALL_LAYERS

B, W = 12, 10


def set_tokens(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    """Shapes have room for multiples of so many tokens of prompts."""
    for module in (graph_runner, static_inputs):
        monkeypatch.setattr(module, "TOKENS", tokens)


@pytest.mark.parametrize("max_num_seqs", [1, 2, 12, 16, 20, 100, 200, 500, 512])
def test_defect_3_every_batch_size_has_a_bucket(max_num_seqs):
    """`max_num_seqs` between two usual buckets ended in StopIteration."""
    sizes = bucket_sizes(max_num_seqs)
    assert sizes == sorted(set(sizes)) and sizes[-1] == max_num_seqs
    for n in range(1, max_num_seqs + 1):
        size = sizes[bisect_left(sizes, n)]
        assert n <= size < n + max(n, 16), "padding is bounded"
    coarse = coarse_sizes(max_num_seqs)
    assert coarse == sorted(set(coarse)) and (coarse[0], coarse[-1]) == (0, max_num_seqs)
    assert all(b - a <= 64 for a, b in pairwise(coarse))


def check_layout(parts: dict[str, np.ndarray], batch: Batch, shape: Shape) -> None:
    """Check a layout row by row against the definitions, and that nothing else is there."""
    n, D, count = batch.num_decodes, shape.decodes, len(batch.sample_rows)
    T, P = len(batch.input_ids) - n, len(batch.context_lens) - n
    rows = {i if i < n else i - n + D: i for i in range(n + T)}
    for name, padding in (("input_ids", 0), ("positions", 0), ("slot_mapping", -1)):
        values, part = getattr(batch, name), parts[name]
        assert part.tolist() == [
            values[rows[i]] if i in rows else padding for i in range(D + shape.tokens)
        ]
    rows = {i if i < n else i - n + D: i for i in range(n + P)}
    for i in range(D + shape.prompts):
        table = batch.block_tables[rows[i]].tolist() if i in rows else []
        assert parts["block_tables"][i].tolist() == [*table, *[0] * (W - len(table))], (
            "stale columns"
        )
        assert parts["context_lens"][i] == (batch.context_lens[rows[i]] if i in rows else 0)
        assert parts["slots"][i] == (batch.slots[rows[i]] if i in rows else 0)
    sample_rows = parts["sample_rows"]
    assert parts["input_ids"][sample_rows[:count]].tolist() == [
        batch.input_ids[row] for row in batch.sample_rows
    ]
    assert [row < D for row in sample_rows[:count]] == [i < n for i in range(count)]
    rest = len(sample_rows) - count
    assert parts["sample_slots"].tolist() == [*batch.slots, *[0] * rest]
    assert parts["sample_positions"].tolist() == [*batch.context_lens, *[0] * rest]
    temperatures, keys = parts["sample_temperatures"], parts["sample_random_keys"]
    assert temperatures[:count].view(np.float32).tolist() == batch.facts["temperatures"].tolist()
    assert keys[:, :count].view(np.uint32).T.tolist() == batch.facts["random_keys"].tolist()
    assert not temperatures[count:].any() and not sample_rows[count:].any()
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        values = getattr(batch, name).tolist()
        assert parts[name].tolist() == values + [values[-1]] * (shape.prompts - P)
    shared = batch.prefixes or [[]] * 4
    for name, values in zip(SharedPrefixes._fields, shared, strict=True):
        part = parts[f"prefix_{name}"]
        assert part.tolist() == [*values, *[0] * (len(part) - len(values))]


@pytest.mark.parametrize("seed", range(4))
def test_defect_10_nothing_of_the_batch_before_is_left(seed, monkeypatch):
    """Stale columns and padding rows read and wrote somebody else's blocks."""
    print(f"seed {seed}")
    rng, noise = random.Random(seed), np.random.default_rng(seed)
    set_tokens(monkeypatch, 8)
    scheduler = make_scheduler(60, max_num_seqs=B, max_num_batched_tokens=40, max_model_len=40)
    model, seen = FakeModel(scheduler), set()
    graphs = object.__new__(StepGraphs)  # its constructor captures
    graphs.sizes, graphs._coarse, graphs._max_prompt_tokens = bucket_sizes(B), [0, 3, 7, B], 32
    room = num_words(Shape(B, 32, True).size(W, B, 4))
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
        n = batch.num_decodes
        context = to_device(batch, torch.device("cpu")).context
        assert context.num_keys == sum(batch.context_lens[n:])
        if n and rng.random() < 0.5:
            lens = noise.integers(1, 99, (4, n), np.int32)
            batch = batch._replace(prefixes=SharedPrefixes(*lens[:2], *lens[2:, : n // 2]))
        if shape := graphs.shape_of(batch):
            buffer = noise.integers(-999, 999, room, np.int32)
            size = shape.size(W, B, 4)
            before, used = buffer.copy(), num_words(size)
            parts = divide(buffer, size)
            lay_out(parts, size, batch)
            check_layout(parts, batch, shape)
            assert used <= room and (buffer[used:] == before[used:]).all()
            assert all(part.ctypes.data % 16 == buffer.ctypes.data % 16 for part in parts.values())
            seen.add((n, len(batch.input_ids) - n, shape))
        scheduler.advance(scheduled)
        scheduler.postprocess(scheduled, drawn)
    alone = [n for n, num_tokens, _ in seen if not num_tokens]
    beside = [n for n, num_tokens, _ in seen if num_tokens]
    assert len(alone) > 5 and len(beside) > 5 and 0 in beside and max(beside) > 1
    assert any(n < shape.decodes for n, _, shape in seen)
    assert any(0 < num_tokens < shape.tokens for _, num_tokens, shape in seen)
    assert {shape.shares for *_, shape in seen} == {False, True}
    lay_out(parts, size, NOTHING)
    check_layout(parts, NOTHING, shape)


def test_what_no_graph_has_room_for():
    """A prompt in chunks, more tokens or prompts than there are shapes for."""
    graphs = object.__new__(StepGraphs)
    graphs.sizes, graphs._coarse, graphs._max_prompt_tokens = [1, 2, 4], [0, 4], 3 * TOKENS

    def shape_of(*lens: int, num_decodes: int = 0, samples: bool = True) -> Shape | None:
        counts = np.array(lens, np.int32)
        rows = np.cumsum(counts) - 1
        return graphs.shape_of(
            NOTHING._replace(
                num_decodes=num_decodes,
                input_ids=np.zeros(counts.sum(), np.int32),
                context_lens=counts,
                sample_rows=rows if samples else rows[:-1],
            )
        )

    assert shape_of(1, 1, 1, num_decodes=3) == Shape(4)
    assert shape_of(TOKENS) == shape_of(*[9] * PROMPTS) == Shape(0, TOKENS)
    assert shape_of(1, TOKENS + 1, num_decodes=1) == Shape(4, 2 * TOKENS)
    assert shape_of(1, *[9] * PROMPTS, num_decodes=1) == Shape(4, TOKENS)
    assert shape_of(*[9] * (PROMPTS + 1)) is shape_of(3 * TOKENS + 1) is None
    assert shape_of(9, samples=False) is None


@pytest.mark.parametrize("shape", [Shape(5), Shape(5, 0, True), Shape(5, 256), Shape(B, 128, True)])
def test_what_a_graph_reads_has_the_size_of_its_shape(shape):
    """Sizes that a graph keeps are the largest that may come, not those of its capture."""
    views = Unpinned(torch.device("cpu"), B, W, 4, 4 * TOKENS).view(shape)
    context, sampling = views.context, views.sampling
    rows, N = shape.decodes + shape.tokens, min(shape.decodes + shape.prompts, B)
    assert len(views.input_ids) == len(views.positions) == len(context.slot_mapping) == rows
    assert len(context.context_lens) == shape.decodes + shape.prompts
    assert context.block_tables.shape == (shape.decodes + shape.prompts, W)
    assert len(context.slots) == shape.decodes + shape.prompts
    assert context.num_decodes == shape.decodes
    assert len(sampling.slots) == len(sampling.temperatures) == len(sampling.positions) == N
    assert sampling.random_keys.shape == (2, N)
    assert (context.prefixes is not None) == shape.shares
    if context.prefixes is not None:
        assert len(context.prefixes.lens) == shape.decodes
        assert len(context.prefixes.ends) == max_tiles(shape.decodes, 4) < shape.decodes
    assert context.is_prefill == (shape.tokens > 0) and context.num_keys == 0
    assert context.kept_rows is views.sample_rows
    if shape.tokens:
        assert len(views.sample_rows) == N
        assert context.max_seqlen_q == shape.tokens, "a prompt may have all of them"
        assert len(context.cu_seqlens_q) == len(context.cu_seqlens_k) == PROMPTS + 1
    else:
        assert views.sample_rows is None


def test_a_twin_is_filled_when_its_last_copy_is_done():
    inputs, calls = Unpinned(torch.device("cpu"), B, W, 0, 0), []
    for name, event in zip("ab", inputs._copied, strict=True):
        event.synchronize.side_effect = lambda name=name: calls.append(f"wait {name}")
        event.record.side_effect = lambda name=name: calls.append(f"copy {name}")
    for _ in range(3):
        inputs.fill(NOTHING, Shape(2))
    assert calls == ["wait b", "copy b", "wait a", "copy a", "wait b", "copy b"]


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
        kinds.append((batch.samples.tolist(), batch.all_sample))
        drawn = model.run(scheduled)
        scheduler.advance(scheduled)
        scheduler.postprocess(scheduled, drawn)
    assert kinds == [([True, False], False)] * 3 + [([True, True], True)] * 2


class Replayed:
    """A graph without CUDA: computes from its inputs when it is replayed."""

    def __init__(self, compute: Callable[[], Computed]) -> None:
        self.compute, self.count = compute, 0

    def replay(self) -> None:
        self.computed = self.compute()
        self.count += 1

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.computed)


class Unpinned(StaticInputs):
    """Full of numbers that mean nothing."""

    def __init__(
        self,
        device: torch.device,
        max_num_seqs: int,
        width: int,
        members: int,
        most: int,
        windowed: bool = False,
    ) -> None:
        self._room, self._turn = (width, max_num_seqs, members, windowed), 0
        words = num_words(self.size(Shape(max_num_seqs, most, members > 0)))
        self._device, *self._twins = torch.full((3, words), 7, dtype=torch.int32)
        self._copied, self._rooms = [Mock(), Mock()], {}


class OnCpu(StepGraphs):
    """Graphs on a CPU, `Replayed` with `Unpinned` inputs; `steps` are the requested ones."""

    def __init__(
        self,
        runner: ModelRunner,
        most: int,
        monkeypatch: pytest.MonkeyPatch,
        spare: int = 0,
        members: int = 0,
    ) -> None:
        self.steps: list[tuple[bool, Shape | None]] = []
        monkeypatch.setattr(graph_runner, "StaticInputs", Unpinned)
        sizes = runner.config.max_num_seqs, 8
        with torch.inference_mode():
            built = runner.built
            super().__init__(
                built.step.run_model,
                built.device,
                *sizes,
                members,
                most,
                spare,
                windowed=len(built.pool.kinds) > 1,
            )

    def _capture(self, shape: Shape) -> None:
        graph = Replayed(lambda: self._compute(self._inputs.view(shape)))
        self._graphs[shape] = graph, graph

    @property
    def replayed(self) -> list[Shape]:
        """Shapes of the replayed steps with prompts."""
        return [shape for shape, (graph, _) in self._graphs.items() if shape.tokens and graph.count]

    def replay(self, batch: Batch, timer: StepTimer | None = None) -> Computed | None:
        self.steps.append((batch.num_decodes == len(batch.input_ids), self.shape_of(batch)))
        return super().replay(batch, timer)


@pytest.mark.parametrize("max_prompt_tokens", [0, 24], ids=["decodes", "prompts"])
@pytest.mark.parametrize("overlap", [False, True], ids=["synchronous", "overlap"])
@pytest.mark.parametrize(
    ("budget", "family"), [(3, "qwen3"), (64, "qwen3"), rare(3, "exaone4"), (64, "exaone4")]
)
def test_padded_steps_are_right(
    budget, family, overlap, max_prompt_tokens, checkpoint, tmp_path, monkeypatch
):
    """Also beside chunks of one token, which fill the budget and take the other path."""
    set_tokens(monkeypatch, 8)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (RESERVE, 0))
    prompts = [[9, 8, 7], list(range(20)), [5] * 6, [1, 2], [40, 3, 77, 21], list(range(70, 90))]
    prompts, lengths = 2 * prompts, [18, 9, 25, 1, 12, 7, 3, 8, 2, 11, 5, 4]
    if family == "exaone4":  # half of its layers slide over 20 tokens
        checkpoint = make_checkpoint(
            tmp_path / "model", family, sliding_window=20, sliding_window_pattern=2
        )
    options = {**SMALL, "max_num_seqs": 3, "max_num_batched_tokens": budget, "overlap": overlap}
    with LLM(checkpoint, **options) as llm:
        assert len(llm.model_runner.built.pool.kinds) == 1 + (family == "exaone4")
        llm.model_runner.graphs = graphs = OnCpu(llm.model_runner, max_prompt_tokens, monkeypatch)
        outputs = llm.generate(prompts, [greedy(n) for n in lengths], use_tqdm=False)
        assert llm.metrics()["num_graph_replays"] > 5
    assert any(all_single and not shape for all_single, shape in graphs.steps) == (budget == 3)
    beside = {shape for _, shape in graphs.steps if shape and shape.tokens}
    if budget == 64:
        assert bool(graphs.replayed) == (max_prompt_tokens > 0)
        often = Counter(shape for _, shape in graphs.steps if shape in beside)
        captured = {shape for shape in graphs.captured if shape.tokens}
        assert captured == {shape for shape in often if often[shape] > 1}, "when it comes again"
        assert any(shape.decodes for shape in beside) == (max_prompt_tokens > 0)
    assert tokens(outputs) == [
        reference(checkpoint, p, n) for p, n in zip(prompts, lengths, strict=True)
    ]


def forget_layouts() -> None:
    """Facts are others than before."""
    step_layout.places.cache_clear()
    fact_dtype.cache_clear()


@pytest.mark.parametrize("fact", [Fact(np.int64, id), Fact((np.int32, (3, 2)), id)], ids=str)
def test_a_fact_of_another_form_is_refused(fact):
    with pytest.raises(AssertionError, match="is not a row of words"):
        Array.of_fact(fact)


@pytest.mark.parametrize("max_prompt_tokens", [0, 24], ids=["decodes", "prompts"])
def test_a_fact_of_sequences_is_declared_once(max_prompt_tokens, checkpoint, monkeypatch, request):
    """And is in the context of every step, with graphs and without, in the order of its rows."""
    facts = {
        "sevenfold": Fact(np.int32, lambda seq: 7 * seq.slot),
        "pair": Fact((np.float32, 2), lambda seq: (seq.slot, seq.slot + 0.5)),
        "of_tokens": Fact(np.int32, lambda seq: 3 * seq.slot, "tokens"),
    }
    for name, fact in facts.items():
        monkeypatch.setitem(FACTS, name, fact)
        monkeypatch.setitem(step_layout.LAYOUT, name, Array.of_fact(fact))
    forget_layouts()
    request.addfinalizer(forget_layouts)
    nothing = NOTHING._replace(facts=np.zeros(0, fact_dtype()))
    monkeypatch.setattr(graph_runner, "NOTHING", nothing)
    set_tokens(monkeypatch, 8)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (RESERVE, 0))
    forward, kinds = Attention.forward, set()

    def checked(layer: Attention, positions: torch.Tensor, qkv: torch.Tensor) -> torch.Tensor:
        context = get_context()
        real = context.context_lens > 0
        slots = context.slots[real]
        assert torch.equal(context.facts["sevenfold"][real], 7 * slots)
        assert torch.equal(context.facts["pair"][:, real], torch.stack([slots, slots + 0.5]))
        assert len(slots.unique()) == len(slots)
        of_tokens, n = context.facts["of_tokens"], context.num_decodes
        assert torch.equal(of_tokens[:n][real[:n]], 3 * context.slots[:n][real[:n]])
        if context.is_prefill:
            lens = context.cu_seqlens_q.diff()
            prompts = (3 * context.slots[n:]).repeat_interleave(lens)
            assert torch.equal(of_tokens[n : n + len(prompts)], prompts)
        kinds.add((context.num_decodes > 0, context.is_prefill, bool((~real).any())))
        return forward(layer, positions, qkv)

    monkeypatch.setattr(Attention, "forward", checked)
    prompts = [[i, *range(n)] for i, n in enumerate([3, 20, 6, 2, 5, 9, 12, 4])]
    lengths = [18, 9, 25, 1, 12, 7, 3, 8]
    with LLM(checkpoint, **{**SMALL, "max_num_seqs": 3}) as llm:
        llm.model_runner.graphs = graphs = OnCpu(llm.model_runner, max_prompt_tokens, monkeypatch)
        outputs = llm.generate(prompts, [greedy(n) for n in lengths], use_tqdm=False)
    assert {(True, False), (True, True)} <= {kind[:2] for kind in kinds}
    assert any(is_padded for *_, is_padded in kinds)
    assert graphs.num_replays > 5 and bool(graphs.replayed) == (max_prompt_tokens > 0)
    assert tokens(outputs) == [
        reference(checkpoint, p, n) for p, n in zip(prompts, lengths, strict=True)
    ]


def test_without_memory_for_more_graphs_steps_are_launched_one_by_one(
    checkpoint, monkeypatch, caplog
):
    """The memory for larger steps stays free."""
    set_tokens(monkeypatch, 8)
    prompts = [[i, 9, 8, 7] for i in range(3)]
    options = {**SMALL, "max_num_seqs": 1, "enable_prefix_caching": False}
    enough, too_little = (1000 + RESERVE, 0), (999 + RESERVE, 0)
    free = Mock(side_effect=[enough, enough, too_little])
    monkeypatch.setattr(torch.cuda, "mem_get_info", free)
    with LLM(checkpoint, **options) as llm:
        llm.model_runner.graphs = graphs = OnCpu(llm.model_runner, 24, monkeypatch, spare=1000)
        for length in (4, 9, 17):  # three shapes, each more than once
            wanted = [[*prompt, *range(30)][:length] for prompt in prompts]
            outputs = llm.generate(wanted, [greedy(2)] * 3, use_tqdm=False)
            assert tokens(outputs) == [reference(checkpoint, p, 2) for p in wanted]
        assert [shape.tokens for shape in graphs.captured if shape.tokens] == [8]
    assert free.call_count == 3, "nobody asks again"
    assert caplog.text.count("too little memory for more CUDA graphs") == 1


def test_a_capture_that_fails_is_not_repeated(checkpoint, monkeypatch):
    """And a step that failed before it was computed is not captured."""
    set_tokens(monkeypatch, 8)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (RESERVE, 0))
    prompts = [[i, 9, 8, 7] for i in range(4)]
    options = {**SMALL, "max_num_seqs": 1, "enable_prefix_caching": False}
    with LLM(checkpoint, **options) as llm:
        llm.model_runner.graphs = graphs = OnCpu(llm.model_runner, 24, monkeypatch)
        compute, capture = graphs._compute, Mock(side_effect=RuntimeError("capture"))
        monkeypatch.setattr(graphs, "_capture", capture)
        graphs._compute = Mock(side_effect=RuntimeError("compute"))
        with pytest.raises(RuntimeError, match="compute"):
            llm.generate(prompts[:1], greedy(2), use_tqdm=False)
        graphs._compute = compute
        llm.generate(prompts[:1], greedy(2), use_tqdm=False)
        assert not capture.called
        with pytest.raises(RuntimeError, match="capture"):
            llm.generate(prompts[1:2], greedy(2), use_tqdm=False)
        outputs = llm.generate(prompts, [greedy(2)] * 4, use_tqdm=False)
    assert capture.call_count == 1
    assert tokens(outputs) == [reference(checkpoint, p, 2) for p in prompts]


ONE = np.zeros(1, np.int32)


@pytest.mark.parametrize(
    ("shape", "is_new", "before"),
    [
        (Shape(2), False, []),
        (Shape(2, 0, True), True, ["fill", "prepare", "capture"]),
        (Shape(0, TOKENS), True, None),
        (Shape(0, TOKENS), False, []),
    ],
    ids=["decodes", "new, with a shared prefix", "new, with a prompt", "with a prompt"],
)
def test_a_new_shape_of_decodes_has_its_graph_at_once(shape, is_new, before):
    """And a timer is told before the device begins with what is asked for."""
    graphs, calls = object.__new__(StepGraphs), []
    computed = Computed(*torch.zeros(4, 2))
    graph = Mock(replay=lambda: calls.append("replay")), computed
    graphs.sizes, graphs._coarse, graphs._max_prompt_tokens = [2], [0], TOKENS
    graphs._seen, graphs.num_replays, graphs._has_room = set(), 0, lambda _: True
    graphs._num_padded = Counter()
    graphs._graphs = {} if is_new else {shape: graph}
    graphs._inputs = Mock(fill=lambda *_: calls.append("fill"))
    graphs._prepare = lambda _: calls.append("prepare")
    graphs._compute = lambda _: calls.append("compute") or computed

    def capture(shape: Shape) -> None:
        calls.append("capture")
        graphs._graphs[shape] = graph

    graphs._capture = capture
    batch = NOTHING._replace(
        num_decodes=int(not shape.tokens), input_ids=ONE, context_lens=ONE, sample_rows=ONE
    )
    if shape.shares:
        batch = batch._replace(prefixes=SharedPrefixes(ONE, ONE, ONE, ONE))
    timer = Mock(begin=lambda: calls.append("begin"))
    assert [len(part) for part in graphs.replay(batch, timer)] == [1, 1, 1, 1]
    if before is None:
        assert calls == ["fill", "begin", "compute"] and not graphs.captured
        calls.clear()
        graphs.replay(batch, timer)
        before = ["capture"]  # many come once
    assert calls == [*before, "fill", "begin", "replay"]
    assert graphs.num_replays == 1


def test_a_size_that_comes_and_goes_takes_a_larger_graph(monkeypatch):
    """Decodes that share prefixes: one of up to four times their number, and of the same kind."""
    monkeypatch.setattr(graph_runner, "PATIENCE", 3)
    graphs = object.__new__(StepGraphs)
    graphs._num_padded = Counter()
    graphs._graphs = dict.fromkeys(
        [Shape(32), Shape(96, 0, True), Shape(64, 0, True), Shape(48, TOKENS, True)]
    )
    assert graphs._larger(Shape(32)) == Shape(32)
    assert graphs._larger(Shape(16, TOKENS, True)) == Shape(16, TOKENS, True)
    assert graphs._larger(Shape(8, 0, True)) == Shape(8, 0, True), "64 is too large"
    turns = [graphs._larger(Shape(48, 0, True)).decodes for _ in range(5)]
    assert turns == [64, 64, 64, 48, 48]
    assert graphs._larger(Shape(32, 0, True)) == Shape(64, 0, True), "each for itself"


def test_shared_prefixes_in_padded_graphs_are_right(checkpoint, monkeypatch):
    """Full groups, and smaller ones as some end, by a larger graph and then by their own. (A
    CPU reads each prefix by itself, from the same tables.)
    """
    monkeypatch.setattr(graph_runner, "PATIENCE", 2)
    monkeypatch.setattr(prefixes, "MIN_SAVED", 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (RESERVE, 0))
    shared = [*range(40)]
    prompts, lengths = [[*shared, 50 + i] for i in range(40)], [4 + i % 9 for i in range(40)]
    options = {**SMALL, "max_num_seqs": 48, "num_kvcache_blocks": 256, "overlap": False}
    with LLM(checkpoint, **options) as llm:
        runner = llm.model_runner
        runner.built = replace(runner.built, members=8)
        runner.graphs = graphs = OnCpu(runner, 0, monkeypatch, members=8)
        llm.generate([shared], greedy(1), use_tqdm=False)
        outputs = llm.generate(prompts, [greedy(n) for n in lengths], use_tqdm=False)
        assert llm.metrics()["num_shared_prefix_steps"] > 5
    wanted = {shape for _, shape in graphs.steps if shape and shape.shares}
    own = {shape for shape in graphs.captured if shape.shares}
    assert len(wanted) > len(own) > 1 and own < wanted, "one is not worth its graph, another is"
    assert tokens(outputs) == [
        reference(checkpoint, p, n) for p, n in zip(prompts, lengths, strict=True)
    ]


def all_logprobs(output: RequestOutput) -> list[dict[int, Any]]:
    """Log-probabilities of the prompt and of the completion, as requested."""
    rows = [*(output.prompt_logprobs or ()), *(output.outputs[0].logprobs or ())]
    return [row or {} for row in rows]


@pytest.mark.parametrize(("budget", "overlap"), [(64, True), rare(7, True), rare(64, False)])
def test_controls_and_other_wishes_beside_padding(budget, overlap, checkpoint, monkeypatch):
    """Seeds, penalties, log-probabilities, those of prompts, embeddings, cached beginnings."""
    rng = random.Random(5)
    print("seed 5")
    prompts = [[rng.randrange(90) for _ in range(rng.choice([1, 5, 8, 9, 24]))] for _ in range(20)]
    prompts += [[3] * 16 + prompt for prompt in prompts[:12]]
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.9, "max_tokens": 7},
        {"temperature": 0.8, "max_tokens": 5, "logprobs": 3, "top_k": 7, "repetition_penalty": 1.3},
        {"temperature": 0, "max_tokens": 4, "prompt_logprobs": 2},
        {"temperature": 1.0, "max_tokens": 6, "top_p": 0.7, "presence_penalty": 0.5},
    ]
    params = [
        SamplingParams(seed=i, ignore_eos=True, **kinds[i % len(kinds)])
        for i in range(len(prompts))
    ]
    set_tokens(monkeypatch, 8)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (RESERVE, 0))
    found = []
    options = {**SMALL, "max_num_seqs": 5, "max_num_batched_tokens": budget, "overlap": overlap}
    for padded in (False, True):
        with LLM(checkpoint, **options) as llm:
            if padded:
                llm.model_runner.graphs = graphs = OnCpu(llm.model_runner, 40, monkeypatch)
            outputs = llm.generate(prompts, params, use_tqdm=False)
            vectors = [output.outputs.embedding for output in llm.embed(prompts, use_tqdm=False)]
        found.append((outputs, vectors))
    assert graphs.replayed
    (plain, plain_vectors), (other, other_vectors) = found
    np.testing.assert_allclose(plain_vectors, other_vectors, atol=1e-4)
    for one, two in zip(plain, other, strict=True):
        assert one["token_ids"] == two["token_ids"]
        for a, b in zip(all_logprobs(one), all_logprobs(two), strict=True):
            assert a.keys() == b.keys()
            assert all(abs(a[key].logprob - b[key].logprob) < 1e-3 for key in a)


@pytest.mark.parametrize(
    ("captures", "num_ranks", "budget", "most"),
    [(True, 1, 16384, 640), (True, 1, 300, 300), (False, 1, 16384, 0), (True, 2, 16384, 0)],
)
def test_steps_with_prompts_have_graphs_on_one_rank_by_backends_that_can(
    captures, num_ranks, budget, most, tmp_path, monkeypatch
):
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["qwen3-8b"]))
    own, made, step = object.__new__(Builder), Mock(), Mock()
    monkeypatch.setattr(builder, "StepGraphs", made)
    monkeypatch.setattr(builder, "capability", lambda index: (9, 0))
    own.config = Mock(max_num_seqs=4, max_num_batched_tokens=budget)
    own.model_config = ModelConfig.from_pretrained(str(tmp_path))
    own.group, own.device = Mock(size=num_ranks), torch.device("cuda")
    found = own.max_prompt_tokens(Mock(backend=Mock(captures_prompts=captures)))
    own.capture_cudagraph(step, Mock(kinds=ALL_LAYERS, max_num_seqs=4), 7, 2, found, 99)
    assert made.call_args.args == (step.run_model, own.device, 4, 7, 2, most, 99)


def test_graphs_are_for_steps_that_the_host_launches_slower_than_the_device_computes(tmp_path):
    """Many tokens of small models and of a mixture, few of large ones. 640 of the 8B shape, a layer
    of which has 193 million numbers, are 0.4 ms of 600 TFLOP/s.
    """
    most = {}
    for name in ("qwen3-0.6b", "qwen3-8b", "qwen3-30b-a3b"):
        (tmp_path / "config.json").write_text(json.dumps(SHAPES[name]))
        config = ModelConfig.from_pretrained(str(tmp_path))
        most[name] = max_captured_tokens(model_size(config).of_token / len(config.layers), (9, 0))
    assert most == {"qwen3-0.6b": 2048, "qwen3-8b": 640, "qwen3-30b-a3b": 2048}
    assert (
        max_captured_tokens(5e8, (10, 0)) == 2 * TOKENS and max_captured_tokens(1e10, (9, 0)) == 0
    )
    assert max_captured_tokens(6e7, (8, 0)) == 4 * TOKENS, "a slower device"


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
