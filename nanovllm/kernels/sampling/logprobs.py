"""Log-probabilities of drawn tokens, and of the most likely ones."""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.sampling.controls import clean
from nanovllm.kernels.sampling.draw import LOG2E, has_nan
from nanovllm.sampling_params import MAX_LOGPROBS
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
    logits_ptr, rows_ptr, drawn_ptr, divisors_ptr, least_ptr, own_ptr, maxima_ptr, sums_ptr,
    larger_ptr, top_values_ptr, top_tokens_ptr, V, stride, N, LOG2E, SPAN: tl.constexpr,
):  # fmt: skip
    # One program: a span of a row: its maximum, the sum of exponentials relative to that (NaN if a
    # logit is), the number of logits larger than the drawn token's, and the N largest. The first
    # notes the drawn token's. Nothing is read of a row that is not wanted.
    entry, span, spans = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    divisor, least = tl.load(divisors_ptr + entry), tl.load(least_ptr + entry)
    is_wanted = divisor > 0.0
    logits_ptr += tl.load(rows_ptr + entry).to(tl.int64) * stride
    cols = span * SPAN + tl.arange(0, SPAN)
    end = tl.where(is_wanted, V, 0)
    raw = tl.load(logits_ptr + cols, mask=cols < end, other=float("-inf"))
    x = clean(raw)
    x = tl.where(x >= least, x, float("-inf"))
    drawn = clean(tl.load(logits_ptr + tl.maximum(tl.load(drawn_ptr + entry), 0)))
    if span == 0:
        tl.store(own_ptr + entry, drawn)
    place = entry * spans + span
    tl.store(larger_ptr + place, tl.sum((x > drawn).to(tl.int32), 0))
    top = tl.max(x, 0)
    scale = LOG2E / tl.where(is_wanted, divisor, 1.0)
    weights = tl.where(x > float("-inf"), tl.exp2((x - top) * scale), 0.0)
    tl.store(maxima_ptr + place, top)
    tl.store(sums_ptr + place, tl.where(has_nan(raw), float("nan"), tl.sum(weights, 0)))
    for i in range(N):  # columns beyond V come last
        top, token, x, cols = _take_largest(x, cols)
        tl.store(top_values_ptr + place * N + i, top)
        tl.store(top_tokens_ptr + place * N + i, token)


@triton.jit(do_not_specialize=["N"])
def _logprobs_kernel(
    drawn_ptr, divisors_ptr, own_ptr, maxima_ptr, sums_ptr, larger_ptr, top_values_ptr,
    top_tokens_ptr, tokens_ptr, values_ptr, ranks_ptr, SPANS, N, LOG2E,
    SPANS_PAD: tl.constexpr, TOPS_PAD: tl.constexpr,
):  # fmt: skip
    # One program: a row.
    row = tl.program_id(0)
    spans, tops = tl.arange(0, SPANS_PAD), tl.arange(0, TOPS_PAD)
    divisor = tl.load(divisors_ptr + row)
    divisor = tl.where(divisor > 0.0, divisor, 1.0)
    inside = spans < SPANS
    maxima = tl.load(maxima_ptr + row * SPANS + spans, mask=inside, other=float("-inf"))
    sums = tl.load(sums_ptr + row * SPANS + spans, mask=inside, other=0.0)
    largest = tl.max(maxima, 0)
    log_sum = tl.log(tl.sum(sums * tl.exp2((maxima - largest) * (LOG2E / divisor)), 0))
    larger = tl.load(larger_ptr + row * SPANS + spans, mask=inside, other=0)
    tl.store(ranks_ptr + row, tl.sum(larger, 0) + 1)
    tokens_ptr += row * (N + 1)
    values_ptr += row * (N + 1)
    tl.store(tokens_ptr, tl.load(drawn_ptr + row))
    tl.store(values_ptr, (tl.load(own_ptr + row) - largest) / divisor - log_sum)
    inside = tops < SPANS * N
    values = tl.load(top_values_ptr + row * SPANS * N + tops, mask=inside, other=float("-inf"))
    tokens = tl.load(top_tokens_ptr + row * SPANS * N + tops, mask=inside, other=NOTHING)
    for i in range(N):
        top, token, values, tokens = _take_largest(values, tokens)
        tl.store(tokens_ptr + 1 + i, token)
        tl.store(values_ptr + 1 + i, (top - largest) / divisor - log_sum)


def logprobs(
    logits: torch.Tensor,
    drawn: torch.Tensor,
    rows: torch.Tensor,
    divisors: torch.Tensor,
    least: torch.Tensor,
    tokens: torch.Tensor,
    values: torch.Tensor,
    ranks: torch.Tensor,
) -> None:
    """Log-probabilities of the drawn tokens, and of the most likely ones, by m distributions: the
    softmax of logits / divisor over those that are not below the least. The logits are read once.

    Args:
        logits: [R, V], the columns of a row adjacent.
        drawn: [m] int32, drawn tokens; negative ones stand for any.
        rows: [m] int32, rows of the logits.
        divisors: [m] float32; 0: the row is not read, and its results are arbitrary.
        least: [m] float32.
        tokens: [m, 1 + N] int32, to write: the drawn one, and the N most likely ones; N at most V,
            and `MAX_LOGPROBS`.
        values: [m, 1 + N] float32, to write: log-probabilities, NaN if any logit of the row is.
        ranks: [m] int32, to write: the rank of the drawn token.
    """
    (m, width), V, device = tokens.shape, logits.shape[1], logits.device
    spans, N = cdiv(V, SPAN), width - 1
    own = torch.empty(m, dtype=torch.float32, device=device)
    maxima = torch.empty(m, spans, dtype=torch.float32, device=device)
    sums = torch.empty_like(maxima)
    larger = torch.empty(m, spans, dtype=torch.int32, device=device)
    top_values = torch.empty(m, spans, N, dtype=torch.float32, device=device)
    top_tokens = torch.empty(m, spans, N, dtype=torch.int32, device=device)
    parts = own, maxima, sums, larger, top_values, top_tokens
    _span_logprobs_kernel[(m, spans)](
        logits, rows, drawn, divisors, least, *parts, V, logits.stride(0), N, LOG2E,
        SPAN=SPAN, num_warps=8,
    )  # fmt: skip
    # One variant for all N: another might add in another order (`Config.batch_invariant`).
    assert N <= MAX_LOGPROBS
    _logprobs_kernel[(m,)](
        drawn, divisors, *parts, tokens, values, ranks, spans, N, LOG2E,
        SPANS_PAD=next_power_of_2(spans),
        TOPS_PAD=next_power_of_2(spans * MAX_LOGPROBS), num_warps=4,
    )  # fmt: skip
