"""Requests of rows: plain ones, and requests of OpenAI's batch format."""

import io
import json
import re
from dataclasses import replace
from datetime import datetime, timezone
from decimal import Decimal
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from types import MappingProxyType, MethodType, SimpleNamespace
from typing import get_type_hints

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image as Pillow

from nanovllm import CompletionOutput, Logprob, RequestOutput, SamplingParams
from nanovllm.batch import Result, read_rows
from nanovllm.batch.openai_batch import read_request
from nanovllm.batch.params import parameter_like
from nanovllm.batch.rows import as_rows, read_ask
from nanovllm.requests.json_params import CHAT_FIELDS

DEFAULT = SamplingParams(temperature=0.5, max_tokens=7)
CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


def rows_of(*lines: bytes, **options):
    return [*read_rows(io.BytesIO(b"".join(lines)), **options)]


def request(body, url=CHAT, **fields):
    return {"custom_id": "a", "method": "POST", "url": url, "body": body, **fields}


def test_parameters_stand_in_a_row_or_in_an_object_of_their_own():
    ask = read_ask({"prompt": "x", "max_tokens": 3, "seed": None, "mine": [1]}, DEFAULT)
    assert ask.prompt == "x"
    assert ask.params == SamplingParams(temperature=0.5, max_tokens=3)
    ask = read_ask(
        {"prompt": "x", "top_k": 3, "sampling_params": {"top_k": 4, "logit_bias": {"5": -1}}},
        DEFAULT,
    )
    assert (ask.params.top_k, ask.params.logit_bias) == (4, {5: -1.0})
    form = read_ask({"prompt": "x", "structured_outputs": {"regex": "a"}}, DEFAULT)
    assert form.params.structured_outputs.regex == "a"
    assert read_ask({"prompt": "x"}, DEFAULT).params is DEFAULT
    assert read_ask({"prompt": "x"}, DEFAULT, None, chat=True).messages == [
        {"role": "user", "content": "x"}
    ]
    ask = read_ask({"messages": [{**MESSAGES[0], "name": None}], "tools": [{}]}, DEFAULT)
    assert ask.messages == MESSAGES and ask.chat == {"tools": [{}]}


WHOLE = {  # what pandas makes of integers in columns with gaps
    **{"max_tokens": 8.0, "top_k": 3.0, "seed": 5.0, "n": 2.0, "min_tokens": 1.0},
    **{"logprobs": 0.0, "prompt_logprobs": 0.0, "stop_token_ids": [7.0, 8]},
    **{"logprob_token_ids": [7.0, 9], "allowed_token_ids": [1.0, 7.0], "logit_bias": {"7": 2.0}},
}


def test_integers_may_be_written_as_floats():
    """`max_tokens: 8.0` was refused."""
    kinds = get_type_hints(SamplingParams)
    integers = {name for name, kind in kinds.items() if "int" in re.findall(r"\w+", str(kind))}
    assert integers == set(WHOLE)
    plain = json.loads(json.dumps(WHOLE), parse_float=lambda text: int(float(text)))
    wanted = read_ask({"prompt": "x", **plain}, DEFAULT).params
    for values in (WHOLE, {"sampling_params": WHOLE}):
        found = read_ask({"prompt": "x", **values}, DEFAULT).params
        assert found == wanted and repr(found) == repr(wanted)
    body = {"prompt": [1.0, 2.0], "best_of": 1.0, **WHOLE}
    ask = read_request(request(body, "/v1/completions"), DEFAULT)
    assert repr(ask.params) == repr(wanted) and repr(ask.prompt) == "[1, 2]"
    assert repr(read_ask({"prompt": [1.0, 2]}, DEFAULT).prompt) == "[1, 2]"
    ids = read_ask({"prompt_token_ids": [3.0], "prompt": "x"}, DEFAULT).prompt
    assert repr(ids["prompt_token_ids"]) == "[3]"
    chat = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 3.0, "n": 2.0}
    params = read_request(request({**chat, "max_completion_tokens": 9.0}), DEFAULT).params
    assert repr((params.logprobs, params.n, params.max_tokens)) == "(3, 2, 9)"
    left, right = rows_of(b'{"custom_id": 7.0}\n'), rows_of(b'{"custom_id": 7}\n')
    assert left[0].key == right[0].key and repr(left[0].custom_id) == "7"


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("value", [8.5, float("nan"), float("inf"), True, "8.0"], ids=repr)
def test_other_floats_are_no_integers(name, value):
    names = "stop_token_ids", "allowed_token_ids", "logprob_token_ids"
    given = {**{each: [value] for each in names}, "logit_bias": {value: 1}}
    with pytest.raises(TypeError, match=f"`{name}` must (be an integer|hold integer token ids)"):
        read_ask({"prompt": "x", name: given.get(name, value)}, DEFAULT)
    with pytest.raises(TypeError, match="must be an integer"):
        SamplingParams(max_tokens=8.0)


def test_a_column_of_integers_with_a_gap():
    """Such a column in pandas, in all forms in which it may arrive."""
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame({"prompt": ["x", "y"], "max_tokens": [8, None], "custom_id": [3, 4]})
    lines = table.to_json(orient="records", lines=True).encode().splitlines(keepends=True)
    assert b"8.0" in lines[0]
    for rows in (rows_of(*lines), [*as_rows(table.astype(object).where(table.notna(), None)
                                            .to_dict("records"))]):  # fmt: skip
        assert [read_ask(row.fields, DEFAULT).params.max_tokens for row in rows] == [8, 7]


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({}, "no fields"),
        ({"text": "x", "id": 1}, "got the fields `text`, `id`"),
        ({"prompt": "x", "messages": MESSAGES}, "either `messages` or a prompt"),
        ({"prompt": "x", "max_tokens": "many"}, "`max_tokens` must be an integer, got 'many'"),
        ({"prompt": "x", "sampling_params": {"max_token": 3}}, "did you mean `max_tokens`"),
        ({"prompt": "x", "sampling_params": 3}, "`sampling_params` must be an object"),
        ({"prompt": "x", "best_of": 3}, "pass n"),
    ],
)
def test_mistakes_in_a_row_are_named(values, says):
    with pytest.raises((TypeError, ValueError), match=says):
        read_ask(values, DEFAULT)


LIKE = {  # fields, and the parameters that they may be meant for
    **{"max_token": "max_tokens", "maxTokens": "max_tokens", "max-tokens": "max_tokens"},
    **{"max_new_tokens": "max_tokens", "max_completion_tokens": "max_tokens", "topP": "top_p"},
    **{"TEMPERATURE": "temperature", "temprature": "temperature", "stop_sequences": "stop"},
    **{"num_return_sequences": "n", "response_format": "structured_outputs"},
    **{"guided_json": "structured_outputs", "min_new_tokens": "min_tokens", "logprob": "logprobs"},
}
UNLIKE = [
    *("step", "stops", "seeds", "top_1", "tokens", "num_tokens", "token_ids", "eos_token_id"),
    *("N", "n_", "max_length", "temp", "stop_words", "label", "name", "id", "_row", "_key"),
    *("generated_text", "finish_reason", "error", "outputs", "num_prompt_tokens"),
    *("num_generated_tokens", "custom_id", "sampling_params", *CHAT_FIELDS),
    *("prompt", "prompt_token_ids", "messages", None, 0, ("a", 1)),
]


def test_fields_that_look_like_parameters():
    assert {name: parameter_like(name) for name in LIKE} == LIKE
    assert [name for name in UNLIKE if parameter_like(name)] == []


def test_rows_are_known_by_their_id_else_by_number_and_content():
    lines = [b'{"prompt": "x"}\n', b'{"prompt": "x"}\n', b'{"custom_id": "a", "prompt": "x"}\n']
    keys = [row.key for row in rows_of(*lines)]
    assert len(set(keys)) == 3
    assert [row.key for row in rows_of(*lines)] == keys
    moved = rows_of(b'{"custom_id": "a", "prompt": "y"}\n', lines[0], lines[0])
    assert moved[0].key == keys[2]  # whatever its place and content
    assert moved[1].key == keys[1]
    assert moved[2].key not in keys
    number, text = rows_of(b'{"custom_id": 1}\n', b'{"custom_id": "1"}\n')
    assert number.key != text.key


def test_contents_are_known_whatever_they_are_written_like():
    """An edited row counted as the old one, known by its `custom_id` alone."""
    same = [
        b'{"custom_id": "a", "messages": [{"role": "user", "content": "x"}], "max_tokens": 8}\n',
        b'{"max_tokens":8,  "messages":[{"content":"\\u0078","role":"user"}],"custom_id":"a"}\n',
        b'{"custom_id": "a", "messages": [{"role": "user", "content": "x", "name": null}], '
        b'"max_tokens": 8.0, "top_p": null}\n',  # as tables have it
    ]
    others = [
        same[0].replace(b'"x"', b'"X"'),
        same[0].replace(b"8", b"9"),
        same[0].replace(b"8", b"true"),
        same[0].replace(b"}\n", b', "label": 1}\n'),
        same[0].replace(b'"user"', b'"system"'),
    ]
    contents = [rows_of(line)[0].content for line in same]
    assert len(set(contents)) == 1 and len(contents[0]) == 8
    different = [rows_of(line)[0].content for line in others]
    assert len({*different, contents[0]}) == len(others) + 1
    [from_python] = as_rows([json.loads(same[0])])
    assert from_python.content == contents[0]
    assert rows_of(b'{"prompt": "x"}\n')[0].content == b""
    deep = b'{"custom_id": "a", "mine": ' + b"[" * 700 + b"]" * 700 + b"}\n"
    assert len(rows_of(deep)[0].content) == 8
    [odd] = as_rows([{"custom_id": "a", "mine": {1: 2, "b": 3}}])
    assert len(odd.content) == 8


def ids_of(values):
    """What identifies a row, without a `custom_id` and with one."""
    rows = [*as_rows([values]), *as_rows([{**values, "custom_id": "a"}])]
    return [row.result_id for row in rows]


def test_rows_of_json_are_known_as_ever():
    """Outputs of earlier versions go on."""
    values = {"prompt": "ä", "x": [1, 2.5, None, True, {"b": (1,)}], "path": Path("/a")}
    now = datetime(2026, 1, 2, tzinfo=timezone.utc)
    plain, own = ids_of({**values, "at": now, "of": Decimal("1.5"), "count": np.int64(3)})
    assert plain.hex() == "f36713a69cb32b8baadc496ce9aca394"
    assert own.hex() == "209341f02a9c98f7cd907ca7c21dc3262233d10eb340ef69"


def make_pictures(kind, directory):
    """Two pictures that differ in a few pixels in the middle; both anew at each call."""
    for place in (400, 401):
        pixels = np.random.default_rng(0).integers(0, 256, (800, 800, 3), np.uint8)
        pixels[place, place] ^= 1
        image = Pillow.fromarray(pixels)
        if kind == "file":
            image.save(directory / f"{place}.png")
            image = Pillow.open(directory / f"{place}.png")
        elif kind == "palette":
            image = Pillow.fromarray(pixels[..., 0], "P")
            image.putpalette(np.arange(768).astype(np.uint8).tobytes())
        yield {
            "array": pixels,
            "objects": np.array([pixels, None], object)[:1],
            "tensor": torch.from_numpy(pixels),
            "bytes": pixels.tobytes(),
            "bytearray": bytearray(pixels),
            "view": memoryview(pixels.tobytes())[::-1],
            "struct": MappingProxyType({"bytes": pixels.tobytes()}),
        }.get(kind, image)


@pytest.mark.parametrize(
    "kind",
    [
        *("image", "file", "palette", "array", "objects", "tensor"),
        *("bytes", "bytearray", "view", "struct"),
    ],
)
def test_rows_are_known_by_the_pixels_in_them(kind, tmp_path):
    """An edited array was taken for the old one, and a PIL image for another in each process."""
    pictures, again = ([*make_pictures(kind, tmp_path)] for _ in range(2))
    ids = [ids_of({"prompt": "x", "multi_modal_data": {"image": each}}) for each in pictures]
    assert ids == [ids_of({"prompt": "x", "multi_modal_data": {"image": each}}) for each in again]
    assert all(first != second for first, second in zip(*ids, strict=True))


def test_images_differ_in_more_than_their_bytes():
    image = Pillow.new("P", (4, 6))
    others = [image.copy() for _ in range(3)] + [Pillow.new("L", (4, 6)), Pillow.new("P", (6, 4))]
    others[0].putpalette([9, 8, 7])
    others[1].putpalette([9, 8, 7, 6], "RGBA")
    others[2].info["transparency"] = b"\0\1"
    array = np.zeros((4, 6), np.uint8)
    given = [image, *others, array, array.reshape(6, 4), array.view(np.int8)]
    ids = [ids_of({"prompt": "x", "image": each}) for each in given]
    assert len({plain for plain, _ in ids}) == len({own for _, own in ids}) == len(given)


@pytest.mark.parametrize("ending", ["png", "gif", "tiff"])
def test_an_image_that_waits_in_its_file_stays_there(ending, tmp_path):
    """Rows to come would fill the memory with their pixels."""
    noise = np.random.default_rng(2).integers(0, 256, (2, 20, 30, 3), np.uint8)
    first, *others = map(Pillow.fromarray, noise)
    options = {} if ending == "png" else {"save_all": True, "append_images": others}
    first.save(tmp_path / f"a.{ending}", **options)
    for frame in range(1 if ending == "png" else 2):
        image = Pillow.open(tmp_path / f"a.{ending}")
        image.seek(frame)
        waiting = ids_of({"x": image})
        assert image.tile, "not read"
        image.load()
        assert ids_of({"x": image}) == waiting
    image.putpixel((3, 4), 7)
    assert ids_of({"x": image}) != waiting
    in_memory = BytesIO((tmp_path / f"a.{ending}").read_bytes())
    images = [Pillow.open(in_memory) for _ in range(2)]
    assert ids_of({"x": images[0]}) == ids_of({"x": images[1]})
    assert images[0].tile and images[1].tile, "not read"


def test_a_broken_image_is_the_error_of_its_row(tmp_path):
    noise = np.random.default_rng(1).integers(0, 256, (200, 200, 3), np.uint8)
    Pillow.fromarray(noise).save(tmp_path / "a.png")
    (tmp_path / "a.png").write_bytes((tmp_path / "a.png").read_bytes()[:60000])
    first, second = [Pillow.open(tmp_path / "a.png") for _ in range(2)]
    assert ids_of({"x": first}) == ids_of({"x": second})


def test_other_objects_are_known_by_their_text_if_it_stays():
    def tool(place: str) -> int:
        """Look up a place."""
        return len(place)

    def other(place: str) -> int:
        """Look up another place."""
        return len(place)

    words = "abcdefgh"
    assert ids_of({"x": set(words)}) == ids_of({"x": frozenset(words[::-1])})
    assert ids_of({"x": set(words)}) != ids_of({"x": {*words, "i"}})
    for wrap in (lambda each: each, lru_cache, lambda each: MethodType(each, "x")):
        tools = [wrap(each) for each in (tool, tool, other)]
        first, again, second = (ids_of({"tools": [each]}) for each in tools)
        assert first == again != second
    for make in (object, lambda: [iter("a")], lambda: {"a": SimpleNamespace(b=object())}):
        assert ids_of({"x": make()}) == ids_of({"x": make()}) != ids_of({"x": 1})
    for options in ({"requires_grad": True}, {"dtype": torch.bfloat16}):
        tensors = [torch.zeros(2000, **options) for _ in range(3)]
        tensors[2].data[1000] = 1
        first, again, second = (ids_of({"x": each}) for each in tensors)
        assert first == again != second


def test_ids_that_come_again_are_errors_of_their_own_rows():
    rows = rows_of(*[b'{"custom_id": "a", "prompt": "x"}\n'] * 3)
    assert [row.error for row in rows] == [
        None,
        *["`custom_id` must differ from row to row, got 'a' again"] * 2,
    ]
    assert len({row.key for row in rows}) == 3
    [row] = rows_of(b'{"custom_id": [1], "prompt": "x"}\n')
    assert row.error == "`custom_id` must be a string or an integer, got [1]"


def test_rows_of_dictionaries_and_prompts():
    first, second, third = as_rows(["x", *[{"prompt": "y", "custom_id": 2}] * 2])
    assert (first.fields, second.number) == ({"prompt": "x"}, 1)
    assert second.error is None and third.error and second.key != third.key


# -- OpenAI's format ----------------------------------------------------------------------------


def test_bodies_are_read():
    ask = read_request(
        request(
            {
                "model": "m",
                "messages": MESSAGES,
                "max_completion_tokens": 5,
                "stop": ["a"],
                "logprobs": True,
                "top_logprobs": 2,
                "response_format": {"type": "json_schema", "json_schema": {"schema": {}}},
                "user": "u",
                "stream": False,
                "top_k": 4,
                "temperature": None,
            }
        ),
        DEFAULT,
    )
    assert ask.messages == MESSAGES
    params = ask.params
    assert (params.max_tokens, params.stop, params.logprobs, params.top_k) == (5, ("a",), 2, 4)
    assert (params.structured_outputs.json, params.temperature) == ("{}", 0.5)
    ask = read_request(request({"prompt": ["x"], "logprobs": 1}, "/v1/completions"), DEFAULT)
    assert (ask.prompt, ask.params.logprobs) == ("x", 1)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (request({"messages": MESSAGES}, custom_id=None), "`custom_id` must be given"),
        (request({"messages": MESSAGES}, method="GET"), "`method` must be POST"),
        (request({}, url="/v1/embeddings"), "`url` must be .*got '/v1/embeddings'"),
        (request({}), "`body.messages` must be given"),
        (request({"messages": MESSAGES, "audio": {}}), "`body.audio` {} is not supported"),
        (request({"messages": MESSAGES, "tool_choice": "required"}), "tool_choice"),
        (request({"messages": MESSAGES, "colour": 1}), "`body.colour` is not supported"),
        (request({"messages": MESSAGES, "top_logprobs": 1}), "needs `logprobs` true"),
        (request({"messages": MESSAGES, "response_format": {"type": "xml"}}), "response_format"),
        (request({"prompt": ["x", "y"]}, "/v1/completions"), "a row for each"),
        (request({"prompt": "x", "echo": True}, "/v1/completions"), "`body.echo` True"),
        ({"custom_id": "a", "url": CHAT}, "`body` must be an object"),
    ],
)
def test_what_a_body_cannot_have_is_refused_by_name(values, says):
    with pytest.raises((TypeError, ValueError), match=says):
        read_request(values, DEFAULT)


def test_results_have_openais_form():
    """The form of the reference's example: code that reads that service's files reads ours."""
    place = {7: Logprob(-0.5, 2, "b"), 8: Logprob(-0.1, 1, "a")}
    completion = CompletionOutput(0, "b", [7], "stop", None, [place], -0.5)
    output = RequestOutput(3, "hi", [1, 2], [completion], True, 1)
    asked = {"model": "m", "messages": MESSAGES, "logprobs": True, "top_logprobs": 1}
    [row] = rows_of(json.dumps(request(asked)).encode())
    line = json.loads(Result(row, output, None, DEFAULT, "other").to_line())
    assert line["custom_id"] == "a" and line["error"] is None
    assert line["response"]["status_code"] == 200
    body = line["response"]["body"]
    assert (body["object"], body["model"]) == ("chat.completion", "m")
    [choice] = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "b", "refusal": None}
    assert choice["finish_reason"] == "stop"
    [token] = choice["logprobs"]["content"]
    assert (token["token"], token["bytes"]) == ("b", [98])
    assert [each["token"] for each in token["top_logprobs"]] == ["a"]
    half = CompletionOutput(0, "", [7], "stop", None, [{7: Logprob(-1.0, 1, "\ufffd")}], -1.0)
    part = RequestOutput(3, "hi", [1, 2], [half], True, 1)
    line = json.loads(Result(row, part, None, DEFAULT, "other").to_line())
    [token] = line["response"]["body"]["choices"][0]["logprobs"]["content"]
    assert (token["token"], token["bytes"]) == ("\ufffd", None), "not those of U+FFFD"
    [row] = rows_of(json.dumps(request({**asked, "top_logprobs": 2})).encode())
    two = json.loads(Result(row, output, None, DEFAULT, "other").to_line())
    [token] = two["response"]["body"]["choices"][0]["logprobs"]["content"]
    assert [each["token"] for each in token["top_logprobs"]] == ["a", "b"]
    assert body["usage"]["total_tokens"] == 3
    # One label, which is also the token drawn: all that its place has.
    drawn = CompletionOutput(0, "b", [7], "stop", None, [{7: Logprob(-0.5, 9, "b")}], -0.5)
    of_label = RequestOutput(3, "hi", [1, 2], [drawn], True, 1)
    params = replace(DEFAULT, logprobs=0, logprob_token_ids=[7])
    labelled = json.loads(Result(row, of_label, None, params, "other").to_line())
    [token] = labelled["response"]["body"]["choices"][0]["logprobs"]["content"]
    assert [each["token"] for each in token["top_logprobs"]] == ["b"]

    [row] = rows_of(json.dumps(request({"prompt": "x"}, "/v1/completions")).encode())
    line = json.loads(Result(row, output, None, DEFAULT, "other").to_line())
    [choice] = line["response"]["body"]["choices"]
    assert (choice["text"], choice["logprobs"]["token_logprobs"]) == ("b", [-0.5])

    line = json.loads(Result(row, None, "too long").to_line())
    assert line["response"]["status_code"] == 400
    assert line["response"]["body"]["error"]["message"] == line["error"]["message"] == "too long"


def test_the_first_object_says_whether_a_file_is_openais():
    ask = json.dumps(request({"messages": MESSAGES})).encode() + b"\n"
    assert all(row.is_openai for row in rows_of(ask, b"no json\n"))
    broken = (b"no json\n", b"\xff\n", b"[]\n")
    assert [row.is_openai for row in rows_of(*broken, ask, ask)] == [False] * 3 + [True] * 2
    page = b'{"url": "http://", "body": {}, "prompt": "x"}\n'
    assert not any(row.is_openai for row in rows_of(page, b"no json\n"))
    assert all(row.is_openai for row in rows_of(b"no json\n", ask, input_format="openai"))


# -- files --------------------------------------------------------------------------------------


def test_lines_that_cannot_be_read_are_rows_with_errors():
    lines = (b'{"prompt": "\xc3\xa4"}\r\n', b"\n", b" \t\n", b'{"a"\n', b'"x"\n', b'{"b": "\xff"}')
    rows = rows_of(b"\xef\xbb\xbf", *lines)
    assert rows[0].fields == {"prompt": "ä"}
    assert [row.number for row in rows] == [0, 1, 2, 3]
    assert "line must be JSON" in rows[1].error
    assert not rows[1].error.endswith("input format text)")
    [text] = rows_of(b"127+345=\n")
    assert text.error.endswith("(for lines of text pass the input format text)")
    assert rows[2].error == "a row must be an object, got str"
    assert rows[3].error == "line must be UTF-8, got byte 0xff at position 7"
    [deep] = rows_of(b"[" * 100_000)
    assert "line must be JSON" in deep.error
    first, second = rows_of(b"one\r\n\n\xff", input_format="text")
    assert first.fields == {"prompt": "one"} and "UTF-8" in second.error


@given(st.integers(1, 5), st.integers(0, 12))
def test_shards_have_each_row_once(parts, count):
    lines = [b'{"prompt": "%d"}\n' % i for i in range(count)]
    shards = [rows_of(*lines, shard=(part, parts)) for part in range(1, parts + 1)]
    assert sorted(row.number for rows in shards for row in rows) == [*range(count)]
    keys = {row.key for rows in shards for row in rows}
    assert keys == {row.key for row in rows_of(*lines)}
    for part, rows in enumerate(shards, 1):
        assert all(row.number % parts == part - 1 for row in rows)


def test_parquet_is_read_in_batches_files_and_shards(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    for name, begin in (("b", 1500), ("a", 0)):  # in the order of their names
        numbers = [*range(begin, begin + 1500)]
        table = pa.table({"prompt": [str(i) for i in numbers], "max_tokens": [None, 3] * 750})
        pq.write_table(table, tmp_path / f"{name}.parquet", row_group_size=400)
    rows = [*read_rows(tmp_path)]
    assert [row.fields["prompt"] for row in rows] == [str(i) for i in range(3000)]
    assert read_ask(rows[0].fields, DEFAULT).params is DEFAULT
    parts = [[*read_rows(tmp_path, shard=(part, 7))] for part in range(1, 8)]
    assert sorted(row.number for part in parts for row in part) == [*range(3000)]
    assert all(row.number % 7 == i for i, part in enumerate(parts) for row in part)
    (tmp_path / "c.parquet").write_bytes(b"PAR1 none")
    with pytest.raises(ValueError, match="cannot be read as Parquet"):
        read_rows(tmp_path)


def test_formats_are_named(tmp_path):
    file = tmp_path / "rows.csv"
    file.write_text("x")
    with pytest.raises(ValueError, match=r"`input_format` must be given .*rows\.csv"):
        read_rows(file)
    with pytest.raises(ValueError, match="got 3/2"):
        read_rows(file, "text", shard=(3, 2))
    with pytest.raises(FileNotFoundError):
        read_rows(tmp_path / "none.jsonl")
