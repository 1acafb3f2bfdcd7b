"""Reasoning and calls of tools in the text of an answer.

The form is that of Hermes, Qwen2.5 and Qwen3 (https://github.com/NousResearch/Hermes-Function-Calling):

    <think>
    reasoning
    </think>

    text
    <tool_call>
    {"name": "f", "arguments": {"x": 1}}
    </tool_call>

The meaning of a text does not depend on the pieces in which it comes. A call is told from the
beginning of its arguments on, as they are written. They are the text of the model, up to the brace
that closes them: they break off where `max_tokens` cuts them, and may be no JSON where no form
holds the model to it. So clients must validate them, as with OpenAI
(https://platform.openai.com/docs/api-reference/chat/object). A call that is malformed before its
arguments stays in the content.
"""

import json
import re
from collections.abc import Generator, Iterator
from typing import Any, NamedTuple

THINK, THINK_END = "<think>", "</think>"
CALL, CALL_END = "<tool_call>", "</tool_call>"
SPACE = " \t\n\r"  # of JSON
# The text before the arguments of a call as models write it; a space here is any space of JSON.
HEAD = re.compile(r' \{ "name" : "([^"\\]+)" , "arguments" : (?=\{)'.replace(" ", f"[{SPACE}]*"))
# The beginning of another member of the object that has the arguments, and what may become one.
MEMBER = re.compile(rf'[{SPACE}]*,[{SPACE}]*"')
MAY_GO_ON = re.compile(rf"[{SPACE}]*(,[{SPACE}]*)?")


class Call(NamedTuple):
    """The news of a call of a tool.

    Attributes:
        name: name of the tool, which begins a call; None: the last one goes on.
        arguments: text of its arguments, or more of it.
    """

    name: str | None
    arguments: str


class Said(NamedTuple):
    """The contents of a part of an answer."""

    content: str
    reasoning: str
    calls: list[Call]


class ObjectText:
    """The text of an object of JSON, which comes in pieces and has an end.

    Args:
        depth: number of braces that are open before it.
    """

    def __init__(self, depth: int = 0) -> None:
        self._depth, self._in_string, self._is_escaped = depth, False, False

    def end_in(self, text: str) -> int | None:
        """The end of the object in more of its text; None: not there."""
        for at, char in enumerate(text):
            if self._in_string:
                self._in_string = self._is_escaped or char != '"'
                self._is_escaped = char == "\\" and not self._is_escaped
            elif char == '"':
                self._in_string = True
            elif char == "<":  # it begins a tag, as no JSON has it there: a brace is missing
                return at
            elif char in "{}":
                self._depth += 1 if char == "{" else -1
                if not self._depth:
                    return at + 1
        return None


class Splitter:
    """A reader of a text that comes in pieces. Newlines beside a tag belong to no text.

    Args:
        may_reason: whether the text may begin with reasoning.
        is_reasoning: whether it begins within reasoning, which the prompt has opened.
        may_call: whether calls are looked for.

    Attributes:
        is_reasoning: whether the text read so far ends within reasoning; None: not known yet.
        has_reasoned: whether it has reasoning.
    """

    def __init__(self, *, may_reason: bool, is_reasoning: bool, may_call: bool) -> None:
        self._text, self._is_end = "", False  # text not told yet, and whether it is all
        self._told: dict[str, str] = {}
        self._calls: list[Call] = []
        # Whether content was told, and whether a call came after it.
        self._has_content = self._is_parted = False
        self.is_reasoning: bool | None = None
        self.has_reasoned = False
        self._reader = self._read(may_reason, is_reasoning, may_call)

    def feed(self, text: str, *, is_end: bool = False) -> Said:
        """The part that is certain after more text; at the end, all that is left."""
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
        self.is_reasoning = self.has_reasoned = is_reasoning
        if is_reasoning:
            yield from self._read_up_to(THINK_END, "reasoning", is_after_tag=True)
            self.is_reasoning = False
        is_after_tag = is_reasoning
        while True:
            newlines = yield from self._read_up_to(
                CALL if may_call else None, "content", is_after_tag=is_after_tag
            )
            is_after_tag = yield from self._read_call(newlines)
            self._is_parted = is_after_tag and self._has_content

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
            if tag == THINK_END and self._is_end and at < 0:
                end -= self._begun(tag)  # which `max_tokens` has cut
            told = self._text[:end]
            if at >= 0:
                told = told.rstrip("\n")
            self._tell(kind, told)
            is_after_tag = is_after_tag and not told
            if tag and at >= 0:
                newlines = self._text[len(told) : at]
                self._text = self._text[at + len(tag) :]
                return newlines
            self._text = "" if self._is_end else self._text[end:]
            yield

    def _tell(self, kind: str, text: str) -> None:
        """Tell text; content on both sides of a call stands on two lines."""
        if kind == "content" and text:
            text = f"\n{text}" if self._is_parted else text
            self._has_content, self._is_parted = True, False
        self._told[kind] += text

    def _certain(self, tag: str) -> int:
        """Number of characters that neither begin the tag nor are newlines before it."""
        return len(self._text[: len(self._text) - self._begun(tag)].rstrip("\n"))

    def _begun(self, tag: str) -> int:
        """Number of characters at the end of the text that begin the tag."""
        sizes = range(len(tag), -1, -1)
        return next(size for size in sizes if self._text.endswith(tag[:size]))

    def _read_call(self, newlines: str) -> Generator[None, None, bool]:
        """Read what follows the tag of a call. Returns whether it was one."""
        searched = 0
        while (head := HEAD.match(self._text)) is None:
            at = self._text.find(CALL_END, searched)
            if at < 0 and not self._is_end:
                yield
                continue
            said = self._text[: at if at >= 0 else len(self._text) - self._begun(CALL_END)]
            try:
                call = _call_of(json.loads(said, strict=False))
            except (ValueError, RecursionError) as error:
                call = None
                if at >= 0 and str(error).startswith("Unterminated string"):
                    searched = at + len(CALL_END)  # this tag stands in a string
                    continue
            if call is None:
                said = said.partition(CALL_END)[0]
                self._tell("content", newlines + CALL + said)
                self._text = self._text[len(said) :]
                return False
            self._calls.append(call)
            self._text = "" if at < 0 else self._text[at + len(CALL_END) :]
            return True
        self._calls.append(Call(head[1], ""))
        self._text = self._text[head.end() :]
        yield from self._read_arguments()
        yield from self._read_members()
        yield from self._read_call_end()
        return True

    def _read_arguments(self) -> Generator[None, None, None]:
        """Read the arguments of a call, and tell them as they come."""
        arguments, end = ObjectText(), None
        while end is None:
            end = arguments.end_in(self._text)
            told = self._text[:end]
            self._text = self._text[len(told) :]
            if told:
                self._calls.append(Call(None, told))
            if end is None:
                yield

    def _read_members(self) -> Generator[None, None, None]:
        """Read the members that follow the arguments, up to the end of their object."""
        while MAY_GO_ON.fullmatch(self._text) and not self._is_end:
            yield
        if not MEMBER.match(self._text):
            return
        members, end = ObjectText(depth=1), None
        while end is None:
            end = members.end_in(self._text)
            self._text = "" if end is None else self._text[end:]
            if end is None:
                if self._is_end:
                    return
                yield

    def _read_call_end(self) -> Generator[None, None, None]:
        """Read what closes a call: a brace, or too many of them, and the tag, if it is there."""
        while True:
            self._text = self._text.lstrip(SPACE + "}")
            if not CALL_END.startswith(self._text):
                break
            if self._is_end:  # `max_tokens` cuts the tag
                self._text = ""
                break
            yield
        self._text = self._text.removeprefix(CALL_END)


def _call_of(value: Any) -> Call | None:
    """The whole call that a JSON value is, whatever the order of its members; None if it is none.

    Raises:
        ValueError: if it holds what no JSON can say: infinities, or halves of characters.
    """
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or not name:
        return None
    if "arguments" not in value and len(value) > 1:  # they may have another name
        return None
    arguments = value.get("arguments", {})
    if not isinstance(arguments, dict):
        return None
    said = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    f"{name}{said}".encode()
    return Call(name, said)
