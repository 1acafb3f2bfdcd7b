"""`Extras`: results of a step that only some sequences ask for.

These are tokens sampled with controls, log-probabilities of tokens and of prompts, the tokens that
could have been drawn, and pooled hidden states.
All ranks take part, because each rank has a part of the logits; rank 0 gets the results.
"""

import math
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from nanovllm.distributed.group import Group
from nanovllm.engine.plan import Batch, StepPlan
from nanovllm.engine.step_inputs import Computed
from nanovllm.engine.step_layout import sampling_arrays
from nanovllm.layers.embed_head import gather_vocab
from nanovllm.layers.sampler import SamplingMetadata
from nanovllm.sampling.controlled_sampler import ControlledSampler, Drawn
from nanovllm.sampling.controls import Controls
from nanovllm.sampling.extra_results import Extra, ExtraResults
from nanovllm.sampling.logprobs import Distributions
from nanovllm.sampling.pooling import Pooling
from nanovllm.sampling.prompt_logprobs import PromptLogprobs
from nanovllm.sampling.reporting import Left, Scored, report_draws, score_own_tokens
from nanovllm.utils.device import upload

# Bytes per logit of a row with controls: the logit itself, collected from all ranks (6), edited
# (4), gathered to search for thresholds (4), and the count of its token (2). Where these have been
# gathered, the bits of the tokens that could be drawn are written later, and stay until the step
# after has been launched: an eighth of a byte.
BYTES = 16.125


class Extras:
    """The computation of these results on one rank.

    Args:
        compute_logits: LM head of the model: [B, M] -> [B, len(vocab)].
        vocab_size: vocabulary size V.
        max_num_seqs: maximum number of sequences that run at once.
        group: ranks of the model.
        last_tokens: [max_num_seqs + 1] int32, see `Step`.
        batch_invariant: whether a row's results have the same bits whatever other rows there are.

    Attributes:
        max_bytes: maximum bytes of device memory that these results of one step may need.
    """

    def __init__(
        self,
        compute_logits: Callable[[torch.Tensor], torch.Tensor],
        vocab_size: int,
        max_num_seqs: int,
        group: Group,
        last_tokens: torch.Tensor,
        batch_invariant: bool = False,
    ) -> None:
        self._vocab_size, self._group, self._last_tokens = vocab_size, group, last_tokens
        self._batch_invariant = batch_invariant
        self.prompt_logprobs = PromptLogprobs(compute_logits, vocab_size, group, batch_invariant)
        self._pooling = Pooling(batch_invariant)
        self.sampler = ControlledSampler(vocab_size, max_num_seqs + 1, batch_invariant)
        self._max_num_seqs = max_num_seqs
        self._whole: Distributions | None = None  # of all rows that may sample
        self.max_bytes = math.ceil(BYTES * max_num_seqs * vocab_size)

    def compute(
        self, plan: StepPlan, batch: Batch, computed: Computed, controls: Controls | None
    ) -> ExtraResults:
        """Compute the results that a step's sequences have asked for.

        Args:
            plan, batch: step.
            computed: results of the model; tokens of rows with controls are replaced.
            controls: controls of the step, on rank 0; None if no row has any.
        """
        scored: list[Scored] = []
        which, left = batch.scored, None
        is_any = bool(which.any())  # on all ranks alike
        if plan.controlled.any():
            scored, left = self.sample(batch, plan.controlled, computed, controls)
            for one in scored:
                which[one.places] = False
        if is_any:
            scored += self.score(which, computed)
        prompt_logprobs = self.prompt_logprobs.compute(plan, computed.hidden)
        pooled = self._pooling.compute(plan, computed.hidden)
        extra = Extra(scored, left, prompt_logprobs, pooled)
        return ExtraResults(plan, extra, self._vocab_size)

    def score(self, which: NDArray[np.bool_], computed: Computed) -> list[Scored]:
        """The log-probabilities of tokens by the model's logits; of none on ranks above 0.

        Args:
            which: [n] bool, rows that sample whose log-probabilities are wanted.
            computed: logits and tokens of all n rows.
        """
        logits = gather_vocab(computed.logits, self._vocab_size, self._group)
        if self._group.rank or not which.any():
            return []
        if self._whole is None:
            self._whole = Distributions.of_model(self._max_num_seqs, logits.device)
        rows, _, least = (part[: len(logits)] for part in self._whole)
        own = Distributions(rows, computed.logprob_divisors, least)
        return [score_own_tokens(logits, computed.tokens, own, which, self._batch_invariant)]

    def sample(
        self,
        batch: Batch,
        controlled: NDArray[np.bool_],
        computed: Computed,
        controls: Controls | None,
    ) -> tuple[list[Scored], Left | None]:
        """Sample the rows with controls again, now with them, and replace their tokens. Returns
        what they report.

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
        rows, *sampling = upload(logits.device, own, *map(np.ascontiguousarray, arrays.values()))
        by_name = dict(zip(arrays, sampling, strict=True))
        metadata = SamplingMetadata(*(by_name[name] for name in SamplingMetadata._fields))
        if len(rows) < len(logits):
            logits = logits.index_select(0, rows)
        logits = gather_vocab(logits, self._vocab_size, self._group)
        # If the plain sampler draws nothing, because a logit is NaN, controls draw nothing either.
        # Until the end such a row has any token, for log-probabilities and the other ranks.
        plain = computed.tokens.index_select(0, rows)
        scored: list[Scored] = []
        left = None
        if controls is None:
            tokens = self._group.broadcast(torch.empty_like(metadata.slots))
            self._last_tokens.index_copy_(0, metadata.slots.long(), tokens)
        else:
            drawn = Drawn(plain.clamp(min=0), logits)
            if controls.draws or self._batch_invariant:
                drawn = self.sampler(logits, metadata, controls, self._last_tokens)
            tokens = self._group.broadcast(drawn.tokens)  # the other ranks wait for them
            scored, left = report_draws(logits, drawn, controls, own, self._batch_invariant)
        tokens = torch.where(plain < 0, plain, tokens)
        computed.tokens.index_copy_(0, rows.long(), tokens)
        return scored, left
