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
    """How to sample each of n rows.

    Attributes:
        temperatures: [n] float32; 0 takes the largest logit.
        random_keys: [2, n] int32, two words for each request, uint32 in their bits.
        positions: [n] int32, the position that the sampled token will have.
        slots: [n] int32, where the token goes in the table of last tokens.
    """

    temperatures: torch.Tensor
    random_keys: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor

    def on_host(self) -> "SamplingMetadata":
        """The same in the host's memory."""
        return SamplingMetadata(*(part.cpu() for part in self))


class Sampler(nn.Module):
    """Draws from softmax(logits / temperature); takes the largest logit at temperature 0.

    Drawing is the Gumbel-max trick: `argmax(logits / temperature - log E)` with E ~ Exp(1) draws
    in proportion to the exponentials, exactly and without cumulative sums. On a GPU a span of the
    vocabulary is drawn first, by its sum (`kernels/sampling/draw.py`).

    The noise of a row depends on its request's key and the token's position alone, so a request
    draws the same tokens whatever it shares a batch with. Each rank takes the best of its part of
    the vocabulary, and the best of those is drawn: ranks exchange scores and tokens, not logits.

    A row with a NaN has no distribution, so nothing is drawn: its token is `NO_TOKEN`.
    """

    def __init__(self, vocab_size: int, group: Group) -> None:
        super().__init__()
        self.vocab_size, self.group = vocab_size, group
        self.vocab = local_vocab(vocab_size, group.rank, group.size)

    def forward(
        self, logits: torch.Tensor, metadata: SamplingMetadata, last_tokens: torch.Tensor
    ) -> torch.Tensor:
        """logits: [n, len(vocab)]. Returns [n] int32, also written to last_tokens: [N] int32, by
        slot, 0 for `NO_TOKEN`: the next step may embed it before the host has seen it.
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
        """Of the ranks' tokens [n] int32 those with the highest scores [n], the first of equals. A
        NaN is the highest.
        """
        everyone = self.group.all_gather(torch.stack([scores.double(), tokens.double()]))
        best = everyone[:, 0].argmax(0, keepdim=True)  # [1, n], a rank
        return everyone[:, 1].gather(0, best)[0].to(torch.int32)


def sample_on_cpu(
    logits: torch.Tensor, metadata: SamplingMetadata, vocab: range, vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same with numpy's Philox generator, which a GPU without our kernels waits for.

    Args:
        logits: [n, len(vocab)], on any device.
        vocab: the tokens of these columns.

    Returns:
        Tokens [n] int32 and their scores [n] float32, on the device of the logits: `NO_TOKEN` and
        NaN of rows with a NaN.
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
