"""`Controls`: the arrays by which `ControlledSampler` samples. It uses numpy only, no device.

Letters: n rows with controls, V vocabulary, W = ceil(V / 32) words of a mask, E edits, K labels.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nanovllm.sampling_params import LOGPROBS_MODES
from nanovllm.utils.arrays import Float32, Int32

NO_FILTERS = (0, 1.0, 0.0)  # top_k, top_p, min_p
NO_PENALTIES = (1.0, 0.0, 0.0)  # repetition, presence, frequency
IN_PROMPT = -(1 << 15)  # sign bit of a token's count
MAX_COUNT = (1 << 15) - 1
RAW, TEMPERATURE, PROCESSED = range(len(LOGPROBS_MODES))


class Reports(NamedTuple):
    """The reports on the draws of these rows.

    Attributes:
        num_logprobs: [n] int32, most likely tokens to report beside the drawn one; -1: no
            log-probabilities.
        modes: [n] int32, index of their distribution in `LOGPROBS_MODES`.
        divisors: [n] float32, divisors of the logits in it.
        label_rows: [K] int32, rows that have further tokens to report, ascending.
        label_tokens: [K] int32, these tokens.
        masks: [n] bool, whether the tokens that could have been drawn are reported.
    """

    num_logprobs: Int32
    modes: Int32
    divisors: Float32
    label_rows: Int32
    label_tokens: Int32
    masks: NDArray[np.bool_]


class Controls(NamedTuple):
    """The controls of a step.

    Attributes:
        top_k: [n] int32; 0: all tokens.
        top_p, min_p: [n] float32.
        penalties: [3, n] float32: repetition, presence, frequency.
        edit_starts: [n + 1] int32, index of each row's first edit.
        edit_tokens: [E] int32, tokens, ascending in each row; may repeat.
        edit_biases: [E] float32, biases added to the logits of these tokens.
        masks: [m, W] int32, bits of allowed tokens, see `token_mask`.
        mask_rows: [n] int32, index of each row's mask; -1: none.
        reset: [r] int32, slots whose counts are replaced by `counts`.
        counts: [3, h] int32: slot, token, and its count, which is negative for tokens in the prompt
            (`IN_PROMPT`).
        reports: facts to report of the draws.
    """

    top_k: Int32
    top_p: Float32
    min_p: Float32
    penalties: Float32
    edit_starts: Int32
    edit_tokens: Int32
    edit_biases: Float32
    masks: Int32
    mask_rows: Int32
    reset: Int32
    counts: Int32
    reports: Reports

    @property
    def has_filters(self) -> bool:
        return bool((self.top_k > 0).any() or (self.top_p < 1).any() or (self.min_p > 0).any())

    @property
    def has_penalties(self) -> bool:
        return bool((self.penalties.T != NO_PENALTIES).any())

    @property
    def draws(self) -> bool:
        """Whether the controls change any draw."""
        edits = len(self.edit_tokens) > 0 or len(self.masks) > 0
        return edits or self.has_filters or self.has_penalties
