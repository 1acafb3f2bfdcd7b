"""Gate and up projections on Hopper, whose product is activated before it is written.

A warp copies tiles of activations and weights into a ring of shared memory (TMA), and two groups of
four warps multiply. Each computes 64 rows of 128 gates and of the 128 values that these multiply:
by one instruction, as both lie beside each other in the ring, so that a thread has a gate and its
value in its registers. Otherwise a product of twice the size is written, and read again.

Programs are persistent, one per multiprocessor, and the copying warp is ahead of the groups: the
first inputs of a tile arrive before the previous tile is written. Letters: T rows, I gates, K
inputs.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from nanovllm.kernels.activation import activate_and_mul
from nanovllm.kernels.fp8 import quantize
from nanovllm.kernels.rings import (
    async_load,
    async_store,
    leave,
    make_ring,
    tiles_of,
    wait_full,
    wait_left,
)
from nanovllm.tensors.fp8 import Codes
from nanovllm.utils.device import num_multiprocessors
from nanovllm.utils.integers import cdiv

ROWS, GATES = 128, 128  # per tile
BYTES = 128  # of a row's inputs in a buffer
IN_CACHE = 2**24  # bytes of rows whose tiles come before all others, to stay in the L2 cache
_ROWS, _GATES = gl.constexpr(ROWS), gl.constexpr(GATES)
_HALF = gl.constexpr(ROWS // 2)
_STAGES = gl.constexpr(4)


@gluon.jit
def _place_of(tile, row_tiles, gate_tiles, group):
    """The first row and gate of a tile. The tiles of `group` row tiles come before others, and
    among them tiles of the same gates are neighbours.
    """
    first = tile // (group * gate_tiles) * group
    size, i = gl.minimum(row_tiles - first, group), tile % (group * gate_tiles)
    return (first + i % size) * _ROWS, i // size * _GATES


@gluon.jit
def _copy(ring, x_desc, weight_desc, row_tiles, gate_tiles, group, I, K, BLOCK: gl.constexpr):
    """The work of the copying warp."""
    SIZE: gl.constexpr = (_ROWS + 2 * _GATES) * BLOCK * x_desc.dtype.primitive_bitwidth // 8
    n = 0
    for tile in range(gl.program_id(0), row_tiles * gate_tiles, gl.num_programs(0)):
        row, gate = _place_of(tile, row_tiles, gate_tiles, group)
        for k in range(0, K, BLOCK):
            i = wait_left(ring, n)
            full, weight = ring[1].index(i), ring[0][1].index(i)
            mbarrier.expect(full, SIZE)
            async_load(x_desc, [row, k], full, ring[0][0].index(i))
            async_load(weight_desc, [gate, k], full, weight.slice(0, _GATES))
            async_load(weight_desc, [I + gate, k], full, weight.slice(_GATES, _GATES))
            n += 1


@gluon.jit
def _multiply(
    ring, out, out_desc, x_scales_ptr, scales_ptr, T, row_tiles, gate_tiles, group, I, K,
    GROUP: gl.constexpr, BLOCK: gl.constexpr, GELU: gl.constexpr,
):  # fmt: skip
    """The work of a group of warps."""
    BOTH: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * _GATES, BLOCK // 4])
    n = 0
    for tile in range(gl.program_id(0), row_tiles * gate_tiles, gl.num_programs(0)):
        row, gate = _place_of(tile, row_tiles, gate_tiles, group)
        row += GROUP * _HALF
        acc = gl.zeros([_HALF, 2 * _GATES], gl.float32, BOTH)
        for k in range(0, K, BLOCK):
            i = wait_full(ring, n)
            x = ring[0][0].index(i).slice(GROUP * _HALF, _HALF)
            weight = ring[0][1].index(i).permute((1, 0))
            acc = warpgroup_mma(x, weight, acc, use_acc=k > 0, is_async=True)
            acc = warpgroup_mma_wait(1, [acc])
            if k > 0:
                leave(ring, n - 1)
            n += 1
        acc = warpgroup_mma_wait(0, [acc])
        leave(ring, n - 1)
        gates, ups = acc.reshape([_HALF, 2, _GATES]).permute((0, 2, 1)).split()
        if scales_ptr is not None:
            rows = row + gl.arange(0, _HALF, gl.SliceLayout(1, gates.type.layout))
            cols = gate + gl.arange(0, _GATES, gl.SliceLayout(0, gates.type.layout))
            x_scales = gl.expand_dims(gl.load(x_scales_ptr + rows, rows < T, 0.0), 1)
            gates *= gl.expand_dims(gl.load(scales_ptr + cols), 0) * x_scales
            ups *= gl.expand_dims(gl.load(scales_ptr + I + cols), 0) * x_scales
        tma.store_wait(0)  # for the write of the previous tile
        out.store(activate_and_mul(gates, ups, GELU, 0).to(out.dtype))
        fence_async_shared()
        async_store(out_desc, [row, gate], out)
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=["T", "row_tiles", "gate_tiles", "group"],
    do_not_specialize_on_alignment=["x_scales_ptr"],
)
def _hopper_gated_kernel(
    x_desc, weight_desc, out_desc, x_scales_ptr, scales_ptr, T, row_tiles, gate_tiles, group, I, K,
    BLOCK: gl.constexpr, GELU: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = x_desc.dtype
    x = gl.allocate_shared_memory(dtype, [_STAGES, _ROWS, BLOCK], x_desc.layout)
    weight = gl.allocate_shared_memory(dtype, [_STAGES, 2 * _GATES, BLOCK], weight_desc.layout)
    ring = make_ring((x, weight), _STAGES)
    out = gl.allocate_shared_memory(out_desc.dtype, [2, _HALF, _GATES], out_desc.layout)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply, (ring, out.index(0), out_desc, x_scales_ptr, scales_ptr, T, row_tiles,
                gate_tiles, group, I, K, 0, BLOCK, GELU)),
            (_multiply, (ring, out.index(1), out_desc, x_scales_ptr, scales_ptr, T, row_tiles,
                gate_tiles, group, I, K, 1, BLOCK, GELU)),
            (_copy, (ring, x_desc, weight_desc, row_tiles, gate_tiles, group, I, K, BLOCK)),
        ],
        [4, 1],  # warps, beside the first four
        [240, 24],  # registers of a thread; the first have 240, too
    )  # fmt: skip


def hopper_gated(
    x: torch.Tensor | Codes,
    weight: torch.Tensor | Codes,
    dtype: torch.dtype,
    gelu: bool,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`act(gate) * up`, if `gated.takes_hopper_kernel`.

    Args:
        x: [T, K]; with a weight of codes also `Codes`, with one scale per row.
        weight: [2 I, K], the gates first.
        dtype: torch.dtype of the results.
        gelu: see `activation.gate`.
        out: [T, I], output buffer; None: a new one.

    Returns:
        [T, I]
    """
    x_scales = scales = None
    if isinstance(weight, Codes):
        x = x if isinstance(x, Codes) else quantize(x, 0)
        x_scales, scales, x, weight = x.scales, weight.scales, x.codes, weight.codes
    assert isinstance(x, torch.Tensor)
    (T, K), I = x.shape, len(weight) // 2
    if out is None:
        out = torch.empty(T, I, dtype=dtype, device=x.device)
    block, row_tiles, gate_tiles = BYTES // x.element_size(), cdiv(T, ROWS), I // GATES
    group = max(1, IN_CACHE // (ROWS * K * x.element_size()))
    _hopper_gated_kernel[(min(num_multiprocessors(x.device.index), row_tiles * gate_tiles),)](
        tiles_of(x, ROWS, block), tiles_of(weight, GATES, block), tiles_of(out, ROWS // 2, GATES),
        x_scales, scales, T, row_tiles, gate_tiles, group, I, K, BLOCK=block, GELU=gelu,
        num_warps=4,
    )  # fmt: skip
    return out
