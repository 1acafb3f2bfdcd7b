"""Integer arithmetic for grids and blocks. Triton's functions of these names need 2 us a call."""


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The least power of two that is at least n, from 1 up."""
    return 1 << (n - 1).bit_length()
