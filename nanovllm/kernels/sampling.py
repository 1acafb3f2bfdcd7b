"""Exact sampling in one pass over the logits: argmax(logit / T - log E), E ~ Exp(1).

The noise of a logit is a function of the request's key, the token's position and the column alone,
through the counter-based generator Philox4x32 (Salmon et al., 2011): a request draws the same
tokens whatever it shares a batch with.
"""

import torch
import triton
import triton.language as tl

BLOCK = 2048  # columns of one iteration
SPLITS = 16  # programs for a row


@triton.jit
def _noise(bits):
    """-log E, with E = -log(1 - x) ~ Exp(1) from the uniform x = (bits + 1/2) / 2^32.

    Winners have E near zero, so there a series is taken: 1 - x would round.
    """
    x = (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    series = x * (1.0 + x * (0.5 + x * 0.33333333))
    e = tl.where(x < 0.01, series, -tl.log(tl.maximum(1.0 - x, 1e-9)))
    return -tl.log(e)


@triton.jit(do_not_specialize=["stride_keys"])
def _sample_kernel(
    logits_ptr, temperatures_ptr, keys_ptr, positions_ptr, score_ptr, token_ptr,
    V, stride, stride_keys,
    COLS: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    # One program: COLS columns of a row. One Philox call gives the noise of four columns.
    row, split = tl.program_id(0), tl.program_id(1)
    temperature = tl.load(temperatures_ptr + row)
    key0 = tl.load(keys_ptr + row).to(tl.uint32, bitcast=True)
    key1 = tl.load(keys_ptr + stride_keys + row).to(tl.uint32, bitcast=True)
    position = tl.load(positions_ptr + row).to(tl.uint32, bitcast=True)
    logits_ptr += row.to(tl.int64) * stride
    QUARTER: tl.constexpr = BLOCK // 4
    lanes = tl.arange(0, QUARTER)
    draws = temperature >= 1e-5
    inverse = 1.0 / tl.where(draws, temperature, 1.0)
    top = tl.full([QUARTER], float("-inf"), tl.float32)
    token = tl.zeros([QUARTER], tl.int32)
    for start in range(split * COLS, tl.minimum((split + 1) * COLS, V), BLOCK):
        counter = (start // 4 + lanes).to(tl.uint32)
        zero = counter * 0
        b0, b1, b2, b3 = zero, zero, zero, zero
        if draws:
            b0, b1, b2, b3 = tl.philox_impl(counter, zero + position, zero, zero, key0, key1, 7)
        for i in tl.static_range(4):
            cols = start + i * QUARTER + lanes
            score = tl.load(logits_ptr + cols, mask=cols < V, other=float("-inf")).to(tl.float32)
            if draws:
                bits = b0 if i == 0 else b1 if i == 1 else b2 if i == 2 else b3
                score = score * inverse + _noise(bits)
            better = score > top
            top = tl.where(better, score, top)
            token = tl.where(better, cols, token)
    best = tl.max(top, 0)
    first = tl.min(tl.where(top == best, token, 2147483647), 0)  # ties: the lowest token
    tl.store(score_ptr + row * SPLITS + split, best)
    tl.store(token_ptr + row * SPLITS + split, first)


@triton.jit
def _reduce_kernel(score_ptr, token_ptr, out_ptr, SPLITS: tl.constexpr):
    row = tl.program_id(0)
    splits = tl.arange(0, SPLITS)
    score = tl.load(score_ptr + row * SPLITS + splits)
    token = tl.load(token_ptr + row * SPLITS + splits)
    best = tl.max(score, 0)
    tl.store(out_ptr + row, tl.min(tl.where(score == best, token, 2147483647), 0))


def sample(
    logits: torch.Tensor, temperatures: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Draw one token per row from softmax(logits / temperature).

    Args:
        logits: [B, V], rows adjacent columns.
        temperatures: [B] float32; below 1e-5 the largest logit is taken.
        keys: [2, B] int32, the random key of each request, two words.
        positions: [B] int32, the position that the token will have.

    Returns:
        [B] int32.
    """
    B, V = logits.shape
    COLS = triton.cdiv(triton.cdiv(V, SPLITS), BLOCK) * BLOCK
    scores = torch.empty(B, SPLITS, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(B, SPLITS, dtype=torch.int32, device=logits.device)
    out = torch.empty(B, dtype=torch.int32, device=logits.device)
    _sample_kernel[(B, SPLITS)](
        logits, temperatures, keys, positions, scores, tokens, V, logits.stride(0),
        keys.stride(0),         COLS=COLS, BLOCK=BLOCK, SPLITS=SPLITS, num_warps=4,
    )  # fmt: skip
    _reduce_kernel[(B,)](scores, tokens, out, SPLITS=SPLITS, num_warps=1)
    return out
