"""`chunks_of_step`: the chunks of a step's prompts, which the first layer finds for all."""

from typing import TypeAlias

import torch

from nanovllm.utils.context import Context

# The slots [P] of a step's prompts, and `Context.cu_seqlens_q` and `cu_seqlens_k`.
Bounds: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def chunks_of_step(context: Context, num_rows: int) -> torch.Tensor:
    """See `kernels.recurrent.delta_prompt.chunks_of`; `num_rows` of prompts, with padding."""
    from nanovllm.kernels.recurrent.delta_prompt import chunks_of

    key = "chunks", num_rows
    if key not in context.shared:
        assert context.cu_seqlens_q is not None, "no prompts"
        context.shared[key] = chunks_of(context.cu_seqlens_q, num_rows)
    found: torch.Tensor = context.shared[key]
    return found
