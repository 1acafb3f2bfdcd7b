"""`Sampler`: logits to tokens."""

from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from nanovllm.distributed.group import Group
from nanovllm.layers.embed_head import local_vocab, vocab_span
from nanovllm.sampling_params import MIN_TEMPERATURE, NO_TOKEN
from nanovllm.utils.device import runs_kernels


class SamplingMetadata(NamedTuple):
    """The parameters of each of n rows to sample.

    Attributes:
        temperatures: [n] float32; 0 takes the largest logit.
        random_keys: [2, n] int32, two words for each request, uint32 in their bits.
        positions: [n] int32, position of the token to sample.
        slots: [n] int32, index of the token in the table of last tokens.
        logprob_divisors: [n] float32, divisors of the logits for the token's log-probability; 0: it
            is not wanted.
    """

    temperatures: torch.Tensor
    random_keys: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    logprob_divisors: torch.Tensor

    def on_host(self) -> "SamplingMetadata":
        """A copy in host memory."""
        return SamplingMetadata(*(part.cpu() for part in self))


class Sampler(nn.Module):
    """A draw from softmax(logits / temperature), or the largest logit at temperature 0.

    A draw is by the Gumbel-max trick: `argmax(logits / temperature - log E)` with E ~ Exp(1) draws
    in proportion to the exponentials, exactly and without cumulative sums. On a GPU, a span of the
    vocabulary is drawn first, by its sum (`kernels/sampling/draw.py`).

    The noise of a row depends only on its request's key and the token's position, so a request
    draws the same tokens whatever else is in the batch. Each rank finds the best of its part of the
    vocabulary, and the best of those is drawn: ranks exchange scores and tokens, not logits.

    A row with a NaN has no distribution, so nothing is drawn: its token is `NO_TOKEN`.
    """

    def __init__(self, vocab_size: int, group: Group) -> None:
        super().__init__()
        self.vocab_size, self.group = vocab_size, group
        self.vocab = local_vocab(vocab_size, group.rank, group.size)

    def forward(
        self, logits: torch.Tensor, metadata: SamplingMetadata, last_tokens: torch.Tensor
    ) -> torch.Tensor:
        """Sample from logits: [n, len(vocab)]. Returns tokens [n] int32. They are also written to
        last_tokens: [N] int32, by slot, with 0 for `NO_TOKEN`: the next step may embed a token
        before the host has seen it.
        """
        if runs_kernels(logits):
            from nanovllm.kernels.sampling.draw import sample

            peers = self.group.peers if self.group.can_exchange(logits) else None
            start, span = self.vocab.start, vocab_span(self.vocab_size)
            tokens, scores = sample(
                logits,
                metadata.temperatures,
                metadata.random_keys,
                metadata.positions,
                metadata.slots,
                last_tokens,
                span,
                start,
                peers,
            )
            if self.group.size == 1 or peers is not None:
                return tokens
        else:
            tokens, scores = sample_on_cpu(logits, metadata, self.vocab, self.vocab_size)
        tokens = self._best(tokens, scores)
        last_tokens.index_copy_(0, metadata.slots.long(), tokens.clamp(min=0))
        return tokens

    def _best(self, tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Choose among the ranks' tokens [n] int32 those with the highest scores [n], the first of
        equals. NaN is the highest.
        """
        everyone = self.group.all_gather(torch.stack([scores.double(), tokens.double()]))
        best = everyone[:, 0].argmax(0, keepdim=True)  # [1, n], a rank
        return everyone[:, 1].gather(0, best)[0].to(torch.int32)


def sample_on_cpu(
    logits: torch.Tensor, metadata: SamplingMetadata, vocab: range, vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample with numpy's Philox generator; a GPU that cannot run our kernels waits for it.

    Args:
        logits: [n, len(vocab)], on any device.
        vocab: tokens of these columns.

    Returns:
        Tokens [n] int32 and their scores [n] float32, on the device of the logits; `NO_TOKEN` and
        NaN for rows with a NaN.
    """
    metadata = metadata.on_host()
    scores = logits.to("cpu", torch.float32, copy=True)
    lost = scores.isnan().any(1)
    keys = metadata.random_keys.numpy().view(np.uint32).T.astype(np.uint64)  # [n, 2]
    # As tensors: they compare in float32, as the kernels do.
    for row in (metadata.temperatures >= MIN_TEMPERATURE).nonzero().flatten().tolist():
        key = int(keys[row, 0]) << 32 | int(keys[row, 1])
        bits = np.random.Philox(key=key, counter=int(metadata.positions[row]) << 64)
        # In float64: float32 has draws of exactly 0, which would win over everything.
        noise = np.random.Generator(bits).standard_exponential(vocab_size)
        own = torch.from_numpy(noise[vocab.start : vocab.stop])
        scores[row].div_(metadata.temperatures[row]).sub_(own.log_())
    if not len(vocab):
        columns = torch.zeros(len(scores), dtype=torch.int64)
        best = scores.new_full((len(scores),), -torch.inf)
    else:
        best, columns = scores.max(dim=-1)  # NaN where there is one
    tokens = (columns + vocab.start).to(torch.int32).masked_fill_(lost, NO_TOKEN)
    return tokens.to(logits.device), best.to(logits.device)
