"""The choice of the kernel that multiplies by gate and up projections, and activates, at once."""

import torch

from nanovllm.kernels.device_features import can_describe, has_own_kernels
from nanovllm.kernels.products import int4_linear
from nanovllm.tensors.fp8 import FP8, Codes
from nanovllm.tensors.int4 import Int4Codes

# Bytes of an input column (1,024 rows in 16 bits, 2,048 in FP8) from which the product for Hopper
# makes steps faster; single products in FP8 take up to 8 % more (docs/experiments.md, 44).
MANY = 2048
Matrix = torch.Tensor | Codes | Int4Codes


def takes_hopper_kernel(
    num_rows: int, weight: Matrix, dtype: torch.dtype, bias: torch.Tensor | None
) -> bool:
    """Whether `hopper_gated` can multiply `num_rows` rows by a weight of gate and up projections:
    it needs whole tiles, in the results' `dtype` of 16 bits or in FP8 with one scale per row.
    """
    if isinstance(weight, Codes) and weight.block[0] == 1:
        weight = weight.codes
    if bias is not None or not isinstance(weight, torch.Tensor):
        return False
    (N, K), size = weight.shape, weight.element_size()
    fits = N % 256 == K * size % 128 == 0 and num_rows * size >= MANY
    known = dtype.itemsize == 2 and weight.dtype in (dtype, FP8)
    return fits and known and has_own_kernels(weight)


def gated_product(
    x: torch.Tensor | Codes,
    weight: Matrix,
    dtype: torch.dtype,
    bias: torch.Tensor | None,
    gelu: bool,
    out: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """`act(gate) * up` by one kernel, if there is one; None: a product, and `activation.gate` after
    it, must be used instead.

    Args:
        x: [T, K]
        weight: [2 I, K], the gates first.
        dtype: torch.dtype of the results.
        bias: [2 I]; None: 0.
        gelu: whether to activate by GELU (tanh), not SiLU.
        out: [T, I], output buffer; None: a new one.
    """
    if isinstance(weight, Int4Codes):
        assert isinstance(x, torch.Tensor), "it takes activations in 16 bits"
        return int4_linear.gated(x, weight, bias, gelu, out)
    if not takes_hopper_kernel(len(x), weight, dtype, bias):
        return None
    from nanovllm.kernels.products.hopper_gated import hopper_gated

    described = can_describe(x.codes if isinstance(x, Codes) else x)
    return hopper_gated(x, weight, dtype, gelu, out) if described else None
