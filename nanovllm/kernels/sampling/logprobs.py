"""Log-probabilities of drawn tokens, and of the most likely ones."""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.sampling.controls import clean
from nanovllm.kernels.sampling.draw import LOG2E, has_nan
from nanovllm.utils.integers import cdiv, next_power_of_2

SPAN = 4096  # columns that a program reads
NOTHING: tl.constexpr = tl.constexpr(2147483647)  # in place of a token


@triton.jit
def _take_largest(values, tokens):
    """The largest value and its token, the first of equals; and all values and tokens but these."""
    top = tl.max(values, 0)
    token = tl.min(tl.where(values == top, tokens, NOTHING), 0)
    taken = tokens == token
    return top, token, tl.where(taken, float("-inf"), values), tl.where(taken, NOTHING, tokens)


@triton.jit(do_not_specialize=["N"])
def _span_logprobs_kernel(
    logits_ptr, drawn_ptr, maxima_ptr, sums_ptr, larger_ptr, top_values_ptr, top_tokens_ptr,
    V, stride, N, LOG2E, SPAN: tl.constexpr,
):  # fmt: skip
    # One program: a span of a row: its maximum, the sum of exponentials relative to that (NaN if a
    # logit is), the number of logits larger than the drawn token's, and the N largest.
    row, span, spans = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    logits_ptr += row.to(tl.int64) * stride
    cols = span * SPAN + tl.arange(0, SPAN)
    raw = tl.load(logits_ptr + cols, mask=cols < V, other=float("-inf"))
    x = clean(raw)
    drawn = clean(tl.load(logits_ptr + tl.load(drawn_ptr + row)))
    place = row * spans + span
    tl.store(larger_ptr + place, tl.sum((x > drawn).to(tl.int32), 0))
    top = tl.max(x, 0)
    weights = tl.where(x > float("-inf"), tl.exp2((x - top) * LOG2E), 0.0)
    tl.store(maxima_ptr + place, top)
    tl.store(sums_ptr + place, tl.where(has_nan(raw), float("nan"), tl.sum(weights, 0)))
    for i in range(N):  # columns beyond V come last
        top, token, x, cols = _take_largest(x, cols)
        tl.store(top_values_ptr + place * N + i, top)
        tl.store(top_tokens_ptr + place * N + i, token)


@triton.jit(do_not_specialize=["N"])
def _logprobs_kernel(
    logits_ptr, drawn_ptr, maxima_ptr, sums_ptr, larger_ptr, top_values_ptr, top_tokens_ptr,
    tokens_ptr, values_ptr, ranks_ptr, stride, SPANS, N, LOG2E,
    SPANS_PAD: tl.constexpr, TOPS_PAD: tl.constexpr,
):  # fmt: skip
    # One program: a row.
    row = tl.program_id(0)
    spans, tops = tl.arange(0, SPANS_PAD), tl.arange(0, TOPS_PAD)
    inside = spans < SPANS
    maxima = tl.load(maxima_ptr + row * SPANS + spans, mask=inside, other=float("-inf"))
    sums = tl.load(sums_ptr + row * SPANS + spans, mask=inside, other=0.0)
    largest = tl.max(maxima, 0)
    log_sum = tl.log(tl.sum(sums * tl.exp2((maxima - largest) * LOG2E), 0))
    larger = tl.load(larger_ptr + row * SPANS + spans, mask=inside, other=0)
    tl.store(ranks_ptr + row, tl.sum(larger, 0) + 1)
    drawn = tl.load(drawn_ptr + row)
    value = clean(tl.load(logits_ptr + row.to(tl.int64) * stride + drawn))
    tokens_ptr += row * (N + 1)
    values_ptr += row * (N + 1)
    tl.store(tokens_ptr, drawn)
    tl.store(values_ptr, value - largest - log_sum)
    inside = tops < SPANS * N
    values = tl.load(top_values_ptr + row * SPANS * N + tops, mask=inside, other=float("-inf"))
    tokens = tl.load(top_tokens_ptr + row * SPANS * N + tops, mask=inside, other=NOTHING)
    for i in range(N):
        top, token, values, tokens = _take_largest(values, tokens)
        tl.store(tokens_ptr + 1 + i, token)
        tl.store(values_ptr + 1 + i, top - largest - log_sum)


def logprobs(
    logits: torch.Tensor, drawn: torch.Tensor, num_logprobs: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities of the drawn tokens, and of the most likely ones.

    Args:
        logits: [n, V], the columns of a row adjacent.
        drawn: [n] int32, drawn tokens.
        num_logprobs: number N of most likely tokens, at most V.

    Returns:
        Tokens [n, 1 + N] int32, the drawn one first; their log-probabilities [n, 1 + N] float32,
        NaN if any logit of the row is; the rank [n] int32 of the drawn one.
    """
    n, V = logits.shape
    spans, N, device = cdiv(V, SPAN), num_logprobs, logits.device
    maxima = torch.empty(n, spans, dtype=torch.float32, device=device)
    sums = torch.empty_like(maxima)
    larger = torch.empty(n, spans, dtype=torch.int32, device=device)
    top_values = torch.empty(n, spans, N, dtype=torch.float32, device=device)
    top_tokens = torch.empty(n, spans, N, dtype=torch.int32, device=device)
    tokens = torch.empty(n, 1 + N, dtype=torch.int32, device=device)
    values = torch.empty(n, 1 + N, dtype=torch.float32, device=device)
    ranks = torch.empty(n, dtype=torch.int32, device=device)
    parts = logits, drawn, maxima, sums, larger, top_values, top_tokens
    _span_logprobs_kernel[(n, spans)](*parts, V, logits.stride(0), N, LOG2E, SPAN=SPAN, num_warps=8)
    _logprobs_kernel[(n,)](
        *parts, tokens, values, ranks, logits.stride(0), spans, N, LOG2E,
        SPANS_PAD=next_power_of_2(spans),
        TOPS_PAD=next_power_of_2(max(1, spans * N)), num_warps=4,
    )  # fmt: skip
    return tokens, values, ranks
