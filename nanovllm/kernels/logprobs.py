"""Log-probabilities of drawn tokens, and of the most likely ones."""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.sampling import LOG2E

SPAN = 4096  # columns that a program reads


@triton.jit
def _span_logprobs_kernel(
    logits_ptr, drawn_ptr, sums_ptr, larger_ptr, top_values_ptr, top_tokens_ptr,
    V, stride, N, LOG2E, SPAN: tl.constexpr,
):  # fmt: skip
    # One program: a span of a row: log2 of its sum, how many are larger than the drawn token, and
    # the N largest.
    row, span, spans = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    logits_ptr += row.to(tl.int64) * stride
    cols = span * SPAN + tl.arange(0, SPAN)
    x = tl.load(logits_ptr + cols, mask=cols < V, other=float("-inf")).to(tl.float32)
    drawn = tl.load(logits_ptr + tl.load(drawn_ptr + row)).to(tl.float32)
    place = row * spans + span
    tl.store(larger_ptr + place, tl.sum((x > drawn).to(tl.int32), 0))
    top = tl.max(x, 0)
    total = top * LOG2E
    if tl.abs(top) < float("inf"):
        total += tl.log2(tl.sum(tl.exp2((x - top) * LOG2E), 0))
    tl.store(sums_ptr + place, total)
    for i in range(N):
        top = tl.max(x, 0)
        token = tl.min(tl.where(x == top, cols, 2147483647), 0)
        tl.store(top_values_ptr + place * N + i, top)
        tl.store(top_tokens_ptr + place * N + i, token)
        x = tl.where(cols == token, float("-inf"), x)


@triton.jit
def _logprobs_kernel(
    logits_ptr, drawn_ptr, sums_ptr, larger_ptr, top_values_ptr, top_tokens_ptr,
    tokens_ptr, values_ptr, ranks_ptr, stride, SPANS, N, LOG2E,
    SPANS_PAD: tl.constexpr, TOPS_PAD: tl.constexpr,
):  # fmt: skip
    # One program: a row.
    row = tl.program_id(0)
    spans, tops = tl.arange(0, SPANS_PAD), tl.arange(0, TOPS_PAD)
    inside = spans < SPANS
    sums = tl.load(sums_ptr + row * SPANS + spans, mask=inside, other=float("-inf"))
    largest = tl.max(sums, 0)
    total = (largest + tl.log2(tl.sum(tl.exp2(sums - largest), 0))) / LOG2E
    larger = tl.load(larger_ptr + row * SPANS + spans, mask=inside, other=0)
    tl.store(ranks_ptr + row, tl.sum(larger, 0) + 1)
    drawn = tl.load(drawn_ptr + row)
    value = tl.load(logits_ptr + row.to(tl.int64) * stride + drawn).to(tl.float32)
    tokens_ptr += row * (N + 1)
    values_ptr += row * (N + 1)
    tl.store(tokens_ptr, drawn)
    tl.store(values_ptr, value - total)
    inside = tops < SPANS * N
    values = tl.load(top_values_ptr + row * SPANS * N + tops, mask=inside, other=float("-inf"))
    tokens = tl.load(top_tokens_ptr + row * SPANS * N + tops, mask=inside, other=2147483647)
    for i in range(N):
        top = tl.max(values, 0)
        token = tl.min(tl.where(values == top, tokens, 2147483647), 0)
        tl.store(tokens_ptr + 1 + i, token)
        tl.store(values_ptr + 1 + i, top - total)
        values = tl.where(tokens == token, float("-inf"), values)
        tokens = tl.where(tokens == token, 2147483647, tokens)


def logprobs(
    logits: torch.Tensor, drawn: torch.Tensor, num_logprobs: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities of the drawn tokens, and of the most likely ones.

    Args:
        logits: [n, V], rows adjacent columns.
        drawn: [n] int32.
        num_logprobs: N, at most V.

    Returns:
        Tokens [n, 1 + N] int32, the drawn one first; their log-probabilities [n, 1 + N] float32;
        the rank [n] int32 of the drawn one.
    """
    n, V = logits.shape
    spans, N, device = triton.cdiv(V, SPAN), num_logprobs, logits.device
    sums = torch.empty(n, spans, dtype=torch.float32, device=device)
    larger = torch.empty(n, spans, dtype=torch.int32, device=device)
    top_values = torch.empty(n, spans, N, dtype=torch.float32, device=device)
    top_tokens = torch.empty(n, spans, N, dtype=torch.int32, device=device)
    tokens = torch.empty(n, 1 + N, dtype=torch.int32, device=device)
    values = torch.empty(n, 1 + N, dtype=torch.float32, device=device)
    ranks = torch.empty(n, dtype=torch.int32, device=device)
    parts = logits, drawn, sums, larger, top_values, top_tokens
    _span_logprobs_kernel[(n, spans)](*parts, V, logits.stride(0), N, LOG2E, SPAN=SPAN, num_warps=8)
    _logprobs_kernel[(n,)](
        *parts, tokens, values, ranks, logits.stride(0), spans, N, LOG2E,
        SPANS_PAD=triton.next_power_of_2(spans),
        TOPS_PAD=triton.next_power_of_2(max(1, spans * N)), num_warps=4,
    )  # fmt: skip
    return tokens, values, ranks
