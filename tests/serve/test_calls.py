"""Reasoning and calls of tools in texts: the same whatever the pieces are in which a text comes."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.openai.calls import Splitter

CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
KINDS = [(False, False, True), (True, False, True), (True, True, True), (True, False, False)]


def read(pieces, may_reason=True, is_reasoning=False, may_call=True):
    """The content, the reasoning, and names and arguments of the calls."""
    splitter = Splitter(may_reason=may_reason, is_reasoning=is_reasoning, may_call=may_call)
    content, reasoning, calls = "", "", []
    for i, piece in enumerate(pieces):
        said = splitter.feed(piece, is_end=i == len(pieces) - 1)
        content += said.content
        reasoning += said.reasoning
        calls += map(list, said.calls)
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
        # Without its last tag.
        ('<tool_call>\n{"name": "f", "arguments": {"x": [1]}}', "", "", [["f", '{"x": [1]}']]),
        # What is cut or malformed stays, with the newlines before it.
        (
            'Well.\n\n<tool_call>\n{"name": "f", "arguments": {"x": [1',
            *('Well.\n\n<tool_call>\n{"name": "f", "arguments": {"x": [1', "", []),
        ),
        (
            '<tool_call>{"name": "f", "arguments": {}}} more',
            *('<tool_call>{"name": "f", "arguments": {}}} more', "", []),
        ),
        (
            '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>',
            *('<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>', "", []),
        ),
        (
            '<tool_call>{"name": "f", "arguments": {"x": "\\ud800"}}</tool_call>',
            *('<tool_call>{"name": "f", "arguments": {"x": "\\ud800"}}</tool_call>', "", []),
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
        *("\\", "<", "</", "tool_call>", "a", "é", '{"name": "f", "arguments": {"x": 1}}'),
        *('{"name": "f", "arguments": ', '{"x": {"y": "<tool_call>"}}', '{"arguments": {}}'),
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
    assert json.loads(found) == arguments
