"""Products with weights in INT4 on Hopper, of more than one row (`hopper_packed.py`).

Programs are persistent, one per multiprocessor, and the copying warp is ahead of the groups.

Letters: T rows, N outputs, K inputs, P columns of a plane.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from nanovllm.kernels.activation import activate_and_mul
from nanovllm.kernels.device_features import pdl_options
from nanovllm.kernels.products.hopper_packed import (
    add_stages,
    copy_stages,
    instruct,
    make_rings,
    packed,
    ring_sizes,
)
from nanovllm.kernels.products.tiles import COLUMNS, OUTPUTS, Tiles, empty_parts
from nanovllm.kernels.rings import tiles_of
from nanovllm.tensors.int4 import PLANES, Int4Codes
from nanovllm.utils.device import num_multiprocessors
from nanovllm.utils.integers import cdiv

IN_CACHE = 2**24  # bytes of rows whose tiles come before all others, to stay in the L2 cache
_COLUMNS = gl.constexpr(COLUMNS)
_HALF = gl.constexpr(OUTPUTS // 2)


@gluon.jit
def _place_of(item, row_tiles, output_tiles, group, WIDTH: gl.constexpr, BLOCK_T: gl.constexpr):
    """The first row, the first of WIDTH outputs and the part of the sum of an item. The items of
    `group` row tiles come before others, and among them items of the same weights are neighbours.
    """
    tiles = row_tiles * output_tiles
    split, tile = item // tiles, item % tiles
    first = tile // (group * output_tiles) * group
    size, i = gl.minimum(row_tiles - first, group), tile % (group * output_tiles)
    return (first + i % size) * BLOCK_T, i // size * WIDTH, split


@gluon.jit
def _copy(
    rings, x_desc, weight_desc, N, items, row_tiles, output_tiles, group, step, span,
    P: gl.constexpr, PARTS: gl.constexpr, WIDTH: gl.constexpr, E2M1: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """The work of the copying warp."""
    BLOCK_T: gl.constexpr = x_desc.block_shape[0]
    if PDL:
        instruct("griddepcontrol.launch_dependents;", items)
    n = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        row, output, split = _place_of(item, row_tiles, output_tiles, group, WIDTH, BLOCK_T)
        begin, end = split * span, (split + 1) * span
        n = copy_stages(
            rings, n, x_desc, weight_desc, row, output, begin, end, N, step, P, PARTS, E2M1, PDL
        )


@gluon.jit
def _write(
    acc, acc2, bias_ptr, out_ptr, row, output, split, T, N, step,
    PARTS: gl.constexpr, BLOCK_T: gl.constexpr, GATED: gl.constexpr, GELU: gl.constexpr,
):  # fmt: skip
    """Write the sums of a group's outputs, and of those `step` further on."""
    SUMS: gl.constexpr = acc.type.layout
    outputs = output + gl.arange(0, _HALF, gl.SliceLayout(1, SUMS))
    rows = row + gl.arange(0, BLOCK_T, gl.SliceLayout(0, SUMS))
    if bias_ptr is not None:  # a summand of the first part
        used = gl.full([_HALF], 1, gl.int1, outputs.type.layout) & (split == 0)
        acc += gl.expand_dims(gl.load(bias_ptr + outputs, used, 0.0).to(gl.float32), 1)
        if PARTS == 2:
            bias = gl.load(bias_ptr + step + outputs, used, 0.0).to(gl.float32)
            acc2 += gl.expand_dims(bias, 1)
    if GATED:
        acc = activate_and_mul(acc, acc2, GELU, 0)
    width = step if GATED else N
    ptrs = out_ptr + gl.expand_dims((split * T + rows).to(gl.int64) * width, 0)
    ptrs += gl.expand_dims(outputs, 1)
    there = gl.expand_dims(rows < T, 0)
    gl.store(ptrs, acc.to(out_ptr.dtype.element_ty), there)
    if PARTS == 2 and not GATED:
        gl.store(ptrs + step, acc2.to(out_ptr.dtype.element_ty), there)


@gluon.jit
def _multiply(
    rings, words_ptr, bias_ptr, out_ptr, T, N, items, row_tiles, output_tiles, group, step, span,
    chunks, SIDE: gl.constexpr, GROUP: gl.constexpr, P: gl.constexpr, PARTS: gl.constexpr,
    WIDTH: gl.constexpr, BLOCK_T: gl.constexpr, BF16: gl.constexpr, E2M1: gl.constexpr,
    GATED: gl.constexpr, GELU: gl.constexpr,
):  # fmt: skip
    """The work of a group of warps."""
    n = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        row, output, split = _place_of(item, row_tiles, output_tiles, group, WIDTH, BLOCK_T)
        begin, end = split * span, (split + 1) * span
        acc, acc2, n = add_stages(
            rings, n, words_ptr, output, begin, end, chunks, N, step, _COLUMNS // (2 * P), SIDE,
            GROUP, P, PARTS, BLOCK_T, BF16, E2M1,
        )  # fmt: skip
        _write(
            acc, acc2, bias_ptr, out_ptr, row, output + SIDE * _HALF, split, T, N, step, PARTS,
            BLOCK_T, GATED, GELU,
        )  # fmt: skip


SIZES = ["T", "N", "items", "row_tiles", "output_tiles", "group", "step", "span", "chunks"]


@gluon.jit(do_not_specialize=SIZES)
def _hopper_int4_kernel(
    x_desc, weight_desc, words_ptr, bias_ptr, out_ptr, T, N, items, row_tiles, output_tiles, group,
    step, span, chunks,
    GROUP: gl.constexpr, P: gl.constexpr, E2M1: gl.constexpr, PARTS: gl.constexpr,
    WIDTH: gl.constexpr, BLOCK_T: gl.constexpr, STAGES: gl.constexpr, X_STAGES: gl.constexpr,
    X_PAIRS: gl.constexpr, GATED: gl.constexpr, GELU: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    BF16: gl.constexpr = x_desc.dtype == gl.bfloat16
    rings = make_rings(x_desc, weight_desc, P, PARTS, BLOCK_T, STAGES, X_STAGES, X_PAIRS)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply, (rings, words_ptr, bias_ptr, out_ptr, T, N, items, row_tiles, output_tiles,
                group, step, span, chunks, 0, GROUP, P, PARTS, WIDTH, BLOCK_T, BF16, E2M1,
                GATED, GELU)),
            (_multiply, (rings, words_ptr, bias_ptr, out_ptr, T, N, items, row_tiles, output_tiles,
                group, step, span, chunks, 1, GROUP, P, PARTS, WIDTH, BLOCK_T, BF16, E2M1,
                GATED, GELU)),
            (_copy, (rings, x_desc, weight_desc, N, items, row_tiles, output_tiles, group, step,
                span, P, PARTS, WIDTH, E2M1, PDL)),
        ],
        [4, 1],  # warps, beside the first four
        [240, 24],  # registers of a thread; the first have 240, too
    )  # fmt: skip


def hopper_int4(
    x: torch.Tensor,
    weight: Int4Codes,
    bias: torch.Tensor | None,
    gelu: bool | None = None,
    out: torch.Tensor | None = None,
    *,
    tiles: Tiles,
) -> torch.Tensor:
    """`x @ weight.T + bias`, or `act(gate) * up` of it, if `int4_linear.takes_hopper_kernel`.

    Args:
        x: [T, K] in the dtype of the weight's values.
        weight: [N, K]; with `gelu`, the gates before the values that they multiply.
        bias: [N]; None: 0.
        gelu: whether the activation is GELU (tanh), not SiLU; None: the product is not activated.
        out: [T, N] or [T, N / 2], output buffer; None: a new one.
        tiles: tiles of the product, see `int4_linear.choose_hopper_tiles`.

    Returns:
        [T, N]; [T, N / 2] if activated; [S, T, N] float32, to be summed over S, of S splits.
    """
    (T, K), N, P = x.shape, len(weight), weight.plane
    gated, processors = gelu is not None, num_multiprocessors(x.device.index)
    block_t, parts, width = tiles.block_t, tiles.block_n // OUTPUTS, N // 2 if gated else N
    if out is None:
        out = empty_parts(tiles.splits, T, width, x.dtype, x.device)
    row_tiles, output_tiles, splits = tiles.grid(T, N)
    group, items = max(1, IN_CACHE // (block_t * K * 2)), row_tiles * output_tiles * splits
    matrix, words, constants = packed(weight)
    _hopper_int4_kernel[(min(processors, items),)](
        tiles_of(x, block_t, P), matrix, words, bias, out, T, N, items, row_tiles, output_tiles,
        group, width if gated else OUTPUTS, cdiv(K, COLUMNS) // splits, K // (PLANES * P),
        PARTS=parts, WIDTH=OUTPUTS if gated else tiles.block_n, BLOCK_T=block_t, GATED=gated,
        GELU=bool(gelu), num_warps=4, **constants, **ring_sizes(P, parts, block_t),
        **pdl_options(x),
    )  # fmt: skip
    return out
