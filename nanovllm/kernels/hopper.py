"""What Hopper GPUs and later ones add, where Triton offers it; elsewhere kernels do without.

*Programmatic dependent launch*: a kernel launched with `pdl_options()` is placed on the GPU as
soon as every program of its predecessor has called `launch_dependents` or ended. What it does
before `wait` (launch latency, reading weights) then costs no time of its own. The rules that keep
it correct (CUDA Programming Guide, Programmatic Dependent Launch and Synchronization):

- every program calls `wait`, on every path, so that a kernel that has ended implies that all
  before it have;
- before `wait` it reads only what no kernel of the step writes: weights, and the step's metadata.

*Tensor memory access*: a descriptor of a matrix lets the hardware copy whole tiles of it.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from nanovllm.utils.device import capability

try:  # Triton 3.4
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:
    gdc_launch_dependents = gdc_wait = TensorDescriptor = None


TILE_ROWS = 128  # of activations, in the largest tile

dependent_launch = True  # False: one kernel after the other, for profiles and tests


@triton.jit
def launch_dependents(PDL: tl.constexpr):
    """Let the next kernel start."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait(PDL: tl.constexpr):
    """Wait until the kernels before this one have ended and their writes can be seen."""
    if PDL:
        gdc_wait()


def pdl_options(x: torch.Tensor) -> dict[str, Any]:
    """Keyword arguments of a launch on the device of x: the kernel's PDL constant, and Triton's
    launch option.
    """
    on = dependent_launch and gdc_wait is not None and x.is_cuda
    if on and capability(x.device.index) >= (9, 0):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


def has_room(x: torch.Tensor) -> bool:
    """Whether the device of x is made for large tiles: 227 KiB of shared memory, from which tensor
    cores read. On others (8.x, 12.x, ROCm) a tile takes more registers, and may have 64 KiB.
    """
    return not x.is_cuda or capability(x.device.index)[0] in (9, 10)


def can_describe(x: torch.Tensor) -> bool:
    """Whether `describe` takes the matrix x: rows that begin at multiples of 16 bytes."""
    if not has_room(x):  # desktop GPUs (12.0) have descriptors too
        return False
    aligned = x.data_ptr() % 16 == 0 and x.stride(0) * x.element_size() % 16 == 0
    return TensorDescriptor is not None and x.stride(1) == 1 and aligned


def spare_rows(num_rows: int, *shape: int, like: torch.Tensor) -> torch.Tensor:
    """An uninitialised [num_rows, *shape] whose storage goes on to the next power of two, from
    TILE_ROWS on to a multiple of that, so that `describe` cuts it into whole tiles: tiles of which
    much lies outside take longer (measured).
    """
    tile = min(TILE_ROWS, triton.next_power_of_2(max(1, num_rows)))
    total = triton.cdiv(num_rows, tile) * tile
    return torch.empty(total, *shape, dtype=like.dtype, device=like.device)[:num_rows]


def describe(x: torch.Tensor, rows: int, columns: int) -> Any:
    """A descriptor of the matrix x for tiles of rows x columns. Rows past the last are those that
    follow in its storage, whatever they hold; what lies outside of it reads as 0.
    """
    wanted = triton.cdiv(len(x), rows) * rows
    size = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
    there = (size - x.shape[1]) // x.stride(0) + 1
    shape = [min(wanted, there), x.shape[1]]
    return TensorDescriptor(x, shape, list(x.stride()), [rows, columns])
