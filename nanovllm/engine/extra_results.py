"""`ExtraResults`: what comes with a step's tokens for those who asked, on its way to the host."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nanovllm.engine.plan import StepPlan
from nanovllm.engine.sequence import ScheduledSequence
from nanovllm.layers.controlled_sampler import Logprobs
from nanovllm.utils.device import to_host


class ExtraResults:
    """The results of `Extras`.

    Args:
        plan: that of the step.
        logprobs: of the tokens sampled with controls, None if nobody asked.
        prompt_logprobs: of prompt tokens.
        pooled: [k, M] float32.
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

    def give(self, scheduled: list[ScheduledSequence]) -> None:
        """Give the sequences of the step what is theirs. The tokens are there, and not booked."""
        plan = self._plan
        if self._logprobs:
            sampled = [item.seq for item in scheduled if item.samples]
            rows = np.flatnonzero(plan.controlled[plan.samples]).tolist()
            for row, entry in zip(rows, _entries(self._logprobs), strict=True):
                logprobs = sampled[row].logprobs
                if logprobs is not None and not sampled[row].is_finished:
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
        if self._pooled is not None:
            ended = [i for i, _ in plan.pooling.T.tolist() if plan.samples[i]]
            for i, vector in zip(ended, self._pooled.tolist(), strict=True):
                scheduled[i].seq.embedding = vector


def _entries(parts: list[NDArray[Any]]) -> list[tuple[list[int], list[float], int]]:
    """For each token: ids, its own first, their log-probabilities, and its rank."""
    return list(zip(*(part.tolist() for part in parts), strict=True))
