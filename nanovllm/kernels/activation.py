"""SwiGLU: silu(gate) * up in one pass."""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.hopper import launch_dependents, pdl_options, spare_rows, wait


@triton.jit
def _silu_and_mul_kernel(x_ptr, out_ptr, I, BLOCK: tl.constexpr, PDL: tl.constexpr):
    launch_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < I
    wait(PDL)
    gate = tl.load(x_ptr + row * 2 * I + cols, mask=mask, other=0.0)
    up = tl.load(x_ptr + row * 2 * I + I + cols, mask=mask, other=0.0)
    dtype = gate.dtype
    gate = gate.to(tl.float32)
    tl.store(out_ptr + row * I + cols, (gate * tl.sigmoid(gate)).to(dtype) * up, mask=mask)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """x: [T, 2 I] = [gate | up] -> silu(gate) * up: [T, I]."""
    T, I = x.shape[0], x.shape[1] // 2
    out = spare_rows(T, I, like=x)
    BLOCK = min(1024, triton.next_power_of_2(I))
    grid = (T, triton.cdiv(I, BLOCK))
    _silu_and_mul_kernel[grid](x.contiguous(), out, I, BLOCK=BLOCK, num_warps=4, **pdl_options(x))
    return out
