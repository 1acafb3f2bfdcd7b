"""`PromptLogprobs`: log-probabilities of prompt tokens, for requests that ask for them."""

from collections.abc import Callable

import numpy as np
import torch

from nanovllm.distributed.group import Group
from nanovllm.engine.plan import StepPlan
from nanovllm.layers.embed_head import gather_vocab
from nanovllm.sampling.logprobs import Logprobs, logprobs_of
from nanovllm.utils.device import upload

ROWS = 256  # of prompts, whose logits are computed at once


class PromptLogprobs:
    """Their computation on one rank. All ranks take part; rank 0 gets the results.

    Args:
        compute_logits: LM head of the model: [B, M] -> [B, len(vocab)].
        vocab_size: vocabulary size V.
        group: ranks of the model.
        batch_invariant: whether a row's results have the same bits whatever other rows there are.
    """

    def __init__(
        self,
        compute_logits: Callable[[torch.Tensor], torch.Tensor],
        vocab_size: int,
        group: Group,
        batch_invariant: bool = False,
    ) -> None:
        self._compute_logits, self._vocab_size, self._group = compute_logits, vocab_size, group
        self._batch_invariant = batch_invariant

    def compute(self, plan: StepPlan, hidden: torch.Tensor) -> list[Logprobs]:
        """Log-probabilities of prompt tokens, each from the hidden state before it. At most `ROWS`
        rows are computed at a time, to bound the memory of their logits; each is a part.

        Args:
            plan: plan of the step.
            hidden: [T, M], hidden states of the whole step.
        """
        if not plan.prompt_logprobs.size:
            return []
        ends = np.cumsum(plan.num_tokens)
        rows: list[int] = []
        targets: list[int] = []
        for i, count, next_token in plan.prompt_logprobs[:3].T.tolist():
            start = int(ends[i] - plan.num_tokens[i])
            following = plan.token_ids[start + 1 : ends[i]].tolist()
            rows += range(start, start + count)
            targets += [*following, next_token][:count]
        most, parts = min(int(plan.prompt_logprobs[3].max()), self._vocab_size), []
        for start in range(0, len(rows), ROWS):
            own = np.array(rows[start : start + ROWS], np.int32)
            index, drawn = upload(
                hidden.device, own, np.array(targets[start : start + ROWS], np.int32)
            )
            logits = self._compute_logits(hidden.index_select(0, index))
            logits = gather_vocab(logits, self._vocab_size, self._group)
            if self._group.rank == 0:
                parts.append(
                    logprobs_of(logits, drawn, most, batch_invariant=self._batch_invariant)
                )
        return parts
