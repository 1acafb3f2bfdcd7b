"""INT4 weights (`tensors.int4`) on their way to products: as values of 16 bits, or as integers.

Letters: N rows, K columns, P columns of a plane.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.device_features import has_ptx, launch_dependents, pdl_options, wait
from nanovllm.tensors.int4 import OFFSETS, PLANES, SHIFTS, Int4Codes

ROWS = 16  # per program of `_numbers_kernel`
_BF16_OFFSET = tl.constexpr(OFFSETS[torch.bfloat16])
_FP16_OFFSET = tl.constexpr(OFFSETS[torch.float16])
_FIRST, _SECOND, _THIRD, _FOURTH = (tl.constexpr(shift) for shift in SHIFTS)


def _unpacking(first: int, exponent: int, add: str) -> tl.constexpr:
    """Instructions that unpack two codes (of two int16s) at a time: with an exponent before them,
    they are the last bits of a mantissa, and the value is too large by the offset.
    """
    steps = "".join(
        f"shr.u32 code, $2, {first + 8 * plane};"
        f"lop3.b32 code, code, 0x000f000f, {exponent:#x}, 0xea;"
        f"{add.format(plane=plane)};"
        for plane in range(2)
    )
    return tl.constexpr(f"{{ .reg .b32 code, one; mov.b32 one, 0x3f803f80; {steps} }}")


# An addition in bfloat16 is a product by 1 and an addition, for GPUs before Hopper.
_BF16_ADD, _FP16_ADD = "fma.rn.bf16x2 ${plane}, code, one, $3", "add.rn.f16x2 ${plane}, code, $3"
_BF16_LOWER = _unpacking(0, 0x43004300, _BF16_ADD)
_BF16_UPPER = _unpacking(4, 0x43004300, _BF16_ADD)
_FP16_LOWER = _unpacking(0, 0x64006400, _FP16_ADD)
_FP16_UPPER = _unpacking(4, 0x64006400, _FP16_ADD)


@triton.jit
def offset_of(DTYPE: tl.constexpr):
    """The offset of a dtype, see `OFFSETS`."""
    return _BF16_OFFSET if DTYPE.is_bf16() else _FP16_OFFSET


@triton.jit
def halves(word, DTYPE: tl.constexpr):
    """The two values of 16 bits in an int32, the lower first: for `Int4Codes.scales`, minus offset
    and zero point, and the scale.
    """
    lower = (word & 0xFFFF).to(tl.uint16).to(DTYPE, bitcast=True)
    return lower, ((word >> 16) & 0xFFFF).to(tl.uint16).to(DTYPE, bitcast=True)


@triton.jit
def unpack_pair(packed, word, UPPER: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """The values of two planes, the first two or (UPPER) the others, rounded to 16 bits: [N, P]
    each.

    Args:
        packed: [N, P] int16.
        word: [N], word with each row's scale (see `halves`).
        ASM: whether to use instructions of NVIDIA GPUs.
    """
    minus, scale = halves(word, DTYPE)
    minus, packed = tl.broadcast(minus[:, None], packed)
    first, second = _codes_of_pair(packed, minus, UPPER, ASM)
    return first * scale[:, None], second * scale[:, None]


@triton.jit
def _codes_of_pair(words, minus, UPPER: tl.constexpr, ASM: tl.constexpr):
    """Codes minus zero point, exactly, in the dtype of `minus`."""
    if ASM and minus.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            _BF16_UPPER if UPPER else _BF16_LOWER, "=&r,=&r,r,r", [words, minus],
            dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    elif ASM:
        return tl.inline_asm_elementwise(
            _FP16_UPPER if UPPER else _FP16_LOWER, "=&r,=&r,r,r", [words, minus],
            dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        less = minus.to(tl.float32) + offset_of(minus.dtype)
        first = _code(words, _THIRD if UPPER else _FIRST) + less
        second = _code(words, _FOURTH if UPPER else _SECOND) + less
        return first.to(minus.dtype), second.to(minus.dtype)


@triton.jit
def _code(words, SHIFT: tl.constexpr):
    return ((words.to(tl.int32) >> SHIFT) & 15).to(tl.float32)


@triton.jit
def in_bytes(a, b, c, d, ASM: tl.constexpr):
    """The upper bytes of four int16s, each in an int32, as one int32; and the lower ones."""
    if ASM:
        return tl.inline_asm_elementwise(
            """
            {
                .reg .b32 first, last;
                prmt.b32 first, $2, $3, 0x5410;
                prmt.b32 last, $4, $5, 0x5410;
                prmt.b32 $0, first, last, 0x7531;
                prmt.b32 $1, first, last, 0x6420;
            }
            """,
            "=&r,=&r,r,r,r,r", [a, b, c, d], dtype=(tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        lower = (a & 255) | (b & 255) << 8 | (c & 255) << 16 | (d & 255) << 24
        a, b, c, d = a >> 8, b >> 8, c >> 8, d >> 8
        return (a & 255) | (b & 255) << 8 | (c & 255) << 16 | (d & 255) << 24, lower


@triton.jit
def dot_planes(words, upper, lower, UPPER: tl.constexpr, ASM: tl.constexpr):
    """The sums of four products, exact in int32: codes of two planes, each of two columns, in an
    int32, by four int16s, given by their bytes.
    """
    if UPPER:
        codes = (words >> 4) & 0x0F0F0F0F
    else:
        codes = words & 0x0F0F0F0F
    if ASM:
        return tl.inline_asm_elementwise(
            """
            dp4a.u32.s32 $0, $1, $2, 0;
            shl.b32 $0, $0, 8;
            dp4a.u32.u32 $0, $1, $3, $0;
            """,
            "=&r,r,r,r", [codes, upper, lower], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        total = codes * 0
        for i in tl.static_range(4):
            # An arithmetic shift keeps the sign of the upper byte.
            x = ((upper << (24 - 8 * i)) >> 24) * 256 + ((lower >> 8 * i) & 255)
            total += ((codes >> 8 * i) & 15) * x
        return total


@triton.jit
def _numbers_kernel(
    weight_ptr, words_ptr, out_ptr, N, K: tl.constexpr, GROUP: tl.constexpr, P: tl.constexpr,
    BLOCK_N: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # One program: 4 P columns of BLOCK_N rows; words_ptr has N words per group.
    launch_dependents(PDL)
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    chunk = tl.program_id(1)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N).to(tl.int64)
    q = tl.arange(0, P)
    packed = tl.load(weight_ptr + n[:, None] * (K // 4) + chunk * P + q[None, :])
    wait(PDL)
    for half in tl.static_range(2):
        k = chunk * (4 * P) + half * 2 * P
        word = tl.load(words_ptr + k // GROUP * N + n)
        first, second = unpack_pair(packed, word, half == 1, DTYPE, ASM)
        ptrs = out_ptr + n[:, None] * K + k + q[None, :]
        tl.store(ptrs, first)
        tl.store(ptrs + P, second)


def numbers_of(weight: Int4Codes, dtype: torch.dtype, begin: int, end: int) -> torch.Tensor:
    """The values of rows `begin` to `end`, a multiple of 16, rounded to the 16 bits of `dtype`."""
    (N, K), P = weight.shape, weight.plane
    out = torch.empty(end - begin, K, dtype=dtype, device=weight.data.device)
    words = weight.scales.view(torch.int32)
    _numbers_kernel[((end - begin) // ROWS, K // (PLANES * P))](
        weight.data[begin:], words[:, begin:], out, N,
        K=K, GROUP=weight.group, P=P, BLOCK_N=ROWS, ASM=has_ptx(out), num_warps=4,
        **pdl_options(out),
    )  # fmt: skip
    return out
