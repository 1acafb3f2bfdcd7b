"""The matrices of a layer's experts, in any format."""

from typing import NamedTuple, TypeAlias

import torch

from nanovllm.kernels.products.fp8_linear import BLOCK, act_block_of, can_multiply
from nanovllm.tensors.fp8 import FP8, Codes
from nanovllm.tensors.int4 import Int4Codes
from nanovllm.tensors.mxfp4 import Mxfp4Codes

# A matrix in 16 bits, FP8, INT4 or MXFP4.
AnyWeight: TypeAlias = torch.Tensor | Codes | Int4Codes | Mxfp4Codes


def shape_of(weight: AnyWeight) -> tuple[int, int]:
    """Rows and columns of a matrix in any format."""
    rows, columns = weight.codes.shape if isinstance(weight, Codes) else weight.shape
    return rows, columns


class ExpertWeights(NamedTuple):
    """The experts of a layer.

    Attributes:
        gate_up: [E * 2 I, M], for each expert gate first.
        down: [E * M, I]
        gate_up_bias: [E, 2 I]; None: 0.
        down_bias: [E, M]; None: 0.
        gelu: whether to activate by GELU (tanh), not SiLU.
        limit: bound of gate and up in gpt-oss (see `activate_and_mul`); 0: none.
    """

    gate_up: AnyWeight
    down: AnyWeight
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    gelu: bool = False
    limit: float = 0.0

    @property
    def num_experts(self) -> int:
        """E"""
        return len(self.down) // shape_of(self.gate_up)[1]


def act_block(weights: ExpertWeights, dtype: torch.dtype) -> int | None:
    """The number of inputs of a token that share a scale; 0: all; None: tokens stay in 16 bits."""
    gate_up, down = weights.gate_up, weights.down
    if not isinstance(gate_up, Codes) or not isinstance(down, Codes):
        return None
    if gate_up.codes.dtype != FP8:
        return None
    own = can_multiply(gate_up, dtype) and can_multiply(down, dtype)
    # A tile has weights of one block, so experts, and gate and up, must begin with one.
    (_, M), (_, I) = shape_of(gate_up), shape_of(down)
    whole = gate_up.block[0] == 1 or M % BLOCK == I % BLOCK == 0
    return act_block_of(gate_up) if own and whole else None
