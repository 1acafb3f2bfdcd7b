"""`StepInputs`: a step's arrays as tensors on the device, and the sampled tokens' way back."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from nanovllm.engine.plan import Batch
from nanovllm.layers.sampler import SamplingMetadata
from nanovllm.utils.context import Context, Prefixes
from nanovllm.utils.device import runs_kernels, to_host, upload

if TYPE_CHECKING:
    from nanovllm.sampling.extra_results import ExtraResults
    from nanovllm.tracing.step_timer import Span


class StepInputs(NamedTuple):
    """What the model needs for one step.

    Attributes:
        input_ids: [T] int32; -1 where a decode's token is in the table of last tokens.
        positions: [T] int32.
        context: the attention metadata.
        decode_slots: [num_decodes] int32, the decodes' rows in the table of last tokens.
        sample_rows: [n] int32, rows of [T] that sample; None for all.
        sampling: how they sample.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    context: Context
    decode_slots: torch.Tensor
    sample_rows: torch.Tensor | None
    sampling: SamplingMetadata


def to_device(batch: Batch, device: torch.device, every_row: bool = False) -> StepInputs:
    """The batch on the device, in one copy.

    Args:
        every_row: the hidden states of rows that sample nothing are wanted, too.
    """
    ids, positions, slots, lens, tables, decode_slots, cu_q, cu_k, rows, *rest = upload(
        device,
        batch.input_ids,
        batch.positions,
        batch.slot_mapping,
        batch.context_lens,
        batch.block_tables,
        batch.slots[: batch.num_decodes],
        batch.cu_seqlens_q,
        batch.cu_seqlens_k,
        batch.sample_rows,
        *sampling_arrays(batch, batch.samples),
        *(batch.prefixes or ()),
    )
    sampling, prefixes = rest[:4], Prefixes(*rest[4:]) if batch.prefixes else None
    sample_rows = None if len(rows) == len(ids) else rows
    # Where no row samples, all are computed: kernels want some.
    kept = None if every_row or not len(rows) else sample_rows
    context = Context(batch.num_decodes, slots, lens, tables, kept_rows=kept, prefixes=prefixes)
    if len(batch.cu_seqlens_q) > 1:  # some prefill
        context = dataclasses.replace(
            context,
            cu_seqlens_q=cu_q,
            cu_seqlens_k=cu_k,
            max_seqlen_q=int(np.diff(batch.cu_seqlens_q).max()),
            max_seqlen_k=int(np.diff(batch.cu_seqlens_k).max()),
            num_keys=int(batch.cu_seqlens_k[-1]),
        )
    return StepInputs(
        ids, positions, context, decode_slots, sample_rows, SamplingMetadata(*sampling)
    )


def sampling_arrays(batch: Batch, which: NDArray[np.bool_]) -> tuple[NDArray[Any], ...]:
    """The arrays of `SamplingMetadata` for the sequences that `which`: [B] names."""
    keys = np.ascontiguousarray(batch.random_keys[:, which])
    return batch.temperatures[which], keys, batch.context_lens[which], batch.slots[which]


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
    """What the model has computed in a step, on the device.

    Attributes:
        tokens: [n] int32, sampled.
        logits: [n, len(vocab)], which the next step overwrites.
        hidden: [T, M], behind the final norm; [n, M] where no more was asked for, and n > 0.
    """

    tokens: torch.Tensor
    logits: torch.Tensor
    hidden: torch.Tensor


class PendingTokens:
    """Sampled tokens on their way from the device to the host.

    Args:
        tokens: [n] int32.
        extras: what comes with them, if anybody has asked; there when they are.
        span: times the step on the device; None: nobody wants to know.
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
        """How long the device waited for the step, and computed it; None where it is not timed."""
        return None if self._span is None else self._span.seconds()
