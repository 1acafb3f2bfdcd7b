"""`KVCache`: the keys and values of a layer, in the model's dtype or in 8 bits.

In 8 bits, what a head has of a token is FP8 (e4m3) times a power of two of its own, the least with
which its largest number fits. So no number is clipped, nothing is calibrated, what is cached does
not depend on what else a step computes, and the product, of 4 significant bits, is exact in
bfloat16, float32, and float16 below its largest number. Kernels compute the same
(`kernels.attention.kv_cache`). Scales that a checkpoint has are not read: one for a whole layer is
coarser.

A power of two for several numbers: OCP Microscaling Formats, 2023.
"""

from typing import NamedTuple

import torch

from nanovllm.tensors.fp8 import FP8, LARGEST

FLOAT16_MAX = 65504.0
LEAST_EXPONENT = -64  # of vectors of zeros, for one


class KVCache(NamedTuple):
    """Keys and values of one layer: blocks of tokens, of which each has several heads.

    Attributes:
        k, v: [N, S, Hkv, D], of the model's dtype or of `FP8`.
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
        """Of a shape [N, S, Hkv, D], uninitialised."""
        N, S, Hkv, _ = shape
        parts = [*torch.empty(2, *shape, dtype=dtype, device=device)]
        if dtype == FP8:
            parts += torch.empty(2, N, Hkv, S, dtype=torch.int8, device=device)
        return cls(*parts)


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [..., D] of `FP8` and exponents [...] int8 of vectors x: [..., D]."""
    most = (x.abs().amax(-1).float() / LARGEST).clamp(min=2.0**LEAST_EXPONENT)
    most = most.nan_to_num(2.0**127, posinf=2.0**127)
    mantissa, exponent = torch.frexp(most)  # mantissa in [0.5, 1)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    return torch.ldexp(x.float(), -exponent.unsqueeze(-1)).to(FP8), exponent.to(torch.int8)


def dequantize(codes: torch.Tensor, exponents: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The vectors [..., D] of `dtype`."""
    numbers = torch.ldexp(codes.float(), exponents.unsqueeze(-1))
    if dtype == torch.float16:
        numbers = torch.where(numbers.isinf(), numbers, numbers.clamp(-FLOAT16_MAX, FLOAT16_MAX))
    return numbers.to(dtype)


def rounded(x: torch.Tensor) -> torch.Tensor:
    """The numbers that a cache of FP8 has of vectors x: [..., D]. It has these exactly."""
    return dequantize(*quantize(x), x.dtype)
