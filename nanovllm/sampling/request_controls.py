"""`RequestControls`: the options of a request beyond a draw from the whole softmax.

It uses numpy only. Letters: V vocabulary, W = ceil(V / 32) words of a mask, E edits.
"""

from collections.abc import Collection
from collections.abc import Sequence as SequenceABC
from typing import NamedTuple

import numpy as np

from nanovllm.sampling.controls import NO_FILTERS, NO_PENALTIES, RAW
from nanovllm.sampling_params import LOGPROBS_MODES, SamplingParams
from nanovllm.utils.arrays import Float32, Int32

BANNED = -np.inf  # bias of a token that must not be drawn


class Report(NamedTuple):
    """The facts that a request wants of each draw, beside its token.

    Attributes:
        num_logprobs: most likely tokens whose log-probabilities are reported beside the drawn
            token's; -1: no log-probabilities.
        labels: [K] int32, further tokens whose log-probabilities are reported.
        mode: index in `LOGPROBS_MODES`, the distribution.
        divisor: divisor of the logits in this distribution.
        has_mask: whether the tokens that could have been drawn are reported.
    """

    num_logprobs: int
    labels: Int32
    mode: int
    divisor: float
    has_mask: bool


class RequestControls(NamedTuple):
    """The controls of one request.

    Attributes:
        filters: top_k (0: all), top_p, min_p.
        penalties: repetition, presence, frequency.
        report: facts to report of each draw.
        own_divisor: divisor of the model's logits for the log-probability of the drawn token, where
            that alone is wanted and the model's logits say it; else 0.
        bias_tokens: [E] int32, ascending.
        biases: [E] float32, biases added to the logits of these tokens; -inf: banned.
        min_tokens: number of generated tokens before which `early_bans` hold.
        early_bans: [K] int32, banned tokens, ascending.
        bad_words: sequences of at least two tokens whose last must not follow the others.
        allowed: [W] int32, bit t % 32 of word t // 32 for token t; None: all tokens are allowed.
        is_guided: whether the request's sequences have a grammar.
        is_permanent: whether they matter for more than the early bans.
    """

    filters: tuple[int, float, float]
    penalties: tuple[float, float, float]
    report: Report
    own_divisor: float
    bias_tokens: Int32
    biases: Float32
    min_tokens: int
    early_bans: Int32
    bad_words: tuple[tuple[int, ...], ...]
    allowed: Int32 | None
    is_guided: bool
    is_permanent: bool

    @property
    def has_penalties(self) -> bool:
        return self.penalties != NO_PENALTIES

    @property
    def has_edits(self) -> bool:
        return len(self.bias_tokens) > 0 or len(self.bad_words) > 0 or self.min_tokens > 0

    def act_on(self, num_generated: int) -> bool:
        """Whether the token after the first `num_generated` of a completion is drawn or reported
        by them. If not, `own_divisor` says all.
        """
        return self.is_permanent or num_generated < self.min_tokens

    @property
    def num_logprobs(self) -> int:
        """Most likely tokens to report where they act; -1: no log-probabilities, or those that
        `own_divisor` is for.
        """
        is_elsewhere = self.own_divisor > 0 and self.report.mode == RAW
        return -1 if is_elsewhere else self.report.num_logprobs


def request_controls(
    params: SamplingParams,
    vocab_size: int,
    eos_token_ids: Collection[int],
    bad_words: Collection[tuple[int, ...]] = (),
    logprobs_mode: str = LOGPROBS_MODES[RAW],
) -> RequestControls | None:
    """The controls that `params` ask for; None if there are none.

    Args:
        params: sampling parameters.
        vocab_size: vocabulary size V.
        eos_token_ids: tokens that end a text.
        bad_words: token sequences of `params.bad_words`.
        logprobs_mode: mode of the engine, for `params` without one.

    Raises:
        ValueError: if they may leave no token.
    """
    stops = _stop_tokens(params, vocab_size, eos_token_ids)
    _check_allowed(params, stops, bad_words)
    filters = _filters(params, vocab_size)
    penalties = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
    draws = _draws(params, filters, penalties, bad_words)
    is_silent = params.logprobs is None and params.logprob_token_ids is None
    if not draws and is_silent and not (params.min_tokens and stops):
        return None
    report = _report(params, logprobs_mode)
    is_alone = report.num_logprobs == 0 and not len(report.labels)
    is_own = is_alone and (report.mode == RAW or not draws)
    biases = _biases(params, bad_words)
    return RequestControls(
        filters=filters,
        penalties=penalties,
        report=report,
        own_divisor=report.divisor if is_own else 0.0,
        bias_tokens=np.array(list(biases), np.int32),
        biases=np.array(list(biases.values()), np.float32),
        min_tokens=params.min_tokens if stops else 0,
        early_bans=np.array(sorted(stops), np.int32),
        bad_words=tuple(word for word in bad_words if len(word) > 1),
        allowed=token_mask(params.allowed_token_ids, vocab_size),
        is_guided=params.structured_outputs is not None,
        is_permanent=draws or (report.num_logprobs >= 0 and not is_own),
    )


def _report(params: SamplingParams, engine_mode: str) -> Report:
    """The report for `params`, in the engine's mode if they have none."""
    labels = np.array(params.logprob_token_ids or (), np.int32)
    is_silent = params.logprobs is None and not len(labels)
    mode = LOGPROBS_MODES.index(params.logprobs_mode or engine_mode)
    # That of a greedy request is of the softmax at temperature 1, as in vLLM.
    has_temperature = mode != RAW and not params.is_greedy
    return Report(
        num_logprobs=-1 if is_silent else params.logprobs or 0,
        labels=labels,
        mode=mode,
        divisor=params.temperature if has_temperature else 1.0,
        has_mask=params.return_sampling_mask,
    )


def _stop_tokens(
    params: SamplingParams, vocab_size: int, eos_token_ids: Collection[int]
) -> set[int]:
    """The tokens that end a completion, banned before `min_tokens`."""
    stops = set(params.stop_token_ids or ())
    if not params.ignore_eos:  # a tokenizer may have some that the model cannot sample
        stops |= {token for token in eos_token_ids if token < vocab_size}
    return stops


def _check_allowed(
    params: SamplingParams, stops: Collection[int], bad_words: Collection[tuple[int, ...]]
) -> None:
    """Refuse `allowed_token_ids` all of which may be banned at some position."""
    if params.allowed_token_ids is None:
        return
    banned = {word[-1] for word in bad_words}
    if params.min_tokens:
        banned.update(stops)
    if banned.issuperset(params.allowed_token_ids):
        raise ValueError(
            "`allowed_token_ids` must have a token that bad_words and min_tokens do not "
            f"forbid, got {params.allowed_token_ids!r}"
        )


def _filters(params: SamplingParams, vocab_size: int) -> tuple[int, float, float]:
    """top_k (0: all), top_p, min_p."""
    if params.is_greedy:
        return NO_FILTERS
    top_k = params.top_k if 0 < params.top_k < vocab_size else 0
    return top_k, params.top_p, params.min_p


def _biases(params: SamplingParams, bad_words: Collection[tuple[int, ...]]) -> dict[int, float]:
    """Biases by token, in ascending order of the tokens. Bad words of one token are banned here."""
    biases = dict(params.logit_bias or {})
    biases |= {word[0]: BANNED for word in bad_words if len(word) == 1}
    return dict(sorted(biases.items()))


def _draws(
    params: SamplingParams,
    filters: tuple[int, float, float],
    penalties: tuple[float, float, float],
    bad_words: Collection[tuple[int, ...]],
) -> bool:
    """Whether there are controls of draws other than the early bans."""
    return (
        filters != NO_FILTERS
        or penalties != NO_PENALTIES
        or params.allowed_token_ids is not None
        or params.structured_outputs is not None
        or bool(params.logit_bias or bad_words)
    )


def token_mask(tokens: SequenceABC[int] | None, vocab_size: int) -> Int32 | None:
    """The mask [W] int32 of allowed tokens; None if all are."""
    if tokens is None:
        return None
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[list(tokens)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)
