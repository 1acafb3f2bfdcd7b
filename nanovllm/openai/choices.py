"""Choices of answers in OpenAI's form, with their log-probabilities, and the usage.

As in https://platform.openai.com/docs/api-reference (chat and completions), with -9999 for the
logarithm of 0, as in vLLM, because JSON has no infinity.
"""

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

from nanovllm.outputs import CompletionOutput, Logprob
from nanovllm.requests.text import REPLACEMENT

LEAST_LOGPROB = -9999.0


def chat_choice(completion: CompletionOutput, max_shown: int | None) -> dict[str, Any]:
    """A choice of a chat; `max_shown` as in `chat_logprobs`."""
    places = completion.logprobs
    return {
        "index": completion.index,
        "message": {"role": "assistant", "content": completion.text, "refusal": None},
        "logprobs": None if places is None else chat_logprobs(places, max_shown),
        "finish_reason": completion.finish_reason,
    }


def text_choice(completion: CompletionOutput) -> dict[str, Any]:
    """A choice of a completion."""
    places = completion.logprobs
    return {
        "index": completion.index,
        "text": completion.text,
        "logprobs": None if places is None else text_logprobs(places),
        "finish_reason": completion.finish_reason,
    }


def usage(
    num_prompt: int, num_generated: int, num_cached: int, num_reasoning: int | None = None
) -> dict[str, Any]:
    """The tokens of a request; those of its reasoning, where a model may reason."""
    reasoning = {"completion_tokens_details": {"reasoning_tokens": num_reasoning}}
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_generated,
        "total_tokens": num_prompt + num_generated,
        "prompt_tokens_details": {"cached_tokens": num_cached},
        **({} if num_reasoning is None else reasoning),
    }


def chat_logprobs(
    places: Sequence[Mapping[int, Logprob]], max_shown: int | None, *, as_ids: bool = False
) -> dict[str, Any]:
    """The log-probabilities of the tokens of a chat.

    Args:
        places: dictionary for each token, which begins with the token itself.
        max_shown: number of most likely tokens to show at each place; None: all that are there,
            which are labels without ranks.
        as_ids: write "token_id:7" in the place of a token's text.
    """
    return {"content": [_place(place, max_shown, as_ids) for place in places], "refusal": None}


def _place(place: Mapping[int, Logprob], max_shown: int | None, as_ids: bool) -> dict[str, Any]:
    drawn = next(iter(place.items()))
    if max_shown is None:
        best = sorted(place.items(), key=lambda item: -item[1].logprob)
    else:
        ranked = [(item[1].rank or 0, item) for item in place.items()]
        best = [item for rank, item in sorted(ranked, key=itemgetter(0)) if rank <= max_shown]
    return {
        **_token(*drawn, as_ids),
        "top_logprobs": [_token(*each, as_ids) for each in best],
    }


def _token(token_id: int, token: Logprob, as_ids: bool) -> dict[str, Any]:
    text = token.decoded_token or ""
    # A part of a character has no text, and its bytes are not known here.
    data = None if REPLACEMENT in text else [*text.encode(errors="replace")]
    return {
        "token": _name(token_id, token, as_ids),
        "logprob": max(token.logprob, LEAST_LOGPROB),
        "bytes": data,
    }


def _name(token_id: int, token: Logprob, as_ids: bool) -> str:
    return f"token_id:{token_id}" if as_ids else token.decoded_token or ""


def text_logprobs(
    places: Sequence[Mapping[int, Logprob]], start: int = 0, *, as_ids: bool = False
) -> dict[str, Any]:
    """The log-probabilities of the tokens of a completion, as columns.

    Args:
        places: as in `chat_logprobs`.
        start: number of characters before the first token.
        as_ids: as in `chat_logprobs`.
    """
    drawn = [next(iter(place.items())) for place in places]
    offsets = [start]
    for _, token in drawn:
        offsets.append(offsets[-1] + len(token.decoded_token or ""))
    return {
        "tokens": [_name(*each, as_ids) for each in drawn],
        "token_logprobs": [max(token.logprob, LEAST_LOGPROB) for _, token in drawn],
        "top_logprobs": [_by_name(place, as_ids) for place in places],
        "text_offset": offsets[:-1],
    }


def _by_name(place: Mapping[int, Logprob], as_ids: bool) -> dict[str, float]:
    """The log-probabilities of a place by their tokens' texts. Parts of characters share one: then
    the drawn token has it, or the likelier one.
    """
    found: dict[str, float] = {}
    for token_id, token in place.items():
        found.setdefault(_name(token_id, token, as_ids), max(token.logprob, LEAST_LOGPROB))
    return found
