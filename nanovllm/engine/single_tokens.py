"""A step's tokens one by one: the metadata of a step for each.

PyTorch's products, sums and attention depend on the shapes of their inputs, and so on what else is
in a step. Those of a step of one token depend on its position alone (`Build.one_by_one`).
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from nanovllm.engine.plan import FACTS
from nanovllm.utils.context import Context


def single_tokens(context: Context) -> Iterator[Context]:
    """The metadata of the decodes of a step, and of each token of its prompts as a decode, in the
    order of rows.
    """
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
        shared={},
    )
