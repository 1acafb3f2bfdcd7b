"""The two ends of a model: token embedding and LM head, split along the vocabulary."""

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.distributed.bulk import Scattered
from nanovllm.layers.base import Build, Layer, Shard
from nanovllm.layers.linear import gather_owned_rows, linear, sum_over_ranks


def vocab_span(vocab_size: int) -> int:
    """Tokens of a span, the unit in which the vocabulary is sampled and divided over ranks: some
    64 of them make a vocabulary, so 1 to 8 ranks can share.
    """
    return min(4096, max(16, 1 << max(0, (vocab_size - 1).bit_length() - 6)))


def local_vocab(vocab_size: int, rank: int, size: int) -> range:
    """The tokens of a rank: whole spans of the vocabulary, for the last ranks fewer or none."""
    span = vocab_span(vocab_size)
    per_rank = -(-vocab_size // (span * size)) * span
    start = rank * per_rank
    return range(start, min(start + per_rank, vocab_size)) if start < vocab_size else range(0)


class VocabParallelEmbedding(Layer):
    """Token ids to hidden states. weight: [V, M], of the tokens in `vocab`; at least one row."""

    def __init__(self, vocab_size: int, hidden_size: int, build: Build) -> None:
        super().__init__()
        self.vocab_size, self.build = vocab_size, build
        self.vocab = local_vocab(vocab_size, build.group.rank, build.group.size)
        rows = max(1, len(self.vocab))
        self.weight = nn.Parameter(torch.zeros(rows, hidden_size, dtype=build.dtype), False)

    def shards(self, param: nn.Parameter) -> list[Shard]:
        return [Shard(param.data[: len(self.vocab)], 0, self.vocab.start, self.vocab_size)]

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor | Scattered:
        """[T] int32 -> [T, M], or partial results (see `sum_over_ranks`)."""
        if self.build.group.size == 1:
            return F.embedding(input_ids, self.weight)
        rows = gather_owned_rows(self.weight, input_ids, self.vocab)
        return sum_over_ranks(rows, self.build.group)


class ParallelLMHead(VocabParallelEmbedding):
    """Hidden states to logits over this rank's part of the vocabulary. The library reads so large a
    weight as fast as a kernel of ours, for one row too.
    """

    def forward(  # type: ignore[override]
        self, hidden: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[B, M] -> [B, len(vocab)], written to `out`: [B, len(weight)] if it is given."""
        if out is None:
            out = linear(hidden, self.weight, None)
        else:
            torch.mm(hidden, self.weight.T, out=out)
        return out[:, : len(self.vocab)]
