"""Prompts and sampling parameters in every accepted form, and what is refused before queueing."""

import copy
import functools
import logging
import operator
import re
from array import array
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import pytest
import torch

from checkpoints import (
    PROMPT,
    SMALL,
    TINY,
    VOCAB,
    assert_greedy,
    assert_usable,
    greedy,
    reference,
)
from nanovllm import LLM, AsyncLLM, BeamSearchParams, SamplingParams, TextPrompt, TokensPrompt
from nanovllm.requests.inputs import bad_word_tokens, name_prompts, spread_sampling_params
from nanovllm.requests.intake import Intake
from nanovllm.sampling.structured_output import GrammarCompiler
from nanovllm.sampling_params import StructuredOutputsParams

MAX_MODEL_LEN, POOL_TOKENS = 12, 16


class Letters:
    """A tokenizer: a is 0, b is 1, ..."""

    def encode(self, text: str, *, verbose: bool) -> list[int]:
        return [ord(letter) - ord("a") for letter in text]


class Pieces:
    """A tokenizer that takes the longest piece at each place, and has a beginning of its own."""

    BEGIN = 99
    PIECES = ("cat", " cat", "do", "g", " dog", " ", "x", "\n", " \n")
    added_tokens_decoder: ClassVar[dict[int, Any]] = {}  # no special ones

    def encode(self, text: str, *, verbose: bool, add_special_tokens: bool) -> list[int]:
        ids = [self.BEGIN] if add_special_tokens else []
        text = text.replace("\u200b", "")
        while text:
            piece = max((p for p in self.PIECES if text.startswith(p)), key=len)
            ids.append(self.PIECES.index(piece))
            text = text.removeprefix(piece)
        return ids


DEFAULT = SamplingParams()


def make_intake(tokenizer, vocab_size, default=DEFAULT, max_model_len=MAX_MODEL_LEN):
    sizes = {"max_model_len": max_model_len, "pool_tokens": POOL_TOKENS, "block_size": 16}
    grammars = GrammarCompiler(tokenizer, vocab_size, ())
    mode = "raw_logprobs"
    return Intake(tokenizer, vocab_size, (), default, grammars, seed=0, logprobs_mode=mode, **sizes)


def read_all(intake, prompts):
    return [intake.read_prompt(prompt, name)[:2] for name, prompt in name_prompts(prompts).items()]


@pytest.fixture
def intake():
    return make_intake(Letters(), 20)


@pytest.fixture(scope="module")
def engine(checkpoint):
    """A pool of 48 tokens, less than max_model_len."""
    with LLM(checkpoint, **{**SMALL, "num_kvcache_blocks": 3}) as llm:
        yield llm


@pytest.fixture(scope="module")
def tiny():
    with LLM(TINY, **SMALL) as llm:
        yield llm


# -- forms ----------------------------------------------------------------------------------------

ABC, AB, ONE_TWO = ("abc", [0, 1, 2]), ("ab", [0, 1]), (None, [1, 2])


@pytest.mark.parametrize(
    ("prompts", "parsed"),
    [
        ("abc", [ABC]),
        (["abc", "ab"], [ABC, AB]),
        (("abc", "ab"), [ABC, AB]),
        ([1, 2], [ONE_TWO]),
        ((1, 2), [ONE_TWO]),
        (np.array([1, 2]), [ONE_TWO]),
        (np.array([1, 2], dtype=np.uint8), [ONE_TWO]),
        ([np.int32(1), np.int64(2)], [ONE_TWO]),
        (range(1, 3), [ONE_TWO]),
        ([[1, 2], [1, 2]], [ONE_TWO, ONE_TWO]),
        (np.array([[1, 2], [1, 2]]), [ONE_TWO, ONE_TWO]),
        ({"prompt": "abc"}, [ABC]),
        ({"prompt_token_ids": [1, 2]}, [ONE_TWO]),
        ({"prompt_token_ids": np.array([1, 2])}, [ONE_TWO]),
        ({"prompt": "shown", "prompt_token_ids": (1, 2)}, [("shown", [1, 2])]),
        ({"prompt": None, "prompt_token_ids": [1, 2]}, [ONE_TWO]),
        ({"prompt": "ab", "prompt_token_ids": None}, [AB]),
        (TextPrompt(prompt="ab"), [AB]),
        ([TokensPrompt(prompt_token_ids=[1, 2])], [ONE_TWO]),
        (TokensPrompt(prompt_token_ids=[1, 2], prompt="shown"), [("shown", [1, 2])]),
        (MappingProxyType({"prompt": "ab"}), [AB]),
        (
            ["abc", [1, 2], (1, 2), np.array([1, 2]), {"prompt": "ab"}, {"prompt_token_ids": [7]}],
            [ABC, ONE_TWO, ONE_TWO, ONE_TWO, AB, (None, [7])],
        ),
        ([], []),
        ((), []),
        (list(range(11)), [(None, list(range(11)))]),  # one below max_model_len
        ([[0], [19]], [(None, [0]), (None, [19])]),
        # one prompt of tokens
        (torch.tensor([1, 2]), [ONE_TWO]),
        (torch.tensor([1, 2], dtype=torch.int32), [ONE_TWO]),
        (pd.Series([1, 2], index=["x", "y"]), [ONE_TWO]),
        (array("q", [1, 2]), [ONE_TWO]),
        (iter([1, 2]), [ONE_TWO]),
        ({"prompt_token_ids": torch.tensor([1, 2])}, [ONE_TWO]),
        ({"prompt_token_ids": iter([1, 2])}, [ONE_TWO]),
        # many prompts
        ((text for text in ["abc", "ab"]), [ABC, AB]),
        (map(str, ["abc", "ab"]), [ABC, AB]),
        (pd.Series(["abc", "ab"], index=[7, 0]), [ABC, AB]),
        (pd.Series(["abc", [1, 2]]), [ABC, ONE_TWO]),
        (pd.DataFrame({"a": ["abc", "ab"]})["a"], [ABC, AB]),
        (np.array(["abc", "ab"]), [ABC, AB]),
        (np.array(["abc", {"prompt": "ab"}], dtype=object), [ABC, AB]),
        ({"abc": 0, "ab": 1}.keys(), [ABC, AB]),
        ({0: "abc", 1: "ab"}.values(), [ABC, AB]),
        (deque(["abc", "ab"]), [ABC, AB]),
        (torch.tensor([[1, 2], [1, 2]]), [ONE_TWO, ONE_TWO]),
        ([torch.tensor([1, 2]), pd.Series([1, 2])], [ONE_TWO, ONE_TWO]),
        (iter(()), []),
        (pd.Series([], dtype=object), []),
    ],
)
def test_every_form_of_prompts_is_read(prompts, parsed, intake):
    result = read_all(intake, prompts)
    assert result == parsed
    assert all(type(i) is int for _, token_ids in result for i in token_ids)


# -- bad prompts ----------------------------------------------------------------------------------

STRINGS_OR = "must be a string, token ids, a dictionary, or a list of those, got"
STRING_OR = "must be a string, a list of token ids or a dictionary, got"
TOKEN_IDS = '`prompts["prompt_token_ids"]` must hold token ids, got'
KEYS = "must have the keys `prompt` or `prompt_token_ids`, with images `multi_modal_data`, and no "
KEYS += "others, got"


@pytest.mark.parametrize(
    ("prompts", "error", "message"),
    [
        ("", ValueError, "`prompts` must have at least one token, got none"),
        ([""], ValueError, "`prompts[0]` must have at least one token, got none"),
        (["ab", []], ValueError, "`prompts[1]` must have at least one token"),
        ({"prompt_token_ids": []}, ValueError, "`prompts` must have at least one token"),
        ([1, -1], ValueError, "`prompts` must hold token ids in 0..19 (the vocabulary), got -1"),
        ([[1], [20]], ValueError, "`prompts[1]` must hold token ids in 0..19 (the vocab"),
        (np.array([1, -2]), ValueError, "`prompts` must hold token ids in 0..19 (the vocab"),
        ([1, True], TypeError, "`prompts` must hold integer token ids, got True"),
        ([[1.0]], TypeError, "`prompts[0]` must hold integer token ids, got 1.0"),
        ([[None]], TypeError, "`prompts[0]` must hold integer token ids, got None"),
        ([["ab"]], TypeError, "`prompts[0]` must hold integer token ids, got 'ab'"),
        ([1, [2]], TypeError, f"`prompts[0]` {STRING_OR} int"),
        ([True, 1], TypeError, f"`prompts[0]` {STRING_OR} bool"),
        ([1.0, 2], TypeError, f"`prompts[0]` {STRING_OR} float"),
        ([None], TypeError, f"`prompts[0]` {STRING_OR} NoneType"),
        (["ab", b"ab"], TypeError, f"`prompts[1]` {STRING_OR} bytes"),
        (None, TypeError, f"`prompts` {STRINGS_OR} NoneType"),
        (3, TypeError, f"`prompts` {STRINGS_OR} int"),
        ({1, 2}, TypeError, f"`prompts` {STRINGS_OR} set"),
        (frozenset(["ab"]), TypeError, f"`prompts` {STRINGS_OR} frozenset"),
        (pd.DataFrame({"prompt": ["ab"]}), TypeError, f"`prompts` {STRINGS_OR} DataFrame"),
        (pd.Series(["ab", None]), TypeError, f"`prompts[1]` {STRING_OR} float"),
        (torch.tensor(5), TypeError, f"`prompts` {STRINGS_OR} Tensor"),
        (torch.tensor([0.5]), TypeError, f"`prompts[0]` {STRING_OR} float"),
        ((p for p in ["ab", ""]), ValueError, "`prompts[1]` must have at least one token"),
        ({}, ValueError, f"`prompts` {KEYS} []"),
        ({"text": "ab"}, ValueError, f"`prompts` {KEYS} ['text']"),
        ([{"prompt": "a", "n": 1}], ValueError, f"`prompts[0]` {KEYS} ['n', 'prompt']"),
        (
            [{"role": "user", "content": "a"}],
            ValueError,
            f"`prompts[0]` {KEYS} ['content', 'role']; messages are for `chat`",
        ),
        ({"prompt": [1]}, TypeError, '`prompts["prompt"]` must be a string, got list'),
        ({"prompt": None}, TypeError, '`prompts["prompt"]` must be a string, got NoneType'),
        (
            *([{"prompt": None, "prompt_token_ids": None}], TypeError),
            '`prompts[0]["prompt"]` must be a string, got NoneType',
        ),
        ({"prompt_token_ids": None}, TypeError, f"{TOKEN_IDS} NoneType"),
        ({"prompt": "a", "prompt_token_ids": 5}, TypeError, f"{TOKEN_IDS} int"),
        (list(range(12)), ValueError, "leave room for one token within max_model_len 12, got 12"),
        ("a" * 40, ValueError, "got 40 tokens: shorten it, or raise max_model_len if the model"),
        (np.array(5), TypeError, "`prompts`"),
        ({"prompt_token_ids": "ab"}, TypeError, f"{TOKEN_IDS} str"),
        ({"prompt": "a", 1: 2}, ValueError, f"`prompts` {KEYS}"),
    ],
)
def test_defect_17_bad_prompt_is_named(prompts, error, message, intake):
    with pytest.raises(error, match=re.escape(message)):
        read_all(intake, prompts)


def test_defect_15_prompt_beyond_the_pool_is_refused_with_remedy():
    intake = make_intake(None, 20, max_model_len=100)
    assert intake.read_prompt([1] * 15)[:2] == (None, [1] * 15)
    with pytest.raises(
        ValueError, match=r"`prompt` must fit the KV cache of 16 tokens.*got 16.*num_kvcache_blocks"
    ):
        intake.read_prompt([1] * 16)


@pytest.mark.parametrize("prompts", [["a", "b"], [[1], [2]], [{"prompt": "a"}], [np.array([1])]])
def test_list_of_prompts_for_one_is_named(prompts, intake):
    with pytest.raises(TypeError) as caught:
        intake.read_prompt(prompts)
    assert str(caught.value) == (
        f"`prompt` must hold integer token ids, got {prompts[0]!r}: it is one prompt, not a list "
        "of prompts"
    )


def test_lone_surrogates_are_named(tiny):
    """The tokenizer's own words are of its types."""
    reason = "it has lone surrogates, which are not characters"
    with pytest.raises(ValueError, match=rf"^`prompts\[1\]` cannot be tokenised: {reason}$"):
        tiny.generate(["a", "a\ud800b"], use_tqdm=False)


def test_text_beyond_the_limit_is_refused_once(tiny, caplog, monkeypatch):
    """transformers' warning, of "indexing errors", came first."""
    text, tokenizer = "a" * 200, tiny.get_tokenizer()
    monkeypatch.setattr(tokenizer, "model_max_length", 128)
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    with pytest.raises(ValueError, match="within max_model_len 128, got 200 tokens: shorten it"):
        tiny.generate(text, use_tqdm=False)
    assert not caplog.records
    tokenizer.encode(text)  # ... and it would have been seen
    assert "longer than the specified maximum" in caplog.text


def test_text_without_tokenizer_is_refused_with_remedy():
    intake = make_intake(None, 20)
    for prompts in ("ab", {"prompt": "ab"}):
        with pytest.raises(ValueError, match=r"`prompts` is text, .* no tokenizer: pass token ids"):
            read_all(intake, prompts)
    # text beside token ids is only carried along
    both = {"prompt": "shown", "prompt_token_ids": [1]}
    assert read_all(intake, [both]) == [("shown", [1])]


# -- sampling parameters --------------------------------------------------------------------------


def test_sampling_params_are_spread():
    one, two = SamplingParams(max_tokens=1), SamplingParams(max_tokens=2)
    default = SamplingParams(max_tokens=3)
    for_all = "sampling_params"
    assert spread_sampling_params(None, 2, default) == [(for_all, default), (for_all, default)]
    assert spread_sampling_params(one, 2, default) == [(for_all, one), (for_all, one)]
    for nothing in (one, []):
        assert spread_sampling_params(nothing, 0, default) == []
    named = [("sampling_params[0]", one), ("sampling_params[1]", two)]
    both = [one, two]
    for params in (both, tuple(both), iter(both), pd.Series(both), np.array(both), deque(both)):
        assert spread_sampling_params(params, 2, default) == named


@pytest.mark.parametrize(
    ("params", "error", "match"),
    [
        ([SamplingParams()], ValueError, "one for all or one per prompt, got 1 for 2 prompts"),
        ([SamplingParams()] * 3, ValueError, ".* one per prompt, got 3 for 2 prompts"),
        ([], ValueError, ".* one per prompt, got 0 for 2 prompts"),
        ({"temperature": 0}, TypeError, "a SamplingParams, a list of them or None, got dict"),
        ("greedy", TypeError, "a SamplingParams, a list of them or None, got str"),
    ],
)
def test_defect_17_bad_sampling_params_are_named(params, error, match):
    with pytest.raises(error, match=f"`sampling_params` must be {match}"):
        spread_sampling_params(params, 2, SamplingParams())


def test_bad_item_of_sampling_params_is_named():
    with pytest.raises(TypeError, match=r"`sampling_params\[1\]` must be a SamplingParams, got No"):
        spread_sampling_params([SamplingParams(), None], 2, SamplingParams())


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"stop_token_ids": [3, 9]}, "stop_token_ids` must hold token ids in 0..8 (the voc"),
        ({"allowed_token_ids": [0, 70000]}, "allowed_token_ids` must hold token ids in 0..8"),
        (
            {"logit_bias": {9: 0.5}},
            "logit_bias` must hold token ids in 0..8 (the vocabulary), got 9",
        ),
        ({"bad_words": ["x", "\u200b"]}, "bad_words[1]` must have tokens, got '\\u200b'"),
    ],
)
def test_sampling_params_that_the_model_cannot_meet_are_named(params, message):
    intake = make_intake(Pieces(), 9)
    good, bad = SamplingParams(), SamplingParams(**params)
    two, four = (name_prompts([[1]] * count) for count in (2, 4))
    for call, name in (
        (lambda: intake.read_params(bad), "sampling_params"),
        (lambda: intake.check([1], bad), "sampling_params"),
        (lambda: intake.check_all(two, bad), "sampling_params"),
        (lambda: intake.check_all(two, bad, "return"), "sampling_params"),  # wrong for all
        (lambda: intake.check_all(two, [bad, good]), "sampling_params[0]"),
        (lambda: intake.check_all(four, [good, good, bad, bad]), "sampling_params[2]"),
    ):
        with pytest.raises(ValueError, match="^" + re.escape(f"`{name}.{message}")):
            call()


def test_bad_word_beyond_the_vocabulary_is_refused():
    """A tokenizer may have more tokens than the model."""
    params = SamplingParams(bad_words=["x", "\n"])
    with pytest.raises(ValueError, match=r"`sampling_params\.bad_words` must .* 0\.\.7 .*, got 8$"):
        make_intake(Pieces(), 8).read_params(params)


def test_sampling_params_that_the_model_meets_pass():
    default = SamplingParams(top_k=3)
    intake = make_intake(Pieces(), 9, default)
    params = SamplingParams(
        stop="\ud800",  # which no text has
        stop_token_ids=[0, 8],
        allowed_token_ids=[8],
        logit_bias={0: 1, 8: -1},
        bad_words=["dog"],
    )
    guided = SamplingParams(structured_outputs=StructuredOutputsParams(regex="x"))
    intake.read_params(guided)
    assert intake.check([1], params).params is params
    assert intake.check([1], None).params is default
    two = name_prompts([[1], [1]])
    checked = intake.check_all(two, [params, default])
    assert [item.params for item in checked] == [params, default]
    assert intake.check_all({}, params) == []
    first, second = intake.check_all(two, None)
    assert first.params is second.params is default
    assert first.controls is second.controls and first.controls.filters == (3, 1.0, 0.0)
    with pytest.raises(TypeError, match="`sampling_params` must be a SamplingParams, got dict"):
        intake.read_params({"top_k": 3})
    with pytest.raises(TypeError, match=r"a SamplingParams, got list: there is one prompt for th"):
        intake.read_params([params])


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"stop": "end"}, "stop` needs a tokenizer, .* has none: pass stop_token_ids"),
        ({"bad_words": ["x"]}, "bad_words` needs a tokenizer, .* has none: pass logit_bias"),
        (
            {"structured_outputs": StructuredOutputsParams(json_object=True)},
            "structured_outputs` needs a tokenizer, .* has none: pass allowed_token_ids",
        ),
    ],
)
def test_parameters_about_text_need_a_tokenizer(params, message):
    intake = make_intake(None, 9)
    with pytest.raises(ValueError, match=rf"^`sampling_params\.{message}$"):
        intake.read_params(SamplingParams(**params))
    assert intake.read_params(SamplingParams(stop=[], bad_words=[])) is None


# -- bad words ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "sequences"),
    [
        (["cat"], [(0,), (1,)]),
        ([" cat"], [(0,), (1,)]),
        (["cat", " cat", "cat"], [(0,), (1,)]),
        (["dog"], [(2, 3), (4,)]),  # of another length
        (["x"], [(6,)]),  # which the space before it does not change
        (["cat dog"], [(0, 4), (1, 4)]),
        ([" "], [(5,)]),
        (["\n"], [(7,), (8,)]),
        (["x", "g"], [(6,), (3,)]),
        ([], []),
    ],
)
def test_bad_words_are_tokenised_with_and_without_a_space(words, sequences):
    assert bad_word_tokens(Pieces(), words) == sequences


def test_bad_words_of_a_real_tokenizer(tiny):
    """One token for each byte: forms with a space are nothing new."""
    words = ["ab", " c", "é"]
    assert bad_word_tokens(tiny.get_tokenizer(), words) == [(97, 98), (99,), (0xC3, 0xA9)]


def test_bad_word_that_cannot_be_tokenised_is_named(tiny):
    with pytest.raises(ValueError, match=r"^`bad_words\[1\]` must have tokens, got '\\u200b'$"):
        bad_word_tokens(Pieces(), ["x", "\u200b"])
    params = SamplingParams(bad_words=["a", "\ud800"])
    with pytest.raises(ValueError, match=r"^`sampling_params\.bad_words\[1\]` cannot be tokenis"):
        tiny.add_request("a", params)
    assert tiny.is_finished()


# -- end to end -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompts", "params", "error", "match"),
    [
        ([PROMPT, []], None, ValueError, r"`prompts\[1\]` must have at least one token"),
        ([PROMPT, [VOCAB]], None, ValueError, r"`prompts\[1\]` .* 0\.\.127 .* got 128"),
        ([PROMPT, [1] * 48], None, ValueError, r"`prompts\[1\]` must fit the KV cache of 48 tok"),
        ([PROMPT, [1] * 128], None, ValueError, r"`prompts\[1\]` .* max_model_len 128, got 128"),
        ([PROMPT, "text"], None, ValueError, r"`prompts\[1\]` is text, .* no tokenizer"),
        ([PROMPT, PROMPT], [SamplingParams()], ValueError, "got 1 for 2 prompts"),
        ([PROMPT, PROMPT], [SamplingParams(), 1], TypeError, r"`sampling_params\[1\]`"),
        ([], [SamplingParams()], ValueError, "got 1 for 0 prompts"),
    ],
)
def test_defect_17_one_bad_prompt_queues_none(prompts, params, error, match, engine, checkpoint):
    before = engine.metrics()
    with pytest.raises(error, match=match):
        engine.generate(prompts, params, use_tqdm=False)
    assert engine.metrics() == before
    if params is None:
        with pytest.raises(error, match=match.replace(r"prompts\[1\]", "prompt")):
            engine.add_request(prompts[1])
    assert engine.metrics() == before
    assert_usable(engine, checkpoint)


@pytest.mark.parametrize(
    ("params", "match"),
    [
        ({"stop_token_ids": [VOCAB]}, r"stop_token_ids` must hold token ids in 0\.\.127 .*got 128"),
        ({"allowed_token_ids": [1, VOCAB]}, r"allowed_token_ids` must hold token ids in 0\.\.127"),
        ({"logit_bias": {VOCAB: 1}}, r"logit_bias` must hold token ids in 0\.\.127"),
        ({"stop": "end"}, "stop` needs a tokenizer"),
        ({"bad_words": ["word"]}, "bad_words` needs a tokenizer"),
        (
            {"structured_outputs": StructuredOutputsParams(regex="a")},
            "structured_outputs` needs a tokenizer",
        ),
    ],
)
def test_bad_sampling_params_queue_nothing(params, match, engine, checkpoint):
    before = engine.metrics()
    bad = SamplingParams(**params)
    for call, name in (
        (lambda: engine.add_request(PROMPT, bad), "sampling_params"),
        (lambda: engine.generate([PROMPT, PROMPT], bad, use_tqdm=False), "sampling_params"),
        (
            lambda: engine.generate([PROMPT, PROMPT], [greedy(3), bad], use_tqdm=False),
            r"sampling_params\[1\]",
        ),
    ):
        with pytest.raises(ValueError, match=rf"^`{name}\.{match}"):
            call()
    assert engine.metrics() == before
    assert_usable(engine, checkpoint)


def test_output_that_outgrows_the_pool_ends_with_length(engine, checkpoint):
    """Defect 15: alone in the pool, and among others."""
    prompts = [[i + 1] * (3 * i + 5) for i in range(5)]
    outputs = engine.generate([*prompts, PROMPT], greedy(100), use_tqdm=False)
    assert_greedy(checkpoint, [*prompts, PROMPT], outputs)
    for prompt, output in zip([*prompts, PROMPT], outputs, strict=True):
        assert len(output["token_ids"]) == 48 - len(prompt)
        assert output.outputs[0].finish_reason == "length"
    longest = [3] * 47
    [output] = engine.generate(longest, greedy(100), use_tqdm=False)
    assert output["token_ids"] == reference(checkpoint, longest, 1)
    assert_usable(engine, checkpoint)


def test_forms_mix_freely_and_agree(tiny):
    text = "Hello, world"
    ids = tiny.get_tokenizer().encode(text)
    prompts = [
        *(text, ids, tuple(ids), np.array(ids), {"prompt": text}, {"prompt_token_ids": ids}),
        {"prompt": "label", "prompt_token_ids": ids},
    ]
    outputs = tiny.generate(prompts, greedy(8, ignore_eos=True), use_tqdm=False)
    assert [o.prompt_token_ids for o in outputs] == [ids] * 7
    assert [o.prompt for o in outputs] == [text, None, None, None, text, None, "label"]
    expected = reference(TINY, ids, 8)
    assert [o["token_ids"] for o in outputs] == [expected] * 7
    [alone] = tiny.generate(text, greedy(8, ignore_eos=True), use_tqdm=False)
    assert (alone["token_ids"], alone.prompt) == (expected, text)


def test_each_prompt_has_its_own_parameters(engine, checkpoint):
    prompts = [PROMPT, PROMPT, [7, 8]]
    params = (greedy(1), greedy(9), greedy(4))
    expected = [reference(checkpoint, p, n) for p, n in zip(prompts, (1, 9, 4), strict=True)]
    for form in (params, list(params)):
        outputs = engine.generate(prompts, form, use_tqdm=False)
        assert [o["token_ids"] for o in outputs] == expected
    [default] = engine.generate([[5]], None, use_tqdm=False)
    assert len(default["token_ids"]) == min(SamplingParams().max_tokens, 47)
    assert engine.generate([], use_tqdm=False) == []
    assert engine.generate([], greedy(3), use_tqdm=False) == []


def test_callers_lists_are_neither_changed_nor_aliased(engine, checkpoint):
    prompts = [list(PROMPT), {"prompt_token_ids": [1, 2]}, np.array([3, 4])]
    params = [greedy(3), greedy(4), greedy(5)]
    before = copy.deepcopy((prompts, params))
    outputs = engine.generate(prompts, params, use_tqdm=False)
    np.testing.assert_equal((prompts, params), before)
    for output in outputs:
        output.prompt_token_ids.append(-1)
        output["token_ids"].clear()
    np.testing.assert_equal((prompts, params), before)
    prompts[0][:] = [9] * 50
    assert outputs[0].prompt_token_ids == [*PROMPT, -1]
    request_id = engine.add_request(queued := list(PROMPT), greedy(3))
    queued.clear()
    while not (finished := engine.step()):
        pass
    assert (finished[0].request_id, finished[0].prompt_token_ids) == (request_id, PROMPT)
    assert_usable(engine, checkpoint)


def test_iterable_that_raises_queues_nothing(engine, checkpoint):
    def prompts():
        yield PROMPT
        raise TypeError("the file has ended")

    before = engine.metrics()
    for on_error in ("raise", "return"):  # the error is no prompt's
        for call in (engine.generate, engine.stream, engine.score, engine.embed):
            with pytest.raises(TypeError, match="the file has ended"):
                call(prompts(), on_error=on_error)
        with pytest.raises(TypeError, match="the file has ended"):
            engine.generate([PROMPT], (greedy(1) for _ in prompts()), on_error=on_error)
    assert engine.metrics() == before
    outputs = engine.generate(
        iter([PROMPT, PROMPT[:2]]), map(greedy, [3, 4]), use_tqdm=False, on_error="raise"
    )
    assert [len(output["token_ids"]) for output in outputs] == [3, 4]
    assert_usable(engine, checkpoint)


# -- prompts that are refused alone ---------------------------------------------------------------

WRONG = [[VOCAB], "text", [], [1] * 48, [1] * 128, None, {"text": "a"}, {"prompt": "text"}]
MIXED = [*WRONG[:3], PROMPT, *WRONG[3:], PROMPT[:2]]  # what is right is at 3 and at the end
RIGHT = {3: PROMPT, len(MIXED) - 1: PROMPT[:2]}


def words_of(call):
    """The error message of each wrong prompt."""
    words = {}
    for i, prompt in enumerate(MIXED):
        if i not in RIGHT:
            prompts = [PROMPT] * len(MIXED)
            prompts[i] = prompt
            with pytest.raises((TypeError, ValueError)) as caught:
                call(prompts)
            words[i] = str(caught.value)
            assert f"`prompts[{i}]" in words[i]
    return [words.get(i) for i in range(len(MIXED))]


@pytest.mark.parametrize("overlap", [False, True], ids=["synchronous", "overlap"])
def test_refused_prompts_keep_their_places(overlap, checkpoint, capfd):
    with LLM(checkpoint, overlap=overlap, **{**SMALL, "num_kvcache_blocks": 3}) as llm:
        errors = words_of(lambda prompts: llm.generate(prompts, greedy(3)))
        assert llm.metrics()["num_steps"] == 0
        capfd.readouterr()
        outputs = llm.generate(MIXED, greedy(3), on_error="return")
        assert f"{len(MIXED)}/{len(MIXED)}" in capfd.readouterr().err
        assert [output.error for output in outputs] == errors
        ids = [output.request_id for output in outputs]
        assert ids == sorted(set(ids))
        for i, output in enumerate(outputs):
            assert output.finished
            if i in RIGHT:
                assert output["token_ids"] == reference(checkpoint, RIGHT[i], 3)
                continue
            assert (output.prompt_token_ids, output.outputs) == ([], [])
            assert output.prompt == ("text" if i in (1, 8) else None)
            assert output["finish_reason"] == "error"
            assert (output["text"], output["token_ids"], output["num_generated_tokens"]) == (
                "",
                [],
                0,
            )
        streamed = {}
        for output in llm.stream(MIXED, greedy(3), on_error="return"):
            streamed.setdefault(output.request_id, []).append(output)
        assert len(streamed) == len(MIXED) and all(news[-1].finished for news in streamed.values())
        assert [streamed[i][-1].error for i in sorted(streamed)] == errors
        drawn = [[t for o in streamed[i] for t in o["token_ids"]] for i in sorted(streamed)]
        assert drawn == [output["token_ids"] for output in outputs]
        assert [o.error for o in llm.stream([[]], on_error="return")] == [
            "`prompts[0]` must have at least one token, got none"
        ]
        assert_usable(llm, checkpoint)


def test_other_calls_refuse_prompts_alone(engine, checkpoint):
    beams = BeamSearchParams(2, 3)
    for call, found in (
        (engine.score, "ranks"),
        (engine.embed, "outputs.embedding"),
        (functools.partial(engine.beam_search, params=beams), "sequences"),
    ):
        errors = words_of(call)
        outputs = call(MIXED, on_error="return")
        assert [output.error for output in outputs] == errors
        assert [bool(operator.attrgetter(found)(o)) for o in outputs] == [not e for e in errors]
    assert_usable(engine, checkpoint)


def test_conversations_are_refused_alone(tiny):
    hello = [{"role": "user", "content": "Hi"}]
    conversations = [hello, [], [{"role": "user"}], [{"role": "user", "content": "a" * 200}], hello]
    outputs = tiny.chat(conversations, greedy(3), use_tqdm=False, on_error="return")
    errors = [output.error or "" for output in outputs]
    for error, words in zip(
        errors, ("^$", "one message", "`content`", "got 2.. tokens", "^$"), strict=True
    ):
        assert re.search(words, error)
    assert [error.startswith(f"`messages[{i}]") for i, error in enumerate(errors)] == [
        *(False, True, True, True, False)
    ]
    assert outputs[0]["token_ids"] == outputs[4]["token_ids"] != []
    with pytest.raises(
        ValueError, match=r'got 2.. tokens: .*; on_error="return" completes the oth'
    ):
        tiny.chat(conversations[3:], greedy(3))


def test_own_parameters_are_refused_alone_and_others_with_the_call(tiny):
    good, bad = greedy(3), greedy(3, stop_token_ids=[10**6])
    form = greedy(3, structured_outputs=StructuredOutputsParams(regex="("))
    params = [good, bad, form, bad, good]
    outputs = tiny.generate(["ab"] * 5, params, use_tqdm=False, on_error="return")
    assert [output.error is None for output in outputs] == [True, False, False, False, True]
    assert "`sampling_params[3].stop_token_ids` must" in outputs[3].error
    before = tiny.metrics()
    for common in (bad, form, [good], [good, 1], 5):
        with pytest.raises((TypeError, ValueError)):
            tiny.generate(["ab", ""], common, on_error="return")
    for option in ("skip", None, True):
        for call in (tiny.generate, tiny.stream, tiny.score, tiny.embed, tiny.chat):
            with pytest.raises(ValueError, match="`on_error` must be one of raise, return, got"):
                call(["ab"], on_error=option)
    with pytest.raises(TypeError, match="`prompts` must be"):
        tiny.generate(5, on_error="return")
    assert tiny.metrics() == before


@pytest.mark.parametrize(
    ("name", "nothing", "something", "hint"),
    [
        ("lora_request", None, 1, r"LLM\(model, adapter=path\) merges"),
        ("priority", None, [1, 2], "order"),
        ("prompt_token_ids", None, [[1]], "as prompts"),
        ("tokenization_kwargs", {}, {"truncation": True}, "token ids"),
        ("temprature", "", 1, r"pass SamplingParams\(temperature=...\)"),
        *(
            (field.name, "", None, rf"pass SamplingParams\({field.name}=...\)")
            for field in fields(SamplingParams)
        ),
    ],
)
def test_arguments_of_vllm_that_ask_for_nothing(name, nothing, something, hint, tiny):
    hello = [{"role": "user", "content": "Hi"}]
    calls = {tiny.generate: "Hi", tiny.chat: hello, tiny.stream: "Hi", tiny.add_request: "Hi"}
    for call, prompts in calls.items():
        with pytest.raises(
            TypeError, match=rf"{call.__name__}\(\) has no option `{name}`; .*{hint}"
        ):
            call(prompts, greedy(1), **{name: something})
    if nothing != "":
        for call in (tiny.generate, tiny.chat):
            [output] = call(calls[call], greedy(1), use_tqdm=False, **{name: nothing})
            assert output.finished
        assert [*tiny.stream("Hi", greedy(1), **{name: nothing})][-1].finished
        assert tiny.abort(tiny.add_request("Hi", greedy(1), **{name: nothing}))
    for call in (AsyncLLM.generate, AsyncLLM.stream):
        with pytest.raises(TypeError, match=f"has no option `{name}`; .*{hint}"):
            call(None, "Hi", **{name: something})


def test_a_slip_of_the_pen(tiny):
    for call in (tiny.generate, tiny.chat):
        with pytest.raises(TypeError, match=r"no option `use_tdqm`; did you mean `use_tqdm`\?"):
            call("Hi", use_tdqm=False)


@pytest.mark.parametrize("wrong", [3, None])
def test_a_wrong_first_prompt_is_one_of_many(wrong: Any) -> None:
    """One output came for all prompts: the first seemed to say what they are."""
    conversation = [{"role": "user", "content": "1+1="}]
    with LLM(TINY, **SMALL) as llm:
        params = SamplingParams(max_tokens=2)
        texts = llm.generate([wrong, "1+1="], params, use_tqdm=False, on_error="return")
        answers = llm.chat([wrong, conversation], params, use_tqdm=False, on_error="return")
        for outputs in (texts, answers):
            assert [output.error is None for output in outputs] == [False, True]


def test_prompts_may_take_their_time() -> None:
    """An iterable of prompts that needed the engine waited for itself."""
    with LLM(TINY, **SMALL) as llm:
        params = SamplingParams(max_tokens=2)

        def ask(_: int) -> str:
            return llm.generate("1+1=", params, use_tqdm=False)[0]["text"]

        with ThreadPoolExecutor(1) as pool:
            outputs = llm.generate(
                (pool.submit(ask, i).result(60) + "2+2=" for i in range(2)), params, use_tqdm=False
            )
        assert len(outputs) == 2
