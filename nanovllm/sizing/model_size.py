"""The number of parameters in a model's matrices, and which are quantised. Imports no torch."""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nanovllm.checkpoint.model_config import ExpertConfig, ModelConfig


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
    M, D, I = config.hidden_size, config.head_dim, config.intermediate_size
    num_heads = config.num_attention_heads
    qkv = ["qkv_proj"] if config.packed_qkv else ["q_proj", "k_proj", "v_proj"]
    gate_up = ["gate_up_proj"] if config.packed_gate_up else ["gate_proj", "up_proj"]
    for i, layer in enumerate(config.layers):
        path = f"model.layers.{i}"
        heads = num_heads + 2 * config.num_key_value_heads
        yield Matrix([f"{path}.self_attn.{name}" for name in qkv], M * heads * D)
        yield Matrix([f"{path}.self_attn.o_proj"], M * num_heads * D)
        if layer.is_sparse:
            experts = _experts(config)
            yield Matrix(None, M * experts.num_experts)  # the router
            size = experts.num_experts * 3 * M * experts.intermediate_size
            yield Matrix(experts.modules(f"{path}.{experts.path}"), size, is_sparse=True)
        else:
            yield Matrix([f"{path}.mlp.{name}" for name in gate_up], 2 * M * I)
            yield Matrix([f"{path}.mlp.down_proj"], M * I)


def _experts(config: ModelConfig) -> ExpertConfig:
    assert config.experts is not None, "a layer is sparse"
    return config.experts


def model_size(config: ModelConfig) -> ModelSize:
    """The numbers of parameters in a model's matrices."""
    experts, found = config.experts, config.quantization
    share = 0.0 if experts is None else experts.num_experts_per_tok / experts.num_experts
    counts: Counter[tuple[bool, bool]] = Counter()  # by whether it is plain, and of experts
    for modules, size, is_sparse in matrices(config):
        is_plain = modules is None or (found is not None and found.of(modules) is None)
        counts[is_plain, is_sparse] += size
    linear, plain = (Weights(counts[p, False], counts[p, True], share) for p in (False, True))
    return ModelSize(linear, plain, config.vocab_size * config.hidden_size)
