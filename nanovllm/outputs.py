"""What `generate` returns: one `RequestOutput` per prompt."""

from collections.abc import Iterator, Mapping
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


@dataclass(frozen=True)
class CompletionOutput:
    """One completion of a prompt.

    Attributes:
        index: its place among the completions of the request.
        text: the tokens as text; "" without a tokenizer or `detokenize`.
        token_ids: the generated tokens, a final end-of-sequence token included.
        finish_reason: "stop" at an end-of-sequence token or what `SamplingParams` says, "length" at
            `max_tokens` or where the model's context or the KV pool ends.
        stop_reason: the stop string or the id in `stop_token_ids` that ended it; None else.
        logprobs: for each token the drawn and the most likely ones, by their ids, if asked for.
        cumulative_logprob: the sum over the drawn tokens, if asked for.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: int | str | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None


@dataclass(frozen=True)
class RequestMetrics:
    """Where the time of a request went, in seconds; of several completions the first started.

    Attributes:
        queue_seconds: until it first ran.
        first_token_seconds: until its first token was there.
        total_seconds: until it had ended.
        num_preemptions: how often it lost its place in the KV cache.
    """

    queue_seconds: float
    first_token_seconds: float
    total_seconds: float
    num_preemptions: int


@dataclass(frozen=True)
class RequestOutput(Mapping[str, Any]):
    """A finished request. Reads like vLLM's (`o.outputs[0].text`) and nano-vLLM's (`o["text"]`).

    Attributes:
        request_id: what `add_request` returned.
        prompt: the prompt as text, None when it came as token ids.
        prompt_token_ids: the prompt as token ids.
        outputs: its completions.
        finished: always True: only finished requests are returned.
        num_cached_tokens: prompt tokens that the prefix cache served.
        metrics: where its time went.
    """

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int
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
