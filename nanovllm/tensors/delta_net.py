"""`DeltaNet` and `DeltaState`: a Gated DeltaNet layer and its state, as its kernels take them.

Letters: Hk key heads of K numbers, Hv value heads of V, C = 2 Hk K + Hv V channels, J taps of the
convolution, R rows of states. All heads are those of this rank.
"""

from typing import NamedTuple

import torch


class DeltaNet(NamedTuple):
    """The parameters of a layer.

    Attributes:
        conv: [C, J], weights of the convolution of each channel, that of the newest token last.
        A_log, dt_bias: [Hv] float32, of the decay.
        norm: [V] float32, weight of the gated norm.
        eps: constant added to the mean square in that norm.
        num_key_heads: Hk
    """

    conv: torch.Tensor
    A_log: torch.Tensor
    dt_bias: torch.Tensor
    norm: torch.Tensor
    eps: float
    num_key_heads: int


class DeltaState(NamedTuple):
    """The states of sequences, a row for each.

    Attributes:
        tail: [R, J - 1, C] of the model's dtype, the last inputs of the convolution, oldest first.
        memory: [R, Hv, V, K] float32, values by keys.
    """

    tail: torch.Tensor
    memory: torch.Tensor
