"""`Sampler`: logits to tokens."""

import torch
from torch import nn

MIN_TEMPERATURE = 1e-5  # below it rounding, not chance, would choose


class Sampler(nn.Module):
    """Draws from softmax(logits / temperature); takes the largest logit at temperature 0.

    Drawing is `argmax(probs / E)` with E ~ Exp(1), the exponential form of the Gumbel-max trick:
    exact, and without cumulative sums. In logarithms, and without the constant of the softmax,
    that is `argmax(logits / temperature - log E)`.
    """

    def forward(
        self,
        logits: torch.Tensor,
        temperatures: torch.Tensor | None,
        generator: torch.Generator | None = None,
    ) -> torch.Tensor:
        """Sample one token per row.

        Args:
            logits: [B, V].
            temperatures: [B] float32; None takes the largest logit of every row.
            generator: source of the noise, on the device of the logits.

        Returns:
            [B] int64.
        """
        if temperatures is None:
            return logits.argmax(dim=-1)
        greedy = (temperatures < MIN_TEMPERATURE).unsqueeze(1)  # [B, 1] bool
        scores = logits.to(torch.float32, copy=True)
        scores /= temperatures.unsqueeze(1).masked_fill(greedy, 1.0)
        noise = torch.empty_like(scores).exponential_(generator=generator).log_()
        scores -= noise.masked_fill_(greedy, 0.0)
        return scores.argmax(dim=-1)
