"""The least logit that top_k, top_p and min_p keep, without sorting.

The largest logit of each block of columns is known (`controls.py`). It tells whether the block can
have kept tokens, so little more than these is read.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.sampling.draw import BLOCK, LOG2E, MIN_TEMPERATURE
from nanovllm.utils.integers import next_power_of_2

CHUNK = 32  # blocks from which values are gathered at once
PART = 2048  # values that are searched at once
TURNS = 8  # at most, to narrow the values down to PART, which equal ones may prevent


@triton.jit
def _key(x):
    """A uint32 key in the order of float32; both zeros have the same."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    key = tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)
    return key.to(tl.uint32, bitcast=True) ^ 0x80000000


@triton.jit
def _value(key):
    """The float32 of a key."""
    bits = (key ^ 0x80000000).to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def _largest(keys, k):
    """The k-th largest of the keys: the largest bound that k of them reach."""
    found = tl.zeros([], tl.uint32)
    for step in range(32):
        bound = found | (tl.full([], 1, tl.uint32) << (31 - step))
        found = tl.where(tl.sum((keys >= bound).to(tl.int32), 0) >= k, bound, found)
    return found


@triton.jit
def _list_blocks(list_ptr, tops, blocks, bound):
    """List the blocks whose largest value reaches `bound`. Returns their number."""
    tl.debug_barrier()  # an earlier list may still be read
    chosen = ((_key(tops) >= bound) & (tops > float("-inf"))).to(tl.int32)
    tl.store(list_ptr + tl.cumsum(chosen, 0) - 1, blocks, mask=chosen != 0)
    tl.debug_barrier()
    return tl.sum(chosen, 0)


@triton.jit
def _load_blocks(x_ptr, list_ptr, first, count, V, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """Load the columns of CHUNK listed blocks: [CHUNK * BLOCK]."""
    i = first + tl.arange(0, CHUNK)
    blocks = tl.load(list_ptr + i, mask=i < count, other=0)
    cols = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (i < count)[:, None] & (cols < V)
    return tl.reshape(tl.load(x_ptr + cols, mask=inside, other=float("-inf")), [CHUNK * BLOCK])


@triton.jit
def _weigh(x, top, scale, bound, MASS: tl.constexpr):
    """The weights of x: 2^((x - top) scale), or 1 without MASS; 0 if x does not reach `bound`."""
    weights = tl.exp2((x - top) * scale) if MASS else tl.full(x.shape, 1.0, tl.float32)
    return tl.where((_key(x) >= bound) & (x > float("-inf")), weights, 0.0)


@triton.jit
def _mass(values_ptr, num, top, scale, bound, PART: tl.constexpr):
    """The total weight of the values that reach `bound`."""
    total = tl.zeros([PART], tl.float32)
    for first in range(0, num, PART):
        i = first + tl.arange(0, PART)
        x = tl.load(values_ptr + i, mask=i < num, other=float("-inf"))
        total += _weigh(x, top, scale, bound, True)
    return tl.sum(total, 0)


@triton.jit
def _sums(
    values_ptr, num, low, middle, high, top, scale, PART: tl.constexpr, MASS: tl.constexpr
):  # fmt: skip
    """The total weights of the values that reach each of three ascending bounds."""
    low_sum, middle_sum = tl.zeros([PART], tl.float32), tl.zeros([PART], tl.float32)
    high_sum = tl.zeros([PART], tl.float32)
    for first in range(0, num, PART):
        i = first + tl.arange(0, PART)
        x = tl.load(values_ptr + i, mask=i < num, other=float("-inf"))
        keys, weights = _key(x), _weigh(x, top, scale, low, MASS)
        low_sum += weights
        middle_sum += tl.where(keys >= middle, weights, 0.0)
        high_sum += tl.where(keys >= high, weights, 0.0)
    return tl.sum(low_sum, 0), tl.sum(middle_sum, 0), tl.sum(high_sum, 0)


@triton.jit
def _narrow(values_ptr, num, bound, top, scale, target, PART: tl.constexpr, TURNS: tl.constexpr):
    """Narrow down the values, all of which reach `bound`, to those among which the mass, summed
    from the largest value on, reaches `target`: to a quarter of their range in each turn.

    Returns the number of remaining values, and the mass of those above them.
    """
    low, high, above, turn = bound, _key(top) + 1, 0.0, 0
    while (num > PART) & (turn < TURNS):
        step = (_value(high - 1) - _value(low)) * 0.25
        first = tl.minimum(tl.maximum(_key(_value(low) + step), low), high)
        second = tl.minimum(tl.maximum(_key(_value(low) + 2 * step), first), high)
        third = tl.minimum(tl.maximum(_key(_value(low) + 3 * step), second), high)
        to_first, to_second, to_third = _sums(
            values_ptr, num, first, second, third, top, scale, PART, True
        )
        if above + to_third >= target:
            low = third
        elif above + to_second >= target:
            low, high, above = second, third, above + to_third
        elif above + to_first >= target:
            low, high, above = first, second, above + to_second
        else:
            high, above = first, above + to_first
        left = 0
        for begin in range(0, num, PART):  # writes go only to places already read
            i = begin + tl.arange(0, PART)
            x = tl.load(values_ptr + i, mask=i < num, other=float("-inf"))
            keys = _key(x)
            stays = ((i < num) & (keys >= low) & (keys < high)).to(tl.int32)
            tl.store(values_ptr + left + tl.cumsum(stays, 0) - 1, x, mask=stays != 0)
            left += tl.sum(stays, 0)
        tl.debug_barrier()
        num, turn = left, turn + 1
    return num, above


@triton.jit
def _search(values_ptr, num, above, top, scale, target, PART: tl.constexpr, MASS: tl.constexpr):
    """The largest key for which the values that reach it, and those `above`, weigh at least
    `target`.
    """
    found = tl.zeros([], tl.uint32)
    for step in range(16):  # two bits each
        bit = tl.full([], 1, tl.uint32) << (30 - 2 * step)
        low, middle, high = found | bit, found | (bit << 1), found | bit | (bit << 1)
        to_low, to_middle, to_high = _sums(
            values_ptr, num, low, middle, high, top, scale, PART, MASS
        )
        found = tl.where(above + to_low >= target, low, found)
        found = tl.where(above + to_middle >= target, middle, found)
        found = tl.where(above + to_high >= target, high, found)
    return found


@triton.jit
def _thresholds_kernel(
    x_ptr, tops_ptr, list_ptr, values_ptr, temperatures_ptr, top_k_ptr, top_p_ptr, min_p_ptr,
    out_ptr, V, NUM_BLOCKS, LOG2E,
    BLOCKS_PAD: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr,
    TURNS: tl.constexpr,
):  # fmt: skip
    # One program: a row. The candidates are narrowed down to the values from `bound` on, which are
    # gathered; then the final bound is searched among them, bit by bit.
    row = tl.program_id(0)
    temperature = tl.load(temperatures_ptr + row)
    top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    x_ptr += row.to(tl.int64) * V
    values_ptr += row.to(tl.int64) * V
    list_ptr += row.to(tl.int64) * NUM_BLOCKS
    blocks = tl.arange(0, BLOCKS_PAD)
    tops_ptr += row.to(tl.int64) * NUM_BLOCKS
    tops = tl.load(tops_ptr + blocks, mask=blocks < NUM_BLOCKS, other=float("-inf"))
    top = tl.max(tops, 0)
    least = tl.full([], float("-inf"), tl.float32)
    if (temperature >= MIN_TEMPERATURE) & (tl.abs(top) < float("inf")):
        scale = LOG2E / temperature
        if min_p > 0.0:
            least = top + tl.log2(min_p) / scale
        if (top_k > 0) | (top_p < 1.0):
            bound = _key(least)
            target = 0.0
            if top_k > 0:
                bound = tl.maximum(bound, _largest(_key(tops), top_k))  # k tokens are as large
            count = _list_blocks(list_ptr, tops, blocks, bound)
            if top_k <= 0:
                # All tokens below (1 - p) / V of the mass together have less than 1 - p of it.
                sums = tl.zeros([CHUNK * BLOCK], tl.float32)
                for first in range(0, count, CHUNK):
                    x = _load_blocks(x_ptr, list_ptr, first, count, V, CHUNK, BLOCK)
                    sums += _weigh(x, top, scale, bound, True)
                total = tl.sum(sums, 0)
                target = top_p * total
                low = top + (tl.log2(total * (1.0 - top_p) / V) - 0.01) / scale
                bound = tl.maximum(bound, _key(low))
                count = _list_blocks(list_ptr, tops, blocks, bound)
            num = 0
            for first in range(0, count, CHUNK):
                x = _load_blocks(x_ptr, list_ptr, first, count, V, CHUNK, BLOCK)
                reaches = ((_key(x) >= bound) & (x > float("-inf"))).to(tl.int32)
                tl.store(values_ptr + num + tl.cumsum(reaches, 0) - 1, x, mask=reaches != 0)
                num += tl.sum(reaches, 0)
            tl.debug_barrier()
            if top_k > 0:
                found = _search(values_ptr, num, 0.0, top, scale, top_k.to(tl.float32), PART, False)
                bound = tl.maximum(bound, found)
                target = top_p * _mass(values_ptr, num, top, scale, bound, PART)
            if top_p < 1.0:
                # Below the bound is nothing, or tokens that top_k excludes: these cannot be found,
                # since all tokens from the bound on have more than the target.
                num, above = _narrow(values_ptr, num, bound, top, scale, target, PART, TURNS)
                found = _search(values_ptr, num, above, top, scale, target, PART, True)
                bound = tl.maximum(bound, found)
            least = _value(tl.minimum(bound, _key(top)))  # also if top_p has been rounded to 0
    tl.store(out_ptr + row, least)


def thresholds(
    x: torch.Tensor,
    tops: torch.Tensor,
    temperatures: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    """The least value of each row that top_k, top_p and min_p keep.

    Args:
        x: [n, V] float32, logits.
        tops: [n, blocks] float32, largest value of each block of columns.
        temperatures: [n] float32; rows below 1e-5 keep everything.
        top_k: [n] int32; 0: all tokens.
        top_p, min_p: [n] float32.

    Returns:
        [n] float32; -inf if everything is kept.
    """
    n, V = x.shape
    num_blocks = tops.shape[1]
    out = torch.empty(n, dtype=torch.float32, device=x.device)
    listed = torch.empty(n, num_blocks, dtype=torch.int32, device=x.device)
    values = torch.empty_like(x)
    _thresholds_kernel[(n,)](
        x, tops, listed, values, temperatures, top_k, top_p, min_p, out, V, num_blocks, LOG2E,
        BLOCKS_PAD=next_power_of_2(num_blocks), CHUNK=CHUNK, BLOCK=BLOCK, PART=PART,
        TURNS=TURNS, num_warps=8,
    )  # fmt: skip
    return out
