"""`Logprobs`: log-probabilities of drawn tokens, and of others beside them.

Letters: R rows of logits, m of them to report, V vocabulary, N most likely tokens, K labels.
"""

from typing import Any, NamedTuple

import numpy as np
import torch

from nanovllm.sampling_params import MAX_LOGPROBS
from nanovllm.utils.device import runs_kernels, to_host
from nanovllm.utils.integers import cdiv

ALIGNMENT = 4  # words, of where a part begins: kernels are compiled for 16 bytes
ROWS = 32  # reported at once, where our kernels do not run


class Logprobs(NamedTuple):
    """Log-probabilities of m drawn tokens, of the N most likely ones beside each, and of labels.

    Attributes:
        words: int32, the memory of all others.
        token_ids: [m, 1 + N] int32, tokens, the drawn one first.
        values: [m, 1 + N] float32, log-probabilities; NaN if any logit of the row is.
        ranks: [m] int32, rank of the drawn token; 1: the most likely.
        labels: [K] float32, log-probabilities of the labels.
    """

    words: Any
    token_ids: Any
    values: Any
    ranks: Any
    labels: Any

    @classmethod
    def divide(cls, words: Any, m: int, N: int, K: int = 0) -> "Logprobs":
        """The parts of a memory of int32, of numpy or of PyTorch."""
        sizes, begin, parts = (m * (1 + N), m * (1 + N), m, K), 0, []
        for size in sizes:
            parts.append(words[begin : begin + size])
            begin += cdiv(size, ALIGNMENT) * ALIGNMENT
        ids, values, ranks, labels = parts
        float32 = np.float32 if isinstance(words, np.ndarray) else torch.float32
        shape = m, 1 + N
        return cls(
            words, ids.reshape(shape), values.view(float32).reshape(shape), ranks,
            labels.view(float32),
        )  # fmt: skip

    @classmethod
    def empty(cls, m: int, N: int, K: int, device: torch.device) -> "Logprobs":
        """Memory on a device, not filled yet."""
        num_words = sum(cdiv(size, ALIGNMENT) for size in (m * (1 + N), m * (1 + N), m, K))
        words = torch.empty(num_words * ALIGNMENT, dtype=torch.int32, device=device)
        return cls.divide(words, m, N, K)

    def to_host(self) -> "Logprobs":
        """A copy as numpy arrays, complete when the current stream is."""
        (m, width), K = self.token_ids.shape, len(self.labels)
        return Logprobs.divide(to_host(self.words).numpy(), m, width - 1, K)


class Labels(NamedTuple):
    """Tokens whose log-probabilities are wanted.

    Attributes:
        entries: [K] int32, indices in 0..m of the rows that they are wanted of.
        tokens: [K] int32, the tokens.
    """

    entries: torch.Tensor
    tokens: torch.Tensor


class Distributions(NamedTuple):
    """m distributions: the softmax of logits / divisor, over the logits that are not below `least`.

    Attributes:
        rows: [m] int32, rows of the logits.
        divisors: [m] float32; 0: the row is not wanted, and its results are arbitrary.
        least: [m] float32; -inf: all.
    """

    rows: torch.Tensor
    divisors: torch.Tensor
    least: torch.Tensor

    @classmethod
    def of_model(cls, m: int, device: torch.device) -> "Distributions":
        """The model's own, of the first m rows."""
        return cls(
            torch.arange(m, dtype=torch.int32, device=device),
            torch.ones(m, dtype=torch.float32, device=device),
            torch.full((m,), -torch.inf, dtype=torch.float32, device=device),
        )


def logprobs_of(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    num_logprobs: int,
    distributions: Distributions | None = None,
    labels: Labels | None = None,
    batch_invariant: bool = False,
) -> Logprobs:
    """Log-probabilities of drawn tokens, of the most likely ones, and of labels.

    Args:
        logits: [R, V]
        tokens: [m] int32, drawn tokens; any token where a negative one says that there is none.
        num_logprobs: number of most likely tokens, at most V of which are found.
        distributions: m distributions; None: the model's own of all rows.
        labels: K further tokens; None: there are none.
        batch_invariant: whether PyTorch, too, computes a row alike, whatever others there are, and
            want.
    """
    m, N, device = len(tokens), min(num_logprobs, logits.shape[1]), logits.device
    if labels is not None:
        N = max(N, 1)  # see `_of_labels`
    by_kernels = runs_kernels(logits)
    if distributions is None and by_kernels:
        distributions = Distributions.of_model(m, device)
    found = Logprobs.empty(m, N, 0 if labels is None else len(labels.tokens), device)
    if by_kernels:
        from nanovllm.kernels.sampling.logprobs import logprobs

        assert distributions is not None
        logprobs(logits, tokens, *distributions, found.token_ids, found.values, found.ranks)
    else:
        _by_torch(logits, tokens, distributions, found, batch_invariant)
    if labels is not None:
        assert distributions is not None, "labels of rows that nobody has named"
        found.labels.copy_(_of_labels(logits, found, distributions, labels))
    return found


def _by_torch(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    distributions: Distributions | None,
    found: Logprobs,
    batch_invariant: bool,
) -> None:
    """Fill in what `logprobs` of the kernels does, for `ROWS` at a time: some copies of each. If
    `batch_invariant`, for one; and equally likely tokens in an order that does not depend on N.
    """
    N = found.token_ids.shape[1] - 1
    num_found = min(MAX_LOGPROBS, logits.shape[1]) if batch_invariant else N
    size = 1 if batch_invariant else ROWS
    for begin in range(0, len(tokens), size):
        part = slice(begin, begin + size)
        if distributions is None:
            raw = scaled = logits[part].to(torch.float32, copy=True)
        else:
            rows, divisors, least = (each[part] for each in distributions)
            raw = logits.index_select(0, rows.long()).float()
            raw = raw.masked_fill(raw < least[:, None], -torch.inf)
            scaled = raw / divisors[:, None]
        x = raw.masked_fill(raw.isnan(), -torch.inf)
        ids = tokens[part].long().clamp(min=0).unsqueeze(1)
        ranks = (x > x.gather(1, ids)).sum(1) + 1
        if N:
            ids = torch.cat([ids, x.topk(num_found, dim=1).indices[:, :N]], dim=1)
        found.token_ids[part] = ids.to(torch.int32)
        found.values[part] = scaled.log_softmax(-1).gather(1, ids)
        found.ranks[part] = ranks.to(torch.int32)


def _of_labels(
    logits: torch.Tensor, found: Logprobs, distributions: Distributions, labels: Labels
) -> torch.Tensor:
    """Log-probabilities of labels [K] float32, from those of the most likely tokens, which do not
    depend on the draw. Two tokens of a row are as far apart as their logits.
    """
    entries, ids = labels.entries.long(), labels.tokens.long()
    rows, divisors, least = (part[entries] for part in distributions)
    rows = rows.long()
    x = logits[rows, ids].float()
    x = torch.where(x < least, -torch.inf, x)
    largest = logits[rows, found.token_ids[entries, 1].long()].float()
    return found.values[entries, 1] + (x - largest) / divisors
