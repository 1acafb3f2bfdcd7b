"""Integers of grids and blocks. Triton's functions of these names take 2 us a call."""


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The least power of two that is not below n, from 1 on."""
    return 1 << (n - 1).bit_length()
