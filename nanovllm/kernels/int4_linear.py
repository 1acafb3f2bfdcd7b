"""Matrix products with weights in INT4 (`utils.int4`) and activations in 16 bits.

A single row is multiplied as it is, in float32, without tensor cores; few rows by tiles whose
weights are unpacked on their way from shared memory to tensor cores; many by the library, with
weights that are unpacked a part at a time (docs/experiments.md).

Letters: T rows, N outputs, K inputs, P columns of a plane.
"""

import functools
from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from nanovllm.kernels.activation import act_and_mul, activate_and_mul
from nanovllm.kernels.hopper import (
    TILE_ROWS,
    can_describe,
    describe,
    has_room,
    launch_dependents,
    load_tile,
    pdl_options,
    wait,
)
from nanovllm.kernels.linear import HALF, SPLITS, load_bias
from nanovllm.utils.device import MIN_CAPABILITY, capability
from nanovllm.utils.int4 import OFFSETS, PLANES, Int4Codes

MOST_ROWS = 256  # of a product by tiles
FEW_ROWS = 64  # up to which tiles have 64 outputs, and come by TMA
PROGRAMS = 128  # large tiles that run at once
UNPACKED = 2**24  # numbers that are unpacked at a time, for the library: they stay in the L2 cache
_BF16_OFFSET = tl.constexpr(OFFSETS[torch.bfloat16])
_FP16_OFFSET = tl.constexpr(OFFSETS[torch.float16])


def can_multiply(weight: Int4Codes, dtype: torch.dtype) -> bool:
    """Whether products of `dtype` with this weight run on its device."""
    device, (N, _) = weight.data.device, weight.shape
    if device.type == "cuda" and capability(device.index) < MIN_CAPABILITY:
        return False
    return dtype in HALF and weight.plane >= 16 and N % 16 == 0


@triton.jit
def _unpack(words, minus, ASM: tl.constexpr):
    """The four codes of each int16, the lowest first, less offset and zero point, which is exact.

    Args:
        words: int16.
        minus: `Int4Codes.scales` [..., 0], of the same shape, of 16 bits.
        ASM: by the instructions of NVIDIA GPUs: two codes at a time become the last bits of
            mantissas, which is a number that is too large by the offset.
    """
    if ASM and minus.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            """
            {
                .reg .b32 code, one;
                mov.b32 one, 0x3f803f80;
                lop3.b32 code, $4, 0x000f000f, 0x43004300, 0xea;
                fma.rn.bf16x2 $0, code, one, $5;
                shr.u32 code, $4, 4;
                lop3.b32 code, code, 0x000f000f, 0x43004300, 0xea;
                fma.rn.bf16x2 $1, code, one, $5;
                shr.u32 code, $4, 8;
                lop3.b32 code, code, 0x000f000f, 0x43004300, 0xea;
                fma.rn.bf16x2 $2, code, one, $5;
                shr.u32 code, $4, 12;
                lop3.b32 code, code, 0x000f000f, 0x43004300, 0xea;
                fma.rn.bf16x2 $3, code, one, $5;
            }
            """,
            "=&r,=&r,=&r,=&r,r,r", [words, minus],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    elif ASM:
        return tl.inline_asm_elementwise(
            """
            {
                .reg .b32 code;
                lop3.b32 code, $4, 0x000f000f, 0x64006400, 0xea;
                add.rn.f16x2 $0, code, $5;
                shr.u32 code, $4, 4;
                lop3.b32 code, code, 0x000f000f, 0x64006400, 0xea;
                add.rn.f16x2 $1, code, $5;
                shr.u32 code, $4, 8;
                lop3.b32 code, code, 0x000f000f, 0x64006400, 0xea;
                add.rn.f16x2 $2, code, $5;
                shr.u32 code, $4, 12;
                lop3.b32 code, code, 0x000f000f, 0x64006400, 0xea;
                add.rn.f16x2 $3, code, $5;
            }
            """,
            "=&r,=&r,=&r,=&r,r,r", [words, minus],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        OFFSET: tl.constexpr = _BF16_OFFSET if minus.dtype == tl.bfloat16 else _FP16_OFFSET
        lower = minus.to(tl.float32) + OFFSET
        a, b = _code(words, 0) + lower, _code(words, 1) + lower
        c, d = _code(words, 2) + lower, _code(words, 3) + lower
        return a.to(minus.dtype), b.to(minus.dtype), c.to(minus.dtype), d.to(minus.dtype)


@triton.jit
def _code(words, PLANE: tl.constexpr):
    return ((words.to(tl.int32) >> 4 * PLANE) & 15).to(tl.float32)


@triton.jit
def _unpack_wide(words, ASM: tl.constexpr):
    """The same as float32, too large by 256, 16, 256 and 16, which spares half of the shifts."""
    if ASM:
        return tl.inline_asm_elementwise(
            """
            {
                .reg .b32 word;
                shl.b32 word, $8, 15;
                lop3.b32 $0, word, 0x00078000, 0x43800000, 0xea;
                lop3.b32 $2, word, 0x00780000, 0x41800000, 0xea;
                shr.u32 word, $8, 1;
                lop3.b32 $1, word, 0x00078000, 0x43800000, 0xea;
                lop3.b32 $3, word, 0x00780000, 0x41800000, 0xea;
                shl.b32 word, $8, 7;
                lop3.b32 $4, word, 0x00078000, 0x43800000, 0xea;
                lop3.b32 $6, word, 0x00780000, 0x41800000, 0xea;
                shr.u32 word, $8, 9;
                lop3.b32 $5, word, 0x00078000, 0x43800000, 0xea;
                lop3.b32 $7, word, 0x00780000, 0x41800000, 0xea;
            }
            """,
            "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r", [words],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        even, odd = _code(words, 0) + 256, _code(words, 1) + 16
        return even, odd, _code(words, 2) + 256, _code(words, 3) + 16


@triton.jit
def _minus_of(word, DTYPE: tl.constexpr):
    return (word & 0xFFFF).to(tl.uint16).to(DTYPE, bitcast=True)


@triton.jit
def _scale_of(word, DTYPE: tl.constexpr):
    return ((word >> 16) & 0xFFFF).to(tl.uint16).to(DTYPE, bitcast=True)


@triton.jit
def _row_of(planes, ROWS: tl.constexpr, CHUNKS: tl.constexpr, P: tl.constexpr):
    """[ROWS, CHUNKS]: sums of each chunk's plane."""
    return tl.sum(tl.reshape(planes, [ROWS, CHUNKS, P]), 2)


@triton.jit
def _add_row(
    acc, words, xs, sums, words_ptr, chunk, mask, N,
    GROUP: tl.constexpr, P: tl.constexpr, BLOCK_N: tl.constexpr, CHUNKS: tl.constexpr,
    DTYPE: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """acc: [BLOCK_N, CHUNKS] plus what chunks of 4 P codes add to BLOCK_N outputs.

    Args:
        xs, sums: activations of each plane, and their sums over it.
        words_ptr: [BLOCK_N, 1], of scales.
        chunk: [CHUNKS], numbers of these chunks in the row.
    """
    parts = _unpack_wide(words, ASM)
    GROUPS: tl.constexpr = max(1, 4 * P // GROUP)  # of a chunk
    EACH: tl.constexpr = 4 // GROUPS
    OFFSET: tl.constexpr = _BF16_OFFSET if tl.bfloat16 == DTYPE else _FP16_OFFSET
    for i in tl.static_range(GROUPS):
        group = (chunk * (4 * P) + i * EACH * P) // GROUP
        word = tl.load(words_ptr + group[None, :] * N, mask=mask, other=0)
        minus = _minus_of(word, DTYPE).to(tl.float32) + OFFSET  # the zero point
        product = parts[i * EACH] * xs[i * EACH][None, :]
        for j in tl.static_range(1, EACH):
            product += parts[i * EACH + j] * xs[i * EACH + j][None, :]
        total = _row_of(product, BLOCK_N, CHUNKS, P)
        for j in tl.static_range(EACH):
            lower = minus - (256 if (i * EACH + j) % 2 == 0 else 16)
            total += lower * sums[i * EACH + j]
        acc += total * _scale_of(word, DTYPE).to(tl.float32)
    return acc


@triton.jit
def _int4_row_kernel(
    x_ptr, weight_ptr, words_ptr, bias_ptr, out_ptr,
    N: tl.constexpr, K: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr,
    GROUP: tl.constexpr, P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # One program: BLOCK_N outputs of the only row. Its first weights are read before the wait.
    launch_dependents(PDL)
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    CHUNKS: tl.constexpr = BLOCK_K // (4 * P)
    STRIDE: tl.constexpr = 2 * N if GATED else N  # of scales
    n, c = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, CHUNKS)
    q = tl.arange(0, BLOCK_K // 4)
    k = q // P * (4 * P) + q % P
    weight_ptrs = weight_ptr + n.to(tl.int64)[:, None] * (K // 4) + q[None, :]
    mask = (n < N)[:, None] & (q < K // 4)[None, :]
    weight = tl.load(weight_ptrs, mask=mask, other=0)
    acc = tl.zeros([BLOCK_N, CHUNKS], tl.float32)
    if GATED:
        up_weight = tl.load(weight_ptrs + N * (K // 4), mask=mask, other=0)
        up_acc = acc
        up_bias = load_bias(bias_ptr, N + n, n < N)
    bias = load_bias(bias_ptr, n, n < N)
    wait(PDL)
    for start in tl.static_range(0, K, BLOCK_K):
        if start > 0:
            mask = (n < N)[:, None] & (start // 4 + q < K // 4)[None, :]
            weight = tl.load(weight_ptrs + start // 4, mask=mask, other=0)
            if GATED:
                up_weight = tl.load(weight_ptrs + N * (K // 4) + start // 4, mask=mask, other=0)
        inside, ptrs = start + k < K, x_ptr + start + k
        x0 = tl.load(ptrs, mask=inside, other=0.0).to(tl.float32)
        x1 = tl.load(ptrs + P, mask=inside, other=0.0).to(tl.float32)
        x2 = tl.load(ptrs + 2 * P, mask=inside, other=0.0).to(tl.float32)
        x3 = tl.load(ptrs + 3 * P, mask=inside, other=0.0).to(tl.float32)
        xs = x0, x1, x2, x3
        sums = (
            _row_of(x0, 1, CHUNKS, P), _row_of(x1, 1, CHUNKS, P),
            _row_of(x2, 1, CHUNKS, P), _row_of(x3, 1, CHUNKS, P),
        )  # fmt: skip
        chunk = start // (4 * P) + c
        mask = (n < N)[:, None] & (chunk * (4 * P) < K)[None, :]
        acc = _add_row(
            acc, weight, xs, sums, words_ptr + n[:, None], chunk, mask, STRIDE,
            GROUP, P, BLOCK_N, CHUNKS, DTYPE, ASM,
        )  # fmt: skip
        if GATED:
            up_acc = _add_row(
                up_acc, up_weight, xs, sums, words_ptr + N + n[:, None], chunk, mask, STRIDE,
                GROUP, P, BLOCK_N, CHUNKS, DTYPE, ASM,
            )  # fmt: skip
    out = tl.sum(acc, 1) + bias
    if GATED:
        out = activate_and_mul(out, tl.sum(up_acc, 1) + up_bias, GELU, 0)
    tl.store(out_ptr + n, out.to(DTYPE), mask=n < N)


@triton.jit(do_not_specialize=["T"])
def _int4_tiles_kernel(
    x, weight, words_ptr, bias_ptr, out_ptr, T, N, K: tl.constexpr, SPAN,
    GROUP: tl.constexpr, P: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
    BF16: tl.constexpr, TMA: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # One program: BLOCK_N outputs of BLOCK_T rows, summed over SPAN chunks of 4 P inputs. The
    # weights are the left operand, which tensor cores take from registers. Programs of the same
    # weights are neighbours, so one of them reads these from memory.
    launch_dependents(PDL)
    DTYPE: tl.constexpr = tl.bfloat16 if BF16 else tl.float16
    GROUPS: tl.constexpr = max(1, 4 * P // GROUP)  # of a chunk
    EACH: tl.constexpr = 4 // GROUPS
    t, n, split = tl.program_id(0) * BLOCK_T, tl.program_id(1) * BLOCK_N, tl.program_id(2)
    rows, outputs = t + tl.arange(0, BLOCK_T), n + tl.arange(0, BLOCK_N)
    acc = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    wait(PDL)
    for chunk in range(split * SPAN, (split + 1) * SPAN):
        packed = load_tile(weight, n, N, chunk * P, K // 4, BLOCK_N, P, TMA)
        for i in tl.static_range(GROUPS):
            group = (chunk * (4 * P) + i * EACH * P) // GROUP
            word = tl.load(words_ptr + group * N + outputs)
            minus, codes = tl.broadcast(_minus_of(word, DTYPE)[:, None], packed)
            parts = _unpack(codes, minus, ASM)
            scale = _scale_of(word, DTYPE)[:, None]
            for j in tl.static_range(EACH):
                k = chunk * (4 * P) + (i * EACH + j) * P
                part = load_tile(x, t, T, k, K, BLOCK_T, P, TMA)
                acc = tl.dot(parts[i * EACH + j] * scale, part.T, acc)
    if bias_ptr is not None:  # a summand of the first part
        bias = tl.load(bias_ptr + outputs).to(tl.float32)
        acc += tl.where(split == 0, bias, 0.0)[:, None]
    out_ptrs = out_ptr + (split * T + rows[None, :]).to(tl.int64) * N + outputs[:, None]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=rows[None, :] < T)


@triton.jit
def _int4_numbers_kernel(
    weight_ptr, words_ptr, out_ptr, N, K: tl.constexpr, GROUP: tl.constexpr, P: tl.constexpr,
    BLOCK_N: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # One program: 4 P columns of BLOCK_N rows; words_ptr has N in all.
    launch_dependents(PDL)
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    GROUPS: tl.constexpr = max(1, 4 * P // GROUP)
    EACH: tl.constexpr = 4 // GROUPS
    chunk = tl.program_id(1)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N).to(tl.int64)
    q = tl.arange(0, P)
    packed = tl.load(weight_ptr + n[:, None] * (K // 4) + chunk * P + q[None, :])
    wait(PDL)
    for i in tl.static_range(GROUPS):
        group = (chunk * (4 * P) + i * EACH * P) // GROUP
        word = tl.load(words_ptr + group * N + n)
        minus, codes = tl.broadcast(_minus_of(word, DTYPE)[:, None], packed)
        parts = _unpack(codes, minus, ASM)
        for j in tl.static_range(EACH):
            number = parts[i * EACH + j] * _scale_of(word, DTYPE)[:, None]
            k = chunk * (4 * P) + (i * EACH + j) * P + q
            tl.store(out_ptr + n[:, None] * K + k[None, :], number)


def one_row(
    x: torch.Tensor,
    weight: Int4Codes,
    bias: torch.Tensor | None,
    *,
    gated: bool = False,
    gelu: bool = False,
) -> torch.Tensor:
    """The product of a single row, x: [1, K], with weight: [N, K]; if `gated`, N is of gate and up.

    Returns:
        [1, N], if `gated` of half as many.
    """
    N, K = weight.shape
    if gated:
        N //= 2
    # 32,768 codes for each program at a time; measured on an H200.
    BLOCK_K = min(4096, triton.next_power_of_2(K))
    BLOCK_N = min(16, 32768 // BLOCK_K) // (2 if gated else 1)
    out = torch.empty(1, N, dtype=x.dtype, device=x.device)
    _int4_row_kernel[(triton.cdiv(N, BLOCK_N),)](
        x, weight.data, weight.scales.view(torch.int32), bias, out, N=N, K=K, GATED=gated,
        GELU=gelu, GROUP=weight.group, P=weight.plane, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K,
        ASM=x.is_cuda, num_warps=4, **pdl_options(x),
    )  # fmt: skip
    return out


class Tiles(NamedTuple):
    """How `_int4_tiles_kernel` divides a product."""

    block_t: int
    block_n: int
    splits: int
    warps: int
    stages: int


def choose_tiles(T: int, N: int, K: int, P: int, partial: bool, room: bool) -> Tiles | None:
    """Tiles for T rows, or None where the library is faster (measured on an H200).

    Args:
        N, K: of the weight.
        partial: whether partial results are welcome.
        room: see `has_room`.
    """
    if T <= FEW_ROWS or not room:
        block_t = max(16, min(FEW_ROWS, triton.next_power_of_2(T)))
        tiles = Tiles(block_t, 64, 1, 4, 4 if block_t <= 32 and room else 2)
        programs_at_once = 4 * PROGRAMS
    else:
        tiles = Tiles(TILE_ROWS, 128, 1, 8, 3)
        programs_at_once = PROGRAMS
    if T > MOST_ROWS or N % tiles.block_n:
        return None
    programs, splits = N // tiles.block_n * triton.cdiv(T, tiles.block_t), 1
    while (
        partial
        and splits < SPLITS[-1]
        and K % (2 * splits * PLANES * P) == 0
        and 2 * splits * programs <= programs_at_once
    ):
        splits *= 2
    return tiles._replace(splits=splits)


def _by_tiles(
    x: torch.Tensor, weight: Int4Codes, bias: torch.Tensor | None, tiles: Tiles
) -> torch.Tensor:
    """[S, T, N] float32 for S splits; [T, N] for one."""
    T, (N, K), P, S = len(x), weight.shape, weight.plane, tiles.splits
    shape, dtype = ((S, T, N), torch.float32) if S > 1 else ((T, N), x.dtype)
    out = torch.empty(shape, dtype=dtype, device=x.device)
    tma = tiles.block_n == 64 and can_describe(x) and can_describe(weight.data)
    _int4_tiles_kernel[(triton.cdiv(T, tiles.block_t), N // tiles.block_n, S)](
        describe(x, tiles.block_t, P) if tma else x.contiguous(),
        describe(weight.data, tiles.block_n, P) if tma else weight.data,
        weight.scales.view(torch.int32), bias, out, T, N, K, K // (PLANES * P) // S,
        GROUP=weight.group, P=P, BLOCK_T=tiles.block_t, BLOCK_N=tiles.block_n,
        BF16=x.dtype == torch.bfloat16, TMA=tma, ASM=x.is_cuda,
        num_warps=tiles.warps, num_stages=tiles.stages, **pdl_options(x),
    )  # fmt: skip
    return out


def linear(
    x: torch.Tensor,
    weight: Int4Codes,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    partial: bool = False,
) -> torch.Tensor:
    """`x @ weight.T + bias`.

    Args:
        x: [T, K], of `dtype`.
        weight: [N, K], for which `can_multiply`.
        dtype: of results.
        bias: [N], None for 0.
        partial: allow a result whose sum is left to the caller.

    Returns:
        [T, N]; or [S, T, N] float32, to be summed over S, if `partial` and that is faster.
    """
    T, (N, K) = len(x), weight.shape
    if T == 1:
        return one_row(x, weight, bias)
    tiles = choose_tiles(T, N, K, weight.plane, partial, has_room(x))
    if tiles is not None:
        return _by_tiles(x, weight, bias, tiles)
    out = torch.empty(T, N, dtype=dtype, device=x.device)
    multiply_into(out, x, weight, bias)
    return out


def gated_linear(
    x: torch.Tensor,
    weight: Int4Codes,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    gelu: bool = False,
    x_block: int | None = None,
) -> torch.Tensor:
    """`act(gate) * up`, as `kernels.linear.gated_linear`: [T, N / 2]."""
    assert x_block is None, "INT4 takes activations in 16 bits"
    if len(x) == 1:
        return one_row(x, weight, bias, gated=True, gelu=gelu)
    return act_and_mul(linear(x, weight, dtype, bias), gelu)


def multiply_into(
    out: torch.Tensor, x: torch.Tensor, weight: Int4Codes, bias: torch.Tensor | None
) -> None:
    """`linear` of many rows into `out`: [T, N], by the library, a part of the weight at a time."""
    N, K = weight.shape
    step = max(16, UNPACKED // K // 16 * 16)
    numbers = torch.empty(min(step, N), K, dtype=out.dtype, device=out.device)
    for begin in range(0, N, step):
        end = min(begin + step, N)
        part, into = unpacked(weight, begin, end, numbers).T, out[:, begin:end]
        if bias is None:
            torch.mm(x, part, out=into)
        else:
            torch.addmm(bias[begin:end], x, part, out=into)


def unpacked(weight: Int4Codes, begin: int, end: int, out: torch.Tensor) -> torch.Tensor:
    """The numbers of these rows, a multiple of 16, in the first ones of `out`."""
    (N, K), P = weight.shape, weight.plane
    words = weight.scales.view(torch.int32)
    _int4_numbers_kernel[((end - begin) // 16, K // (PLANES * P))](
        weight.data[begin:], words[:, begin:], out, N,
        K=K, GROUP=weight.group, P=P, BLOCK_N=16, ASM=out.is_cuda, num_warps=4, **pdl_options(out),
    )  # fmt: skip
    return out[: end - begin]


def variants(
    weight: Int4Codes,
    dtype: torch.dtype,
    bias: torch.Tensor | None,
    partial: bool,
    gated: bool,
    gelu: bool,
    x_block: int | None,
) -> dict[Hashable, Callable[[], object]]:
    """As `kernels.linear.variants`, of products with `weight`."""
    (N, K), device = weight.shape, weight.data.device

    def multiply(T: int) -> None:
        x = torch.zeros(T, K, dtype=dtype, device=device)
        if gated:
            gated_linear(x, weight, dtype, bias, gelu)
        else:
            linear(x, weight, dtype, bias, partial)

    of = Int4Codes, weight.group, K, bias is not None
    calls: dict[Hashable, Callable[[], object]] = {
        (of, N, gated): functools.partial(multiply, 1),
        (of, "many"): functools.partial(multiply, 2 * MOST_ROWS),
    }
    room = has_room(weight.data)
    for T in (16, 32, 64, 128, MOST_ROWS):
        if tiles := choose_tiles(T, N, K, weight.plane, partial, room):
            key = tiles._replace(splits=min(2, tiles.splits))
            calls[of, key] = functools.partial(multiply, T)
    return calls
