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
    heads = (2 + config.attention_gate) * config.num_attention_heads
    heads += 2 * config.num_key_value_heads
    num_attending = sum(layer.rope is not None for layer in config.layers)
    num_sparse = sum(layer.is_sparse for layer in config.layers)
    dense = num_attending * M * heads * D
    dense += (len(config.layers) - num_attending) * M * _recurrent_width(config)
    dense += (len(config.layers) - num_sparse) * 3 * M * config.intermediate_size
    head = config.vocab_size * M
    if experts is None:
        return Weights(dense, head, 0, 0.0)
    dense += num_sparse * M * (experts.num_experts + experts.has_shared)  # the routers
    dense += num_sparse * experts.has_shared * 3 * M * experts.intermediate_size
    sparse = num_sparse * experts.num_experts * 3 * M * experts.intermediate_size
    return Weights(dense, head, sparse, experts.num_experts_per_tok / experts.num_experts)


def _recurrent_width(config: ModelConfig) -> int:
    """Inputs and outputs, beside the hidden size, of the matrices of a layer with a state."""
    if (net := config.delta_net) is not None:
        keys = net.num_key_heads * net.key_head_dim
        values = net.num_value_heads * net.value_head_dim
        return 2 * keys + 3 * values + 2 * net.num_value_heads
    return 4 * config.hidden_size


class States(NamedTuple):
    """The states of a sequence in all layers.

    Attributes:
        num_bytes: bytes, which each of its tokens reads and writes.
        flops: operations of a token that moves them on.
    """

    num_bytes: int
    flops: int


def states(config: ModelConfig, itemsize: int) -> States:
    """The states that a model keeps for a sequence; `itemsize`: bytes of its activations."""
    num_layers = sum(layer.rope is None for layer in config.layers)
    if (net := config.delta_net) is not None:
        channels = 2 * net.num_key_heads * net.key_head_dim
        channels += net.num_value_heads * net.value_head_dim
        memory = net.num_value_heads * net.value_head_dim * net.key_head_dim
        size = 4 * memory + (net.conv_kernel_dim - 1) * channels * itemsize
        # Answers to a key and a query, and an outer product.
        return States(num_layers * size, num_layers * 6 * memory)
    if (conv := config.short_conv) is not None:
        size = (conv.kernel_size - 1) * config.hidden_size * itemsize
        return States(num_layers * size, num_layers * 2 * conv.kernel_size * config.hidden_size)
    return States(0, 0)
