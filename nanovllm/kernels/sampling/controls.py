"""Controls of sampling: masks, edits and penalties, in one pass over the vocabulary.

The pass keeps the largest logit of each block of columns, for `kernels/sampling/thresholds.py`.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.sampling.draw import BLOCK, LOG2E, MIN_TEMPERATURE
from nanovllm.utils.integers import cdiv

BLOCKS = 32  # blocks per program of `process`
SPAN = BLOCK * BLOCKS  # columns per program
WORDS = 64  # words of 32 columns per program of `left`
LISTED_WORDS = 256  # words that a program of `listed` reads at once


@triton.jit
def _lower_bound(values_ptr, low, high, value):
    """The first index in low..high whose value is not below `value`."""
    size = high - low  # Triton 3.4 does not compile a loop with `high` as a bound
    while size > 0:
        half = size // 2
        below = tl.load(values_ptr + low + half) < value
        low += tl.where(below, half + 1, 0)
        size = tl.where(below, size - half - 1, half)
    return low


@triton.jit
def clean(x):
    """Convert to float32, with -inf for NaN, which is never drawn."""
    x = x.to(tl.float32)
    return tl.where(x == x, x, float("-inf"))  # noqa: PLR0124


@triton.jit(do_not_specialize=["n"])
def _process_kernel(
    logits_ptr, out_ptr, tops_ptr, masks_ptr, mask_rows_ptr, starts_ptr, tokens_ptr, biases_ptr,
    penalties_ptr, counts_ptr, slots_ptr, temperatures_ptr, weights_ptr, n, V, stride, LOG2E,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    PENALTIES: tl.constexpr, WEIGHTS: tl.constexpr,
):  # fmt: skip
    # One program: BLOCKS blocks of a row.
    row, tile = tl.program_id(0), tl.program_id(1)
    block = tile * BLOCKS + tl.arange(0, BLOCKS)
    cols = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = cols < V
    long_row = row.to(tl.int64)
    x = tl.load(logits_ptr + long_row * stride + cols, mask=inside, other=float("-inf"))
    x = x.to(tl.float32)
    mask_row = tl.load(mask_rows_ptr + row)
    if mask_row >= 0:
        words_ptr = masks_ptr + mask_row.to(tl.int64) * tl.cdiv(V, 32)
        words = tl.load(words_ptr + cols // 32, mask=inside, other=0)
        x = tl.where(((words >> (cols % 32)) & 1) != 0, x, float("-inf"))
    begin, end = tl.load(starts_ptr + row), tl.load(starts_ptr + row + 1)
    first = tile * BLOCKS * BLOCK
    begin = _lower_bound(tokens_ptr, begin, end, first)
    end = _lower_bound(tokens_ptr, begin, end, first + BLOCKS * BLOCK)
    for i in range(begin, end):
        bias = tl.load(biases_ptr + i)
        x = tl.where(cols == tl.load(tokens_ptr + i), x + bias, x)
    if PENALTIES:
        repetition = tl.load(penalties_ptr + row)
        presence, frequency = tl.load(penalties_ptr + n + row), tl.load(penalties_ptr + 2 * n + row)
        if (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0):
            slot = tl.load(slots_ptr + row).to(tl.int64)
            seen = tl.load(counts_ptr + slot * V + cols, mask=inside, other=0).to(tl.int32)
            count = seen & 0x7FFF
            x = tl.where(seen != 0, tl.where(x > 0, x / repetition, x * repetition), x)
            x -= frequency * count.to(tl.float32) + tl.where(count > 0, presence, 0.0)
    x = clean(x)  # not before, as a banned inf has become NaN
    tl.store(out_ptr + long_row * V + cols, x, mask=inside)
    tops = tl.max(x, 1)
    tl.store(tops_ptr + long_row * tl.num_programs(1) * BLOCKS + block, tops)
    if WEIGHTS:
        weight, temperature = tl.max(tops, 0), tl.load(temperatures_ptr + row)
        if (temperature >= MIN_TEMPERATURE) & (tl.abs(weight) < float("inf")):
            scale = LOG2E / temperature
            top = weight * scale
            weight = top + tl.log2(tl.sum(tl.sum(tl.exp2(x * scale - top), 1), 0))
        tl.store(weights_ptr + row * tl.num_programs(1) + tile, weight)


def process(
    logits: torch.Tensor,
    slots: torch.Tensor,
    masks: torch.Tensor,
    mask_rows: torch.Tensor,
    edit_starts: torch.Tensor,
    edit_tokens: torch.Tensor,
    edit_biases: torch.Tensor,
    penalties: torch.Tensor,
    counts: torch.Tensor | None,
    temperatures: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Mask, edit and penalise logits.

    Args:
        logits: [n, V], the columns of a row adjacent.
        slots: [n] int32, rows of counts.
        masks, mask_rows, edit_starts, edit_tokens, edit_biases, penalties: see
            `nanovllm.sampling.controls.Controls`, on the device.
        counts: [N, V] int16, see `ControlledSampler`; None: no penalties.
        temperatures: [n] float32; None: compute no weights of spans.

    Returns:
        Logits [n, V] float32; the largest of each block of columns, [n, blocks] float32; and the
        weights of spans of `SPAN` columns for `nanovllm.kernels.sampling.draw.sample`, or None.
    """
    n, V = logits.shape
    tiles = cdiv(V, SPAN)
    out = torch.empty(n, V, dtype=torch.float32, device=logits.device)
    tops = torch.empty(n, tiles * BLOCKS, dtype=torch.float32, device=logits.device)
    weights = None
    if temperatures is not None:
        weights = torch.empty(n, tiles, dtype=torch.float32, device=logits.device)
    _process_kernel[(n, tiles)](
        logits, out, tops, masks, mask_rows, edit_starts, edit_tokens, edit_biases,
        penalties, logits if counts is None else counts, slots,
        tops if temperatures is None else temperatures, tops if weights is None else weights,
        n, V, logits.stride(0), LOG2E,
        BLOCK=BLOCK, BLOCKS=BLOCKS,
        PENALTIES=counts is not None, WEIGHTS=weights is not None, num_warps=8,
    )  # fmt: skip
    return out, tops, weights


@triton.jit
def _left_kernel(x_ptr, rows_ptr, least_ptr, bits_ptr, V, W, WORDS: tl.constexpr):
    # One program: WORDS words of a row, each of 32 columns.
    entry, words = tl.program_id(0), tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    row, lanes = tl.load(rows_ptr + entry).to(tl.int64), tl.arange(0, 32)
    cols = words[:, None] * 32 + lanes[None, :]
    x = tl.load(x_ptr + row * V + cols, mask=cols < V, other=float("-inf"))
    is_left = (x >= tl.load(least_ptr + entry)) & (x > float("-inf"))
    bits = tl.sum(is_left.to(tl.int32) << lanes[None, :], 1)
    tl.store(bits_ptr + entry.to(tl.int64) * W + words, bits, mask=words < W)


def left(x: torch.Tensor, rows: torch.Tensor, least: torch.Tensor) -> torch.Tensor:
    """The columns of rows that are not below the least logit, nor -inf.

    Args:
        x: [n, V] float32, logits.
        rows: [m] int32
        least: [m] float32, for each of these rows.

    Returns:
        [m, W] int32, W = ceil(V / 32): bit t % 32 of word t // 32 for column t.
    """
    m, V = len(rows), x.shape[1]
    W = cdiv(V, 32)
    bits = torch.empty(m, W, dtype=torch.int32, device=x.device)
    _left_kernel[(m, cdiv(W, WORDS))](x, rows, least, bits, V, W, WORDS=WORDS, num_warps=4)
    return bits


@triton.jit
def _listed_kernel(bits_ptr, listed_ptr, W, COUNT: tl.constexpr, WORDS: tl.constexpr):
    # One program: a row, in order. Most words have no bit.
    row, lanes, num = tl.program_id(0).to(tl.int64), tl.arange(0, 32), 0
    listed_ptr += row * (1 + COUNT)
    for first in range(0, W, WORDS):
        index = first + tl.arange(0, WORDS)
        words = tl.load(bits_ptr + row * W + index, mask=index < W, other=0)
        if tl.max((words != 0).to(tl.int32), 0) > 0:
            bits = (words[:, None] >> lanes[None, :]) & 1
            of_word = tl.sum(bits, 1)
            before = num + tl.cumsum(of_word, 0) - of_word
            place = before[:, None] + tl.cumsum(bits, 1) - bits
            ids = index[:, None] * 32 + lanes[None, :]
            tl.store(listed_ptr + 1 + place, ids, mask=(bits != 0) & (place < COUNT))
            num += tl.sum(of_word, 0)
    tl.store(listed_ptr, num)


def listed(bits: torch.Tensor, count: int) -> torch.Tensor:
    """The columns that `left` leaves, as ids where they are few.

    Args:
        bits: [m, W] int32, result of `left`.
        count: maximum number of ids of a row.

    Returns:
        [m, 1 + count] int32: the number of columns that a row leaves, and the first `count` of
        them, ascending; undefined where there are fewer.
    """
    m, W = bits.shape
    out = torch.empty(m, 1 + count, dtype=torch.int32, device=bits.device)
    _listed_kernel[(m,)](bits, out, W, COUNT=count, WORDS=LISTED_WORDS, num_warps=8)
    return out


@triton.jit
def _count_kernel(counts_ptr, slots_ptr, tokens_ptr, V, MOST: tl.constexpr):
    row = tl.program_id(0)
    slot, token = tl.load(slots_ptr + row).to(tl.int64), tl.load(tokens_ptr + row)
    ptr = counts_ptr + slot * V + token
    count = tl.load(ptr).to(tl.int32)
    tl.store(ptr, (count + ((count & MOST) < MOST).to(tl.int32)).to(tl.int16))


def count(counts: torch.Tensor, slots: torch.Tensor, tokens: torch.Tensor) -> None:
    """Count tokens [n] int32 in rows `slots`: [n] int32 of counts: [N, V] int16."""
    _count_kernel[(len(slots),)](counts, slots, tokens, counts.shape[1], MOST=0x7FFF, num_warps=1)
