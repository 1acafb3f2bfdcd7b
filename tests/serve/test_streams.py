"""Streams byte for byte, as OpenAI's protocol has them, and reasoning."""

import asyncio
import json
import re
import shutil
from pathlib import Path

import pytest
from http_server import ASK, serving
from tokenizers import AddedToken

from nanovllm import TINY, CompletionOutput, SamplingParams, StructuredOutputsParams
from nanovllm.async_llm import _Jobs
from nanovllm.checkpoint.tokenizer import load_tokenizer
from nanovllm.openai.answers import Answer, Choice
from nanovllm.openai.asks import Ask
from nanovllm.openai.choices import text_logprobs
from nanovllm.openai.tools import OPEN_THOUGHT, answer_form, calls_form, reasoning_rule
from nanovllm.outputs import Logprob
from nanovllm.sampling.structured_output import GrammarCompiler

CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n{% if enable_thinking is defined and not enable_thinking %}"
    "<think>\n\n</think>\n\n{% elif opened is defined %}<think>\n{% endif %}"
)


@pytest.fixture(scope="module")
def thinking(tmp_path_factory):
    """The embedded checkpoint with a template of a model that thinks."""
    path = Path(shutil.copytree(TINY, tmp_path_factory.mktemp("thinking") / "model"))
    file = path / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": TEMPLATE}))
    return path


@pytest.fixture(scope="module")
def place(thinking):
    with serving(thinking) as place:
        yield place


def stream(place, path, body):
    """The bytes of a stream, without what differs from one to the next."""
    answer = place.post(path, {"stream": True, "temperature": 0, **body}, **{"X-Request-Id": "r"})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-request-id"] == "r"
    said = re.sub(rb'"created":\d+', b'"created":0', answer.content)
    return re.sub(rb"call_[0-9a-f]{24}", b"call_0", said).decode()


def expected(kind, own_id, *choices, end=""):
    """Events of these choices, written by hand as the protocol has them."""
    head = f'{{"id":"{own_id}-r","object":"{kind}","created":0,"model":"tiny"'
    said = "".join(f'data: {head},"choices":[{choice}]}}\n\n' for choice in choices)
    return f"{said}{end}data: [DONE]\n\n"


def chat(*deltas, end='{},"logprobs":null,"finish_reason":"stop"'):
    begin = '{"role":"assistant","content":""}'
    parts = [f'{delta},"logprobs":null,"finish_reason":null' for delta in (begin, *deltas)]
    return [f'{{"index":0,"delta":{part}}}' for part in [*parts, end]]


@pytest.fixture(autouse=True)
def in_step(place, monkeypatch):
    """Before a step the engine waits until the loop has told the last: so a piece is one token."""
    step = _Jobs.step

    def stepping(jobs):
        for loop in {tell.__self__.loop for tell in jobs._ids}:
            for _ in range(3):  # what was called before is done then
                asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result(60)
        step(jobs)

    monkeypatch.setattr(_Jobs, "step", stepping)


@pytest.mark.parametrize(
    ("begun", "rule"),
    [
        ("<think>\nabc", OPEN_THOUGHT),
        ("<think>\na</think>b", ""),
        ("abc", reasoning_rule("")),
    ],
)
def test_an_answer_may_go_on_within_reasoning(begun, rule):
    prompt = f"<|im_start|>user\nuse <think>.<|im_end|>\n<|im_start|>assistant\n{begun}"
    assert reasoning_rule(prompt, begun) == rule


def test_a_chat(place):
    found = stream(place, "/v1/chat/completions", {"messages": ASK})
    pieces = ['{"content":"4"}', '{"content":"7"}', '{"content":"2"}']
    assert found == expected("chat.completion.chunk", "chatcmpl", *chat(*pieces))


def test_a_completion_with_usage_and_text_that_is_no_ascii(place):
    pytest.importorskip("llguidance")
    form = {"structured_outputs": {"choice": ['ß"\n']}, "stream_options": {"include_usage": True}}
    found = stream(place, "/v1/completions", {"prompt": "1+1=", **form})
    begin = '{"id":"cmpl-r","object":"text_completion","created":0,"model":"tiny"'
    usage = (
        '"usage":{"prompt_tokens":4,"completion_tokens":5,"total_tokens":9,'
        '"prompt_tokens_details":{"cached_tokens":0}}'
    )
    assert found == expected(
        "text_completion",
        "cmpl",
        '{"index":0,"text":"ß","logprobs":null,"finish_reason":null}',
        '{"index":0,"text":"\\"","logprobs":null,"finish_reason":null}',
        '{"index":0,"text":"\\n","logprobs":null,"finish_reason":null}',
        '{"index":0,"text":"","logprobs":null,"finish_reason":"stop"}',
        end=f'data: {begin},"choices":[],{usage}}}\n\n',
    )


def test_reasoning_and_a_call(place):
    """Tags, newlines beside them, and the braces around a call are nobody's text."""
    pytest.importorskip("llguidance")
    text = f"<think>\nab\n</think>\n\nc\n{CALL}"
    form = {"structured_outputs": {"choice": [text]}, "max_tokens": 200}
    tools = [{"type": "function", "function": {"name": "f"}}]
    found = stream(place, "/v1/chat/completions", {"messages": ASK, "tools": tools, **form})
    calls = ['{"index":0,"id":"call_0","type":"function","function":{"name":"f","arguments":""}}']
    calls += [
        f'{{"index":0,"function":{{"arguments":"{part}"}}}}'
        for part in ("{", '\\"', "x", '\\"', ":", " ", "1", "}")
    ]
    pieces = [f'{{"reasoning":"{x}","reasoning_content":"{x}"}}' for x in "ab"]
    pieces += ['{"content":"c"}', *(f'{{"tool_calls":[{call}]}}' for call in calls)]
    end = '{},"logprobs":null,"finish_reason":"tool_calls"'
    assert found == expected("chat.completion.chunk", "chatcmpl", *chat(*pieces, end=end))


def test_an_error_in_a_stream(place, monkeypatch):
    """The status is sent: the error is an event, and the stream ends as others do."""
    step, steps = _Jobs.step, []

    def failing(jobs):
        steps.append(1)
        if len(steps) > 2:
            raise RuntimeError("out of order")
        step(jobs)

    monkeypatch.setattr(_Jobs, "step", failing)
    found = stream(place, "/v1/chat/completions", {"messages": ASK})
    monkeypatch.undo()
    error = (
        '{"error":{"message":"internal error: the log of the server has more about request r",'
        '"type":"InternalServerError","param":null,"code":500}}'
    )
    assert found.endswith(f"data: {error}\n\ndata: [DONE]\n\n")
    assert found.startswith('data: {"id"')
    answer = place.post("/v1/chat/completions", {"messages": ASK, "temperature": 0}).json()
    assert answer["choices"][0]["message"]["content"] == "472", "the engine goes on"


@pytest.mark.parametrize("piece", [1, 2])
def test_an_error_while_an_event_is_written(piece, place, monkeypatch):
    """Also the first: the stream ends as it does by any other fault."""
    events, written = Answer.events, []

    def failing(*args):
        written.append(1)
        if len(written) == piece:
            raise KeyError("of ours")
        return events(*args)

    monkeypatch.setattr(Answer, "events", failing)
    found = stream(place, "/v1/chat/completions", {"messages": ASK})
    assert '"code":500' in found and found.endswith("}}\n\ndata: [DONE]\n\n")


# -- reasoning ------------------------------------------------------------------------------------


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(
    ("variables", "said", "content", "reasoning"),
    [
        ({}, "<think>\nhm\n</think>\n\nyes", "yes", "hm"),
        ({}, "yes", "yes", None),
        ({"opened": True}, "hm\n</think>\n\nyes", "yes", "hm"),
        ({"enable_thinking": False}, "<think>yes", "<think>yes", None),
    ],
)
def test_reasoning_is_not_content(variables, said, content, reasoning, whole, place):
    pytest.importorskip("llguidance")
    body = {"messages": ASK, "temperature": 0, "structured_outputs": {"choice": [said]}}
    body |= {"chat_template_kwargs": variables, "max_tokens": 99, "stream": not whole}
    if not whole:
        body["stream_options"] = {"include_usage": True}
    usages = []

    def ask(body):
        answer = place.post("/v1/chat/completions", body)
        if whole:
            usages.append(answer.json()["usage"])
            return answer.json()["choices"][0]["message"]
        found = {}
        *events, last = (json.loads(line[6:]) for line in answer.text.split("\n\n")[:-2])
        usages.append(last["usage"])
        for event in events:
            for name, text in event["choices"][0]["delta"].items():
                found[name] = found.get(name, "") + text
        return found

    found = ask(body)
    assert found["content"] == content
    assert found.get("reasoning") == found.get("reasoning_content") == reasoning
    found = ask({**body, "include_reasoning": False})
    assert (found["content"], "reasoning" in found) == (content, False)
    # A token has a character.
    count = said.index("</think>") + len("</think>") if reasoning else 0
    details = {"reasoning_tokens": count} if "enable_thinking" not in variables else None
    assert [usage.get("completion_tokens_details") for usage in usages] == [details] * 2
    if reasoning:
        ask({**body, "max_tokens": 9})
        assert usages[2]["completion_tokens_details"]["reasoning_tokens"] == 9, "all of them"


def test_parts_of_characters_share_a_text():
    """Then it has the log-probability of the token that was drawn."""
    half = "\ufffd"
    parts = {195: Logprob(-3.0, 7, half), 240: Logprob(-1.0, 1, half), 97: Logprob(-2.0, 2, "a")}
    found = text_logprobs([parts])
    assert found["top_logprobs"] == [{half: -3.0, "a": -2.0}] and found["token_logprobs"] == [-3.0]
    assert text_logprobs([parts], as_ids=True)["top_logprobs"][0]["token_id:240"] == -1.0


@pytest.mark.parametrize(
    ("pieces", "count", "most_held"),
    [
        ([" ", "<", "thin", "ks", "a", "</think>", "b"], 0, 6),
        ([" <think>", "hm", "hm</think>", "b", "c", "</think>"], 20, 10),
        (["<think>a</think>b", "c"], 16, 0),
        (["yes</think>", "b"], 0, 0),
        (["<think>a"], 8, 8),
    ],
)
def test_tokens_are_held_while_they_may_be_reasoning(pieces, count, most_held):
    """No longer: an answer without reasoning may have many. A token has a character."""
    ask = Ask(prompts=[], params=SamplingParams(), is_chat=True, may_reason=True)
    choice, held = Choice(ask, 0, load_tokenizer(TINY)), []
    for piece in pieces:
        choice.read(CompletionOutput(0, piece, [*piece.encode()], None))
        held.append(len(choice._token_ids))
    assert (choice.num_reasoning_tokens, max(held)) == (count, most_held)


def test_a_form_holds_for_what_follows_the_reasoning(place):
    """The model may think first; the tiny one goes on for ever, and does not, if it cannot."""
    pytest.importorskip("llguidance")

    tokenizer = load_tokenizer(TINY)
    compiler = GrammarCompiler(tokenizer, 272, [258])
    schema = json.dumps({"enum": [1, 2]})
    nested = {
        "type": ["object", "null"],
        "$defs": {"X": {"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/X"}]}},
        "properties": {"x": {"$ref": "#/$defs/X"}},
    }
    tools = [{"function": {"name": name, "parameters": nested}} for name in ('"é"', "f")]

    def fits(form, text):
        grammar = compiler.compile(StructuredOutputsParams(grammar=form))
        tokens = tokenizer.encode(text)
        return grammar._matcher.validate_tokens(tokens) == len(tokens)

    cases = {
        "<|im_start|>assistant\n": ["1", "<think>a\n</think>\n\n1"],
        "<|im_start|>assistant\n<think>\n": ["a<b\n</think>1"],
        "<|im_start|>assistant\n<think>\n\n</think>\n\n": ["1"],
    }
    for prompt, texts in cases.items():
        thinks = reasoning_rule(prompt)
        for text in texts:
            alone = answer_form(schema, [], several=True, thinks=thinks)
            assert fits(alone, text) and not fits(alone, text[:-1] + "3")
            assert not fits(alone, text[:-1] + CALL)
            for several in (True, False):
                called = calls_form(tools, several=several, thinks=thinks)
                either = answer_form(schema, tools, several=several, thinks=thinks)
                assert fits(either, text) and not fits(either, text[:-1] + "3")
                assert not fits(either, text + CALL) and not fits(called, text)
                for form in (called, either):
                    assert fits(form, text[:-1] + CALL)
                    assert fits(form, f"{text[:-1]}{CALL}\n{CALL}") == several
                    assert not fits(form, text[:-1] + CALL.replace("f", "g"))
                    assert fits(
                        form, text[:-1] + CALL.replace('"f"', json.dumps('"é"', ensure_ascii=False))
                    )
    body = {"messages": ASK, "temperature": 0, "max_tokens": 20}
    form = {"type": "json_schema", "json_schema": {"schema": {"enum": [1, 2]}}}
    answer = place.post("/v1/chat/completions", {**body, "response_format": form}).json()
    assert answer["choices"][0]["message"]["content"] in ("1", "2")


@pytest.mark.parametrize(
    ("form", "is_special"), [(None, False), (None, True), ({"type": "json_object"}, False)]
)
def test_tags_may_be_tokens(form, is_special, thinking, tmp_path):
    """As those of Qwen3 are: a model may begin and end its reasoning by them before a form. A model
    that always writes one is made by a bias.
    """
    pytest.importorskip("llguidance")
    path = Path(shutil.copytree(thinking, tmp_path / "model"))
    tokenizer = load_tokenizer(path)
    tags = [AddedToken(tag, special=is_special) for tag in ("<think>", "</think>")]
    tokenizer.add_tokens(tags, special_tokens=is_special)
    tokenizer.save_pretrained(path)
    begin, end = (tokenizer.convert_tokens_to_ids(tag.content) for tag in tags)
    body = {"messages": ASK, "temperature": 0, "max_tokens": 3}
    body |= {} if form is None else {"response_format": form}
    with serving(path) as place:

        def ask(tag, **variables):
            asked = {**body, "logit_bias": {tag: 100}, "chat_template_kwargs": variables}
            return place.post("/v1/chat/completions", asked).json()["choices"][0]["message"]

        assert ask(begin) == {**ask(begin), "content": "", "reasoning": "<think>" * 2}
        assert "reasoning" not in ask(end, opened=True)
