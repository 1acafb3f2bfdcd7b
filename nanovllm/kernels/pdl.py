"""Programmatic dependent launch: a kernel starts while the one before it still runs.

On Hopper GPUs and later a kernel launched with `pdl_options()` is placed on the GPU as soon as
every program of its predecessor has called `launch_dependents` or ended. What it does before
`wait` (launch latency, reading weights) then costs no time of its own. The rules that keep it
correct (CUDA Programming Guide, Programmatic Dependent Launch and Synchronization):

- every program calls `wait`, on every path, so that a kernel that has ended implies that all
  before it have;
- before `wait` it reads only what no kernel of the step writes: weights, and the step's metadata.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl

try:  # Triton 3.4
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:
    gdc_launch_dependents = gdc_wait = None


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


@functools.cache
def _supported() -> bool:
    return (
        gdc_wait is not None
        and torch.cuda.is_available()
        and torch.version.hip is None
        and torch.cuda.get_device_capability() >= (9, 0)
    )


def pdl_options() -> dict[str, Any]:
    """Keyword arguments of a launch: the kernel's PDL constant, and Triton's launch option."""
    return {"PDL": True, "launch_pdl": True} if _supported() else {"PDL": False}
