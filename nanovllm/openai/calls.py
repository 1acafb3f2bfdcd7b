"""Reasoning and calls of tools in the text of an answer, and the form that makes a model call one.

The form is that of Hermes, Qwen2.5 and Qwen3 (https://github.com/NousResearch/Hermes-Function-Calling):

    <think>
    reasoning
    </think>

    text
    <tool_call>
    {"name": "f", "arguments": {"x": 1}}
    </tool_call>

What a text is does not depend on the pieces in which it comes.
"""

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from nanovllm.sampling.structured_output import json_rule

THINK, THINK_END = "<think>", "</think>"
CALL, CALL_END = "<tool_call>", "</tool_call>"
HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]+)"\s*,\s*"arguments"\s*:\s*(?=\{)')
TAIL = re.compile(r"\s*\}?\s*")
OPEN_THOUGHT = r"thought /\n*/"
THOUGHT = r"thought[lazy]: /(?s:.*)<\/think>/"  # up to the first tag
# As the templates of Qwen3 show calls to the model: one line of JSON with a space after , and :.
ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Piece(NamedTuple):
    """A part of an answer.

    Attributes:
        kind: "content", "reasoning", "call" (a new one, by its name) or "arguments" (of the last).
        text: text of the part.
    """

    kind: str
    text: str


class Splitter:
    """A reader of a text that comes in pieces.

    Newlines between a tag and a text belong to neither. A call that is malformed before its
    arguments begin stays in the content.

    Args:
        may_reason: whether the text may begin with reasoning.
        is_reasoning: whether it begins within reasoning, which the prompt has opened.
        may_call: whether calls are looked for.
    """

    def __init__(self, *, may_reason: bool, is_reasoning: bool, may_call: bool) -> None:
        self._text, self._is_fresh = "", is_reasoning
        self._tag = CALL if may_call else ""
        self._read = self._content
        if is_reasoning:
            self._read = self._reasoning
        elif may_reason:
            self._read = self._start
        self._depth, self._in_string, self._is_escaped = 0, False, False

    @property
    def is_reasoning(self) -> bool:
        """Whether what comes next is reasoning, so far."""
        return self._read == self._reasoning

    def feed(self, text: str, *, is_end: bool = False) -> list[Piece]:
        """The parts that are certain after more text; at the end, all that are left."""
        self._text += text
        pieces: list[Piece] = []
        read = None
        while read != self._read:  # a state that changes nothing waits for more
            read = self._read
            pieces += [piece for piece in read(is_end) if piece.text]
        return pieces

    def _start(self, is_end: bool) -> Iterator[Piece]:
        text = self._text.lstrip()
        if text.startswith(THINK):
            self._go(self._reasoning, text[len(THINK) :], is_fresh=True)
        elif is_end or not THINK.startswith(text):
            self._go(self._content, self._text)
        yield from ()

    def _reasoning(self, is_end: bool) -> Iterator[Piece]:
        found, text = self._up_to(THINK_END, is_end)
        yield Piece("reasoning", text)
        if found:
            self._go(self._content, self._text, is_fresh=True)

    def _content(self, is_end: bool) -> Iterator[Piece]:
        found, text = self._up_to(self._tag, is_end)
        yield Piece("content", text)
        if found:
            self._go(self._head, self._text)

    def _up_to(self, tag: str, is_end: bool) -> tuple[bool, str]:
        """Whether the tag is there, and the text before it, as far as it is certain; both are
        taken off the text.
        """
        if self._is_fresh:
            self._text = self._text.lstrip("\n")
        at = self._text.find(tag) if tag else -1
        if at >= 0:
            said, self._text = self._text[:at].rstrip("\n"), self._text[at + len(tag) :]
            return True, said
        end = len(self._text)
        if not is_end and tag:
            end -= next(k for k in range(len(tag) - 1, -1, -1) if self._text.endswith(tag[:k]))
            end = len(self._text[:end].rstrip("\n"))
        said, self._text = self._text[:end], self._text[end:]
        self._is_fresh = self._is_fresh and not said
        return False, said

    def _head(self, is_end: bool) -> Iterator[Piece]:
        """A call up to its arguments."""
        head, end = HEAD.match(self._text), self._text.find(CALL_END)
        if head is not None and (end < 0 or head.end() <= end):
            yield Piece("call", head[1])
            self._depth, self._in_string, self._is_escaped = 0, False, False
            self._go(self._arguments, self._text[head.end() :])
        elif end >= 0 or is_end:
            said = self._text if end < 0 else self._text[:end]
            rest = self._text[len(said) :]
            call = _whole_call(said)
            if call is None:
                yield Piece("content", CALL + said)
                self._go(self._content, rest)
            else:
                yield from call
                self._go(self._content, rest.removeprefix(CALL_END), is_fresh=True)

    def _arguments(self, is_end: bool) -> Iterator[Piece]:
        """An object, up to the brace that closes it."""
        for i, char in enumerate(self._text):
            if self._in_string:
                is_quote = char == '"' and not self._is_escaped
                self._is_escaped = char == "\\" and not self._is_escaped
                self._in_string = not is_quote
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if not self._depth:
                    yield Piece("arguments", self._text[: i + 1])
                    self._go(self._tail, self._text[i + 1 :])
                    return
        yield Piece("arguments", self._text)
        self._text = ""

    def _tail(self, is_end: bool) -> Iterator[Piece]:
        """The rest of a call, as far as it is there."""
        match = TAIL.match(self._text)
        assert match is not None, "it matches the empty text"
        rest = self._text[match.end() :]
        if rest.startswith(CALL_END) or is_end or not CALL_END.startswith(rest):
            self._go(self._content, rest.removeprefix(CALL_END), is_fresh=True)
        yield from ()

    def _go(self, read: Any, text: str, *, is_fresh: bool = False) -> None:
        self._read, self._text, self._is_fresh = read, text, is_fresh


def _whole_call(text: str) -> list[Piece] | None:
    """A call whose members are in another order than usual; None if it is none."""
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        return None
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        return None
    said = json.dumps(arguments, ensure_ascii=False)
    return [Piece("call", call["name"]), Piece("arguments", said)]


def cut_calls_as_text(messages: Sequence[Any]) -> list[Any]:
    """Messages in which a call whose arguments break off, as max_tokens leaves it, is the text that
    the model wrote: a template could not show it otherwise. What is no message stays for the check.
    """
    return [_cut_calls_as_text(message) for message in messages]


def _cut_calls_as_text(message: Any) -> Any:
    calls = message.get("tool_calls") if isinstance(message, dict) else None
    if not isinstance(calls, list) or not isinstance(message.get("content") or "", str):
        return message
    cut = [call["function"] for call in calls if _is_cut(call)]
    if not cut:
        return message
    texts = [message["content"]] if message.get("content") else []
    for function in cut:
        name = json.dumps(function["name"], ensure_ascii=False)
        texts.append(f'{CALL}\n{{"name": {name}, "arguments": {function["arguments"]}')
    whole = [call for call in calls if not _is_cut(call)]
    return {**message, "content": "\n".join(texts), "tool_calls": whole or None}


def _is_cut(call: Any) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return False
    arguments = function.get("arguments")
    if not isinstance(arguments, str) or not arguments.lstrip().startswith("{"):
        return False
    try:
        json.loads(arguments)
    except ValueError:
        return True
    return False


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
