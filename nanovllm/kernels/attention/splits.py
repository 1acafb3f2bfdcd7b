"""Split-KV decodes: the number of splits of the keys, and the combination of their parts.

The last program of a sequence and KV head to finish its part combines all of them. A kernel of its
own for that costs one sequence of an 8B model in FP8 5 % (docs/experiments.md, 36).
"""

from collections.abc import Hashable

import torch
import triton
import triton.language as tl

from nanovllm.kernels.attention.common import LOWEST
from nanovllm.kernels.device_features import spare_rows
from nanovllm.utils.integers import cdiv, next_power_of_2

PROGRAMS = 1024  # about eight per multiprocessor, by benchmarks/kernels/decode_attention.py
FEW_SPLITS = 16  # up to this, one kernel variant serves all numbers but 1
PARTS_AT_ONCE = 64  # parts of rows that a program holds to combine them


def choose_num_splits(
    B: int, Hkv: int, D: int, max_context: int, window: int = 0, programs: int = PROGRAMS
) -> int:
    """The number of splits of the keys, a power of two, so that at least about `programs` run;
    small heads need more, and long contexts gain from more than 16 splits.
    """
    max_context = min(max_context, window or max_context)
    wanted = cdiv(programs * max(1, 128 // D), B * Hkv)
    most = max(1, min(FEW_SPLITS if max_context <= 16384 else 32, max_context // 64))
    return min(next_power_of_2(wanted), 1 << (most.bit_length() - 1))


def combining(num_splits: int, G: int) -> dict[str, int]:
    """The constants of kernels that combine the parts of G rows: SPLITS_PAD, room for the splits
    (`tl.num_programs(2)` of them), and AT_ONCE, rows that are combined together.
    """
    room = 1 if num_splits == 1 else max(FEW_SPLITS, num_splits)
    return {"SPLITS_PAD": room, "AT_ONCE": min(next_power_of_2(G), PARTS_AT_ONCE // room)}


def empty_outputs(
    q: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    num_splits: int,
    shared: dict[Hashable, torch.Tensor] | None,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Allocate outputs [B, Hq, D] of `dtype` (None: q's) for queries of q: [..., B, H, D]; and for
    `combine` parts of sums [B, Hq, num_splits, D], their lse [B, Hq, num_splits], and counts of
    arrived programs [B * Hkv] int32: 0 before and after each kernel, one tensor for all layers of a
    step (`Context.shared`).
    """
    (B, _, D), device = q.shape[-3:], q.device
    out = spare_rows(B, num_heads, D, like=q, dtype=dtype)
    if num_splits == 1:
        return out, out, out, out
    shared, key = {} if shared is None else shared, ("arrivals", B * num_kv_heads)
    if key not in shared:
        shared[key] = torch.zeros(B * num_kv_heads, dtype=torch.int32, device=device)
    acc = torch.empty(B, num_heads, num_splits, D, dtype=torch.float32, device=device)
    lse = torch.empty(B, num_heads, num_splits, dtype=torch.float32, device=device)
    return out, acc, lse, shared[key]


@triton.jit
def span(length, end, split, splits, first, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """The lowest position from `first` on that the token at length - 1 sees; the bounds of one of
    `splits` splits of the positions below `end`, which begins with a tile; and the number of splits
    that have any position.
    """
    lowest = first
    if WINDOW:
        lowest = tl.maximum(length - WINDOW, 0)
        first = lowest // BLOCK_N * BLOCK_N
    tiles = tl.cdiv(tl.where(lowest < end, end - first, 0), BLOCK_N)
    tiles_per_split = tl.cdiv(tiles, splits)
    begin = first + split * tiles_per_split * BLOCK_N
    stop = tl.minimum(begin + tiles_per_split * BLOCK_N, end)
    return lowest, begin, stop, tl.cdiv(tiles, tl.maximum(tiles_per_split, 1))


@triton.jit
def _sum_parts(
    out_ptr, part_acc_ptr, part_lse_ptr, first, splits, parts,
    G: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, SPLITS_PAD: tl.constexpr,
    AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Add up parts, each weighted by the sum of its exponentials, 2^lse."""
    s, d = tl.arange(0, SPLITS_PAD)[None, :], tl.arange(0, D_PAD)[None, :]
    for begin in range(0, G, AT_ONCE):
        g = begin + tl.arange(0, AT_ONCE)[:, None]
        part = (first + g) * splits + s
        there, inside = (g < G) & (s < parts), (g < G) & (d < D)
        lse = tl.load(part_lse_ptr + part, mask=there, other=float("-inf"))
        ptrs = part_acc_ptr + part[:, :, None] * D + d[:, None, :]
        acc = tl.load(ptrs, mask=there[:, :, None] & (d < D)[:, None, :], other=0.0)
        weight = tl.exp2(lse - tl.maximum(tl.max(lse, 1), LOWEST)[:, None])
        out = tl.sum(acc * weight[:, :, None], 1) / tl.maximum(tl.sum(weight, 1), 1.0)[:, None]
        tl.store(out_ptr + (first + g) * D + d, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def combine(
    acc, lse, used, out_ptr, part_acc_ptr, part_lse_ptr, arrived_ptr, first, split, splits,
    parts, G: tl.constexpr, D: tl.constexpr, SPLITS_PAD: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Store this program's part, acc: [G_PAD, D_PAD] where `used`, and lse: [G_PAD], of the G rows
    from `first` on. The last program to arrive here, by the count at `arrived_ptr`, adds up all.
    """
    g, d = tl.arange(0, acc.shape[0]), tl.arange(0, acc.shape[1])
    part = (first + g) * splits + split
    tl.store(part_acc_ptr + part[:, None] * D + d[None, :], acc, mask=used)
    tl.store(part_lse_ptr + part, lse, mask=g < G)
    tl.debug_barrier()  # all threads have stored
    if tl.atomic_add(arrived_ptr, 1, sem="acq_rel") == parts - 1:
        tl.store(arrived_ptr, 0)  # for the next layer
        _sum_parts(
            out_ptr, part_acc_ptr, part_lse_ptr, first, splits, parts, G, D, acc.shape[1],
            SPLITS_PAD, AT_ONCE,
        )  # fmt: skip


@triton.jit
def finish(
    m, l, acc, acc_odd, row, used, out_ptr, part_acc_ptr, part_lse_ptr, arrived_ptr, first, split,
    splits, parts,
    G: tl.constexpr, D: tl.constexpr, SPLITS_PAD: tl.constexpr, AT_ONCE: tl.constexpr,
    PAIR: tl.constexpr, LEFT: tl.constexpr,
):  # fmt: skip
    """Store the outputs of rows [G_PAD] of [B * Hq], of which the group's begin at `first`; with
    several splits, store this split's part, see `combine`.
    """
    if LEFT:
        acc = tl.trans(acc)
        acc_odd = tl.trans(acc_odd) if PAIR == 2 else acc_odd
    acc = tl.interleave(acc, acc_odd) if PAIR == 2 else acc
    d = tl.arange(0, acc.shape[1])
    used = used[:, None] & (d[None, :] < D)
    acc = acc / l[:, None]
    if SPLITS_PAD == 1:
        out = acc.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + row[:, None] * D + d[None, :], out, mask=used)
    else:
        combine(
            acc, m + tl.log2(l), used, out_ptr, part_acc_ptr, part_lse_ptr, arrived_ptr, first,
            split, splits, parts, G, D, SPLITS_PAD, AT_ONCE,
        )  # fmt: skip
