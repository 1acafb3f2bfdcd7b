"""`ControlledSampler`: draws for the rows whose requests have controls, and reports logprobs."""

from typing import NamedTuple

import numpy as np
import torch

from nanovllm.engine.controls import MAX_COUNT, Controls
from nanovllm.layers.sampler import SamplingMetadata, sample_on_cpu
from nanovllm.sampling_params import MIN_TEMPERATURE


class Logprobs(NamedTuple):
    """Log-probabilities by the model alone, of n rows: the drawn token's and the N largest.

    Attributes:
        token_ids: [n, 1 + N] int32, the drawn token first.
        values: [n, 1 + N] float32.
        ranks: [n] int32, of the drawn token, 1 for the most likely.
    """

    token_ids: torch.Tensor
    values: torch.Tensor
    ranks: torch.Tensor


class ControlledSampler:
    """Draws from the logits of a step's rows with controls, on the device of the logits.

    Tokens of requests with penalties are counted on the device, since the last of them may be
    known there only; the table is made when the first such request comes.

    Args:
        vocab_size: V.
        max_num_seqs: slots of the table of counts.
    """

    def __init__(self, vocab_size: int, max_num_seqs: int) -> None:
        self.vocab_size, self.max_num_seqs = vocab_size, max_num_seqs
        # [max_num_seqs, V] int16: how often each token is in the completion, the sign bit set for
        # those in the prompt.
        self.counts: torch.Tensor | None = None

    def __call__(
        self, logits: torch.Tensor, metadata: SamplingMetadata, controls: Controls
    ) -> tuple[torch.Tensor, Logprobs | None]:
        """logits: [n, V], metadata: of the same n rows. Returns tokens [n] int32."""
        if controls.has_penalties:
            self._update_counts(logits.device, controls)
        filtered = filter_logits(
            process_logits(logits, metadata.slots, controls, self.counts),
            metadata.temperatures, controls,
        )  # fmt: skip
        tokens, _ = sample_on_cpu(filtered, metadata, range(self.vocab_size), self.vocab_size)
        if self.counts is not None and controls.has_penalties:
            own = self.counts[metadata.slots, tokens]
            self.counts[metadata.slots, tokens] = own + ((own & MAX_COUNT) < MAX_COUNT)
        num_logprobs = int(controls.num_logprobs.max())
        return tokens, None if num_logprobs < 0 else logprobs_of(logits, tokens, num_logprobs)

    def _update_counts(self, device: torch.device, controls: Controls) -> None:
        """Begin anew for the sequences that the table does not have."""
        if self.counts is None:
            shape = (self.max_num_seqs, self.vocab_size)
            self.counts = torch.zeros(shape, dtype=torch.int16, device=device)
        if len(controls.reset):
            slots, tokens, counts = torch.from_numpy(controls.counts).to(device).long()
            self.counts[torch.from_numpy(controls.reset).to(device).long()] = 0
            self.counts[slots, tokens] = counts.to(torch.int16)


def process_logits(
    logits: torch.Tensor, slots: torch.Tensor, controls: Controls, counts: torch.Tensor | None
) -> torch.Tensor:
    """Masks, edits and penalties: logits [n, V] -> [n, V] float32."""
    x = logits.to(torch.float32, copy=True)
    V = x.shape[1]
    masked = np.flatnonzero(controls.mask_rows >= 0)
    if len(masked):
        masks = controls.masks[controls.mask_rows[masked]]
        bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")[:, :V]
        x[masked] = x[masked].masked_fill(torch.from_numpy(bits == 0), -torch.inf)
    rows = np.repeat(np.arange(len(x)), np.diff(controls.edit_starts))
    where = (torch.from_numpy(rows), torch.from_numpy(controls.edit_tokens).long())
    x.index_put_(where, torch.from_numpy(controls.edit_biases), accumulate=True)
    if controls.has_penalties:
        assert counts is not None, "tokens have not been counted"
        repetition, presence, frequency = torch.from_numpy(controls.penalties).unsqueeze(-1)
        seen = counts[slots]
        x = torch.where(seen != 0, torch.where(x > 0, x / repetition, x * repetition), x)
        count = (seen & MAX_COUNT).float()
        x -= frequency * count + presence * (count > 0)
    return x


def filter_logits(x: torch.Tensor, temperatures: torch.Tensor, controls: Controls) -> torch.Tensor:
    """min_p, top_k and top_p: x [n, V] float32, what they leave out set to -inf."""
    if not controls.has_filters:
        return x
    V = x.shape[1]
    scale = temperatures.clamp(min=MIN_TEMPERATURE).double().unsqueeze(1)  # [n, 1]
    values = x.double().sort(dim=1, descending=True).values / scale
    logp = values - values[:, :1]
    top_k = torch.from_numpy(controls.top_k).long()
    kth = torch.where(top_k > 0, top_k, V).clamp(max=V).unsqueeze(1) - 1
    min_p = torch.from_numpy(controls.min_p).double().unsqueeze(1)
    kept = (values >= values.gather(1, kth)) & (logp >= min_p.log())
    weights = logp.exp() * kept
    top_p = torch.from_numpy(controls.top_p).double().unsqueeze(1)
    before = weights.cumsum(1) - weights  # of the tokens ahead
    kept &= (before < top_p * weights.sum(1, keepdim=True)) | (top_p >= 1)
    last = kept.sum(1, keepdim=True).clamp(min=1) - 1
    greedy = temperatures < MIN_TEMPERATURE
    least = x.sort(dim=1, descending=True).values.gather(1, last)
    return x.masked_fill((x < least) & ~greedy.unsqueeze(1), -torch.inf)


def logprobs_of(logits: torch.Tensor, tokens: torch.Tensor, num_logprobs: int) -> Logprobs:
    """Of the drawn tokens [n] and the `num_logprobs` most likely ones, by logits [n, V]."""
    logp = logits.float().log_softmax(-1)
    drawn = logp.gather(1, tokens.long().unsqueeze(1))
    top = logp.topk(min(num_logprobs, logp.shape[1]), dim=1)
    return Logprobs(
        torch.cat([tokens.unsqueeze(1), top.indices.to(torch.int32)], dim=1),
        torch.cat([drawn, top.values], dim=1),
        (logp > drawn).sum(1).to(torch.int32) + 1,
    )
