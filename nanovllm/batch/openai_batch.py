"""Requests of OpenAI's batch format, and their results.

Input: `{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}`, or
"/v1/completions". Output, as in https://platform.openai.com/docs/api-reference/batch (request-input
and request-output): `{"id", "custom_id", "response": {"status_code", "request_id", "body"},
"error"}`. A refused request has the status 400, one that could not be computed 500, and OpenAI's
error object in the body, as its service answers; `error` repeats code and message, so that readers
of either find them.

All of the body is read that `SamplingParams` and `LLM.chat` know, under their names and under
OpenAI's; a field that would ask for anything else is refused by name. With `logprob_token_ids`, the
`top_logprobs` of a chat are these tokens and the drawn one; with `return_sampling_mask`, a choice
has `sampling_mask`. `model` is only copied to the result. If a body has no `max_tokens`, the job's
default holds, not the model's limit. Calls of `tools` stay in the text, as the model writes them;
those of earlier messages are read as `LLM.chat` reads them.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

from nanovllm.batch.params import whole
from nanovllm.batch.rows import CHAT_FIELDS, PARAMETERS, Ask, Row, read_messages, read_params
from nanovllm.outputs import CompletionOutput, Logprob, RequestOutput
from nanovllm.requests.text import REPLACEMENT
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.checks import check_bool, check_int
from nanovllm.utils.options import Foreign, only

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
NOT_READ = {  # fields without an effect on results
    *("model", "user", "metadata", "store", "service_tier", "stream_options", "prompt_cache_key"),
    *("safety_identifier", "parallel_tool_calls"),
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
    "verbosity": (only(None), "say it in the messages"),
    "web_search_options": (only(None), "nothing is searched"),
}


def is_request(values: Any) -> bool:
    """Whether a row is meant to be in this format."""
    return (
        isinstance(values, Mapping)
        and isinstance(values.get("body"), Mapping)
        and "url" in values
        and not {"prompt", "prompt_token_ids", "messages"} & set(values)
    )


def read_request(
    values: Mapping[str, Any], default: SamplingParams, seed: int | None = None
) -> Ask:
    """Read a request.

    Args:
        values: fields of the request.
        default: sampling parameters for those that the body lacks.
        seed: seed for a request without one, as in `read_params`.

    Raises:
        TypeError, ValueError: naming the field that is wrong.
    """
    url, body = values.get("url"), values.get("body")
    if values.get("custom_id") is None:
        raise ValueError("`custom_id` must be given, got none")
    if values.get("method", "POST") != "POST":
        raise ValueError(f"`method` must be POST, got {values['method']!r}")
    if url not in (CHAT, COMPLETIONS):
        raise ValueError(f"`url` must be {CHAT} or {COMPLETIONS}, got {url!r}")
    if not isinstance(body, Mapping):
        raise TypeError(f"`body` must be an object, got {body!r}")
    given = dict(_body(body))
    own: dict[str, Any] = {}
    if url == CHAT:
        messages = given.pop("messages", None)
        if messages is None:
            raise ValueError("`body.messages` must be given, got none")
        own = {name: given.pop(name) for name in CHAT_FIELDS if name in given}
        if body.get("tool_choice") == "none":
            own.pop("tools", None)
        _chat_logprobs(given)
        ask = Ask(default, messages=read_messages(messages), chat=own)
    else:
        ask = Ask(default, _one_prompt(given.pop("prompt", None)))
    if unknown := sorted(set(given) - PARAMETERS):
        raise ValueError(f"`body.{unknown[0]}` is not supported for {url}: leave it out")
    return ask._replace(params=read_params(given, default, seed))


def _body(body: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The values in a body, under our names.

    Raises:
        TypeError, ValueError: for an unsupported value.
    """
    for name, value in body.items():
        is_nothing, remedy = UNSUPPORTED.get(name, (None, ""))
        if is_nothing is not None:
            if not is_nothing(whole(value)):
                raise ValueError(f"`body.{name}` {value!r} is not supported: {remedy}")
        elif value is None or name in NOT_READ:
            continue
        elif name == "max_completion_tokens":
            yield "max_tokens", value
        elif name == "response_format":
            yield from _form(value)
        else:
            yield name, value


def _form(value: Any) -> Iterator[tuple[str, Any]]:
    """`response_format` as `structured_outputs`."""
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "json_object":
        yield "structured_outputs", {"json_object": True}
    elif kind == "json_schema":
        named = value.get("json_schema")
        schema = named.get("schema") if isinstance(named, Mapping) else None
        if not isinstance(schema, Mapping):
            raise ValueError(
                f"`body.response_format.json_schema.schema` must be a JSON Schema, got {schema!r}"
            )
        yield "structured_outputs", {"json": schema}
    elif kind != "text":
        raise ValueError(
            "`body.response_format` must have the `type` text, json_object or json_schema, "
            f"got {value!r}"
        )


def _chat_logprobs(given: dict[str, Any]) -> None:
    """Read `logprobs` of a chat, which is a bool, and `top_logprobs`, which is their number."""
    is_wanted, count = given.pop("logprobs", False), given.pop("top_logprobs", None)
    check_bool("body.logprobs", is_wanted)
    if count is not None:
        count = whole(count)
        check_int("body.top_logprobs", count, 0)
        if not is_wanted:
            raise ValueError("`body.top_logprobs` needs `logprobs` true, got false")
    if is_wanted:
        given["logprobs"] = count or 0


def _one_prompt(prompt: Any) -> Any:
    if prompt is None:
        raise ValueError("`body.prompt` must be given, got none")
    if isinstance(prompt, list) and any(isinstance(item, (str, list)) for item in prompt):
        if len(prompt) > 1:
            raise ValueError(
                f"`body.prompt` must be one prompt, got a list of {len(prompt)}: write a row for "
                "each"
            )
        prompt = prompt[0]
    return whole(prompt) if isinstance(prompt, list) else prompt


def answer(
    row: Row,
    output: RequestOutput | None,
    error: str | None,
    model: str,
    params: SamplingParams | None,
) -> dict[str, Any]:
    """The line of the output file for a request.

    Args:
        row: row with the request.
        output: result; None: there is none.
        error: reason why there is none.
        model: name of the model, for a body that has none.
        params: sampling parameters of the request; None: it was refused, if it has no result.
    """
    request_id = row.key.hex()
    response: dict[str, Any]
    if error is not None or output is None:
        status, kind, code = 500, "server_error", "server_error"
        if params is None:
            status, kind, code = 400, "invalid_request_error", "invalid_request"
        response = {"error": {"message": error, "type": kind, "param": None, "code": code}}
        problem = {"code": code, "message": str(error)}
    else:
        body = row.fields["body"]
        is_chat, most = row.fields["url"] == CHAT, int(body.get("top_logprobs") or 0)
        has_labels = params is not None and params.logprob_token_ids is not None
        make = partial(_message, most=None if has_labels else most) if is_chat else _text
        choices = [{**make(each), **_mask(each)} for each in output.outputs]
        num_generated = sum(len(each.token_ids) for each in output.outputs)
        response = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{request_id}",
            "object": "chat.completion" if is_chat else "text_completion",
            "created": int(time.time()),
            "model": body.get("model") or model,
            "choices": choices,
            "usage": {
                "prompt_tokens": len(output.prompt_token_ids),
                "completion_tokens": num_generated,
                "total_tokens": len(output.prompt_token_ids) + num_generated,
                "prompt_tokens_details": {"cached_tokens": output.num_cached_tokens},
            },
        }
        status, problem = 200, {}
    return {
        "id": f"batch_req_{row.result_id.hex()}",
        "custom_id": row.custom_id,
        "response": {"status_code": status, "request_id": request_id, "body": response},
        "error": problem or None,
    }


def _message(completion: CompletionOutput, most: int | None) -> dict[str, Any]:
    """A choice of a chat, with up to `most` of the most likely tokens at each place; None: with
    labels, which have no ranks.
    """
    logprobs = None
    if completion.logprobs is not None:
        content = [_place(place, most) for place in completion.logprobs]
        logprobs = {"content": content, "refusal": None}
    return {
        "index": completion.index,
        "message": {"role": "assistant", "content": completion.text, "refusal": None},
        "logprobs": logprobs,
        "finish_reason": completion.finish_reason,
    }


def _place(place: Mapping[int, Logprob], most: int | None) -> dict[str, Any]:
    """The log-probabilities at a place of a chat; `place` begins with the token drawn."""
    drawn = next(iter(place.values()))
    if most is None:
        best = sorted(place.values(), key=lambda token: -token.logprob)
    else:
        ranked = [(token.rank or 0, token) for token in place.values()]
        best = [token for rank, token in sorted(ranked, key=itemgetter(0)) if rank <= most]
    return {**_token(drawn), "top_logprobs": [*map(_token, best)]}


def _mask(completion: CompletionOutput) -> dict[str, Any]:
    """A field of a choice that OpenAI's have not, if it was asked for."""
    mask = completion.sampling_mask
    return {} if mask is None else {"sampling_mask": list(mask)}


def _token(token: Logprob) -> dict[str, Any]:
    text = token.decoded_token or ""
    # A part of a character has no text, and its bytes are not known here.
    data = None if REPLACEMENT in text else [*text.encode(errors="replace")]
    return {"token": text, "logprob": token.logprob, "bytes": data}


def _text(completion: CompletionOutput) -> dict[str, Any]:
    """A choice of a completion."""
    return {
        "index": completion.index,
        "text": completion.text,
        "logprobs": None if completion.logprobs is None else _columns(completion.logprobs),
        "finish_reason": completion.finish_reason,
    }


def _columns(places: Sequence[Mapping[int, Logprob]]) -> dict[str, Any]:
    """The log-probabilities of the tokens of a completion."""
    drawn = [next(iter(place.values())) for place in places]
    texts = [token.decoded_token or "" for token in drawn]
    offsets = [0]
    for text in texts:
        offsets.append(offsets[-1] + len(text))
    return {
        "tokens": texts,
        "token_logprobs": [token.logprob for token in drawn],
        "top_logprobs": [
            {token.decoded_token or "": token.logprob for token in place.values()}
            for place in places
        ],
        "text_offset": offsets[:-1],
    }
