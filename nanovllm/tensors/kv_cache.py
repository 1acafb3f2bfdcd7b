"""`KVCache`: the keys and values of a layer, in the model's dtype or in 8 bits.

In 8 bits, the vector of a token in a head is FP8 (e4m3) times a power of two of its own, the least
with which its largest value fits. So no value is clipped, nothing is calibrated, the cached values
do not depend on the rest of a step, and the product, of 4 significant bits, is exact in bfloat16,
in float32, and in float16 below its largest value. Kernels compute the same
(`kernels.attention.kv_cache`). Scales in a checkpoint are not read: one per layer is coarser.

Source of one power of two per block of values: OCP Microscaling Formats, 2023.
"""

from typing import NamedTuple

import torch

from nanovllm.tensors.fp8 import FP8, LARGEST

FLOAT16_MAX = 65504.0
LEAST_EXPONENT = -64  # such as that of a vector of zeros


class KVCache(NamedTuple):
    """Keys and values of one layer, in blocks of tokens.

    Attributes:
        k, v: [N, S, Hkv, D] of the model's dtype, or `FP8`.
        k_exponents, v_exponents: [N, Hkv, S] int8 if k and v are `FP8`, else None.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_exponents: torch.Tensor | None = None
    v_exponents: torch.Tensor | None = None

    @classmethod
    def empty(
        cls, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device
    ) -> "KVCache":
        """An uninitialised cache of shape [N, S, Hkv, D]."""
        N, S, Hkv, _ = shape
        parts = [*torch.empty(2, *shape, dtype=dtype, device=device)]
        if dtype == FP8:
            parts += torch.empty(2, N, Hkv, S, dtype=torch.int8, device=device)
        return cls(*parts)


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise vectors x: [..., D]. Returns codes [..., D] `FP8` and exponents [...] int8."""
    most = (x.abs().amax(-1).float() / LARGEST).clamp(min=2.0**LEAST_EXPONENT)
    most = most.nan_to_num(2.0**127, posinf=2.0**127)
    mantissa, exponent = torch.frexp(most)  # mantissa in [0.5, 1)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    return torch.ldexp(x.float(), -exponent.unsqueeze(-1)).to(FP8), exponent.to(torch.int8)


def dequantize(codes: torch.Tensor, exponents: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The vectors [..., D] of `dtype` for codes [..., D] `FP8` and exponents [...] int8."""
    numbers = torch.ldexp(codes.float(), exponents.unsqueeze(-1))
    if dtype == torch.float16:
        numbers = torch.where(numbers.isinf(), numbers, numbers.clamp(-FLOAT16_MAX, FLOAT16_MAX))
    return numbers.to(dtype)


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Vectors x: [..., D], rounded to values that an FP8 cache stores exactly."""
    return dequantize(*quantize(x), x.dtype)
