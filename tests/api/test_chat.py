"""`LLM.chat`: what becomes of conversations, by templates rendered here by hand, and refusals."""

import copy
import io
import json
import re
from collections import UserDict
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from checkpoints import (
    SMALL,
    TINY,
    assert_idle,
    copy_checkpoint,
    edit_json,
    greedy,
    reference,
    tokens,
)
from nanovllm import LLM
from nanovllm.batch import read_rows, run

# In the style of Qwen3's: tools, thinking, and content that has to be text.
QWEN3 = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' + message.content }}
        {%- for call in message.tool_calls %}
            {{- '<tool_call>' }}{{- call.function | tojson }}{{- '</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>' + message.content }}
        {{- '</tool_response><|im_end|>\\n' }}
    {%- elif message.role != 'system' %}
        {{- raise_exception('no such role: ' + message.role) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""

HELLO = [{"role": "user", "content": "Hi é"}]
HELLO_TEXT = "<|im_start|>user\nHi é<|im_end|>\n<|im_start|>assistant\n"
SPECIAL = {"<|endoftext|>": 256, "<|im_start|>": 257, "<|im_end|>": 258}
WEATHER = {"function": {"name": "weather", "parameters": {}}, "type": "function"}


def weather(city: str) -> str:
    """How the weather is.

    Args:
        city: Where.
    """
    return city


def token_ids(text):
    """Token ids, by hand: the embedded tokenizer has bytes and three special tokens."""
    for name, token in SPECIAL.items():
        if name in text:
            before, after = text.split(name, 1)
            return [*token_ids(before), token, *token_ids(after)]
    return list(text.encode())


def prompt_of(llm, messages, **options):
    """Rendered prompt of one conversation, with its tokens checked."""
    [output] = llm.chat(messages, greedy(1), use_tqdm=False, **options)
    assert output.prompt_token_ids == token_ids(output.prompt)
    return output.prompt


@pytest.fixture(scope="module", name="llm")
def llm_fixture():
    with LLM(TINY, **{**SMALL, "max_model_len": 400, "num_kvcache_blocks": 64}) as llm:
        yield llm


# -- what becomes of conversations ----------------------------------------------------------------


def test_one_and_many_conversations(llm):
    second = [{"role": "system", "content": "Be brief."}, *HELLO]
    third = [*HELLO, {"role": "assistant", "content": "Ho"}, {"role": "user", "content": ""}]
    texts = [
        HELLO_TEXT,
        "<|im_start|>system\nBe brief.<|im_end|>\n" + HELLO_TEXT,
        HELLO_TEXT + "Ho<|im_end|>\n<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n",
    ]
    params = [greedy(5, ignore_eos=True), greedy(3, ignore_eos=True), greedy(7, ignore_eos=True)]
    expected = [
        reference(TINY, token_ids(text), p.max_tokens)
        for text, p in zip(texts, params, strict=True)
    ]
    [single] = llm.chat(HELLO, params[0], use_tqdm=False)
    outputs = llm.chat([HELLO, second, third], params, use_tqdm=False)
    assert tokens([single]) == expected[:1]
    assert tokens(outputs) == expected
    assert [output.prompt for output in outputs] == texts
    assert [output.prompt_token_ids for output in outputs] == [token_ids(text) for text in texts]
    for form in (
        (tuple(HELLO),),
        iter(HELLO),
        iter([iter(HELLO)]),
        pd.Series([HELLO]),
        np.array([*HELLO, None])[:1],  # as tables keep lists
    ):
        assert tokens(llm.chat(form, params[0], use_tqdm=False)) == expected[:1]
    assert_idle(llm)


def test_progress_is_silent_or_shown(llm, capfd):
    llm.chat(HELLO, greedy(1), False)
    assert capfd.readouterr() == ("", "")
    llm.chat([HELLO, HELLO], greedy(1))
    assert "2/2" in capfd.readouterr().err


def test_special_tokens_of_the_template_are_not_doubled(tmp_path):
    """A tokenizer that begins every text with a token, as many do, and a template that has it."""
    path = copy_checkpoint(TINY, tmp_path / "model")
    begin = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
    edit_json(
        path / "tokenizer.json",
        post_processor={
            "type": "TemplateProcessing",
            "single": [begin, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": i, "type_id": 0}} for i in "AB"],
            "special_tokens": {
                "<|endoftext|>": {"id": "<|endoftext|>", "ids": [256], "tokens": ["<|endoftext|>"]}
            },
        },
    )
    template = "<|endoftext|>{% for message in messages %}{{ message.content }}{% endfor %}"
    with LLM(path, **SMALL) as llm:
        [plain] = llm.generate("Hi", greedy(1), use_tqdm=False)
        assert plain.prompt_token_ids == [256, *b"Hi"]
        [output] = llm.chat(
            [{"role": "user", "content": "Hi"}], greedy(1), use_tqdm=False, chat_template=template
        )
        assert output.prompt_token_ids == [256, *b"Hi"]


@pytest.mark.parametrize("place", ["argument", "file", "both"])
def test_template_of_the_checkpoint_or_the_call(place, tmp_path):
    path = copy_checkpoint(TINY, tmp_path / "model")
    if place == "file":
        edit_json(path / "tokenizer_config.json", chat_template=QWEN3)
    if place == "argument":
        edit_json(path / "tokenizer_config.json", chat_template=None)
    options = {} if place == "file" else {"chat_template": QWEN3}
    with LLM(path, **SMALL) as llm:
        assert prompt_of(llm, HELLO, **options) == HELLO_TEXT
        quiet = prompt_of(llm, HELLO, chat_template_kwargs={"enable_thinking": False}, **options)
        assert quiet == HELLO_TEXT + "<think>\n\n</think>\n\n"
        loud = prompt_of(llm, HELLO, chat_template_kwargs={"enable_thinking": True}, **options)
        assert loud == HELLO_TEXT


def test_tools_reach_the_template(llm):
    head = "<|im_start|>system\n<tools>\n"
    for tool in (WEATHER, UserDict(WEATHER)):
        text = prompt_of(llm, HELLO, tools=[tool], chat_template=QWEN3)
        assert text == f"{head}{json.dumps(WEATHER)}\n</tools><|im_end|>\n{HELLO_TEXT}"
    text = prompt_of(llm, HELLO, tools=(weather,), chat_template=QWEN3)
    schema = json.loads(text.removeprefix(head).split("\n")[0])["function"]
    assert (schema["name"], schema["description"]) == ("weather", "How the weather is.")
    assert schema["parameters"]["properties"] == {
        "city": {"type": "string", "description": "Where."}
    }
    assert prompt_of(llm, HELLO, tools=[], chat_template=QWEN3) == HELLO_TEXT


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}], ids=str)
def test_assistant_with_tool_calls_needs_no_content(content, llm):
    call = {"function": {"name": "weather", "arguments": {"city": "Rome"}}}
    messages = [
        *HELLO,
        {"role": "assistant", **content, "tool_calls": [call]},
        {"role": "tool", "content": "warm"},
    ]
    before = copy.deepcopy(messages)
    expected = (
        f"{HELLO_TEXT}<tool_call>{json.dumps(call['function'])}</tool_call><|im_end|>\n"
        "<|im_start|>user\n<tool_response>warm</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert prompt_of(llm, messages, chat_template=QWEN3) == expected
    assert messages == before
    # and a template that adds it to text finds text
    plain = "{% for m in messages %}[{{ m.role + m.content }}]{% endfor %}"
    assert prompt_of(llm, messages, chat_template=plain) == "[userHi é][assistant][toolwarm]"


# How families write a call, in as few words: a template, and what it makes of f(a=1, b="é").
CALL_FORMS = {
    "quoting": (
        "{{ '{' + c.function.name + ' ' + (c.function.arguments | tojson) + '}' }}",
        '{f {"a": 1, "b": "é"}}',
    ),
    "whole": ("{{ c.function | tojson }}", '{"name": "f", "arguments": {"a": 1, "b": "é"}}'),
    "one by one": (
        "{% for k, v in c.function.arguments | items %}<{{ k }}={{ v }}>{% endfor %}",
        "<a=1><b=é>",
    ),
    "either": (
        "{% set a = c.function.arguments %}{{ a if a is string else a | tojson }}",
        '{"a": 1, "b": "é"}',
    ),
    "joining": ("{{ 'f ' + c['function']['arguments'] + '!' }}", 'f {"a": 1, "b": "é"}!'),
    "printing": ("{{ c.function.arguments }}", '{"a": 1, "b": "é"}'),
    "by another name": (
        "{% set f = c.function or c %}{{ f.name ~ (f.arguments | tojson) }}",
        'f{"a": 1, "b": "é"}',
    ),
}
AROUND = (
    "{{% for m in messages %}}[{{{{ m.role }}}}{{% for c in m.tool_calls %}}{}{{% endfor %}}"
    "{{{{ m.content or '' }}}}]{{% endfor %}}"
)
ARGUMENTS = {"a": 1, "b": "é"}


def conversation(*calls, **message):
    answer = {"role": "assistant", "content": None, "tool_calls": list(calls), **message}
    return [*HELLO, answer, {"role": "tool", "tool_call_id": "c1", "content": "{'a': 1}"}]


@pytest.mark.parametrize("form", CALL_FORMS)
def test_arguments_of_calls_are_what_the_template_expects(form, llm):
    """OpenAI's clients write them as JSON, which some templates would quote and others not read."""
    template, expected = CALL_FORMS[form]
    for arguments in (ARGUMENTS, UserDict(ARGUMENTS), json.dumps(ARGUMENTS, ensure_ascii=False)):
        call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        messages = conversation(call)
        before = copy.deepcopy(messages)
        text = prompt_of(llm, messages, chat_template=AROUND.format(template))
        assert text == f"[userHi é][assistant{expected}][tool{{'a': 1}}]"
        assert messages == before
    for nothing in ({"arguments": None}, {"arguments": ""}, {"arguments": "{}"}, {}):
        messages = conversation({"function": {"name": "f", **nothing}})
        text = prompt_of(llm, messages, chat_template=AROUND.format(template))
        empty = expected.replace('{"a": 1, "b": "é"}', "{}").replace("<a=1><b=é>", "")
        assert text == f"[userHi é][assistant{empty}][tool{{'a': 1}}]"


def test_json_of_a_call_is_kept_where_the_template_takes_it(llm):
    call = {"function": {"name": "f", "arguments": ' {"b":1.50,  "a":[]}'}}
    template = AROUND.format(CALL_FORMS["joining"][0])
    assert 'f  {"b":1.50,  "a":[]}!' in prompt_of(llm, conversation(call), chat_template=template)


def test_a_template_without_calls_is_warned_of_once(llm, caplog):
    call = {"function": {"name": "f", "arguments": "{}"}}
    plain = "{% for m in messages %}[{{ m.role }}: {{ m.content }}]{% endfor %}"  # here alone
    for _ in range(2):
        llm.chat([conversation(call)] * 3, greedy(1), use_tqdm=False, chat_template=plain)
    [said] = [record.getMessage() for record in caplog.records if "tool_calls" in record.msg]
    assert said.endswith("arguments of `tool_calls`, first in `messages[0]`")


def test_a_template_without_tools_is_warned_of_once(llm, caplog, monkeypatch):
    """Nobody would know why the model never calls them."""
    body = "{{ here_alone }}{% for m in messages %}[{{ m.content }}]{% endfor %}"
    for tools in (None, [], [WEATHER], [weather]):
        assert prompt_of(llm, HELLO, tools=tools, chat_template=body) == "[Hi é]"
    prompt_of(llm, HELLO, tools=[WEATHER], chat_template=QWEN3)
    [said] = caplog.messages
    assert said.startswith("the chat template does not use `tools`, so the model does not see them")
    assert "chat_template.jinja" in said
    # Named templates, of which `tools` have one.
    named = {"default": f"{body} ", "tool_use": f"{body}{{{{ tools | length }}}}"}
    monkeypatch.setattr(llm.get_tokenizer(), "chat_template", named)
    assert prompt_of(llm, HELLO, tools=[WEATHER]) == "[Hi é]1"
    assert len(caplog.messages) == 1
    named["tool_use"] = f"{body}  "
    prompt_of(llm, HELLO, tools=[WEATHER])
    assert len(caplog.messages) == 2


NULLS = dict.fromkeys(("refusal", "audio", "function_call", "name", "annotations", "tool_calls"))
F = {"name": "f", "arguments": '{"a": 1, "b": "é"}'}
SHOWN = (
    "{% for m in messages %}[{{ m.role }}|{{ m.content }}|{{ (m.tool_calls or none) | tojson }}|"
    "{{ m.keys() | sort | join(' ') }}]{% endfor %}"
)
WITH_F = '[{"type": "function", "function": {"name": "f", "arguments": {"a": 1, "b": "é"}}}]'


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"role": "assistant", "content": "Ho", **NULLS}, "assistant|Ho|null|content role"),
        (
            {"role": "assistant", "content": "Ho", "tool_calls": []},
            "assistant|Ho|null|content role",
        ),
        ({"role": "assistant", "content": None, "refusal": "No"}, "assistant|No|null|content role"),
        (
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "No"}]},
            "assistant|No|null|content role",
        ),
        (
            {"role": "assistant", "content": None, **NULLS, "function_call": F},
            f"assistant||{WITH_F}|content role tool_calls",
        ),
        ({"role": "function", "name": "f", "content": "5"}, "tool|5|null|content name role"),
        ({"role": "function", "name": "f", "content": None}, "tool||null|content name role"),
        (
            {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "5"}]},
            "tool|5|null|content role tool_call_id",
        ),
        ({"role": "developer", "content": "Be brief."}, "system|Be brief.|null|content role"),
        ({"role": "user", "content": "Hi", "name": "Ann"}, "user|Hi|null|content name role"),
        (
            {"role": "assistant", "content": "Ho", "reasoning_content": "Hm"},
            "assistant|Ho|null|content reasoning_content role thinking",
        ),
    ],
)
def test_every_field_of_openais_messages(message, expected, llm):
    assert prompt_of(llm, [message], chat_template=SHOWN) == f"[{expected}]"
    row = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions"}
    rows = [{"messages": [message]}, {**row, "body": {"messages": [message]}}]
    for one in rows:
        lines = read_rows(io.BytesIO(json.dumps(one).encode()))
        [result] = run(llm, lines, greedy(1), chat_template=SHOWN)
        assert result.output.prompt == f"[{expected}]"


def test_a_template_that_knows_developers_has_them(llm):
    message = {"role": "developer", "content": "Be brief."}
    template = "{# developer #}{% for m in messages %}[{{ m.role }}]{% endfor %}"
    assert prompt_of(llm, [message], chat_template=template) == "[developer]"


def test_parts_of_text_are_lines(llm):
    parts = [{"type": "text", "text": "Hi"}, UserDict(type="text", text="é")]
    messages = [UserDict(role="user", content=parts)]
    expected = "<|im_start|>user\nHi\né<|im_end|>\n<|im_start|>assistant\n"
    assert prompt_of(llm, messages) == expected


def test_prompt_without_the_beginning_of_an_answer(llm):
    expected = HELLO_TEXT.removesuffix("<|im_start|>assistant\n")
    assert prompt_of(llm, HELLO, add_generation_prompt=False) == expected


def test_final_message_is_continued(llm):
    messages = [*HELLO, {"role": "assistant", "content": "Once upon"}]
    before = copy.deepcopy(messages)
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert prompt_of(llm, messages, **options) == HELLO_TEXT + "Once upon"
    assert messages == before


# -- what is refused ------------------------------------------------------------------------------

USER = {"role": "user", "content": "Hi"}
CALLS = [{"function": {"name": "f"}}]
NO_CONTENT = "got none: only an assistant's message with `tool_calls` may omit it"

REFUSED = [
    *(
        (
            *({"messages": messages}, TypeError),
            "`messages` must be a list of messages or a list of conversations, "
            f"got {type(messages).__name__}",
        )
        for messages in ("Hi", USER, None, 5, {1})
    ),
    ({"messages": []}, ValueError, "`messages` must have at least one message, got none"),
    (
        *({"messages": [[USER], []]}, ValueError),
        "`messages[1]` must have at least one message, got none",
    ),
    (
        *({"messages": [[USER], USER]}, TypeError),
        "`messages[1]` must be a list of messages, got dict",
    ),
    (
        *({"messages": [USER, [USER]]}, TypeError),
        "`messages[0]` must be a list of messages, got dict",
    ),
    *(
        (
            *({"messages": messages}, TypeError),
            f"`{name}` must be a dictionary with `role` and `content`, got {kind}",
        )
        for messages, name, kind in (
            (["Hi"], "messages[0]", "str"),
            ([[USER], [USER, None]], "messages[1][1]", "NoneType"),
        )
    ),
    (
        *({"messages": [USER, {"content": "Hi", "name": "I"}]}, ValueError),
        "`messages[1]` must have a `role`, got the keys ['content', 'name']",
    ),
    (
        *({"messages": [{"role": None, "content": "Hi"}]}, TypeError),
        '`messages[0]["role"]` must be a string, got None',
    ),
    *(
        (
            *({"messages": [[USER], [USER, message]]}, ValueError),
            f"`messages[1][1]` must have `content`, {NO_CONTENT}",
        )
        for message in (
            {"role": "user"},
            {"role": "user", "content": None, "tool_calls": CALLS},
            {"role": "assistant", "content": None},
            {"role": "assistant", "tool_calls": []},
        )
    ),
    *(
        (
            *({"messages": [{"role": "user", "content": content}]}, TypeError),
            f'`messages[0]["content"]` must be a string or a list of parts, got {content!r}',
        )
        for content in (5, b"Hi", {"text": "Hi", "type": "text"})
    ),
    *(
        ({"messages": [USER, {"role": "assistant", "content": "Ho", **fields}]}, error, reason)
        for fields, error, reason in (
            (
                *({"audio": {"id": "a1"}}, ValueError),
                "`messages[1][\"audio\"]` must be None, got {'id': 'a1'}: sound is not supported",
            ),
            (
                *({"refusal": "No"}, ValueError),
                '`messages[1]["refusal"]` must be None except in an assistant\'s message without '
                "content, got 'No'",
            ),
            ({"name": 5}, TypeError, '`messages[1]["name"]` must be a string, got 5'),
            (
                *({"tool_call_id": 5}, TypeError),
                '`messages[1]["tool_call_id"]` must be a string, got 5',
            ),
            (
                *({"tool_calls": "f"}, TypeError),
                "`messages[1][\"tool_calls\"]` must be a list of calls, got 'f'",
            ),
            (
                *({"tool_calls": ["f"]}, TypeError),
                "`messages[1][\"tool_calls\"][0]` must be a dictionary with `function`, got 'f'",
            ),
            (
                *({"tool_calls": [*CALLS, {"type": "custom", "custom": {}}]}, ValueError),
                '`messages[1]["tool_calls"][1]["type"]` must be "function", got \'custom\'',
            ),
            (
                *({"tool_calls": [{"function": {}}]}, TypeError),
                '`messages[1]["tool_calls"][0]["function"]["name"]` must be a string, got None',
            ),
            (
                *({"tool_calls": [{"function": {"name": "f", "arguments": "{a"}}]}, ValueError),
                '`messages[1]["tool_calls"][0]["function"]["arguments"]` must be a JSON object, '
                "got '{a': Expecting property name enclosed in double quotes: line 1 column 2 "
                "(char 1)",
            ),
            *(
                (
                    *({"tool_calls": [{"name": "f", "arguments": given}]}, TypeError),
                    '`messages[1]["tool_calls"][0]["arguments"]` must be a JSON object, '
                    f"got {given!r}",
                )
                for given in ("[1]", [1], 5)
            ),
            (
                *({"function_call": "f"}, TypeError),
                "`messages[1][\"function_call\"]` must be a dictionary with `name`, got 'f'",
            ),
            (
                *({"function_call": {"name": "f"}, "tool_calls": CALLS}, ValueError),
                '`messages[1]["function_call"]` must be None beside tool_calls, '
                "got {'name': 'f'}",
            ),
        )
    ),
    *(
        (
            *({"messages": [{"role": "user", "content": [part]}]}, ValueError),
            f'`messages[0]["content"][0]` must be {{"type": "text", "text": ...}}, got {got}',
        )
        for part, got in (
            ({"type": "refusal", "refusal": "No"}, "'refusal'"),
            ({"text": "Hi"}, "None"),
            ("Hi", "'Hi'"),
        )
    ),
    *(
        (
            *({"messages": [{"role": "user", "content": [part]}]}, ValueError),
            f'`messages[0]["content"][0]` must {rule}',
        )
        for part, rule in (
            (
                {"type": "image_url", "image_url": {}},
                "have no images: Qwen3ForCausalLM does not see: use a model like Qwen3-VL",
            ),
            (
                {"type": "input_audio", "input_audio": {}},
                "be text or an image: sound is not supported",
            ),
        )
    ),
    (
        *({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, TypeError),
        '`messages[0]["content"][0]["text"]` must be a string, got 5',
    ),
    (
        *({"chat_template": Path("template.jinja")}, TypeError),
        f"`chat_template` must be the text of a template, got {Path('template.jinja')!r}",
    ),
    (
        *({"add_generation_prompt": 1}, TypeError),
        "`add_generation_prompt` must be True or False, got 1",
    ),
    (
        *({"continue_final_message": "content", "add_generation_prompt": False}, TypeError),
        "`continue_final_message` must be True or False, got 'content'",
    ),
    (
        *({"continue_final_message": True}, ValueError),
        "`add_generation_prompt` must be False with `continue_final_message`, got True: a message "
        "is either begun or continued",
    ),
    ({"tools": "weather"}, TypeError, "`tools` must be a list of tools, got 'weather'"),
    (
        *({"chat_template": ""}, ValueError),
        "`chat_template` must be the text of a template, got '': pass None for the checkpoint's "
        "own",
    ),
    ({"tools": WEATHER}, TypeError, f"`tools` must be a list of tools, got {WEATHER!r}"),
    (
        *({"chat_template_kwargs": ["enable_thinking"]}, TypeError),
        "`chat_template_kwargs` must be a dictionary, got ['enable_thinking']",
    ),
    *(
        (
            *({"chat_template_kwargs": {"enable_thinking": True, name: None}}, ValueError),
            f"`chat_template_kwargs` must hold variables of the template, got {name!r}: pass the "
            "arguments of chat() by themselves",
        )
        for name in ("tools", "chat_template", "tokenize", "add_generation_prompt", "conversation")
    ),
]


@pytest.mark.parametrize(("options", "error", "message"), REFUSED)
def test_wrong_argument_is_named(options, error, message, llm):
    before = llm.metrics()
    with pytest.raises(error) as caught:
        llm.chat(**{"messages": HELLO, **options})
    assert str(caught.value) == message
    assert llm.metrics() == before


def bare(city: str) -> None: ...


@pytest.mark.parametrize(("tool", "reason"), [(5, "5 is not"), (bare, ".* has no docstring")])
def test_wrong_tool_is_named(tool, reason, llm):
    rule = "a dictionary, or a function with types and a docstring, got"
    match = rf"^`tools\[1\]` must be {rule} {re.escape(repr(tool))}: {reason}"
    with pytest.raises(TypeError, match=match):
        llm.chat(HELLO, tools=[WEATHER, tool])


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (QWEN3, r"\(TemplateError: no such role: chief\)"),
        ("{{ messages[", r"\(TemplateSyntaxError: "),
        ("{{ nobody.name }}", r"\(UndefinedError: 'nobody' is undefined\)"),
        ("{{ messages[0].role + 5 }}", r"\(TypeError: "),
    ],
)
def test_template_that_fails_names_the_conversation(template, reason, llm):
    chief = [{"role": "chief", "content": "Hi"}]
    before = llm.metrics()
    with pytest.raises(ValueError, match=r"^`messages` cannot be rendered .* template " + reason):
        llm.chat(chief, chat_template=template)
    if template == QWEN3:  # it is the second one's fault
        with pytest.raises(ValueError, match=r"^`messages\[1\]` cannot be rendered .*" + reason):
            llm.chat([HELLO, chief], chat_template=template)
    assert llm.metrics() == before


@pytest.mark.parametrize("wrong", ["{{ nobody.name }}", "{% if %}", "{{ messages[0].role + 5 }}"])
def test_the_line_of_a_template_that_fails_is_named(wrong, llm):
    """The frames of Jinja, which have it, are not shown."""
    with pytest.raises(ValueError) as caught:
        llm.chat(HELLO, chat_template="{# one #}\n{{ 'two' }}\n" + wrong + "\nfour")
    assert str(caught.value).endswith(") in line 3 of the template")


def test_prompt_that_cannot_run_names_the_conversation(llm):
    before = llm.metrics()
    for content, reason in (
        ("a" * 400, "must leave room for one token within max_model_len 400"),
        ("\ud800", "cannot be tokenised"),
    ):
        wrong = [{"role": "user", "content": content}]
        with pytest.raises(ValueError, match=rf"^`messages\[1\]` {reason}"):
            llm.chat([HELLO, wrong])
    with pytest.raises(ValueError, match=r"^`messages` must have at least one token, got none"):
        llm.chat(HELLO, chat_template="{# nothing #}")
    assert llm.metrics() == before


def test_template_is_missing(tmp_path):
    path = copy_checkpoint(TINY, tmp_path / "model")
    edit_json(path / "tokenizer_config.json", chat_template=None)
    with (
        LLM(path, **SMALL) as llm,
        pytest.raises(
            ValueError,
            match=r"^`chat_template` must be given for .* has none, got None: pass one, or call",
        ),
    ):
        llm.chat(HELLO)


def test_tokenizer_is_missing(checkpoint):
    with (
        LLM(checkpoint, **SMALL) as llm,
        pytest.raises(ValueError, match=r"^chat\(\) needs a tokenizer, .*: pass token ids to gen"),
    ):
        llm.chat(HELLO, chat_template=QWEN3)
