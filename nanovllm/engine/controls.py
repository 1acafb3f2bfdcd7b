"""What requests want beyond drawing from the whole softmax, laid out as arrays for a step.

numpy only: knows no device. Rank 0 alone keeps it: the other ranks give their part of the logits
and are told the tokens.

Letters: n rows with controls, V vocabulary, W = ceil(V / 32) words of a mask, E edits.
"""

from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as SequenceABC
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nanovllm.engine.plan import Int32, StepPlan
from nanovllm.engine.scheduler import ScheduledSequence
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.structured_output import Grammar, accept_tokens, fill_masks
from nanovllm.sampling_params import SamplingParams

Float32 = NDArray[np.float32]
NO_FILTERS = (0, 1.0, 0.0)  # top_k, top_p, min_p
NO_PENALTIES = (1.0, 0.0, 0.0)  # repetition, presence, frequency
SMALLEST = float(np.finfo(np.float32).tiny)  # of top_p, which float32 must not take for 0
BANNED = -np.inf  # the bias of a token that must not come
LOST = -1  # `Sequence.num_followed` if nobody can say
NOBODY = -1  # instead of a `seq_id`
IN_PROMPT = -(1 << 15)  # sign bit of a token's count
MAX_COUNT = (1 << 15) - 1

NO_EDITS = np.zeros(0, np.int32), np.zeros(0, np.float32)

# Tokens that have been sampled and are not booked yet.
LastTokens = Mapping[Sequence, int]
# Of a shape, its content arbitrary.
NewArray = Callable[[tuple[int, int]], Int32]


class RequestControls(NamedTuple):
    """The controls of one request.

    Attributes:
        filters: top_k (0: all), top_p, min_p.
        penalties: repetition, presence, frequency.
        num_logprobs: most likely tokens to report beside the drawn one; -1: no log-probabilities.
        bias_tokens: [E] int32, ascending.
        biases: [E] float32, what is added to their logits, -inf where they are banned.
        min_tokens: `early_bans` hold before so many have been generated.
        early_bans: [K] int32, tokens.
        bad_words: sequences of at least two tokens whose last must not follow the others.
        allowed: [W] int32, bit t % 32 of word t // 32 for token t; None: all are.
        is_guided: whether its sequences have a grammar.
        is_permanent: whether there is more than what `min_tokens` does.
    """

    filters: tuple[int, float, float]
    penalties: tuple[float, float, float]
    num_logprobs: int
    bias_tokens: Int32
    biases: Float32
    min_tokens: int
    early_bans: Int32
    bad_words: tuple[tuple[int, ...], ...]
    allowed: Int32 | None
    is_guided: bool
    is_permanent: bool

    @property
    def has_penalties(self) -> bool:
        return self.penalties != NO_PENALTIES

    @property
    def has_edits(self) -> bool:
        return len(self.bias_tokens) > 0 or len(self.bad_words) > 0 or self.min_tokens > 0

    def act_on(self, num_generated: int) -> bool:
        """Whether they change the token after so many of the completion."""
        return self.is_permanent or num_generated < self.min_tokens


def request_controls(
    params: SamplingParams,
    vocab_size: int,
    eos_token_ids: Collection[int],
    bad_words: Collection[tuple[int, ...]] = (),
) -> RequestControls | None:
    """The controls that `params` ask for, with the tokens of bad words. None if there are none.

    Raises:
        ValueError: if they may leave no token.
    """
    top_k = params.top_k if 0 < params.top_k < vocab_size else 0
    stops = set(params.stop_token_ids or ())
    if not params.ignore_eos:  # a tokenizer may have some that the model cannot sample
        stops |= {token for token in eos_token_ids if token < vocab_size}
    biases = dict(params.logit_bias or {})
    biases |= {word[0]: BANNED for word in bad_words if len(word) == 1}
    if params.allowed_token_ids is not None:
        banned = {word[-1] for word in bad_words}
        if params.min_tokens:
            banned |= stops
        if banned.issuperset(params.allowed_token_ids):
            raise ValueError(
                "`allowed_token_ids` must have a token that bad_words and min_tokens do not "
                f"forbid, got {params.allowed_token_ids!r}"
            )
    filters = NO_FILTERS if params.is_greedy else (top_k, params.top_p, params.min_p)
    penalties = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
    is_guided = params.structured_outputs is not None
    has_tokens = bool(biases or bad_words) or params.allowed_token_ids is not None
    is_permanent = (
        filters != NO_FILTERS
        or penalties != NO_PENALTIES
        or params.logprobs is not None
        or has_tokens
        or is_guided
    )
    if not is_permanent and not (params.min_tokens and stops):
        return None
    return RequestControls(
        filters=filters,
        penalties=penalties,
        num_logprobs=-1 if params.logprobs is None else params.logprobs,
        bias_tokens=np.array(sorted(biases), np.int32),
        biases=np.array([biases[token] for token in sorted(biases)], np.float32),
        min_tokens=params.min_tokens if stops else 0,
        early_bans=np.array(sorted(stops), np.int32),
        bad_words=tuple(word for word in bad_words if len(word) > 1),
        allowed=token_mask(params.allowed_token_ids, vocab_size),
        is_guided=is_guided,
        is_permanent=is_permanent,
    )


def token_mask(tokens: SequenceABC[int] | None, vocab_size: int) -> Int32 | None:
    """The mask [W] of the tokens that are allowed; None for all."""
    if tokens is None:
        return None
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[list(tokens)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


class Controls(NamedTuple):
    """The controls of a step.

    Attributes:
        top_k: [n] int32, 0 for all tokens.
        top_p, min_p: [n] float32.
        penalties: [3, n] float32: repetition, presence, frequency.
        edit_starts: [n + 1] int32, where each row's edits begin.
        edit_tokens: [E] int32, ascending in each row; may repeat.
        edit_biases: [E] float32, added to their logits.
        masks: [m, W] int32, see `token_mask`.
        mask_rows: [n] int32, each row's mask; -1: none.
        reset: [r] int32, slots whose table of counts begins anew, with `counts`.
        counts: [3, h] int32: slot, token, and its count, negative for those in the prompt.
        num_logprobs: [n] int32, -1 for none.
    """

    top_k: Int32
    top_p: Float32
    min_p: Float32
    penalties: Float32
    edit_starts: Int32
    edit_tokens: Int32
    edit_biases: Float32
    masks: Int32
    mask_rows: Int32
    reset: Int32
    counts: Int32
    num_logprobs: Int32

    @property
    def has_filters(self) -> bool:
        return bool((self.top_k > 0).any() or (self.top_p < 1).any() or (self.min_p > 0).any())

    @property
    def has_penalties(self) -> bool:
        return bool((self.penalties.T != NO_PENALTIES).any())

    @property
    def draws(self) -> bool:
        """Whether tokens are drawn otherwise than without controls."""
        edits = len(self.edit_tokens) > 0 or len(self.masks) > 0
        return edits or self.has_filters or self.has_penalties


def _new(shape: tuple[int, int]) -> Int32:
    return np.empty(shape, np.int32)


class ControlTable:
    """The controls of the running sequences, by slot.

    Args:
        max_num_seqs: number of slots.
        vocab_size: V.
        new_array: makes the array for a step's masks, where the device can read them.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, new_array: NewArray = _new) -> None:
        self._vocab_size, self._new_array = vocab_size, new_array
        self._top_k = np.zeros(max_num_seqs, np.int32)
        self._top_p = np.ones(max_num_seqs, np.float32)
        self._min_p = np.zeros(max_num_seqs, np.float32)
        self._penalties = np.ones((3, max_num_seqs), np.float32)
        self._num_logprobs = np.zeros(max_num_seqs, np.int32)
        self._has_edits, self._has_mask = np.zeros((2, max_num_seqs), np.bool_)
        self._seq_ids = np.full(max_num_seqs, NOBODY, np.int64)  # whose controls these are
        self._num_counted = np.zeros(max_num_seqs, np.int64)  # tokens in the device's counts

    def forget(self) -> None:
        """A launch failed: take everything in again, and send all token counts again."""
        self._seq_ids[:] = NOBODY

    def needs_tokens(self, scheduled: list[ScheduledSequence]) -> bool:
        """Whether the controls of a step depend on tokens that are not booked yet."""
        return any(
            item.samples and item.seq.num_pending and self._depends_on_tokens(item)
            for item in scheduled
        )

    def _depends_on_tokens(self, item: ScheduledSequence) -> bool:
        seq, controls = item.seq, item.seq.controls
        if controls is None:
            return False
        is_counted = (self._seq_ids[seq.slot], self._num_counted[seq.slot]) == (
            seq.seq_id,
            item.end,
        )
        return (
            len(controls.bad_words) > 0
            or controls.is_guided
            or (controls.has_penalties and not is_counted)
        )

    def _join(self, seq: Sequence) -> None:
        slot, controls = seq.slot, seq.controls
        assert controls is not None, f"{seq!r} has no controls"
        self._seq_ids[slot] = seq.seq_id
        self._top_k[slot], top_p, self._min_p[slot] = controls.filters
        self._top_p[slot] = max(top_p, SMALLEST)
        self._penalties[:, slot] = controls.penalties
        self._num_logprobs[slot] = controls.num_logprobs
        self._has_edits[slot] = controls.has_edits
        self._has_mask[slot] = controls.is_guided or controls.allowed is not None
        self._num_counted[slot] = -1

    def controls(
        self, plan: StepPlan, scheduled: list[ScheduledSequence], last_tokens: LastTokens
    ) -> Controls:
        """The controls of a step, which has some.

        Args:
            last_tokens: tokens that are not booked yet, if `needs_tokens` says so.
        """
        rows = np.flatnonzero(plan.controlled)
        slots, lengths = plan.slots[rows], (plan.starts + plan.num_tokens)[rows]
        seqs = [scheduled[row].seq for row in rows.tolist()]
        for seq in seqs:
            if self._seq_ids[seq.slot] != seq.seq_id:
                self._join(seq)
        edits, sizes = [NO_EDITS], np.zeros(len(seqs) + 1, np.int32)
        for row in np.flatnonzero(self._has_edits[slots]).tolist():
            edits.append(_edits(seqs[row], int(lengths[row]), last_tokens))
            sizes[row + 1] = len(edits[-1][0])
        mask_rows = np.full(len(seqs), -1, np.int32)
        masked = np.flatnonzero(self._has_mask[slots])
        masks, mask_rows[masked] = _masks(
            [seqs[row] for row in masked.tolist()], self._vocab_size, last_tokens, self._new_array
        )
        penalties = self._penalties[:, slots]
        stale = (penalties.T != NO_PENALTIES).any(1) & (self._num_counted[slots] != lengths)
        self._num_counted[slots] = lengths + 1
        return Controls(
            top_k=self._top_k[slots],
            top_p=self._top_p[slots],
            min_p=self._min_p[slots],
            penalties=penalties,
            edit_starts=np.cumsum(sizes, dtype=np.int32),
            edit_tokens=np.concatenate([tokens for tokens, _ in edits], dtype=np.int32),
            edit_biases=np.concatenate([biases for _, biases in edits], dtype=np.float32),
            masks=masks,
            mask_rows=mask_rows,
            reset=slots[stale],
            counts=_counts([seqs[i] for i in np.flatnonzero(stale).tolist()], last_tokens),
            num_logprobs=self._num_logprobs[slots],
        )


def _completion(seq: Sequence, start: int, last_tokens: LastTokens) -> list[int]:
    """The tokens of a completion from `start` on, also one that is not booked yet."""
    token_ids = seq.token_ids[seq.num_prompt_tokens + start :]
    if seq.num_pending:
        assert seq.num_pending == 1, f"{seq!r} has more than one pending token"
        token_ids[-1] = last_tokens[seq]
    return token_ids


def _edits(seq: Sequence, length: int, last_tokens: LastTokens) -> tuple[Int32, Float32]:
    """Tokens, ascending, and what is added to their logits."""
    controls = seq.controls
    assert controls is not None, f"{seq!r} has no controls"
    bans: list[int] = []
    if length - seq.num_prompt_tokens < controls.min_tokens:
        bans += controls.early_bans.tolist()
    if controls.bad_words:
        longest = max(map(len, controls.bad_words)) - 1
        start = max(0, length - seq.num_prompt_tokens - longest)
        done = _completion(seq, start, last_tokens)
        bans += [last for *before, last in controls.bad_words if done[-len(before) :] == before]
    if not bans:
        return controls.bias_tokens, controls.biases
    tokens = np.concatenate([controls.bias_tokens, np.array(bans, np.int32)])
    biases = np.concatenate([controls.biases, np.full(len(bans), BANNED, np.float32)])
    order = np.argsort(tokens, kind="stable")
    return tokens[order], biases[order]


def _masks(
    seqs: list[Sequence], vocab_size: int, last_tokens: LastTokens, new_array: NewArray
) -> tuple[Int32, Int32]:
    """The masks that these sequences need, and which of them each takes."""
    rows = np.zeros(len(seqs), np.int32)
    # By their identity: requests of the same parameters share one.
    given: dict[int, tuple[int, Int32]] = {}
    guided = [(row, seq, seq.grammar) for row, seq in enumerate(seqs) if seq.grammar is not None]
    for row, seq in enumerate(seqs):
        if seq.controls is not None and (mask := seq.controls.allowed) is not None:
            rows[row], _ = given.setdefault(id(mask), (len(given), mask))
    masks = new_array((len(given) + len(guided), -(-vocab_size // 32)))
    for i, mask in given.values():
        masks[i] = mask
    rows[[row for row, _, _ in guided]] = range(len(given), len(masks))
    _follow([(seq, grammar) for _, seq, grammar in guided], last_tokens)
    fill_masks([grammar for _, _, grammar in guided], masks[len(given) :])
    return masks, rows


def _follow(seqs: list[tuple[Sequence, Grammar]], last_tokens: LastTokens) -> None:
    """Let the grammars follow the tokens that they do not know yet, mostly one each."""
    lengths, news = [], []
    for seq, grammar in seqs:
        if seq.num_followed == LOST:
            grammar.reset()
            seq.num_followed = 0
        news.append(_completion(seq, seq.num_followed, last_tokens))
        lengths.append(seq.num_followed + len(news[-1]))
    for seq, _ in seqs:
        seq.num_followed = LOST  # until it is done: Ctrl-C may come
    for i in range(max(map(len, news), default=0)):
        rows = [row for row, new in enumerate(news) if i < len(new)]
        accept_tokens([seqs[row][1] for row in rows], [news[row][i] for row in rows])
    for (seq, _), length in zip(seqs, lengths, strict=True):
        seq.num_followed = length


def _counts(seqs: list[Sequence], last_tokens: LastTokens) -> Int32:
    """Slot, token and count [3, h] of all tokens that these sequences have."""
    parts = [np.zeros((3, 0), np.int32)]
    for seq in seqs:
        tokens, counts = np.unique(
            np.array(_completion(seq, 0, last_tokens), np.int32), return_counts=True
        )
        prompt = np.unique(np.array(seq.prompt_token_ids, np.int32))
        every = np.union1d(tokens, prompt)
        values = np.zeros(len(every), np.int32)
        values[np.searchsorted(every, tokens)] = np.minimum(counts, MAX_COUNT)
        values[np.searchsorted(every, prompt)] += IN_PROMPT
        parts.append(np.stack([np.full(len(every), seq.slot), every, values]).astype(np.int32))
    return np.concatenate(parts, axis=1)
