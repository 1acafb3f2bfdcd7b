"""Formulas of Gated DeltaNet that its kernels share, all in float32: gates, normalisations.

The rule itself is told in `nanovllm/recurrent/delta_rule.py`, in PyTorch.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.activation import activate
from nanovllm.tensors.delta_net import DeltaNet, DeltaState

QK_EPS = tl.constexpr(1e-6)  # added to the sum of squares that normalises queries and keys


def check_layout(mixed: torch.Tensor, ba: torch.Tensor, layer: DeltaNet, state: DeltaState) -> None:
    """Assert what the kernels expect of the rows mixed and ba, the parameters and the states."""
    (Hv, V, K), (C, J) = state.memory.shape[1:], layer.conv.shape
    assert mixed.shape[1] == C + Hv * V and 2 * layer.num_key_heads * K + Hv * V == C
    assert ba.shape == (len(mixed), 2 * Hv) and state.tail.shape[1:] == (J - 1, C)
    assert mixed.stride(1) == ba.stride(1) == 1, "the numbers of a row are adjacent"
    assert state.tail.is_contiguous() and state.memory.is_contiguous()
    assert state.tail.dtype == mixed.dtype, "the kernels read either through one pointer"


@triton.jit
def log_one_plus(y):
    """log(1 + y) for y >= 0, to the last digits of small ones (Goldberg, What Every Computer
    Scientist Should Know About Floating-Point Arithmetic, 1991, theorem 4): slow heads forget by
    1e-5 a token, over many thousands.
    """
    near = 1.0 + y
    return tl.where(near == 1.0, y, tl.log(near) * (y / (near - 1.0)))


@triton.jit
def log_decay(a, A_log, dt_bias):
    """g = -exp(A_log) softplus(a + dt_bias)."""
    x = a.to(tl.float32) + dt_bias
    softplus = tl.maximum(x, 0.0) + log_one_plus(tl.exp(-tl.abs(x)))
    return -tl.exp(A_log) * softplus


@triton.jit
def normalised(x, AXIS: tl.constexpr):
    """x with vectors of length 1 along the axis, or a little less if they are short."""
    return x * tl.rsqrt(tl.sum(x * x, AXIS, keep_dims=True) + QK_EPS)


@triton.jit
def gated(o, squares, z, weight, eps, V: tl.constexpr):
    """The gated norm of outputs o, the sum of whose squares over the V of a head is given."""
    return weight * o * tl.rsqrt(squares / V + eps) * activate(z.to(tl.float32), False)
