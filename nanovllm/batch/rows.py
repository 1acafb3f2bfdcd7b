"""`Row`: one line of the input, its key, and the request in it.

A row is an object with one of these, and with any fields of the caller's:

- `prompt`: text, or token ids; `prompt_token_ids`, for which `prompt` is then the text;
- `messages`: a conversation, for the chat template, with `tools`, `chat_template_kwargs`,
  `add_generation_prompt` and `continue_final_message` as in `LLM.chat`.

Beside either may stand `multi_modal_data`, `{"image": path}` or a list of paths, with
`mm_processor_kwargs`, as in `LLM.generate`: relative paths count from the working directory. Parts
of messages that have no image of their own, `{"type": "image"}`, take these in their order.

Any field of `SamplingParams` may stand beside them, or in an object `sampling_params`, where
unknown names are refused; null stands for the job's default, and integers may be written as 8.0.
All other fields are the caller's own: the result carries them, and a warning names those whose name
is nearly that of a parameter, or stands for an adapter.

A row is identified by its `custom_id` (a string or an integer), or without one by its number and
content. Of rows with the same `custom_id` the first is computed; the others carry an error. With a
`custom_id` goes a hash of the content, so that a row is told from another under the same one.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from xxhash import xxh3_64_digest, xxh3_128_digest

from nanovllm.batch.content import as_content
from nanovllm.images.prompts import images_of
from nanovllm.requests.json_params import CHAT_FIELDS, read_params, whole
from nanovllm.sampling_params import SamplingParams

KEY_BYTES = 16
CONTENT_BYTES = 8
IMAGE_FIELDS = ("multi_modal_data", "mm_processor_kwargs")


@dataclass(frozen=True)
class Row:
    """A row of the input.

    Attributes:
        number: place of the row in the input, from 0; blank lines do not count.
        key: 16 bytes that identify its result.
        fields: contents of the row; empty if they could not be read.
        error: reason why it cannot be used; None: nothing is wrong so far.
        is_openai: whether it is a request in OpenAI's batch format, as its result then is, too.
        content: 8 bytes that identify its contents; empty if `key` does.
    """

    number: int
    key: bytes
    fields: Mapping[str, Any]
    error: str | None = None
    is_openai: bool = False
    content: bytes = b""

    @property
    def custom_id(self) -> str | int | None:
        """The caller's id for the row."""
        return _own_id(self.fields)

    @property
    def result_id(self) -> bytes:
        """The id at the beginning of its result: the key, and the content if there is one."""
        return self.key + self.content


class Ask(NamedTuple):
    """The request in a row.

    Attributes:
        params: sampling parameters.
        prompt: prompt in a form for `LLM.add_request`; None for a conversation.
        messages: messages of the conversation.
        chat: arguments of `LLM.chat` that the row has of its own.
        images: images beside the conversation, for its parts that have none, by their names.
        limits: `mm_processor_kwargs` of a conversation.
    """

    params: SamplingParams
    prompt: Any = None
    messages: Any = None
    chat: Mapping[str, Any] = {}
    images: Mapping[str, Any] = {}
    limits: Any = None


def make_row(
    number: int, content: bytes, values: Any, error: str | None = None, is_openai: bool = False
) -> Row:
    """Make a row, from a line, say.

    Args:
        number: place of the row in the input.
        content: bytes that identify it if it has no `custom_id`.
        values: fields of the row.
        error: reason why there are none.
        is_openai: whether it is in OpenAI's batch format, see `Row`.
    """
    if error is None and not isinstance(values, Mapping):
        error = f"a row must be an object, got {type(values).__name__}"
    contents = {} if error is not None else values
    own_id = _own_id(contents)
    if own_id is not None and (isinstance(own_id, bool) or not isinstance(own_id, (str, int))):
        error = f"`custom_id` must be a string or an integer, got {own_id!r}"
        own_id = None
    if own_id is None:
        key = xxh3_128_digest(b"%d %b" % (number, content))
        return Row(number, key, contents, error, is_openai)
    key = xxh3_128_digest(f"custom_id {json.dumps(own_id)}".encode())
    return Row(number, key, contents, error, is_openai, _hash(contents, content))


def row_of_values(number: int, values: Any) -> Row:
    """Make a row of values that are no line, which are read for their bytes once."""
    has_id = isinstance(values, Mapping) and _own_id(values) is not None
    return make_row(number, b"" if has_id else as_content(values), values)


def _hash(values: Mapping[str, Any], content: bytes) -> bytes:
    """A hash of the meaning of a row, however it is written: its fields in any order, null as no
    field, 8.0 as 8. A hash of `content` if JSON has no form for its fields.
    """
    said = {name: value for name, value in values.items() if value is not None}
    for name, value in said.items():
        if isinstance(value, float) and value.is_integer():
            said[name] = int(value)
    if "messages" in said:
        said["messages"] = read_messages(said["messages"])
    with suppress(TypeError, ValueError, RecursionError):
        content = as_content(said, sort_keys=True)
    return xxh3_64_digest(content)


def _own_id(values: Mapping[str, Any]) -> Any:
    return whole(values.get("custom_id"))


def as_rows(items: Iterable[Row | Mapping[str, Any] | str]) -> Iterator[Row]:
    """Rows made of a caller's items: rows, dictionaries with their fields, or prompts."""
    seen: set[bytes] = set()
    for number, item in enumerate(items):
        if isinstance(item, Row):
            yield item
            continue
        values = {"prompt": item} if isinstance(item, str) else item
        yield _once(row_of_values(number, values), seen)


def refuse_doubles(rows: Iterable[Row]) -> Iterator[Row]:
    """The rows. One with the `custom_id` of an earlier row gets an error and a key of its own.

    It remembers some 100 bytes for each row with a `custom_id`.
    """
    seen: set[bytes] = set()
    for row in rows:
        yield _once(row, seen)


def _once(row: Row, seen: set[bytes]) -> Row:
    if row.custom_id is None or row.error is not None:
        return row
    if row.key not in seen:
        seen.add(row.key)
        return row
    error = f"`custom_id` must differ from row to row, got {row.custom_id!r} again"
    return replace(row, key=xxh3_128_digest(b"%d %b" % (row.number, row.key)), error=error)


def read_ask(
    values: Mapping[str, Any], default: SamplingParams, seed: int | None = None, chat: bool = False
) -> Ask:
    """Read the request in a row.

    Args:
        values: fields of the row.
        default: sampling parameters for those that it lacks.
        seed: seed for a row without one, as in `read_params`.
        chat: whether a prompt is the message of a user.

    Raises:
        TypeError, ValueError: naming the field that is wrong.
    """
    params = read_params(values, default, seed)
    prompt, token_ids = values.get("prompt"), values.get("prompt_token_ids")
    messages = values.get("messages")
    data, limits = values.get(IMAGE_FIELDS[0]), _limits(values.get(IMAGE_FIELDS[1]))
    if messages is not None:
        if prompt is not None or token_ids is not None:
            raise ValueError("a row must have either `messages` or a prompt, got both")
        own = {name: values[name] for name in CHAT_FIELDS if values.get(name) is not None}
        images = images_of(data, "row")
        return Ask(params, messages=read_messages(messages), chat=own, images=images, limits=limits)
    if prompt is None and token_ids is None:
        names = ", ".join(f"`{name}`" for name in values)
        raise ValueError(
            "a row must have `prompt`, `prompt_token_ids` or `messages`, got "
            f"{'the fields ' + names if names else 'no fields'}"
        )
    given = {"multi_modal_data": data, "mm_processor_kwargs": limits}
    more = {name: value for name, value in given.items() if value is not None}
    if token_ids is not None:
        text = {} if prompt is None else {"prompt": prompt}
        return Ask(params, {"prompt_token_ids": whole(token_ids), **text, **more})
    if chat and isinstance(prompt, str):
        images = images_of(data, "row")
        parts = [{"type": "image"}] * len(images) + [{"type": "text", "text": prompt}]
        content = parts if images else prompt
        message = {"role": "user", "content": content}
        return Ask(params, messages=[message], images=images, limits=limits)
    if isinstance(prompt, list):
        prompt = whole(prompt)
        return Ask(params, {"prompt_token_ids": prompt, **more} if more else prompt)
    return Ask(params, {"prompt": prompt, **more} if more else prompt)


def _limits(given: Any) -> Any:
    """`mm_processor_kwargs` of a row, in which integers may be written as 8.0."""
    if not isinstance(given, Mapping):
        return given
    return {key: _limits(value) if key == "size" else whole(value) for key, value in given.items()}


def read_messages(messages: Any) -> Any:
    """A conversation without nulls, which columns of tables have for keys of other messages."""
    if not isinstance(messages, list):
        return messages
    return [
        {key: value for key, value in message.items() if value is not None}
        if isinstance(message, dict)
        else message
        for message in messages
    ]
