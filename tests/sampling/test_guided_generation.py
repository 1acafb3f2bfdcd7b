"""Structured outputs through the whole engine: every text has its form, and nobody else notices.

The embedded checkpoint has one token for each byte, and no idea of JSON.
"""

import json
import logging
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from modes import Mode, in_every_mode, run_in

from checkpoints import (
    SMALL,
    TINY,
    assert_idle,
    generate_checked,
    rare,
    run_past_a_failure,
    run_steps,
    run_until,
    tokens,
)
from faults import fail_at
from nanovllm import LLM, SamplingParams, StructuredOutputsParams
from nanovllm.sampling import control_table
from nanovllm.sampling.structured_output import GrammarCompiler, accept_tokens, fill_masks
from nanovllm.startup.builder import Builder

llguidance = pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")

EOS = {256, 258}
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "kvcache_block_size": 16,
    "num_kvcache_blocks": 512,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 256,
}


def obj(required: list[str] | None = None, **properties: Any) -> dict[str, Any]:
    """The schema of an object without other properties and with few blanks."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties) if required is None else required,
        "additionalProperties": False,
        "x-guidance": {"whitespace_pattern": " ?"},
    }


DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
NAME = {"type": "string", "minLength": 1, "maxLength": 5}
INNER = {k: v for k, v in obj(x=DIGIT, y={"type": "boolean"}).items() if k != "x-guidance"}
SCHEMAS: list[dict[str, Any]] = [
    obj(a={"type": "integer", "minimum": -20, "maximum": 300}, b={"enum": ["x", "yy", 3, None]}),
    obj(["b"], a=NAME, b={"type": "boolean"}, c=DIGIT),
    obj(rows={"type": "array", "minItems": 1, "maxItems": 2, "items": {
        "type": "array", "items": DIGIT, "minItems": 1, "maxItems": 3}}),
    obj(v={"anyOf": [DIGIT, NAME, {"type": "null"}, INNER]}),
    obj(["p"], p=INNER, q=INNER),
    obj(d={"type": "string", "pattern": "^[a-f]{2,4}$"}, e={"const": "fixed"}),
    obj(n={"type": "number", "minimum": 1, "maximum": 2, "multipleOf": 0.25}, t={"type": "null"}),
]  # fmt: skip
PROMPTS = ["127+345=", "The answer is ", "{", "x" * 30, '{"a": [1, 2, 3], "b":']


def form(**value: Any) -> StructuredOutputsParams:
    return StructuredOutputsParams(**value)


def guided(max_tokens: int = 120, *, temperature: float = 1.0, **options: Any) -> SamplingParams:
    """`options` are those of the form, and of `SamplingParams`."""
    names = ("json", "regex", "choice", "grammar", "json_object")
    own = StructuredOutputsParams(**{k: v for k, v in options.items() if k in names})
    rest = {k: v for k, v in options.items() if k not in names}
    return SamplingParams(temperature, max_tokens, structured_outputs=own, **rest)


def assert_valid(text: str, schema: dict[str, Any]) -> None:
    jsonschema.validate(json.loads(text), schema)


def assert_ended(output: Any) -> None:
    """Each completion ended by itself, and its text is its tokens' but the last."""
    for completion in output.outputs:
        *rest, last = completion.token_ids
        assert completion.finish_reason == "stop", completion
        assert last in EOS
        assert not EOS & set(rest)
        assert completion.text == bytes(rest).decode(errors="replace")


@pytest.fixture(scope="module", name="llm")
def llm_fixture() -> Iterator[LLM]:
    """An engine whose first prompts and draws depend on which tests ran before."""
    with LLM(TINY, overlap=False, **OPTIONS) as llm:
        yield llm
        assert_idle(llm)


# A workload with all kinds of forms, the unguided among them. Seeds, so that draws do not depend
# on the place in a batch.
FORMS: list[dict[str, Any]] = [{"json": schema} for schema in SCHEMAS]
FORMS += [
    {"regex": r"[a-c]{3,9}-(?:\d\d|z+q)"},
    {"choice": ["yes", "yesterday", "no"]},
    {"grammar": 'start: "<" item ("," item)* ">"\nitem: /[0-9]{1,2}/ | "(" item ")"'},
]
OF_EACH_KIND = [FORMS[i] for i in (0, 1, 3, 7, 8, 9)]
MIXED_PROMPTS = [f"{PROMPTS[i % len(PROMPTS)]}{i}" for i in range(2 * len(OF_EACH_KIND))]
MIXED = [
    guided(40, seed=i, **OF_EACH_KIND[i // 2]) if i % 2 else SamplingParams(1.0, 20, True, seed=i)
    for i in range(2 * len(OF_EACH_KIND))
]


@pytest.fixture(scope="module", name="expected")
def expected_fixture() -> list[list[int]]:
    """The tokens of MIXED, drawn one request after another."""
    with LLM(TINY, overlap=False, **OPTIONS) as llm:
        found = []
        for prompt, params in zip(MIXED_PROMPTS, MIXED, strict=True):
            found += tokens(llm.generate(prompt, params, use_tqdm=False))
        return found


# -- forms ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [rare(False), True], ids=["synchronous", "overlap"])
def test_every_text_validates(overlap: bool) -> None:
    """Sixty objects of seven schemas, beside half as many texts without a form."""
    prompts = [f"{PROMPTS[i % len(PROMPTS)]}{i}" for i in range(90)]
    params = [
        SamplingParams(1.0, 30) if i % 3 == 2 else guided(json=SCHEMAS[i % len(SCHEMAS)])
        for i in range(90)
    ]
    with LLM(TINY, overlap=overlap, **OPTIONS) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    seen = set()
    for i, output in enumerate(outputs):
        if i % 3 != 2:
            assert_ended(output)
            assert_valid(output["text"], SCHEMAS[i % len(SCHEMAS)])
            seen.add(json.dumps(json.loads(output["text"])))
    assert len(seen) > 30, "no chance"


def test_other_forms(llm: LLM) -> None:
    regex, choice = r"(?:ab|c)+\.[0-9]{2,3}x?", ["one", "two", "three", "on"]
    grammar = 'start: "<" item ("," item)* ">"\nitem: /[0-9]{1,2}/ | "(" item ")"'
    prompts = [f"{prompt}{i}" for prompt in PROMPTS for i in range(4)]
    options = {"logit_bias": {ord(","): -5.0, ord("("): -5.0, ord("c"): -3.0}}
    outputs = llm.generate(prompts, guided(regex=regex, **options), use_tqdm=False)
    assert all(re.fullmatch(regex, output["text"]) for output in outputs)
    assert len({output["text"] for output in outputs}) > 5
    outputs += llm.generate(prompts, guided(choice=choice), use_tqdm=False)
    assert {output["text"] for output in outputs[len(prompts) :]} <= set(choice)
    assert len({output["text"] for output in outputs[len(prompts) :]}) > 1
    found = llm.generate(prompts, guided(grammar=grammar, **options), use_tqdm=False)
    for output in found:
        item = r"\(*\d{1,2}\)*"
        assert re.fullmatch(f"<{item}(,{item})*>", output["text"])
        assert output["text"].count("(") == output["text"].count(")")
    for output in outputs + found:
        assert_ended(output)


@pytest.mark.slow  # a form like others, of long texts
def test_any_json_object(llm: LLM) -> None:
    blanks = {ord(c): -100.0 for c in " \t\n\r"}
    ends = {ord("}"): 9.0, ord('"'): 6.0}
    params = guided(300, json_object=True, logit_bias={**blanks, **ends}, temperature=2.0)
    outputs = llm.generate([f"{i}{{" for i in range(8)], params, use_tqdm=False)
    for output in outputs:
        assert_ended(output)
        assert isinstance(json.loads(output["text"]), dict)


@pytest.mark.parametrize(
    "options",
    [form if form in OF_EACH_KIND else rare(form) for form in FORMS],
    ids=lambda options: str(options)[:40],
)
def test_greedy_takes_the_best_token_that_the_form_allows(
    options: dict[str, Any], llm: LLM, reference: Any
) -> None:
    """Tokens equal those of transformers under the masks; the logprobs are the model's own."""
    compiler = GrammarCompiler(llm.tokenizer, 272, llm.eos_token_ids)
    params = guided(30, temperature=0, logprobs=1, **options)
    for output in llm.generate(PROMPTS[:2], params, use_tqdm=False):
        grammar, mask = compiler.compile(params.structured_outputs), np.zeros(9, np.int32)
        ids, places = output["token_ids"], output.outputs[0].logprobs
        with torch.inference_mode():
            rows = reference(torch.tensor([output.prompt_token_ids + ids])).logits[0]
        rows = rows[len(output.prompt_token_ids) - 1 : -1]
        for token, row, place in zip(ids, rows, places, strict=True):
            fill_masks([grammar], mask[np.newaxis])
            bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[:272]
            allowed = row.masked_fill(torch.from_numpy(bits == 0), -torch.inf)
            assert float(allowed[token]) == pytest.approx(float(allowed.max()), abs=1e-4)
            assert bits[token]
            logprob = float(row.log_softmax(-1)[token])
            assert place[token].logprob == pytest.approx(logprob, abs=1e-4)
            accept_tokens([grammar], [token])


# -- with other wishes ----------------------------------------------------------------------------


def test_logit_bias_and_filters(llm: LLM) -> None:
    choice = ["yes", "no", "none"]
    for bias, texts in (
        ({ord("y"): -1e9}, {"no", "none"}),
        ({ord("n"): -1e9}, {"yes"}),
        ({ord("n"): 100.0, 258: -1e9, 256: -1e9}, {"none"}),  # "no" cannot end while "none" may
    ):
        params = guided(choice=choice, logit_bias=bias)
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        assert {output["text"] for output in outputs} <= texts
        for output in outputs:
            assert_ended(output)
    schema = SCHEMAS[0]
    best = tokens(llm.generate(PROMPTS, guided(json=schema, temperature=0), use_tqdm=False))
    likely = guided(json=schema, top_k=1)
    assert tokens(llm.generate(PROMPTS, likely, use_tqdm=False)) == best
    for options in ({"top_p": 0.01}, {"min_p": 0.9}, {"repetition_penalty": 5.0, "top_k": 3}):
        for output in llm.generate(PROMPTS, guided(json=schema, **options), use_tqdm=False):
            assert_ended(output)
            assert_valid(output["text"], schema)


@pytest.mark.parametrize("overlap", [rare(False), True], ids=["synchronous", "overlap"])
def test_other_ends(overlap: bool) -> None:
    """A stop string or token, or the limit, may end a text before its form is complete."""
    schema = obj(a={"const": 1}, b={"const": 2})
    compact = guided(json={**schema, "x-guidance": {"whitespace_flexible": False,
                                                    "whitespace_pattern": None}})  # fmt: skip
    whole = '{"a":1,"b":2}'
    forms = compact.structured_outputs
    cases: list[tuple[dict[str, Any], str, str, Any]] = [
        ({}, whole, "stop", None),
        ({"stop": [',"b']}, '{"a":1', "stop", ',"b'),
        ({"stop": [',"b'], "include_stop_str_in_output": True}, '{"a":1,"b', "stop", ',"b'),
        ({"stop": ["}"]}, whole[:-1], "stop", "}"),
        ({"stop": ["z"]}, whole, "stop", None),
        ({"stop_token_ids": [ord(",")]}, '{"a":1', "stop", ord(",")),
        ({"max_tokens": 4}, '{"a"', "length", None),
        ({"max_tokens": len(whole)}, whole, "length", None),
        ({"max_tokens": len(whole) + 1}, whole, "stop", None),
    ]
    with LLM(TINY, overlap=overlap, **OPTIONS) as llm:
        params = [SamplingParams(structured_outputs=forms, **options) for options, *_ in cases]
        outputs = llm.generate(["127+345="] * len(cases), params, use_tqdm=False)
        for output, (_, text, reason, stop) in zip(outputs, cases, strict=True):
            completion = output.outputs[0]
            found = (completion.text, completion.finish_reason, completion.stop_reason)
            assert found == (text, reason, stop)
        params = [SamplingParams(1.0, 30, ignore_eos=True, structured_outputs=forms)]
        [output] = llm.generate(PROMPTS[:1], params, use_tqdm=False)
        assert output["text"].startswith(whole)
        assert len(output["token_ids"]) == 30
        assert set(output["token_ids"][len(whole) : len(whole) + 1]) <= EOS
        assert_idle(llm)


EXCITED: dict[str, Any] = {"json": obj(a=NAME, b={"enum": ["no!", "no", "!", 1]})}
LINES: dict[str, Any] = {"regex": r"(?:[a-c!]{1,4}[ \n]){2,3}[.!?\n]|[\n!]{1,9}x"}


def with_ends(path: Path, eos: list[int]) -> Path:
    """The embedded checkpoint with other end-of-sequence tokens, also none of the tokenizer's."""
    path = shutil.copytree(TINY, path / "model")
    for name, change in (("generation", {"eos_token_id": eos}), ("tokenizer", {"eos_token": None})):
        file = path / f"{name}_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    return path


@pytest.mark.parametrize("overlap", [rare(False), True], ids=["synchronous", "overlap"])
@pytest.mark.parametrize("eos", [rare([ord("!"), 258, 256]), [ord("\n"), ord("!")]], ids=str)
def test_ends_that_spell_text(eos: list[int], overlap: bool, tmp_path: Path) -> None:
    """They end texts that are complete, and no others; where ends are ignored, they are text."""
    bias = {ord("!"): 5.0, ord("\n"): 3.0, ord('"'): 2.0}
    seeds = range(8)
    params = [
        guided(60, seed=i, ignore_eos=ignores, logit_bias=bias, **options)
        for ignores in (False, True)
        for options in (EXCITED, LINES)
        for i in seeds
    ]
    with LLM(with_ends(tmp_path, eos), overlap=overlap, **OPTIONS) as llm:
        outputs = llm.generate([f"{i}=" for i in range(len(params))], params, use_tqdm=False)
        assert llm.eos_token_ids == set(eos)
        assert_idle(llm)
    closing, spelled = set(), set()
    for output, own in zip(outputs, params, strict=True):
        ids = output["token_ids"]
        assert output.outputs[0].finish_reason == ("length" if own.ignore_eos else "stop")
        if own.ignore_eos:  # up to the token that ends the form, and frees what follows
            end = next(i for i, token in enumerate([*ids, 256]) if token >= 256)
            assert end < len(ids), bytes(ids)
            spelled |= set(ids[:end]) & set(eos)
        else:
            end = len(ids) - 1
            assert ids[end] in eos
            assert not set(ids[:end]) & set(eos)
            assert output["text"] == bytes(ids[:end]).decode(errors="replace")
            closing.add(ids[end])
        text = bytes(ids[:end]).decode()
        if own.structured_outputs.regex:
            assert re.fullmatch(LINES["regex"], text), text
        else:
            assert_valid(text, EXCITED["json"])
    assert closing >= {ord("!")}
    assert spelled == set(eos) & set(b"!\n")


@pytest.mark.parametrize("overlap", [rare(False), True], ids=["synchronous", "overlap"])
def test_texts_that_end_unfinished_are_told(
    overlap: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each once: at dead ends of a grammar, and where only such a token could go on."""
    stuck = guided(9, grammar='start: "a" x | "b"\nx: "c" y\ny: y "d"', logit_bias={ord("a"): 99.0})
    needs = guided(9, regex="(?:a!)+c")
    params = [stuck, needs, guided(9, regex="ab"), needs, guided(1, regex="a!")]
    with LLM(with_ends(tmp_path, [ord("!"), 258]), overlap=overlap, **OPTIONS) as llm:
        with caplog.at_level(logging.WARNING, "nanovllm"):
            outputs = llm.generate(["x"] * len(params), params, use_tqdm=False)
        assert_idle(llm)
    assert [output["text"] for output in outputs] == ["ac", "a", "ab", "a", "a"]
    reasons = [output.outputs[0].finish_reason for output in outputs]
    assert reasons == ["length", "length", "stop", "length", "length"]
    assert caplog.text.count("a structured output is incomplete") == 3


def test_one_of_many_choices(llm: LLM) -> None:
    choice = [f"{kind} {i}" for i in range(1250) for kind in ("item", "number")]
    params = guided(choice=choice)
    outputs = llm.generate([f"{i}:" for i in range(50)], params, use_tqdm=False)
    assert {output["text"] for output in outputs} <= set(choice)
    for output in outputs:
        assert_ended(output)


def test_each_completion_has_its_own_place(llm: LLM) -> None:
    outputs = llm.generate(PROMPTS, guided(json=SCHEMAS[1], n=5, seed=3), use_tqdm=False)
    for output in outputs:
        assert len(output.outputs) == 5
        assert_ended(output)
        for completion in output.outputs:
            assert_valid(completion.text, SCHEMAS[1])
        assert len({completion.text for completion in output.outputs}) > 1


@pytest.mark.parametrize("overlap", [rare(False), True], ids=["synchronous", "overlap"])
def test_streams(overlap: bool, expected: list[list[int]]) -> None:
    with LLM(TINY, overlap=overlap, **OPTIONS) as llm:
        found: dict[int, list[int]] = {}
        texts: dict[int, str] = {}
        for output in llm.stream(MIXED_PROMPTS, MIXED):
            [completion] = output.outputs
            found.setdefault(output.request_id, []).extend(completion.token_ids)
            texts[output.request_id] = texts.get(output.request_id, "") + completion.text
        assert [found[i] for i in sorted(found)] == expected
        outputs = llm.generate(MIXED_PROMPTS, MIXED, use_tqdm=False)
        assert [texts[i] for i in sorted(texts)] == [output["text"] for output in outputs]
        assert_idle(llm)


# -- whatever the engine does ---------------------------------------------------------------------


@in_every_mode("chunks-of-7-overlap", "small-pool-overlap")
def test_draws_are_the_same(mode: Mode, expected: list[list[int]]) -> None:
    """Draws of the guided, and of the others, which draw as if they were alone."""
    outputs, _ = run_in(mode, TINY, MIXED_PROMPTS, MIXED)
    assert tokens(outputs) == expected
    preempted = [output.metrics.num_preemptions > 0 for output in outputs[1::2]]
    assert any(preempted) or mode.name != "small-pool", "none of the guided"
    for output, params in zip(outputs, MIXED, strict=True):
        if params.structured_outputs and output.outputs[0].finish_reason == "stop":
            assert_ended(output)
            if params.structured_outputs.json:
                schema = json.loads(str(params.structured_outputs.json))
                assert_valid(output["text"], schema)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.usefixtures("threads")
def test_ranks_draw_the_same(size: int, expected: list[list[int]]) -> None:
    """Rank 0 has the grammars; the others are told the tokens."""
    count = len(MIXED) // size
    options = {**OPTIONS, "tensor_parallel_size": size}
    outputs, _ = generate_checked(TINY, MIXED_PROMPTS[-count:], MIXED[-count:], **options)
    assert tokens(outputs) == expected[-count:]


@pytest.mark.parametrize("overlap", [rare(False), True], ids=["synchronous", "overlap"])
@pytest.mark.parametrize(("k", "after"), [(1, False), (9, True), rare(2, True), rare(20, False)])
def test_failed_launch_is_repeated(
    k: int, overlap: bool, after: bool, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A grammar that has followed a token does not follow it again, nor one that does not count."""
    with LLM(TINY, overlap=overlap, **OPTIONS) as llm:
        prompts = zip(MIXED_PROMPTS[4:], MIXED[4:], strict=True)
        ids = [llm.add_request(*request) for request in prompts]
        fail_at(monkeypatch, llm.model_runner, "launch", k, RuntimeError("no memory"), after=after)
        found = run_past_a_failure(llm)
    assert tokens([found[i] for i in ids]) == expected[4:]


@pytest.mark.parametrize(
    ("name", "after"),
    [
        ("accept_tokens", True),
        ("fill_masks", False),
        rare("accept_tokens", False),
        rare("fill_masks", True),
    ],
)
@pytest.mark.parametrize("k", [rare(1), rare(2), 9])
def test_ctrl_c_while_grammars_follow(
    k: int, name: str, after: bool, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an interruption in between, a grammar follows all tokens again."""
    with LLM(TINY, **OPTIONS) as llm:
        prompts = zip(MIXED_PROMPTS[4:], MIXED[4:], strict=True)
        ids = [llm.add_request(*request) for request in prompts]
        fail_at(monkeypatch, control_table, name, k, KeyboardInterrupt(), after=after)
        found = run_until(KeyboardInterrupt, llm) | run_steps(llm)
    assert [found[i] for i in ids] == expected[4:]


@pytest.mark.parametrize("overlap", [rare(False), True], ids=["synchronous", "overlap"])
def test_abort(overlap: bool, expected: list[list[int]]) -> None:
    with LLM(TINY, overlap=overlap, **OPTIONS) as llm:
        requests = zip(MIXED_PROMPTS, MIXED, strict=True)
        ids = [llm.add_request(*request) for request in requests]
        found = {}
        for _ in range(5):
            found.update((output.request_id, output["token_ids"]) for output in llm.step())
        assert all(llm.abort(i) for i in ids[1:6:4])  # objects, which are not that short
        while not llm.is_finished():
            found.update((output.request_id, output["token_ids"]) for output in llm.step())
        assert found == {i: expected[i] for i in ids if i not in ids[1:6:4]}
        [again] = llm.generate(MIXED_PROMPTS[1], MIXED[1], use_tqdm=False)
        assert again["token_ids"] == expected[1]
        assert_idle(llm)


# -- refusals -------------------------------------------------------------------------------------

WRONG: list[dict[str, Any]] = [
    {"json": {"type": "foo"}},
    {"json": {"not": {"type": "object"}}},
    {"regex": "(a"},
    {"regex": "(?=a)b"},
    {"regex": "a\\"},
    {"grammar": "start: nothing"},
]


@pytest.mark.parametrize("options", WRONG, ids=str)
def test_a_wrong_form_is_refused_before_anything_is_queued(
    options: dict[str, Any], llm: LLM
) -> None:
    """Wherever it stands in the list; the engine keeps what it has, the prefix cache too."""
    prompt = list(range(50))
    first, params = SamplingParams(0, 4), guided(**options)
    [before] = llm.generate(prompt, first, use_tqdm=False)
    steps = llm.metrics()["num_steps"]
    name = f"`{next(iter(options))}` must be"
    with pytest.raises(ValueError, match=name):
        llm.generate([prompt, prompt], [first, params], use_tqdm=False)
    assert_idle(llm)
    with pytest.raises(ValueError, match=name):
        llm.stream([prompt, prompt], [first, params])
    with pytest.raises(ValueError, match=name):
        llm.add_request(prompt, params)
    assert_idle(llm)
    metrics = llm.metrics()
    assert (metrics["num_steps"], metrics["num_aborted"]) == (steps, 0)
    [after] = llm.generate(prompt, first, use_tqdm=False)
    assert after["token_ids"] == before["token_ids"]
    assert after.num_cached_tokens == 48


def test_a_wrong_form_does_not_disturb_those_under_way(expected: list[list[int]]) -> None:
    with LLM(TINY, overlap=True, **OPTIONS) as llm:
        ids = [llm.add_request(*r) for r in zip(MIXED_PROMPTS, MIXED, strict=True)]
        llm.step()
        for options in WRONG:
            with pytest.raises(ValueError, match="must be supported by llguidance"):
                llm.add_request("x", guided(**options))
        found = {}
        while not llm.is_finished():
            found.update((output.request_id, output["token_ids"]) for output in llm.step())
        assert [found[i] for i in ids] == expected


def test_models_without_text(checkpoint: Any) -> None:
    with LLM(checkpoint, **SMALL) as llm:
        for call in (llm.generate, llm.stream, llm.add_request):
            with pytest.raises(ValueError, match="needs a tokenizer, but the model directory has"):
                call([1, 2], guided(choice=["a"]))
        assert_idle(llm)


@pytest.mark.parametrize("num_pending", [0, 1])
def test_a_start_that_waits_for_kernels_reads_the_tokenizer(
    num_pending: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then, or else at the first form: the interpreter's lock is held for it."""
    read = Mock(side_effect=llguidance.LLTokenizer)
    monkeypatch.setattr(llguidance, "LLTokenizer", read)
    monkeypatch.setattr(Builder, "start_compiler", lambda _: Mock(num_pending=num_pending))
    monkeypatch.setattr(Builder, "rehearse", lambda *_: None)
    with LLM(str(TINY), **OPTIONS) as llm:
        assert read.call_count == num_pending
        [output] = llm.generate(["1+1="], guided(8, regex="[0-9]{3}"), use_tqdm=False)
        assert re.fullmatch("[0-9]{3}", output["text"])
    assert read.call_count == 1
