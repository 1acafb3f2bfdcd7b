"""`Pooling`: one vector for each prompt that is to be embedded."""

import numpy as np
import torch

from nanovllm.distributed.group import sum_in_order
from nanovllm.engine.plan import StepPlan


class Pooling:
    """Hidden states of prompts, pooled over the steps that compute them.

    Args:
        batch_invariant: whether to add one after another, so that it does not matter how a prompt
            was divided into steps.
    """

    def __init__(self, batch_invariant: bool = False) -> None:
        self._batch_invariant = batch_invariant
        # Sums of hidden states [M] float32, by slot and by the position at which they end.
        self._sums: dict[int, dict[int, torch.Tensor]] = {}

    def compute(self, plan: StepPlan, hidden: torch.Tensor) -> torch.Tensor | None:
        """One vector for each prompt to embed that ends in this step: its last hidden state, or the
        mean of all. With chunked prefill, sums are kept from step to step.

        Args:
            plan: plan of the step.
            hidden: [T, M], hidden states of the whole step.

        Returns:
            [k, M] float32; None if no such prompt ends.
        """
        pooled = []
        ends = np.cumsum(plan.num_tokens)
        for i, is_mean in plan.pooling.T.tolist():
            rows = hidden[ends[i] - plan.num_tokens[i] : ends[i]]
            vector = rows[-1].float()
            if is_mean:
                slot, start = int(plan.slots[i]), int(plan.starts[i])
                end = start + int(plan.num_tokens[i])
                if start == 0:
                    self._sums[slot] = {0: torch.zeros_like(vector)}
                before = self._sums[slot][start]
                if self._batch_invariant:
                    total = sum_in_order(torch.cat([before[None], rows.float()]))
                else:
                    total = before + rows.sum(0, dtype=torch.float32)
                self._sums[slot] = {start: before, end: total}  # a failed step is repeated
                vector = total / end
            if plan.samples[i]:
                pooled.append(vector)
        return torch.stack(pooled) if pooled else None
