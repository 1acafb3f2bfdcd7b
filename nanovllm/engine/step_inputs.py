"""`StepInputs`: a step's arrays as tensors on the device, and the sampled tokens' way back."""

from typing import NamedTuple

import numpy as np
import torch

from nanovllm.layers.controlled_sampler import Logprobs
from nanovllm.layers.sampler import SamplingMetadata
from nanovllm.utils.context import Context


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


def fill_in(input_ids: torch.Tensor, slots: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Replace each -1 of input_ids by the token in `table`, at its row's slot.

    Args:
        input_ids: [T] int32; only the first B rows may be -1.
        slots: [B] int32.
        table: [N] int32.

    Returns:
        [T] int32.
    """
    if input_ids.is_cuda:
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
    """

    tokens: torch.Tensor
    logits: torch.Tensor


class PendingTokens:
    """Sampled tokens on their way from the device to the host.

    Args:
        tokens: [n] int32.
        logprob_rows: [m], those of the n that have log-probabilities.
        logprobs: of m rows.
    """

    def __init__(
        self,
        tokens: torch.Tensor,
        logprob_rows: np.ndarray | None = None,
        logprobs: Logprobs | None = None,
    ) -> None:
        self._rows = logprob_rows
        self._copied = torch.cuda.Event() if tokens.is_cuda else None
        self._host = [_to_host(tensor) for tensor in (tokens, *(logprobs or ()))]
        if self._copied is not None:
            self._copied.record()

    def wait(self) -> list[int]:
        """The tokens, once they are there."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._host[0].tolist()

    def logprobs(self) -> list[tuple[int, list[int], list[float], int]]:
        """Row of the n, token ids, log-probabilities and the first token's rank, for each that has
        them. After `wait`.
        """
        if self._rows is None or len(self._host) == 1:
            return []
        return list(zip(self._rows.tolist(), *(x.tolist() for x in self._host[1:]), strict=True))


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
