"""Gates of attention's outputs (Qwen3-Next), in one pass."""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.device_features import launch_dependents, pdl_options, wait
from nanovllm.utils.integers import cdiv, next_power_of_2

MAX_BLOCK = 1024


@triton.jit(do_not_specialize=["stride_part"])
def _gate_heads_kernel(
    out_ptr, gate_ptr, rows_ptr, result_ptr, W, stride_part, stride_gate, stride_out,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # One program: BLOCK numbers of a row.
    launch_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < W
    of_gate = row
    if rows_ptr is not None:
        of_gate = tl.load(rows_ptr + row).to(tl.int64)
    gate_ptr += of_gate * stride_gate + cols
    wait(PDL)
    out = tl.load(out_ptr + row * stride_out + cols, inside, 0.0)
    gate = tl.load(gate_ptr, inside, 0.0).to(tl.float32)
    for _ in tl.static_range(1, PARTS):
        gate_ptr += stride_part
        gate += tl.load(gate_ptr, inside, 0.0)
    y = out.to(tl.float32) * tl.sigmoid(gate)
    tl.store(result_ptr + row * W + cols, y.to(result_ptr.dtype.element_ty), inside)


def gate_heads(out: torch.Tensor, gate: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    """`out * sigmoid(gate)`, see `nanovllm.layers.attention.gate_heads`.

    Args:
        out: [n, W], rows may lie apart.
        gate: [T, W], rows may lie apart; or partial results [S, T, W].
        rows: [n] int32, rows of `gate`; None: all, in order.

    Returns:
        [n, W], like out.
    """
    n, W = out.shape
    parts = len(gate) if gate.dim() == 3 else 1
    assert out.stride(1) == gate.stride(-1) == 1 and gate.shape[-1] == W
    BLOCK = min(MAX_BLOCK, next_power_of_2(W))
    result = torch.empty(n, W, dtype=out.dtype, device=out.device)
    _gate_heads_kernel[(n, cdiv(W, BLOCK))](
        out, gate, rows, result, W, gate.stride(0), gate.stride(-2), out.stride(0),
        PARTS=parts, BLOCK=BLOCK, num_warps=max(1, BLOCK // 256), **pdl_options(out),
    )  # fmt: skip
    return result
