"""The input tokens of a step."""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.device_features import launch_dependents, pdl_options, wait
from nanovllm.utils.integers import cdiv


@triton.jit(do_not_specialize=["T"])
def _fill_in_kernel(
    ids_ptr, slots_ptr, table_ptr, out_ptr, T, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    launch_dependents(PDL)
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(ids_ptr + t, mask=t < T, other=0)
    unknown = token < 0
    slot = tl.load(slots_ptr + t, mask=unknown, other=0)
    wait(PDL)
    token = tl.where(unknown, tl.load(table_ptr + slot, mask=unknown), token)
    tl.store(out_ptr + t, token, mask=t < T)


def fill_in(input_ids: torch.Tensor, slots: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Fill in unknown tokens, see `nanovllm.engine.step_inputs.fill_in`."""
    out = torch.empty_like(input_ids)
    T, BLOCK = len(input_ids), 1024
    grid = (cdiv(T, BLOCK),)
    _fill_in_kernel[grid](input_ids, slots, table, out, T, BLOCK=BLOCK, **pdl_options(input_ids))
    return out
