"""Tools of a request, calls of them in its messages, and forms of answers that call them or begin
with reasoning.
"""

import json
from collections.abc import Sequence
from typing import Any

from nanovllm.openai.calls import CALL, CALL_END, THINK, THINK_END
from nanovllm.sampling.structured_output import json_rule
from nanovllm.utils.checks import shown

OPEN_THOUGHT = r"thought /\n*/"
THOUGHT = r"thought[lazy]: /(?s:.*)<\/think>/"  # up to the first tag
TAGS = (CALL, CALL_END, THINK, THINK_END)
# As the templates of Qwen3 show calls to the model: one line of JSON with a space after , and :.
ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def check_tools(tools: Any) -> None:
    """Raise unless these are OpenAI's tools."""
    if not isinstance(tools, list):
        raise TypeError(f"`tools` must be a list of tools, got {shown(tools)}")
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or tool.get("type", "function") != "function":
            raise ValueError(
                f'`tools[{i}]` must be {{"type": "function", "function": ...}}, got {shown(tool)}'
            )
        name = function.get("name")
        if not isinstance(name, str) or not name:
            raise ValueError(f"`tools[{i}].function.name` must be a name, got {shown(name)}")
        parameters = function.get("parameters")
        if not isinstance(parameters, (dict, type(None))):
            raise TypeError(
                f"`tools[{i}].function.parameters` must be a JSON Schema, got {shown(parameters)}"
            )


def called_tools(tools: Sequence[Any], choice: Any) -> list[Any]:
    """The tools of which one must be called: all, a named one, or none."""
    if choice in (None, "none", "auto"):
        return []
    if choice == "required":
        if not tools:
            raise ValueError("`tools` must be given with `tool_choice` required, got none")
        return list(tools)
    is_function = isinstance(choice, dict) and choice.get("type", "function") == "function"
    named = choice.get("function") if is_function else None
    name = named.get("name") if isinstance(named, dict) else None
    if name is None:
        raise ValueError(
            "`tool_choice` must be none, auto, required or "
            f'{{"type": "function", "function": {{"name": ...}}}}, got {shown(choice)}'
        )
    found = [tool for tool in tools if tool["function"]["name"] == name]
    if not found:
        raise ValueError(f"`tool_choice` must name one of the tools, got {shown(name)}")
    return found[:1]


def cut_calls_as_text(message: Any) -> Any:
    """A message of a client in which a call whose arguments are no JSON, as those of a cut one, is
    text as the model wrote it: chat templates cannot show it otherwise. Any other value stays as it
    is.
    """
    if not isinstance(message, dict):
        return message
    calls, content = message.get("tool_calls"), message.get("content") or ""
    if not isinstance(calls, list) or not isinstance(content, str):
        return message
    texts = [_text_if_cut(call) for call in calls]
    if not any(texts):
        return message
    whole = [call for call, text in zip(calls, texts, strict=True) if text is None]
    said = "\n".join(text for text in (content, *texts) if text)
    return {**message, "content": said, "tool_calls": whole or None}


def _text_if_cut(call: Any) -> str | None:
    """The text of a call whose arguments begin as an object and are no JSON; None for any other."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return None
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(name, str) or not isinstance(arguments, str):
        return None
    try:
        json.loads(arguments)
    except ValueError:
        if arguments.lstrip().startswith("{"):
            shown = json.dumps(name, ensure_ascii=False)
            return f'{CALL}\n{{"name": {shown}, "arguments": {arguments}'
    return None


def calls_form(tools: Sequence[Any], *, several: bool, thinks: str) -> str:
    """The form of an answer that calls these tools, in llguidance's dialect of Lark.

    Args:
        tools: tools of a request, checked.
        several: whether there may be several calls.
        thinks: rule for what stands before the calls, from `reasoning_rule`.
    """
    return _lark("calls", thinks, _calls_rules(tools, several=several))


def answer_form(schema: str, tools: Sequence[Any], *, several: bool, thinks: str) -> str:
    """The form of an answer that is JSON, by the text of its schema, or calls tools, if there are
    any. The other arguments are those of `calls_form`.
    """
    rules = f"body: {json_rule(schema)}"
    if not tools:
        return _lark("body", thinks, rules)
    return _lark("(body | calls)", thinks, f"{rules}\n{_calls_rules(tools, several=several)}")


def _lark(answer: str, thinks: str, rules: str) -> str:
    return f"start: {thinks} {answer}\n{rules}\n{THOUGHT if thinks else ''}"


def _calls_rules(tools: Sequence[Any], *, several: bool) -> str:
    """The rule for calls of these tools, and those that it needs. Each schema is a rule's own, as
    its references begin at its root.
    """
    kinds = []
    for tool in tools:
        function = tool["function"]
        parameters = function.get("parameters") or {}
        kind = parameters.get("type", "object")
        if kind != "object" and not (isinstance(kind, list) and "object" in kind):
            raise ValueError(
                "`tools` must have `parameters` of the `type` object to be called in a form, got "
                f"{shown(kind)}"
            )
        schema = {**parameters, "type": "object", "x-guidance": ONE_LINE}
        name = json.dumps(function["name"], ensure_ascii=False)
        head = json.dumps(f'{{"name": {name}, "arguments": ')
        kinds.append(f"{head} %json {json.dumps(schema)}")
    calls = r'call ("\n" call)*' if several else "call"
    return (
        f"calls: {calls}\n"
        rf'call: "{CALL}\n" object "}}\n{CALL_END}"'
        f"\nobject: {' | '.join(kinds)}"
    )


def reasoning_rule(prompt: str, begun: str = "") -> str:
    """The rule in Lark for the reasoning before an answer in a form: the end of the reasoning that
    the prompt has opened, or reasoning that may be left out; "" after a prompt that has closed it.

    Args:
        prompt: text that the answer goes on from.
        begun: message at its end that the answer continues.
    """
    is_open = prompt.rstrip().endswith(THINK) or begun.rfind(THINK) > begun.rfind(THINK_END)
    if not is_open and (prompt.rstrip().endswith(THINK_END) or THINK_END in begun):
        return ""
    return OPEN_THOUGHT if is_open else f'("{THINK}" {OPEN_THOUGHT})?'


def special_tags(tokenizer: Any) -> bool:
    """Whether a tokenizer has a tag of calls or reasoning for a special token, which texts lack."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    return any(token.special and token.content in TAGS for token in added)
