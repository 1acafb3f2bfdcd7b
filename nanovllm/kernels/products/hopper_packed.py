"""Packed weights of 4 bits on Hopper: unpacked in registers beside the products of tensor cores.

A warp copies packed weights and activations into two rings of shared memory (TMA), and two groups
of four warps multiply. The weights are the left operand, in registers: a group unpacks two planes
while the product of the two before runs.
Each group sums 64 outputs of a tile, or twice 64: of gate and up projections 64 gates and the 64
values that these multiply, so that a thread has a gate and its value in its registers.

Letters: N outputs, P columns of a plane (`tensors.int4`, `tensors.mxfp4`).
"""

from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from nanovllm.kernels.products import int4, mxfp4
from nanovllm.kernels.products.tiles import COLUMNS, OUTPUTS
from nanovllm.kernels.rings import (
    async_load,
    leave,
    make_ring,
    tiles_of,
    wait_full,
    wait_left,
)
from nanovllm.tensors.int4 import PLANES, Int4Codes
from nanovllm.tensors.mxfp4 import BLOCK, CHUNK, Mxfp4Codes

FEW_ROWS = 64  # in a tile, with which a stage's codes have room in registers
ROOM = 208 << 10  # bytes of shared memory for rings
MAX_STAGES = 8
_OUTPUTS = gl.constexpr(OUTPUTS)
_HALF = gl.constexpr(OUTPUTS // 2)
_COLUMNS = gl.constexpr(COLUMNS)
_FEW_ROWS = gl.constexpr(FEW_ROWS)
_PLANES = gl.constexpr(PLANES)


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
    """The stages of both rings, as many as shared memory has room for, and the pairs of planes of a
    stage of activations: all those of a stage of weights, but of many rows only half of them.
    """
    x_pairs = COLUMNS // (2 * P) if block_t <= FEW_ROWS else COLUMNS // (4 * P)
    # In bytes.
    of_weights, of_inputs = 2 * parts * OUTPUTS * COLUMNS // PLANES, 4 * block_t * P * x_pairs
    stages = min(MAX_STAGES, max(3, ROOM // (of_weights + 2 * block_t * COLUMNS)))
    x_stages = min(2 * MAX_STAGES, (ROOM - stages * of_weights) // of_inputs)
    return {"STAGES": stages, "X_STAGES": x_stages, "X_PAIRS": x_pairs}


@gluon.jit
def make_rings(
    x_desc, weight_desc, P: gl.constexpr, PARTS: gl.constexpr, BLOCK_T: gl.constexpr,
    STAGES: gl.constexpr, X_STAGES: gl.constexpr, X_PAIRS: gl.constexpr,
):  # fmt: skip
    """The rings of weights, and of activations: a tile for each plane."""
    CHUNKS: gl.constexpr = _COLUMNS // (_PLANES * P)
    weights = gl.allocate_shared_memory(
        gl.int16, [STAGES, PARTS * CHUNKS * _OUTPUTS, P], weight_desc.layout
    )
    inputs = gl.allocate_shared_memory(
        x_desc.dtype, [X_STAGES, 2 * X_PAIRS * BLOCK_T, P], x_desc.layout
    )
    return make_ring(weights, STAGES), make_ring(inputs, X_STAGES)


@gluon.jit
def instruct(INSTRUCTION: gl.constexpr, any_int):
    """Insert an instruction (see `device_features` for those of dependent launch)."""
    gl.inline_asm_elementwise(
        INSTRUCTION + " mov.b32 $0, $1;", "=r,r", [any_int], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def copy_stages(
    rings, n, x_desc, weight_desc, row, output, begin, end, N, step,
    P: gl.constexpr, PARTS: gl.constexpr, E2M1: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Copy a tile, from the stage `begin` to `end` of its columns, by the copying warp.

    Args:
        n: uses of the ring of weights before.
        row, output: first row of the activations, and of the weights.
        N: rows of the weights.
        step: weights between the two parts of a tile.

    Returns:
        Uses of the ring of weights.
    """
    weights, inputs = rings
    BLOCK_T: gl.constexpr = x_desc.block_shape[0]
    CHUNKS: gl.constexpr = _COLUMNS // (_PLANES * P)
    X_PAIRS: gl.constexpr = inputs[0].shape[1] // (2 * BLOCK_T)
    X_USES: gl.constexpr = 2 * CHUNKS // X_PAIRS  # of the ring of activations in a stage
    for stage in range(begin, end):
        i = wait_left(weights, n)
        full, to = weights[1].index(i), weights[0].index(i)
        mbarrier.expect(full, PARTS * CHUNKS * _OUTPUTS * P * 2)
        for part in gl.static_range(PARTS):
            first = output + part * step
            for j in gl.static_range(CHUNKS):
                chunk = stage * CHUNKS + j
                place = [chunk * N + first, 0] if E2M1 else [first, chunk * P]
                tile = to.slice((part * CHUNKS + j) * _OUTPUTS, _OUTPUTS)
                async_load(weight_desc, place, full, tile)
        if PDL:  # the kernels before this one do not write weights
            instruct("griddepcontrol.wait;", n)
        for use in gl.static_range(X_USES):
            j = wait_left(inputs, X_USES * n + use)
            full, to = inputs[1].index(j), inputs[0].index(j)
            mbarrier.expect(full, 2 * X_PAIRS * BLOCK_T * P * 2)
            for plane in gl.static_range(2 * X_PAIRS):
                k = stage * _COLUMNS + (2 * X_PAIRS * use + plane) * P
                async_load(x_desc, [row, k], full, to.slice(plane * BLOCK_T, BLOCK_T))
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
def _word_of(words, chunk, half, chunks, N, GROUP: gl.constexpr, P: gl.constexpr):
    """The words of two planes; in the place of a chunk beyond the last, the last one's."""
    k = (_PLANES * gl.minimum(chunk, chunks - 1) + 2 * half) * P
    return gl.load(words + k // GROUP * N)


@gluon.jit
def _words_of(
    words, stage, chunks, N, GROUP: gl.constexpr, P: gl.constexpr, E2M1: gl.constexpr
):  # fmt: skip
    """The words of each pair of planes of a stage."""
    if P == 64:
        return (
            _word_of(words, stage, 0, chunks, N, GROUP, P),
            _word_of(words, stage, 1, chunks, N, GROUP, P),
        )
    else:
        first = _word_of(words, 2 * stage, 0, chunks, N, GROUP, P)
        third = _word_of(words, 2 * stage + 1, 0, chunks, N, GROUP, P)
        if E2M1:  # a word is about four planes
            return first, first, third, third
        else:
            second = _word_of(words, 2 * stage, 1, chunks, N, GROUP, P)
            fourth = _word_of(words, 2 * stage + 1, 1, chunks, N, GROUP, P)
            return first, second, third, fourth


@gluon.jit
def _load_codes(buffer, TILE: gl.constexpr, SIDE: gl.constexpr, LEFT: gl.constexpr):
    """A group's half of one tile of a stage."""
    return buffer.slice(TILE * _OUTPUTS, _OUTPUTS).slice(SIDE * _HALF, _HALF).load(LEFT)


@gluon.jit
def _load_tiles(buffer, TILES: gl.constexpr, SIDE: gl.constexpr, LEFT: gl.constexpr):
    """A group's half of each tile of a stage."""
    if TILES == 1:
        return (_load_codes(buffer, 0, SIDE, LEFT),)
    elif TILES == 2:
        return _load_codes(buffer, 0, SIDE, LEFT), _load_codes(buffer, 1, SIDE, LEFT)
    else:
        return (
            _load_codes(buffer, 0, SIDE, LEFT),
            _load_codes(buffer, 1, SIDE, LEFT),
            _load_codes(buffer, 2, SIDE, LEFT),
            _load_codes(buffer, 3, SIDE, LEFT),
        )


@gluon.jit
def _add_planes(
    running, codes, word, x, PLANE: gl.constexpr, BLOCK_T: gl.constexpr, UPPER: gl.constexpr,
    BF16: gl.constexpr, E2M1: gl.constexpr,
):  # fmt: skip
    """Unpack two planes of codes and begin to add their products with two tiles of x, from PLANE
    on. Returns the sums, and the operands, which must stay until these are ready.
    """
    a1, a2 = _unpack(codes, word, UPPER, BF16, E2M1)
    x1 = x.slice(PLANE * BLOCK_T, BLOCK_T).permute((1, 0))
    x2 = x.slice((PLANE + 1) * BLOCK_T, BLOCK_T).permute((1, 0))
    running = warpgroup_mma(a1, x1, running, is_async=True)
    return warpgroup_mma(a2, x2, running, is_async=True), a1, a2


@gluon.jit
def _add_stage(
    weights, inputs, n, acc, acc2, words, words2, PAIRS: gl.constexpr,
    SIDE: gl.constexpr, P: gl.constexpr, PARTS: gl.constexpr, BLOCK_T: gl.constexpr,
    BF16: gl.constexpr, E2M1: gl.constexpr,
):  # fmt: skip
    """The sums of both parts with those of a stage, the n-th use of the ring of weights, of which
    the first PAIRS pairs of planes have columns.
    """
    FEW: gl.constexpr = BLOCK_T <= _FEW_ROWS
    CHUNKS: gl.constexpr = _COLUMNS // (_PLANES * P)
    X_PAIRS: gl.constexpr = inputs[0].shape[1] // (2 * BLOCK_T)
    X_USES: gl.constexpr = 2 * CHUNKS // X_PAIRS
    LEFT: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    buffer = weights[0].index(wait_full(weights, n))
    if FEW:
        tiles = _load_tiles(buffer, PARTS * CHUNKS, SIDE, LEFT)
    running, running2 = warpgroup_mma_init(acc), warpgroup_mma_init(acc2)
    operands = acc, acc2  # of the products that run: none yet
    for pair in gl.static_range(PAIRS):
        use = X_USES * n + pair // X_PAIRS
        if pair % X_PAIRS == 0:
            x = inputs[0].index(wait_full(inputs, use))
        for part in gl.static_range(PARTS):
            if FEW:
                codes = tiles[part * CHUNKS + pair // 2]
            else:
                codes = _load_codes(buffer, part * CHUNKS + pair // 2, SIDE, LEFT)
            if part == 0:
                running, a1, a2 = _add_planes(
                    running, codes, words[pair], x, 2 * (pair % X_PAIRS), BLOCK_T, pair % 2 == 1,
                    BF16, E2M1,
                )  # fmt: skip
            else:
                running2, a1, a2 = _add_planes(
                    running2, codes, words2[pair], x, 2 * (pair % X_PAIRS), BLOCK_T, pair % 2 == 1,
                    BF16, E2M1,
                )  # fmt: skip
            if pair > 0 or part > 0:  # until the products before these have ended
                warpgroup_mma_wait(2, operands)
            if pair > 0 and pair % X_PAIRS == 0 and part == 0:
                leave(inputs, use - 1)
            operands = a1, a2
    # No product runs on into the next stage: the assembler would make warps wait after each.
    ended = warpgroup_mma_wait(0, (running, running2, operands[0], operands[1]))
    leave(inputs, X_USES * n + (PAIRS - 1) // X_PAIRS)
    for unused in gl.static_range((PAIRS - 1) // X_PAIRS + 1, X_USES):
        wait_full(inputs, X_USES * n + unused)
        leave(inputs, X_USES * n + unused)
    leave(weights, n)
    return ended[0], ended[1]


@gluon.jit
def add_stages(
    rings, n, words_ptr, output, begin, end, chunks, N, step, TAIL: gl.constexpr,
    SIDE: gl.constexpr, GROUP: gl.constexpr, P: gl.constexpr, PARTS: gl.constexpr,
    BLOCK_T: gl.constexpr, BF16: gl.constexpr, E2M1: gl.constexpr,
):  # fmt: skip
    """The sums of a group's outputs, from the stage `begin` to `end` of columns.

    Args:
        n: uses of the ring of weights before.
        output: first output of the tile.
        chunks: chunks of columns of the weights.
        N: all outputs; a tile may reach beyond the last.
        step: outputs between the two parts of a tile.
        TAIL: pairs of planes of the last stage that have columns.
        SIDE: the group's half of the outputs: 0 or 1.

    Returns:
        The sums [OUTPUTS / 2, BLOCK_T] float32 of the first part and of the second (0 if there is
        none), and the uses of the ring of weights.
    """
    weights, inputs = rings
    PAIRS: gl.constexpr = _COLUMNS // (2 * P)
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_T, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    acc = gl.zeros([_HALF, BLOCK_T], gl.float32, SUMS)
    acc2 = gl.zeros([_HALF, BLOCK_T], gl.float32, SUMS)
    rows = output + SIDE * _HALF + gl.arange(0, _HALF, gl.SliceLayout(1, LEFT))
    ptrs = words_ptr + gl.minimum(rows, N - 1)
    ptrs2 = words_ptr + gl.minimum(rows + step, N - 1)
    words = _words_of(ptrs, begin, chunks, N, GROUP, P, E2M1)
    words2 = _words_of(ptrs2, begin, chunks, N, GROUP, P, E2M1) if PARTS == 2 else words
    for stage in range(begin, end if TAIL == PAIRS else end - 1):
        following = gl.minimum(stage + 1, end - 1)
        ahead = _words_of(ptrs, following, chunks, N, GROUP, P, E2M1)
        ahead2 = _words_of(ptrs2, following, chunks, N, GROUP, P, E2M1) if PARTS == 2 else ahead
        acc, acc2 = _add_stage(
            weights, inputs, n, acc, acc2, words, words2, PAIRS, SIDE, P, PARTS, BLOCK_T, BF16, E2M1
        )
        words, words2 = ahead, ahead2
        n += 1
    if TAIL < PAIRS:
        acc, acc2 = _add_stage(
            weights, inputs, n, acc, acc2, words, words2, TAIL, SIDE, P, PARTS, BLOCK_T, BF16, E2M1
        )
        n += 1
    return acc, acc2, n
