"""`OneByOne`: a model that computes the tokens of a step one after another.

The results of PyTorch's products, sums and attention depend on the shapes of their inputs, and so
on what else is in a step. Those of a step of one token depend on the tokens before it alone.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from nanovllm.engine.plan import FACTS
from nanovllm.utils.context import Context, get_context, use_context

if TYPE_CHECKING:
    from nanovllm.models.qwen3 import Qwen3ForCausalLM


class OneByOne:
    """The forward pass of a model for `Build.one_by_one`.

    Args:
        model: the model.
    """

    def __init__(self, model: "Qwen3ForCausalLM") -> None:
        self._model, self._is_abridged = model, False

    @contextmanager
    def abridged(self) -> Iterator[None]:
        """Have a step compute its last token alone, as if its context were the longest, and copies
        of its results for the others: enough to know what memory and which kernels steps need.
        """
        self._is_abridged = True
        try:
            yield
        finally:
            self._is_abridged = False

    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Compute hidden states [T, M] from input_ids and positions, both [T] int32; only the rows
        [n, M] of `Context.kept_rows`, if it is set.
        """
        context, rows, T = get_context(), [], len(input_ids)
        single: Iterable[tuple[int, Context]] = enumerate(_single_tokens(context))
        if self._is_abridged:
            sequence, longest = len(context.context_lens) - 1, context.max_seqlen_k or None
            single = [(T - 1, _single(context, T - 1, sequence, longest))]
        for row, own in single:
            with use_context(own):
                token = slice(row, row + 1)
                rows.append(self._model(input_ids[token], positions[token]))
        rows += [rows[0].clone() for _ in range(T - len(rows))]
        hidden = torch.cat(rows)
        return hidden if context.kept_rows is None else hidden.index_select(0, context.kept_rows)

    def compute_logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Logits of the columns of this rank, [n, M] -> [n, V]; `out` is not used."""
        # Copies: a library's product may depend on where in memory its input begins.
        computed = hidden[:1] if self._is_abridged else hidden
        rows = [self._model.compute_logits(row.clone()) for row in computed.split(1)]
        rows += [rows[0].clone() for _ in range(len(hidden) - len(rows))]
        return torch.cat(rows)


def _single_tokens(context: Context) -> Iterator[Context]:
    """The metadata of each token of a step as a decode, in the order of rows."""
    n = context.num_decodes
    for row in range(n):
        yield _single(context, row, row, None)
    if context.cu_seqlens_q is None or context.cu_seqlens_k is None:
        return
    bounds = pairwise(context.cu_seqlens_q.tolist()), pairwise(context.cu_seqlens_k.tolist())
    for i, ((begin, end), (first, last)) in enumerate(zip(*bounds, strict=True)):
        cached = last - first - (end - begin)
        for row in range(begin, end):
            yield _single(context, n + row, n + i, cached + row - begin + 1)


def _single(context: Context, row: int, sequence: int, length: int | None) -> Context:
    """The metadata of a token, as a decode.

    Args:
        row: row of the token.
        sequence: row of its sequence.
        length: number of tokens that it sees; None: as many as its sequence has.
    """
    token, own = slice(row, row + 1), slice(sequence, sequence + 1)
    lens = context.context_lens[own]
    slots, tables = context.window_slot_mapping, context.window_tables
    return replace(
        context,
        num_decodes=1,
        slot_mapping=context.slot_mapping[token],
        context_lens=lens if length is None else lens.new_full((1,), length),
        block_tables=context.block_tables[own],
        cu_seqlens_q=None,
        cu_seqlens_k=None,
        max_seqlen_q=0,
        max_seqlen_k=0,
        num_keys=0,
        slots=None if context.slots is None else context.slots[own],
        facts={
            name: part[..., token if FACTS[name].rows == "tokens" else own]
            for name, part in context.facts.items()
        },
        kept_rows=None,
        prefixes=None,
        window_slot_mapping=None if slots is None else slots[token],
        window_tables=None if tables is None else tables[own],
        images=None if context.images is None else context.images.of_row(row),
        shared={},
    )
