"""Copies of sequences' states from rows to rows, of all layers in one launch."""

import torch
import triton
import triton.language as tl

from nanovllm.utils.integers import cdiv

BLOCK = 4096  # words of a program


@triton.jit
def _copy_rows_kernel(
    memory_ptr, places_ptr, sources_ptr, targets_ptr, BLOCK: tl.constexpr
):  # fmt: skip
    # One program: BLOCK words of a state, from one row to another.
    state, pair = tl.program_id(1), tl.program_id(2)
    begin, size = tl.load(places_ptr + 2 * state), tl.load(places_ptr + 2 * state + 1)
    word = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    source = begin + tl.load(sources_ptr + pair).to(tl.int64) * size
    target = begin + tl.load(targets_ptr + pair).to(tl.int64) * size
    words = tl.load(memory_ptr + source + word, mask=word < size)
    tl.store(memory_ptr + target + word, words, mask=word < size)


def copy_rows(
    memory: torch.Tensor,
    places: torch.Tensor,
    largest: int,
    sources: torch.Tensor,
    targets: torch.Tensor,
) -> None:
    """Copy rows of all states; no row is both a source and a target.

    Args:
        memory: int32, in which all states lie.
        places: [S, 2] int64, first word of each state, and words of its rows.
        largest: words of the largest row.
        sources, targets: [n] int32, rows.
    """
    grid = cdiv(largest, BLOCK), len(places), len(sources)
    _copy_rows_kernel[grid](memory, places, sources, targets, BLOCK=BLOCK, num_warps=8)
