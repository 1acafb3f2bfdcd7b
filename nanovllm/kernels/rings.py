"""Rings of buffers in shared memory, which a copying warp fills and two groups of warps empty.

A ring is a tuple: buffers [STAGES, ...] (or a tuple of those), barriers for full buffers, and
barriers for buffers that both groups have left. The n-th use of a ring is of buffer n % STAGES.

This is Gluon, in which kernels of Triton specify layouts, barriers and warps themselves.
"""

import functools
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from nanovllm.tensors.fp8 import FP8

async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # up to 3.7
async_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
KINDS = {
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.int16: gl.int16,
    FP8: gl.float8e4nv,
}
GROUPS = gl.constexpr(2)


@gluon.jit
def make_ring(buffers, STAGES: gl.constexpr):
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    left = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(left.index(i), count=GROUPS)
    return buffers, full, left


@gluon.jit
def wait_full(ring, n):
    """Wait until the buffer of the n-th use is full. Returns its number."""
    STAGES: gl.constexpr = ring[1].shape[0]
    mbarrier.wait(ring[1].index(n % STAGES), n // STAGES & 1)
    return n % STAGES


@gluon.jit
def leave(ring, n):
    """Allow the buffer of the n-th use to be filled again."""
    STAGES: gl.constexpr = ring[1].shape[0]
    mbarrier.arrive(ring[2].index(n % STAGES))


@gluon.jit
def wait_left(ring, n):
    """Wait until there is room for the n-th use. Returns the number of its buffer."""
    STAGES: gl.constexpr = ring[1].shape[0]
    mbarrier.wait(ring[2].index(n % STAGES), n // STAGES & 1 ^ 1)
    return n % STAGES


def tiles_of(x: torch.Tensor, rows: int, columns: int) -> Any:
    """A TMA descriptor of the matrix x for tiles of rows x columns. Beyond the matrix, reads give 0
    and writes have no effect.
    """
    layout = _layout_of(rows, columns, x.dtype)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, columns], layout)


@functools.cache
def _layout_of(rows: int, columns: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([rows, columns], KINDS[dtype])
