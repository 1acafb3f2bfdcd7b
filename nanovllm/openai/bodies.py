"""The fields of bodies that files of batches and the server read alike.

A body has OpenAI's fields and all of `SamplingParams`; one that would ask for anything else is
refused by its name.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from nanovllm.requests.json_params import CHAT_FIELDS, PARAMETERS, read_params, whole
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.checks import check_bool, check_int, shown
from nanovllm.utils.options import Foreign, only

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
# Fields without an effect on results. A caller with a meaning for some takes these off before.
IGNORED = (
    "metadata",
    "model",
    "parallel_tool_calls",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "stream_options",
    "user",
)
# Fields that must ask for nothing, by the values that do, and the remedies for all others.
UNSUPPORTED: Foreign = {
    "audio": (only(None), "answers are text"),
    "best_of": (only(None, 1), "pass n"),
    "cache_salt": (only(None), "all requests share the prefix cache"),
    "chat_template": (only(None), "the template is not a request's: pass chat_template_kwargs"),
    "documents": (only(None, []), "put them into the messages"),
    "echo": (only(None, False), "results do not repeat the prompt"),
    "function_call": (only(None, "none"), "pass tools"),
    "functions": (only(None, []), "pass tools"),
    "guided_choice": (only(None), "pass structured_outputs"),
    "guided_grammar": (only(None), "pass structured_outputs"),
    "guided_json": (only(None), "pass structured_outputs"),
    "guided_regex": (only(None), "pass structured_outputs"),
    "modalities": (only(None, ["text"]), "answers are text"),
    "prediction": (only(None), "leave it out"),
    "priority": (only(None, 0), "requests are computed as they come"),
    "reasoning_effort": (only(None), "pass chat_template_kwargs"),
    "request_id": (only(None), "pass custom_id"),
    "stream": (only(None, False), "results come whole"),
    "suffix": (only(None, ""), "put it into the prompt"),
    "thinking_token_budget": (only(None), "pass max_tokens"),
    "tool_choice": (only(None, "none", "auto"), "the model chooses: leave it out"),
    "use_beam_search": (only(None, False), "the library has LLM.beam_search"),
    "verbosity": (only(None, "medium"), "say it in the messages"),
    "vllm_xargs": (only(None, {}), "there are no other parameters"),
    "web_search_options": (only(None), "nothing is searched"),
}
# Parameters that errors begin with, and the fields of bodies that they may have been made of.
SENT_AS: Mapping[str, Sequence[str]] = {
    "max_tokens": ["max_completion_tokens"],
    "logprobs": ["top_logprobs"],
    "structured_outputs": ["response_format", "tools"],
    "json": ["response_format"],
    "grammar": ["response_format", "tools"],  # after reasoning, and of tools that must be called
    "prompt": ["messages", "input"],
}
# The beginning of an error about an unknown parameter, or member of `structured_outputs`.
NO_OPTION = re.compile(r"(Structured|Sampling)\w*Params\(\) has no option `(.*?)`; ", re.DOTALL)


class Fields:
    """The fields of a JSON object, which are taken one by one. Null is no value.

    Args:
        values: the object.
        where: prefix of its fields' names in errors.

    Attributes:
        names: names of all fields that it had.
    """

    def __init__(self, values: Mapping[str, Any], where: str = "") -> None:
        self._left, self.where, self.names = dict(values), where, frozenset(values)

    def take(self, name: str) -> Any:
        """Take a field of any kind; None if there is none."""
        return self._left.pop(name, None)

    def take_bool(self, name: str, default: bool = False) -> bool:
        """Take a field that is true or false."""
        value = self.take(name)
        value = default if value is None else value
        check_bool(f"{self.where}{name}", value)
        return value

    def take_int(self, name: str, minimum: int) -> int | None:
        """Take an integer; None if there is none."""
        value = whole(self.take(name))
        if value is not None:
            check_int(f"{self.where}{name}", value, minimum)
        return value

    def take_if(self, name: str, value: Any) -> bool:
        """Take a field if it has this value. Returns whether it had."""
        found = only(value)(self._left.get(name))
        if found:
            self.take(name)
        return found

    def take_given(self, name: str) -> Any:
        """Take a field that must be there."""
        value = self.take(name)
        if value is None:
            raise ValueError(f"`{self.where}{name}` must be given, got none")
        return value

    def take_all(self, names: Collection[str]) -> dict[str, Any]:
        """Take the fields of these names that have a value."""
        found = {name: self.take(name) for name in names}
        return {name: value for name, value in found.items() if value is not None}

    def refuse(self, unsupported: Foreign) -> None:
        """Take fields that ask for nothing, and refuse any other value of theirs."""
        for name, (is_nothing, remedy) in unsupported.items():
            if name in self._left and not is_nothing(value := whole(self.take(name))):
                raise ValueError(f"`{self.where}{name}` {shown(value)} is not supported: {remedy}")

    def end(self, url: str | None = None) -> None:
        """Refuse the fields that nobody has taken, which this endpoint has not."""
        left = [name for name, value in self._left.items() if value is not None]
        if left:
            of = "" if url is None else f" for {url}"
            raise ValueError(f"`{self.where}{min(left)}` is not supported{of}: leave it out")


def read_chat(fields: Fields) -> tuple[Any, dict[str, Any]]:
    """Take the messages of a chat, and its arguments of `LLM.chat`."""
    options = fields.take_all(CHAT_FIELDS)
    return fields.take_given("messages"), options


def read_sampling(
    fields: Fields, url: str, default: SamplingParams, seed: int | None = None
) -> SamplingParams:
    """The sampling parameters of a body, which are all that is left of it.

    Args:
        fields: fields of the body.
        url: `CHAT` or `COMPLETIONS`.
        default: sampling parameters for those that the body lacks.
        seed: seed for a request without one, as in `read_params`.

    Raises:
        TypeError, ValueError: naming the field that is wrong.
    """
    fields.refuse(UNSUPPORTED)
    fields.take_all(IGNORED)
    given = {
        "max_tokens": fields.take("max_completion_tokens"),
        "structured_outputs": _read_form(fields),
    }
    if url == CHAT:
        given["logprobs"] = _read_chat_logprobs(fields)
    given = {name: value for name, value in given.items() if value is not None}
    parameters = fields.take_all(PARAMETERS)
    if "structured_outputs" in given and "structured_outputs" in parameters:
        raise ValueError(
            f"`{fields.where}structured_outputs` must be null beside `response_format`, got "
            f"{shown(parameters['structured_outputs'])}: pass one of them"
        )
    given = {**parameters, **given}
    fields.end(url)
    with named_as_sent(fields.names):
        return read_params(given, default, seed)


@contextmanager
def named_as_sent(names: Collection[str]) -> Iterator[None]:
    """Errors about parameters, under the names that a body with these fields has for them."""
    try:
        yield
    except (TypeError, ValueError, ImportError) as error:
        raise type(error)(as_sent(str(error), names)) from None


def as_sent(message: str, names: Collection[str]) -> str:
    """A message that begins with a parameter, under the name that a body with these has for it."""
    message = message.replace("`sampling_params.", "`")
    if wrong := NO_OPTION.match(message):
        where = "structured_outputs." if wrong[1] == "Structured" else ""
        return f"`{where}{wrong[2]}` is not supported: {message[wrong.end() :]}"
    own = re.match(r"`(\w+)", message)
    if own is None:
        return message
    has_form = "structured_outputs" in names  # then none is made of tools
    for sent in SENT_AS.get(own[1], ()):
        if sent in names and not (has_form and sent == "tools"):
            return f"`{sent}{message[own.end() :]}"
    return message


def _read_form(fields: Fields) -> dict[str, Any] | None:
    """`response_format` as `structured_outputs`; None: any text."""
    value = fields.take("response_format")
    if value is None:
        return None
    form = Fields(value if isinstance(value, Mapping) else {}, f"{fields.where}response_format.")
    kind = form.take("type")
    if kind not in ("text", "json_object", "json_schema"):
        raise ValueError(
            f"`{fields.where}response_format` must have the `type` text, json_object or "
            f"json_schema, got {shown(value)}"
        )
    named = form.take("json_schema") if kind == "json_schema" else None
    form.end()
    if kind != "json_schema":
        return {"json_object": True} if kind == "json_object" else None
    form = Fields(named if isinstance(named, Mapping) else {}, f"{form.where}json_schema.")
    schema = form.take("schema")
    if not isinstance(schema, Mapping):
        raise ValueError(f"`{form.where}schema` must be a JSON Schema, got {shown(schema)}")
    form.take_all(("name", "description", "strict"))  # a schema always holds
    form.end()
    return {"json": schema}


def _read_chat_logprobs(fields: Fields) -> int | None:
    """The number of `top_logprobs` if `logprobs` is true, as it is in a chat."""
    is_wanted, count = fields.take_bool("logprobs"), fields.take_int("top_logprobs", 0)
    if count and not is_wanted:
        raise ValueError(f"`{fields.where}top_logprobs` needs `logprobs` true, got false")
    return (count or 0) if is_wanted else None
