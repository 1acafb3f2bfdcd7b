"""MXFP4 weights (`tensors.mxfp4`) on their way to products, as values of bfloat16.

The bits of a code, in the places of a bfloat16's sign, last bits of the exponent and first bit of
the mantissa, are its value times 2^-126, also where that is subnormal. So the product with 2^126
times the power of two of the block is exact.
"""

import triton
import triton.language as tl

from nanovllm.tensors.int4 import SHIFTS

_FIRST, _SECOND, _THIRD, _FOURTH = (tl.constexpr(shift) for shift in SHIFTS)


def _unpacking(first: int) -> tl.constexpr:
    """Instructions that unpack two planes' codes of two int16s at a time, each plane by its power
    of two.
    """
    steps = "".join(
        f"{_shift(first + 8 * plane, 6)} lop3.b32 bits, moved, 0x01c001c0, 0, 0xc0;"
        f"{_shift(first + 8 * plane, 12)} lop3.b32 bits, moved, 0x80008000, bits, 0xea;"
        f"fma.rn.bf16x2 ${plane}, bits, ${3 + plane}, zero;"
        for plane in range(2)
    )
    return tl.constexpr(f"{{ .reg .b32 bits, moved, zero; mov.b32 zero, 0x80008000; {steps} }}")


def _shift(first: int, target: int) -> str:
    """Move a code's lowest bit to a place."""
    name, by = ("shl", target - first) if first <= target else ("shr.u32", first - target)
    return f"{name}{'.b32' if name == 'shl' else ''} moved, $2, {by};"


_LOWER, _UPPER = _unpacking(0), _unpacking(4)


@triton.jit
def unpack_pair(packed, word, UPPER: tl.constexpr, ASM: tl.constexpr):
    """The values of two planes, the first two or (UPPER) the others: [N, P] bfloat16 each.

    Args:
        packed: [N, P] int16.
        word: [N] int32, the exponents of each row's four planes, at most `MAX_EXPONENT`.
        ASM: whether to use instructions of NVIDIA GPUs.
    """
    if UPPER:
        word = word >> 16
    first_power, packed = tl.broadcast(_power(word)[:, None], packed)
    second_power, packed = tl.broadcast(_power(word >> 8)[:, None], packed)
    if ASM:
        return tl.inline_asm_elementwise(
            _UPPER if UPPER else _LOWER, "=&r,=&r,r,r,r", [packed, first_power, second_power],
            dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        first = _value(packed, _THIRD if UPPER else _FIRST)
        second = _value(packed, _FOURTH if UPPER else _SECOND)
        first *= first_power.to(tl.float32) * 2.0**-126
        second *= second_power.to(tl.float32) * 2.0**-126
        return first.to(tl.bfloat16), second.to(tl.bfloat16)


@triton.jit
def _power(word):
    """2^126 times the power of two whose exponent is a word's lowest byte: it has this exponent in
    bfloat16, whose bias is 127.
    """
    return (((word & 255) + 126) << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _value(words, SHIFT: tl.constexpr):
    """The values of codes, without powers of two: float32."""
    code = words.to(tl.int32) >> SHIFT
    exponent, half = (code >> 1) & 3, (code & 1).to(tl.float32) * 0.5
    value = tl.where(exponent == 0, half, (1.0 + half) * tl.exp2((exponent - 1).to(tl.float32)))
    return tl.where((code & 8) > 0, -value, value)
