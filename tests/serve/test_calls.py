"""Reasoning and calls of tools in texts: the same whatever the pieces are in which a text comes."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.openai.calls import Splitter
from nanovllm.openai.tools import cut_calls_as_text

CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
TURNED = '<tool_call>{"arguments": {}, "name": "g"}'
KINDS = [(False, False, True), (True, False, True), (True, True, True), (True, False, False)]


def read(pieces, may_reason=True, is_reasoning=False, may_call=True):
    """The content, the reasoning, and names and arguments of the calls."""
    splitter = Splitter(may_reason=may_reason, is_reasoning=is_reasoning, may_call=may_call)
    content, reasoning, calls = "", "", []
    for i, piece in enumerate(pieces):
        said = splitter.feed(piece, is_end=i == len(pieces) - 1)
        content += said.content
        reasoning += said.reasoning
        for name, arguments in said.calls:
            if name is not None:
                calls.append([name, ""])
            calls[-1][1] += arguments
    return content, reasoning, calls


@pytest.mark.parametrize(
    ("text", "content", "reasoning", "calls"),
    [
        ("hello\n\n", "hello\n\n", "", []),
        (CALL, "", "", [["f", '{"x": 1}']]),
        (f"one\n\n{CALL}\n{CALL}\n", "one", "", [["f", '{"x": 1}']] * 2),
        (f"<think>\nhm\n\n</think>\n\nwell\n{CALL}", "well", "hm", [["f", '{"x": 1}']]),
        ("<think>\n\n</think>\n\nyes", "yes", "", []),
        ("<think>endless\n", "", "endless\n", []),
        ("a <think> b</think>", "a <think> b</think>", "", []),
        # Content on both sides of calls stands on two lines.
        (f"a\n{CALL}\nb{CALL}{CALL}\n\nc\n", "a\nb\nc\n", "", [["f", '{"x": 1}']] * 3),
        (f"{CALL}\nb", "b", "", [["f", '{"x": 1}']]),
        (f"a{CALL}\n<tool_call>{{}}", "a\n<tool_call>{}", "", [["f", '{"x": 1}']]),
        # The text of a string is no tag and no brace.
        (
            '<tool_call>{"name": "f", "arguments": {"x": "}\\"</tool_call>{"}}</tool_call>',
            *("", "", [["f", '{"x": "}\\"</tool_call>{"}']]),
        ),
        (
            '<tool_call>{"name": "</tool_call>", "arguments": {}}',
            *("", "", [["</tool_call>", "{}"]]),
        ),
        ('<tool_call>{"arguments": {}, "name": "g"}</tool_call>', "", "", [["g", "{}"]]),
        ('<tool_call>{"name": "now"}</tool_call>', "", "", [["now", "{}"]]),
        (
            '<tool_call>{"name": "\\u0066", "arguments": {"a":1}}</tool_call>',
            *("", "", [["f", '{"a": 1}']]),
        ),
        # Without its last tag, or cut.
        ('<tool_call>\n{"name": "f", "arguments": {"x": [1]}}', "", "", [["f", '{"x": [1]}']]),
        (
            'Well.\n\n<tool_call>\n{"name": "f", "arguments": {"x": [1',
            *("Well.", "", [["f", '{"x": [1']]),
        ),
        # A tag at its end that was cut is no text.
        *[(f"a{CALL[:-cut]}", "a", "", [["f", '{"x": 1}']]) for cut in (1, 6, 11, 12)],
        *[(f"a{TURNED}</tool_call>"[:-cut], "a", "", [["g", "{}"]]) for cut in (1, 11, 12)],
        ("<think>hm\n</thi", "", "hm\n", []),
        ('<tool_call>{"name":"f","arguments":{"x": "\\', "", "", [["f", '{"x": "\\']]),
        # Arguments are the text of the model, JSON or not, up to their last brace.
        (
            '<tool_call>{"name" :"f",\n"arguments": { "x":NaN,y}}\n</tool_call>\nok',
            *("ok", "", [["f", '{ "x":NaN,y}']]),
        ),
        (
            '<tool_call>{"name": "f", "arguments": {"x": "\\ud800"}}</tool_call>',
            *("", "", [["f", '{"x": "\\ud800"}']]),
        ),
        # Too many braces, and too few.
        (
            f'<tool_call>{{"name": "f", "arguments": {{}}}}}}\n</tool_call>\n{CALL}',
            *("", "", [["f", "{}"], ["f", '{"x": 1}']]),
        ),
        (
            f'<tool_call>{{"name": "f", "arguments": {{"x": {{}}</tool_call>{CALL}',
            *("", "", [["f", '{"x": {}'], ["f", '{"x": 1}']]),
        ),
        ('<tool_call>{"name": "f", "arguments": {}}< more', "< more", "", [["f", "{}"]]),
        # Members after the arguments mean nothing, as those before them.
        (
            '<tool_call>{"name": "f", "arguments": {}, "id": {"a": "}"}}\n</tool_call>b',
            *("b", "", [["f", "{}"]]),
        ),
        (
            '<tool_call>{"id": 3, "name": "f", "arguments": {}}</tool_call>b',
            *("b", "", [["f", "{}"]]),
        ),
        ('<tool_call>{"name": "f", "arguments": {}, "id"', "", "", [["f", "{}"]]),
        ('<tool_call>{"name": "f", "arguments": {}}, or', ", or", "", [["f", "{}"]]),
        ('<tool_call>{"name": "f", "arguments": {}}, "or"', ', "or"', "", [["f", "{}"]]),
        ('<tool_call>{"name": "f", "arguments": {}, "id": 3} or', "or", "", [["f", "{}"]]),
        (
            f'<tool_call>{{"name": "f", "arguments": {{}}, "id": "</tool_call>"}}\n{CALL}',
            *("", "", [["f", "{}"], ["f", '{"x": 1}']]),
        ),
        # What is malformed before its arguments stays, with the newlines before it.
        (
            '<tool_call>{"name": "f", "parameters": {"x": 1}}</tool_call>',
            *('<tool_call>{"name": "f", "parameters": {"x": 1}}</tool_call>', "", []),
        ),
        (
            'Well.\n\n<tool_call>{"name": "f", "arguments": ["x"]}</tool_call>',
            *('Well.\n\n<tool_call>{"name": "f", "arguments": ["x"]}</tool_call>', "", []),
        ),
        (
            '<tool_call>{"name": "f",\xa0"arguments": {}}</tool_call>',
            *('<tool_call>{"name": "f",\xa0"arguments": {}}</tool_call>', "", []),
        ),
        (
            '<tool_call>{"arguments": {"x": NaN}, "name": "f"}</tool_call>',
            *('<tool_call>{"arguments": {"x": NaN}, "name": "f"}</tool_call>', "", []),
        ),
        (
            f'<tool_call>{{"name": "f</tool_call>\n{CALL}',
            *('<tool_call>{"name": "f</tool_call>', "", [["f", '{"x": 1}']]),
        ),
        ("<tool_call>\nno\n</tool_call>!", "<tool_call>\nno\n</tool_call>!", "", []),
        ('<tool_call>{"name": 1}</tool_call>', '<tool_call>{"name": 1}</tool_call>', "", []),
        ('<tool_call>{"name": "f"', '<tool_call>{"name": "f"', "", []),
        ("a <tool_cal", "a <tool_cal", "", []),
    ],
)
def test_what_texts_say(text, content, reasoning, calls):
    assert read([text]) == (content, reasoning, calls)
    assert read([*text, ""]) == (content, reasoning, calls), "letter by letter"


def test_a_prompt_may_have_opened_the_reasoning():
    assert read(["hm\n</think>\n\nyes"], is_reasoning=True) == ("yes", "hm", [])
    assert read(["hm"], is_reasoning=True) == ("", "hm", [])
    assert read([f"<think>a</think>{CALL}"], may_reason=False, may_call=False) == (
        f"<think>a</think>{CALL}",
        "",
        [],
    )


PARTS = st.sampled_from(
    [
        *("<think>", "</think>", "<tool_call>", "</tool_call>", "\n", "\n\n", " ", "}", "{", '"'),
        *("\\", "<", "</", "tool_call>", "a", "é", "\xa0", '{"name": "f", "arguments": {"x": 1}}'),
        *('{"name": "f", "arguments": ', '{"x": {"y": "<tool_call>"}}', '{"arguments": {}}'),
        *('{"name": "f', '", "arguments": {', '{"x": "', ', "', ","),
        *('{"arguments": {}, "name": "g"}', '{"name": "</tool_call>", "arguments": {}}', CALL),
    ]
)


@settings(deadline=None)
@given(
    st.lists(PARTS, max_size=12).map("".join),
    st.lists(st.integers(0, 200), max_size=20),
    st.sampled_from(KINDS),
)
def test_every_split_says_the_same(text, cuts, kind):
    ends = [*sorted(min(cut, len(text)) for cut in cuts), len(text)]
    starts = [0, *ends[:-1]]
    pieces = [text[start:end] for start, end in zip(starts, ends, strict=True)]
    assert read(pieces, *kind) == read([text], *kind)
    assert read([*text, ""], *kind) == read([text], *kind)


@settings(deadline=None)
@given(
    st.dictionaries(
        st.text(max_size=9),
        st.recursive(st.text(max_size=9) | st.integers() | st.none(), st.lists, max_leaves=4),
        max_size=4,
    ),
    st.booleans(),
    st.text(alphabet="ab \n", max_size=5),
)
def test_every_call_that_is_written_is_read(arguments, ascii_only, before):
    said = json.dumps(arguments, ensure_ascii=ascii_only)
    text = f'{before}<tool_call>\n{{"name": "f", "arguments": {said}}}\n</tool_call>'
    content, reasoning, [[name, found]] = read([*text, ""])
    assert (content, reasoning, name) == (before.rstrip("\n"), "", "f")
    assert found == said
    assert json.loads(found) == arguments


def test_a_call_is_told_as_it_is_written():
    """From the beginning of its arguments on, whatever a call may hold."""
    said = json.dumps({"text": 'a } " \\ </tool_call> {' * 9, "y": {"z": [{}]}})
    splitter = Splitter(may_reason=False, is_reasoning=False, may_call=True)
    for letter in '<tool_call>\n{"name": "f", "arguments": ':
        assert splitter.feed(letter) == ("", "", [])
    assert splitter.feed(said[0]).calls == [("f", ""), (None, "{")]
    for letter in said[1:]:
        assert splitter.feed(letter) == ("", "", [(None, letter)])
    for letter in "}\n</tool_call>":
        assert splitter.feed(letter) == ("", "", [])
    assert splitter.feed("\nb", is_end=True) == ("b", "", [])


def test_a_call_that_was_cut_is_text_again():
    """As the model wrote it; other calls, and mistakes, stay."""
    text = 'Well.\n<tool_call>\n{"name": "f", "arguments": {"x": "a'
    content, _, [[name, arguments]] = read([text])
    cut = {"type": "function", "function": {"name": name, "arguments": arguments}}
    whole = {"type": "function", "function": {"name": "g", "arguments": "{}"}}
    message = {"role": "assistant", "content": content, "tool_calls": [whole, cut]}
    assert cut_calls_as_text(message) == {**message, "content": text, "tool_calls": [whole]}
    alone = {**message, "content": None, "tool_calls": [cut]}
    assert cut_calls_as_text(alone) == {**alone, "content": text[6:], "tool_calls": None}
    mistakes = ({}, {"function": "f"}, {"function": {"name": "f", "arguments": "no"}})
    for calls in ([whole], ["x"], "x", [{"function": {}}], [*mistakes], None):
        other = {**message, "tool_calls": calls}
        assert cut_calls_as_text(other) == other
    for other in ("x", None, {**message, "content": 3}):
        assert cut_calls_as_text(other) == other
