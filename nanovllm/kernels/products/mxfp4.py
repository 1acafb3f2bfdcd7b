"""MXFP4 weights (`tensors.mxfp4`) on their way to products, as values of bfloat16.

The bits of a code, in the places of a bfloat16's sign, last bits of the exponent and first bit of
the mantissa, are its value times 2^-126, also where that is subnormal. So the product with 2^126
times the power of two of the block is exact.
"""

import triton
import triton.language as tl

from nanovllm.tensors.mxfp4 import PLACES

_PLACES = tl.constexpr(PLACES)
_POWER = tl.constexpr(0x00800080)  # times an exponent of bfloat16: the power of two, twice


def _moves(plane: int) -> dict[int, int]:
    """The shifts of a plane's code bits up to their places in a bfloat16, and their masks there."""
    moves: dict[int, int] = {}
    for mask, shift in PLACES[plane]:
        for bit in (bit for bit in range(4) if mask >> bit & 1):
            place = 15 if bit == 3 else 6 + bit
            by = place - bit - shift
            moves[by] = moves.get(by, 0) | 1 << place
    return moves


def _unpacking(upper: bool) -> tl.constexpr:
    """Instructions that unpack two planes' codes of two int16s at a time, each plane by its power
    of two.
    """
    steps = ""
    for i in range(2):
        above = "0, 0xc0"  # of bits, nothing yet
        for by, mask in _moves(2 * upper + i).items():
            shift = f"shl.b32 moved, $2, {by};" if by >= 0 else f"shr.b32 moved, $2, {-by};"
            steps += f"{shift} lop3.b32 bits, moved, {mask * 0x10001:#x}, {above};"
            above = "bits, 0xea"
        steps += f"fma.rn.bf16x2 ${i}, bits, ${3 + 2 * i}, zero;"
    return tl.constexpr(f"{{ .reg .b32 bits, moved, zero; mov.b32 zero, 0x80008000; {steps} }}")


_LOWER, _UPPER = _unpacking(False), _unpacking(True)


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
            _UPPER if UPPER else _LOWER, "=&r,=&r,r,r,r,r,r", [packed, first_power, second_power],
            dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        first = _value(packed, 2 if UPPER else 0) * _unscaled(first_power)
        second = _value(packed, 3 if UPPER else 1) * _unscaled(second_power)
        return first.to(tl.bfloat16), second.to(tl.bfloat16)


@triton.jit
def _power(word):
    """2^126 times the power of two whose exponent is a word's lowest byte, in bfloat16, whose bias
    is 127: twice in an int32.
    """
    return (word & 255) * _POWER + 126 * _POWER


@triton.jit
def _unscaled(power):
    """The power of two that `_power` has, without the 2^126: float32."""
    return power.to(tl.int16).to(tl.bfloat16, bitcast=True).to(tl.float32) * 2.0**-126


@triton.jit
def _value(words, PLANE: tl.constexpr):
    """The values of codes, without powers of two: float32."""
    words = words.to(tl.int32)
    code = (words >> _PLACES[PLANE][0][1]) & _PLACES[PLANE][0][0]
    code |= (words >> _PLACES[PLANE][1][1]) & _PLACES[PLANE][1][0]
    exponent, half = (code >> 1) & 3, (code & 1).to(tl.float32) * 0.5
    value = tl.where(exponent == 0, half, (1.0 + half) * tl.exp2((exponent - 1).to(tl.float32)))
    return tl.where((code & 8) > 0, -value, value)
