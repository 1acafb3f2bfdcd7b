"""OpenAI's bodies and answers: a body as an `Ask`, and a completion as a choice.

All of a body is read that `SamplingParams` and `LLM.chat` know, under their names and under
OpenAI's; a field that would ask for anything else is refused by name. Answers are those of
https://platform.openai.com/docs/api-reference (chat and completions), with -9999 for the logarithm
of 0, as in vLLM, because JSON has no infinity.
"""

from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

from nanovllm.batch.params import whole
from nanovllm.batch.rows import CHAT_FIELDS, PARAMETERS, Ask, read_messages, read_params
from nanovllm.outputs import CompletionOutput, Logprob
from nanovllm.requests.text import REPLACEMENT
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.checks import check_bool, check_int
from nanovllm.utils.options import Foreign, only

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LEAST_LOGPROB = -9999.0
NOT_READ = {  # fields without an effect on results
    *("model", "user", "metadata", "store", "service_tier", "stream_options", "prompt_cache_key"),
    *("safety_identifier", "parallel_tool_calls", "prompt_cache_retention"),
}
UNSUPPORTED: Foreign = {
    "audio": (only(None), "answers are text"),
    "best_of": (only(None, 1), "pass n"),
    "echo": (only(None, False), "results do not repeat the prompt"),
    "function_call": (only(None, "none"), "pass tools"),
    "functions": (only(None, []), "pass tools"),
    "modalities": (only(None, ["text"]), "answers are text"),
    "prediction": (only(None), "leave it out"),
    "reasoning_effort": (only(None), "pass chat_template_kwargs"),
    "stream": (only(None, False), "results come whole"),
    "suffix": (only(None, ""), "put it into the prompt"),
    "tool_choice": (only(None, "none", "auto"), "the model chooses: leave it out"),
    "verbosity": (only(None, "medium"), "say it in the messages"),
    "web_search_options": (only(None), "nothing is searched"),
}


# -- bodies ---------------------------------------------------------------------------------------


def read_body(
    body: Mapping[str, Any],
    url: str,
    default: SamplingParams,
    seed: int | None = None,
    where: str = "body.",
) -> Ask:
    """Read the body of a request.

    Args:
        body: fields of the body.
        url: `CHAT` or `COMPLETIONS`.
        default: sampling parameters for those that the body lacks.
        seed: seed for a request without one, as in `read_params`.
        where: prefix of the fields' names in errors.

    Raises:
        TypeError, ValueError: naming the field that is wrong.
    """
    given = dict(_values(body, where))
    if url == CHAT:
        messages = given.pop("messages", None)
        if messages is None:
            raise ValueError(f"`{where}messages` must be given, got none")
        own = {name: given.pop(name) for name in CHAT_FIELDS if name in given}
        if body.get("tool_choice") == "none":
            own.pop("tools", None)
        _chat_logprobs(given, where)
        ask = Ask(default, messages=read_messages(messages), chat=own)
    else:
        ask = Ask(default, _one_prompt(given.pop("prompt", None), where))
    if unknown := sorted(set(given) - PARAMETERS):
        raise ValueError(f"`{where}{unknown[0]}` is not supported for {url}: leave it out")
    return ask._replace(params=read_params(given, default, seed))


def _values(body: Mapping[str, Any], where: str) -> Iterator[tuple[str, Any]]:
    """The values in a body, under our names.

    Raises:
        TypeError, ValueError: for an unsupported value.
    """
    for name, value in body.items():
        is_nothing, remedy = UNSUPPORTED.get(name, (None, ""))
        if is_nothing is not None:
            if not is_nothing(whole(value)):
                raise ValueError(f"`{where}{name}` {value!r} is not supported: {remedy}")
        elif value is None or name in NOT_READ:
            continue
        elif name == "max_completion_tokens":
            yield "max_tokens", value
        elif name == "response_format":
            yield from _form(value, where)
        else:
            yield name, value


def _form(value: Any, where: str) -> Iterator[tuple[str, Any]]:
    """`response_format` as `structured_outputs`."""
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "json_object":
        yield "structured_outputs", {"json_object": True}
    elif kind == "json_schema":
        named = value.get("json_schema")
        schema = named.get("schema") if isinstance(named, Mapping) else None
        if not isinstance(schema, Mapping):
            raise ValueError(
                f"`{where}response_format.json_schema.schema` must be a JSON Schema, got {schema!r}"
            )
        yield "structured_outputs", {"json": schema}
    elif kind != "text":
        raise ValueError(
            f"`{where}response_format` must have the `type` text, json_object or json_schema, "
            f"got {value!r}"
        )


def _chat_logprobs(given: dict[str, Any], where: str) -> None:
    """Read `logprobs` of a chat, which is a bool, and `top_logprobs`, which is their number."""
    is_wanted, count = given.pop("logprobs", False), given.pop("top_logprobs", None)
    check_bool(f"{where}logprobs", is_wanted)
    if count is not None:
        count = whole(count)
        check_int(f"{where}top_logprobs", count, 0)
        if not is_wanted:
            raise ValueError(f"`{where}top_logprobs` needs `logprobs` true, got false")
    if is_wanted:
        given["logprobs"] = count or 0


def _one_prompt(prompt: Any, where: str) -> Any:
    if prompt is None:
        raise ValueError(f"`{where}prompt` must be given, got none")
    if isinstance(prompt, list) and any(isinstance(item, (str, list)) for item in prompt):
        if len(prompt) > 1:
            raise ValueError(
                f"`{where}prompt` must be one prompt, got a list of {len(prompt)}: write a row for "
                "each"
            )
        prompt = prompt[0]
    return whole(prompt) if isinstance(prompt, list) else prompt


# -- answers --------------------------------------------------------------------------------------


def chat_choice(completion: CompletionOutput, most: int | None) -> dict[str, Any]:
    """A choice of a chat; `most` as in `chat_logprobs`."""
    places = completion.logprobs
    return {
        "index": completion.index,
        "message": {"role": "assistant", "content": completion.text, "refusal": None},
        "logprobs": None if places is None else chat_logprobs(places, most),
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


def usage(num_prompt: int, num_generated: int, num_cached: int) -> dict[str, Any]:
    """The tokens of a request."""
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_generated,
        "total_tokens": num_prompt + num_generated,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }


def chat_logprobs(
    places: Sequence[Mapping[int, Logprob]], most: int | None, *, as_ids: bool = False
) -> dict[str, Any]:
    """The log-probabilities of the tokens of a chat.

    Args:
        places: dictionary for each token, which begins with the token itself.
        most: number of most likely tokens to show at each place; None: all that are there, which
            are labels without ranks.
        as_ids: write "token_id:7" in the place of a token's text.
    """
    return {"content": [_place(place, most, as_ids) for place in places], "refusal": None}


def _place(place: Mapping[int, Logprob], most: int | None, as_ids: bool) -> dict[str, Any]:
    drawn = next(iter(place.items()))
    if most is None:
        best = sorted(place.items(), key=lambda item: -item[1].logprob)
    else:
        ranked = [(item[1].rank or 0, item) for item in place.items()]
        best = [item for rank, item in sorted(ranked, key=itemgetter(0)) if rank <= most]
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
        "top_logprobs": [
            {_name(*each, as_ids): max(each[1].logprob, LEAST_LOGPROB) for each in place.items()}
            for place in places
        ],
        "text_offset": offsets[:-1],
    }
