"""Two features of Hopper and later GPUs.

*Programmatic dependent launch*: a kernel launched with `pdl_options()` is placed on the GPU as soon
as every program of its predecessor has called `launch_dependents` or ended. Its work before `wait`
(launch latency, reading weights) overlaps the predecessor. Two rules keep that correct (CUDA
Programming Guide, Programmatic Dependent Launch and Synchronization):

- every program calls `wait` on every path, so the end of a kernel implies the end of all before it;
- before `wait`, a program reads only memory that no kernel of the step writes: weights, metadata,
  and keys and values of earlier steps. Steps do not overlap, as each begins with kernels of PyTorch
  (the embedding), which are not placed before all others have ended.

*Tensor memory access* (TMA): given a descriptor of a matrix, the hardware copies whole tiles.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from nanovllm.utils.device import capability
from nanovllm.utils.integers import cdiv, next_power_of_2

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # a build without NVIDIA's part
    gdc_launch_dependents = gdc_wait = None


VERSION = tuple(map(int, triton.__version__.split(".")[:2]))  # version of Triton
TRITONS = (3, 6), (3, 9)  # first and last version whose Gluon, which changes, our kernels accept
TILE_ROWS = 128  # rows of activations in the largest tile
_AHEAD = tl.constexpr(256)  # weights of a row that are read before the wait (measured on an H200)

own_kernels = True  # False: kernels of all GPUs in place of those for Hopper, for tests
dependent_launch = True  # False runs kernels strictly one after another, for profiles and tests


@triton.jit
def launch_dependents(PDL: tl.constexpr):
    """Allow the next kernel to be placed on the GPU."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait(PDL: tl.constexpr):
    """Wait until the kernels before this one have ended and their writes are visible."""
    if PDL:
        gdc_wait()


@triton.jit
def prefetch_weights(ptr, n, begin, K, SPAN, BLOCK_N: tl.constexpr, PDL: tl.constexpr):
    """Prefetch into the L2 cache the first of SPAN weights from column `begin` on, for BLOCK_N rows
    from n on, of a matrix with K columns that no kernel of the step writes.
    """
    if PDL:
        PARTS: tl.constexpr = 128 // BLOCK_N  # one piece per thread
        SIZE: tl.constexpr = ptr.dtype.element_ty.primitive_bitwidth // 8
        i, width = tl.arange(0, BLOCK_N * PARTS), tl.minimum(SPAN, _AHEAD) // PARTS
        ptrs = ptr + (n + i // PARTS).to(tl.int64) * K + begin + i % PARTS * width
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;", "=r,l,r",
            [ptrs.to(tl.int64), width * SIZE], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


def pdl_options(x: torch.Tensor) -> dict[str, Any]:
    """Keyword arguments of a launch on x's device: the kernel's constant, and Triton's option."""
    on = dependent_launch and VERSION >= (3, 5) and x.is_cuda  # the functions of 3.4 do not compile
    if on and capability(x.device.index) >= (9, 0):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


def has_ptx(x: torch.Tensor) -> bool:
    """Whether x's device has the instructions of NVIDIA's GPUs."""
    return x.is_cuda and torch.version.hip is None


def has_own_kernels(x: torch.Tensor) -> bool:
    """Whether x's device can run the kernels for Hopper, whose warps are specialised."""
    known = own_kernels and TRITONS[0] <= VERSION <= TRITONS[1]
    return known and x.is_cuda and capability(x.device.index)[0] == 9


def has_room(x: torch.Tensor) -> bool:
    """Whether x's device has room for large tiles: 227 KiB of shared memory, and tensor cores that
    read operands from it. Others (8.x, 12.x, ROCm) hold operands in registers, and have 64 KiB or
    more.
    """
    return not x.is_cuda or capability(x.device.index)[0] in (9, 10)


def can_describe(x: torch.Tensor) -> bool:
    """Whether `describe` accepts the matrix x: its rows must begin at multiples of 16 bytes."""
    if not has_room(x):  # desktop GPUs (12.0) have TMA, but not the room for these tiles
        return False
    aligned = x.data_ptr() % 16 == 0 and x.stride(0) * x.element_size() % 16 == 0
    return x.stride(1) == 1 and aligned


def adjacent_rows(x: torch.Tensor) -> torch.Tensor:
    """The matrix x: [T, K], or a copy, whose memory depends on K alone: rows one after the other,
    the first at a multiple of 16 bytes. So `can_describe` says the same of all of them. (PyTorch
    calls a single row contiguous, whatever its stride is.)
    """
    x = x.contiguous().view(-1).view(x.shape)
    return x if x.data_ptr() % 16 == 0 else x.clone()


def spare_rows(
    num_rows: int, *shape: int, like: torch.Tensor, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """An uninitialised tensor [num_rows, *shape] with storage for more rows: up to the next power
    of two, or above TILE_ROWS to a multiple of that. So the tiles of `describe` are whole, which is
    faster than tiles that reach past the end (measured).
    """
    tile = min(TILE_ROWS, next_power_of_2(max(1, num_rows)))
    total = cdiv(num_rows, tile) * tile
    return torch.empty(total, *shape, dtype=dtype or like.dtype, device=like.device)[:num_rows]


def describe(x: torch.Tensor, rows: int, columns: int) -> Any:
    """A TMA descriptor of the matrix x for tiles of rows x columns. A tile may reach past x's last
    row: there it reads the rest of the same storage (never used), and 0 past the end of that.
    """
    wanted = cdiv(len(x), rows) * rows
    size = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
    there = (size - x.shape[1]) // x.stride(0) + 1
    shape = [min(wanted, there), x.shape[1]]
    return TensorDescriptor(x, shape, list(x.stride()), [rows, columns])


@triton.jit
def load_tile(
    source, row, end, col, COLS: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Load ROWS x WIDTH elements of a matrix with COLS columns and `end` rows; None: enough rows.
    With a descriptor (`TMA`), rows from `end` on are read, too.
    """
    if TMA:
        return source.load([row, col])
    else:
        rows, cols = row + tl.arange(0, ROWS), col + tl.arange(0, WIDTH)
        ptrs = source + rows.to(tl.int64)[:, None] * COLS + cols[None, :]
        if COLS % WIDTH > 0:
            return tl.load(ptrs, mask=(rows < end)[:, None] & (cols < COLS)[None, :], other=0.0)
        elif end is None:
            return tl.load(ptrs)
        else:
            return tl.load(ptrs, mask=(rows < end)[:, None], other=0.0)
