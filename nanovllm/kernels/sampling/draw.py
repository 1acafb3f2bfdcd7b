"""Exact sampling in one pass over the logits.

A row is split into spans of columns. A token is drawn in two steps: first its span, with
probability proportional to the sum of the exponentials in it, then the token within the span.
Both take the argmax of `log weight + Gumbel noise` (the Gumbel-max trick), which draws exactly in
proportion to the weights; only the columns of the chosen span need noise of their own.

The noise is a function only of the request's key, the token's position, and the index of the span
or column, through the counter-based generator Philox4x32 (Salmon et al., 2011): a request draws the
same tokens whatever else is in the batch.

A row with a NaN has no distribution. Its span's weight is NaN, its token `NO_TOKEN`, and 0 in the
table of last tokens, for the step that is launched before the host has seen it.
"""

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from nanovllm.kernels.all_reduce import give_word, given_word, peer_options
from nanovllm.kernels.device_features import launch_dependents, pdl_options, wait
from nanovllm.sampling_params import NO_TOKEN
from nanovllm.utils.integers import cdiv, next_power_of_2

if TYPE_CHECKING:
    from nanovllm.distributed.peer_memory import PeerMemory

LOG2E = 1.4426950408889634
BLOCK = 128  # columns of a block, whose largest logit may be known
MIN_TEMPERATURE: tl.constexpr = tl.constexpr(1e-5)  # below it, the largest logit is drawn
LOST: tl.constexpr = tl.constexpr(NO_TOKEN)


@triton.jit
def _gumbel(bits):
    """-log2 E, with E = -log(1 - x) ~ Exp(1) from the uniform x = (bits + 1/2) / 2^32.

    Winners have E near zero, so a series is used there: 1 - x would round.
    """
    x = (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    series = x * (1.0 + x * (0.5 + x * 0.33333333))
    e = tl.where(x < 0.01, series, -tl.log(tl.maximum(1.0 - x, 1e-9)))
    return -tl.log2(e)


@triton.jit
def has_nan(x):
    """Whether a block of one dimension has a NaN."""
    return tl.max((x != x).to(tl.int32), 0) != 0  # noqa: PLR0124


@triton.jit
def _first_argmax(x, index):
    """The lowest of `index` at which x is largest."""
    return tl.min(tl.where(x == tl.max(x, 0), index, 2147483647), 0)


@triton.jit
def _weigh_spans_kernel(
    logits_ptr, temperatures_ptr, least_ptr, tops_ptr, weight_ptr, V, stride, stride_tops, LOG2E,
    SPAN: tl.constexpr, BLOCK: tl.constexpr, FILTER: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # One program: the weight of a span: log2 of the sum of 2^(logit * log2 e / T), or the largest
    # logit of a greedy row; NaN if there is a NaN.
    launch_dependents(PDL)
    row, span = tl.program_id(0), tl.program_id(1)
    temperature = tl.load(temperatures_ptr + row)
    cols = span * SPAN + tl.arange(0, SPAN)
    wait(PDL)
    ptrs = logits_ptr + row.to(tl.int64) * stride + cols
    inside = cols < V
    if FILTER:  # most blocks need not be read
        least = tl.load(least_ptr + row)
        tops_ptr += row.to(tl.int64) * stride_tops
        inside &= tl.load(tops_ptr + cols // BLOCK, mask=inside, other=float("-inf")) >= least
    x = tl.load(ptrs, mask=inside, other=float("-inf")).to(tl.float32)
    is_lost = has_nan(x)
    if FILTER:
        x = tl.where(x >= least, x, float("-inf"))
    weight = tl.max(x, 0)
    if temperature >= MIN_TEMPERATURE:
        scale = LOG2E / temperature
        top = weight * scale
        if tl.abs(top) < float("inf"):  # else nothing in the span can be drawn, or inf must be
            weight = top + tl.log2(tl.sum(tl.exp2(x * scale - top), 0))
    weight = tl.where(is_lost, float("nan"), weight)
    tl.store(weight_ptr + row * tl.num_programs(1) + span, weight)


@triton.jit(do_not_specialize=["stride_keys"])
def _draw_kernel(
    logits_ptr, temperatures_ptr, least_ptr, keys_ptr, positions_ptr, slots_ptr, weight_ptr,
    out_ptr, score_ptr, table_ptr, V, start, stride, stride_keys, LOG2E, peers_ptr, epochs_ptr,
    SPAN: tl.constexpr, SPANS: tl.constexpr, SPANS_PAD: tl.constexpr,
    ROW_BYTES: tl.constexpr, ROWS: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr,
    FILTER: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # One program: a row. One Philox call gives the noise of four columns. The noise of a span or
    # column is that of its index in the whole vocabulary, where this part begins at `start`.
    launch_dependents(PDL)
    row = tl.program_id(0)
    temperature = tl.load(temperatures_ptr + row)
    draws = temperature >= MIN_TEMPERATURE
    scale = tl.where(draws, LOG2E / tl.where(draws, temperature, 1.0), 1.0)
    key0 = tl.load(keys_ptr + row).to(tl.uint32, bitcast=True)
    key1 = tl.load(keys_ptr + stride_keys + row).to(tl.uint32, bitcast=True)
    position = tl.load(positions_ptr + row).to(tl.uint32, bitcast=True)
    slot = tl.load(slots_ptr + row)
    first_span = start // SPAN
    wait(PDL)

    spans = tl.arange(0, SPANS_PAD)
    score = tl.load(weight_ptr + row * SPANS + spans, mask=spans < SPANS, other=float("-inf"))
    is_lost = has_nan(score)
    score = tl.where(is_lost, float("-inf"), score)
    if draws:
        counter = (first_span + spans).to(tl.uint32)
        zero = counter * 0
        bits, _, _, _ = tl.philox_impl(counter, zero + position, zero + 1, zero, key0, key1, 7)
        score += _gumbel(bits)
    span = tl.minimum(_first_argmax(score, spans), SPANS - 1)
    best = tl.max(score, 0)

    QUARTER: tl.constexpr = SPAN // 4
    lanes = tl.arange(0, QUARTER)
    counter = ((first_span + span) * QUARTER + lanes).to(tl.uint32)
    zero = counter * 0
    b0, b1, b2, b3 = zero, zero, zero, zero
    if draws:
        b0, b1, b2, b3 = tl.philox_impl(counter, zero + position, zero, zero, key0, key1, 7)
    logits_ptr += row.to(tl.int64) * stride
    top = tl.full([QUARTER], float("-inf"), tl.float32)
    token = tl.zeros([QUARTER], tl.int32) + span * SPAN + lanes
    for i in tl.static_range(4):
        cols = span * SPAN + i * QUARTER + lanes
        score = tl.load(logits_ptr + cols, mask=cols < V, other=float("-inf")).to(tl.float32)
        if FILTER:
            score = tl.where(score >= tl.load(least_ptr + row), score, float("-inf"))
        score = score * scale
        if draws:
            score += _gumbel(b0 if i == 0 else b1 if i == 1 else b2 if i == 2 else b3)
        better = score > top
        top = tl.where(better, score, top)
        token = tl.where(better, cols, token)
    drawn = tl.where(is_lost, LOST, _first_argmax(top, token) + start)
    if SIZE > 1:
        drawn = _best_of_ranks(best, drawn, peers_ptr, epochs_ptr, row, ROW_BYTES, ROWS, RANK, SIZE)
    tl.store(out_ptr + row, drawn)
    tl.store(score_ptr + row, tl.where(is_lost, float("nan"), best))  # wins over all others
    tl.store(table_ptr + slot, tl.maximum(drawn, 0))


@triton.jit
def _best_of_ranks(
    score, token, peers_ptr, epochs_ptr, row,
    ROW_BYTES: tl.constexpr, ROWS: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """The token with the highest score over the ranks, the first of equals; or `LOST`."""
    low = token.to(tl.uint32, bitcast=True).to(tl.int64)
    word = (score.to(tl.int32, bitcast=True).to(tl.int64) << 32) | low
    epoch = tl.load(epochs_ptr + row)
    give_word(word, peers_ptr, row, epoch, ROW_BYTES, ROWS, RANK, SIZE)
    best, drawn, least = float("-inf"), 0, 0
    for peer in tl.static_range(SIZE):
        word = given_word(peers_ptr, peer, row, epoch, ROW_BYTES, ROWS, RANK, SIZE)
        theirs = (word >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        token = word.to(tl.int32)
        if peer == 0:
            best, drawn = theirs, token
        else:
            drawn = tl.where(theirs > best, token, drawn)
            best = tl.maximum(theirs, best)
        least = tl.minimum(least, token)
    tl.store(epochs_ptr + row, epoch + 1)
    return tl.where(least < 0, LOST, drawn)


def sample(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    keys: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    table: torch.Tensor,
    span: int,
    start: int = 0,
    peers: "PeerMemory | None" = None,
    least: torch.Tensor | None = None,
    tops: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token per row from softmax(logits / temperature).

    Args:
        logits: [B, V], the columns of a row adjacent: the whole vocabulary, or the part of a rank.
        temperatures: [B] float32; below 1e-5, the largest logit is drawn.
        keys: [2, B] int32, random key of each request, two words.
        positions: [B] int32, position of the token to draw.
        slots: [B] int32, indices in `table`.
        table: [N] int32, table of last tokens, to which each token is also written; 0 for
            `NO_TOKEN`.
        span: number of columns of a span.
        start: first token of this part of the vocabulary, a multiple of `span`.
        peers: ranks that have the other parts; None: draw the best of this part.
        least: [B] float32, least logits to draw; None: all may be drawn.
        tops: [B, blocks] float32, largest logit of each block of 128 columns, with `least` only.
        weights: [B, spans] float32, weights of the spans, if they are known: log2 of the sum of
            2^(logit * log2 e / temperature), or the largest logit for greedy rows.

    Returns:
        Tokens [B] int32, `NO_TOKEN` for rows with a NaN; and scores [B] float32, by which this
        part's best is to be compared with that of other parts, NaN for those rows.
    """
    B, V = logits.shape
    assert start % span == 0, f"a part of the vocabulary begins at {start}, within a span of {span}"
    SPANS = max(1, cdiv(V, span))
    out = torch.empty(B, dtype=torch.int32, device=logits.device)
    scores = torch.empty(B, dtype=torch.float32, device=logits.device)
    stride = logits.stride(0)
    if weights is None:
        weights = torch.empty(B, SPANS, dtype=torch.float32, device=logits.device)
        _weigh_spans_kernel[(B, SPANS)](
            logits, temperatures, logits if least is None else least,
            logits if tops is None else tops,
            weights, V, stride, 0 if tops is None else tops.stride(0), LOG2E,
            SPAN=span, BLOCK=BLOCK, FILTER=least is not None, num_warps=4, **pdl_options(logits),
        )  # fmt: skip
    _draw_kernel[(B,)](
        logits, temperatures, logits if least is None else least, keys, positions, slots, weights,
        out, scores, table, V, start, stride, keys.stride(0), LOG2E,
        SPAN=span, SPANS=SPANS, SPANS_PAD=next_power_of_2(SPANS),
        FILTER=least is not None, num_warps=8,
        **peer_options(peers, out), **pdl_options(logits),
    )  # fmt: skip
    return out, scores
