"""The gate of an MLP, act(gate) * up, in one pass."""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.hopper import launch_dependents, pdl_options, spare_rows, wait


@triton.jit
def activate(x, GELU: tl.constexpr):
    """SiLU, or GELU by tanh, of x: float32."""
    y = x
    if GELU:  # (1 + tanh(z)) / 2 = sigmoid(2 z), with sqrt(2 / pi) = 0.79788...
        y = 1.5957691216057308 * (x + 0.044715 * x * x * x)
    return x * tl.sigmoid(y)


@triton.jit
def activate_and_mul(gate, up, GELU: tl.constexpr, LIMIT: tl.constexpr):
    """`act(gate) * up`, both float32. A LIMIT clamps them first, and gates 1 + up: gpt-oss's SwiGLU
    (OpenAI, 2025).
    """
    if LIMIT > 0:
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
        return gate * tl.sigmoid(1.702 * gate) * (up + 1.0)
    else:
        return activate(gate, GELU) * up


@triton.jit
def _act_and_mul_kernel(
    x_ptr, out_ptr, I, GELU: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    launch_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < I
    wait(PDL)
    gate = tl.load(x_ptr + row * 2 * I + cols, mask=mask, other=0.0)
    up = tl.load(x_ptr + row * 2 * I + I + cols, mask=mask, other=0.0)
    dtype = gate.dtype
    gate = activate(gate.to(tl.float32), GELU)
    tl.store(out_ptr + row * I + cols, gate.to(dtype) * up, mask=mask)


def act_and_mul(x: torch.Tensor, gelu: bool = False) -> torch.Tensor:
    """x: [T, 2 I] = [gate | up] -> act(gate) * up: [T, I]; act is SiLU, or GELU by tanh."""
    T, I = x.shape[0], x.shape[1] // 2
    out = spare_rows(T, I, like=x)
    BLOCK = min(1024, triton.next_power_of_2(I))
    grid = (T, triton.cdiv(I, BLOCK))
    _act_and_mul_kernel[grid](
        x.contiguous(), out, I, GELU=gelu, BLOCK=BLOCK, num_warps=4, **pdl_options(x)
    )
    return out
