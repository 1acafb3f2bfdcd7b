"""`Context`: the attention metadata of one step, visible to the layers while the model runs.

The scope is a context variable: it always ends with the `with` block, and each thread (so each of
several engines that run at once) sees its own.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

    from nanovllm.tensors.image_rows import ImageRows


class Prefixes(NamedTuple):
    """The `SharedPrefixes` of a step's decodes on the device, int32: [B], [n or more], [t] and [t].
    Unused tiles begin where they end.
    """

    lens: torch.Tensor
    rows: torch.Tensor
    begins: torch.Tensor
    ends: torch.Tensor


@dataclass(frozen=True)
class Context:
    """The sequences and KV slots of a step's T tokens.

    The rows of a step are ordered: first `num_decodes` tokens with a context each (several may be
    of one sequence: each sees those before it), then the tokens of P prefilling sequences.
    B = num_decodes + P.

    Attributes:
        num_decodes: number of rows that are decodes.
        slot_mapping: [T] int32, KV slot of each token: block_id * block_size + offset, or -1 for
            none (padding, warm-up).
        context_lens: [B] int32, number of tokens that each sequence can see, those of this step
            included; 0 for padding.
        block_tables: [B, W] int32, block ids; columns past a sequence's context are never read.
        cu_seqlens_q: [P + 1] int32, first row of each prefilling sequence, from 0.
        cu_seqlens_k: [P + 1] int32, running sum of the context lengths of these sequences.
        max_seqlen_q: largest number of rows of a prefilling sequence.
        max_seqlen_k: longest context of a prefilling sequence.
        num_keys: sum of the context lengths of prefilling sequences; 0 in a CUDA graph, where it
            changes.
        slots: [B] int32, row of each sequence in whatever the device keeps by sequence, the same
            while it runs; of padding row 0, which no sequence has.
        facts: [B] or [words, B] by name, see `nanovllm.engine.plan.FACTS`.
        kept_rows: [n] int32, rows that the last layer computes after attention; None: all.
        prefixes: prefixes that several decodes share, if they are to be read once.
        window_slot_mapping: [T] int32, as slot_mapping, for layers that slide over a window; None:
            these have no blocks of their own.
        window_tables: [B, W] int32, as block_tables, for the same layers.
        images: embeddings of images in the place of those of tokens; None: there are none.
        rotations: [T, D] float32, cosines and sines of the step's tokens, in the place of a table
            by position: then positions are rows of the step; None: that table.
        longest: maximum length of a sequence in tokens, by which decodes choose how to split their
            keys: constant, whatever this step's lengths; 0: the width of the tables.
        shared: results that a backend computes in the first layer for all of them.
    """

    num_decodes: int
    slot_mapping: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0
    num_keys: int = 0
    slots: torch.Tensor | None = None
    facts: Mapping[str, torch.Tensor] = field(default_factory=dict)
    kept_rows: torch.Tensor | None = None
    prefixes: Prefixes | None = None
    window_slot_mapping: torch.Tensor | None = None
    window_tables: torch.Tensor | None = None
    images: ImageRows | None = None
    rotations: torch.Tensor | None = None
    longest: int = 0
    shared: dict[Hashable, Any] = field(default_factory=dict)

    @property
    def is_prefill(self) -> bool:
        """Whether there are prefill rows."""
        return self.cu_seqlens_q is not None

    def of_layer(self, slides: bool) -> Context:
        """This context with the blocks of a layer that slides over a window, or sees all tokens."""
        return self._windowed if slides and self.window_tables is not None else self

    @cached_property
    def _windowed(self) -> Context:
        assert self.window_slot_mapping is not None and self.window_tables is not None
        return replace(
            self,
            slot_mapping=self.window_slot_mapping,
            block_tables=self.window_tables,
            prefixes=None,
        )


def decodes_as_prompts(context: Context) -> tuple[torch.Tensor, torch.Tensor]:
    """A step's decodes as prompts of one token: their `cu_seqlens_q` and `cu_seqlens_k`, found once
    for all layers.
    """
    key = "decodes as prompts"
    if key not in context.shared:
        n = context.num_decodes
        bounds = context.context_lens.new_zeros(2, n + 1)
        bounds[0, 1:] = 1
        bounds[1, 1:] = context.context_lens[:n]
        context.shared[key] = bounds.cumsum(1, dtype=bounds.dtype).unbind()
    found: tuple[torch.Tensor, torch.Tensor] = context.shared[key]
    return found


_context: ContextVar[Context] = ContextVar("nanovllm_context")


@contextmanager
def use_context(context: Context) -> Iterator[None]:
    """Make `get_context` return `context` inside the `with` block."""
    token = _context.set(context)
    try:
        yield
    finally:
        _context.reset(token)


def get_context() -> Context:
    """The metadata of the running step. LookupError outside of one."""
    return _context.get()
