"""Keys and values of prompts, gathered from an FP8 cache as rows of the model's dtype.

Attention that reads codes converts them again for each tile of queries. If a prompt has many tiles,
it is faster to convert them once and use the products of 16 bits.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.attention.common import metadata
from nanovllm.kernels.attention.kv_cache import exponents_at, numbers_of
from nanovllm.kernels.device_features import launch_dependents, pdl_options, wait
from nanovllm.tensors.kv_cache import KVCache
from nanovllm.utils.integers import cdiv, next_power_of_2

_ROWS = 32  # per program


@triton.jit
def _numbers_at(
    codes_ptr, exponents_ptr, slots, head, d, used, dtype: tl.constexpr,
    HKV, D: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    codes = tl.load(codes_ptr + ((slots * HKV + head) * D)[:, None] + d[None, :], used, 0.0)
    exponents = tl.load(exponents_ptr + exponents_at(slots, head, HKV, S))
    return numbers_of(codes, exponents[:, None], dtype)


@metadata
def _gather_kernel(
    k_ptr, v_ptr, k_exponents_ptr, v_exponents_ptr, k_out_ptr, v_out_ptr, tables_ptr, cu_k_ptr,
    num_rows, num_seqs, step, first_head, HKV, stride_table,
    D: tl.constexpr, D_PAD: tl.constexpr, S: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # One program: ROWS rows of one head. A row belongs to the last sequence that begins there or
    # before.
    launch_dependents(PDL)
    row, d = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, D_PAD)
    used = (row < num_rows)[:, None]
    if D < D_PAD:
        used &= d[None, :] < D
    row = tl.minimum(row, num_rows - 1)
    seq = row * 0
    while step > 0:
        begin = tl.load(cu_k_ptr + seq + step, mask=seq + step < num_seqs, other=num_rows)
        seq = tl.where(begin <= row, seq + step, seq)
        step //= 2
    position = row - tl.load(cu_k_ptr + seq)
    block = tl.load(tables_ptr + seq * stride_table + position // S).to(tl.int64)
    slots, head = block * S + position % S, first_head + tl.program_id(1)
    wait(PDL)
    dtype: tl.constexpr = k_out_ptr.dtype.element_ty
    k = _numbers_at(k_ptr, k_exponents_ptr, slots, head, d, used, dtype, HKV, D, S)
    v = _numbers_at(v_ptr, v_exponents_ptr, slots, head, d, used, dtype, HKV, D, S)
    place = (row.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * D
    tl.store(k_out_ptr + place[:, None] + d[None, :], k, mask=used)
    tl.store(v_out_ptr + place[:, None] + d[None, :], v, mask=used)


def gather_keys(
    cache: KVCache,
    block_tables: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    num_keys: int,
    heads: slice,
    dtype: torch.dtype,
) -> KVCache:
    """Gather keys and values of some heads of P sequences, one sequence after another.

    Args:
        cache: KV cache in `FP8`.
        block_tables: [P, W] int32.
        cu_seqlens_k: [P + 1] int32, running sum of the context lengths.
        num_keys: last value of `cu_seqlens_k`.
        heads: KV heads to gather.
        dtype: torch.dtype of the result, of 16 or 32 bits.

    Returns:
        Keys and values, [num_keys, heads, D] each.
    """
    (S, Hkv, D), P = cache.k.shape[1:], len(block_tables)
    num_heads = heads.stop - heads.start
    k, v = torch.empty(2, num_keys, num_heads, D, dtype=dtype, device=cache.k.device)
    _gather_kernel[(cdiv(num_keys, _ROWS), num_heads)](
        *cache, k, v, block_tables, cu_seqlens_k, num_keys, P, next_power_of_2(P) // 2,
        heads.start, Hkv, block_tables.stride(0),
        D=D, D_PAD=next_power_of_2(D), S=S, ROWS=_ROWS, **pdl_options(k),
    )  # fmt: skip
    return KVCache(k, v)
