"""`ControlTable`: the controls of the running sequences, laid out as arrays for a step.

It uses numpy only, no device. Only rank 0 keeps it: the other ranks send their part of the logits
and receive the tokens. Letters as in `sampling/controls.py`.
"""

from collections.abc import Callable, Mapping

import numpy as np

from nanovllm.engine.plan import StepPlan
from nanovllm.engine.sequence import ScheduledSequence, Sequence
from nanovllm.sampling.controls import IN_PROMPT, MAX_COUNT, NO_PENALTIES, Controls, Reports
from nanovllm.sampling.request_controls import BANNED
from nanovllm.sampling.structured_output import Grammar, accept_tokens, fill_masks
from nanovllm.sampling_params import NO_TOKEN
from nanovllm.utils.arrays import Float32, Int32

SMALLEST = float(np.finfo(np.float32).tiny)  # top_p, which must not become 0 in float32
LOST = -1  # `Grammar.num_followed` if it is unknown
NOBODY = -1  # in place of a `seq_id`
NO_EDITS = np.zeros(0, np.int32), np.zeros(0, np.float32)
NO_LABELS = np.zeros(0, np.int32)

# Tokens that have been sampled and are not booked yet; `NO_TOKEN` if the sequence will end with an
# error, so that its results do not matter.
LastTokens = Mapping[Sequence, int]
# Makes an array of a shape, uninitialised.
NewArray = Callable[[tuple[int, int]], Int32]


def _new(shape: tuple[int, int]) -> Int32:
    return np.empty(shape, np.int32)


class ControlTable:
    """The controls of the running sequences, by slot.

    Args:
        num_slots: number of slots, with the one of padding.
        vocab_size: vocabulary size V.
        new_array: function that makes the array for a step's masks, in memory that the device can
            read.
    """

    def __init__(self, num_slots: int, vocab_size: int, new_array: NewArray = _new) -> None:
        self._vocab_size, self._new_array = vocab_size, new_array
        self._top_k = np.zeros(num_slots, np.int32)
        self._top_p = np.ones(num_slots, np.float32)
        self._min_p = np.zeros(num_slots, np.float32)
        self._penalties = np.ones((3, num_slots), np.float32)
        self._num_logprobs, self._modes = np.zeros((2, num_slots), np.int32)
        self._divisors = np.ones(num_slots, np.float32)
        self._has_edits, self._has_mask = np.zeros((2, num_slots), np.bool_)
        self._has_labels, self._reports_mask = np.zeros((2, num_slots), np.bool_)
        self._seq_ids = np.full(num_slots, NOBODY, np.int64)  # owner of each slot's controls
        self._num_counted = np.zeros(num_slots, np.int64)  # tokens in the device's counts

    def forget(self) -> None:
        """Forget all sequences after a failed launch: their controls are read, and their token
        counts sent, again.
        """
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
        slot = seq.slot
        is_counted = self._seq_ids[slot] == seq.seq_id and self._num_counted[slot] == item.end
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
        report = controls.report
        self._modes[slot], self._divisors[slot] = report.mode, report.divisor
        self._has_labels[slot] = len(report.labels) > 0
        self._reports_mask[slot] = report.has_mask
        self._has_edits[slot] = controls.has_edits
        self._has_mask[slot] = controls.is_guided or controls.allowed is not None
        self._num_counted[slot] = -1

    def controls(
        self, plan: StepPlan, scheduled: list[ScheduledSequence], last_tokens: LastTokens
    ) -> Controls:
        """The controls of a step that has some.

        Args:
            plan, scheduled: step.
            last_tokens: tokens that are not booked yet, needed if `needs_tokens` is true.
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
            reports=self._reports(slots, seqs),
        )

    def _reports(self, slots: Int32, seqs: list[Sequence]) -> Reports:
        """The reports that these sequences, in these slots, want of their draws."""
        label_rows, labels = [NO_LABELS], [NO_LABELS]
        for row in np.flatnonzero(self._has_labels[slots]).tolist():
            controls = seqs[row].controls
            assert controls is not None, f"{seqs[row]!r} has no controls"
            labels.append(controls.report.labels)
            label_rows.append(np.full(len(labels[-1]), row, np.int32))
        return Reports(
            num_logprobs=self._num_logprobs[slots],
            modes=self._modes[slots],
            divisors=self._divisors[slots],
            label_rows=np.concatenate(label_rows),
            label_tokens=np.concatenate(labels),
            masks=self._reports_mask[slots],
        )


def _completion(seq: Sequence, start: int, last_tokens: LastTokens) -> list[int]:
    """The tokens of a completion from `start` on, also one that is not booked yet."""
    token_ids = seq.token_ids[seq.num_prompt_tokens + start :]
    if seq.num_pending:
        assert seq.num_pending == 1, f"{seq!r} has more than one pending token"
        token_ids[-1] = last_tokens[seq]
    return token_ids


def _edits(seq: Sequence, length: int, last_tokens: LastTokens) -> tuple[Int32, Float32]:
    """The tokens whose logits are edited, ascending, and the biases that are added to these."""
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
    """The masks of these sequences, and the index of each sequence's mask."""
    rows = np.zeros(len(seqs), np.int32)
    # Keyed by identity: requests with the same parameters share a mask.
    given: dict[int, tuple[int, Int32]] = {}
    guided = [(row, seq, seq.grammar) for row, seq in enumerate(seqs) if seq.grammar is not None]
    for row, seq in enumerate(seqs):
        if seq.controls is not None and (mask := seq.controls.allowed) is not None:
            rows[row], _ = given.setdefault(id(mask), (len(given), mask))
    masks = new_array((len(given) + len(guided), -(-vocab_size // 32)))
    for i, mask in given.values():
        masks[i] = mask
    rows[[row for row, _, _ in guided]] = range(len(given), len(masks))
    lives = [(seq, grammar) for _, seq, grammar in guided if last_tokens.get(seq) != NO_TOKEN]
    _follow(lives, last_tokens)
    fill_masks([grammar for _, _, grammar in guided], masks[len(given) :])
    return masks, rows


def _follow(seqs: list[tuple[Sequence, Grammar]], last_tokens: LastTokens) -> None:
    """Advance the grammars by the tokens that they do not know yet, mostly one each."""
    lengths, news = [], []
    for seq, grammar in seqs:
        if grammar.num_followed == LOST:
            grammar.reset()
            grammar.num_followed = 0
        news.append(_completion(seq, grammar.num_followed, last_tokens))
        lengths.append(grammar.num_followed + len(news[-1]))
    for _, grammar in seqs:
        grammar.num_followed = LOST  # until all is done: Ctrl-C may come
    for i in range(max(map(len, news), default=0)):
        rows = [row for row, new in enumerate(news) if i < len(new)]
        accept_tokens([seqs[row][1] for row in rows], [news[row][i] for row in rows])
    for (_, grammar), length in zip(seqs, lengths, strict=True):
        grammar.num_followed = length


def _counts(seqs: list[Sequence], last_tokens: LastTokens) -> Int32:
    """The counts of all tokens that these sequences have: slot, token and count [3, h]."""
    parts = [np.zeros((3, 0), np.int32)]
    for seq in seqs:
        completion = [token for token in _completion(seq, 0, last_tokens) if token != NO_TOKEN]
        tokens, counts = np.unique(np.array(completion, np.int32), return_counts=True)
        prompt = np.unique(np.array(seq.prompt_token_ids, np.int32))
        every = np.union1d(tokens, prompt)
        values = np.zeros(len(every), np.int32)
        values[np.searchsorted(every, tokens)] = np.minimum(counts, MAX_COUNT)
        values[np.searchsorted(every, prompt)] += IN_PROMPT
        parts.append(np.stack([np.full(len(every), seq.slot), every, values]).astype(np.int32))
    return np.concatenate(parts, axis=1)
