"""The number of parameters in a model's matrices. Imports no torch."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nanovllm.checkpoint.model_config import ModelConfig


class Weights(NamedTuple):
    """Numbers of parameters in a model's matrices.

    Attributes:
        dense: parameters used by every token, without the LM head.
        head: parameters of the LM head.
        sparse: parameters of all experts.
        share: fraction of the experts that are active per token.
    """

    dense: int
    head: int
    sparse: int
    share: float

    @property
    def of_token(self) -> float:
        """The parameters active for one token, without the LM head."""
        return self.dense + self.share * self.sparse

    def read(self, num_tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """The parameters that a step with `num_tokens` tokens reads, without the LM head. An expert
        is read if any token uses it; each token uses all experts with equal probability.
        """
        taken = 1 - np.power(1 - self.share, num_tokens, dtype=np.float64)
        return self.dense + self.sparse * taken


def weights(config: ModelConfig) -> Weights:
    """The numbers of parameters in a model's matrices."""
    M, D, experts = config.hidden_size, config.head_dim, config.experts
    heads = 2 * config.num_attention_heads + 2 * config.num_key_value_heads
    num_sparse = sum(layer.is_sparse for layer in config.layers)
    num_dense = len(config.layers) - num_sparse
    dense = len(config.layers) * M * heads * D + num_dense * 3 * M * config.intermediate_size
    head = config.vocab_size * M
    if experts is None:
        return Weights(dense, head, 0, 0.0)
    dense += num_sparse * M * experts.num_experts  # the routers
    sparse = num_sparse * experts.num_experts * 3 * M * experts.intermediate_size
    return Weights(dense, head, sparse, experts.num_experts_per_tok / experts.num_experts)
