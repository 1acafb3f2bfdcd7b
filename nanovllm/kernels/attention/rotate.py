"""Rotation of heads where they lie, each token by a row of its own: queries and keys of towers."""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.attention.rope import norm_rope
from nanovllm.kernels.device_features import launch_dependents, pdl_options, wait
from nanovllm.utils.integers import cdiv, next_power_of_2

MAX_HEADS = 32  # of a program


@triton.jit
def _rotate_kernel(
    x_ptr, cos_sin_ptr, stride_t, H,
    D: tl.constexpr, HALF_PAD: tl.constexpr, HEADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # One program: HEADS heads of a token, in two halves of D/2.
    launch_dependents(PDL)
    HALF: tl.constexpr = D // 2
    t = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    i = tl.arange(0, HALF_PAD)[None, :]
    cos_sin = cos_sin_ptr + t * D + i
    cos_sin = tl.load(cos_sin, i < HALF), tl.load(cos_sin + HALF, i < HALF)
    wait(PDL)
    ptr, inside = x_ptr + t * stride_t + head * D + i, (head < H) & (i < HALF)
    x1, x2 = tl.load(ptr, inside), tl.load(ptr + HALF, inside)
    y1, y2 = norm_rope(x1, x2, (0.0, 0.0), cos_sin, 0.0, D, False, False)
    tl.store(ptr, y1, inside)
    tl.store(ptr + HALF, y2, inside)


def rotate_(x: torch.Tensor, cos_sin: torch.Tensor) -> None:
    """Rotate heads in place, by float32 arithmetic: the pair of elements i and i + D/2 of a head by
    the angle whose cosine and sine stand at i and i + D/2.

    Args:
        x: [T, H, D], the heads of a token adjacent.
        cos_sin: [T, D] float32, cosines before sines.
    """
    T, H, D = x.shape
    assert x.stride()[1:] == (D, 1), "the heads of a token must be adjacent"
    assert cos_sin.shape == (T, D) and cos_sin.is_contiguous(), "a row for each token"
    HEADS = min(MAX_HEADS, next_power_of_2(H))
    _rotate_kernel[(T, cdiv(H, HEADS))](
        x, cos_sin, x.stride(0), H, D=D, HALF_PAD=next_power_of_2(D // 2), HEADS=HEADS,
        num_warps=max(1, HEADS * D // 512), **pdl_options(x),
    )  # fmt: skip
