"""Controls of requests, and which of them act in a step: what the host tells rank 0."""

import dataclasses
import itertools
import random
from collections import Counter
from collections.abc import Collection
from typing import Any

import numpy as np
import pytest
from host import EOS, VOCAB_SIZE, FakeModel, make_scheduler, reference
from invariants import check_scheduler
from numpy.typing import NDArray

from checkpoints import rare
from nanovllm import SamplingParams
from nanovllm.engine.plan import FACTS, mark_sent, plan_step
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import PENDING, ScheduledSequence, Sent, Sequence, SequenceStatus
from nanovllm.requests.inputs import bad_word_tokens
from nanovllm.sampling.control_table import ControlTable, LastTokens
from nanovllm.sampling.controls import Controls
from nanovllm.sampling.request_controls import RequestControls, request_controls, token_mask
from nanovllm.sampling_params import LOGPROBS_MODES, NO_TOKEN, StructuredOutputsParams

BadWords = tuple[tuple[int, ...], ...]
INF = np.inf
GREEDY = {"temperature": 0.0}


class Numbers:
    """A tokenizer of texts that are token ids."""

    def encode(self, text: str, *, verbose: bool, add_special_tokens: bool = True) -> list[int]:
        return [int(number) for number in text.split(",")]


def as_text(words: BadWords) -> list[str]:
    return [",".join(map(str, word)) for word in words]


def controls_of(
    vocab_size: int = 50, eos: Collection[int] = (9,), **options: Any
) -> RequestControls | None:
    return controls_for(SamplingParams(**options), vocab_size, eos)


def controls_for(
    params: SamplingParams, vocab_size: int, eos: Collection[int]
) -> RequestControls | None:
    words = bad_word_tokens(Numbers(), params.bad_words or ())
    return request_controls(params, vocab_size, eos, words)


# -- of a request ---------------------------------------------------------------------------------

PLAIN: list[dict[str, Any]] = [
    {},
    GREEDY,
    {"temperature": 0.3, "max_tokens": None, "seed": 3, "n": 2},
    {"top_k": -1, "top_p": 1.0, "min_p": 0.0},
    {"top_k": 50},  # the whole vocabulary
    {"top_k": 51},
    {"top_k": 3, "top_p": 0.5, "min_p": 0.1, **GREEDY},
    {"min_tokens": 3, "ignore_eos": True},
    {"stop_token_ids": [4]},
    {"stop": ["x"], "skip_special_tokens": False},
    {"logit_bias": {}, "bad_words": []},
    {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
    {"prompt_logprobs": 3},
]


@pytest.mark.parametrize("options", PLAIN, ids=str)
def test_requests_without_controls(options: dict[str, Any]) -> None:
    assert controls_of(**options) is None


LASTING: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"top_k": 49}, {"filters": (49, 1.0, 0.0)}),
    ({"top_k": 1}, {"filters": (1, 1.0, 0.0)}),
    ({"top_p": 0.5, "top_k": 90}, {"filters": (0, 0.5, 0.0)}),
    ({"min_p": 0.5, "top_k": -1}, {"filters": (0, 1.0, 0.5)}),
    ({"repetition_penalty": 1.5}, {"penalties": (1.5, 0.0, 0.0), "has_penalties": True}),
    ({"presence_penalty": -0.5}, {"penalties": (1.0, -0.5, 0.0), "has_penalties": True}),
    (
        {"frequency_penalty": 2.0, **GREEDY, "top_k": 4},
        {"penalties": (1.0, 0.0, 2.0), "has_penalties": True},
    ),
    ({"logprobs": 0, "min_p": 0.5}, {"own_divisor": 1.0, "filters": (0, 1.0, 0.5)}),
    ({"logprobs": 7, **GREEDY}, {"num_logprobs": 7}),
    ({"logit_bias": {4: 0.5, 2: -3.0}}, {"bias": {4: 0.5, 2: -3.0}}),
    ({"allowed_token_ids": [3, 3]}, {"allowed": [3]}),
    ({"structured_outputs": StructuredOutputsParams(regex="a*")}, {"is_guided": True}),
]


@pytest.mark.parametrize(("options", "want"), LASTING, ids=str)
def test_requests_with_controls(options: dict[str, Any], want: dict[str, Any]) -> None:
    controls = controls_of(**options)
    assert controls is not None and controls.is_permanent
    mask = None if controls.allowed is None else [i for i in range(50) if bit(controls.allowed, i)]
    assert {
        "filters": controls.filters,
        "penalties": controls.penalties,
        "has_penalties": controls.has_penalties,
        "num_logprobs": controls.num_logprobs,
        "own_divisor": controls.own_divisor,
        "bias": dict(zip(controls.bias_tokens.tolist(), controls.biases.tolist(), strict=True)),
        "allowed": mask,
        "is_guided": controls.is_guided,
        "min_tokens": controls.min_tokens,
        "bad_words": controls.bad_words,
    } == {
        "filters": (0, 1.0, 0.0),
        "penalties": (1.0, 0.0, 0.0),
        "has_penalties": False,
        "num_logprobs": -1,
        "own_divisor": 0.0,
        "bias": {},
        "allowed": None,
        "is_guided": False,
        "min_tokens": 0,
        "bad_words": (),
        **want,
    }


@pytest.mark.parametrize(
    ("options", "bans"),
    [
        ({}, [8, 9]),
        ({"stop_token_ids": [30, 9, 4]}, [4, 8, 9, 30]),
        ({"stop_token_ids": [30, 4], "ignore_eos": True}, [4, 30]),
    ],
)
def test_min_tokens_alone_ends(options: dict[str, Any], bans: list[int]) -> None:
    controls = controls_of(eos=[9, 8], min_tokens=3, **options)
    assert controls is not None
    assert not controls.is_permanent
    assert (controls.min_tokens, controls.early_bans.tolist()) == (3, bans)


def test_end_of_sequence_tokens_beyond_the_vocabulary_are_not_banned() -> None:
    """A checkpoint may name some that the model cannot sample: nothing has a logit for them."""
    controls = controls_of(eos=[9, 50, 151_645], min_tokens=3)
    assert controls is not None
    assert controls.early_bans.tolist() == [9]
    assert controls_of(eos=[50], min_tokens=3) is None


def test_bad_words_of_one_token_are_a_bias() -> None:
    """It is banned whatever `logit_bias` wants; longer ones depend on what comes before."""
    words = as_text(((7,), (1, 2), (8,), (1, 2, 3)))
    controls = controls_of(bad_words=words, logit_bias={7: 50.0, 3: 1.0})
    assert controls is not None and controls.is_permanent
    biases = dict(zip(controls.bias_tokens.tolist(), controls.biases.tolist(), strict=True))
    assert biases == {7: -INF, 3: 1.0, 8: -INF}
    assert controls.bad_words == ((1, 2), (1, 2, 3))
    controls = controls_of(bad_words=["1,2"])
    assert controls is not None and controls.is_permanent


def bit(mask: np.ndarray, token: int) -> bool:
    return bool(int(mask[token // 32]) & 0xFFFFFFFF & 1 << token % 32)


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 64, 100, 151_936])
def test_masks(vocab_size: int) -> None:
    rng = random.Random(vocab_size)
    for count in (1, 2, 40, vocab_size):
        tokens = (
            {0, vocab_size - 1} if count == 2 else {rng.randrange(vocab_size) for _ in range(count)}
        )
        mask = token_mask(list(tokens), vocab_size)
        assert mask is not None
        assert mask.dtype == np.int32 and mask.shape == (-(-vocab_size // 32),)
        assert {i for i in range(32 * len(mask)) if bit(mask, i)} == tokens
    assert token_mask(None, vocab_size) is None


# -- of a step ------------------------------------------------------------------------------------

_ids = itertools.count()


def make(
    prompt: list[int] | int, bad_words: BadWords = (), slot: int = -1, **options: Any
) -> Sequence:
    """A sequence with controls; with a slot it runs."""
    tokens = [1] * prompt if isinstance(prompt, int) else prompt
    params = SamplingParams(**{"max_tokens": 12, "bad_words": as_text(bad_words), **options})
    seq = Sequence(next(_ids), tokens, params, block_size=4)
    seq.controls = controls_for(params, VOCAB_SIZE, [EOS])
    if slot >= 0:
        seq.slot, seq.status, seq.kv.table = slot, SequenceStatus.RUNNING, [slot]
    return seq


def whole(*seqs: Sequence) -> list[ScheduledSequence]:
    """A step with all uncomputed tokens of these."""
    return [ScheduledSequence.of(seq, 1_000_000) for seq in seqs]


def step_controls(
    table: ControlTable, scheduled: list[ScheduledSequence], last_tokens: LastTokens | None = None
) -> Controls | None:
    """The controls of a step, if there are any. It needs the last tokens where they are given."""
    step = plan_step(scheduled)
    if not step.controlled.any():
        return None
    assert table.needs_tokens(scheduled) == (last_tokens is not None)
    return table.controls(step, scheduled, last_tokens or {})


def plan(
    table: ControlTable, scheduled: list[ScheduledSequence], last_tokens: LastTokens | None = None
) -> Controls | None:
    """Plan a step, count it as sent and launched. Its controls, if there are any."""
    step, found = plan_step(scheduled), step_controls(table, scheduled, last_tokens)
    mark_sent(scheduled)
    for seq, _, num_tokens, *_ in scheduled:
        seq.num_computed_tokens += num_tokens
    assert found is None or len(found.top_k) == step.controlled.sum()
    return found


def controlled(scheduled: list[ScheduledSequence]) -> list[int]:
    """Indices of a step's sequences with controls."""
    return np.flatnonzero(plan_step(scheduled).controlled).tolist()


def test_min_tokens_act_until_they_are_reached() -> None:
    """After that the request is a plain one, in the fast path of all."""
    table = ControlTable(4, VOCAB_SIZE)
    seq = make(5, slot=2, min_tokens=3, stop_token_ids=[7])
    for generated in range(6):
        found = plan(table, whole(seq))
        assert (found is not None) == (generated < 3)
        if found is not None:
            assert found.edit_tokens.tolist() == [EOS, 7]
            assert found.edit_biases.tolist() == [-INF, -INF]
            assert not found.has_filters and not found.has_penalties and found.draws
            assert found.reports.num_logprobs.tolist() == [-1]
        seq.append_token(3)


def test_min_tokens_end_beside_other_controls() -> None:
    table = ControlTable(4, VOCAB_SIZE)
    seq = make(5, slot=0, min_tokens=2, top_k=3, logit_bias={9: 1.0, EOS: 4.0})
    for generated in range(4):
        found = plan(table, whole(seq))
        assert found is not None
        edits = list(zip(found.edit_tokens.tolist(), found.edit_biases.tolist(), strict=True))
        bans = [(EOS, -INF)] if generated < 2 else []
        assert sorted(edits) == sorted([*bans, (EOS, 4.0), (9, 1.0)])
        seq.append_token(3)


def test_rows_are_those_that_sample() -> None:
    """Chunks of prompts have no row, plain requests have one without controls."""
    table = ControlTable(8, VOCAB_SIZE)
    plain, top_k, chunk, biased, late = (
        make(3, slot=5),
        make(2, slot=1, top_k=4, min_p=0.25),
        make(9, slot=0, top_k=2),
        make(4, slot=7, logit_bias={8: 1.0, 2: -1.0, 5: 3.0}, logprobs=3),
        make(4, slot=3, temperature=0.5),
    )
    step = [
        *whole(plain, top_k),
        ScheduledSequence.of(chunk, 4),
        *whole(biased, late),
    ]
    assert controlled(step) == [1, 3]
    found = plan(table, step)
    assert found is not None
    assert found.top_k.tolist() == [4, 0]
    assert found.top_p.tolist() == [1, 1]
    assert found.min_p.tolist() == [0.25, 0]
    assert found.penalties.T.tolist() == [[1, 0, 0], [1, 0, 0]]
    assert found.edit_starts.tolist() == [0, 0, 3]
    assert found.edit_tokens.tolist() == [2, 5, 8]
    assert found.edit_biases.tolist() == [-1, 3, 1]
    assert found.reports.num_logprobs.tolist() == [-1, 3]
    assert found.mask_rows.tolist() == [-1, -1] and found.masks.shape == (0, 1)
    assert found.has_filters and not found.has_penalties
    assert plan(table, whole(plain, late)) is None
    assert plan(table, [ScheduledSequence.of(chunk, 2)]) is None
    assert controlled(whole(late, chunk)) == [1]
    found = plan(table, whole(late, chunk))
    assert found is not None
    assert found.top_k.tolist() == [2]


def test_only_what_differs_from_the_softmax_draws() -> None:
    table = ControlTable(2, VOCAB_SIZE)
    found = plan(table, whole(make(3, slot=0, logprobs=2)))
    assert found is not None
    assert not found.draws
    for options in ({"min_p": 0.5}, {"logit_bias": {3: 1.0}}, {"presence_penalty": 1.0}):
        found = plan(table, whole(make(3, slot=0, **options)))
        assert found is not None and found.draws, options
    found = plan(
        table, whole(make(3, slot=0, allowed_token_ids=[2, 4]), make(3, slot=1, logprobs=1))
    )
    assert found is not None and found.draws
    assert found.mask_rows.tolist() == [0, -1]
    assert found.masks.tolist() == [[20]]


def test_requests_of_the_same_parameters_share_a_mask() -> None:
    table = ControlTable(4, VOCAB_SIZE)
    first, other = (make(3, slot=i, allowed_token_ids=[i + 2]) for i in range(2))
    second = make(3, slot=2)
    second.controls = first.controls
    found = plan(table, whole(first, other, make(3, slot=3, top_k=2), second))
    assert found is not None
    assert found.mask_rows.tolist() == [0, 1, -1, 0] and found.masks.tolist() == [[4], [8]]


def test_masks_are_written_where_the_device_reads_them() -> None:
    """They are the largest of what goes to it, too large to be copied on the host."""
    made: list[NDArray[np.int32]] = []

    def new_array(shape: tuple[int, int]) -> NDArray[np.int32]:
        made.append(np.full(shape, 7, np.int32))
        return made[-1]

    table = ControlTable(2, VOCAB_SIZE, new_array)
    found = plan(table, whole(make(3, slot=0, allowed_token_ids=[2])))
    assert found is not None and len(made) == 1
    assert found.masks is made[0] and found.masks.tolist() == [[4]]


def test_a_tiny_top_p_is_not_0_in_float32() -> None:
    found = plan(ControlTable(1, VOCAB_SIZE), whole(make(3, slot=0, top_p=1e-46)))
    assert found is not None and found.top_p[0] > 0


def test_bad_words_longer_than_the_completion() -> None:
    table = ControlTable(1, VOCAB_SIZE)
    seq = make([4, 5], [[4, 5, 6, 7], [5, 8]], slot=0)
    for token, bans in ((5, []), (6, [8]), (4, [])):
        found = plan(table, whole(seq))
        assert found is not None and found.edit_tokens.tolist() == bans
        seq.append_token(token)


def test_bad_words_look_at_the_completion() -> None:
    """Not at the prompt, and the newest token may be one that is not booked yet."""
    table = ControlTable(4, VOCAB_SIZE)
    words = ((5, 6), (4, 5, 7), (9, 9, 9, 9, 8), (5, 11))
    seq = make([4, 5], words, slot=0)

    def bans(last_tokens: LastTokens | None = None) -> list[int]:
        found = plan(table, whole(seq), last_tokens)
        assert found is not None
        assert np.isneginf(found.edit_biases).all()
        return found.edit_tokens.tolist()

    assert bans() == []
    for token, want in (
        *((5, [6, 11]), (6, []), (4, []), (5, [6, 7, 11])),
        *((9, []), (9, []), (9, []), (9, [8])),
    ):
        seq.append_token(PENDING)
        assert bans({seq: token}) == want
        seq.resolve_pending(token)
    assert seq.completion_token_ids == [5, 6, 4, 5, 9, 9, 9, 9]


PENALTIES: dict[str, Any] = {"repetition_penalty": 1.5, "frequency_penalty": 0.5}


def counts_of(found: Controls | None) -> dict[int, dict[int, int]]:
    """The tokens of each slot whose counts begin anew."""
    assert found is not None
    tables: dict[int, dict[int, int]] = {slot: {} for slot in found.reset.tolist()}
    for slot, token, count in found.counts.T.tolist():
        assert token not in tables[slot], "twice"
        tables[slot][token] = count
    return tables


PROMPT_ONLY = -(2**15)


def test_what_is_no_token_is_not_counted() -> None:
    """A row without one still runs in the next step; -1 would be a count of the slot before."""
    seq = make([4, 5], slot=1, **PENALTIES)
    for token in (4, PENDING):
        seq.append_token(token)
    found = step_controls(ControlTable(2, VOCAB_SIZE), whole(seq), {seq: NO_TOKEN})
    assert counts_of(found) == {1: {4: PROMPT_ONLY + 1, 5: PROMPT_ONLY}}


def test_counts_are_told_once() -> None:
    table = ControlTable(4, VOCAB_SIZE)
    seq, other = make([3, 4, 3], slot=2, **PENALTIES), make(2, slot=1, top_k=2)
    assert counts_of(plan(table, whole(seq, other))) == {2: {3: PROMPT_ONLY, 4: PROMPT_ONLY}}
    for _ in range(4):
        seq.append_token(7)
        other.append_token(7)
        assert counts_of(plan(table, whole(seq, other))) == {}
    assert counts_of(plan(table, whole(make(2, slot=3, **PENALTIES)))) == {3: {1: PROMPT_ONLY}}
    seq.append_token(7)
    assert counts_of(plan(table, whole(seq))) == {}, "not in each step, and in no other's way"


def test_counts_of_a_chunked_prompt_are_told_when_it_samples() -> None:
    table = ControlTable(4, VOCAB_SIZE)
    seq = make([3, 4, 3, 5, 6], slot=0, **PENALTIES)
    assert plan(table, [ScheduledSequence.of(seq, 2)]) is None
    assert plan(table, [ScheduledSequence.of(seq, 1)]) is None
    assert counts_of(plan(table, whole(seq))) == {0: dict.fromkeys([3, 4, 5, 6], PROMPT_ONLY)}


@pytest.mark.parametrize("slot", [0, 3])
def test_counts_begin_anew_after_a_preemption(slot: int) -> None:
    """In another slot or in its own, which another request may have had meanwhile."""
    table = ControlTable(4, VOCAB_SIZE)
    seq = make([3, 4], slot=0, **PENALTIES)
    plan(table, whole(seq))
    seq.append_token(4)
    plan(table, whole(seq))
    seq.append_token(8)
    for thief in (make(1, slot=0, top_k=3), make(1, slot=0, **PENALTIES)):
        plan(table, whole(thief))
    seq.slot, seq.sent, seq.num_computed_tokens = slot, Sent(), 0
    assert plan(table, [ScheduledSequence.of(seq, 2)]) is None
    want = {3: PROMPT_ONLY, 4: PROMPT_ONLY + 1, 8: 1}
    assert counts_of(plan(table, whole(seq))) == {slot: want}
    seq.append_token(8)
    assert counts_of(plan(table, whole(seq))) == {}


def test_counts_begin_anew_after_a_launch_that_failed() -> None:
    """The device may have counted the token of a step that is repeated, or not."""
    table = ControlTable(4, VOCAB_SIZE)
    seq, idle = make([3], slot=0, **PENALTIES), make([5], slot=2, **PENALTIES)
    plan(table, whole(seq, idle))
    seq.append_token(4)
    idle.append_token(6)
    assert counts_of(step_controls(table, whole(seq))) == {}
    table.forget()
    assert counts_of(plan(table, whole(seq))) == {0: {3: PROMPT_ONLY, 4: 1}}
    seq.append_token(5)
    assert counts_of(plan(table, whole(seq, idle))) == {2: {5: PROMPT_ONLY, 6: 1}}
    table.forget()
    idle.append_token(PENDING)
    want = {5: PROMPT_ONLY, 6: 1, 8: 1}
    assert counts_of(plan(table, whole(idle), {idle: 8})) == {2: want}


def test_counts_begin_anew_when_a_launched_step_was_not_booked() -> None:
    """Ctrl-C between the two: the device has counted a token that the host does not know of."""
    table = ControlTable(4, VOCAB_SIZE)
    seq = make([3], slot=0, **PENALTIES)
    plan(table, whole(seq))
    seq.append_token(4)
    step = whole(seq)
    assert counts_of(step_controls(table, step)) == {}
    for _ in range(2):
        assert counts_of(step_controls(table, step)) == {0: {3: PROMPT_ONLY, 4: 1}}


def test_counts_of_a_long_text_end_at_their_type() -> None:
    table = ControlTable(1, VOCAB_SIZE)
    seq = make([3, 4], slot=0, **PENALTIES)
    seq.token_ids += [3] * 40_000 + [5] * 32_768 + [6] * 32_767
    want = {3: -1, 4: PROMPT_ONLY, 5: 32_767, 6: 32_767}
    assert counts_of(plan(table, whole(seq))) == {0: want}


def test_a_slot_forgets_the_request_before() -> None:
    """Whatever that had, the next one has its own controls only."""
    table = ControlTable(1, VOCAB_SIZE)
    every: dict[str, Any] = {
        **PENALTIES, "top_k": 3, "top_p": 0.5, "min_p": 0.5, "logprobs": 5, "min_tokens": 9,
        "allowed_token_ids": [1], "logit_bias": {1: 1.0}, "return_sampling_mask": True,
        "logprobs_mode": "processed_logprobs",
    }  # fmt: skip
    labels = {"logprob_token_ids": [3, 1]}
    for options in (
        {},
        {"logprobs": 0},
        {"logprobs": 1},
        labels,
        {"min_tokens": 1},
        {"logit_bias": {2: 1.0}},
        PENALTIES,
    ):
        assert plan(table, whole(make(2, slot=0, **every))) is not None
        found = plan(table, whole(make(2, slot=0, **options)))
        if not options or options == {"logprobs": 0}:
            assert found is None
            continue
        assert found is not None
        assert not found.has_filters and not len(found.masks)
        assert found.has_penalties == (options is PENALTIES)
        assert len(found.reset) == (options is PENALTIES)
        reports = found.reports
        wanted = 0 if options is labels else options.get("logprobs", -1)
        assert reports.num_logprobs.tolist() == [wanted]
        assert (reports.modes.tolist(), reports.divisors.tolist()) == ([0], [1.0])
        assert reports.label_tokens.tolist() == ([3, 1] if options is labels else [])
        assert not reports.masks.any()
        assert len(found.edit_tokens) == len(options.keys() & {"min_tokens", "logit_bias"})


# -- random requests through the scheduler --------------------------------------------------------


class FaultError(Exception):
    """A launch that failed."""


class Counted:
    """Counts on the device for one slot."""

    def __init__(self) -> None:
        self.tokens: Counter[int] = Counter()
        self.prompt: set[int] = set()


class Engine:
    """The engine's loop around a fake model, with a fake table of counts. Some launches fail.

    Each step's controls are compared with what the sequences say.
    """

    def __init__(self, rng: random.Random, scheduler: Scheduler, lookahead: int) -> None:
        self.rng, self.scheduler, self.lookahead = rng, scheduler, lookahead
        self.model = FakeModel(scheduler)
        num_slots = scheduler.max_num_seqs + 1
        self.table = ControlTable(num_slots, VOCAB_SIZE)
        self.under_way: list[tuple[list[ScheduledSequence], list[int]]] = []
        self.launching, self.fault_rate = False, 0.03
        self.device = [Counted() for _ in range(num_slots)]
        self.stays: dict[int, tuple[int, int]] = {}  # slot -> sequence, how often preempted
        self.doubtful: set[int] = set()  # slots that may be told again
        self.bad_words: dict[int, BadWords] = {}
        self.counts: Counter[str] = Counter()

    def arrive(self) -> Sequence:
        rng, V = self.rng, VOCAB_SIZE
        prompt = [rng.randrange(V) for _ in range(rng.choice([1, 3, 8, 14]))]
        choices: dict[str, Any] = {
            "top_k": [0, 5, V],
            "top_p": [1.0, 0.75],
            "min_p": [0.0, 0.5],
            "repetition_penalty": [1.0, 1.0, 1.5],
            "frequency_penalty": [0.0, 0.0, -0.5],
            "logprobs": [None, None, 0, 2],
            "logprobs_mode": [None, *LOGPROBS_MODES],
            "temperature": [0.0, 1.0, 1.5],
            "return_sampling_mask": [False, True],
            "min_tokens": [0, 0, 4],
            "stop_token_ids": [None, None, [rng.randrange(V), 3]],
            "logit_bias": [None, None, {rng.randrange(V): 1.0, rng.randrange(V): -2.0}],
            "allowed_token_ids": [None, None, [rng.randrange(V), 0, V - 1]],
            "ignore_eos": [True, False],
            "max_tokens": [5, 12, 25],
        }
        options = {name: rng.choice(values) for name, values in choices.items()}
        if rng.random() < 0.25:
            own = {"logprobs": rng.choice([None, 0]), "logprobs_mode": options["logprobs_mode"]}
            options = {"max_tokens": 20, "ignore_eos": True, "temperature": 1.5, **own}
        if not options.get("logprobs") and rng.random() < 0.2:
            options["logprob_token_ids"] = [rng.randrange(V) for _ in range(rng.choice([1, 4]))]
        words: set[tuple[int, ...]] = set()
        if rng.random() < 0.4:  # some that will come up
            text = expected(make(prompt, **options), self.scheduler.max_model_len)
            for _ in range(4):
                i = rng.randrange(len(text))
                words.add((*text[i : i + rng.randint(1, 2)], rng.randrange(V)))
        seq = make(prompt, tuple(words), **options)
        self.bad_words[seq.seq_id] = tuple(words)
        self.scheduler.add(seq)
        return seq

    def step(self) -> None:
        books_only = self.launching and self.under_way
        scheduled = [] if books_only else self.scheduler.schedule()
        if scheduled:
            self.launching = True
            tokens = self.run(scheduled)
            if self.rng.random() < self.fault_rate:
                raise FaultError("Ctrl-C before it is booked")
            self.scheduler.advance(scheduled)
            self.under_way.append((scheduled, tokens))
            self.launching = False
        while len(self.under_way) > (self.lookahead if scheduled else 0):
            self.scheduler.postprocess(*self.under_way.pop(0))
        check_scheduler(self.scheduler)

    def tokens_of(self, seq: Sequence) -> list[int]:
        """The completion, also what a step under way has sampled."""
        tokens = seq.completion_token_ids
        for scheduled, drawn in self.under_way:
            sampled = [item.seq for item in scheduled if item.samples]
            if seq in sampled and PENDING in tokens:
                tokens[tokens.index(PENDING)] = drawn[sampled.index(seq)]
        assert PENDING not in tokens
        return tokens

    def last_tokens(self, sampling: list[Sequence]) -> dict[Sequence, int]:
        """Waits for the device, so they are asked for only where there is no other way."""
        asked = [
            seq
            for seq in sampling
            if seq.num_pending and (self.bad_words[seq.seq_id] or seq.slot in self.doubtful)
        ]
        assert asked, "nobody needs them"
        self.counts["pending"] += len(asked)
        return {seq: self.tokens_of(seq)[-1] for seq in sampling if seq.num_pending}

    def run(self, scheduled: list[ScheduledSequence]) -> list[int]:
        for seq, *_ in scheduled:
            if self.stays.get(seq.slot) != (seq.seq_id, seq.num_preemptions):
                self.stays[seq.slot] = seq.seq_id, seq.num_preemptions
                self.doubtful.add(seq.slot)
                self.counts["resumed"] += seq.num_preemptions > 0
        plan = plan_step(scheduled)
        sampling = [item.seq for item in scheduled if item.samples]
        want = [row for row, seq in enumerate(sampling) if self.is_controlled(seq)]
        found = None
        if plan.controlled.any():
            needs_tokens = self.table.needs_tokens(scheduled)
            last_tokens = self.last_tokens(sampling) if needs_tokens else {}
            found = self.table.controls(plan, scheduled, last_tokens)
        assert want == np.flatnonzero(plan.controlled[plan.samples]).tolist()
        for seq in sampling:
            assert FACTS["logprob_divisors"].of(seq) == self.scores_own(seq)
            self.counts["own", self.scores_own(seq)] += 1
        self.counts["plain"] += len(sampling) - len(want)
        counted = []
        if found is not None:
            seqs = [sampling[row] for row in want]
            for i, seq in enumerate(seqs):
                self.check_row(found, i, seq)
            counted = self.check_counts(found, seqs)
        for fails in (False, True):
            if fails:
                tokens = self.model.run(scheduled)
                for slot, token in zip([seq.slot for seq in sampling], tokens, strict=True):
                    if slot in counted:
                        self.device[slot].tokens[token] += 1
            if self.rng.random() < self.fault_rate:  # before or after the work
                self.counts["failed"] += 1
                self.doubtful |= set(range(len(self.device)))
                self.table.forget()
                raise FaultError
        return tokens

    def filters(self, seq: Sequence) -> tuple[int, float, float]:
        p = seq.sampling_params
        return (0, 1.0, 0.0) if p.is_greedy else (p.top_k % VOCAB_SIZE, p.top_p, p.min_p)

    def changes(self, seq: Sequence) -> bool:
        """Whether its draws are not those of the softmax, at any position."""
        p = seq.sampling_params
        return bool(
            self.filters(seq) != (0, 1.0, 0.0) or self.is_penalised(seq)
            or p.logit_bias or p.allowed_token_ids is not None or self.bad_words[seq.seq_id]
        )  # fmt: skip

    def is_controlled(self, seq: Sequence) -> bool:
        p = seq.sampling_params
        more = bool(p.logprobs or p.logprob_token_ids)  # than the token's own log-probability
        return bool(self.changes(seq) or more or self.bans_early(seq))

    def scores_own(self, seq: Sequence) -> float:
        """The divisor where the token's own log-probability is of the model's logits."""
        p = seq.sampling_params
        is_raw = (p.logprobs_mode or "raw_logprobs") == "raw_logprobs"
        if p.logprobs != 0 or p.logprob_token_ids or (self.changes(seq) and not is_raw):
            return 0.0
        return 1.0 if is_raw or p.is_greedy else p.temperature

    def is_penalised(self, seq: Sequence) -> bool:
        p = seq.sampling_params
        return p.repetition_penalty != 1 or p.frequency_penalty != 0

    def bans_early(self, seq: Sequence) -> set[int]:
        p = seq.sampling_params
        if seq.num_completion_tokens >= p.min_tokens:
            return set()
        return set(p.stop_token_ids or ()) | (set() if p.ignore_eos else {EOS})

    def check_row(self, found: Controls, i: int, seq: Sequence) -> None:
        p = seq.sampling_params
        assert (found.top_k[i], found.top_p[i], found.min_p[i]) == self.filters(seq)
        penalties = p.repetition_penalty, p.presence_penalty, p.frequency_penalty
        assert tuple(found.penalties[:, i]) == penalties
        self.check_reports(found, i, seq)
        edits = Counter((p.logit_bias or {}).items())
        edits += Counter((token, -INF) for token in self.bans_early(seq))
        tokens = self.tokens_of(seq)
        for word in self.bad_words[seq.seq_id]:
            if len(tokens) >= len(word) - 1 and tokens[len(tokens) - len(word) + 1 :] == [
                *word[:-1]
            ]:
                edits[word[-1], -INF] += 1
                self.counts["bad word"] += 1
        start, end = found.edit_starts[i : i + 2]
        ids = found.edit_tokens[start:end].tolist()
        assert ids == sorted(ids)
        assert Counter(zip(ids, found.edit_biases[start:end].tolist(), strict=True)) == edits
        self.counts["edit"] += len(ids)
        row = found.mask_rows[i]
        if p.allowed_token_ids is None:
            assert row == -1
        else:
            allowed = {token for token in range(32) if bit(found.masks[row], token)}
            assert allowed == set(p.allowed_token_ids)

    def check_reports(self, found: Controls, i: int, seq: Sequence) -> None:
        p, reports = seq.sampling_params, found.reports
        mode = p.logprobs_mode or "raw_logprobs"
        count = p.logprobs if p.logprob_token_ids is None else 0
        if count is None or (self.scores_own(seq) and mode == "raw_logprobs"):
            count = -1
        assert reports.num_logprobs[i] == count
        assert LOGPROBS_MODES[reports.modes[i]] == mode
        is_one = p.is_greedy or mode == "raw_logprobs"
        assert reports.divisors[i] == (1.0 if is_one else p.temperature)
        labels = reports.label_tokens[reports.label_rows == i].tolist()
        assert labels == list(p.logprob_token_ids or ())
        assert reports.masks[i] == p.return_sampling_mask
        self.counts["label"] += len(labels)

    def check_counts(self, found: Controls, seqs: list[Sequence]) -> Collection[int]:
        """Take in what the device is told; it then knows the truth. Returns the slots that count
        the token to come: those of all rows, if one is penalised.
        """
        assert found.has_penalties == any(map(self.is_penalised, seqs))
        told = found.reset.tolist()
        penalised = [seq for seq in seqs if self.is_penalised(seq)]
        assert set(told) <= {seq.slot for seq in penalised} & self.doubtful, "told needlessly"
        for slot in told:
            self.device[slot] = Counted()
        for slot, token, count in found.counts.T.tolist():
            assert slot in told
            own = self.device[slot]
            assert count and token not in own.prompt and not own.tokens[token]
            if count < 0:
                own.prompt.add(token)
            own.tokens[token] = count + (1 << 15) * (count < 0)
        for seq in penalised:
            own = self.device[seq.slot]
            assert own.prompt == set(seq.prompt_token_ids)
            assert +own.tokens == Counter(self.tokens_of(seq))
            self.counts["counted"] += 1
        self.counts["told"] += len(told)
        self.doubtful -= {seq.slot for seq in penalised}
        return [seq.slot for seq in seqs] if penalised else []


@pytest.mark.parametrize("mixed", [True, rare(False)], ids=["mixed", "prefill-first"])
@pytest.mark.parametrize("lookahead", [rare(0), 1], ids=["synchronous", "overlap"])
def test_random_requests(lookahead: int, mixed: bool) -> None:
    """Arrivals, chunks, preemptions, aborts and failing launches: in each step the controls are
    right, counts are told when the device cannot have them, and not otherwise.
    """
    total: Counter[str] = Counter()
    for seed, (num_blocks, max_num_seqs, budget) in enumerate([(9, 4, 6), (6, 3, 16), (40, 8, 12)]):
        print(f"seed {seed}: {num_blocks} blocks, {max_num_seqs} sequences, budget {budget}")
        rng = random.Random(seed)
        scheduler = make_scheduler(
            num_blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=30,
            mixed_steps=mixed,
        )
        scheduler.lengths.remaining = lambda seq: 1  # type: ignore[method-assign]
        engine = Engine(rng, scheduler, lookahead)
        seqs, aborted = [], set()
        for i in range(500):
            if i < 450 and len(scheduler.waiting) < 6 and rng.random() < 0.4:
                seqs.append(engine.arrive())
            if seqs and rng.random() < 0.02:
                victim = rng.choice(seqs)
                if not victim.is_finished:
                    scheduler.abort([victim])
                    aborted.add(victim)
            try:
                engine.step()
            except FaultError:
                engine.counts["fault"] += 1
                # What has been launched and not booked has counted its tokens.
                engine.doubtful |= set(range(max_num_seqs + 1))
        while not scheduler.is_finished():
            engine.fault_rate = 0.0
            engine.step()
        for seq in set(seqs) - aborted:
            assert seq.completion_token_ids == expected(seq, scheduler.max_model_len)
        engine.counts["preempt"] = scheduler.num_preemptions
        total += engine.counts
    print(dict(total))
    names = ["plain", "resumed", "failed", "fault", "edit", "counted", "told", "preempt"]
    assert all(total[name] > 20 for name in names), total
    assert total["bad word"] > 20 and total["label"] > 20
    assert all(total["own", divisor] > 20 for divisor in (0.0, 1.0, 1.5))
    assert (total["pending"] > 20) == bool(lookahead)
    assert total["counted"] > 3 * total["told"]


def expected(seq: Sequence, max_model_len: int) -> list[int]:
    """Tokens of the fake model, which ignores controls, for the sequence."""
    p = seq.sampling_params
    endless = make(seq.prompt_token_ids, max_tokens=p.max_tokens, ignore_eos=True)
    text, _ = reference(endless, 1 << 20)
    for i in range(1, len(text) + 1):
        ends = text[i - 1] in (p.stop_token_ids or ()) or (text[i - 1] == EOS and not p.ignore_eos)
        if (ends and i >= p.min_tokens) or seq.num_prompt_tokens + i == max_model_len:
            return text[:i]
    return text


@pytest.mark.parametrize(
    ("options", "bad_words"),
    [({}, [(5,)]), ({}, [(6, 5)]), ({"min_tokens": 2, "stop_token_ids": [5]}, [])],
)
def test_controls_that_leave_no_token_are_refused(
    options: dict[str, Any], bad_words: list[tuple[int, ...]]
) -> None:
    """Also if they leave none at one place only: the last of several tokens may be the only one."""
    params = SamplingParams(allowed_token_ids=[5], **options)
    with pytest.raises(ValueError, match=r"`allowed_token_ids` must have a token .* got \(5,\)"):
        request_controls(params, VOCAB_SIZE, [], bad_words)
    more = dataclasses.replace(params, allowed_token_ids=[5, 6])
    assert request_controls(more, VOCAB_SIZE, [], bad_words) is not None
