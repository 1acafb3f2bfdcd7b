"""`RecurrentLayer`: the common part of layers with a state for each sequence."""

from typing import TypeAlias

import torch

from nanovllm.layers.base import Build, StatefulLayer
from nanovllm.utils.context import decodes_as_prompts, get_context

# The slots [P] of a step's prompts, and `Context.cu_seqlens_q` and `cu_seqlens_k`.
Bounds: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class RecurrentLayer(StatefulLayer):
    """A layer with a state for each sequence, which computes decodes in another way than prompts.

    Args:
        is_last: whether this is the model's last layer, after which only the rows
            `Context.kept_rows` are used.
        build: options of the model.
    """

    def __init__(self, is_last: bool, build: Build) -> None:
        super().__init__()
        self.is_last, self.build = is_last, build

    def _mix(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Mix the tokens of a step with those before them, by the states, which move on.

        Args:
            inputs: [T, ...] each, of which the first rows are of decodes.

        Returns:
            [T, ...]; [n, ...] in the last layer, if only n rows are kept.
        """
        context = get_context()
        n, slots = context.num_decodes, context.slots
        assert slots is not None, "sequences have slots"
        parts = []
        if n and self.build.fixed_order:
            parts.append(self._prompts([x[:n] for x in inputs], self._bounds_of_decodes()))
        elif n:
            parts.append(self._decode([x[:n] for x in inputs], slots[:n], context.context_lens[:n]))
        if context.cu_seqlens_q is not None:
            assert context.cu_seqlens_k is not None, "both are of prompts"
            bounds = slots[n:], context.cu_seqlens_q, context.cu_seqlens_k
            parts.append(self._prompts([x[n:] for x in inputs], bounds))
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        rows = context.kept_rows if self.is_last else None
        return out if rows is None else out.index_select(0, rows)

    def _bounds_of_decodes(self) -> Bounds:
        """The bounds of a step's decodes, for layers that compute them as prompts."""
        context = get_context()
        assert context.slots is not None, "sequences have slots"
        return context.slots[: context.num_decodes], *decodes_as_prompts(context)

    def _decode(
        self, inputs: list[torch.Tensor], slots: torch.Tensor, context_lens: torch.Tensor
    ) -> torch.Tensor:
        """`_mix` of the rows of D decodes; slots and context_lens: [D] int32."""
        raise NotImplementedError

    def _prompts(self, inputs: list[torch.Tensor], bounds: Bounds) -> torch.Tensor:
        """`_mix` of the rows of P prompts, and of padding."""
        raise NotImplementedError


def chunks_of_step(cu_seqlens_q: torch.Tensor, num_rows: int) -> torch.Tensor:
    """See `kernels.recurrent.delta_prompt.chunks_of`; `num_rows` of prompts, with padding. The
    first layer of a step finds them for all.
    """
    from nanovllm.kernels.recurrent.delta_prompt import chunks_of

    context, key = get_context(), ("chunks", num_rows, len(cu_seqlens_q))
    if key not in context.shared:
        context.shared[key] = chunks_of(cu_seqlens_q, num_rows)
    found: torch.Tensor = context.shared[key]
    return found
