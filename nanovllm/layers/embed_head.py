"""The two ends of a model: token embedding and LM head."""

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.layers.linear import linear


class VocabParallelEmbedding(nn.Module):
    """Token ids to hidden states. weight: [V, M], split along the vocabulary over GPUs."""

    def __init__(self, vocab_size: int, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size, dtype=dtype), False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[T] int32 -> [T, M]"""
        return F.embedding(input_ids, self.weight)


class ParallelLMHead(VocabParallelEmbedding):
    """Hidden states to logits over the vocabulary. The library reads so large a weight as fast as
    a kernel of ours, for one row too.
    """

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[B, M] -> [B, V]"""
        return linear(hidden, self.weight, None)
