"""The causal convolution of each channel over the tokens of a sequence, in plain PyTorch.

A sequence's state is its tail, the last J - 1 inputs, oldest first. A sequence that begins has
zeros before its first token, regardless of its row.

Letters: D decodes, T tokens of P prompts, C channels, J taps, R rows of states.
"""

from itertools import pairwise

import torch


def decode(
    x: torch.Tensor,
    weight: torch.Tensor,
    tail: torch.Tensor,
    slots: torch.Tensor,
    context_lens: torch.Tensor,
) -> torch.Tensor:
    """The convolution at one token of each of D sequences; their tails move on by it.

    Args:
        x: [D, C], inputs of these tokens.
        weight: [C, J], weights of each channel, that of the newest token last.
        tail: [R, J - 1, C], of which the rows of these sequences change.
        slots: [D] int32, row of each sequence.
        context_lens: [D] int32, number of tokens of each sequence, this one included. At 1 the
            sequence begins; at 0 it is padding, whose row is 0.

    Returns:
        [D, C] float32.
    """
    rows = rows_of(slots, context_lens)
    before = tail[rows].masked_fill_((context_lens <= 1)[:, None, None], 0)
    inputs = torch.cat([before, x[:, None]], 1)  # [D, J, C]
    tail[rows] = inputs[:, 1:]
    return _convolve(inputs, weight).squeeze(1)


def prompts(
    x: torch.Tensor,
    weight: torch.Tensor,
    tail: torch.Tensor,
    slots: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
) -> torch.Tensor:
    """The convolution at the tokens of P prompts, or of chunks of them; their tails move on.

    Args:
        x: [T, C], the tokens of a prompt being adjacent.
        weight, tail: as of `decode`.
        slots: [P] int32, row of each prompt; not used where a prompt has no tokens here.
        cu_seqlens_q, cu_seqlens_k: [P + 1] int32, see `Context`. A prompt with as many tokens as
            rows begins here.

    Returns:
        [T, C] float32; 0 in rows beyond those of the prompts.
    """
    out = torch.zeros_like(x, dtype=torch.float32)
    for row, own, begins in spans(slots, cu_seqlens_q, cu_seqlens_k):
        before = torch.zeros_like(tail[row]) if begins else tail[row]
        inputs = torch.cat([before, x[own]])  # [J - 1 + n, C]
        tail[row] = inputs[own.stop - own.start :]
        out[own] = _convolve(inputs, weight)
    return out


def spans(
    slots: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor
) -> list[tuple[int, slice, bool]]:
    """The row, the tokens and whether it begins here, of each prompt that has tokens."""
    starts, ends = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    return [
        (slot, slice(begin, end), after - before == end - begin)
        for slot, (begin, end), (before, after) in zip(
            slots.tolist(), pairwise(starts), pairwise(ends), strict=True
        )
        if begin < end
    ]


def rows_of(slots: torch.Tensor, context_lens: torch.Tensor) -> torch.Tensor:
    """The rows of decodes, [D] int64: that of padding is 0, which no sequence has."""
    return slots.long().masked_fill(context_lens == 0, 0)


def _convolve(inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """[..., J - 1 + n, C] -> [..., n, C] float32"""
    weight = weight.float()
    J = weight.shape[1]
    n = inputs.shape[-2] - J + 1
    total = inputs[..., :n, :] * weight[:, 0]
    for j in range(1, J):
        total += inputs[..., j : j + n, :] * weight[:, j]
    return total
