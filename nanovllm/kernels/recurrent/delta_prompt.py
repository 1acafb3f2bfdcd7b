"""Gated DeltaNet for prompts, CHUNK tokens at a time, in four kernels:

1. `rows.py`: convolutions, and q and k of length 1.
2. `chunks.py`: products and inverse of each chunk, all chunks at once.
3. `chunks.py`: the chunks of each prompt one after another; the new state.
4. `rows.py`: the gated norm.

Grids follow from shapes alone, as CUDA graphs need it. The third has a program for SCANNED_ROWS
rows of a state, so that a long prompt alone fills a GPU: that is why the norm over all of them is a
fourth.
The first and second are two as their tiles are of another kind: in one kernel, a thread holds 64
numbers of a convolution beside a chunk's matrices, and 1,000 bytes of its registers lie in memory.

Letters: see `nanovllm.tensors.delta_net`; T tokens of P prompts.
"""

from typing import Any

import torch

from nanovllm.kernels.device_features import has_room, pdl_options
from nanovllm.kernels.recurrent.chunks import (
    CHUNK,
    UNIT,
    _delta_chunk_kernel,
    _delta_scan_kernel,
)
from nanovllm.kernels.recurrent.formulas import check_layout
from nanovllm.kernels.recurrent.rows import _delta_convolve_kernel, _delta_norm_kernel
from nanovllm.tensors.delta_net import DeltaNet, DeltaState
from nanovllm.utils.integers import cdiv, next_power_of_2

CONVOLVED, NORMALISED = 4096, 2048  # numbers that a program of the first and the last has at once
SCANNED_ROWS = 32  # of a state; of a model in float32 half of them
MULTIPROCESSORS = 132  # of an H100


def chunks_of(cu_seqlens_q: torch.Tensor, T: int) -> torch.Tensor:
    """The chunks of a step's prompts, of which layers share the result.

    Args:
        cu_seqlens_q: [P + 1] int32, first row of each prompt, from 0.
        T: number of rows, of which the last may be padding.

    Returns:
        [cdiv(T, CHUNK) + P, 2] int32: prompt and first row of each chunk; prompt -1: there is none.
    """
    P, size = len(cu_seqlens_q) - 1, CHUNK.value
    counts = (cu_seqlens_q.diff() + (size - 1)) // size
    ends = counts.cumsum(0)
    chunk = torch.arange(cdiv(T, size) + P, device=ends.device)
    prompt = torch.searchsorted(ends, chunk, right=True)
    there = prompt < P
    prompt = prompt.clamp(max=P - 1)
    first = cu_seqlens_q[prompt] + size * (chunk - (ends - counts)[prompt])
    return torch.stack([prompt.where(there, -1), first], 1).int()


def _scan_stages(mixed: torch.Tensor, num_programs: int, K: int) -> int:
    """Number of chunks in shared memory at a time: three if each program has a multiprocessor of
    its own, two of several, of which others compute while one waits (measured).

    One is as fast, but reads beyond the shared memory: Triton 3.6 and 3.7 compile several products
    of 32 columns for Hopper so, where loads are not pipelined (triton-lang/triton#11366).
    """
    if mixed.element_size() == 4 or not has_room(mixed):
        return 1
    return 3 if num_programs <= MULTIPROCESSORS and K <= 128 else 2


def prompts(
    mixed: torch.Tensor,
    ba: torch.Tensor,
    layer: DeltaNet,
    state: DeltaState,
    slots: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    chunks: torch.Tensor,
) -> torch.Tensor:
    """Tokens of P prompts, or of parts of them, see `nanovllm.recurrent.delta_rule.prompts`.

    Args:
        mixed: [T, C + Hv V], rows may lie apart.
        ba: [T, 2 Hv], likewise.
        slots: [P] int32.
        cu_seqlens_q, cu_seqlens_k: [P + 1] int32.
        chunks: `chunks_of(cu_seqlens_q, T)`.

    Returns:
        [T, Hv V], 0 in padding.
    """
    T, P, (Hv, V, K), (C, J) = len(mixed), len(slots), state.memory.shape[1:], layer.conv.shape
    Hk, N, device, half = layer.num_key_heads, len(chunks), mixed.device, mixed.element_size() == 2
    check_layout(mixed, ba, layer, state)
    dtype = torch.float16 if half else torch.float32
    qk = torch.empty(2, T, Hk, K, dtype=dtype, device=device)
    v = torch.empty(T, Hv, V, dtype=dtype, device=device)  # then the outputs
    inverses, scores = torch.empty(2, T, Hv, CHUNK.value, dtype=dtype, device=device)
    factors = torch.empty(3, Hv, T, dtype=torch.float32, device=device)
    out = torch.empty(T, Hv * V, dtype=mixed.dtype, device=device)
    sizes: dict[str, Any] = {"Hk": Hk, "Hv": Hv, "K": K} | pdl_options(mixed)
    channels: dict[str, Any] = {"V": V, "J": J}
    precision = "ieee" if half or torch.version.hip is not None else "tf32x3"
    products = sizes | {"PRECISION": precision, "num_warps": 4}
    ROWS = min(CHUNK.value, CONVOLVED // max(K, V))
    _delta_convolve_kernel[(2 * Hk + Hv, CHUNK.value // ROWS, N)](
        mixed, ba, layer.conv, state.tail, slots, cu_seqlens_q, cu_seqlens_k, chunks, qk, v,
        UNIT.value, mixed.stride(0), ba.stride(0), T, ROWS=ROWS, num_warps=4, **sizes, **channels,
    )  # fmt: skip
    _delta_chunk_kernel[(Hv, N)](
        ba, layer.A_log, layer.dt_bias, cu_seqlens_q, chunks, qk, inverses, scores, factors,
        ba.stride(0), T, BLOCK_K=min(K, 128 if half else 32), num_stages=1, **products,
    )  # fmt: skip
    BLOCK_V = min(V, SCANNED_ROWS if half else SCANNED_ROWS // 2)
    parts = V // BLOCK_V
    _delta_scan_kernel[(parts, Hv, P)](
        mixed, *state, slots, cu_seqlens_q, cu_seqlens_k, qk, v, inverses, scores, factors,
        mixed.stride(0), T, J_PAD=next_power_of_2(J), BLOCK_V=BLOCK_V,
        BLOCK_C=next_power_of_2(cdiv(C, Hv * parts)),
        num_stages=_scan_stages(mixed, P * Hv * parts, K), **products, **channels,
    )  # fmt: skip
    ROWS = NORMALISED // V
    _delta_norm_kernel[(Hv, cdiv(T, ROWS))](
        v, mixed, layer.norm, cu_seqlens_q, out, UNIT.value, layer.eps, mixed.stride(0), P, T,
        Hv=Hv, V=V, C=C, ROWS=ROWS, num_warps=4, **pdl_options(mixed),
    )  # fmt: skip
    return out
