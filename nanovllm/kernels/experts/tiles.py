"""The tiles of products of experts."""

from typing import NamedTuple

import torch

from nanovllm.kernels.device_features import has_room
from nanovllm.kernels.products.linear import HALF


class Tiles(NamedTuple):
    """The tiles of the products by `grouped.py`: `block_t` rows by `block_i` inner columns, or by
    `block_m` outputs, summed over `block_k` inputs at a time. If `left`, the weights are the left
    operand: it has the 64 rows that tensor cores need, however few the other has.
    """

    block_t: int
    block_i: int
    block_m: int
    block_k: int
    warps: int
    stages: int
    left: bool


# Measured on an H200, with the shapes of Qwen3-30B-A3B and gpt-oss-20b.
FEW = Tiles(16, 64, 128, 128, warps=4, stages=3, left=True)
SOME = Tiles(32, 128, 128, 64, warps=4, stages=3, left=True)
MORE = Tiles(64, 64, 128, 64, warps=4, stages=4, left=False)
MANY = Tiles(128, 128, 256, 64, warps=8, stages=4, left=False)
MOST = {8: FEW, 16: SOME, 48: MORE}  # pairs per expert up to which these tiles are the fastest
# The same for codes that are converted for each tile of rows, so larger tiles pay earlier.
MAX_OF_CODES = {
    8: FEW._replace(stages=4),
    24: SOME._replace(block_i=64, block_k=128),
    96: MORE._replace(left=True),
}
MANY_OF_CODES = MANY._replace(block_m=128)
# The same for products of codes by codes; sums of products that are scaled take more registers.
MAX_IN_8_BITS = {
    16: Tiles(16, 64, 128, 128, warps=4, stages=4, left=True),
    40: Tiles(32, 64, 128, 128, warps=4, stages=4, left=True),
    96: Tiles(64, 64, 128, 128, warps=4, stages=4, left=True),
}
MANY_IN_8_BITS = Tiles(128, 128, 128, 128, warps=8, stages=4, left=False)
MANY_BY_BLOCKS = MANY_IN_8_BITS._replace(block_i=64)
# The same for weights in 4 bits, measured on an H100: unpacked for each tile of rows, whose chunks
# of columns have a size of their own; of the larger ones a stage less is loaded ahead.
MAX_OF_4_BITS = {
    12: Tiles(16, 64, 64, 0, warps=4, stages=4, left=True),
    24: Tiles(32, 64, 64, 0, warps=4, stages=4, left=True),
}
MANY_OF_4_BITS = Tiles(64, 64, 64, 0, warps=4, stages=3, left=True)
# For 64 KiB of shared memory: for few pairs, and for many.
LITTLE_ROOM = (
    Tiles(16, 64, 64, 64, warps=4, stages=2, left=True),
    Tiles(64, 64, 64, 64, warps=4, stages=2, left=False),
)


def choose_tiles(
    N: int,
    E: int,
    x: torch.Tensor,
    weight_bits: int = 16,
    bits: int = 16,
    by_blocks: bool = False,
    plane: int = 0,
) -> Tiles:
    """Choose tiles for N pairs of E experts, in x's dtype and on its device.

    Args:
        weight_bits: bits of a weight.
        bits: bits of an activation in the products.
        by_blocks: whether scales of activations are of blocks of columns, not of whole rows.
        plane: columns of a plane of packed weights; 0 of others.
    """
    if x.dtype not in HALF or not has_room(x):
        tiles = LITTLE_ROOM[N > 8 * E]
        return tiles if x.dtype in HALF else tiles._replace(block_k=32, warps=8)
    most, many = {
        (16, 16): (MOST, MANY),
        (8, 16): (MAX_OF_CODES, MANY_OF_CODES),
        (8, 8): (MAX_IN_8_BITS, MANY_BY_BLOCKS if by_blocks else MANY_IN_8_BITS),
        (4, 16): (MAX_OF_4_BITS, MANY_OF_4_BITS),
    }[weight_bits, bits]
    tiles = next((tiles for pairs, tiles in most.items() if pairs * E >= N), many)
    return tiles._replace(stages=tiles.stages - 1) if plane == 64 else tiles


def choose_rows(N: int, E: int) -> int:
    """The rows of a tile of `hopper_experts`, for N pairs of E experts: the fewest with which most
    experts have no second tile, which would read their weights again; and of many pairs all that
    there is room for (measured on an H100).
    """
    return next((rows for rows, pairs in ((32, 24), (64, 128)) if pairs * E >= N), 128)
