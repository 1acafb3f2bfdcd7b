"""`StepInputs`: a step's arrays as tensors on the device, and the sampled tokens' way back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from nanovllm.engine.plan import FACTS, Batch
from nanovllm.engine.step_layout import LAYOUT, Size, divide, lay_out, num_words
from nanovllm.layers.sampler import SamplingMetadata
from nanovllm.utils.context import Context, Prefixes
from nanovllm.utils.device import runs_kernels, to_host

if TYPE_CHECKING:
    from nanovllm.sampling.extra_results import ExtraResults
    from nanovllm.tracing.step_timer import Span


class StepInputs(NamedTuple):
    """The inputs of the model for one step.

    Attributes:
        input_ids: [T] int32; -1 where a decode's token is in the table of last tokens.
        positions: [T] int32.
        context: the attention metadata.
        sample_rows: [N] int32, rows of [T] that sample; None for all.
        sampling: parameters of their sampling.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    context: Context
    sample_rows: torch.Tensor | None
    sampling: SamplingMetadata


def view(
    parts: Mapping[str, torch.Tensor],
    size: Size,
    *,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    num_keys: int = 0,
    every_row: bool = False,
) -> StepInputs:
    """The inputs that lie in a buffer on the device.

    Args:
        parts: its arrays.
        size: their room.
        max_seqlen_q, max_seqlen_k, num_keys: fields of `Context`.
        every_row: the hidden states of rows that sample nothing are wanted, too.
    """
    parts = {
        name: part.view(torch.float32) if LAYOUT[name].dtype == np.float32 else part
        for name, part in parts.items()
    }
    rows = None if size.samples == size.decodes + size.tokens else parts["sample_rows"]
    prefixes = None
    if size.sharing:
        prefixes = Prefixes(*(parts[f"prefix_{name}"] for name in Prefixes._fields))
    context = Context(
        num_decodes=size.decodes,
        slot_mapping=parts["slot_mapping"],
        context_lens=parts["context_lens"],
        block_tables=parts["block_tables"],
        cu_seqlens_q=parts["cu_seqlens_q"] if size.prompts else None,
        cu_seqlens_k=parts["cu_seqlens_k"] if size.prompts else None,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        num_keys=num_keys,
        slots=parts["slots"],
        facts={name: parts[name] for name, fact in FACTS.items() if fact.rows != "samples"},
        # If no row samples, all are computed: kernels need at least one.
        kept_rows=None if every_row or not size.samples else rows,
        prefixes=prefixes,
        window_slot_mapping=parts["window_slot_mapping"] if size.windowed else None,
        window_tables=parts["window_tables"] if size.windowed else None,
    )
    sampling = {name: parts[f"sample_{name}"] for name in SamplingMetadata._fields}
    return StepInputs(
        parts["input_ids"], parts["positions"], context, rows, SamplingMetadata(**sampling)
    )


def to_device(batch: Batch, device: torch.device, every_row: bool = False) -> StepInputs:
    """The batch on the device, in one copy; `every_row`: see `view`."""
    size = Size.of(batch)
    host = torch.empty(num_words(size), dtype=torch.int32, pin_memory=device.type == "cuda")
    lay_out(divide(host.numpy(), size), size, batch)
    lens_q, lens_k = np.diff(batch.cu_seqlens_q), np.diff(batch.cu_seqlens_k)
    return view(
        divide(host.to(device, non_blocking=True), size),
        size,
        max_seqlen_q=int(lens_q.max(initial=0)),
        max_seqlen_k=int(lens_k.max(initial=0)),
        num_keys=int(batch.cu_seqlens_k[-1]),
        every_row=every_row,
    )


def fill_in(input_ids: torch.Tensor, slots: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Replace each -1 of input_ids by the token in `table`, at its row's slot.

    Args:
        input_ids: [T] int32; only the first B rows may be -1.
        slots: [B] int32.
        table: [N] int32.

    Returns:
        [T] int32.
    """
    if runs_kernels(input_ids):
        from nanovllm.kernels import tokens

        return tokens.fill_in(input_ids, slots, table)
    filled, n = input_ids.clone(), len(slots)
    filled[:n] = torch.where(input_ids[:n] < 0, table[slots], input_ids[:n])
    return filled


class Computed(NamedTuple):
    """The results of the model in a step, on the device.

    Attributes:
        tokens: [n] int32, sampled.
        logits: [n, len(vocab)], which the next step overwrites.
        hidden: [T, M], after the final norm; [n, M] where no more was asked for, and n > 0.
        logprob_divisors: [n] float32, see `SamplingMetadata`.
    """

    tokens: torch.Tensor
    logits: torch.Tensor
    hidden: torch.Tensor
    logprob_divisors: torch.Tensor


class PendingTokens:
    """Sampled tokens on their way from the device to the host.

    Args:
        tokens: [n] int32.
        extras: results that come with them, if anybody has asked; there when they are.
        span: timer of the step on the device; None: nobody wants to know.
    """

    def __init__(
        self, tokens: torch.Tensor, extras: ExtraResults | None = None, span: Span | None = None
    ) -> None:
        self.extras, self._span = extras, span
        self._copied: torch.cuda.Event | None = None
        if tokens.is_cuda:
            self._copied = torch.cuda.Event() if span is None else span.end
        self._tokens = to_host(tokens).numpy()  # which no mode of the caller's looks at
        if span is not None:
            span.finish()
        elif self._copied is not None:
            self._copied.record()

    def wait(self) -> list[int]:
        """The tokens, once they are there."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._tokens.tolist()

    def device_seconds(self) -> tuple[float, float] | None:
        """Seconds that the device waited for the step, and computed it; None if it is not timed."""
        return None if self._span is None else self._span.seconds()

    def encoding_seconds(self) -> float | None:
        """Seconds of these that the device encoded images; None if the step is not timed."""
        return None if self._span is None else self._span.encoding_seconds()
