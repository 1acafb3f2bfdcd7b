"""Products with weights in INT4 on Hopper, for so many rows that tensor cores are the limit.

A warp copies packed weights and activations into two rings of shared memory (TMA). Two groups of
four warps have the weights as the left operand, in registers: one group unpacks while the product
of the other runs. A program computes one tile after another (`Tiles`), and each group 64 outputs of
it, or twice 64: of gate and up projections 64 gates and the 64 values that these multiply, so that
a thread has a gate and its value in its registers.

Letters: T rows, N outputs, K inputs, P columns of a plane.
"""

from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from nanovllm.kernels.device_features import pdl_options
from nanovllm.kernels.products.int4 import BF16_LOWER, BF16_UPPER, FP16_LOWER, FP16_UPPER
from nanovllm.kernels.products.linear import MAX_ROWS, SPLITS, empty_parts
from nanovllm.kernels.rings import (
    activate,
    async_load,
    leave,
    make_ring,
    tiles_of,
    wait_full,
    wait_left,
)
from nanovllm.tensors.int4 import PLANES, Int4Codes
from nanovllm.utils.device import num_multiprocessors
from nanovllm.utils.integers import cdiv

OUTPUTS = 128  # of both groups of warps, or twice that
IN_CACHE = 2**24  # bytes of rows whose tiles come before all others, to stay in the L2 cache
# Cycles, for `choose_tiles`: of unpacking a column of the planes, of waits in a chunk of columns,
# and of the first inputs and the results of a tile.
UNPACKING, WAITS, EDGES = 4, 300, 3000
ROOMY = 512  # rows above which all multiprocessors have the largest tiles
_OUTPUTS = gl.constexpr(OUTPUTS)
_HALF = gl.constexpr(OUTPUTS // 2)


class Tiles(NamedTuple):
    """The tiles of a product: `block_t` rows by `parts` times OUTPUTS outputs, and `splits` of its
    sum.
    """

    block_t: int
    parts: int
    splits: int


def choose_tiles(
    T: int, N: int, K: int, P: int, num_processors: int, partial: bool = False, gated: bool = False
) -> Tiles:
    """Choose the tiles of a product of T rows whose last ends first: every multiprocessor computes
    as many as its share, rounded up.

    Args:
        N, K, P: rows, columns and columns of a plane of the weight.
        num_processors: multiprocessors of the GPU.
        partial: whether results may be partial.
        gated: whether the weight has gates and the values that these multiply.
    """
    chunks = K // (PLANES * P)

    def cycles(tiles: Tiles) -> float:
        block_t, parts, splits = tiles
        product = parts * OUTPUTS * block_t * PLANES * P / 2048  # multiplications per cycle
        unpacking = parts * UNPACKING * P + WAITS
        items = cdiv(T, block_t) * (N // (OUTPUTS * parts)) * splits
        of_item = chunks // splits * max(product, product / 2 + unpacking) + EDGES
        return cdiv(items, num_processors) * of_item

    sizes = [(128, 2)] * (N % (2 * OUTPUTS) == 0) + [(64, 2) if gated else (128, 1)]
    if T > ROOMY:
        return Tiles(*sizes[0], 1)
    sizes += [] if gated else [(64, 1)]
    sums = [S for S in SPLITS if partial and T <= MAX_ROWS and chunks % S == 0]
    return min((Tiles(*size, S) for size in sizes for S in (1, *sums)), key=cycles)


@gluon.jit
def _place_of(item, row_tiles, output_tiles, group, PARTS: gl.constexpr, BLOCK_T: gl.constexpr):
    """The first row, the first output and the part of the sum of an item. The items of `group` row
    tiles come before others, and among them items of the same weights are neighbours.
    """
    tiles = row_tiles * output_tiles
    split, tile = item // tiles, item % tiles
    first = tile // (group * output_tiles) * group
    size, i = gl.minimum(row_tiles - first, group), tile % (group * output_tiles)
    return (first + i % size) * BLOCK_T, i // size * _OUTPUTS * PARTS, split


@gluon.jit
def _instruct(INSTRUCTION: gl.constexpr, any_int):
    """Insert an instruction (see `device_features` for those of dependent launch)."""
    gl.inline_asm_elementwise(
        INSTRUCTION + " mov.b32 $0, $1;", "=r,r", [any_int], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _copy(
    rings, x_desc, weight_desc, items, row_tiles, output_tiles, group, step, span,
    P: gl.constexpr, PARTS: gl.constexpr, BLOCK_T: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The work of the copying warp; `step`: outputs between the two parts of a tile."""
    weights, inputs = rings
    n = 0
    if PDL:
        _instruct("griddepcontrol.launch_dependents;", items)
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        row, output, split = _place_of(item, row_tiles, output_tiles, group, PARTS, BLOCK_T)
        for chunk in range(split * span, (split + 1) * span):
            i = wait_left(weights, n)
            full, packed = weights[1].index(i), weights[0].index(i)
            mbarrier.expect(full, PARTS * _OUTPUTS * P * 2)
            for part in gl.static_range(PARTS):
                place = [output + part * step, chunk * P]
                async_load(weight_desc, place, full, packed.slice(part * _OUTPUTS, _OUTPUTS))
            if PDL:  # the kernels before this one do not write weights
                _instruct("griddepcontrol.wait;", items)
            for plane in gl.static_range(4):
                j = wait_left(inputs, 4 * n + plane)
                full = inputs[1].index(j)
                mbarrier.expect(full, BLOCK_T * P * 2)
                async_load(x_desc, [row, (4 * chunk + plane) * P], full, inputs[0].index(j))
            n += 1


@gluon.jit
def _unpack(packed, word, UPPER: gl.constexpr, BF16: gl.constexpr):
    """See `int4.unpack_pair`."""
    dtype: gl.constexpr = gl.bfloat16 if BF16 else gl.float16
    minus = (word & 0xFFFF).to(gl.uint16).to(dtype, bitcast=True)
    scale = gl.expand_dims(((word >> 16) & 0xFFFF).to(gl.uint16).to(dtype, bitcast=True), 1)
    minus, packed = gl.broadcast(gl.expand_dims(minus, 1), packed)
    if BF16:
        first, second = gl.inline_asm_elementwise(
            BF16_UPPER if UPPER else BF16_LOWER, "=&r,=&r,r,r", [packed, minus],
            dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        first, second = gl.inline_asm_elementwise(
            FP16_UPPER if UPPER else FP16_LOWER, "=&r,=&r,r,r", [packed, minus],
            dtype=(gl.float16, gl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    return first * scale, second * scale


@gluon.jit
def _words_of(
    words, chunk, N, step, GROUP: gl.constexpr, P: gl.constexpr, PARTS: gl.constexpr
):  # fmt: skip
    """The words (`int4.halves`) of a chunk's two halves, for the rows of a group of warps; and the
    same of the second part, if there is one.
    """
    lower, upper = words + 4 * chunk * P // GROUP * N, words + (4 * chunk + 2) * P // GROUP * N
    if PARTS == 2:
        return gl.load(lower), gl.load(upper), gl.load(lower + step), gl.load(upper + step)
    else:
        return gl.load(lower), gl.load(upper)


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
        acc = activate(acc, GELU) * acc2
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
    WARPS: gl.constexpr, GROUP: gl.constexpr, P: gl.constexpr, PARTS: gl.constexpr,
    BLOCK_T: gl.constexpr, BF16: gl.constexpr, GATED: gl.constexpr, GELU: gl.constexpr,
):  # fmt: skip
    """The work of a group of warps."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_T, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    weights, inputs = rings
    of_group = WARPS * _HALF + gl.arange(0, _HALF, gl.SliceLayout(1, LEFT))
    n = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        row, output, split = _place_of(item, row_tiles, output_tiles, group, PARTS, BLOCK_T)
        acc = gl.zeros([_HALF, BLOCK_T], gl.float32, SUMS)
        acc2 = gl.zeros([_HALF, BLOCK_T], gl.float32, SUMS)
        words = words_ptr + output + of_group
        last = (split + 1) * span - 1
        word = _words_of(words, split * span, N, step, GROUP, P, PARTS)
        for chunk in range(split * span, last + 1):
            packed = weights[0].index(wait_full(weights, n))
            following = _words_of(words, gl.minimum(chunk + 1, last), N, step, GROUP, P, PARTS)
            for half in gl.static_range(2):
                x1 = inputs[0].index(wait_full(inputs, 4 * n + 2 * half)).permute((1, 0))
                x2 = inputs[0].index(wait_full(inputs, 4 * n + 2 * half + 1)).permute((1, 0))
                codes = packed.slice(WARPS * _HALF, _HALF).load(LEFT)
                a1, a2 = _unpack(codes, word[half], half == 1, BF16)
                later = warpgroup_mma(a1, x1, acc, is_async=True)
                later = warpgroup_mma(a2, x2, later, is_async=True)
                if PARTS == 2:
                    codes = packed.slice(_OUTPUTS + WARPS * _HALF, _HALF).load(LEFT)
                    b1, b2 = _unpack(codes, word[2 + half], half == 1, BF16)
                    later2 = warpgroup_mma(b1, x1, acc2, is_async=True)
                    later2 = warpgroup_mma(b2, x2, later2, is_async=True)
                    acc, acc2, a1, a2, b1, b2 = warpgroup_mma_wait(
                        0, [later, later2, a1, a2, b1, b2]
                    )
                else:
                    acc, a1, a2 = warpgroup_mma_wait(0, [later, a1, a2])
                leave(inputs, 4 * n + 2 * half)
                leave(inputs, 4 * n + 2 * half + 1)
            leave(weights, n)
            word = following
            n += 1
        _write(
            acc, acc2, bias_ptr, out_ptr, row, output + WARPS * _HALF, split, T, N, step, PARTS,
            BLOCK_T, GATED, GELU,
        )  # fmt: skip


@gluon.jit(
    do_not_specialize=["T", "N", "items", "row_tiles", "output_tiles", "group", "step", "span"],
)
def _hopper_int4_kernel(
    x_desc, weight_desc, words_ptr, bias_ptr, out_ptr, T, N, items, row_tiles, output_tiles, group,
    step, span,
    GROUP: gl.constexpr, P: gl.constexpr, PARTS: gl.constexpr, BLOCK_T: gl.constexpr,
    STAGES: gl.constexpr, X_STAGES: gl.constexpr, GATED: gl.constexpr, GELU: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = x_desc.dtype
    BF16: gl.constexpr = dtype == gl.bfloat16
    weights = make_ring(
        gl.allocate_shared_memory(gl.int16, [STAGES, PARTS * _OUTPUTS, P], weight_desc.layout),
        STAGES,
    )
    inputs = make_ring(
        gl.allocate_shared_memory(dtype, [X_STAGES, BLOCK_T, P], x_desc.layout), X_STAGES
    )
    fence_async_shared()
    rings = weights, inputs
    gl.warp_specialize(
        [
            (_multiply, (rings, words_ptr, bias_ptr, out_ptr, T, N, items, row_tiles, output_tiles,
                group, step, span, 0, GROUP, P, PARTS, BLOCK_T, BF16, GATED, GELU)),
            (_multiply, (rings, words_ptr, bias_ptr, out_ptr, T, N, items, row_tiles, output_tiles,
                group, step, span, 1, GROUP, P, PARTS, BLOCK_T, BF16, GATED, GELU)),
            (_copy, (rings, x_desc, weight_desc, items, row_tiles, output_tiles, group, step, span,
                P, PARTS, BLOCK_T, PDL)),
        ],
        [4, 1],  # warps, beside the first four
        [240, 24],  # registers of a thread; the first have 240, too
    )  # fmt: skip


def hopper_int4(
    x: torch.Tensor,
    weight: Int4Codes,
    bias: torch.Tensor | None,
    partial: bool = False,
    gelu: bool | None = None,
    out: torch.Tensor | None = None,
    tiles: Tiles | None = None,
) -> torch.Tensor:
    """`x @ weight.T + bias`, or `act(gate) * up` of it, if `int4_linear.takes_hopper_kernel`.

    Args:
        x: [T, K] in the dtype of the weight's values.
        weight: [N, K]; with `gelu`, the gates before the values that they multiply.
        bias: [N]; None: 0.
        partial: whether the result may be partial, its sum left to the caller.
        gelu: whether the activation is GELU (tanh), not SiLU; None: the product is not activated.
        out: [T, N] or [T, N / 2], output buffer; None: a new one.
        tiles: tiles of the product; None: chosen here.

    Returns:
        [T, N]; [T, N / 2] if activated; [S, T, N] float32, to be summed over S, if `partial` and
        that is faster.
    """
    (T, K), N, P = x.shape, len(weight), weight.plane
    gated, processors = gelu is not None, num_multiprocessors(x.device.index)
    tiles = tiles or choose_tiles(T, N, K, P, processors, partial, gated)
    block_t, parts, splits = tiles
    width = N // 2 if gated else N
    if out is None:
        out = empty_parts(splits, T, width, x.dtype, x.device)
    row_tiles, output_tiles = cdiv(T, block_t), N // (OUTPUTS * parts)
    group, items = max(1, IN_CACHE // (block_t * K * 2)), row_tiles * output_tiles * splits
    _hopper_int4_kernel[(min(processors, items),)](
        tiles_of(x, block_t, P), tiles_of(weight.data, OUTPUTS, P), weight.scales.view(torch.int32),
        bias, out, T, N, items, row_tiles, output_tiles, group, width if gated else OUTPUTS,
        K // (PLANES * P) // splits, **_constants(weight, tiles), GATED=gated, GELU=bool(gelu),
        num_warps=4, **pdl_options(x),
    )  # fmt: skip
    return out


def _constants(weight: Int4Codes, tiles: Tiles) -> dict[str, Any]:
    """The constants of the kernel, with as many stages as shared memory has room for."""
    P = weight.plane
    of_weights, of_inputs = 2 * tiles.parts * OUTPUTS * P, 2 * tiles.block_t * P
    stages = 3
    x_stages = min(12, ((208 << 10) - stages * of_weights) // of_inputs)
    return {
        **{"GROUP": weight.group, "P": P, "PARTS": tiles.parts, "BLOCK_T": tiles.block_t},
        **{"STAGES": stages, "X_STAGES": x_stages},
    }
