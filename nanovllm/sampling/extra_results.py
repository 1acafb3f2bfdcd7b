"""`ExtraResults`: optional results of a step beside its tokens, on their way to the host."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from nanovllm.engine.plan import StepPlan
from nanovllm.engine.sequence import ScheduledSequence
from nanovllm.sampling.logprobs import Logprobs
from nanovllm.sampling.reporting import Left, Scored
from nanovllm.token_sets import pack
from nanovllm.utils.device import rows_to_host, to_host
from nanovllm.utils.modes import without_modes


class Extra(NamedTuple):
    """The results of `Extras`, on the device.

    Attributes:
        scored: log-probabilities of drawn tokens.
        left: tokens that could have been drawn; None: nobody has asked, or all could.
        prompt_logprobs: log-probabilities of prompt tokens, in parts.
        pooled: [k, M] float32, embeddings of prompts that end in the step; None: there are none.
    """

    scored: list[Scored]
    left: Left | None
    prompt_logprobs: list[Logprobs]
    pooled: torch.Tensor | None


class ExtraResults:
    """The results of a step, on the host once its tokens are.

    Args:
        plan: plan of the step.
        extra: results on the device.
        vocab_size: vocabulary size V.
    """

    def __init__(self, plan: StepPlan, extra: Extra, vocab_size: int) -> None:
        self._plan, self._vocab_size = plan, vocab_size
        self._scored = [one._replace(logprobs=one.logprobs.to_host()) for one in extra.scored]
        self._left, self._listed = extra.left, None
        if extra.left is not None:  # whose words stay where they are, for sets of many tokens
            self._listed = to_host(extra.left.listed).numpy()
        self._prompt_logprobs = [part.to_host() for part in extra.prompt_logprobs]
        self._pooled = None if extra.pooled is None else to_host(extra.pooled).numpy()

    def give(self, scheduled: list[ScheduledSequence], token_ids: list[int]) -> None:
        """Give the sequences of the step their results. NaN ends a sequence with an error.

        Args:
            scheduled: sequences of the step.
            token_ids: tokens that it has sampled, not booked yet.
        """
        if self._scored or self._left is not None:
            sampled = [item for item in scheduled if item.samples]
            is_open = [
                token >= 0 and not item.seq.is_finished
                for item, token in zip(sampled, token_ids, strict=True)
            ]
            for scored in self._scored:
                _give_logprobs(scored, sampled, is_open)
            self._give_masks(sampled, is_open)
        if self._prompt_logprobs:
            self._give_prompt_logprobs(scheduled)
        if self._pooled is not None:
            ended = [i for i, _ in self._plan.pooling.T.tolist() if self._plan.samples[i]]
            lost = np.isnan(self._pooled).any(1).tolist()
            for i, vector, is_lost in zip(ended, self._pooled.tolist(), lost, strict=True):
                results = scheduled[i].seq.results
                results.has_nan = results.has_nan or is_lost
                results.embedding = None if is_lost else vector

    def _give_masks(self, sampled: list[ScheduledSequence], is_open: list[bool]) -> None:
        if self._left is None or self._listed is None:
            return
        sets = _packed(self._listed, self._left.words, self._vocab_size)
        for place, packed in zip(self._left.places.tolist(), sets, strict=True):
            item = sampled[place]
            mask = item.seq.results.sampling_mask
            if mask is not None and is_open[place]:
                mask.put(item.end - item.seq.num_prompt_tokens, packed)

    def _give_prompt_logprobs(self, scheduled: list[ScheduledSequence]) -> None:
        plan = self._plan
        entries = (entry for part in self._prompt_logprobs for entry in _entries(part))
        for i, count, *_ in plan.prompt_logprobs.T.tolist():
            results = scheduled[i].seq.results
            logprobs = results.prompt_logprobs
            assert logprobs is not None, "nobody asked"
            first = int(plan.starts[i]) + 1
            for position in range(first, first + count):
                entry = next(entries)
                if position == len(logprobs):  # not again after a preemption
                    logprobs.append(*entry)
                    if math.isnan(entry[1][0]):
                        results.has_nan = True


def _give_logprobs(scored: Scored, sampled: list[ScheduledSequence], is_open: list[bool]) -> None:
    """Give sequences that go on the log-probabilities of their tokens."""
    found, labels = scored.logprobs, scored.label_tokens
    if found.values.shape[1] == 1 and not len(labels):  # of the tokens alone, maybe in each step
        columns = found.token_ids[:, 0], found.values[:, 0], found.ranks
        lists = (column.tolist() for column in (scored.places, *columns))
        for place, token, value, rank in zip(*lists, strict=True):
            logprobs = sampled[place].seq.results.logprobs if place >= 0 else None
            if logprobs is not None and is_open[place]:
                logprobs.append_token(token, value, rank)
        return
    bounds = np.searchsorted(scored.label_entries, np.arange(len(found.ranks) + 1)).tolist()
    tokens, values = labels.tolist(), found.labels.tolist()
    for i, (place, entry) in enumerate(zip(scored.places.tolist(), _entries(found), strict=True)):
        logprobs, own = sampled[place].seq.results.logprobs, slice(bounds[i], bounds[i + 1])
        if logprobs is not None and is_open[place]:
            ids, logs, rank = entry
            if tokens[own]:
                ids, logs = [ids[0], *tokens[own]], [logs[0], *values[own]]
            logprobs.append(ids, logs, rank)


def _packed(listed: NDArray[np.int32], words: torch.Tensor, vocab_size: int) -> list[bytes | None]:
    """The sets of tokens for `TokenSets`, from `Left.listed` and, on the device, `Left.words`."""
    data, width, counts = listed.tobytes(), listed.shape[1], listed[:, 0]
    begins = range(1, listed.size + 1, width)  # with a width of 1, no ids follow the counts
    packed: list[bytes | None] = [
        data[4 * begin : 4 * (begin + count)]
        for begin, count in zip(begins, counts.tolist(), strict=True)
    ]
    many = np.flatnonzero(counts >= width)
    if len(many):
        with without_modes():  # in which the step was launched
            found = rows_to_host(words, many).numpy()
        for i, own in zip(many.tolist(), pack(found, vocab_size), strict=True):
            packed[i] = own
    return packed


def _entries(found: Logprobs) -> Iterator[tuple[list[int], list[float], int]]:
    """An entry for each token: ids, its own first, their log-probabilities, and its rank."""
    columns = found.token_ids.tolist(), found.values.tolist(), found.ranks.tolist()
    return zip(*columns, strict=True)
