"""Formulas of Gated DeltaNet that its kernels share: gates, normalisations. All float32.

The rule itself is told in `nanovllm/recurrent/delta_rule.py`, in PyTorch.
"""

import triton
import triton.language as tl

from nanovllm.kernels.activation import activate

QK_EPS = tl.constexpr(1e-6)  # added to the sum of squares that normalises queries and keys


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
