"""`ControlledSampler`: draws for requests with controls."""

import math
from typing import NamedTuple

import numpy as np
import torch

from nanovllm.layers.embed_head import vocab_span
from nanovllm.layers.sampler import SamplingMetadata, sample_on_cpu
from nanovllm.sampling.controls import MAX_COUNT, NO_FILTERS, Controls
from nanovllm.utils.device import runs_kernels, upload, upload_beside


class Drawn(NamedTuple):
    """Draws from n rows.

    Attributes:
        tokens: [n] int32
        logits: [n, V] after masks, edits and penalties; those of the model where no row has any.
        least: [n] float32, least logits that could be drawn; None: all but -inf.
    """

    tokens: torch.Tensor
    logits: torch.Tensor
    least: torch.Tensor | None = None


class ControlledSampler:
    """Draws from the logits of a step's rows with controls: on their device, or on the host if our
    kernels cannot run there.

    The tokens of requests with penalties are counted on the same device, since only that may know
    the last of them; the table is made for the first such request.

    Args:
        vocab_size: vocabulary size V.
        num_slots: number of slots in the table of counts.
        batch_invariant: whether kernels compute a row alike, whatever the controls of others.
    """

    def __init__(self, vocab_size: int, num_slots: int, batch_invariant: bool = False) -> None:
        self.vocab_size, self.num_slots, self.batch_invariant = (
            vocab_size,
            num_slots,
            batch_invariant,
        )
        # [num_slots, V] int16: count of each token in the completion, its sign bit set if the
        # token is in the prompt.
        self.counts: torch.Tensor | None = None

    def __call__(
        self,
        logits: torch.Tensor,
        metadata: SamplingMetadata,
        controls: Controls,
        last_tokens: torch.Tensor,
    ) -> Drawn:
        """Draw from logits: [n, V], with the metadata of these rows. The tokens are also written to
        last_tokens: [N] int32, by slot.
        """
        by_kernels = runs_kernels(logits)
        here = logits.device if by_kernels else torch.device("cpu")
        counts = self._update_counts(here, controls) if controls.has_penalties else None
        if by_kernels:
            return self._on_gpu(logits, metadata, controls, last_tokens, counts)
        slots, metadata = metadata.slots, metadata.on_host()
        x = process_logits(logits.cpu(), metadata.slots, controls, counts)
        left, least = x, None
        if controls.has_filters:
            least = least_logits(x, metadata.temperatures, controls)
            left = x.masked_fill(x < least[:, None], -torch.inf)
        tokens, _ = sample_on_cpu(left, metadata, range(self.vocab_size), self.vocab_size)
        drawn = tokens.to(last_tokens.device)
        last_tokens.index_copy_(0, slots.long(), drawn)
        if counts is not None:
            own = counts[metadata.slots, tokens]
            counts[metadata.slots, tokens] = own + ((own & MAX_COUNT) < MAX_COUNT)
        return Drawn(drawn, x, least)

    def _on_gpu(
        self,
        logits: torch.Tensor,
        metadata: SamplingMetadata,
        controls: Controls,
        last_tokens: torch.Tensor,
        counts: torch.Tensor | None,
    ) -> Drawn:
        from nanovllm.kernels.sampling import controls as kernels
        from nanovllm.kernels.sampling.draw import sample
        from nanovllm.kernels.sampling.thresholds import thresholds

        top_k, top_p, min_p, penalties, mask_rows, starts, edit_tokens, biases = upload(
            logits.device,
            controls.top_k,
            controls.top_p,
            controls.min_p,
            controls.penalties,
            controls.mask_rows,
            controls.edit_starts,
            controls.edit_tokens,
            controls.edit_biases,
        )
        masks = upload_beside(logits.device, controls.masks)
        span, (temperatures, keys, positions, slots, _) = vocab_span(self.vocab_size), metadata
        filters = controls.has_filters or self.batch_invariant
        weighs = span == kernels.SPAN and not filters
        x, tops, weights = kernels.process(
            logits, slots, masks, mask_rows, starts, edit_tokens, biases, penalties,
            counts, temperatures if weighs else None,
        )  # fmt: skip
        least = None
        if filters:
            least = thresholds(x, tops, temperatures, top_k, top_p, min_p)
        tokens, _ = sample(
            x, temperatures, keys, positions, slots, last_tokens, span,
            least=least, tops=tops, weights=weights,
        )  # fmt: skip
        if counts is not None:
            kernels.count(counts, slots, tokens)
        return Drawn(tokens, x, least)

    def _update_counts(self, device: torch.device, controls: Controls) -> torch.Tensor:
        """The table of counts, after new sequences' rows are reset."""
        if self.counts is None:
            shape = (self.num_slots, self.vocab_size)
            self.counts = torch.zeros(shape, dtype=torch.int16, device=device)
        if len(controls.reset):
            reset, changed = upload(device, controls.reset, controls.counts)
            slots, tokens, counts = changed.long()
            self.counts[reset.long()] = 0
            self.counts[slots, tokens] = counts.to(torch.int16)
        return self.counts


def process_logits(
    logits: torch.Tensor, slots: torch.Tensor, controls: Controls, counts: torch.Tensor | None
) -> torch.Tensor:
    """Apply masks, edits and penalties: logits [n, V] -> [n, V] float32."""
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
    return x.masked_fill_(x.isnan(), -torch.inf)  # also NaN of a banned inf


def least_logits(x: torch.Tensor, temperatures: torch.Tensor, controls: Controls) -> torch.Tensor:
    """The least logit of each row of x: [n, V] float32 that min_p, top_k and top_p keep. Returns
    [n] float32; -inf where they keep all.
    """
    least = torch.full((len(x),), -torch.inf, dtype=torch.float32)
    filters = (f.tolist() for f in (controls.top_k, controls.top_p, controls.min_p))
    for i, (T, top_k, top_p, min_p) in enumerate(zip(temperatures.tolist(), *filters, strict=True)):
        if (top_k, top_p, min_p) == NO_FILTERS:
            continue
        left = x[i]  # the values that are kept
        if min_p > 0:
            left = left[left.double() >= left.max().double() + T * math.log(min_p)]
        if top_k > 0:
            left = left[left >= left.topk(min(top_k, len(left))).values[-1]]
        if top_p < 1:
            left = left.sort(descending=True).values
            mass = (left.double() / T).softmax(0).cumsum(0)
            left = left[: int((mass < top_p).sum()) + 1]
        least[i] = left.min()
    return least
