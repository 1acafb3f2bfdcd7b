"""Messages in OpenAI's form, checked and brought into the form that chat templates expect.

Null values are dropped: they mean nothing. `developer` becomes `system` if the template has no such
role. OpenAI's older names `function` and `function_call` become `tool` and `tool_calls`, a
`refusal` becomes the assistant's content, and `arguments` of calls become JSON or objects. Images
are taken out of their parts; anything but these and text is refused. Imports no torch.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from nanovllm.requests.image_parts import ImageParts
from nanovllm.requests.inputs import listed
from nanovllm.utils.checks import is_list, shown

Messages: TypeAlias = list[dict[str, Any]]


def read_conversation(
    conversation: Any, name: str, images: ImageParts, *, has_developer: bool
) -> Messages:
    """The messages, checked. All have `content`: a string, which templates concatenate with text,
    or where there are images a list of parts with `type` "text" or "image".

    Args:
        conversation: messages of the caller.
        name: name of the conversation in errors.
        images: collector of the images.
        has_developer: whether the template knows the role `developer`.

    Raises:
        TypeError, ValueError: naming the mistake.
    """
    messages = listed(conversation)
    if messages is None:
        raise TypeError(f"`{name}` must be a list of messages, got {type(conversation).__name__}")
    if not messages:
        raise ValueError(f"`{name}` must have at least one message, got none")
    read = [_read_message(message, f"{name}[{i}]", images) for i, message in enumerate(messages)]
    for message in read:
        if message["role"] == "developer" and not has_developer:
            message["role"] = "system"
    return read


def has_calls(messages: Messages) -> bool:
    """Whether any message has `tool_calls`."""
    return any("tool_calls" in message for message in messages)


def with_calls(messages: Messages, arguments: Callable[[Any], Any]) -> Messages:
    """The messages with the arguments of their calls in the form that `arguments` gives them:
    `arguments_as_object` or `arguments_as_json`.
    """
    return [
        {**message, "tool_calls": [_with_arguments(call, arguments) for call in calls]}
        if (calls := message.get("tool_calls"))
        else message
        for message in messages
    ]


def arguments_as_object(arguments: Any) -> Any:
    """The arguments of a call as an object; empty for None and for an empty string."""
    if isinstance(arguments, str):
        return json.loads(arguments) if arguments.strip() else {}
    return {} if arguments is None else arguments


def arguments_as_json(arguments: Any) -> str:
    """The arguments of a call as JSON; JSON that the model wrote stays as it is."""
    if isinstance(arguments, str) and arguments.strip():
        return arguments
    return json.dumps(arguments_as_object(arguments), ensure_ascii=False, default=dict)


def _with_arguments(call: Mapping[str, Any], arguments: Callable[[Any], Any]) -> dict[str, Any]:
    if "function" not in call:
        return {**call, "arguments": arguments(call.get("arguments"))}
    function = call["function"]
    return {**call, "function": {**function, "arguments": arguments(function.get("arguments"))}}


def _read_message(message: Any, name: str, images: ImageParts) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise TypeError(
            f"`{name}` must be a dictionary with `role` and `content`, got {type(message).__name__}"
        )
    if "role" not in message:
        raise ValueError(f"`{name}` must have a `role`, got the keys {sorted(map(str, message))}")
    role = message["role"]
    if not isinstance(role, str):
        raise TypeError(f'`{name}["role"]` must be a string, got {shown(role)}')
    fields = {key: value for key, value in message.items() if value is not None}
    if "audio" in fields:
        raise ValueError(
            f'`{name}["audio"]` must be None, got {shown(fields["audio"])}: sound is not supported'
        )
    for key in ("name", "tool_call_id"):
        if not isinstance(fields.get(key, ""), str):
            raise TypeError(f'`{name}["{key}"]` must be a string, got {shown(fields[key])}')
    if role == "function":
        fields = {"content": "", **fields, "role": "tool"}
    calls = _read_calls(fields, name)
    content = _read_content(fields, name, images)
    if content is None and (role != "assistant" or not calls):
        raise ValueError(
            f"`{name}` must have `content`, got none: only an assistant's message with "
            "`tool_calls` may omit it"
        )
    if calls:
        fields["tool_calls"] = calls
    return {**fields, "content": content or ""}


def _read_content(
    fields: dict[str, Any], name: str, images: ImageParts
) -> str | list[dict[str, str]] | None:
    """The text of a message, or its parts; `refusal` is removed from the fields."""
    content, refusal = fields.get("content"), fields.pop("refusal", None)
    if is_list(content):
        content = _read_parts(content, f'{name}["content"]', fields["role"], images)
    elif not isinstance(content, (str, type(None))):
        raise TypeError(
            f'`{name}["content"]` must be a string or a list of parts, got {shown(content)}'
        )
    if not refusal:
        return content
    if not isinstance(refusal, str):
        raise TypeError(f'`{name}["refusal"]` must be a string, got {shown(refusal)}')
    if fields["role"] != "assistant" or content:
        raise ValueError(
            f'`{name}["refusal"]` must be None except in an assistant\'s message without content, '
            f"got {shown(refusal)}"
        )
    return refusal


def _read_parts(
    parts: Sequence[Any], name: str, role: str, images: ImageParts
) -> str | list[dict[str, str]]:
    """The lines of a message; where there are images, its parts."""
    read = [
        None if images.take(part, f"{name}[{i}]") else _read_part(part, f"{name}[{i}]", role)
        for i, part in enumerate(parts)
    ]
    lines = [text for text in read if text is not None]
    if len(lines) == len(read):
        return "\n".join(lines)
    return [{"type": "image"} if text is None else {"type": "text", "text": text} for text in read]


def _read_part(part: Any, name: str, role: str) -> str:
    """The text of a part of a message."""
    kind, may_refuse = part.get("type") if isinstance(part, Mapping) else part, role == "assistant"
    if not isinstance(part, Mapping) or not (kind == "text" or (kind == "refusal" and may_refuse)):
        raise ValueError(f'`{name}` must be {{"type": "text", "text": ...}}, got {shown(kind)}')
    if not isinstance(part.get(kind), str):
        raise TypeError(f'`{name}["{kind}"]` must be a string, got {shown(part.get(kind))}')
    return part[kind]


def _read_calls(fields: dict[str, Any], name: str) -> list[Mapping[str, Any]]:
    """An assistant's calls; `tool_calls` and `function_call` are removed from the fields."""
    where, calls = f'{name}["tool_calls"]', fields.pop("tool_calls", [])
    old = fields.pop("function_call", None)
    if not is_list(calls):
        raise TypeError(f"`{where}` must be a list of calls, got {shown(calls)}")
    if old is not None:
        if calls:
            raise ValueError(
                f'`{name}["function_call"]` must be None beside tool_calls, got {shown(old)}'
            )
        calls, where = [{"type": "function", "function": old}], f'{name}["function_call"]'
        _check_function(old, where)
    else:
        for i, call in enumerate(calls):
            _check_call(call, f"{where}[{i}]")
    return list(calls)


def _check_call(call: Any, name: str) -> None:
    if not isinstance(call, Mapping):
        raise TypeError(f"`{name}` must be a dictionary with `function`, got {shown(call)}")
    kind = call.get("type")
    if kind is not None and kind != "function":
        raise ValueError(f'`{name}["type"]` must be "function", got {shown(kind)}')
    if "function" in call:
        _check_function(call["function"], f'{name}["function"]')
    else:  # transformers has this form, too
        _check_function(call, name)


def _check_function(function: Any, name: str) -> None:
    if not isinstance(function, Mapping):
        raise TypeError(f"`{name}` must be a dictionary with `name`, got {shown(function)}")
    if not isinstance(function.get("name"), str):
        raise TypeError(f'`{name}["name"]` must be a string, got {shown(function.get("name"))}')
    given = function.get("arguments")
    try:
        is_object = isinstance(arguments_as_object(given), Mapping)
    except ValueError as error:
        raise ValueError(
            f'`{name}["arguments"]` must be a JSON object, got {shown(given)}: {error}'
        ) from None
    if not is_object:
        raise TypeError(f'`{name}["arguments"]` must be a JSON object, got {shown(given)}')
