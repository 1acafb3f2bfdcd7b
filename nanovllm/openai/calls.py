"""Reasoning and calls of tools in the text of an answer, and the form that makes a model call one.

The form is that of Hermes, Qwen2.5 and Qwen3 (https://github.com/NousResearch/Hermes-Function-Calling):

    <think>
    reasoning
    </think>

    text
    <tool_call>
    {"name": "f", "arguments": {"x": 1}}
    </tool_call>

What a text is does not depend on the pieces in which it comes. A call is one when it is whole and
its arguments are an object: so nobody is told half a call. Anything else stays in the content.
"""

import json
from collections.abc import Generator, Iterator, Sequence
from typing import Any, NamedTuple

from nanovllm.sampling.structured_output import json_rule

THINK, THINK_END = "<think>", "</think>"
CALL, CALL_END = "<tool_call>", "</tool_call>"
OPEN_THOUGHT = r"thought /\n*/"
THOUGHT = r"thought[lazy]: /(?s:.*)<\/think>/"  # up to the first tag
# As the templates of Qwen3 show calls to the model: one line of JSON with a space after , and :.
ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Call(NamedTuple):
    """A call of a tool.

    Attributes:
        name: name of the tool.
        arguments: JSON of an object.
    """

    name: str
    arguments: str


class Said(NamedTuple):
    """What a part of an answer says."""

    content: str
    reasoning: str
    calls: list[Call]


class Splitter:
    """A reader of a text that comes in pieces. Newlines beside a tag belong to no text.

    Args:
        may_reason: whether the text may begin with reasoning.
        is_reasoning: whether it begins within reasoning, which the prompt has opened.
        may_call: whether calls are looked for.
    """

    def __init__(self, *, may_reason: bool, is_reasoning: bool, may_call: bool) -> None:
        self._text, self._is_end = "", False  # what is not told yet, and whether it is all
        self._told: dict[str, str] = {}
        self._calls: list[Call] = []
        self._reader = self._read(may_reason, is_reasoning, may_call)

    def feed(self, text: str, *, is_end: bool = False) -> Said:
        """What is certain after more text; at the end, all that is left."""
        self._text, self._is_end = self._text + text, is_end
        self._told, self._calls = {"content": "", "reasoning": ""}, []
        next(self._reader)
        return Said(**self._told, calls=self._calls)

    # Each of these reads on from where it was when there is more text: `yield` waits for it.

    def _read(self, may_reason: bool, is_reasoning: bool, may_call: bool) -> Iterator[None]:
        if may_reason and not is_reasoning:
            while THINK.startswith(self._text.lstrip()) and not self._is_end:
                yield
            if is_reasoning := self._text.lstrip().startswith(THINK):
                self._text = self._text.lstrip()[len(THINK) :]
        if is_reasoning:
            yield from self._read_up_to(THINK_END, "reasoning", is_after_tag=True)
        is_after_tag = is_reasoning
        while True:
            newlines = yield from self._read_up_to(
                CALL if may_call else None, "content", is_after_tag=is_after_tag
            )
            is_after_tag = yield from self._read_call(newlines)

    def _read_up_to(
        self, tag: str | None, kind: str, *, is_after_tag: bool
    ) -> Generator[None, None, str]:
        """Read a text up to a tag, which is taken off. Returns the newlines before it."""
        while True:
            if is_after_tag:
                self._text = self._text.lstrip("\n")
            at = self._text.find(tag) if tag else -1
            end = at
            if at < 0:
                end = len(self._text) if self._is_end or not tag else self._certain(tag)
            told = self._text[:end]
            if at >= 0:
                told = told.rstrip("\n")
            self._told[kind] += told
            is_after_tag = is_after_tag and not told
            if tag and at >= 0:
                newlines = self._text[len(told) : at]
                self._text = self._text[at + len(tag) :]
                return newlines
            self._text = self._text[end:]
            yield

    def _certain(self, tag: str) -> int:
        """Number of characters that neither begin the tag nor are newlines before it."""
        text = self._text
        begun = next(size for size in range(len(tag), -1, -1) if text.endswith(tag[:size]))
        return len(text[: len(text) - begun].rstrip("\n"))

    def _read_call(self, newlines: str) -> Generator[None, None, bool]:
        """Read what follows the tag of a call. Returns whether it was one."""
        searched = 0
        while True:
            at = self._text.find(CALL_END, searched)
            if at < 0 and not self._is_end:
                yield
                continue
            said = self._text if at < 0 else self._text[:at]
            try:
                call = _call_of(json.loads(said, strict=False))
            except (ValueError, RecursionError) as error:
                call = None
                if at >= 0 and str(error).startswith("Unterminated string"):
                    searched = at + len(CALL_END)  # this tag stands in a string
                    continue
            if call is None:
                said = said.partition(CALL_END)[0]
                self._told["content"] += newlines + CALL + said
                self._text = self._text[len(said) :]
                return False
            self._calls.append(call)
            self._text = self._text[len(said) :].removeprefix(CALL_END)
            return True


def _call_of(value: Any) -> Call | None:
    """The call that an object of JSON is; None if it is none.

    Raises:
        ValueError: if it holds what no JSON can say: infinities, or halves of characters.
    """
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or not name:
        return None
    arguments = value.get("arguments", {})
    if not isinstance(arguments, dict):
        return None
    said = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    f"{name}{said}".encode()
    return Call(name, said)


def check_tools(tools: Any) -> None:
    """Raise unless these are OpenAI's tools."""
    if not isinstance(tools, list):
        raise TypeError(f"`tools` must be a list of tools, got {tools!r}")
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or tool.get("type", "function") != "function":
            raise ValueError(
                f'`tools[{i}]` must be {{"type": "function", "function": ...}}, got {tool!r}'
            )
        name = function.get("name")
        if not isinstance(name, str) or not name:
            raise ValueError(f"`tools[{i}].function.name` must be a name, got {name!r}")
        parameters = function.get("parameters")
        if not isinstance(parameters, (dict, type(None))):
            raise TypeError(
                f"`tools[{i}].function.parameters` must be a JSON Schema, got {parameters!r}"
            )


def called_tools(tools: Sequence[Any], choice: Any) -> list[Any]:
    """The tools of which one must be called: all, a named one, or none."""
    if choice in (None, "none", "auto"):
        return []
    if choice == "required":
        if not tools:
            raise ValueError("`tools` must be given with `tool_choice` required, got none")
        return list(tools)
    named = choice.get("function") if isinstance(choice, dict) else None
    name = named.get("name") if isinstance(named, dict) else None
    if name is None:
        raise ValueError(
            "`tool_choice` must be none, auto, required or "
            f'{{"type": "function", "function": {{"name": ...}}}}, got {choice!r}'
        )
    found = [tool for tool in tools if tool["function"]["name"] == name]
    if not found:
        raise ValueError(f"`tool_choice` must name one of the tools, got {name!r}")
    return found[:1]


def calls_form(tools: Sequence[Any], *, several: bool, thinks: str) -> str:
    """The form of an answer that calls these tools, in llguidance's dialect of Lark.

    Args:
        tools: tools of a request, checked.
        several: whether there may be several calls.
        thinks: rule for what stands before the calls, as in `with_reasoning`.
    """
    kinds = []
    for tool in tools:
        function = tool["function"]
        parameters = function.get("parameters") or {"type": "object"}
        members = {"name": {"const": function["name"]}, "arguments": parameters}
        kinds.append(
            {
                "type": "object",
                "properties": members,
                "required": [*members],
                "additionalProperties": False,
            }
        )
    schema = json.dumps({"anyOf": kinds, "x-guidance": ONE_LINE})
    calls = r'call ("\n" call)*' if several else "call"
    call = rf'call: "{CALL}\n" %json {schema} "\n{CALL_END}"'
    return f"start: {thinks} {calls}\n{call}\n{THOUGHT if thinks else ''}"


def with_reasoning(schema: str, thinks: str) -> str:
    """The form of JSON, by the text of its schema, after reasoning."""
    return f"start: {thinks} body\nbody: {json_rule(schema)}\n{THOUGHT}"


def reasoning_rule(prompt: str) -> str:
    """What stands in Lark for the reasoning before an answer in a form: what closes the reasoning
    that the prompt has opened, or reasoning that may be left out; "" after a prompt that has closed
    it.
    """
    if prompt.rstrip().endswith(THINK_END):
        return ""
    is_open = prompt.rstrip().endswith(THINK)
    return OPEN_THOUGHT if is_open else f'("{THINK}" {OPEN_THOUGHT})?'
