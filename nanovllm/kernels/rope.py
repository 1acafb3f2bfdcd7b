"""Query and key normalisation with rotary embedding, in place, one token per program."""

import torch
import triton
import triton.language as tl


@triton.jit
def _qk_norm_rope_kernel(
    x_ptr, q_weight_ptr, k_weight_ptr, cos_sin_ptr, positions_ptr, eps, stride_t,
    HQ: tl.constexpr, H: tl.constexpr, H_PAD: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    # One program holds all H = Hq + Hkv heads of a token, in two halves of D/2.
    HALF: tl.constexpr = D // 2
    t = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, H_PAD)[:, None]
    i = tl.arange(0, HALF)[None, :]
    ptr = x_ptr + t * stride_t + head * D + i
    mask = (head < H) & (i < HALF)
    x1 = tl.load(ptr, mask=mask, other=0.0)
    dtype = x1.dtype
    x1 = x1.to(tl.float32)
    x2 = tl.load(ptr + HALF, mask=mask, other=0.0).to(tl.float32)

    scale = tl.rsqrt((tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)) / D + eps)[:, None]
    is_q = head < HQ
    w1 = tl.where(is_q, tl.load(q_weight_ptr + i), tl.load(k_weight_ptr + i))
    w2 = tl.where(is_q, tl.load(q_weight_ptr + HALF + i), tl.load(k_weight_ptr + HALF + i))
    x1 = ((x1 * scale).to(dtype) * w1).to(tl.float32)
    x2 = ((x2 * scale).to(dtype) * w2).to(tl.float32)

    cos_sin = cos_sin_ptr + tl.load(positions_ptr + t).to(tl.int64) * D + i
    cos = tl.load(cos_sin)
    sin = tl.load(cos_sin + HALF)
    tl.store(ptr, (x1 * cos - x2 * sin).to(dtype), mask=mask)
    tl.store(ptr + HALF, (x2 * cos + x1 * sin).to(dtype), mask=mask)


def qk_norm_rope_(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    """RMS-normalise every head of q and k, then rotate it to its position, in place.

    Args:
        q, k: [T, Hq, D] and [T, Hkv, D], adjacent views of one projection [T, Hq + ..., D].
        q_weight, k_weight: [D].
        cos_sin: [max_position, D] float32, see `RotaryEmbedding`.
        positions: [T] int32.
    """
    T, HQ, D = q.shape
    H = HQ + k.shape[1]
    assert q.stride() == k.stride() and q.stride()[1:] == (D, 1), "q and k are no plain views"
    assert k.data_ptr() == q.data_ptr() + HQ * D * q.element_size(), "k does not follow q"
    _qk_norm_rope_kernel[(T,)](
        q, q_weight, k_weight, cos_sin, positions, eps, q.stride(0),
        HQ=HQ, H=H, H_PAD=triton.next_power_of_2(H), D=D, num_warps=4,
    )  # fmt: skip
