"""OpenAI's own client, sync and async, against a server of the embedded checkpoint. The client
validates each answer by its types; what the texts must be `LLM` says.
"""

import asyncio
import base64
import json
import struct
from concurrent.futures import ThreadPoolExecutor

import jsonschema
import pytest
from http_server import ASK, OPTIONS, PATIENCE, PLAIN, serving

from checkpoints import rare
from nanovllm import LLM, TINY, SamplingParams
from nanovllm.outputs import TokenLogprobs

openai = pytest.importorskip("openai", reason="needs the client openai")

SUM = "127+345="
WEATHER = {
    "type": "function",
    "function": {
        "name": "sky",
        "description": "The weather of a place.",
        "parameters": {
            "type": "object",
            "properties": {"at": {"enum": ["Rome", "Oslo"]}},
            "required": ["at"],
            "additionalProperties": False,
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
CALL = '<tool_call>\n{"name": "sky", "arguments": {"at": "Rome"}}\n</tool_call>'
TURNED = '<tool_call>{"arguments": {"at": "Rome"}, "name": "sky"}</tool_call>'


@pytest.fixture(scope="module")
def place():
    with serving(names=("tiny", "other")) as place:
        yield place


@pytest.fixture(scope="module")
def llm():
    with LLM(TINY, **OPTIONS) as llm:
        yield llm


# The server does not see which client asks: one test of each endpoint tries both.
IN_BOTH_WAYS = pytest.mark.parametrize("create", ["sync", "async"], indirect=True)


@pytest.fixture(params=["sync", rare("async")])
def create(request, place):
    """A function that asks an endpoint of the client, and returns an answer or a list of events."""
    options = {
        "base_url": f"{place.url}/v1",
        "api_key": "none",
        "max_retries": 0,
        "timeout": PATIENCE,
    }
    own, own_async = openai.DefaultHttpxClient, openai.DefaultAsyncHttpxClient

    def method_of(client, name):
        for part in name.split("."):
            client = getattr(client, part)
        return client

    def ask(name, **body):
        with openai.OpenAI(**options, http_client=own(**PLAIN)) as client:
            found = method_of(client, name)(**body)
            return list(found) if body.get("stream") else found

    async def ask_async(name, **body):
        async with openai.AsyncOpenAI(**options, http_client=own_async(**PLAIN)) as client:
            found = await method_of(client, name)(**body)
            return [event async for event in found] if body.get("stream") else found

    def create(name, **body):
        body = {"model": "tiny", **body}
        # Its types are stricter than its service: there, events of completions have no end, and
        # the first echoed token has no log-probability. It decodes base64 after the check.
        is_loose = "chat" not in name and (
            body.get("stream") or body.get("echo") or ("input" in body and len(body) < 3)
        )
        options["_strict_response_validation"] = not is_loose
        return (
            ask(name, **body) if request.param == "sync" else asyncio.run(ask_async(name, **body))
        )

    return create


def joined(events):
    """Content, reasoning, calls and the reason of the end that a stream of a chat has, by index."""
    found = {}
    assert len({event.id for event in events}) == len({event.created for event in events}) == 1
    for choice in (choice for event in events for choice in event.choices):
        own = found.setdefault(
            choice.index, {"content": "", "reasoning": "", "calls": [], "end": None}
        )
        own["content"] += choice.delta.content or ""
        own["reasoning"] += getattr(choice.delta, "reasoning", None) or ""
        for call in choice.delta.tool_calls or ():
            if call.id is not None:
                assert (call.index, call.function.arguments) == (len(own["calls"]), "")
                own["calls"].append([call.function.name, ""])
            assert call.index == len(own["calls"]) - 1
            own["calls"][call.index][1] += call.function.arguments
        assert own["end"] is None, "it had ended"
        own["end"] = choice.finish_reason
    return found


def told(choice):
    """The same of an answer that comes whole."""
    message = choice.message
    return {
        "content": message.content or "",
        "reasoning": getattr(message, "reasoning", None) or "",
        "calls": [
            [call.function.name, call.function.arguments] for call in message.tool_calls or ()
        ],
        "end": choice.finish_reason,
    }


def both(create, **body):
    """An answer that comes whole, and in pieces: both say the same."""
    name = "chat.completions.create"
    with ThreadPoolExecutor(1) as beside:  # at once, in half of the engine's steps
        asked = beside.submit(create, name, **body)
        pieces = joined(create(name, stream=True, **body))
        whole = asked.result()
    assert [told(choice) for choice in whole.choices] == [own for _, own in sorted(pieces.items())]
    return whole


# -- texts ----------------------------------------------------------------------------------------


@IN_BOTH_WAYS
def test_greedy_answers_are_those_of_the_library(create, llm):
    for text in (SUM, "reverse: hello", "9+9=", "count from 17:"):
        ask = [{"role": "user", "content": text}]
        [wanted] = llm.chat(ask, SamplingParams(temperature=0, max_tokens=30), use_tqdm=False)
        found = both(create, messages=ask, temperature=0, max_completion_tokens=30)
        [choice] = found.choices
        assert choice.message.content == wanted.outputs[0].text
        assert choice.finish_reason == wanted.outputs[0].finish_reason
        assert found.usage.prompt_tokens == len(wanted.prompt_token_ids)
        assert found.usage.completion_tokens == len(wanted.outputs[0].token_ids)
        [wanted] = llm.generate(text, SamplingParams(temperature=0, max_tokens=16), use_tqdm=False)
        body = {"prompt": text, "temperature": 0, "extra_body": {"return_token_ids": True}}
        found = create("completions.create", **body)
        assert (found.choices[0].text, found.choices[0].token_ids) == (
            wanted.outputs[0].text,
            wanted.outputs[0].token_ids,
        )
        assert found.choices[0].prompt_token_ids == wanted.prompt_token_ids
        events = create("completions.create", stream=True, **body)
        assert "".join(event.choices[0].text for event in events) == wanted.outputs[0].text
        ids = [token for event in events for token in event.choices[0].token_ids]
        assert ids == wanted.outputs[0].token_ids
        assert events[-1].choices[0].finish_reason == wanted.outputs[0].finish_reason


def test_prompts_samples_stops_and_seeds(create, llm):
    """Choices are numbered on from prompt to prompt; draws are those of the library's seeds."""
    prompts = ["one", [104, 105], "three"]
    params = SamplingParams(
        temperature=2.0, top_k=40, n=2, seed=5, max_tokens=12, stop=["e", "1"], min_p=0.001
    )
    wanted = [
        (each.text, each.finish_reason)
        for output in llm.generate(prompts, params, use_tqdm=False)
        for each in output.outputs
    ]
    body = {"prompt": ["one", "hi", "three"], "temperature": 2.0, "n": 2, "seed": 5}
    body |= {"max_tokens": 12, "stop": ["e", "1"], "extra_body": {"top_k": 40, "min_p": 0.001}}
    found = create("completions.create", **body)
    assert [(each.text, each.finish_reason) for each in found.choices] == wanted
    assert [each.index for each in found.choices] == [*range(6)]
    assert {"stop", "length"} == {end for _, end in wanted}
    texts, ends = [""] * 6, [None] * 6
    for event in create("completions.create", stream=True, **body):
        for choice in event.choices:
            texts[choice.index] += choice.text
            ends[choice.index] = choice.finish_reason or ends[choice.index]
    assert [*zip(texts, ends, strict=True)] == wanted
    ask = [{"role": "user", "content": "zzz"}]
    found = both(create, messages=ask, n=3, temperature=2.0, seed=5, max_tokens=9)
    assert len({choice.message.content for choice in found.choices}) > 1


def test_usage_in_streams(create):
    body = {"messages": ASK, "temperature": 0, "stream": True}
    whole = create("chat.completions.create", messages=ASK, temperature=0).usage
    events = create("chat.completions.create", **body, stream_options={"include_usage": True})
    assert events[-1].choices == []
    counts = (whole.prompt_tokens, whole.completion_tokens, whole.total_tokens)
    last = events[-1].usage
    assert (last.prompt_tokens, last.completion_tokens, last.total_tokens) == counts
    assert [event.usage for event in events[:-1]] == [None] * (len(events) - 1)
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = create("chat.completions.create", **body, stream_options=options)
    numbers = [event.usage.completion_tokens for event in events]
    assert numbers == sorted(numbers) and numbers[0] < counts[1] and numbers[-1] == counts[1]
    [once] = {event.usage.prompt_tokens for event in events}
    assert once == counts[0]


# -- log-probabilities ----------------------------------------------------------------------------


def columns(places):
    return [next(iter(place.values())).logprob for place in places]


def test_log_probabilities_are_those_of_the_library(create, llm):
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=3, ignore_eos=True)
    [wanted] = llm.generate(SUM, params, use_tqdm=False)
    places = wanted.outputs[0].logprobs
    assert isinstance(places, TokenLogprobs)
    body = {"temperature": 0, "max_tokens": 6, "extra_body": {"ignore_eos": True}}
    found = create("completions.create", prompt=SUM, logprobs=3, **body).choices[0].logprobs
    assert found.token_logprobs == pytest.approx(columns(places), abs=1e-4)
    assert found.text_offset == [
        0,
        1,
        2,
        3,
        3 + len(found.tokens[3]),
        3 + len(found.tokens[3]) + len(found.tokens[4]),
    ]
    for top, place in zip(found.top_logprobs, places, strict=True):
        assert top == pytest.approx({p.decoded_token: p.logprob for p in place.values()}, abs=1e-4)
    events = create("completions.create", prompt=SUM, logprobs=3, stream=True, **body)
    for name in ("tokens", "text_offset", "token_logprobs", "top_logprobs"):
        parts = [getattr(e.choices[0].logprobs, name) for e in events if e.choices[0].logprobs]
        whole = [item for part in parts for item in part]
        wanted = getattr(found, name)
        if name == "top_logprobs":
            for top, own in zip(whole, wanted, strict=True):
                assert top == pytest.approx(own, abs=1e-4)
        else:
            assert whole == (pytest.approx(wanted, abs=1e-4) if name.endswith("probs") else wanted)

    [wanted] = llm.chat(ASK, params, use_tqdm=False)
    body |= {"messages": ASK, "logprobs": True, "top_logprobs": 3}
    found = create("chat.completions.create", **body).choices[0].logprobs.content
    assert [token.logprob for token in found] == pytest.approx(
        columns(wanted.outputs[0].logprobs), abs=1e-4
    )
    assert all(len(token.top_logprobs) == 3 for token in found)
    assert bytes(b for token in found[:3] for b in token.bytes) == b"472"
    events = create("chat.completions.create", stream=True, **body)
    pieces = [e.choices[0].logprobs.content for e in events if e.choices[0].logprobs]
    assert [token.token for piece in pieces for token in piece] == [token.token for token in found]
    named = create(
        "chat.completions.create", **{**body, "extra_body": {"return_tokens_as_token_ids": True}}
    )
    assert [t.token for t in named.choices[0].logprobs.content][:3] == [
        f"token_id:{ord(c)}" for c in "472"
    ]


@pytest.mark.parametrize("max_tokens", [0, 1, 3])
def test_an_echoed_prompt_has_the_scores_of_the_library(max_tokens, create, llm):
    """Which lm-eval asks for, with a token that it leaves out; OpenAI's client may ask for none."""
    text = "127+345=471"
    [score] = llm.score(text, use_tqdm=False)
    body = {"temperature": 0, "max_tokens": max_tokens, "logprobs": 1, "echo": True}
    body["extra_body"] = {"ignore_eos": True}
    for prompt in (text, [*text.encode()]):
        found = create("completions.create", prompt=prompt, **body)
        [choice] = found.choices
        assert choice.text.startswith(text)
        own = choice.logprobs
        assert own.token_logprobs[0] is None and own.top_logprobs[0] is None
        scores = own.token_logprobs[1 : len(text)]
        assert scores == pytest.approx(score.logprobs, abs=1e-4)
        greedy = [
            value == max(top.values())
            for value, top in zip(scores, own.top_logprobs[1 : len(text)], strict=True)
        ]
        assert greedy == [rank == 1 for rank in score.ranks]
        assert {True, False} == {*greedy}
        assert own.text_offset[: len(text)] == [*range(len(text))]
        assert len(own.tokens) == len(text) + max_tokens
        assert found.usage.completion_tokens == max_tokens
    events = create("completions.create", prompt=text, stream=True, **body)
    assert "".join(event.choices[0].text for event in events) == choice.text
    said = [t for e in events if e.choices[0].logprobs for t in e.choices[0].logprobs.tokens]
    assert said == own.tokens


# -- forms, tools and reasoning -------------------------------------------------------------------


def test_forms(create):
    pytest.importorskip("llguidance")
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [1, 2]}, "b": {"type": "boolean"}},
        "required": ["a", "b"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_pattern": " "},
    }
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    found = both(create, messages=ASK, temperature=0, response_format=form, max_tokens=60)
    jsonschema.validate(json.loads(found.choices[0].message.content), schema)
    body = {"messages": ASK, "temperature": 0, "max_tokens": 20}
    found = both(create, **body, extra_body={"structured_outputs": {"regex": "[xyz]{3}é"}})
    assert found.choices[0].message.content[-1] == "é"
    found = create(
        "completions.create", prompt="a", extra_body={"structured_outputs": {"choice": ["ß"]}}
    )
    assert found.choices[0].text == "ß"


@pytest.mark.parametrize(
    ("choice", "said", "calls", "content"),
    [
        ("auto", f"Let me see.\n{CALL}", ["sky"], "Let me see."),
        ("auto", f"{CALL}\n{CALL}", ["sky", "sky"], ""),
        ("auto", TURNED, ["sky"], ""),
        ("auto", "<tool_call>\nno\n</tool_call>", [], "<tool_call>\nno\n</tool_call>"),
        ("none", CALL, [], CALL),
        (None, "words", [], "words"),
    ],
)
def test_calls_in_a_text(choice, said, calls, content, create):
    """The text is what a form makes a model say that knows no tools."""
    pytest.importorskip("llguidance")
    body = {"messages": ASK, "temperature": 0, "tools": [WEATHER, NOW]}
    body |= {} if choice is None else {"tool_choice": choice}
    body["extra_body"] = {"structured_outputs": {"choice": [said]}}
    [found] = both(create, **body, max_tokens=150).choices
    own = told(found)
    assert [name for name, _ in own["calls"]] == calls
    assert all(json.loads(text) == {"at": "Rome"} for _, text in own["calls"])
    assert own["content"] == content
    assert own["end"] == ("tool_calls" if calls else "stop")
    if len(calls) > 1:
        body |= {"stream": True, "parallel_tool_calls": False, "max_tokens": 150}
        [own] = joined(create("chat.completions.create", **body)).values()
        assert (len(own["calls"]), own["end"]) == (1, "tool_calls")


def test_a_call_that_max_tokens_cuts(create):
    """It is told as far as it came, and may stand in the messages that follow."""
    pytest.importorskip("llguidance")
    body = {"messages": ASK, "temperature": 0, "tools": [WEATHER]}
    body["extra_body"] = {"structured_outputs": {"choice": [CALL]}}
    [found] = both(create, **body, max_tokens=CALL.index('me"}')).choices
    assert told(found)["calls"] == [["sky", '{"at": "Ro']]
    assert (found.message.content, found.finish_reason) == (None, "length")
    again = [*ASK, found.message.model_dump(exclude_unset=True), *ASK]
    assert create("chat.completions.create", messages=again, max_tokens=3).choices


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "sky"}}])
def test_a_call_that_must_come(choice, create):
    """The form of calls holds the model to the tools and their schemas."""
    pytest.importorskip("llguidance")
    tools = [WEATHER] if choice == "required" else [NOW, WEATHER]
    body = {"messages": ASK, "tools": tools, "tool_choice": choice, "max_tokens": 300}
    found = both(create, **body, temperature=1.0, seed=1, parallel_tool_calls=False)
    [[name, arguments]] = told(found.choices[0])["calls"]
    assert (name, found.choices[0].finish_reason) == ("sky", "tool_calls")
    jsonschema.validate(json.loads(arguments), WEATHER["function"]["parameters"])
    # And the answer of the tool goes back.
    message = found.choices[0].message
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in message.tool_calls
    ]
    again = [*ASK, message.model_dump(exclude_unset=True), *results]
    assert create("chat.completions.create", messages=again, tools=tools, max_tokens=3).choices


def test_a_call_in_the_place_of_json(create):
    """A form of the content forbids no calls, if the model likes to call."""
    pytest.importorskip("llguidance")
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": [1, 2]}}}
    body = {"messages": ASK, "temperature": 0, "max_tokens": 300, "response_format": form}
    body |= {"logit_bias": {str(ord("<")): 100}}
    [found] = both(create, **body).choices
    assert found.message.content in ("1", "2")
    for choice, is_called in (("auto", True), ("none", False)):
        [found] = both(create, **body, tools=[WEATHER], tool_choice=choice).choices
        assert (found.message.content in ("1", "2")) != is_called
        assert found.finish_reason == ("tool_calls" if is_called else "stop")
        for name, arguments in told(found)["calls"]:
            assert name == "sky"
            jsonschema.validate(json.loads(arguments), WEATHER["function"]["parameters"])
    assert found.message.tool_calls is None


def test_a_form_that_breaks_off_is_no_whole_answer(create):
    """llguidance follows some schemas for a while only."""
    pytest.importorskip("llguidance")
    text = {"type": "string", "pattern": "^([ab]{1,200}c?){1,200}$"}
    schema = {"type": "object", "properties": {"at": text}, "required": ["at"]}
    body = {"messages": ASK, "temperature": 0, "max_tokens": 400}
    body |= {"logit_bias": {str(ord("a")): 100}}
    tool = {"type": "function", "function": {"name": "sky", "parameters": schema}}
    [found] = both(create, **body, tools=[tool], tool_choice="required").choices
    assert found.finish_reason == "length"
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    answer = both(create, **body, response_format=form)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens < 400


# -- vectors, models, errors ----------------------------------------------------------------------


@IN_BOTH_WAYS
def test_vectors_are_those_of_the_library(create, llm):
    """The client asks for base64 and reads it; floats are the same."""
    texts = ["one", "two and more"]
    wanted = [each.outputs.embedding for each in llm.embed(texts, use_tqdm=False)]
    found = create("embeddings.create", input=texts)
    assert [each.index for each in found.data] == [0, 1]
    for each, own in zip(found.data, wanted, strict=True):
        assert each.embedding == pytest.approx(own, abs=1e-5)
    floats = create("embeddings.create", input=[*b"one"], encoding_format="float")
    assert floats.data[0].embedding == pytest.approx(wanted[0], abs=1e-5)
    assert found.usage.prompt_tokens == found.usage.total_tokens == 3 + 12


def test_base64_is_of_little_endian_floats(place):
    body = place.post("/v1/embeddings", {"input": "one", "encoding_format": "base64"}).json()
    floats = struct.unpack("<128f", base64.b64decode(body["data"][0]["embedding"]))
    assert sum(x * x for x in floats) == pytest.approx(1, abs=1e-5)


def test_models(place):
    with openai.OpenAI(base_url=f"{place.url}/v1", api_key="none") as client:
        assert [model.id for model in client.models.list()] == ["tiny", "other"]
        assert client.models.retrieve("other").max_model_len == 512
        with pytest.raises(openai.NotFoundError, match="`model` must be one of tiny, other"):
            client.models.retrieve("third")
    assert (
        place.post("/v1/completions", {"prompt": "a", "model": "other"}).json()["model"] == "tiny"
    )


@pytest.mark.parametrize(
    ("body", "error", "says"),
    [
        ({"model": "gpt"}, "NotFoundError", "`model` must be one of tiny, other, got 'gpt'"),
        (
            {"messages": [{"role": "user", "content": "x" * 600}]},
            "BadRequestError",
            "max_model_len",
        ),
        ({"messages": []}, "BadRequestError", "`messages` must have at least one message"),
        *(
            ({"extra_body": {"model": none}}, "NotFoundError", "`model` must be one of")
            for none in ("", [], {}, 0, False)
        ),
        ({"extra_body": {"output_kind": 1}}, "BadRequestError", "`output_kind` is not supported: "),
        ({"extra_body": {"temperture": 1}}, "BadRequestError", "`temperture` is not supported"),
        ({"temperature": -1}, "BadRequestError", "`temperature` must be"),
        ({"extra_body": {"colour": 1}}, "BadRequestError", "`colour` is not supported"),
        ({"extra_body": {"chat_template": "x"}}, "BadRequestError", "`chat_template` 'x' is not"),
        ({"extra_body": {"guided_regex": "x"}}, "BadRequestError", "pass structured_outputs"),
        ({"n": 129, "temperature": 1}, "BadRequestError", "`n` must be at most 128"),
        ({"tool_choice": "required"}, "BadRequestError", "`tools` must be given"),
        ({"tools": [NOW], "tool_choice": {"function": {"name": "x"}}}, "BadRequestError", "one of"),
        ({"tools": [{}]}, "BadRequestError", r"`tools\[0\]` must be"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "BadRequestError",
            "must have no images: .* does not see",
        ),
    ],
)
def test_mistakes_are_refused_by_name(body, error, says, create, place):
    """With the client's error for them, before anything is queued; in streams, too."""
    before = place.metrics()["num_steps"]
    for stream in (False, True):
        with pytest.raises(getattr(openai, error), match=says) as caught:
            create("chat.completions.create", **{"messages": ASK, "stream": stream, **body})
        assert int(caught.value.code) == caught.value.status_code
        assert f"`{caught.value.param}" in caught.value.message
    assert place.metrics()["num_steps"] == before
