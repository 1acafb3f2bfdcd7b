"""`ExtraResults`: optional results of a step beside its tokens, on their way to the host."""

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nanovllm.engine.plan import StepPlan
from nanovllm.engine.sequence import ScheduledSequence
from nanovllm.sampling.controlled_sampler import Logprobs
from nanovllm.scheduling.stopping import NOT_NUMBERS
from nanovllm.utils.device import to_host


class ExtraResults:
    """The results of `Extras`.

    Args:
        plan: plan of the step.
        logprobs: log-probabilities of tokens sampled with controls; None: not asked for.
        prompt_logprobs: log-probabilities of prompt tokens; None: not asked for.
        pooled: [k, M] float32, embeddings of prompts that end in the step; None: there are none.
    """

    def __init__(
        self,
        plan: StepPlan,
        logprobs: Logprobs | None,
        prompt_logprobs: Logprobs | None,
        pooled: torch.Tensor | None,
    ) -> None:
        self._plan = plan
        self._logprobs = [to_host(part).numpy() for part in logprobs or ()]
        self._prompt_logprobs = [to_host(part).numpy() for part in prompt_logprobs or ()]
        self._pooled = None if pooled is None else to_host(pooled).numpy()

    def give(self, scheduled: list[ScheduledSequence], token_ids: list[int]) -> None:
        """Give the sequences of the step their results. NaN ends a sequence with an error.

        Args:
            scheduled: sequences of the step.
            token_ids: tokens that it has sampled, not booked yet.
        """
        plan = self._plan
        if self._logprobs:
            sampled = [item.seq for item in scheduled if item.samples]
            rows = np.flatnonzero(plan.controlled[plan.samples]).tolist()
            for row, entry in zip(rows, _entries(self._logprobs), strict=True):
                logprobs = sampled[row].logprobs
                is_open = not sampled[row].is_finished and token_ids[row] >= 0
                if logprobs is not None and is_open:
                    logprobs.append(*entry)
        if self._prompt_logprobs:
            entries = iter(_entries(self._prompt_logprobs))
            for i, count, *_ in plan.prompt_logprobs.T.tolist():
                logprobs = scheduled[i].seq.prompt_logprobs
                assert logprobs is not None, "nobody asked"
                first = int(plan.starts[i]) + 1
                for position in range(first, first + count):
                    entry = next(entries)
                    if position == len(logprobs):  # not again after a preemption
                        logprobs.append(*entry)
                        if math.isnan(entry[1][0]):
                            scheduled[i].seq.error = NOT_NUMBERS
        if self._pooled is not None:
            ended = [i for i, _ in plan.pooling.T.tolist() if plan.samples[i]]
            lost = np.isnan(self._pooled).any(1).tolist()
            for i, vector, is_lost in zip(ended, self._pooled.tolist(), lost, strict=True):
                if is_lost:
                    scheduled[i].seq.error = NOT_NUMBERS
                else:
                    scheduled[i].seq.embedding = vector


def _entries(parts: list[NDArray[Any]]) -> list[tuple[list[int], list[float], int]]:
    """An entry for each token: ids, its own first, their log-probabilities, and its rank."""
    return list(zip(*(part.tolist() for part in parts), strict=True))
