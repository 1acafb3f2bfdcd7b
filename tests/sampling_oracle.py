"""Reference of the sampling controls: float64, token by token, with transformers for the logits.

Written from the words of `SamplingParams`, without any code of the package but that class.
"""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash

from nanovllm import SamplingParams

BadWords = Iterable[tuple[int, ...]]


def processed(
    logits: Iterable[float],
    prompt: Sequence[int],
    output: Sequence[int],
    params: SamplingParams,
    eos: Collection[int] = (),
    bad_words: BadWords = (),
) -> np.ndarray:
    """Logits before the division by the temperature: [V] float64."""
    banned = {
        word[-1] for word in bad_words if tuple(output[len(output) + 1 - len(word) :]) == word[:-1]
    }
    if len(output) < params.min_tokens:
        banned |= set(params.stop_token_ids or ()) | (set() if params.ignore_eos else set(eos))
    allowed = None if params.allowed_token_ids is None else {*params.allowed_token_ids}
    seen = {*prompt, *output}
    values = []
    for token, logit in enumerate(logits):
        value = float(logit)
        if allowed is not None and token not in allowed:
            value = -math.inf
        if token in banned:
            value = -math.inf
        value += (params.logit_bias or {}).get(token, 0.0)
        if token in seen:
            penalty = params.repetition_penalty
            value = value / penalty if value > 0 else value * penalty
        value -= params.frequency_penalty * output.count(token)
        value -= params.presence_penalty * (token in output)
        values.append(value)
    return np.array(values)


class Kept(NamedTuple):
    """Masks [V] of the tokens that the filters leave, and of those that rounding may decide."""

    mask: np.ndarray
    doubtful: np.ndarray


def kept(values: np.ndarray, params: SamplingParams) -> Kept:
    """min_p, top_k and top_p, each from its definition. values: [V], what `processed` returns."""
    possible = np.isfinite(values)
    if params.is_greedy:
        return Kept(possible, np.zeros_like(possible))
    top_p, min_p = float(np.float32(params.top_p)), float(np.float32(params.min_p))
    temperature = float(np.float32(params.temperature))
    weights = np.exp((values - values.max()) / temperature)
    left = possible & (weights >= min_p)
    doubtful = np.abs(weights - min_p) < 1e-9 * min_p
    is_larger = values > values[:, None]  # [token, other]
    if params.top_k > 0:
        left &= is_larger.sum(1) < params.top_k
    total = math.fsum(weights[left])
    if top_p < 1:
        before = (is_larger & left) @ weights
        left &= before < top_p * total
        doubtful |= np.abs(before - top_p * total) < 1e-9 * total
    return Kept(left, doubtful & possible & (values < values.max()))


def probabilities(values: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Probability of each token, [V]. values: result of `processed`."""
    weights = np.exp((values - values.max()) / params.temperature) * kept(values, params).mask
    return weights / weights.sum()


def log_softmax(values: np.ndarray) -> np.ndarray:
    """Of [V] float64."""
    return values - np.logaddexp.reduce(values)


def reported(
    logits: np.ndarray, values: np.ndarray, params: SamplingParams, mode: str
) -> np.ndarray:
    """Log-probabilities [V] float64 in a mode. logits: [V], of the model; values: what `processed`
    makes of them.
    """
    if mode == "raw_logprobs":
        return log_softmax(logits)
    temperature = 1.0 if params.is_greedy else float(np.float32(params.temperature))
    if mode == "processed_logprobs":
        values = np.where(kept(values, params).mask, values, -np.inf)
    return log_softmax(values / temperature)


def noise(key: int, position: int, vocab_size: int) -> np.ndarray:
    """The draws [V] from the exponential distribution for one token of one request."""
    bits = np.random.Philox(key=key, counter=position << 64)
    return np.random.Generator(bits).standard_exponential(vocab_size)


@dataclass
class Completion:
    """An expected completion. logprobs: [generated, V], by the model alone."""

    token_ids: list[int]
    finish_reason: str
    stop_reason: int | None
    logprobs: np.ndarray


class Oracle:
    """Generates a token at a time with a model of transformers, float32, without any cache.

    Args:
        path: the checkpoint.
        eos: its end-of-sequence tokens.
        max_model_len: length at which sequences end.
    """

    def __init__(self, path: Any, eos: Collection[int] = (), max_model_len: int = 128) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(path, torch_dtype=torch.float32).eval()
        self.eos, self.max_model_len = set(eos), max_model_len
        self._logits: dict[tuple[int, ...], np.ndarray] = {}

    def logits(self, ids: list[int]) -> np.ndarray:
        """Logits of the token after `ids`, [V] float64."""
        if tuple(ids) not in self._logits:
            with torch.inference_mode():
                row = self.model(torch.tensor([ids]), logits_to_keep=1).logits[0, -1]
            self._logits[tuple(ids)] = row.double().numpy()
        return self._logits[tuple(ids)]

    def read(self, ids: list[int]) -> None:
        """Find the logits after each token of `ids`, in one pass."""
        if any(tuple(ids[:n]) not in self._logits for n in range(1, len(ids) + 1)):
            with torch.inference_mode():
                rows = self.model(torch.tensor([ids])).logits[0].double().numpy()
            self._logits |= {tuple(ids[:n]): row for n, row in enumerate(rows, 1)}

    def complete(
        self,
        prompt: list[int],
        params: SamplingParams,
        *,
        index: int = 0,
        unseeded: str = "",
        bad_words: BadWords = (),
    ) -> Completion:
        """One completion.

        Args:
            prompt: token ids.
            params: all controls that work on token ids.
            index: the place of the completion among the n of its request.
            unseeded: source of the draws without `seed`: the engine's seed and the sequence.
            bad_words: words as tokens.
        """
        name = unseeded if params.seed is None else f"request {params.seed + index}"
        key = xxhash.xxh64_intdigest(name.encode())
        output: list[int] = []
        rows: list[np.ndarray] = []
        while True:
            logits = self.logits([*prompt, *output])
            rows.append(logits - np.logaddexp.reduce(logits))
            values = processed(logits, prompt, output, params, self.eos, bad_words)
            if not params.is_greedy:
                values = np.where(kept(values, params).mask, values, -np.inf) / params.temperature
                values -= np.log(noise(key, len(prompt) + len(output), len(values)))
            token = int(values.argmax())
            output.append(token)
            reason, stop = self._end(prompt, output, params)
            if reason:
                return Completion(output, reason, stop, np.array(rows))

    def _end(
        self, prompt: list[int], output: list[int], params: SamplingParams
    ) -> tuple[str | None, int | None]:
        token = output[-1]
        if len(output) >= params.min_tokens:
            if token in self.eos and not params.ignore_eos:
                return "stop", None
            if token in (params.stop_token_ids or ()):
                return "stop", token
        if len(output) == params.max_tokens or len(prompt) + len(output) == self.max_model_len:
            return "length", None
        return None, None
