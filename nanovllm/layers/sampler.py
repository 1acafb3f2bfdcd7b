"""`Sampler`: logits to tokens."""

from typing import NamedTuple

import numpy as np
import torch
from torch import nn

MIN_TEMPERATURE = 1e-5  # below it rounding, not chance, would choose


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


class Sampler(nn.Module):
    """Draws from softmax(logits / temperature); takes the largest logit at temperature 0.

    Drawing is the Gumbel-max trick: `argmax(logits / temperature - log E)` with E ~ Exp(1) draws
    in proportion to the exponentials, exactly and without cumulative sums. On a GPU a span of the
    vocabulary is drawn first, by its sum (`kernels/sampling.py`).

    The noise of a row depends on its request's key and the token's position alone, so a request
    draws the same tokens whatever it shares a batch with.
    """

    def forward(
        self, logits: torch.Tensor, metadata: SamplingMetadata, last_tokens: torch.Tensor
    ) -> torch.Tensor:
        """logits: [n, V]. Returns [n] int32, also written to last_tokens: [N] int32, by slot."""
        if logits.is_cuda:
            from nanovllm.kernels.sampling import sample

            return sample(logits, *metadata, last_tokens)
        tokens = sample_on_cpu(logits, metadata)
        last_tokens.index_copy_(0, metadata.slots.long(), tokens)
        return tokens


def sample_on_cpu(logits: torch.Tensor, metadata: SamplingMetadata) -> torch.Tensor:
    """The same with numpy's Philox generator. logits: [n, V]. Returns [n] int32."""
    scores = logits.to(torch.float32, copy=True)
    keys = metadata.random_keys.numpy().view(np.uint32).T.astype(np.uint64)  # [n, 2]
    for row, temperature in enumerate(metadata.temperatures.tolist()):
        if temperature >= MIN_TEMPERATURE:
            key = int(keys[row, 0]) << 32 | int(keys[row, 1])
            bits = np.random.Philox(key=key, counter=int(metadata.positions[row]) << 64)
            # In float64: float32 has draws of exactly 0, which would win over everything.
            noise = np.random.Generator(bits).standard_exponential(logits.shape[1])
            scores[row].div_(temperature).sub_(torch.from_numpy(noise).log_())
    return scores.argmax(dim=-1).to(torch.int32)
