"""What `generate` returns: one `RequestOutput` per prompt."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

KEYS = ("text", "token_ids")  # of a RequestOutput as a mapping


@dataclass(frozen=True)
class CompletionOutput:
    """One completion of a prompt.

    Attributes:
        index: its place among the completions of the request.
        text: the tokens as text, without special tokens.
        token_ids: the generated tokens, a final end-of-sequence token included.
        finish_reason: "stop" at an end-of-sequence token, "length" at `max_tokens` or where the
            model's context or the KV pool ends.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str


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
    """

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int

    def __getitem__(self, key: str) -> Any:
        """`output["text"]` and `output["token_ids"]`: the first completion, as in nano-vLLM."""
        if key not in KEYS:
            raise KeyError(f"{key!r}; the keys are 'text' and 'token_ids'")
        return getattr(self.outputs[0], key)

    def __iter__(self) -> Iterator[str]:
        return iter(KEYS)

    def __len__(self) -> int:
        return len(KEYS)
