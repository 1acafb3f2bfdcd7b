"""Products of experts whose weights have 4 bits, on Hopper (`hopper_packed.py`).

The rows of the pairs of a token and an expert stand in the order of experts, so that a tile of an
expert's rows is copied by hardware. A program finds the tiles that are its own from the first pair
of each expert: only the GPU knows how many there are. The pairs of a single token are neither
sorted nor copied: each is a tile.

Letters: N pairs, K experts of a token, E experts, M hidden size, I inner size.
"""

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from nanovllm.kernels.activation import activate_and_mul
from nanovllm.kernels.device_features import launch_dependents, pdl_options, wait
from nanovllm.kernels.experts.routing import sort_pairs
from nanovllm.kernels.experts.tiles import choose_rows
from nanovllm.kernels.products.hopper_packed import (
    add_stages,
    copy_stages,
    instruct,
    make_rings,
    packed,
    ring_sizes,
)
from nanovllm.kernels.products.tiles import COLUMNS, OUTPUTS
from nanovllm.kernels.rings import tiles_of
from nanovllm.tensors.int4 import PLANES, Int4Codes
from nanovllm.tensors.mxfp4 import Mxfp4Codes
from nanovllm.utils.device import num_multiprocessors
from nanovllm.utils.integers import cdiv, next_power_of_2

_HALF = gl.constexpr(OUTPUTS // 2)
ROWS = 8  # per program of `_rows_kernel`


@triton.jit(do_not_specialize=["N"])
def _rows_kernel(
    x_ptr, order_ptr, out_ptr, N, K: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # One program: the tokens of ROWS pairs.
    launch_dependents(PDL)
    n, m = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    wait(PDL)
    token = (tl.load(order_ptr + n, mask=n < N, other=0) // K).to(tl.int64)
    mask = (n < N)[:, None] & (m < M)[None, :]
    x = tl.load(x_ptr + token[:, None] * M + m[None, :], mask=mask)
    tl.store(out_ptr + n.to(tl.int64)[:, None] * M + m[None, :], x, mask=mask)


def rows_of_pairs(x: torch.Tensor, order: torch.Tensor, k: int) -> torch.Tensor:
    """The rows of x: [T, M] of sorted pairs [N]: [N, M]."""
    N, M = len(order), x.shape[1]
    out = torch.empty(N, M, dtype=x.dtype, device=x.device)
    _rows_kernel[(cdiv(N, ROWS),)](
        x.contiguous(), order, out, N, K=k, M=M, BLOCK=next_power_of_2(M), ROWS=ROWS, num_warps=8,
        **pdl_options(x),
    )  # fmt: skip
    return out


@gluon.jit
def _sum(a, b):
    return a + b


@gluon.jit
def _items_of_experts(
    starts_ptr, output_tiles,
    K: gl.constexpr, E: gl.constexpr, E_PAD: gl.constexpr, BLOCK_T: gl.constexpr, ONE: gl.constexpr,
):  # fmt: skip
    """The first pair of each expert and the one after its last, the end of its items, and the
    number of all items: an item is a tile of rows and one of outputs.
    """
    if ONE:
        return 0, 0, 0, K * output_tiles
    else:
        return _count_items(starts_ptr, output_tiles, E, E_PAD, BLOCK_T)


@gluon.jit
def _count_items(
    starts_ptr, output_tiles, E: gl.constexpr, E_PAD: gl.constexpr, BLOCK_T: gl.constexpr
):  # fmt: skip
    WARPS: gl.constexpr = gl.num_warps()
    SIZE: gl.constexpr = max(1, E_PAD // (32 * WARPS))
    e = gl.arange(0, E_PAD, gl.BlockedLayout([SIZE], [32], [WARPS], [0]))
    first = gl.load(starts_ptr + e, e < E, 0)
    after = gl.load(starts_ptr + e + 1, e < E, 0)
    items = (after - first + BLOCK_T - 1) // BLOCK_T * output_tiles
    return first, after, gl.associative_scan(items, 0, _sum), gl.sum(items, 0)


@gluon.jit
def _tile_of(
    item, starts_ptr, output_tiles, experts,
    WIDTH: gl.constexpr, BLOCK_T: gl.constexpr, ONE: gl.constexpr,
):  # fmt: skip
    """An item's expert, its first row and the expert's end of rows, and its first output. Items of
    the same weights are neighbours.
    """
    if ONE:
        pair = item // output_tiles
        return gl.load(starts_ptr + pair), pair, pair + 1, item % output_tiles * WIDTH
    else:
        return _find_tile(item, experts, WIDTH, BLOCK_T)


@gluon.jit
def _find_tile(item, experts, WIDTH: gl.constexpr, BLOCK_T: gl.constexpr):
    first, after, ends, _ = experts
    own = ends > item
    before = gl.max(gl.where(own, 0, ends), 0)
    expert = gl.sum(gl.where(own, 0, 1), 0)
    e = gl.arange(0, first.shape[0], first.type.layout)
    begin = gl.sum(gl.where(e == expert, first, 0), 0)
    end = gl.sum(gl.where(e == expert, after, 0), 0)
    row_tiles, i = (end - begin + BLOCK_T - 1) // BLOCK_T, item - before
    return expert, begin + i % row_tiles * BLOCK_T, end, i // row_tiles * WIDTH


@gluon.jit
def _copy(
    rings, x_desc, weight_desc, starts_ptr, output_tiles, stages, rows, step, N,
    K: gl.constexpr, E: gl.constexpr, E_PAD: gl.constexpr, P: gl.constexpr, PARTS: gl.constexpr,
    WIDTH: gl.constexpr, E2M1: gl.constexpr, GATED: gl.constexpr, ONE: gl.constexpr,
):  # fmt: skip
    """The work of the copying warp; `rows`: weights of an expert."""
    BLOCK_T: gl.constexpr = x_desc.block_shape[0]
    experts = _items_of_experts(starts_ptr, output_tiles, K, E, E_PAD, BLOCK_T, ONE)
    n = 0
    for item in range(gl.program_id(0), experts[3], gl.num_programs(0)):
        expert, row, _, output = _tile_of(
            item, starts_ptr, output_tiles, experts, WIDTH, BLOCK_T, ONE
        )
        if ONE and GATED:  # all pairs have the same row
            row = 0
        n = copy_stages(
            rings, n, x_desc, weight_desc, row, expert * rows + output, 0, stages, N, step, P,
            PARTS, E2M1, False,
        )  # fmt: skip


@gluon.jit
def _write_gated(
    gate, up, bias_ptr, out_ptr, expert, row, end, output, I,
    GELU: gl.constexpr, LIMIT: gl.constexpr,
):  # fmt: skip
    """Write a group's inner values, in the order of pairs."""
    SUMS: gl.constexpr = gate.type.layout
    outputs = output + gl.arange(0, _HALF, gl.SliceLayout(1, SUMS))
    rows = row + gl.arange(0, gate.shape[1], gl.SliceLayout(0, SUMS))
    if bias_ptr is not None:
        ptrs = bias_ptr + expert * 2 * I + outputs
        gate += gl.expand_dims(gl.load(ptrs, outputs < I, 0.0).to(gl.float32), 1)
        up += gl.expand_dims(gl.load(ptrs + I, outputs < I, 0.0).to(gl.float32), 1)
    inner = activate_and_mul(gate, up, GELU, LIMIT)
    ptrs = out_ptr + gl.expand_dims(rows.to(gl.int64) * I, 0) + gl.expand_dims(outputs, 1)
    there = gl.expand_dims(rows < end, 0) & gl.expand_dims(outputs < I, 1)
    gl.store(ptrs, inner.to(out_ptr.dtype.element_ty), there)


@gluon.jit
def _write_weighted(
    acc, bias_ptr, order_ptr, scale_ptr, out_ptr, expert, row, end, output, T, M, K: gl.constexpr
):  # fmt: skip
    """Write a group's results, times their experts' weights, where their tokens want them."""
    SUMS: gl.constexpr = acc.type.layout
    outputs = output + gl.arange(0, _HALF, gl.SliceLayout(1, SUMS))
    rows = row + gl.arange(0, acc.shape[1], gl.SliceLayout(0, SUMS))
    if bias_ptr is not None:
        bias = gl.load(bias_ptr + expert * M + outputs, outputs < M, 0.0)
        acc += gl.expand_dims(bias.to(gl.float32), 1)
    pairs = rows if order_ptr is None else gl.load(order_ptr + rows, rows < end, 0)
    scale = gl.load(scale_ptr + pairs, rows < end, 0.0)
    places = ((pairs % K).to(gl.int64) * T + pairs // K) * M
    ptrs = out_ptr + gl.expand_dims(places, 0) + gl.expand_dims(outputs, 1)
    there = gl.expand_dims(rows < end, 0) & gl.expand_dims(outputs < M, 1)
    gl.store(ptrs, (acc * gl.expand_dims(scale, 0)).to(out_ptr.dtype.element_ty), there)


@gluon.jit
def _multiply(
    rings, words_ptr, bias_ptr, order_ptr, starts_ptr, scale_ptr, out_ptr, T, outputs, output_tiles,
    stages, chunks, rows, step, N,
    SIDE: gl.constexpr, TAIL: gl.constexpr, K: gl.constexpr, E: gl.constexpr, E_PAD: gl.constexpr,
    GROUP: gl.constexpr, P: gl.constexpr, PARTS: gl.constexpr, WIDTH: gl.constexpr,
    BLOCK_T: gl.constexpr, BF16: gl.constexpr, E2M1: gl.constexpr, GATED: gl.constexpr,
    GELU: gl.constexpr, LIMIT: gl.constexpr, ONE: gl.constexpr,
):  # fmt: skip
    """The work of a group of warps; `outputs`: results of an expert."""
    experts = _items_of_experts(starts_ptr, output_tiles, K, E, E_PAD, BLOCK_T, ONE)
    n = 0
    for item in range(gl.program_id(0), experts[3], gl.num_programs(0)):
        expert, row, end, output = _tile_of(
            item, starts_ptr, output_tiles, experts, WIDTH, BLOCK_T, ONE
        )
        acc, acc2, n = add_stages(
            rings, n, words_ptr, expert * rows + output, 0, stages, chunks, N, step, TAIL, SIDE,
            GROUP, P, PARTS, BLOCK_T, BF16, E2M1,
        )  # fmt: skip
        output += SIDE * _HALF
        if GATED:
            _write_gated(
                acc, acc2, bias_ptr, out_ptr, expert, row, end, output, outputs, GELU, LIMIT
            )
        else:
            _write_weighted(
                acc, bias_ptr, order_ptr, scale_ptr, out_ptr, expert, row, end, output, T, outputs,
                K,
            )  # fmt: skip
            if PARTS == 2:
                _write_weighted(
                    acc2, bias_ptr, order_ptr, scale_ptr, out_ptr, expert, row, end, output + step,
                    T, outputs, K,
                )  # fmt: skip


@gluon.jit(
    do_not_specialize=["T", "outputs", "output_tiles", "stages", "chunks", "rows", "step", "N"]
)
def _hopper_experts_kernel(
    x_desc, weight_desc, words_ptr, bias_ptr, order_ptr, starts_ptr, scale_ptr, out_ptr, T, outputs,
    output_tiles, stages, chunks, rows, step, N,
    TAIL: gl.constexpr, K: gl.constexpr, E: gl.constexpr, E_PAD: gl.constexpr,
    GROUP: gl.constexpr, P: gl.constexpr, E2M1: gl.constexpr, PARTS: gl.constexpr,
    WIDTH: gl.constexpr, BLOCK_T: gl.constexpr,
    STAGES: gl.constexpr, X_STAGES: gl.constexpr, X_PAIRS: gl.constexpr, GATED: gl.constexpr,
    GELU: gl.constexpr, LIMIT: gl.constexpr, ONE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    # `starts_ptr`: see `sort_pairs`; of ONE token its experts, and `order_ptr` None.
    BF16: gl.constexpr = x_desc.dtype == gl.bfloat16
    rings = make_rings(x_desc, weight_desc, P, PARTS, BLOCK_T, STAGES, X_STAGES, X_PAIRS)
    if PDL:  # all warps go on from here together
        instruct("griddepcontrol.launch_dependents;", N)
        instruct("griddepcontrol.wait;", N)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply, (rings, words_ptr, bias_ptr, order_ptr, starts_ptr, scale_ptr, out_ptr, T,
                outputs, output_tiles, stages, chunks, rows, step, N, 0, TAIL, K, E, E_PAD, GROUP,
                P, PARTS, WIDTH, BLOCK_T, BF16, E2M1, GATED, GELU, LIMIT, ONE)),
            (_multiply, (rings, words_ptr, bias_ptr, order_ptr, starts_ptr, scale_ptr, out_ptr, T,
                outputs, output_tiles, stages, chunks, rows, step, N, 1, TAIL, K, E, E_PAD, GROUP,
                P, PARTS, WIDTH, BLOCK_T, BF16, E2M1, GATED, GELU, LIMIT, ONE)),
            (_copy, (rings, x_desc, weight_desc, starts_ptr, output_tiles, stages, rows, step, N, K,
                E, E_PAD, P, PARTS, WIDTH, E2M1, GATED, ONE)),
        ],
        [4, 1],  # warps, beside the first four
        [240, 24],  # registers of a thread; the first have 240, too
    )  # fmt: skip


def hopper_experts(
    x: torch.Tensor,
    gate_up: Int4Codes | Mxfp4Codes,
    down: Int4Codes | Mxfp4Codes,
    biases: tuple[torch.Tensor | None, torch.Tensor | None],
    gelu: bool,
    limit: float,
    experts: torch.Tensor,
    scales: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """See `gated_experts`, if `takes_hopper_kernel`.

    Args:
        x: [T, M]
        gate_up: [E * 2 I, M]
        down: [E * M, I]
        biases: [E, 2 I] and [E, M]; None: 0.
        gelu, limit: see `ExpertWeights`.
        experts: [T, k] int32, see `route`.
        scales: [T, k] float32.
        out: [k, T, M], buffer for the results.
    """
    (k, T, M), I = out.shape, down.shape[1]
    N, E = T * k, len(down) // M
    order, starts, rows, block_t = None, experts, x, 16
    if T > 1:
        order, starts = sort_pairs(experts, E)
        rows, block_t = rows_of_pairs(x, order, k), choose_rows(N, E)
    inner = torch.empty(N, I, dtype=x.dtype, device=x.device)
    common = {"K": k, "E": E, "E_PAD": next_power_of_2(E), "BLOCK_T": block_t, "ONE": T == 1}
    for source, weight, bias, outputs, into, gated in (
        (rows, gate_up, biases[0], I, inner, True),
        (inner, down, biases[1], M, out, False),
    ):
        parts = 1 if T == 1 and not gated else 2  # the fewer, the more programs have a tile
        matrix, words, constants = packed(weight)
        P, width = constants["P"], OUTPUTS if gated else OUTPUTS * parts
        columns = source.shape[1]
        _hopper_experts_kernel[(num_multiprocessors(x.device.index),)](
            tiles_of(source, block_t, P), matrix, words, bias, order, starts, scales, into, T,
            outputs, cdiv(outputs, width), cdiv(columns, COLUMNS), cdiv(columns, PLANES * P),
            2 * I if gated else M, I if gated else OUTPUTS, len(weight),
            TAIL=cdiv(columns % COLUMNS or COLUMNS, 2 * P), PARTS=parts, WIDTH=width,
            GATED=gated, GELU=gelu, LIMIT=limit, num_warps=4, **common, **constants,
            **ring_sizes(P, parts, block_t), **pdl_options(x),
        )  # fmt: skip
