"""Conversations as prompts: the arguments of `LLM.chat`, checked and rendered.

Imports no torch, and transformers only for tools that are functions; the tokenizer comes from the
engine.
"""

import logging
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

from nanovllm.images.prompts import ImagePrompts, NoImages
from nanovllm.requests.image_parts import ImageParts, may_name_hosts
from nanovllm.requests.inputs import encode, listed
from nanovllm.requests.messages import (
    Messages,
    arguments_as_json,
    arguments_as_object,
    has_calls,
    read_conversation,
    with_calls,
)
from nanovllm.utils.checks import check_bool, is_list, shown

Message: TypeAlias = Mapping[str, Any]
Conversation: TypeAlias = Sequence[Message]
Tool: TypeAlias = "Mapping[str, Any] | Callable[..., Any]"

logger = logging.getLogger(__name__)

PROBE = "nanovllm-probe"  # an argument's name that no conversation has
ARGUMENTS = {  # arguments of apply_chat_template, which are not the caller's variables
    *("conversation", "messages", "tools", "chat_template", "tokenize"),
    *("add_generation_prompt", "continue_final_message"),
}
WARNED: set[tuple[str, str]] = set()  # templates and warnings: renderers are made by the call
JINJA = ("<template>", "<unknown>")  # file names of templates in frames; "<unknown>": unparsable


class ChatRenderer:
    """A renderer of conversations as prompts, by a chat template. Arguments are `LLM.chat`'s, and
    `max_chars`, of longer prompts that are refused before they are tokenised.

    Raises:
        TypeError, ValueError: naming the argument that is wrong.
    """

    def __init__(
        self,
        tokenizer: Any,
        images: ImagePrompts | NoImages,
        *,
        chat_template: str | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        tools: Sequence[Tool] | None,
        chat_template_kwargs: Mapping[str, Any] | None,
        max_chars: int | None = None,
    ) -> None:
        _check_template(tokenizer, chat_template)
        check_bool("add_generation_prompt", add_generation_prompt)
        check_bool("continue_final_message", continue_final_message)
        if continue_final_message and add_generation_prompt:
            raise ValueError(
                "`add_generation_prompt` must be False with `continue_final_message`, got True: "
                "a message is either begun or continued"
            )
        if tools is not None and not is_list(tools):
            raise TypeError(f"`tools` must be a list of tools, got {shown(tools)}")
        variables = {} if chat_template_kwargs is None else chat_template_kwargs
        if not isinstance(variables, Mapping):
            raise TypeError(f"`chat_template_kwargs` must be a dictionary, got {shown(variables)}")
        if taken := sorted(ARGUMENTS & set(variables)):
            raise ValueError(
                f"`chat_template_kwargs` must hold variables of the template, got {taken[0]!r}: "
                "pass the arguments of chat() by themselves"
            )
        self._tokenizer, self._images = tokenizer, images
        self._max_chars = max_chars
        self._template = str(chat_template or tokenizer.chat_template)
        self._has_developer = "developer" in self._template
        self._options = {
            **variables,
            "tools": tools and [_read_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)],
            "chat_template": chat_template,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
        }
        if tools and "tools" not in self._template:
            self._warn_once(
                "the chat template does not use `tools`, so the model does not see them: use a "
                "model whose template does, or give one (`chat_template`, or chat_template.jinja "
                "in the model's directory)"
            )

    def render(
        self, conversation: Any, name: str, images: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Render a conversation as a prompt.

        Args:
            conversation: messages.
            name: name of the conversation in errors.
            images: images for its parts that have none, in their order, by their names in errors.
        """
        parts = ImageParts(self._images, images or {})
        messages = read_conversation(conversation, name, parts, has_developer=self._has_developer)
        parts.end(name)
        try:
            if has_calls(messages):
                messages = with_calls(messages, self._form_of_calls(messages, name))
            text = self._apply(messages)
        except Exception as error:  # anything that the code in the template raises
            raise ValueError(
                f"`{name}` cannot be rendered by the chat template "
                f"({type(error).__name__}: {error}){_line_of(error)}"
            ) from None
        # The template has written the special tokens; the tokenizer must not add them again.
        tokenised = self._images.in_text(text) if parts.found else text
        token_ids = encode(
            self._tokenizer, tokenised, name, max_chars=self._max_chars, add_special_tokens=False
        )
        self._images.check_parts(token_ids, len(parts.found), name)
        prompt = {"prompt": text, "prompt_token_ids": token_ids}
        return {**prompt, "multi_modal_data": {"image": parts.found}} if parts.found else prompt

    def may_fetch(self, conversation: Any) -> bool:
        """Whether rendering a conversation may wait for a host."""
        return self._images.fetches and may_name_hosts(conversation)

    def _apply(self, messages: Messages) -> str:
        return self._tokenizer.apply_chat_template(messages, tokenize=False, **self._options)

    def _form_of_calls(self, messages: Messages, name: str) -> Callable[[Any], Any]:
        """The form in which the template needs the arguments of calls: objects, unless it
        concatenates them with text or prints them as Python does; then JSON, which other templates
        would quote.
        """
        probe, texts = with_calls(messages, lambda _: {PROBE: ""}), []
        for form in (arguments_as_object, arguments_as_json):
            with suppress(Exception):  # anything that the code in the template raises
                texts.append(self._apply(with_calls(probe, form)))
                if PROBE in texts[-1] and f"{{'{PROBE}'" not in texts[-1]:
                    return form
        if texts:
            self._warn_once(
                "the chat template leaves out the arguments of `tool_calls`, first in `%s`", name
            )
        return arguments_as_object

    def _warn_once(self, message: str, *values: str) -> None:
        """Warn of the template; once is enough for many conversations."""
        if (self._template, message) not in WARNED:
            WARNED.add((self._template, message))
            logger.warning(message, *values)


def name_conversations(messages: Any) -> dict[str, Any]:
    """One conversation or many, keyed by their names in errors."""
    items = listed(messages)
    if items is None:
        raise TypeError(
            "`messages` must be a list of messages or a list of conversations, "
            f"got {type(messages).__name__}"
        )
    # A message is a mapping, a conversation something else that holds messages.
    if any(isinstance(item, Iterable) and not isinstance(item, (str, Mapping)) for item in items):
        return {f"messages[{i}]": conversation for i, conversation in enumerate(items)}
    return {"messages": items}


def _check_template(tokenizer: Any, chat_template: Any) -> None:
    """Raise unless there is a template, and a tokenizer, which renders it."""
    if tokenizer is None:
        raise ValueError(
            "chat() needs a tokenizer, but the model directory has none: pass token ids to "
            "generate()"
        )
    if not isinstance(chat_template, (str, type(None))):
        raise TypeError(
            f"`chat_template` must be the text of a template, got {shown(chat_template)}"
        )
    if chat_template == "":
        raise ValueError(
            "`chat_template` must be the text of a template, got '': pass None for the "
            "checkpoint's own"
        )
    if chat_template is None and not tokenizer.chat_template:
        raise ValueError(
            "`chat_template` must be given for a checkpoint that has none, got None: pass one, "
            "or call generate()"
        )


def _line_of(error: Exception) -> str:
    """The line of the template that raised an error, in words; "" if other code raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename in JINJA]
    return f" in line {lines[-1]} of the template" if lines else ""


def _read_tool(tool: Any, name: str) -> dict[str, Any]:
    if isinstance(tool, Mapping):
        return dict(tool)
    from transformers.utils import get_json_schema

    try:
        return get_json_schema(tool)
    except Exception as error:  # for other objects, anything that `inspect` raises
        raise TypeError(
            f"`{name}` must be a dictionary, or a function with types and a docstring, "
            f"got {shown(tool)}: {error}"
        ) from None
