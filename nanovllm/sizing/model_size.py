"""The number of parameters in a model's matrices, and which are quantised. Imports no torch."""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nanovllm.checkpoint.model_config import ModelConfig


class Weights(NamedTuple):
    """Numbers of parameters in matrices of layers.

    Attributes:
        dense: parameters used by every token.
        sparse: parameters of all experts.
        share: fraction of the experts that are active per token.
    """

    dense: int
    sparse: int
    share: float

    @property
    def of_token(self) -> float:
        """The parameters active for one token."""
        return self.dense + self.share * self.sparse

    def read(self, num_tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """The parameters that a step with `num_tokens` tokens reads. An expert is read if any token
        uses it; each token uses all experts with equal probability.
        """
        taken = 1 - np.power(1 - self.share, num_tokens, dtype=np.float64)
        return self.dense + self.sparse * taken


class ModelSize(NamedTuple):
    """Numbers of parameters in a model's matrices.

    Attributes:
        linear: parameters that the model's quantisation is for, if it has one.
        plain: parameters of routers, and of layers that the checkpoint leaves unquantised.
        head: parameters of the LM head.
    """

    linear: Weights
    plain: Weights
    head: int

    @property
    def of_token(self) -> float:
        """The parameters active for one token, without the LM head."""
        return self.linear.of_token + self.plain.of_token


class Matrix(NamedTuple):
    """A matrix of a layer, or those of all experts of a layer.

    Attributes:
        modules: paths of the checkpoint's modules that it consists of; None: no format is for it.
        size: number of its parameters.
        is_sparse: whether it is of experts.
    """

    modules: Iterable[str] | None
    size: int
    is_sparse: bool = False


def matrices(config: ModelConfig) -> Iterator[Matrix]:
    """The matrices of all layers, without the LM head."""
    for i, layer in enumerate(config.layers):
        path = f"model.layers.{i}"
        yield from _attention(config, path) if layer.rope is not None else _recurrent(config, path)
        yield from _experts(config, path) if layer.is_sparse else _mlp(config, path)


def _attention(config: ModelConfig, path: str) -> Iterator[Matrix]:
    num_heads, size = config.num_attention_heads, config.hidden_size * config.head_dim
    heads = (1 + config.attention_gate) * num_heads + 2 * config.num_key_value_heads
    qkv = ["qkv_proj"] if config.packed_qkv else ["q_proj", "k_proj", "v_proj"]
    yield Matrix([f"{path}.self_attn.{name}" for name in qkv], heads * size)
    output = "o_proj" if config.short_conv is None else "out_proj"
    yield Matrix([f"{path}.self_attn.{output}"], num_heads * size)


def _recurrent(config: ModelConfig, path: str) -> Iterator[Matrix]:
    """The matrices of a layer with a state for each sequence."""
    M, net = config.hidden_size, config.delta_net
    if net is None:
        yield Matrix([f"{path}.conv.in_proj"], 3 * M * M)
        yield Matrix([f"{path}.conv.out_proj"], M * M)
        return
    keys, values = net.num_key_heads * net.key_head_dim, net.num_value_heads * net.value_head_dim
    names = ["in_proj_qkvz"] if net.by_key_head else ["in_proj_qkv", "in_proj_z"]
    yield Matrix([f"{path}.linear_attn.{name}" for name in names], M * 2 * (keys + values))
    yield Matrix(None, M * 2 * net.num_value_heads)  # of the decay, and of what is written
    yield Matrix([f"{path}.linear_attn.out_proj"], M * values)


def _mlp(config: ModelConfig, path: str) -> Iterator[Matrix]:
    size = config.hidden_size * config.intermediate_size
    if config.short_conv is not None:
        mlp, gate_up, down = "feed_forward", ["w1", "w3"], "w2"
    elif config.packed_gate_up:
        mlp, gate_up, down = "mlp", ["gate_up_proj"], "down_proj"
    else:
        mlp, gate_up, down = "mlp", ["gate_proj", "up_proj"], "down_proj"
    yield Matrix([f"{path}.{mlp}.{name}" for name in gate_up], 2 * size)
    yield Matrix([f"{path}.{mlp}.{down}"], size)


def _experts(config: ModelConfig, path: str) -> Iterator[Matrix]:
    """The router; the experts; the one that all tokens choose."""
    M, experts = config.hidden_size, config.experts
    assert experts is not None, "a layer is sparse"
    yield Matrix(None, M * (experts.num_experts + experts.has_shared))
    of_one, path = 3 * M * experts.intermediate_size, f"{path}.{experts.path}"
    is_plain = experts.packed and config.quantization is not None
    for count, is_sparse in ((experts.num_experts, True), (experts.has_shared, False)):
        if count:
            modules = None if is_plain else experts.modules(path)
            yield Matrix(modules, count * of_one, is_sparse)


def model_size(config: ModelConfig) -> ModelSize:
    """The numbers of parameters in a model's matrices."""
    experts, found = config.experts, config.quantization
    share = 0.0 if experts is None else experts.num_experts_per_tok / experts.num_experts
    counts: Counter[tuple[bool, bool]] = Counter()  # by whether it is plain, and of experts
    for modules, size, is_sparse in matrices(config):
        if config.is_mxfp4:
            is_plain = not is_sparse
        else:
            is_plain = modules is None or (found is not None and found.of(modules) is None)
        counts[is_plain, is_sparse] += size
    linear, plain = (Weights(counts[p, False], counts[p, True], share) for p in (False, True))
    return ModelSize(linear, plain, config.vocab_size * config.hidden_size)


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
