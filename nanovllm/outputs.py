"""What `generate` and `beam_search` return: one output per prompt."""

import math
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

KEYS = ("text", "token_ids")  # of a RequestOutput as a mapping


@dataclass(frozen=True)
class Logprob:
    """How likely a token is at its place, by the model alone.

    Attributes:
        logprob: natural logarithm of its probability.
        rank: 1 for the most likely token.
        decoded_token: the token as text, None without a tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None


class TokenLogprobs(Sequence[dict[int, Logprob]]):
    """For each token of a text, by their ids: itself first, then the most likely ones.

    Reads like a list of dictionaries (None for the first token of a prompt), but holds plain
    numbers and makes a dictionary when it is asked for: hundreds of thousands of objects would slow
    down every run.

    Args:
        count: most likely tokens at each place.
        text: of a token, None if there is none.
    """

    def __init__(self, count: int, text: Callable[[int], str | None]) -> None:
        self._count, self._text = count, text
        self._token_ids, self._values = array("q"), array("d")  # 1 + count for each place
        self._ranks = array("q")
        self.total = 0.0  # the sum over the tokens themselves

    def append(self, token_ids: list[int], values: list[float], rank: int) -> None:
        """Add a place: the token and at least `count` most likely ones, and the token's rank."""
        self._token_ids.extend(token_ids[: self._count + 1])
        self._values.extend(values[: self._count + 1])
        self._ranks.append(rank)
        self.total += values[0]

    def append_nothing(self) -> None:
        """Add a place without log-probabilities: the first token of a prompt."""
        self.append([0] * (self._count + 1), [0.0] * (self._count + 1), 0)

    def __getstate__(self) -> dict[str, Any]:
        """For copies and other processes: with the texts of its tokens, without the tokenizer."""
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
        ranks = [self._ranks[index], *range(1, self._count + 1)]
        found: dict[int, Logprob] = {}
        for i, rank in enumerate(ranks, start):
            token = self._token_ids[i]
            if token not in found:  # the drawn one may be among the most likely
                found[token] = Logprob(self._values[i], rank, self._text(token))
        return found

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))


@dataclass(frozen=True)
class CompletionOutput:
    """One completion of a prompt.

    Attributes:
        index: its place among the completions of the request.
        text: the tokens as text; "" without a tokenizer or `detokenize`.
        token_ids: the generated tokens, a final end-of-sequence token included.
        finish_reason: "stop" at an end-of-sequence token or what `SamplingParams` says, "length" at
            `max_tokens` or where the model's context or the KV pool ends; None while it goes on
            (`LLM.stream`).
        stop_reason: the stop string or the id in `stop_token_ids` that ended it; None else.
        logprobs: for each token the drawn and the most likely ones, by their ids, if asked for.
        cumulative_logprob: the sum over the drawn tokens, if asked for.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None = None
    logprobs: Sequence[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None

    def finished(self) -> bool:
        """Whether it has ended."""
        return self.finish_reason is not None


@dataclass(frozen=True)
class ScoreOutput:
    """How likely a text is, by the model (`LLM.score`).

    Attributes:
        prompt_token_ids: the text as token ids.
        logprobs: natural logarithm of the probability of each token but the first, after those
            before it.
    """

    prompt_token_ids: list[int]
    logprobs: list[float]

    @property
    def total_logprob(self) -> float:
        """Of the whole text, given its first token."""
        return sum(self.logprobs)

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log-probability; NaN for a single token."""
        return math.exp(-self.total_logprob / len(self.logprobs)) if self.logprobs else math.nan


@dataclass(frozen=True)
class EmbeddingOutput:
    """A text as a vector: `embedding`, as long as the model's hidden states."""

    embedding: list[float]


@dataclass(frozen=True)
class EmbeddingRequestOutput:
    """What `LLM.embed` returns for a prompt.

    Attributes:
        request_id: as of a `RequestOutput`.
        outputs: the vector.
        prompt_token_ids: the prompt as token ids.
        finished: always True.
    """

    request_id: int
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    finished: bool


@dataclass(frozen=True)
class RequestMetrics:
    """Where the time of a request went, in seconds since it was queued.

    Attributes:
        queue_seconds: until it first ran (the first of its completions).
        first_token_seconds: until its first token was there (of any completion).
        total_seconds: until it had ended (the last of its completions).
        num_preemptions: how often its completions lost their place in the KV cache.
        decode_seconds: from the first token of a completion to its last, preemptions included;
            summed over the completions, which run side by side.
        num_decode_tokens: tokens after the first of a completion; summed likewise.
    """

    queue_seconds: float
    first_token_seconds: float
    total_seconds: float
    num_preemptions: int
    decode_seconds: float
    num_decode_tokens: int

    @property
    def seconds_per_token(self) -> float | None:
        """Mean time of a token after the first. None if no completion has more than one token."""
        return self.decode_seconds / self.num_decode_tokens if self.num_decode_tokens else None


@dataclass(frozen=True)
class RequestOutput(Mapping[str, Any]):
    """A finished request. Reads like vLLM's (`o.outputs[0].text`) and nano-vLLM's (`o["text"]`).

    Attributes:
        request_id: what `add_request` returned.
        prompt: the prompt as text, None when it came as token ids.
        prompt_token_ids: the prompt as token ids; what a stream gives of it shares one list.
        outputs: its completions.
        finished: whether it has ended; what `LLM.stream` gives before has the news only.
        num_cached_tokens: prompt tokens that the prefix cache served.
        prompt_logprobs: for each prompt token, None for the first, if asked for.
        embedding: the prompt's hidden states as one vector, for `LLM.embed`.
        metrics: where its time went.
    """

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int
    prompt_logprobs: TokenLogprobs | None = None
    embedding: list[float] | None = None
    metrics: RequestMetrics | None = None

    def __getitem__(self, key: str) -> Any:
        """`output["text"]` and `output["token_ids"]`: the first completion, as in nano-vLLM."""
        if key not in KEYS:
            raise KeyError(f"{key!r}; the keys are 'text' and 'token_ids'")
        return getattr(self.outputs[0], key)

    def __iter__(self) -> Iterator[str]:
        return iter(KEYS)

    def __len__(self) -> int:
        return len(KEYS)


@dataclass(frozen=True)
class BeamSearchSequence:
    """A sequence that a beam search has found.

    Attributes:
        tokens: prompt and generated tokens, a final end-of-sequence token included.
        cum_logprob: the sum of the log-probabilities of the generated ones.
        text: all `tokens` as text, special tokens included; "" without a tokenizer.
        finish_reason: "stop" at an end-of-sequence token, "length" at `max_tokens` or where the
            model's context or the KV pool ends.
        stop_reason: the end-of-sequence token that ended it; None else.
    """

    tokens: list[int]
    cum_logprob: float
    text: str = ""
    finish_reason: str | None = None
    stop_reason: int | None = None


@dataclass(frozen=True)
class BeamSearchOutput:
    """The best sequences for a prompt, the best first."""

    sequences: list[BeamSearchSequence]
