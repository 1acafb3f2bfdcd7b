"""The results of `generate`, `beam_search`, `embed`, `score`, `classify`: one output per prompt."""

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import field
from typing import Any

from nanovllm.utils.record import Record, Row, record

MAX_PLACES = 4  # places of TokenLogprobs shown in a repr


@record
class Logprob(Record):
    """The log-probability of a token at its place, by the model alone or another
    `SamplingParams.logprobs_mode`.

    Attributes:
        logprob: natural logarithm of its probability; -inf for one that could not come.
        rank: rank among all tokens; 1 for the most likely token. None for a label
            (`SamplingParams.logprob_token_ids`), unless it is the drawn token.
        decoded_token: text of the token, with its leading space; None without a tokenizer or
            `detokenize`.
    """

    logprob: float
    rank: int | None
    decoded_token: str | None


class TokenLogprobs(Sequence[dict[int, Logprob]]):
    """Log-probabilities for each token of a text, as a dictionary by token id: the token itself
    first, then the most likely ones that have a probability, or labels.

    Reads like a list of dictionaries (None for the first token of a prompt), but holds arrays of
    numbers and makes a dictionary when it is asked for: hundreds of thousands of objects would slow
    down every run.

    Args:
        count: number of most likely tokens, or of labels, at each place.
        text: function that returns the text of a token, None if there is none.
        of_labels: whether these are labels, which have no ranks.
    """

    def __init__(
        self, count: int, text: Callable[[int], str | None], *, of_labels: bool = False
    ) -> None:
        self._count, self._text, self._of_labels = count, text, of_labels
        self._token_ids, self._values = array("q"), array("d")  # 1 + count for each place
        self._ranks = array("q")
        self.total = 0.0  # sum over the tokens themselves

    def append(self, token_ids: list[int], values: list[float], rank: int) -> None:
        """Add a place: the token, at least `count` others, and the token's rank."""
        self._token_ids.extend(token_ids[: self._count + 1])
        self._values.extend(values[: self._count + 1])
        self._ranks.append(rank)
        self.total += values[0]

    def append_token(self, token_id: int, value: float, rank: int) -> None:
        """Add a place with the token alone; `count` is 0. As `append`, in less time."""
        self._token_ids.append(token_id)
        self._values.append(value)
        self._ranks.append(rank)
        self.total += value

    def clear(self) -> None:
        """Remove all places."""
        del self._token_ids[:], self._values[:], self._ranks[:]
        self.total = 0.0

    def append_nothing(self) -> None:
        """Add a place without log-probabilities: the first token of a prompt."""
        self.append([0] * (self._count + 1), [0.0] * (self._count + 1), 0)

    def __getstate__(self) -> dict[str, Any]:
        """The state for copies and pickles: with the tokens' texts, without the tokenizer."""
        texts = {token: self._text(token) for token in set(self._token_ids)}
        return {**vars(self), "_text": texts.get}

    def __len__(self) -> int:
        return len(self._ranks)

    def __getitem__(self, index: Any) -> Any:
        """The dictionary at a place, or a list of them."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        start = range(len(self))[index] * (self._count + 1)
        if not self._ranks[index]:
            return None
        others = range(1, self._count + 1)
        ranks = [self._ranks[index], *([None] * self._count if self._of_labels else others)]
        found: dict[int, Logprob] = {}
        for i, rank in enumerate(ranks, start):
            token, value = self._token_ids[i], self._values[i]
            could_come = value != -math.inf or i == start or self._of_labels
            if could_come and token not in found:  # the drawn one may be among the most likely
                found[token] = Logprob(value, rank, self._text(token))
        return found

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        shown, more = repr(self[:MAX_PLACES]), len(self) - MAX_PLACES
        return shown if more <= 0 else f"{shown[:-1]}, <{more} more>]"


@record
class CompletionOutput(Record):
    """One completion of a prompt.

    Attributes:
        index: place among the completions of the request.
        text: text that the tokens add to that of the prompt, with its leading space; "" without a
            tokenizer or `detokenize`.
        token_ids: generated tokens, a final end-of-sequence token included.
        finish_reason: "stop" at an end-of-sequence token or a stop of `SamplingParams`, "length" at
            `max_tokens`, where the model's context or the KV pool ends, or where a structured
            output breaks off, "error" where the model computes NaN, with the tokens before that;
            None while it goes on (`LLM.stream`).
        stop_reason: stop string or id in `stop_token_ids` that ended it; else None.
        logprobs: log-probabilities of the drawn and the most likely tokens at each place, or of
            labels, by token id, if asked for.
        cumulative_logprob: sum of log-probabilities over the drawn tokens, if asked for.
        sampling_mask: tokens that could have been drawn at each place, as a sorted list of ids,
            if asked for (`SamplingParams.return_sampling_mask`); None for a place where any token
            of the vocabulary could. In "processed_logprobs" these are the ones with a probability.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None = None
    logprobs: Sequence[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    sampling_mask: Sequence[list[int] | None] | None = None

    def finished(self) -> bool:
        """Whether the completion has ended."""
        return self.finish_reason is not None


@record
class ScoreOutput(Row):
    """The likelihood of a text, by the model (`LLM.score`).

    The text after a context of c tokens has the log-probabilities `logprobs[c - 1 :]`, and is the
    one of greedy decoding if `ranks[c - 1 :]` are all 1.

    Attributes:
        prompt_token_ids: token ids of the text.
        logprobs: natural logarithm of the probability of each token but the first, given those
            before it.
        ranks: ranks of these tokens among all, by probability; 1 for the most likely, and for all
            that are equally likely.
        error: reason why the text was refused, with `on_error="return"`, or could not be computed;
            else None.
    """

    prompt_token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]
    error: str | None = None

    @property
    def total_logprob(self) -> float:
        """The log-probability of the whole text, given its first token; NaN if it was refused."""
        return math.nan if self.error is not None else math.fsum(self.logprobs)

    @property
    def is_greedy(self) -> bool:
        """Whether each token but the first is the most likely one."""
        return self.error is None and all(rank == 1 for rank in self.ranks)

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log-probability; NaN for a single token."""
        return math.exp(-self.total_logprob / len(self.logprobs)) if self.logprobs else math.nan

    def _row(self) -> dict[str, Any]:
        return {
            **vars(self),
            "total_logprob": self.total_logprob,
            "perplexity": self.perplexity,
            "is_greedy": self.is_greedy,
        }


@record
class ClassificationOutput(Row):
    """The probabilities of labels as the token after a text (`LLM.classify`).

    Attributes:
        prompt_token_ids: token ids of the text.
        probs: probability of each label among the labels, in their order; their sum is 1. Empty if
            the text was refused.
        share: probability of all labels together among all tokens of the vocabulary. Where it is
            small, the model would say something else. 0 if the text was refused.
        error: reason why the text was refused, with `on_error="return"`, or could not be computed;
            else None.
    """

    prompt_token_ids: list[int]
    probs: list[float]
    share: float
    error: str | None = None

    def _row(self) -> dict[str, Any]:
        return dict(vars(self))


@record
class EmbeddingOutput(Record):
    """A text as a vector: `embedding`, as long as the model's hidden states; empty if refused."""

    embedding: list[float]


@record
class EmbeddingRequestOutput(Row):
    """The result of `LLM.embed` for a prompt.

    Attributes:
        request_id: id of the request, as in a `RequestOutput`.
        outputs: vector of the prompt.
        prompt_token_ids: token ids of the prompt.
        finished: always True.
        error: reason why the prompt was refused, with `on_error="return"`, or could not be
            computed; else None.
    """

    request_id: int
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    finished: bool
    error: str | None = None

    def _row(self) -> dict[str, Any]:
        return {
            "request_id": self.request_id,
            "embedding": self.outputs.embedding,
            "num_prompt_tokens": len(self.prompt_token_ids),
            "error": self.error,
        }


@record
class RequestMetrics(Record):
    """The times of a request, in seconds since it was queued.

    Attributes:
        queue_seconds: time until it first ran (the first of its completions).
        first_token_seconds: time until its first token had arrived (of any completion).
        total_seconds: time until it had ended (the last of its completions).
        num_preemptions: number of times that its completions lost their place in the KV cache.
        decode_seconds: time from the first token of a completion to its last, preemptions included;
            summed over the completions, which run side by side.
        num_decode_tokens: number of tokens after the first of a completion, summed as well.
    """

    queue_seconds: float
    first_token_seconds: float
    total_seconds: float
    num_preemptions: int
    decode_seconds: float
    num_decode_tokens: int

    @property
    def seconds_per_token(self) -> float | None:
        """Mean time of a token after the first; None if no completion has more than one token."""
        return self.decode_seconds / self.num_decode_tokens if self.num_decode_tokens else None


class Mistake(str):
    """An error that is about what the caller passed: another request may do better."""


@record
class RequestOutput(Row):
    """A finished request. Reads like vLLM's (`o.outputs[0].text`) and nano-vLLM's (`o["text"]`).

    As a mapping, and a row of a table, it shows the first of its completions: `text`, `token_ids`,
    `finish_reason` and `num_generated_tokens`. A refused prompt has none; then they are "", [],
    "error" and 0.

    Attributes:
        request_id: id that `add_request` returned.
        prompt: text of the prompt; None if it came as token ids.
        prompt_token_ids: token ids of the prompt; all outputs of a stream share one list.
        outputs: completions of the prompt; empty if it was refused, or if the processes that
            computed it died.
        finished: whether it has ended; an earlier output of `LLM.stream` has only what is new.
        num_cached_tokens: number of prompt tokens that the prefix cache served.
        prompt_logprobs: log-probabilities for each prompt token, None for the first, if asked for.
        embedding: hidden states of the prompt as one vector, for `LLM.embed`.
        metrics: times of the request, once it has ended with a result; else None.
        error: reason why the prompt was refused, with `on_error="return"`, or why a completion
            ended with "error"; else None. A `Mistake` if it is about the prompt.
        weight_version: version of the weights that computed its last token, see
            `LLM.update_weights`.
    """

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int
    prompt_logprobs: TokenLogprobs | None = None
    embedding: list[float] | None = None
    metrics: RequestMetrics | None = field(default=None, repr=False)
    error: str | None = None
    weight_version: int | str = field(default=0, repr=False)

    def _row(self) -> dict[str, Any]:
        first = self.outputs[0] if self.outputs else CompletionOutput(0, "", [], "error")
        return {
            "request_id": self.request_id,
            "prompt": self.prompt,
            "text": first.text,
            "token_ids": first.token_ids,
            "finish_reason": first.finish_reason,
            "num_prompt_tokens": len(self.prompt_token_ids),
            "num_generated_tokens": len(first.token_ids),
            "num_cached_tokens": self.num_cached_tokens,
            "error": self.error,
        }


@record
class BeamSearchSequence(Record):
    """A sequence that a beam search has found.

    Attributes:
        tokens: prompt and generated tokens, a final end-of-sequence token included.
        cum_logprob: sum of the log-probabilities of the generated tokens.
        text: text of all `tokens`, special tokens included; "" without a tokenizer.
        finish_reason: "stop" at an end-of-sequence token, "length" at `max_tokens` or where the
            model's context or the KV pool ends.
        stop_reason: end-of-sequence token that ended it; else None.
    """

    tokens: list[int]
    cum_logprob: float
    text: str = ""
    finish_reason: str | None = None
    stop_reason: int | None = None


@record
class BeamSearchOutput(Row):
    """The result of a beam search for a prompt. As a mapping it shows the best sequence.

    Attributes:
        sequences: sequences found, the best first; empty with an error.
        error: reason why the prompt was refused, with `on_error="return"`, or could not be
            computed; else None.
    """

    sequences: list[BeamSearchSequence]
    error: str | None = None

    def _row(self) -> dict[str, Any]:
        refused = BeamSearchSequence([], math.nan, finish_reason="error")
        return {**vars(self.sequences[0] if self.sequences else refused), "error": self.error}
