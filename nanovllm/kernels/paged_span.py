"""A tile of queries over a span of keys, for attention of prompts and to shared prefixes."""

from typing import Any

import torch
import triton
import triton.language as tl

from nanovllm.kernels.hopper import can_describe, describe
from nanovllm.kernels.kv_cache import numbers_of
from nanovllm.kernels.paged_attention import exponents_ahead, load_tile, slots_of, weigh
from nanovllm.utils.integers import next_power_of_2


@triton.jit
def _prefill_tile(
    q, m, l, acc, k_source, v_source, k_exponents, v_exponents, table_ptr, first_row,
    kv_head, start, k_len, positions, stride_row, scale,
    D: tl.constexpr, D_PAD: tl.constexpr, S: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, DESCRIBED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """`weigh` a tile of keys from `start` and add their values. The sources are descriptors or
    pointers, of the cache by a table or, without one, of rows, whose position 0 is, or would be, in
    `first_row`.
    """
    keys = start + tl.arange(0, BLOCK_N)
    seen = keys < k_len
    if table_ptr is None:
        row = first_row + start
        rows = (row + tl.arange(0, BLOCK_N)).to(tl.int64)
    elif DESCRIBED:
        row = tl.load(table_ptr + start // S) * S + start % S
        rows = row.to(tl.int64) + tl.arange(0, BLOCK_N)
    else:
        rows = slots_of(table_ptr, start, BLOCK_N, S, k_len)
    if DESCRIBED:
        k = k_source.load([row, kv_head * D]).T
        v = v_source.load([row, kv_head * D])
        if MASKED:
            v = tl.where(seen[:, None], v, 0.0)
    else:
        offset = kv_head * D
        k, v = load_tile(
            k_source + offset, v_source + offset, rows, seen, stride_row, D, D_PAD, MASKED
        )
    if k_exponents is not None:
        if MASKED:  # beyond the last key they are anything
            k_exponents = tl.where(seen, k_exponents, 0)
            v_exponents = tl.where(seen, v_exponents, 0)
        k = numbers_of(k, k_exponents[None, :], q.dtype)
        v = numbers_of(v, v_exponents[:, None], q.dtype)
    visible = keys[None, :] <= tl.minimum(positions, k_len - 1)[:, None]
    if WINDOW:
        visible &= keys[None, :] > positions[:, None] - WINDOW
    s = tl.dot(q, k, input_precision="ieee")
    m, l, p, correction = weigh(
        s, m, l, None, None, None, scale, visible, MASKED, WINDOW, SOFTCAP
    )  # fmt: skip
    acc = acc * correction[:, None]
    return m, l, tl.dot(p.to(q.dtype), v, acc, input_precision="ieee")


@triton.jit
def prefill_span(
    q, m, l, acc, k_source, v_source, k_exponents_ptr, v_exponents_ptr, table_ptr, first_row,
    kv_head, begin, end, k_len, positions, stride_row, scale,
    D: tl.constexpr, D_PAD: tl.constexpr, S: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, DESCRIBED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """`_prefill_tile` of each tile from `begin` to `end`. Those with masks that are not a cache's
    are few, and not worth a pipeline.
    """
    if k_exponents_ptr is not None:
        if begin < end:
            exponents = exponents_ahead(
                k_exponents_ptr, v_exponents_ptr, table_ptr, begin, end, BLOCK_N, S
            )
            for start in range(begin, end, BLOCK_N):
                following = exponents_ahead(
                    k_exponents_ptr, v_exponents_ptr, table_ptr, start + BLOCK_N, end, BLOCK_N, S
                )
                m, l, acc = _prefill_tile(
                    q, m, l, acc, k_source, v_source, exponents[0], exponents[1], table_ptr,
                    first_row, kv_head, start, k_len, positions, stride_row, scale,
                    D, D_PAD, S, BLOCK_N, WINDOW, SOFTCAP, DESCRIBED, MASKED,
                )  # fmt: skip
                exponents = following
    else:
        for start in tl.range(begin, end, BLOCK_N, num_stages=1 if MASKED else None):
            m, l, acc = _prefill_tile(
                q, m, l, acc, k_source, v_source, None, None, table_ptr,
                first_row, kv_head, start, k_len, positions, stride_row, scale,
                D, D_PAD, S, BLOCK_N, WINDOW, SOFTCAP, DESCRIBED, MASKED,
            )  # fmt: skip
    return m, l, acc


def describe_tiles(k: torch.Tensor, v: torch.Tensor, rows: int, D: int) -> tuple[Any, Any] | None:
    """Descriptors of tiles of `rows` keys or values of a head, of matrices [n, Hkv D]; None where
    the hardware takes none.
    """
    if next_power_of_2(D) != D or not (can_describe(k) and can_describe(v)):
        return None
    return describe(k, rows, D), describe(v, rows, D)
