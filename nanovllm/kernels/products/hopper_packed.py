"""Packed weights of 4 bits on Hopper: unpacked in registers beside the products of tensor cores.

A warp copies packed weights and activations into two rings of shared memory (TMA), a chunk of
columns at a time, and two groups of four warps multiply. The weights are the left operand, in
registers: one group unpacks while the product of the other runs. Each group sums 64 outputs of a
tile, or twice 64: of gate and up projections 64 gates and the 64 values that these multiply, so
that a thread has a gate and its value in its registers.

Letters: N outputs, P columns of a plane (`tensors.int4`, `tensors.mxfp4`).
"""

from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from nanovllm.kernels.products import int4, mxfp4
from nanovllm.kernels.rings import (
    async_load,
    leave,
    make_ring,
    tiles_of,
    wait_full,
    wait_left,
)
from nanovllm.tensors.int4 import Int4Codes
from nanovllm.tensors.mxfp4 import BLOCK, CHUNK, Mxfp4Codes

OUTPUTS = 128  # of both groups of warps, or twice that
ROOM = 208 << 10  # bytes of shared memory for rings
MAX_STAGES = 8
_OUTPUTS = gl.constexpr(OUTPUTS)
_HALF = gl.constexpr(OUTPUTS // 2)


class Packed(NamedTuple):
    """A packed matrix as the kernels take it.

    Attributes:
        matrix: TMA descriptor for OUTPUTS rows of a chunk.
        words: int32 scales (`int4.halves`), or exponents (`mxfp4.unpack_pair`).
        constants: constants of the kernels that are about its format.
    """

    matrix: Any
    words: torch.Tensor
    constants: dict[str, Any]


def packed(weight: Int4Codes | Mxfp4Codes) -> Packed:
    """A matrix as the kernels take it."""
    if isinstance(weight, Mxfp4Codes):
        constants = {"P": BLOCK, "GROUP": CHUNK, "E2M1": True}
        rows = weight.data.view(-1, BLOCK)
        return Packed(tiles_of(rows, OUTPUTS, BLOCK), weight.exponents.view(torch.int32), constants)
    P = weight.plane
    constants = {"P": P, "GROUP": weight.group, "E2M1": False}
    return Packed(tiles_of(weight.data, OUTPUTS, P), weight.scales.view(torch.int32), constants)


def ring_sizes(P: int, parts: int, block_t: int) -> dict[str, int]:
    """The stages of both rings: as many chunks as shared memory has room for."""
    of_weights, of_inputs = 2 * parts * OUTPUTS * P, 4 * block_t * P  # bytes
    stages = min(MAX_STAGES, max(3, ROOM // (of_weights + 2 * of_inputs)))
    return {
        "STAGES": stages,
        "X_STAGES": min(2 * MAX_STAGES, (ROOM - stages * of_weights) // of_inputs),
    }


@gluon.jit
def make_rings(
    x_desc, weight_desc, P: gl.constexpr, PARTS: gl.constexpr, BLOCK_T: gl.constexpr,
    STAGES: gl.constexpr, X_STAGES: gl.constexpr,
):  # fmt: skip
    """The rings of weights, and of activations of two planes."""
    weights = gl.allocate_shared_memory(gl.int16, [STAGES, PARTS * _OUTPUTS, P], weight_desc.layout)
    inputs = gl.allocate_shared_memory(x_desc.dtype, [X_STAGES, 2 * BLOCK_T, P], x_desc.layout)
    return make_ring(weights, STAGES), make_ring(inputs, X_STAGES)


@gluon.jit
def instruct(INSTRUCTION: gl.constexpr, any_int):
    """Insert an instruction (see `device_features` for those of dependent launch)."""
    gl.inline_asm_elementwise(
        INSTRUCTION + " mov.b32 $0, $1;", "=r,r", [any_int], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def copy_chunks(
    rings, n, x_desc, weight_desc, row, output, begin, end, N, step,
    P: gl.constexpr, PARTS: gl.constexpr, E2M1: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Copy the chunks of a tile from `begin` to `end`, by the copying warp.

    Args:
        n: uses of the ring of weights before.
        row, output: first row of the activations, and of the weights.
        begin, end: chunks of columns.
        N: rows of the weights.
        step: weights between the two parts of a tile.

    Returns:
        Uses of the ring of weights.
    """
    weights, inputs = rings
    BLOCK_T: gl.constexpr = inputs[0].shape[1] // 2
    for chunk in range(begin, end):
        i = wait_left(weights, n)
        full, to = weights[1].index(i), weights[0].index(i)
        mbarrier.expect(full, PARTS * _OUTPUTS * P * 2)
        for part in gl.static_range(PARTS):
            first = output + part * step
            if E2M1:
                place = [chunk * N + first, 0]
            else:
                place = [first, chunk * P]
            async_load(weight_desc, place, full, to.slice(part * _OUTPUTS, _OUTPUTS))
        if PDL:  # the kernels before this one do not write weights
            instruct("griddepcontrol.wait;", n)
        for half in gl.static_range(2):
            j = wait_left(inputs, 2 * n + half)
            full, both = inputs[1].index(j), inputs[0].index(j)
            mbarrier.expect(full, 2 * BLOCK_T * P * 2)
            k = (4 * chunk + 2 * half) * P
            async_load(x_desc, [row, k], full, both.slice(0, BLOCK_T))
            async_load(x_desc, [row, k + P], full, both.slice(BLOCK_T, BLOCK_T))
        n += 1
    return n


@gluon.jit
def _unpack(codes, word, UPPER: gl.constexpr, BF16: gl.constexpr, E2M1: gl.constexpr):
    """The values of two planes, the first two or (UPPER) the others."""
    if E2M1:
        return mxfp4.unpack_pair(codes, word, UPPER, True)
    else:
        return int4.unpack_pair(codes, word, UPPER, gl.bfloat16 if BF16 else gl.float16, True)


@gluon.jit
def _words_of(
    words, words2, chunk, N,
    GROUP: gl.constexpr, P: gl.constexpr, PARTS: gl.constexpr, E2M1: gl.constexpr,
):  # fmt: skip
    """The words of a chunk's two halves, for the rows of a group of warps; and the same of the
    second part, if there is one.
    """
    lower, upper = 4 * chunk * P // GROUP * N, (4 * chunk + 2) * P // GROUP * N
    first = gl.load(words + lower)
    second = first if E2M1 else gl.load(words + upper)
    if PARTS == 2:
        third = gl.load(words2 + lower)
        fourth = third if E2M1 else gl.load(words2 + upper)
        return first, second, third, fourth
    else:
        return first, second


@gluon.jit
def add_chunks(
    rings, n, words_ptr, output, begin, end, N, step,
    SIDE: gl.constexpr, GROUP: gl.constexpr, P: gl.constexpr, PARTS: gl.constexpr,
    BF16: gl.constexpr, E2M1: gl.constexpr,
):  # fmt: skip
    """The sums of a group's outputs over the chunks from `begin` to `end`.

    Args:
        n: uses of the ring of weights before.
        output: first output of the tile.
        N: all outputs; a tile may reach beyond the last.
        step: outputs between the two parts of a tile.
        SIDE: the group's half of the outputs: 0 or 1.

    Returns:
        The sums [OUTPUTS / 2, BLOCK_T] float32 of the first part and of the second (0 if there is
        none), and the uses of the ring of weights.
    """
    weights, inputs = rings
    BLOCK_T: gl.constexpr = inputs[0].shape[1] // 2
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_T, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    acc = gl.zeros([_HALF, BLOCK_T], gl.float32, SUMS)
    acc2 = gl.zeros([_HALF, BLOCK_T], gl.float32, SUMS)
    rows = output + SIDE * _HALF + gl.arange(0, _HALF, gl.SliceLayout(1, LEFT))
    words = words_ptr + gl.minimum(rows, N - 1)
    words2 = words_ptr + gl.minimum(rows + step, N - 1)
    word = _words_of(words, words2, begin, N, GROUP, P, PARTS, E2M1)
    for chunk in range(begin, end):
        following = gl.minimum(chunk + 1, end - 1)
        ahead = _words_of(words, words2, following, N, GROUP, P, PARTS, E2M1)
        buffer = weights[0].index(wait_full(weights, n))
        for half in gl.static_range(2):
            x = inputs[0].index(wait_full(inputs, 2 * n + half))
            x1 = x.slice(0, BLOCK_T).permute((1, 0))
            x2 = x.slice(BLOCK_T, BLOCK_T).permute((1, 0))
            codes = buffer.slice(SIDE * _HALF, _HALF).load(LEFT)
            a1, a2 = _unpack(codes, word[half], half == 1, BF16, E2M1)
            later = warpgroup_mma(a1, x1, acc, is_async=True)
            later = warpgroup_mma(a2, x2, later, is_async=True)
            if PARTS == 2:
                codes = buffer.slice(_OUTPUTS + SIDE * _HALF, _HALF).load(LEFT)
                b1, b2 = _unpack(codes, word[2 + half], half == 1, BF16, E2M1)
                later2 = warpgroup_mma(b1, x1, acc2, is_async=True)
                later2 = warpgroup_mma(b2, x2, later2, is_async=True)
                acc, acc2, a1, a2, b1, b2 = warpgroup_mma_wait(0, [later, later2, a1, a2, b1, b2])
            else:
                acc, a1, a2 = warpgroup_mma_wait(0, [later, a1, a2])
            leave(inputs, 2 * n + half)
        leave(weights, n)
        word = ahead
        n += 1
    return acc, acc2, n
