"""`Extras`: results of a step that only some sequences ask for.

These are tokens sampled with controls, log-probabilities of the prompt, and pooled hidden states.
All ranks take part, because each rank has a part of the logits; rank 0 gets the results.
"""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from nanovllm.distributed.group import Group
from nanovllm.engine.plan import Batch, StepPlan
from nanovllm.engine.step_inputs import Computed
from nanovllm.engine.step_layout import sampling_arrays
from nanovllm.layers.embed_head import local_vocab
from nanovllm.layers.sampler import SamplingMetadata
from nanovllm.sampling.controlled_sampler import ControlledSampler, Logprobs, logprobs_of
from nanovllm.sampling.controls import Controls
from nanovllm.sampling.extra_results import ExtraResults
from nanovllm.utils.device import upload

ROWS = 256  # hidden states of prompts whose logits are computed at once
# Bytes per logit of a row with controls: the logit itself, collected from all ranks (6), edited
# (4), gathered to search for thresholds (4), and the count of its token (2).
BYTES = 16


class Extras:
    """The computation of these results on one rank.

    Args:
        compute_logits: LM head of the model: [B, M] -> [B, len(vocab)].
        vocab_size: vocabulary size V.
        max_num_seqs: maximum number of sequences that run at once.
        group: ranks of the model.
        last_tokens: [max_num_seqs + 1] int32, see `ModelRunner`.

    Attributes:
        max_bytes: most bytes of device memory that these results of one step may need.
    """

    def __init__(
        self,
        compute_logits: Callable[[torch.Tensor], torch.Tensor],
        vocab_size: int,
        max_num_seqs: int,
        group: Group,
        last_tokens: torch.Tensor,
    ) -> None:
        self._compute_logits, self._vocab_size, self._group = compute_logits, vocab_size, group
        self._last_tokens = last_tokens
        self.sampler = ControlledSampler(vocab_size, max_num_seqs)
        self.max_bytes = BYTES * max_num_seqs * vocab_size
        # Sums of hidden states [M] float32, by slot and by the position at which they end.
        self._sums: dict[int, dict[int, torch.Tensor]] = {}

    def compute(
        self, plan: StepPlan, batch: Batch, computed: Computed, controls: Controls | None
    ) -> ExtraResults:
        """Compute the results that a step's sequences have asked for.

        Args:
            plan, batch: step.
            computed: results of the model; tokens of rows with controls are replaced.
            controls: controls of the step, on rank 0; None if no row has any.
        """
        logprobs = None
        if plan.controlled.any():
            logprobs = self.sample(batch, plan.controlled, computed, controls)
        prompt_logprobs = self.prompt_logprobs(plan, computed.hidden)
        return ExtraResults(plan, logprobs, prompt_logprobs, self.pool(plan, computed.hidden))

    def sample(
        self,
        batch: Batch,
        controlled: NDArray[np.bool_],
        computed: Computed,
        controls: Controls | None,
    ) -> Logprobs | None:
        """Sample the rows with controls again, now with them, and replace their tokens.

        Args:
            batch: batch of B sequences.
            controlled: [B] bool, whether a sequence's row has controls; n of those that sample do.
            computed: logits and tokens of all rows that sample.
            controls: controls of these n rows on rank 0; None on other ranks, which receive the
                tokens.
        """
        logits = computed.logits
        own = np.flatnonzero(controlled[batch.samples]).astype(np.int32)  # among rows that sample
        arrays = sampling_arrays(batch, controlled)
        rows, *sampling = upload(logits.device, own, *(array.T for array in arrays.values()))
        metadata = SamplingMetadata(**dict(zip(arrays, sampling, strict=True)))
        if len(rows) < len(logits):
            logits = logits.index_select(0, rows)
        logits, logprobs = self._whole_rows(logits), None
        # If the plain sampler draws nothing, because a logit is NaN, controls draw nothing either.
        # Until the end such a row has any token, for log-probabilities and the other ranks.
        plain = computed.tokens.index_select(0, rows)
        if controls is None:
            tokens = self._group.broadcast(torch.empty_like(metadata.slots))
            self._last_tokens.index_copy_(0, metadata.slots.long(), tokens)
        else:
            if controls.draws:
                tokens = self.sampler(logits, metadata, controls, self._last_tokens)
            else:
                tokens = plain.clamp(min=0)
            most = min(int(controls.num_logprobs.max()), self._vocab_size)
            logprobs = None if most < 0 else logprobs_of(logits, tokens, most)
            self._group.broadcast(tokens)
        tokens = torch.where(plain < 0, plain, tokens)
        computed.tokens.index_copy_(0, rows.long(), tokens)
        return logprobs

    def _whole_rows(self, logits: torch.Tensor) -> torch.Tensor:
        """Gather all ranks' columns: [n, len(vocab)] -> [n, V]."""
        size = self._group.size
        if size == 1:
            return logits
        width = len(local_vocab(self._vocab_size, 0, size))  # the first rank has the most
        padded = nn.functional.pad(logits, (0, width - logits.shape[1]))
        whole = self._group.all_gather(padded).transpose(0, 1).flatten(1)
        return whole[:, : self._vocab_size].contiguous()

    def prompt_logprobs(self, plan: StepPlan, hidden: torch.Tensor) -> Logprobs | None:
        """Log-probabilities of prompt tokens, each from the hidden state before it. At most `ROWS`
        rows are computed at a time, to bound the memory of their logits.

        Args:
            plan: plan of the step.
            hidden: [T, M], hidden states of the whole step.
        """
        if not plan.prompt_logprobs.size:
            return None
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
            logits = self._whole_rows(logits)
            if self._group.rank == 0:
                parts.append(logprobs_of(logits, drawn, most))
        return Logprobs(*map(torch.cat, zip(*parts, strict=True))) if parts else None

    def pool(self, plan: StepPlan, hidden: torch.Tensor) -> torch.Tensor | None:
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
                total = before + rows.sum(0, dtype=torch.float32)
                self._sums[slot] = {start: before, end: total}  # a failed step is repeated
                vector = total / end
            if plan.samples[i]:
                pooled.append(vector)
        return torch.stack(pooled) if pooled else None
