"""What a server refuses, whom it watches, and how it ends."""

import asyncio
import http.client
import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from http_server import ASK, JSON, PATIENCE, PLAIN, httpx, serving
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from invariants import check_scheduler

from checkpoints import rare
from faults import wait_until
from nanovllm.async_llm import AsyncLLM, _Jobs
from nanovllm.cli.main import main
from nanovllm.cli.serve import names_of
from nanovllm.openai import asks
from nanovllm.openai.bodies import Fields
from nanovllm.outputs import EmbeddingOutput, EmbeddingRequestOutput, Mistake, RequestOutput
from nanovllm.sampling.structured_output import GrammarCompiler
from nanovllm.serve import guard, served
from nanovllm.serve.errors import DEAD, RefusedError, raise_error
from nanovllm.serve.metrics import COUNTERS, GAUGES, ServerMetrics
from nanovllm.serve.served import Waiting
from nanovllm.serve.server import bind
from nanovllm.serve.texts import merge

ENGINE_VALUES = [key for known in (COUNTERS, GAUGES) for key, _ in known.values()]
LONG = {"max_tokens": 400, "ignore_eos": True, "temperature": 0}
CHAT = "/v1/chat/completions"
POSTS = [CHAT, "/v1/completions", "/v1/embeddings", "/tokenize", "/detokenize"]
NESTED = b'{"messages": [], "max_tokens": %b1%b}' % (b"[" * 900, b"]" * 900)
NO_SCHEMA = {"type": "nonsense"}
NO_FORM = {"type": "json_schema", "json_schema": {"schema": NO_SCHEMA}}
NO_TOOLS = [{"type": "function", "function": {"name": "f", "parameters": NO_SCHEMA}}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]
JSON_OBJECT = {"type": "json_object"}
NO_OBJECT = {"parameters": {"type": ["array", "null"]}}
MANY = ["x" * 400] * 200
PROMPT_LOGPROBS = {"prompt_logprobs": 20, "max_tokens": 1}
ECHO = {"echo": True, "logprobs": 20, "n": 8, "temperature": 1, "max_tokens": 1}
LOGPROBS = {"logprobs": True, "top_logprobs": 20}
SHORT = {"messages": ASK, "max_tokens": 1}
IGNORED = {"verbosity": "medium", "prompt_cache_retention": "24h", "service_tier": "auto"}
CUT = {
    "role": "assistant",
    "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": '{"x": "'}}],
}
GETS = ["/v1/models", "/v1/models/tiny", "/version", "/metrics"]


@pytest.fixture(scope="module")
def place():
    with serving() as place:
        yield place


class Steps:
    """The engine of a server, which takes a step when a test lets it."""

    def __init__(self, monkeypatch):
        self.llm, self._left = None, queue.SimpleQueue()
        self._begun, self._done = threading.Semaphore(0), threading.Semaphore(0)
        step = _Jobs.step

        def stepping(jobs):
            self.llm = jobs.llm
            self._begun.release()
            self._left.get(timeout=PATIENCE)
            step(jobs)
            self._done.release()

        monkeypatch.setattr(_Jobs, "step", stepping)

    def wait(self):
        """Wait until the engine is about to take a step."""
        assert self._begun.acquire(timeout=PATIENCE)

    def let(self, count):
        """Let it take so many."""
        for _ in range(count):
            self._left.put(None)
            assert self._done.acquire(timeout=PATIENCE)

    def let_any(self):
        """Let it take all that follow."""
        for _ in range(1000):
            self._left.put(None)


# -- clients that go ------------------------------------------------------------------------------


def raw_request(place, body, path=CHAT):
    """A connection that has asked."""
    host, port = place.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=PATIENCE)
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    return connection


class Noting:
    """A queue of commands that says when a request is to be dropped."""

    def __init__(self, commands, told):
        self._commands, self._told = commands, told

    def put(self, command):
        self._commands.put(command)
        if getattr(command, "func", None) is _Jobs.drop:
            self._told.set()


@pytest.mark.parametrize("streams", [True, False])
def test_a_client_that_goes_frees_its_blocks_within_two_steps(streams, monkeypatch):
    with serving(overlap=False) as place:
        steps, told = Steps(monkeypatch), threading.Event()
        monkeypatch.setattr(place.llm, "_commands", Noting(place.llm._commands, told))
        connection = raw_request(place, {"messages": ASK, "stream": streams, **LONG})
        steps.wait()
        steps.let(1)
        for _ in range(4):
            steps.wait()
            steps.let(1)
        steps.wait()
        manager = steps.llm.scheduler.block_manager
        assert manager.num_used_blocks > 0
        connection.close()
        assert told.wait(PATIENCE), "the server has seen it"
        steps.let(1)  # the step under way
        steps.let_any()
        left = place.metrics()
        assert left["num_used_kvcache_blocks"] == left["num_running"] == 0
        assert left["num_steps"] <= 7, "one step more at most"
        check_scheduler(steps.llm.scheduler)


def test_a_hundred_clients_are_killed():
    """In the middle of their answers, with several prompts and without streams, too."""
    with serving(num_kvcache_blocks=3600) as place:
        kill_hundred(place)


def kill_hundred(place):
    kinds = [
        (CHAT, {"messages": ASK, "stream": True}),
        (CHAT, {"messages": ASK}),
        ("/v1/completions", {"prompt": ["a", "b", "c"], "stream": True}),
        ("/v1/completions", {"prompt": ["a", "b"]}),
    ]
    connections = []
    for i in range(100):
        path, body = kinds[i % 2 if i < 90 else 2 + i % 2]
        connections.append(raw_request(place, {**body, **LONG, "max_tokens": 450}, path))
    for connection in connections[:20:2]:
        assert connection.recv(4) == b"HTTP"
    while (before := place.metrics())["num_running"] + before["num_waiting"] < 100:
        assert place.app.num_open > 50, "they are long"
    for connection in connections:
        linger = (1).to_bytes(4, "little") + (0).to_bytes(4, "little")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)  # a reset, as by kill
        connection.close()
    while place.app.num_open:  # it sees them go, one after the other
        assert place.get("/version").status_code == 200
    while (after := place.metrics())["num_running"] + after["num_waiting"]:
        pass
    assert after["num_used_kvcache_blocks"] == 0
    assert after["num_aborted"] > 50
    assert after["num_aborted"] + after["num_finished"] == 90 + 5 * (3 + 2)
    page = place.get("/metrics").text
    [aborted] = re.findall(r'finished_reason="abort"} (\d+)', page)
    assert int(aborted) >= after["num_aborted"]
    answer = place.post(CHAT, {"messages": ASK, "temperature": 0}).json()
    assert answer["choices"][0]["message"]["content"] == "472"


def test_a_stream_of_several_prompts_ends_while_news_wait_for_its_reader():
    """Whose client has gone: its generators end, though there is no room for what they have."""
    begun, ended = [], []

    async def counting(number):
        try:
            for i in range(100):
                begun.append((number, i))
                yield i
        finally:
            ended.append(number)

    async def read_one():
        merged = merge([counting(number) for number in range(3)])
        await anext(merged)
        while len(begun) < 3:  # all have one
            await asyncio.sleep(0)
        await asyncio.wait_for(merged.aclose(), PATIENCE)
        return sorted(ended)

    assert asyncio.run(read_one()) == [0, 1, 2]
    assert len(begun) < 6, "who reads nothing is waited for"


def test_merged_items_are_those_of_the_generators():
    async def items(number):
        for i in range(number):
            await asyncio.sleep(0)
            yield number, i
        if number == 3:
            raise RuntimeError("of the third")

    async def read_all():
        found = []
        with pytest.raises(RuntimeError, match="of the third"):
            async for item in merge([items(number) for number in (2, 3)]):
                found.append(item)
        return found

    assert sorted(asyncio.run(read_all())) == [(2, 0), (2, 1), (3, 0), (3, 1), (3, 2)]


def test_too_many_that_wait_are_refused(monkeypatch):
    """At once, with the time after which to come again. One that has its first token waits not."""
    admitted, hold = set(), served.Place.hold

    def noted(place, count):
        hold(place, count)
        admitted.add(place)

    monkeypatch.setattr(served.Place, "hold", noted)
    with serving(max_waiting=2, overlap=False) as place, ThreadPoolExecutor(3) as pool:
        steps = Steps(monkeypatch)
        body = {"messages": ASK, "max_tokens": 3, "temperature": 0}
        first = pool.submit(place.post, CHAT, body)
        steps.wait()
        second = pool.submit(place.post, CHAT, {**body, "stream": True})
        wait_until(lambda: len(admitted) == 2)
        refused = place.post(CHAT, body)
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["type"] == "RateLimitError"
        assert place.post("/v1/embeddings", {"input": "a"}).status_code == 429
        steps.let_any()
        assert first.result(PATIENCE).json()["choices"][0]["message"]["content"] == "472"
        assert second.result(PATIENCE).text.endswith("data: [DONE]\n\n")
        assert place.post(CHAT, body).status_code == 200
        assert 'vllm:admission_rejections_total{model_name="tiny",engine="0"} 2' in (
            place.get("/metrics").text
        )


def test_nobody_waits_for_the_form_of_another(monkeypatch):
    """Which is not compiled in the engine's thread."""
    begun, may_end, compile_form = threading.Event(), threading.Event(), GrammarCompiler.compile

    def compiling(self, params, *rest):
        begun.set()
        assert may_end.wait(PATIENCE)
        return compile_form(self, params, *rest)

    monkeypatch.setattr(GrammarCompiler, "compile", compiling)
    pytest.importorskip("llguidance")
    with serving() as place, ThreadPoolExecutor(1) as pool:
        body = {"prompt": "a", "structured_outputs": {"regex": "b{3}"}}
        slow = pool.submit(place.post, "/v1/completions", body)
        try:
            assert begun.wait(PATIENCE)
            assert place.get("/health").status_code == 200
            answer = place.post(CHAT, {"messages": ASK, "temperature": 0}).json()
            assert answer["choices"][0]["message"]["content"] == "472"
        finally:
            may_end.set()
        assert slow.result(PATIENCE).json()["choices"][0]["text"] == "bbb"


# -- keys and bounds ------------------------------------------------------------------------------


@pytest.mark.parametrize("streams", [True, False])
def test_every_sequence_of_a_request_waits(streams, monkeypatch):
    """Until the first token of its prompt; and one request may have more than may wait."""
    with (
        serving(max_waiting=3, overlap=False, max_num_seqs=2) as place,
        ThreadPoolExecutor(1) as pool,
    ):
        steps = Steps(monkeypatch)
        body = {"prompt": ["ab", "cd"], "n": 2, "max_tokens": 3, "ignore_eos": True, "seed": 1}
        several = pool.submit(place.post, "/v1/completions", {**body, "stream": streams})
        steps.wait()
        one = {"prompt": "a", "max_tokens": 1}
        refused = place.post("/v1/completions", one)
        assert refused.status_code == 429 and "4 sequences wait" in refused.text
        steps.let(1)  # the first prompt has its first tokens
        steps.wait()
        steps.let_any()
        assert several.result(PATIENCE).status_code == 200
        assert place.post("/v1/completions", {**one, "n": 3, "seed": 1}).status_code == 200
        assert place.post("/v1/completions", one).status_code == 200


def test_a_place_is_given_back_for_each_prompt():
    waiting = Waiting(3)
    with waiting.admit() as place:
        place.hold(6)
        for _ in range(2):
            says = f"{waiting.count} sequences wait"
            with pytest.raises(RefusedError, match=says), waiting.admit():
                pass
            place.release(2)
        with waiting.admit():
            assert waiting.count == 3
        assert waiting.count == 2
    assert (waiting.count, waiting.num_refused) == (0, 2)


def test_a_key_opens_everything_and_health_needs_none(caplog):
    caplog.set_level("INFO", "nanovllm.serve")
    with serving(keys=["one", "zwei-ü"]) as place:
        assert place.get("/health").status_code == 200
        wrong = [{}, {"Authorization": "Bearer two"}, {"Authorization": "Basic one"}]
        wrong += [{"Authorization": "Bearer"}, {"Authorization": "one"}]
        for headers in wrong:
            for path in GETS:
                answer = place.get(path, headers=headers)
                assert answer.status_code == 401, path
                assert answer.headers["www-authenticate"] == "Bearer"
                own_id = answer.headers["x-request-id"]
                assert f"request {own_id} is refused (401): the header" in caplog.text
            for path in POSTS:
                answer = place.post(path, b"{}", **headers)
                assert answer.status_code == 401, path
                assert answer.json()["error"]["type"] == "AuthenticationError"
        for key in ("one", "zwei-ü".encode()):
            value = key if isinstance(key, bytes) else key.encode()
            headers = {"Authorization": b"Bearer " + value}
            for path in GETS:
                assert place.get(path, headers=headers).status_code == 200


def test_keys_are_compared_in_constant_time(monkeypatch):
    """All of them, as digests, also after one that fits."""
    seen, compare = [], guard.hmac.compare_digest
    noting = lambda a, b: seen.append((len(a), len(b))) or compare(a, b)  # noqa: E731
    monkeypatch.setattr(guard.hmac, "compare_digest", noting)
    with serving(keys=["a", "bb", "ccc"]) as place:
        assert place.get("/version", headers={"Authorization": "Bearer a"}).status_code == 200
    assert seen == [(32, 32)] * 3


def test_bodies_are_bounded(place, monkeypatch):
    monkeypatch.setattr(guard, "MAX_BODY", 1000)
    for content in (b"x" * 1001, iter([b"x" * 600, b"x" * 600])):  # with its length, and in chunks
        answer = httpx.post(place.url + CHAT, content=content, headers=JSON, **PLAIN)
        assert answer.status_code == 413 and "1,000 bytes" in answer.json()["error"]["message"]
    assert place.post(CHAT, {"messages": ASK, "max_tokens": 1}).status_code == 200


def test_health_reads_no_body():
    """Which anyone may send, without a key."""
    with serving(keys=["k"]) as place:
        for method, path in (("GET", "/health"), ("POST", "/health"), ("GET", "/version")):
            connection = http.client.HTTPConnection(place.url.removeprefix("http://"), timeout=60)
            connection.putrequest(method, path)
            connection.putheader("Authorization", "Bearer k")
            connection.putheader("Content-Length", str(1 << 20))
            connection.endheaders(b"x")  # the rest never comes
            answer = connection.getresponse()
            assert answer.status == (405 if method == "POST" else 200)
            if method == "POST":
                assert {*answer.getheader("allow").split(", ")} == {"GET", "HEAD"}
            connection.close()


def test_names_that_lead_here_are_no_door_for_web_pages_of_others():
    """A page may have its own name resolved to this machine: then it is of the same origin."""
    with serving(hosts=names_of("127.0.0.1")) as place:
        for host in ("localhost", "LOCALHOST:1", "127.0.0.1:8000", "[::1]", "[::1]:80"):
            assert place.get("/v1/models", headers={"Host": host}).status_code == 200
        for host in ("evil.com", "evil.com:8000", "localhost.evil.com", "[::2]:80", "1.2.3.4"):
            for path in ("/v1/models", "/health"):
                answer = place.get(path, headers={"Host": host})
                assert answer.status_code == 403
                assert "`Host` must be one of" in answer.json()["error"]["message"]
    assert names_of("::1")[-1] == "[::1]" and names_of("0.0.0.0") == ()


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        (CHAT, b"{", 400, "the body must be JSON"),
        (CHAT, b"[" * 100_000, 400, "the body must be JSON"),
        (CHAT, b'{"temperature": NaN}', 400, "NaN is not a JSON number"),
        (CHAT, b"\xff", 400, "the body must be JSON"),
        (CHAT, NESTED, 400, "`max_tokens` must be|nested too deeply"),
        (CHAT, b"[]", 400, "must be an object"),
        ("/v1/completions", {}, 400, "`prompt` must be given"),
        ("/v1/completions", {"prompt": []}, 400, "at least one token"),
        ("/v1/completions", {"prompt": ["a"] * 2049}, 400, "at most 2048 prompts"),
        ("/v1/completions", {"prompt": ["a"] * 20, "n": 120, "temperature": 1}, 400, "`n` must be"),
        ("/v1/completions", {"prompt": "a", "stop": ["x"] * 65}, 400, "at most 64 strings"),
        ("/v1/completions", {"prompt": "a", "bad_words": ["x"] * 1025}, 400, "at most 1024 str"),
        (CHAT, {"messages": ASK, "allowed_token_ids": [1] * 262_145}, 400, "at most 262144 token"),
        (CHAT, {"messages": ASK, "n": 128, "temperature": 1, **LOGPROBS}, 400, "got 1,376,256"),
        (CHAT, {"messages": ASK, "stop_token_ids": [9999]}, 400, "`stop_token_ids` must"),
        (CHAT, {"messages": [*ASK, CUT, *ASK], "max_tokens": 1}, 200, ""),
        (CHAT, {"messages": ASK, "verbosity": "high"}, 400, "`verbosity` 'high' is not"),
        (CHAT, {"messages": ASK, "max_tokens": 1, **IGNORED}, 200, ""),
        ("/v1/completions", {"prompt": "\ud800"}, 400, "lone surrogates"),
        ("/v1/completions", {"prompt": "a", "\ud800x": 1}, 400, "`?x` is not supported"),
        ("/v1/completions", {"prompt": "a", "request_id": "\ud800"}, 400, "`request_id` must be"),
        ("/v1/completions", {"prompt": "a", "request_id": 3}, 400, "`request_id` must be"),
        ("/v1/completions", {"prompt": "a", "n": "x" * 9999}, 400, "`n` must be an integer"),
        ("/v1/completions", {"prompt": "a", "stream_options": {}}, 400, "without `stream`"),
        ("/v1/completions", {"prompt": "a", "logprobs": 21}, 400, "`logprobs` must be"),
        (CHAT, {"messages": ASK, "max_completion_tokens": 0}, 400, "`max_completion_tokens` must"),
        (
            CHAT,
            {"messages": ASK, "chat_template_kwargs": {"messages": []}},
            400,
            "`chat_template_kwargs` must hold variables",
        ),
        (CHAT, {"messages": ASK, "max_tokens": 0}, 400, "`max_tokens` must"),
        (CHAT, {"messages": ASK, "max_tokens": False}, 400, "`max_tokens` must be an integer"),
        (CHAT, {"messages": ASK, **LOGPROBS, "top_logprobs": 21}, 400, "`top_logprobs` must be"),
        (CHAT, {"messages": ASK, "top_logprobs": 2}, 400, "`top_logprobs` needs `logprobs` true"),
        (CHAT, {**SHORT, "logprobs": False, "top_logprobs": 0}, 200, ""),
        (CHAT, {**SHORT, "add_special_tokens": False}, 200, ""),
        ("/tokenize", {"messages": ASK, "add_special_tokens": False}, 200, ""),
        (CHAT, {**SHORT, "add_special_tokens": True}, 400, "`add_special_tokens` True is not"),
        (CHAT, {**SHORT, "use_beam_search": True}, 400, "`use_beam_search` True is not supported"),
        (CHAT, {**SHORT, "use_beam_search": False}, 200, ""),
        (
            CHAT,
            {**SHORT, "structured_outputs": {"jsn": {}}},
            400,
            "`structured_outputs.jsn` is not supported: did you mean `json`?",
        ),
        (CHAT, {"messages": ASK, "logprobs": 1, "top_logprobs": 2}, 400, "`logprobs` must be True"),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 600}]}, 400, "`messages` must"),
        ("/v1/embeddings", {"input": [1] * 600}, 400, "`input` must"),
        ("/v1/completions", {"prompt": MANY, **PROMPT_LOGPROBS}, 400, "`prompt_logprobs` must"),
        ("/v1/completions", {"prompt": MANY, **ECHO}, 400, "`logprobs` must be at most"),
        ("/v1/completions", {"prompt": [1] * 262_145}, 400, "at most 262144 token ids"),
        ("/detokenize", {"tokens": [1] * 262_145}, 400, "at most 262144 token ids"),
        ("/v1/completions", {"prompt": "a", "structured_outputs": {"regex": "("}}, 400, "regex"),
        (
            "/v1/completions",
            {"prompt": "a", "structured_outputs": {"regex": "a" * 4097}},
            400,
            "at most 4,096 characters",
        ),
        (
            "/v1/completions",
            {"prompt": "a", "structured_outputs": {"grammar": f"start: /b\\/{'a' * 4097}/"}},
            400,
            "regular expressions of at most 4,096 characters, got 4,102",
        ),
        (
            "/v1/completions",
            {"prompt": "a", "structured_outputs": {"grammar": "a" * 65_537}},
            400,
            "at most 65,536 characters",
        ),
        (CHAT, {"messages": ASK, "response_format": NO_FORM}, 400, "`response_format` must"),
        (CHAT, {"messages": ASK, "response_format": {**NO_FORM, "x": 1}}, 400, "_format.x` is not"),
        (
            CHAT,
            {
                "messages": ASK,
                "response_format": {"type": "json_schema", "json_schema": {"schema": {}, "x": 1}},
            },
            400,
            "`response_format.json_schema.x` is not supported",
        ),
        (CHAT, {"messages": ASK, "return_sampling_mask": True}, 400, "`return_sampling_mask` must"),
        (
            CHAT,
            {"messages": ASK, "tools": NO_TOOLS, "tool_choice": "required"},
            400,
            "`tools` must",
        ),
        (
            CHAT,
            {"messages": ASK, "tools": NO_TOOLS, "structured_outputs": {"grammar": "x"}},
            400,
            "`grammar` must",
        ),
        ("/v1/embeddings", {"input": "a", "dimensions": 3}, 400, "`dimensions` 3 is not"),
        ("/v1/embeddings", {"input": "a", "x": 3}, 400, "`x` is not supported for /v1/embeddings"),
        ("/v1/embeddings", {}, 400, "`input` must be given"),
        ("/v1/embeddings", {"input": "a", "encoding_format": False}, 400, "`encoding_format` must"),
        (
            CHAT,
            {
                "messages": ASK,
                "tools": [{"function": {"name": "f", **NO_OBJECT}}],
                "tool_choice": "required",
            },
            400,
            "`tools` must have `parameters` of the `type` object",
        ),
        (
            CHAT,
            {"messages": ASK, "tools": TOOLS, "tool_choice": {**TOOLS[0], "type": "custom"}},
            400,
            "`tool_choice` must be none",
        ),
        (
            CHAT,
            {
                "messages": ASK,
                "response_format": JSON_OBJECT,
                "structured_outputs": {"regex": "grammar"},
            },
            400,
            "`structured_outputs` must be null beside `response_format`",
        ),
        *(
            ("/v1/completions", {"prompt": "a", "structured_outputs": form}, 400, "`multipleOf` of")
            for form in (
                {"json": {"multipleOf": 1e6}},
                {"json": {"allOf": [{"multipleOf": 997}, {"multipleOf": 991}]}},
                {"json": '{"multiple\\u004ff": 1e999999999}'},
                {"grammar": 'start: %json {"multipleOf": 123457}'},
                {"json": {"properties": {n: {"multipleOf": 30_000 + n} for n in range(4)}}},
            )
        ),
        ("/tokenize", {"messages": ASK, "tools": [{}]}, 400, "`tools[0]` must be"),
        ("/tokenize", {"prompt": 3}, 400, "`prompt` must be a text"),
        ("/detokenize", {"tokens": [-1]}, 400, "`tokens` must hold token ids"),
        ("/detokenize", {"tokens": "a"}, 400, "`tokens` must be a list"),
        ("/detokenize", {"tokens": [1, "a"]}, 400, "must be a list of token ids, got 'a' in it"),
        ("/tokenize", {}, 400, "`prompt` or `messages` must be given, got neither"),
        ("/tokenize", {"prompt": "a", "messages": ASK}, 400, "must be given, got both"),
        ("/v1/responses", {}, 404, "/v1/models/NAME, /health"),
        ("/health", {}, 405, "Method Not Allowed"),
    ],
)
def test_mistakes_have_a_status_and_a_sentence(path, body, status, says, place, caplog):
    if any(form in str(body) for form in ("regex", "grammar", "nonsense")):
        pytest.importorskip("llguidance")
    caplog.set_level("INFO", "nanovllm.serve")
    answer = place.post(path, body, **{"X-Request-Id": "mine"})
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/json")
    message = answer.json().get("error", {}).get("message", "")
    assert ("request mine is refused" in caplog.text) == (status != 200)
    assert any(each in message for each in says.split("|"))


def test_a_model_without_a_chat_template_says_where_to_go(place, monkeypatch):
    monkeypatch.setattr(place.llm.tokenizer, "chat_template", None)
    for path in (CHAT, "/tokenize"):
        answer = place.post(path, {"messages": ASK})
        assert answer.status_code == 400
        said = answer.json()["error"]["message"]
        assert said == "this model has no chat template: use /v1/completions"


def test_large_values_are_shown_in_part(place):
    """Nobody waits while a mistake of many megabytes is written."""
    large = [["x" * 100] * 100] * 100
    for field in ("tools", "tool_choice", "stop", "n", "logprobs", "response_format", "seed"):
        with pytest.raises((TypeError, ValueError), match=f"`{field}") as caught:
            fields = Fields({"messages": ASK, field: large})
            asyncio.run(asks.read_ask(place.llm, fields, is_chat=True, interval=1))
        assert len(str(caught.value)) < 10_000


def test_texts_that_are_too_long_are_not_even_tokenised(place, monkeypatch):
    """Which takes seconds: more characters than `max_model_len` tokens can spell are too many."""
    tokenizer, asked = place.llm.tokenizer, []
    encode = tokenizer.encode
    noting = lambda *args, **options: asked.append(1) or encode(*args, **options)  # noqa: E731
    monkeypatch.setattr(tokenizer, "encode", noting)
    most = 512 * max(len(token) for token in tokenizer.get_vocab())
    for length, says in ((most + 1, f"at most {most:,} characters"), (most, "max_model_len 512")):
        text = "x" * length
        for path, body in (
            (CHAT, {"messages": [{"role": "user", "content": text}]}),
            ("/v1/completions", {"prompt": text}),
            ("/v1/embeddings", {"input": [text, "a"]}),
            ("/tokenize", {"prompt": text}),
        ):
            answer = place.post(path, body)
            if length == most and path in (CHAT, "/tokenize"):  # whose template adds to it
                continue
            assert answer.status_code == 400 and says in answer.json()["error"]["message"], path
        assert bool(asked) == (length == most)


def test_web_pages_of_others_cannot_ask(place):
    """A browser sends other kinds of bodies anywhere without asking, but no JSON."""
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        answer = place.post(CHAT, {"messages": ASK}, **{"Content-Type": kind})
        assert answer.status_code == 415
        assert "access-control-allow-origin" not in answer.headers


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([10**400, 1e300, "auto"])
    | st.floats()
    | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "function", "name"]), inner)
    ),
    max_leaves=6,
)
FIELDS = [
    *("messages", "prompt", "input", "tokens", "model", "stream", "stream_options", "n", "stop"),
    *("temperature", "top_p", "top_k", "seed", "max_tokens", "logprobs", "top_logprobs", "echo"),
    *("tools", "tool_choice", "response_format", "structured_outputs", "logit_bias", "bad_words"),
    *("chat_template_kwargs", "reasoning_effort", "truncate_prompt_tokens", "stream_interval"),
    *("encoding_format", "request_id", "prompt_logprobs", "add_special_tokens", "user", "metadata"),
    *("allowed_token_ids", "stop_token_ids", "min_tokens", "logprob_token_ids", "x", "priority"),
    "max_completion_tokens",
]
GOOD = {
    CHAT: {"messages": ASK, "max_tokens": 2},
    "/v1/completions": {"prompt": "a", "max_tokens": 2},
    "/v1/embeddings": {"input": "a"},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [97]},
}


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.sampled_from(POSTS),
    st.dictionaries(st.sampled_from(FIELDS), VALUES, min_size=1, max_size=3),
    st.booleans(),
)
def test_no_body_is_a_fault_of_ours(place, path, fields, is_good):
    """Whatever stands in it: an answer, or a sentence about a mistake."""
    body = {**(GOOD[path] if is_good else {}), **fields}
    if path in POSTS[:2] and "max_completion_tokens" not in body:
        body.setdefault("max_tokens", 2)
    answer = place.post(path, body)
    assert answer.status_code in (200, 400, 404), (answer.text, body)
    if answer.status_code != 200:
        assert answer.json()["error"]["message"]
    elif body.get("stream") is True and path in POSTS[:2]:
        assert answer.text.endswith("data: [DONE]\n\n") and '{"error"' not in answer.text


def test_outputs_with_errors_are_no_answers():
    """A vector that could not be computed was an empty one."""
    vector = EmbeddingRequestOutput(0, EmbeddingOutput([]), [1], True, "the model computed NaN")
    with pytest.raises(RuntimeError, match="NaN"):
        raise_error(vector)
    refused = RequestOutput(0, None, [], [], True, 0, error=Mistake("`image` is broken"))
    with pytest.raises(RefusedError, match="broken"):
        raise_error(refused)
    raise_error(RequestOutput(0, None, [], [], True, 0))


# -- facts ----------------------------------------------------------------------------------------


def test_tokens_and_facts(place):
    tokenizer = place.llm.tokenizer
    assert place.post("/tokenize", {"prompt": "aé", "return_token_strs": True}).json() == {
        "count": 3,
        "max_model_len": 512,
        "tokens": tokenizer.encode("aé"),
        "token_strs": tokenizer.convert_ids_to_tokens(tokenizer.encode("aé")),
    }
    found = place.post("/tokenize", {"messages": ASK}).json()
    wanted = tokenizer.apply_chat_template(ASK, add_generation_prompt=True, return_dict=False)
    assert (found["tokens"], found["count"]) == (wanted, len(wanted))
    asked = {"messages": [*ASK, CUT, *ASK], "tools": NO_TOOLS, "reasoning_effort": "low"}
    tokens = place.post("/tokenize", asked).json()["tokens"]
    sent = {**asked, "max_tokens": 1, "return_token_ids": True, "stream": True}
    [ids, *_] = re.findall(r'"prompt_token_ids":(\[.*?\])', place.post(CHAT, sent).text)
    assert tokens == json.loads(ids), "those of a chat"
    assert place.post("/detokenize", {"tokens": tokenizer.encode("aé")}).json() == {"prompt": "aé"}
    own_id = place.get("/version", headers={"X-Request-Id": "mine"}).headers["x-request-id"]
    assert own_id == "mine"
    made = place.get("/version", headers={"X-Request-Id": "a b"}).headers["x-request-id"]
    assert re.fullmatch("[0-9a-f]{32}", made)


def test_metrics_are_those_that_dashboards_read(tmp_path):
    with serving() as place:
        for n, stream in ((1, False), (3, True)):
            body = {"prompt": "abc", "max_tokens": 5, "n": n, "ignore_eos": True, "stream": stream}
            assert place.post("/v1/completions", body).status_code == 200
        answer = place.get("/metrics")
        engine = place.metrics()
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    values, types = {}, {}
    for line in answer.text.splitlines():
        if line.startswith("# TYPE"):
            _, _, name, kind = line.split()
            types[name] = kind
        elif not line.startswith("#"):
            found = re.fullmatch(
                r'([a-z_0-9:]+)\{model_name="tiny",engine="0"(.*)\} ([\d.e+-]+)', line
            )
            values[found[1] + found[2]] = float(found[3])
            assert any(found[1].startswith(name) for name in types), "its type stands before it"
    assert values["vllm:generation_tokens_total"] == 20 == engine["num_sampled_tokens"]
    assert values['vllm:request_success_total,finished_reason="length"'] == 4
    assert values["vllm:prompt_tokens_total"] == engine["num_prompt_tokens"]
    for name in (n.removesuffix("_count") for n in values if n.endswith("_count")):
        assert types[name] == "histogram"
        buckets = [v for key, v in values.items() if key.startswith(f"{name}_bucket,le=")]
        assert buckets == sorted(buckets) and buckets[-1] == values[f"{name}_count"]
    assert values["vllm:e2e_request_latency_seconds_count"] == 2
    assert values["vllm:inter_token_latency_seconds_count"] == 16  # four in each completion
    assert values["vllm:request_generation_tokens_sum"] == 20
    assert values['vllm:request_params_n_bucket,le="2.0"'] == 1
    total = engine["total_seconds"]
    assert values["vllm:e2e_request_latency_seconds_sum"] == pytest.approx(
        total["mean"] * total["count"]
    )


def test_prometheus_reads_the_metrics(place):
    parser = pytest.importorskip("prometheus_client.parser", reason="needs the extra `test`")
    families = [*parser.text_string_to_metric_families(place.get("/metrics").text)]
    assert {"counter", "gauge", "histogram"} == {family.type for family in families}
    assert len(families) > 20


def test_choices_are_counted_and_no_siblings_of_mistakes():
    """Whether they end or their clients go; the time to the first token, in any case."""
    with serving() as place:

        def value(name):
            page = place.get("/metrics").text
            return int(re.search(rf"vllm:{name}[^}}]*}} (\d+)", page)[1])

        mistake = {"prompt": ["a", [1] * 600], "max_tokens": 400, "ignore_eos": True}
        assert place.post("/v1/completions", mistake).status_code == 400
        assert value('request_success_total.*finished_reason="abort"') == 0
        body = {"prompt": ["a", "b"], "n": 2, "stream": True, **LONG, "temperature": 1}
        connection = raw_request(place, body, "/v1/completions")
        assert connection.recv(4) == b"HTTP"
        connection.close()
        while place.app.num_open:
            assert place.get("/version").status_code == 200
        ends = [f'request_success_total.*finished_reason="{end}"' for end in ("abort", "length")]
        assert sum(map(value, ends)) == 4 and value(ends[0]) > 0
        assert value("time_to_first_token_seconds_count") > 0


def test_a_limit_counts_as_the_models_at_most():
    with serving() as place:
        for most in (10**400, 1e300):
            answer = place.post(CHAT, {"messages": ASK, "temperature": 0, "max_tokens": most})
            assert answer.json()["choices"][0]["message"]["content"] == "472"
        page = place.get("/metrics").text
    assert re.search(r"params_max_tokens_sum\S+ (\S+)", page)[1] == "1024.0"


def test_fields_of_vllm_are_read(place):
    """Those that change an answer, each seen in it."""

    def ask(**fields):
        body = {"prompt": "127+345=", "temperature": 0, **fields}
        [choice] = place.post("/v1/completions", body).json()["choices"]
        return choice

    assert ask(truncate_prompt_tokens=4, echo=True, max_tokens=1)["text"].startswith("345=")
    assert ask(allowed_token_ids=[ord("2"), 258])["text"].strip("2") == ""
    assert ask(min_tokens=8, max_tokens=9)["finish_reason"] == "length"
    assert ask(stop="7", include_stop_str_in_output=True)["text"] == "47"
    assert ask(stop_token_ids=[ord("7")])["text"] == "4"
    assert "4" not in ask(bad_words=["4"])["text"]
    assert ask(logit_bias={str(ord("9")): 1e6}, max_tokens=2)["text"] == "99"
    shown = ask(prompt_logprobs=0, max_tokens=1)["prompt_logprobs"]
    assert shown[0] is None and [[*each] for each in shown[1:]] == [
        [str(ord(c))] for c in "27+345="
    ]
    labels = ask(logprob_token_ids=[ord("4"), ord("5")], max_tokens=1)["logprobs"]
    assert {*labels["top_logprobs"][0]} == {"4", "5"}
    header = {"X-Request-Id": "mine"}
    for path, prefix in ((CHAT, "chatcmpl"), ("/v1/completions", "cmpl")):
        for body, wanted in (({}, "mine"), ({"request_id": "ours"}, "ours")):
            own = place.post(path, {**GOOD[path], **body}, **header)
            assert own.json()["id"] == f"{prefix}-{wanted}"
            assert own.headers["x-request-id"] == "mine"
    pieces = {"prompt": "a", "max_tokens": 30, "ignore_eos": True, "stream": True}
    said = place.post("/v1/completions", {**pieces, "stream_interval": 10}).text
    assert 2 <= said.count("data: {") <= 5, "at 1, 11, 21 and 30 tokens"


def test_models_with_other_names_have_labels_that_can_be_read():
    name = 'a"b\\c'
    page = ServerMetrics(name, 512).page(dict.fromkeys(ENGINE_VALUES, 0), 0)
    assert 'model_name="a\\"b\\\\c"' in page


# -- the end --------------------------------------------------------------------------------------


def check_dead(place, caplog, capfd, cause, num_traces):
    """All is refused by one sentence, and the log has the cause once."""
    answers = [place.get("/health"), place.get("/metrics")]
    answers += [place.post(path, GOOD[path]) for path in POSTS]
    for answer in answers:
        assert (answer.status_code, answer.json()["error"]["message"]) == (503, DEAD)
    said = caplog.text + capfd.readouterr().err  # where uvicorn logs
    assert said.count("Traceback") == num_traces
    assert said.count(f"the engine has failed: {cause}") == 1


# The thread of an engine that is closed after that raises, too: nobody else might have said so.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_health_says_when_a_worker_of_an_idle_engine_has_died(caplog, capfd):
    with serving(tensor_parallel_size=2, device="cpu") as place:
        assert place.get("/health").content == b""
        [worker] = asyncio.run(place.llm._call(lambda llm: llm.executor._workers._workers))
        os.kill(worker.process.pid, signal.SIGKILL)
        deadline = time.monotonic() + PATIENCE
        while place.get("/health").status_code == 200:
            assert time.monotonic() < deadline
        check_dead(place, caplog, capfd, "the worker of rank 1 was killed by SIGKILL", 0)


def test_health_says_when_no_replica_is_left(caplog, capfd):
    """Where none may be restarted: weights have been updated, say."""
    with serving(data_parallel_size=2, device="cpu") as place:
        replicas = asyncio.run(place.llm._call(lambda llm: llm.executor))
        deadline = time.monotonic() + PATIENCE
        first, second = [each.process for each in replicas._replicas.values()]
        first.kill()
        first.wait()
        replicas.keep_as_they_are()
        assert place.get("/health").status_code == 200
        second.kill()
        while place.get("/health").status_code == 200:
            assert time.monotonic() < deadline
        check_dead(place, caplog, capfd, "replica ", 0)


def test_requests_that_meet_the_end_of_the_engine_are_told_of_it(monkeypatch, caplog, capfd):
    """Streams that have begun, too, by their last events."""
    with serving(overlap=False) as place, ThreadPoolExecutor(3) as pool:
        steps = Steps(monkeypatch)
        stream = pool.submit(place.post, CHAT, {"messages": ASK, "stream": True, **LONG})
        steps.wait()
        steps.let(1)
        steps.wait()
        others = [pool.submit(place.post, CHAT, {"messages": ASK, **LONG}) for _ in range(2)]
        while place.app.num_open < 3:
            assert place.get("/version").status_code == 200

        def broken(*_):
            steps.llm.executor.is_broken = True
            raise RuntimeError("a rank has lost its way")

        monkeypatch.setattr(steps.llm.executor, "run", broken)
        steps.let_any()
        assert DEAD in stream.result(PATIENCE).text
        for other in others:
            assert other.result(PATIENCE).status_code == 503
        check_dead(place, caplog, capfd, "a rank has lost its way", 1)


@pytest.mark.parametrize("error", [ValueError, TypeError, ImportError, RecursionError])
def test_a_fault_of_the_engine_is_no_mistake_of_the_client(
    error, place, monkeypatch, caplog, capfd
):
    """Whatever its type; and the log has it, once."""

    def failing(_):
        raise error("`x` of ours")

    monkeypatch.setattr(_Jobs, "step", failing)
    for path in POSTS[:3]:
        answer = place.post(path, GOOD[path], **{"X-Request-Id": "mine"})
        assert (answer.status_code, "of ours" in answer.text) == (500, False)
        assert "request mine has failed" in caplog.text and "`x` of ours" in caplog.text
        assert "Traceback" not in capfd.readouterr().err, "of uvicorn"
        caplog.clear()


def test_a_server_that_drains_refuses_and_ends_when_all_have_answers(monkeypatch):
    with serving(overlap=False, grace=PATIENCE) as place, ThreadPoolExecutor(1) as pool:
        steps = Steps(monkeypatch)
        first = pool.submit(place.post, CHAT, {"messages": ASK, "temperature": 0})
        steps.wait()
        place.server.handle_exit(signal.SIGTERM, None)
        assert place.get("/health").status_code == 503
        refused = place.post(CHAT, {"messages": ASK})
        assert refused.status_code == 503 and "retry-after" in refused.headers
        assert not first.done()
        steps.let_any()
        assert first.result(PATIENCE).json()["choices"][0]["message"]["content"] == "472"


def test_who_has_sent_half_a_body_is_not_waited_for():
    with serving(grace=PATIENCE) as place:
        connection = http.client.HTTPConnection(place.url.removeprefix("http://"), timeout=PATIENCE)
        connection.putrequest("POST", CHAT)
        connection.putheader("Content-Length", "100")
        connection.endheaders(b"{")
        while not place.app.num_open:
            assert place.server.started
        place.server.handle_exit(signal.SIGTERM, None)
        answer = connection.getresponse()
        assert answer.status == 503 and answer.getheader("retry-after")
        connection.close()


def test_after_the_grace_open_requests_end(monkeypatch):
    """One without an answer is told, and so is a stream that has begun, by its last events."""
    with serving(overlap=False, grace=0.0) as place, ThreadPoolExecutor(2) as pool:
        steps = Steps(monkeypatch)
        stream = raw_request(place, {"messages": ASK, "stream": True, **LONG})
        steps.wait()
        steps.let(1)
        assert stream.recv(4) == b"HTTP"
        steps.wait()
        whole = pool.submit(place.post, CHAT, {"messages": ASK, **LONG})
        while place.app.num_open < 2:
            assert place.get("/version").status_code == 200
        place.server.handle_exit(signal.SIGTERM, None)
        assert whole.result(PATIENCE).status_code == 503
        said = b""
        while piece := stream.recv(1 << 16):
            said += piece
        events = re.findall(r"^data: (.*)", said.decode(), re.M)
        assert events[-1] == "[DONE]"
        assert json.loads(events[-2])["error"]["code"] == 503
        assert said.endswith(b"0\r\n\r\n"), "the answer is whole by the rules of HTTP"
        stream.close()
        steps.let_any()


def start(*args, **environment):
    """The command in a process of its own, and its address."""
    command = [sys.executable, "-m", "nanovllm", "serve", "--port", "0", *args]
    options = [
        "--max-model-len",
        "4096",
        "--num-kvcache-blocks",
        "300",
        "--kvcache-block-size",
        "16",
    ]
    process = subprocess.Popen(
        [*command, *options], stderr=subprocess.PIPE, text=True, env={**os.environ, **environment}
    )
    said = ""
    for line in process.stderr:
        said += line
        if found := re.search(r"http://\S+", line):
            return process, found[0]
    raise RuntimeError(said)


@pytest.mark.parametrize("number", [signal.SIGTERM, rare(signal.SIGINT)])
def test_the_command_drains_at_a_signal(number):
    process, url = start(NANOVLLM_API_KEY="k\n")
    try:
        options = {"headers": {"Authorization": "Bearer k"}, "timeout": PATIENCE}
        names = httpx.get(f"{url}/v1/models", **options).json()["data"]
        assert [each["id"] for each in names] == ["tiny-qwen3"]
        body = {"prompt": "count from 17:", "max_tokens": 300, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, **options) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(number)
            events = [line for line in lines if line]
        assert events[-1] == "data: [DONE]"
        assert json.loads(events[-2][6:])["choices"][0]["finish_reason"] == "length"
        assert process.wait(PATIENCE) == 0
        [said] = [line for line in process.stderr if "CPU contention" not in line]
        assert "open requests (1) are answered first, for at most 20 seconds; a second" in said
    finally:
        process.kill()
        process.stderr.close()
        process.wait()


def test_what_the_command_refuses_before_a_model_is_loaded(monkeypatch, capsys):
    def never(*_, **__):
        pytest.fail("a model was loaded")

    monkeypatch.setattr(AsyncLLM, "__init__", never)
    with bind("127.0.0.1", 0) as other:  # of a server that loads its model
        assert main(["serve", "--port", str(other.getsockname()[1])]) == 2
    assert "must be an address of this machine that is free" in capsys.readouterr().err
    assert main(["serve", "--port", "0", "--api-key", ""]) == 2
    assert "`--api-key` must not be empty" in capsys.readouterr().err
    assert main(["serve", "--port", "0", "--host", ""]) == 2
    assert "`--host` must not be empty" in capsys.readouterr().err
    assert main(["serve", "--port", "0", "--served-model-name", ""]) == 2
    assert "`--served-model-name` must not be empty" in capsys.readouterr().err
    for grace in ("nan", "-1"):
        with pytest.raises(SystemExit):
            main(["serve", "--port", "0", "--grace", grace])
        assert f"--grace: must be at least 0, got {grace}" in capsys.readouterr().err
    monkeypatch.setenv("NANOVLLM_API_KEY", "\n")
    assert main(["serve", "--port", "0"]) == 2, "which would be open to all"
    assert "`NANOVLLM_API_KEY` must not be empty or blank" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["serve", "--port", "99999"])
    assert "between 0 and 65535" in capsys.readouterr().err


def test_without_the_extra_one_sentence_says_what_to_install(monkeypatch, capsys):
    for name in [name for name in sys.modules if name.startswith("nanovllm.serve")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "starlette", None)
    for name in [name for name in sys.modules if name.startswith("starlette.")]:
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["serve"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and 'pip install "nanovllm[serve]"' in said


def test_who_listens_beyond_this_machine_without_a_key_is_told(monkeypatch, capsys):
    monkeypatch.setattr(
        AsyncLLM, "__init__", lambda *_, **__: (_ for _ in ()).throw(ValueError("x"))
    )
    for host, is_told in (("0.0.0.0", True), ("127.0.0.1", False), ("::1", False)):
        if host == "::1" and not socket.has_ipv6:
            continue
        assert main(["serve", "--port", "0", "--host", host]) == 2
        assert ("pass --api-key" in capsys.readouterr().err) == is_told
