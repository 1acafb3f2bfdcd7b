"""Requests of OpenAI's batch format, and their results.

Input: `{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}`, or
"/v1/completions". Output, as in https://platform.openai.com/docs/api-reference/batch (request-input
and request-output): `{"id", "custom_id", "response": {"status_code", "request_id", "body"},
"error"}`. A refused request has the status 400, one that could not be computed 500, and OpenAI's
error object in the body, as its service answers; `error` repeats code and message, so that readers
of either find them.

Bodies and choices are those of `nanovllm.openai`. With `logprob_token_ids`, the `top_logprobs` of a
chat are these tokens and the drawn one; with `return_sampling_mask`, a choice has `sampling_mask`.
`model` is only copied to the result. If a body has no `max_tokens`, the job's default holds, not
the model's limit. Calls of `tools` stay in the text, as the model writes them; those of earlier
messages are read as `LLM.chat` reads them.
"""

import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from nanovllm.batch.rows import Ask, Row
from nanovllm.openai.bodies import CHAT, COMPLETIONS, Fields, read_chat, read_sampling
from nanovllm.openai.choices import chat_choice, text_choice, usage
from nanovllm.outputs import CompletionOutput, Mistake, RequestOutput
from nanovllm.requests.json_params import whole
from nanovllm.sampling_params import SamplingParams


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
    fields = Fields(body, "body.")
    if url == COMPLETIONS:
        prompt = _one_prompt(fields.take_given("prompt"))
        return Ask(read_sampling(fields, url, default, seed), prompt)
    messages, options = read_chat(fields)
    if body.get("tool_choice") == "none":
        options.pop("tools", None)
    return Ask(read_sampling(fields, url, default, seed), messages=messages, chat=options)


def _one_prompt(prompt: Any) -> Any:
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
        if params is None or isinstance(error, Mistake):
            status, kind, code = 400, "invalid_request_error", "invalid_request"
        response = {"error": {"message": error, "type": kind, "param": None, "code": code}}
        problem = {"code": code, "message": str(error)}
    else:
        body = row.fields["body"]
        is_chat, num_shown = row.fields["url"] == CHAT, int(body.get("top_logprobs") or 0)
        has_labels = params is not None and params.logprob_token_ids is not None
        max_shown = None if has_labels else num_shown
        make = partial(chat_choice, max_shown=max_shown) if is_chat else text_choice
        choices = [{**make(each), **_mask(each)} for each in output.outputs]
        num_generated = sum(len(each.token_ids) for each in output.outputs)
        response = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{request_id}",
            "object": "chat.completion" if is_chat else "text_completion",
            "created": int(time.time()),
            "model": body.get("model") or model,
            "choices": choices,
            "usage": usage(len(output.prompt_token_ids), num_generated, output.num_cached_tokens),
        }
        status, problem = 200, {}
    return {
        "id": f"batch_req_{row.result_id.hex()}",
        "custom_id": row.custom_id,
        "response": {"status_code": status, "request_id": request_id, "body": response},
        "error": problem or None,
    }


def _mask(completion: CompletionOutput) -> dict[str, Any]:
    """A field of a choice that OpenAI's have not, if it was asked for."""
    mask = completion.sampling_mask
    return {} if mask is None else {"sampling_mask": list(mask)}
