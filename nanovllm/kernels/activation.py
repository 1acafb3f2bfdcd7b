"""The gate of an MLP, act(gate) * up, in one pass.

On Hopper, the product before can do that itself: `products/hopper_gated.py`.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.device_features import (
    launch_dependents,
    pdl_options,
    spare_rows,
    wait,
)
from nanovllm.kernels.fp8 import empty_codes, store_codes
from nanovllm.tensors.fp8 import Codes
from nanovllm.utils.integers import cdiv, next_power_of_2


@triton.jit
def activate(x, GELU: tl.constexpr):
    """SiLU, or GELU (tanh), of x: float32."""
    y = x
    if GELU:  # (1 + tanh(z)) / 2 = sigmoid(2 z), with sqrt(2 / pi) = 0.79788...
        y = 1.5957691216057308 * (x + 0.044715 * x * x * x)
    return x / (1.0 + tl.exp2(y * -1.4426950408889634))  # -log2(e); `tl.exp` takes longer


@triton.jit
def activate_and_mul(gate, up, GELU: tl.constexpr, LIMIT: tl.constexpr):
    """`act(gate) * up`, both float32. With a LIMIT, both are clamped first, and the gate multiplies
    1 + up: gpt-oss's SwiGLU (OpenAI, 2025).
    """
    if LIMIT > 0:
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
        return gate * tl.sigmoid(1.702 * gate) * (up + 1.0)
    else:
        return activate(gate, GELU) * up


@triton.jit
def _gate(x_ptr, row, begin, I, GELU: tl.constexpr, BLOCK: tl.constexpr):
    """The results [BLOCK] of a row from column `begin` on, 0 beyond I."""
    cols = begin + tl.arange(0, BLOCK)
    gate = tl.load(x_ptr + row * 2 * I + cols, mask=cols < I, other=0.0)
    up = tl.load(x_ptr + row * 2 * I + I + cols, mask=cols < I, other=0.0)
    return activate(gate.to(tl.float32), GELU).to(gate.dtype) * up


@triton.jit
def _act_and_mul_kernel(
    x_ptr, out_ptr, scales_ptr, I,
    GELU: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr, X_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    # One program: BLOCK results of a row, or all in blocks of two sizes, which share a scale.
    launch_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    begin = tl.program_id(1) * BLOCK
    wait(PDL)
    out = _gate(x_ptr, row, begin, I, GELU, BLOCK)
    if scales_ptr is None:
        cols = begin + tl.arange(0, BLOCK)
        tl.store(out_ptr + row * I + cols, out, mask=cols < I)
    elif REST > 0:
        out = out.to(tl.float32)
        rest = _gate(x_ptr, row, BLOCK, I, GELU, REST).to(tl.float32)
        most, max_of_rest = tl.max(tl.abs(out)), tl.max(tl.abs(rest))
        store_codes(out, out_ptr, scales_ptr, row, 0, I, BLOCK, X_BLOCK, max_of_rest)
        store_codes(rest, out_ptr, scales_ptr, row, BLOCK, I, REST, X_BLOCK, most)
    else:
        store_codes(out.to(tl.float32), out_ptr, scales_ptr, row, begin, I, BLOCK, X_BLOCK)


def act_and_mul(
    x: torch.Tensor, gelu: bool = False, out: torch.Tensor | None = None
) -> torch.Tensor:
    """`act(gate) * up`: [T, I] of x: [T, 2 I] = [gate | up]; act is SiLU, or GELU (tanh)."""
    T, I = x.shape[0], x.shape[1] // 2
    if out is None:
        out = spare_rows(T, I, like=x)
    _launch(x, gelu, out, None, min(1024, next_power_of_2(I)))
    return out


def quantized_act_and_mul(x: torch.Tensor, gelu: bool, act_block: int) -> Codes:
    """`act_and_mul` in FP8, with one scale per `act_block` columns of a row; 0: per row."""
    T, I = x.shape[0], x.shape[1] // 2
    out, whole = empty_codes(T, I, act_block, x.device), next_power_of_2(I)
    if act_block:
        _launch(x, gelu, out.codes, out.scales, max(act_block, min(1024, whole)), 0, act_block)
    elif whole == I:
        _launch(x, gelu, out.codes, out.scales, whole)
    else:  # a block of the next power of two would compute many columns beyond the end
        rest = next_power_of_2(I - whole // 2)
        _launch(x, gelu, out.codes, out.scales, whole // 2, rest)
    return out


def gate(
    x: torch.Tensor, gelu: bool, act_block: int | None, out: torch.Tensor | None = None
) -> torch.Tensor | Codes:
    """`act_and_mul`, quantised in groups of `act_block` columns (0: rows); None: not quantised."""
    return (
        act_and_mul(x, gelu, out)
        if act_block is None
        else quantized_act_and_mul(x, gelu, act_block)
    )


def _launch(
    x: torch.Tensor,
    gelu: bool,
    out: torch.Tensor,
    scales: torch.Tensor | None,
    block: int,
    rest: int = 0,
    act_block: int = 0,
) -> None:
    T, I = x.shape[0], x.shape[1] // 2
    _act_and_mul_kernel[(T, 1 if rest else cdiv(I, block))](
        x.contiguous(), out, scales, I, GELU=gelu, BLOCK=block, REST=rest, X_BLOCK=act_block,
        num_warps=min(32, max(4, block // 256)), **pdl_options(x),
    )  # fmt: skip
