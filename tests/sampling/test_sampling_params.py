"""Sampling parameters: what is refused and in which words, and what becomes of the rest."""

import copy
import dataclasses
import importlib
import inspect
import json
import math
import pickle
import re
import subprocess
import sys
from collections import UserDict
from enum import Enum
from fractions import Fraction
from types import MappingProxyType

import numpy as np
import pytest

from nanovllm import BeamSearchParams, SamplingParams
from nanovllm.sampling_params import StructuredOutputsParams

HUGE = 10**400  # beyond every float
NAN, INF = math.nan, math.inf
ONE_FORM = "have exactly one of json, regex, choice, grammar and json_object"
SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}}


class Mark(str, Enum):
    END = "###"


# -- what is refused ------------------------------------------------------------------------------

REFUSED = [
    ("temperature", ValueError, "be finite and 0 to 1e+09", [-0.1, NAN, INF, 2e9, HUGE]),
    ("temperature", TypeError, "be a number", ["hot", None, False, 1j, [1.0]]),
    ("max_tokens", ValueError, "be at least 1", [0, -3]),
    ("max_tokens", TypeError, "be an integer", [1.0, True, "9", NAN]),
    ("top_k", ValueError, "be between -1 and 2147483647", [-2, 2**31, HUGE]),
    ("top_k", TypeError, "be an integer", [5.0, True, None]),
    ("top_p", ValueError, "be above 0 and at most 1", [0, 0.0, -0.1, 1.1, NAN, INF, HUGE]),
    ("top_p", TypeError, "be a number", [True, None, "1"]),
    ("min_p", ValueError, "be finite and 0 to 1", [-0.1, 1.1, NAN]),
    ("min_p", TypeError, "be a number", [False, None]),
    (
        *("repetition_penalty", ValueError, "be above 0, 1e-09 to 1e+09"),
        [0, -1.5, 1e-40, 1e39, NAN, INF],
    ),
    ("repetition_penalty", TypeError, "be a number", [True, None, "1"]),
    ("presence_penalty", ValueError, "be finite and -2 to 2", [-2.1, 2.1, NAN, -INF]),
    ("presence_penalty", TypeError, "be a number", [True, None]),
    ("frequency_penalty", ValueError, "be finite and -2 to 2", [-3, 2.1, NAN, INF]),
    ("frequency_penalty", TypeError, "be a number", [False, [1]]),
    ("seed", ValueError, f"be between 0 and {2**64 - 1}", [-2, 2**64, HUGE]),
    ("seed", TypeError, "be an integer", [1.0, -1.0, True, "1"]),
    ("n", ValueError, "be at least 1", [0, -1]),
    ("n", TypeError, "be an integer", [2.0, True, None]),
    ("min_tokens", ValueError, "be at least 0", [-1]),
    ("min_tokens", ValueError, "be at most max_tokens 64", [65, HUGE]),
    ("min_tokens", TypeError, "be an integer", [1.5, False, None]),
    ("logprobs", ValueError, "be between 0 and 20", [-1, 21]),
    ("logprobs", TypeError, "be an integer", [True, 1.0]),
    ("prompt_logprobs", ValueError, "be between 0 and 20", [-1, 21]),
    (
        *("logprobs_mode", ValueError),
        "be one of raw_logprobs, temperature_logprobs, processed_logprobs",
        ["raw", "", 1, ["raw_logprobs"]],
    ),
    ("logprob_token_ids", TypeError, "be a list of token ids", [5, "1", b"1", {1: 2}]),
    ("return_sampling_mask", TypeError, "be True or False", [1, None, "no"]),
    ("prompt_logprobs", TypeError, "be an integer", [True, 1.0]),
    ("ignore_eos", TypeError, "be True or False", [1, None]),
    ("include_stop_str_in_output", TypeError, "be True or False", [0, None]),
    ("skip_special_tokens", TypeError, "be True or False", ["no", None]),
    ("detokenize", TypeError, "be True or False", [0, None]),
    ("stop", TypeError, "be a list of strings", [b"end", b"", 0, False, {"a": 1}, {}]),
    ("bad_words", TypeError, "be a list of strings", ["word", "", b"a", 3, {}]),
    (
        *("stop_token_ids", TypeError, "be a list of token ids"),
        [5, 0, "1", "", b"1", bytearray(b"1"), {1: 2}, np.array(5)],
    ),
    ("allowed_token_ids", TypeError, "be a list of token ids", [5, "1", b"1", {1: 2}]),
    ("logit_bias", TypeError, "map token ids to numbers", [[5], (), 0, "5", {5}]),
]

REFUSED_WITHIN = [  # a part of the value is named
    ({"stop": ""}, ValueError, "`stop` must hold strings that are not empty, got ''"),
    ({"stop": ["a", ""]}, ValueError, "`stop` must hold strings that are not empty, got ''"),
    ({"stop": ["a", 1]}, TypeError, "`stop` must hold strings, got 1"),
    ({"stop": {"a", 1}}, TypeError, "`stop` must hold strings, got 1"),
    ({"stop": [b"a"]}, TypeError, "`stop` must hold strings, got b'a'"),
    ({"stop": [["a"]]}, TypeError, "`stop` must hold strings, got ['a']"),
    ({"bad_words": [""]}, ValueError, "`bad_words` must hold strings that are not empty, got ''"),
    ({"bad_words": [None]}, TypeError, "`bad_words` must hold strings, got None"),
    *(
        ({name: tokens}, error, f"`{name}` must hold {rule}")
        for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids")
        for tokens, error, rule in (
            ([1, True], TypeError, "integer token ids, got True"),
            ([1.0], TypeError, "integer token ids, got 1.0"),
            (["1"], TypeError, "integer token ids, got '1'"),
            ([None], TypeError, "integer token ids, got None"),
            (np.array([[5]]), TypeError, "integer token ids, got array([5])"),
            ([1, -1], ValueError, "token ids of at least 0, got -1"),
            ({-7}, ValueError, "token ids of at least 0, got -7"),
        )
    ),
    (
        *({"allowed_token_ids": []}, ValueError),
        "`allowed_token_ids` must have at least one token, got none",
    ),
    *(
        (
            *({"logprob_token_ids": range(count)}, ValueError),
            f"`logprob_token_ids` must have 1 to 1,024 tokens, got {count:,}",
        )
        for count in (0, 1025)
    ),
    (
        *({"logprob_token_ids": [1, 2], "logprobs": 3}, ValueError),
        "`logprobs` must be 0 or None with logprob_token_ids, which name the tokens, got 3",
    ),
    *(
        (
            *({"logprobs_mode": f"{kind}_logits"}, ValueError),
            "`logprobs_mode` must be one of raw_logprobs, temperature_logprobs, processed_logprobs"
            f", got '{kind}_logits': logits are not returned; {kind}_logprobs differ from them by "
            "a constant",
        )
        for kind in ("raw", "processed")
    ),
    ({"logit_bias": {"5": 1}}, TypeError, "`logit_bias` must hold integer token ids, got '5'"),
    ({"logit_bias": {True: 1}}, TypeError, "`logit_bias` must hold integer token ids, got True"),
    ({"logit_bias": {-5: 1}}, ValueError, "`logit_bias` must hold token ids of at least 0, got -5"),
    ({"logit_bias": {5: "1"}}, TypeError, "`logit_bias[5]` must be a number, got '1'"),
    ({"logit_bias": {5: True}}, TypeError, "`logit_bias[5]` must be a number, got True"),
    *(
        (
            *({"logit_bias": {4: 1, 5: value}}, ValueError),
            "`logit_bias[5]` must be finite and -1e+09 to 1e+09 (to forbid a token: -100, "
            f"bad_words or allowed_token_ids), got {value!r}",
        )
        for value in (NAN, -INF, 1e39)
    ),
    *(
        (
            *({"structured_outputs": form}, TypeError),
            f"`structured_outputs` must be a StructuredOutputsParams, got {kind}",
        )
        for form, kind in (({"regex": "a"}, "dict"), ("a", "str"), (False, "bool"))
    ),
    *(
        (
            *({"n": 2, "temperature": temperature}, ValueError),
            "`n` must be 1 at temperature 0, where all completions are the same, got 2",
        )
        for temperature in (0, 1e-6)
    ),
    *(
        (
            *({name: value, "structured_outputs": StructuredOutputsParams(regex="a")}, ValueError),
            f"`{name}` must not be combined with structured_outputs: "
            f"together they may allow no token; got {kept!r}",
        )
        for name, value, kept in (
            ("min_tokens", 2, 2),
            ("allowed_token_ids", [5], (5,)),
            ("bad_words", ["a"], ("a",)),
        )
    ),
    (
        *({"stop": "a", "detokenize": False}, ValueError),
        "`stop` must be empty without `detokenize`: pass stop_token_ids",
    ),
]

FORMS_REFUSED = [
    ({}, ValueError, f"`structured_outputs` must {ONE_FORM}, got none"),
    (
        {"regex": "", "json": {}},
        ValueError,
        f"`structured_outputs` must {ONE_FORM}, got json, regex",
    ),
    (
        *({"choice": ["a"], "json_object": False}, ValueError),
        f"`structured_outputs` must {ONE_FORM}, got choice, json_object",
    ),
    *(
        ({name: value}, TypeError, f"`{name}` must be {rule}, got {value!r}")
        for name, rule, values in (
            ("json", "a dictionary or a string", [5, ["a"], b"{}", True]),
            ("regex", "a string", [b"a", ["a"], 1]),
            ("grammar", "a string", [b"a", {}, 1]),
            ("choice", "a list of strings", ["ab", "", b"ab", 5, {"a": 1}]),
            ("json_object", "True or False", [1, "yes"]),
        )
        for value in values
    ),
    ({"json": "5"}, ValueError, "`json` must be a JSON Schema, which is an object, got '5'"),
    ({"choice": []}, ValueError, "`choice` must have at least one string, got none"),
    ({"choice": ["a", ""]}, ValueError, "`choice` must hold strings that are not empty, got ''"),
    ({"choice": ["a", 1]}, TypeError, "`choice` must hold strings, got 1"),
    ({"json_object": False}, ValueError, "`json_object` must be True if it is given, got False"),
]


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        pytest.param(
            *({name: value}, error, f"`{name}` must {rule}, got {value!r}"),
            id=f"{name}-{str(value)[:20]}-{type(value).__name__}",
        )
        for name, error, rule, values in REFUSED
        for value in values
    ]
    + REFUSED_WITHIN,
)
def test_defect_17_wrong_value_is_named(values, error, message):
    with pytest.raises(error) as caught:
        SamplingParams(**values)
    assert str(caught.value) == message


def test_every_parameter_has_a_wrong_value():
    tested = {name for name, *_ in REFUSED}.union(*(values for values, *_ in REFUSED_WITHIN))
    assert tested == {field.name for field in dataclasses.fields(SamplingParams)}


@pytest.mark.parametrize(("values", "error", "message"), FORMS_REFUSED)
def test_wrong_form_of_structured_outputs_is_named(values, error, message):
    with pytest.raises(error) as caught:
        StructuredOutputsParams(**values)
    assert str(caught.value) == message


@pytest.mark.parametrize("schema", ["{", "", {"enum": {1}}, {"maximum": INF}, {"a": b"b"}])
def test_schema_that_is_no_json_is_refused_with_the_reason(schema):
    """The reason is Python's, whose words change."""
    with pytest.raises(ValueError) as caught:
        StructuredOutputsParams(json=schema)
    assert str(caught.value).startswith(f"`json` must be a JSON Schema, got {schema!r}: ")
    assert str(caught.value).endswith(f": {caught.value.__context__}")


@pytest.mark.parametrize(
    ("name", "nothing", "something", "hint"),
    [
        ("best_of", [None, 1], [2], "pass n"),
        ("guided_decoding", [None], [{"regex": "a"}], "pass structured_outputs"),
        ("logits_processors", [None, []], [[len]], "pass logit_bias"),
        ("truncate_prompt_tokens", [None], [5], "shorten"),
        ("output_kind", [0], [1], "stream()"),
        ("use_beam_search", [False], [True], "beam_search()"),
        ("early_stopping", [False], [True, "never"], "beam_search()"),
        ("length_penalty", [1.0, 1], [0.7], "BeamSearchParams"),
        ("spaces_between_special_tokens", [True], [False], "tokenizer"),
        ("extra_args", [None, {}], [{"a": 1}], "no other"),
        ("flat_logprobs", [False], [True], "logprobs"),
        ("repetition_detection", [None], [{}], "repetition_penalty"),
        ("skip_reading_prefix_cache", [None, False], [True, np.ones(2)], "prefix"),
    ],
)
def test_values_of_vllm_that_ask_for_nothing(name, nothing, something, hint):
    """The nearest of our names was a wrong remedy: `presence_penalty` for `length_penalty`."""
    for value in nothing:
        assert SamplingParams(top_k=3, **{name: value}) == SamplingParams(top_k=3)
    for value in something:
        with pytest.raises(TypeError, match=rf"no option `{name}`; .*{re.escape(hint)}") as caught:
            SamplingParams(**{name: value})
        assert "did you mean" not in str(caught.value)
    with pytest.raises((TypeError, dataclasses.FrozenInstanceError)):
        setattr(SamplingParams(), name, nothing[0])


CLASSES_OF_VLLM = {  # where its replacement is, and what that is
    "EngineArgs": ("nanovllm", "LLM"),
    "GuidedDecodingParams": ("nanovllm.sampling_params", "StructuredOutputsParams"),
    "LoRARequest": ("nanovllm", "adapter=path"),
    "RequestOutputKind": ("nanovllm.sampling_params", "stream"),
}


@pytest.mark.parametrize("name", CLASSES_OF_VLLM)
def test_classes_of_vllm_say_what_replaces_them(name):
    """An AttributeError's words would be lost: Python puts its own in their place."""
    module, replacement = CLASSES_OF_VLLM[name]
    for source in {"nanovllm", module}:
        with pytest.raises(ImportError, match=f"`{name}`: .*{replacement}"):
            exec(f"from {source} import {name}")
        assert not hasattr(importlib.import_module(source), f"{name}s")
        with pytest.raises(ImportError, match=f"cannot import name '{name}s'"):
            exec(f"from {source} import {name}s")


@pytest.mark.parametrize(
    ("kind", "name", "hint"),
    [
        (SamplingParams, "temprature", "did you mean `temperature`?"),
        (SamplingParams, "guided_decoding", "pass structured_outputs"),
        (
            *(SamplingParams, "logits_processors"),
            "pass logit_bias, allowed_token_ids or structured_outputs",
        ),
        (SamplingParams, "output_kind", "call stream() or generate()"),
        (SamplingParams, "truncate_prompt_tokens", "shorten the prompt"),
        (StructuredOutputsParams, "json_objct", "did you mean `json_object`?"),
        (
            *(StructuredOutputsParams, "pattern"),
            "options: json, regex, choice, grammar, json_object",
        ),
        (BeamSearchParams, "beam_widht", "did you mean `beam_width`?"),
    ],
)
def test_unknown_name_is_refused_with_what_to_do(kind, name, hint):
    with pytest.raises(TypeError) as caught:
        kind(**{name: 1})
    assert str(caught.value) == f"{kind.__name__}() has no option `{name}`; {hint}"


def test_first_three_are_positional_and_no_other():
    params = SamplingParams(0.5, 7, True)
    assert params == SamplingParams(temperature=0.5, max_tokens=7, ignore_eos=True)
    with pytest.raises(TypeError, match="positional arguments"):
        SamplingParams(0.5, 7, True, 1)  # type: ignore[misc]


def test_refusals_are_no_asserts():
    code = """if True:
        from nanovllm.sampling_params import SamplingParams, StructuredOutputsParams
        assert False, "the process did not run under -O"
        for make in (
            lambda: SamplingParams(top_p=0.0),
            lambda: SamplingParams(stop=[""]),
            lambda: SamplingParams(min_tokens=65),
            lambda: SamplingParams(logit_bias={-1: 0.0}),
            lambda: StructuredOutputsParams(),
        ):
            try:
                print(make())
            except ValueError:
                print("refused")
    """
    command = [sys.executable, "-O", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split("\n") == ["refused"] * 5 + [""]


# -- what the others become -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "kept"),
    [
        ("temperature", 0, 0),
        ("temperature", np.float32(0.5), 0.5),
        ("temperature", np.int64(2), 2),
        ("temperature", Fraction(1, 2), 0.5),
        ("temperature", 1e9, 1e9),
        ("max_tokens", None, None),
        ("max_tokens", np.int64(3), 3),
        ("max_tokens", 10**30, 10**30),
        ("ignore_eos", True, True),
        ("top_k", -1, -1),
        ("top_k", 2**31 - 1, 2**31 - 1),
        ("top_k", np.uint8(5), 5),
        ("top_p", 1, 1),
        ("top_p", np.float64(0.25), 0.25),
        ("min_p", 0, 0),
        ("min_p", 1, 1),
        ("repetition_penalty", 2, 2),
        ("repetition_penalty", 1e-9, 1e-9),
        ("presence_penalty", -2, -2),
        ("frequency_penalty", 2, 2),
        ("seed", 0, 0),
        ("seed", 2**64 - 1, 2**64 - 1),
        ("seed", np.uint64(2**64 - 1), 2**64 - 1),
        ("n", 3, 3),
        ("min_tokens", 64, 64),
        ("logprobs", 0, 0),
        ("logprobs", 20, 20),
        ("prompt_logprobs", np.int32(0), 0),
        ("stop", None, ()),
        ("stop", [], ()),
        ("stop", "end", ("end",)),
        ("stop", ["b", "a"], ("b", "a")),
        ("stop", {"b", "a", "c"}, ("a", "b", "c")),
        ("stop", np.array(["b", "a"]), ("b", "a")),
        ("stop", Mark.END, ("###",)),
        ("stop", [Mark.END], ("###",)),
        ("stop_token_ids", None, ()),
        ("stop_token_ids", np.array([7, 5], np.uint16), (7, 5)),
        ("stop_token_ids", (np.int64(7), 5), (7, 5)),
        ("stop_token_ids", {8, 0}, (0, 8)),
        ("stop_token_ids", frozenset({0, 8}), (0, 8)),
        ("stop_token_ids", range(3), (0, 1, 2)),
        ("stop_token_ids", np.array([], np.int64), ()),
        ("allowed_token_ids", None, None),
        ("allowed_token_ids", (token for token in (4, 2)), (4, 2)),
        ("logit_bias", None, {}),
        ("logit_bias", {}, {}),
        ("logit_bias", {np.int64(5): np.float32(-0.5), 6: 1}, {5: -0.5, 6: 1.0}),
        ("logit_bias", MappingProxyType({5: -1e9}), {5: -1e9}),
        ("bad_words", None, ()),
        ("bad_words", [" a", "a"], (" a", "a")),
        (
            "structured_outputs",
            StructuredOutputsParams(regex="a"),
            StructuredOutputsParams(regex="a"),
        ),
        ("skip_special_tokens", False, False),
        ("include_stop_str_in_output", True, True),
        ("detokenize", False, False),
    ],
)
def test_value_is_kept_in_plain_python(name, value, kept):
    result = getattr(SamplingParams(**{name: value}), name)
    assert result == kept
    assert type(result) is type(kept)
    if isinstance(kept, tuple):
        assert [type(item) for item in result] == [type(item) for item in kept]
    if isinstance(kept, dict):
        assert {*map(type, result)} <= {int} and {*map(type, result.values())} <= {float}


@pytest.mark.parametrize(
    ("values", "name", "kept"),
    [
        ({"json": SCHEMA}, "json", SCHEMA),
        ({"json": json.dumps(SCHEMA, indent=1)}, "json", SCHEMA),
        ({"json": UserDict(SCHEMA)}, "json", SCHEMA),
        ({"json": {}}, "json", {}),
        ({"regex": "[a-z]+"}, "regex", "[a-z]+"),
        ({"choice": ["no", "yes"]}, "choice", ("no", "yes")),
        ({"choice": {"yes", "no"}}, "choice", ("no", "yes")),
        ({"grammar": 'start: "a"'}, "grammar", 'start: "a"'),
        ({"json_object": True}, "json_object", True),
    ],
)
def test_form_of_structured_outputs_is_kept(values, name, kept):
    form = StructuredOutputsParams(**values)
    value = getattr(form, name)
    if name == "json":
        assert type(value) is str
        value = json.loads(value)
    assert value == kept
    others = {field.name for field in dataclasses.fields(form)} - {name}
    assert {getattr(form, other) for other in others} == {None}


def full():
    """Parameters of which every list and dictionary is the caller's own."""
    lists = {
        "stop": ["a"],
        "stop_token_ids": np.array([1, 2]),
        "allowed_token_ids": [1, 2, 3],
        "bad_words": ["b"],
        "logit_bias": {1: 0.5},
    }
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
    choice = ["yes"]
    params = [
        SamplingParams(0.5, 9, **lists),
        SamplingParams(structured_outputs=StructuredOutputsParams(json=schema)),
        SamplingParams(structured_outputs=StructuredOutputsParams(choice=choice)),
    ]
    return params, lists, schema, choice


def test_callers_lists_may_change_afterwards():
    params, lists, schema, choice = full()
    for values in lists.values():
        if isinstance(values, dict):
            values[99] = 9.0
        else:
            values[0] = 99
    schema["properties"]["age"]["type"] = "string"
    schema["required"].clear()
    choice.append("no")
    assert params == full()[0]


def test_equal_parameters_are_equal_and_have_one_hash():
    params, again = full()[0], full()[0]
    assert params == again
    assert [hash(item) for item in params] == [hash(item) for item in again]
    assert len({*params, *again, SamplingParams()}) == 4
    assert SamplingParams(stop="a", stop_token_ids={8, 0}) == SamplingParams(
        stop=["a"], stop_token_ids=[0, 8], logit_bias={}, temperature=1
    )
    assert SamplingParams(logit_bias={1: 0.5}) != SamplingParams(logit_bias={1: 0.25})
    assert SamplingParams(seed=0) != SamplingParams(seed=None) == SamplingParams(seed=-1)


def test_parameters_survive_pickle_and_replace():
    for params in full()[0]:
        assert pickle.loads(pickle.dumps(params)) == params
        changed = dataclasses.replace(params, max_tokens=None)
        assert changed.max_tokens is None
        assert dataclasses.replace(changed, max_tokens=params.max_tokens) == params


def test_parameters_are_frozen():
    with pytest.raises(TypeError, match="no option `max_token`; did you mean `max_tokens`"):
        SamplingParams().max_token = 9
    params = full()[0]
    for instance in (*params, params[1].structured_outputs, BeamSearchParams(2, 3)):
        for field in dataclasses.fields(instance):
            with pytest.raises(dataclasses.FrozenInstanceError) as caught:
                setattr(instance, field.name, getattr(instance, field.name))
            assert str(caught.value) == (
                f"{type(instance).__name__} cannot be changed: use dataclasses.replace(params, "
                f"{field.name}=...)"
            )


def test_parameters_still_are_dataclasses():
    for params in full()[0]:
        assert copy.copy(params) == copy.deepcopy(params) == params.clone() == params
    names = [field.name for field in dataclasses.fields(SamplingParams)]
    assert list(inspect.signature(SamplingParams).parameters) == names

    class Own(SamplingParams):
        """May have attributes of its own, as those of any frozen dataclass."""

    own = Own(top_k=3)
    own.note = "a"
    assert (own.top_k, own.note) == (3, "a")
    with pytest.raises(dataclasses.FrozenInstanceError, match=r"^SamplingParams cannot be"):
        own.top_k = 4


def test_greedy_is_what_temperature_says():
    greedy = [SamplingParams(temperature=t).is_greedy for t in (0, 1e-300, 9.9e-6, 1e-5, 1)]
    assert greedy == [True, True, True, False, False]
