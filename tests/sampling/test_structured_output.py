"""Forms as llguidance gets them, what its masks become, ends, and what is kept of compiled forms.

That llguidance keeps to regular expressions, schemas and grammars is for its own tests to prove;
here a few texts of each show that a form has reached it whole.
"""

import functools
import json
import logging
import random
import re
import sys
import threading
from collections.abc import Callable
from decimal import Decimal
from types import MappingProxyType
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from checkpoints import TINY, in_threads, rare
from nanovllm.sampling import structured_output
from nanovllm.sampling.structured_output import Grammar, GrammarCompiler, accept_tokens, fill_masks
from nanovllm.sampling_params import StructuredOutputsParams

jsonschema = pytest.importorskip("jsonschema")
pytest.importorskip("llguidance")

TAGS = ["<think>", "</think>", "<tool_call>", "<a", "added"]  # tokens that are text
PADDING = 45  # the model's vocabulary is larger, and no multiple of 32
CORPUS = [
    '{"name": "Zoë Gödel", "age": 36, "tags": ["red", "blue"], "ok": true, "next": null}',
    '{\n    "items": [\n        {"id": 12, "text": "größer als 😀😀"},\n        false\n    ]\n}',
    "12 + 34 * (56 - 7.5) / 100, yes or no, yellow, abab ababab, 2024-12-31, 日本語 日本",
]


def byte_level() -> PreTrainedTokenizerFast:
    """A byte-level BPE with tokens of several bytes, also of incomplete characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, min_frequency=1, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    special = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


@functools.cache
def get_tokenizer(name: str) -> PreTrainedTokenizerFast:
    tokenizer = byte_level() if name == "byte_level" else AutoTokenizer.from_pretrained(TINY)
    if name == "tagged":
        tokenizer.add_tokens([AddedToken(tag, special=False) for tag in TAGS])
        tokenizer.add_tokens([AddedToken("<special>", special=True)], special_tokens=True)
    return tokenizer


@functools.cache
def get_pieces(name: str) -> dict[int, bytes]:
    """Bytes of each token that is not special, by GPT-2's table."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in kept]
    table = {chr(byte): byte for byte in kept}
    table |= {chr(256 + i): byte for i, byte in enumerate(moved)}
    tokenizer = get_tokenizer(name)
    vocab = tokenizer.get_vocab().items()
    special = tokenizer.all_special_ids
    return {i: bytes(table[c] for c in token) for token, i in vocab if i not in special}


@functools.cache
def get_compiler(name: str) -> GrammarCompiler:
    tokenizer = get_tokenizer(name)
    ends = {tokenizer.eos_token_id, tokenizer.pad_token_id}
    return GrammarCompiler(tokenizer, len(tokenizer) + PADDING, ends)


@pytest.fixture(params=["tiny", "byte_level", "tagged"])
def name(request):
    """Name of a tokenizer."""
    return request.param


def new(name: str, **form: Any) -> Grammar:
    return get_compiler(name).compile(StructuredOutputsParams(**form))


def ends(name: str) -> set[int]:
    return {get_tokenizer(name).eos_token_id, get_tokenizer(name).pad_token_id}


def allowed(name: str, grammar: Grammar) -> set[int]:
    """The tokens in the mask, which begins as garbage."""
    mask = np.full(-(-(len(get_tokenizer(name)) + PADDING) // 32), 0x55AA55AA, np.int32)
    fill_masks([grammar], mask[np.newaxis])
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def is_finished(grammar: Grammar) -> bool:
    """Whether the text has ended, or only its end may follow the token accepted last."""
    return grammar._has_ended or grammar._matcher.is_stopped()


def accept(grammar: Grammar, token: int) -> None:
    accept_tokens([grammar], [token])


def accept_bytes(name: str, grammar: Grammar, text: bytes) -> None:
    """Byte for byte: each byte is a token."""
    tokens = {piece: token for token, piece in get_pieces(name).items() if len(piece) == 1}
    for byte in text:
        accept(grammar, tokens[bytes([byte])])


def walk(
    name: str,
    form: dict[str, Any],
    seed: int,
    check: Callable[[bytes, set[int]], None] = lambda text, tokens: None,
    free: int = 60,
) -> str:
    """Tokens drawn from the allowed ones up to the end; after `free` of them, closing ones."""
    print(f"form {form} seed {seed}")
    rng = random.Random(seed)
    pieces, grammar, text = get_pieces(name), new(name, **form), b""
    for step in range(free + 300):
        tokens = allowed(name, grammar)
        check(text, tokens)
        choices = sorted(tokens)
        if step >= free:
            closing = [t for p in b'"}]),:0na' for t in choices if pieces.get(t) == bytes([p])]
            choices = sorted(tokens & ends(name)) or closing[:1] or choices
        token = rng.choice(choices)
        if not is_finished(grammar) and step < free and rng.random() < 0.5:
            token = rng.choice(sorted(tokens - ends(name)) or choices)
        accept(grammar, token)
        if token in ends(name):
            assert is_finished(grammar)
            return text.decode()
        text += pieces[token]
    raise AssertionError(f"no end: {text!r}")


# -- masks ----------------------------------------------------------------------------------------

CHOICES = ["yes", "yellow", "ye", "no", 'a "b"\\c\n/', "größer", "grö", "😀", "<|im_end|>", " y"]
CHOICES += ["<think>a"]


@pytest.mark.parametrize(
    ("form", "texts"),
    [
        rare({"choice": CHOICES}, CHOICES),
        ({"regex": "yes|yellow|ye|"}, ["yes", "yellow", "ye", ""]),
    ],
    ids=["choice", "words"],
)
@pytest.mark.parametrize(
    "name", ["byte_level", "tagged", pytest.param("tiny", marks=pytest.mark.slow)]
)
def test_masks_of_finite_forms_are_exact(form, texts, name):
    """A token is in the mask if and only if some text goes on with it, and refused otherwise."""
    language = [text.encode() for text in texts]
    pieces, refused = get_pieces(name), set()

    def check(text: bytes, tokens: set[int]) -> None:
        follow = {t for t, p in pieces.items() if any(x.startswith(text + p) for x in language)}
        assert tokens == (follow | ends(name) if text in language else follow), text
        if text in refused:
            return
        refused.add(text)
        grammar = new(name, **form)
        accept_bytes(name, grammar, text)
        for token in set(range(len(get_tokenizer(name)) + PADDING)) - tokens:
            with pytest.raises(RuntimeError, match=f"token {token} is not allowed"):
                accept(Grammar(grammar._matcher, ends(name)), token)  # a copy
        assert allowed(name, grammar) == tokens  # as if nothing had been tried

    for seed in range(6):
        assert walk(name, form, seed, check) in texts


def every_mask(compiler: GrammarCompiler, ignore_eos: bool = False, **form: Any) -> dict:
    """The allowed tokens after each text that the tokens of bytes lead to, but for ends."""
    masks, paths = {}, [b""]
    for path in paths:
        grammar = compiler.compile(StructuredOutputsParams(**form), ignore_eos)
        accept_bytes("tiny", grammar, path)
        masks[path] = allowed("tiny", grammar)
        stops = set() if ignore_eos else grammar._eos_token_ids
        paths += [path + bytes([t]) for t in sorted(masks[path]) if t < 256 and t not in stops]
    return masks


@pytest.mark.parametrize(
    ("pattern", "texts"),
    [
        ("", [""]),
        ("a/|\\/b\\\\|[/]c|//", ["a/", "/b\\", "/c", "//"]),
        ("a\nb|[\n\r]", ["a\nb", "\n", "\r"]),
        (re.escape("a\n/\\ \t#"), ["a\n/\\ \t#"]),
        ("(?x)a # a/c\nb |\tc", ["ab", "c"]),
        ('"a"i|#b|%', ['"a"i', "#b", "%"]),
    ],
)
def test_regular_expressions_mean_what_they_say(pattern, texts):
    """Also those with characters that mean something to Lark, in which the library embeds them."""
    assert all(re.fullmatch(pattern, text) for text in texts)
    complete = every_mask(get_compiler("tiny"), regex=pattern).items()
    assert {path.decode() for path, tokens in complete if tokens & ends("tiny")} == set(texts)


# -- whole texts ----------------------------------------------------------------------------------

OBJECT = {"type": "object", "additionalProperties": False}
NAME = {"type": "string", "pattern": "^[A-Z][a-zé]{1,8}$"}
SCHEMAS: list[dict[str, Any]] = [
    {
        **OBJECT,
        "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}, "c": {"type": "null"}},
        "required": ["b"],
    },
    {"enum": ["red", 'gr"ün', 3, -1.5, None, True, {"a": [1]}, "\n😀"]},
    {
        **OBJECT,
        "properties": {"value": NAME, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
        "required": ["value", "next"],
    },
    {},
]


def load(text: str) -> Any:
    """Without rounding, which could leave the bounds of numbers; twice the same key is an error."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        assert len({key for key, _ in items}) == len(items), items
        return dict(items)

    def number(digits: str) -> Decimal | float:
        return float(digits) if "e" in digits.lower() else Decimal(digits)

    return json.loads(text, parse_float=number, object_pairs_hook=pairs)


@pytest.mark.parametrize("schema", SCHEMAS, ids=range(len(SCHEMAS)))
def test_json_follows_its_schema(schema, name):
    jsonschema.Draft202012Validator.check_schema(schema)
    for seed in range(8):
        text = walk(name, {"json": schema}, seed)
        checker = jsonschema.FormatChecker()
        jsonschema.validate(
            load(text), schema, jsonschema.Draft202012Validator, format_checker=checker
        )


def test_json_object_is_any_object(name):
    for seed in range(20):
        assert isinstance(load(walk(name, {"json_object": True}, seed)), dict)


@pytest.mark.parametrize("text", ['{"b": [1, {"c": "é\\n"}], "a": null}', "{}", '{\n  "": 1e5\n}'])
def test_json_object_takes_what_json_writes(text, name):
    grammar = new(name, json_object=True)
    for token in get_tokenizer(name).encode(text, add_special_tokens=False):
        assert token in allowed(name, grammar)
        accept(grammar, token)
    assert is_finished(grammar)
    assert allowed(name, grammar) == ends(name)


def test_schemas_as_text_and_as_any_mapping_are_the_same():
    """And properties come in the order of the schema."""
    schema = {**OBJECT, "properties": {"z": {}, "a": {}}, "required": ["a", "z"]}
    for given in (schema, json.dumps(schema, indent=1), MappingProxyType(schema)):
        grammar = new("tiny", json=given)
        accept_bytes("tiny", grammar, b'{"')
        assert allowed("tiny", grammar) == {ord("z")}


def test_blanks_in_json_are_bounded():
    """A small model that has begun to write blanks would go on up to `max_tokens`."""
    grammar = new("tiny", json={"type": "array"})
    accept_bytes("tiny", grammar, b"[" + b"\n" + b" " * 38)
    assert ord(" ") in allowed("tiny", grammar)
    accept_bytes("tiny", grammar, b"\t")
    assert ord(" ") not in allowed("tiny", grammar)
    accept_bytes("tiny", grammar, b"1")
    assert ord(" ") in allowed("tiny", grammar)


# The form of vLLM's examples, before which comments may have quotes.
QUERY = r"""
# one of "these"
root ::= "SELECT " column (", " column)? " FROM " [a-c]{2} " WHERE " column " = " number
column ::= "col_1" | "col_2"
number ::= "-"? [0-9] | "\u00e9a" | "\u0041a"
"""


def test_gbnf_gives_its_sentences(name):
    column = "col_[12]"
    form = rf"SELECT {column}(, {column})? FROM [a-c]{{2}} WHERE {column} = (-?\d|éa|Aa)"
    texts = [walk(name, {"grammar": QUERY}, seed) for seed in range(15)]
    assert all(re.fullmatch(form, text) for text in texts), texts
    assert any("éa" in text for text in texts)


def test_colons_within_strings_are_no_gbnf():
    assert walk("tiny", {"grammar": '// root ::= "a"\nstart: "::=" /::=/'}, 0) == "::=::="


# -- ends -----------------------------------------------------------------------------------------


def test_text_ends_by_any_end_of_sequence_token(name):
    for token in ends(name):
        grammar = new(name, regex="ab?")
        assert not is_finished(grammar)
        with pytest.raises(RuntimeError, match=f"token {token} is not allowed"):
            accept(grammar, token)
        accept_bytes(name, grammar, b"a")
        assert not is_finished(grammar)
        assert allowed(name, grammar) >= ends(name)
        accept(grammar, token)
        assert is_finished(grammar)
        assert len(allowed(name, grammar)) == 32 * -(-(len(get_tokenizer(name)) + PADDING) // 32)
        accept(grammar, 0)  # the end was ignored
        assert is_finished(grammar)


def test_only_the_end_follows_a_text_that_cannot_go_on(name):
    grammar = new(name, regex="ab?")
    accept_bytes(name, grammar, b"ab")
    assert is_finished(grammar)
    assert allowed(name, grammar) == ends(name)


def test_dead_end_ends_the_text_with_a_warning(caplog):
    """Grammars may have rules that never end; the library finds that out on the way."""
    grammar = new("tiny", grammar='start: "a" x | "b"\nx: "c" y\ny: y "d"')
    accept_bytes("tiny", grammar, b"ac")
    assert allowed("tiny", grammar) == ends("tiny")
    assert is_finished(grammar)
    with caplog.at_level(logging.WARNING, "nanovllm"):
        accept(grammar, min(ends("tiny")))
    assert "a structured output is incomplete: no text matches it" in caplog.text
    assert len(allowed("tiny", grammar)) > 256


def test_limit_of_the_library_ends_the_text():
    """It is met by a token that the mask allows."""
    ambiguous = " | ".join(" ".join("s" * k) for k in range(2, 17))
    grammar = new("tiny", grammar=f'start: s\ns: "a" | {ambiguous}')
    while not grammar._matcher.is_error():
        assert allowed("tiny", grammar) - ends("tiny") == {ord("a")}
        accept(grammar, ord("a"))
    assert allowed("tiny", grammar) == ends("tiny")


def test_endless_text_does_not_hang():
    """Computing all text that is certain beforehand, the library would not return."""
    grammar = new("tiny", grammar="start: A A\nA: /a+/")
    for _ in range(50):
        assert allowed("tiny", grammar) == {ord("a")}
        accept(grammar, ord("a"))


LANGUAGE = ["a", "ab", "a!b", "ac!", "!d", "é!"]  # of which all but two need a "!"


@pytest.mark.parametrize("eos", [rare([33, 256, 258]), [33], rare([33, 98])], ids=str)
def test_ends_that_spell_text_are_no_text(eos, caplog):
    """Each mask is that of the texts, by brute force; a text that needs such a token ends early."""
    compiler = GrammarCompiler(get_tokenizer("tiny"), len(get_tokenizer("tiny")) + PADDING, eos)
    texts = [text.encode() for text in LANGUAGE]
    with caplog.at_level(logging.WARNING, "nanovllm"):
        masks = every_mask(compiler, choice=LANGUAGE)
    warnings = caplog.text.count("a structured output is incomplete: only an end-of-sequence")
    num_stuck = 0
    for path, tokens in masks.items():
        follow = {t for t in range(256) if any(x.startswith(path + bytes([t])) for x in texts)}
        follow -= set(eos)
        num_stuck += not follow and path not in texts
        assert tokens == (follow if follow and path not in texts else follow | set(eos)), path
        for token in range(len(get_tokenizer("tiny")) + PADDING):
            grammar = compiler.compile(StructuredOutputsParams(choice=LANGUAGE))
            accept_bytes("tiny", grammar, path)
            if token not in tokens:
                with pytest.raises(RuntimeError, match=f"token {token} is not allowed"):
                    accept(grammar, token)
            else:
                accept(grammar, token)
                assert grammar._has_ended == (token in eos)
    assert warnings == num_stuck == 2, "after 'ac' and 'é'"


@pytest.mark.parametrize("eos", [[33, 256, 258], [33]], ids=str)
def test_ends_that_spell_text_are_text_where_ends_are_ignored(eos):
    compiler = GrammarCompiler(get_tokenizer("tiny"), len(get_tokenizer("tiny")) + PADDING, eos)
    texts = [text.encode() for text in LANGUAGE]
    masks = every_mask(compiler, ignore_eos=True, choice=LANGUAGE)
    assert masks.keys() == {text[:i] for text in texts for i in range(len(text) + 1)}
    for path, tokens in masks.items():
        follow = {t for t in range(256) if any(x.startswith(path + bytes([t])) for x in texts)}
        silent = tokens - set(range(256))
        assert tokens - silent == follow
        assert bool(silent) == (path in texts)
        assert silent <= set(get_tokenizer("tiny").all_special_ids)
        grammar = compiler.compile(StructuredOutputsParams(choice=LANGUAGE), ignore_eos=True)
        accept_bytes("tiny", grammar, path)
        if silent:
            accept(grammar, min(silent))
            assert len(allowed("tiny", grammar)) >= len(get_tokenizer("tiny")) + PADDING


def test_limit_of_the_library_ends_a_text_whose_ends_spell_text(caplog):
    compiler = GrammarCompiler(get_tokenizer("tiny"), len(get_tokenizer("tiny")) + PADDING, [33])
    ambiguous = " | ".join(" ".join("s" * k) for k in range(2, 17))
    form = StructuredOutputsParams(grammar=f'start: s\ns: "a" | {ambiguous}')
    grammar = compiler.compile(form)
    while allowed("tiny", grammar) - {33}:
        accept(grammar, ord("a"))
    assert allowed("tiny", grammar) == {33}
    assert caplog.text.count("a structured output is incomplete") == 1
    accept(grammar, 33)
    assert len(allowed("tiny", grammar)) > 256


# -- long lists -----------------------------------------------------------------------------------


def many(num: int) -> list[str]:
    """Distinct strings, some of which begin others."""
    rng = random.Random(num)
    texts: dict[str, None] = {}
    while len(texts) < num:
        stem = rng.choice(["", "item ", "Öl", '"\\', "größer"])
        texts[stem + "".join(rng.choices("abc 0/é😀", k=rng.randint(1, 9)))] = None
    return list(texts)


@pytest.mark.parametrize("num", [2500, rare(10_000)])
def test_one_of_many_choices_comes_and_any_can(num, name):
    """More than the parser of the library has room for in a row."""
    choices = many(num)
    known = set(choices)
    for seed in range(30):
        assert walk(name, {"choice": choices}, seed) in known
    texts = [text.encode() for text in choices[:: num // 200]]
    tokens = {piece: token for token, piece in get_pieces(name).items() if len(piece) == 1}
    grammars = [new(name, choice=choices) for _ in texts]
    for i in range(max(map(len, texts))):
        live = [(g, text) for g, text in zip(grammars, texts, strict=True) if i < len(text)]
        accept_tokens([g for g, _ in live], [tokens[text[i : i + 1]] for _, text in live])
    for grammar, text in zip(grammars, texts, strict=True):
        assert ends(name) <= allowed(name, grammar), text


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ([str(i) for i in range(20_001)], "20,000 strings with .*, got 20,001 with 88,895"),
        (
            ["é" * 600, *("x" * 600 for _ in range(1746))],
            "1,048,576 bytes.*, got 1,747 with 1,048,800",
        ),
    ],
    ids=["number", "bytes"],
)
def test_too_long_a_list_is_refused_by_its_size(choice, message):
    """Before anything is compiled, which would take long to fail."""
    with pytest.raises(ValueError, match=f"^`choice` must have at most .*{message}$"):
        StructuredOutputsParams(choice=choice)
    grammar = new("tiny", choice=choice[:-1])  # and one less is taken
    accept_bytes("tiny", grammar, choice[-2].encode())
    assert ends("tiny") <= allowed("tiny", grammar)


# -- batches and the cache ------------------------------------------------------------------------


def test_rows_of_a_batch_are_what_each_alone_has(name):
    forms = [{"json": SCHEMAS[0]}, {"choice": CHOICES}, {"json": SCHEMAS[0]}, {"regex": "a*"}] * 4
    grammars, twins = ([new(name, **form) for form in forms] for _ in range(2))
    stuck = new(name, grammar='start: "a" x | "b"\nx: "c" y\ny: y "d"')
    accept_bytes(name, stuck, b"ac")
    for grammar in grammars[3:8:4] + twins[3:8:4]:
        accept_bytes(name, grammar, b"aa")
    accept_tokens([grammars[3], twins[3]], [min(ends(name))] * 2)
    words = -(-(len(get_tokenizer(name)) + PADDING) // 32)
    rng = random.Random(0)
    for _ in range(5):
        alone = np.zeros((len(grammars) + 1, words), np.int32)
        for row, grammar in zip(alone, [*twins, stuck], strict=True):
            fill_masks([grammar], row[np.newaxis])
        masks = np.full_like(alone, -2)
        fill_masks([*grammars, stuck], masks)
        assert (masks == alone).all()
        drawn = [rng.choice(sorted(allowed(name, twin))) for twin in twins]
        accept_tokens(grammars, drawn)
        for twin, token in zip(twins, drawn, strict=True):
            accept(twin, token)
    fill_masks([], np.zeros((0, words), np.int32))


@pytest.fixture(name="compiled")
def compiled_fixture(monkeypatch):
    """Counts what is compiled, for one thread."""
    monkeypatch.setattr(structured_output, "NUM_THREADS", 1)
    new_matcher = GrammarCompiler._new_matcher
    mock = Mock(side_effect=lambda lark: new_matcher(get_compiler("tiny"), lark))
    monkeypatch.setattr(GrammarCompiler, "_new_matcher", mock)
    return mock


def new_compiler() -> GrammarCompiler:
    tokenizer = get_tokenizer("tiny")
    return GrammarCompiler(tokenizer, len(tokenizer) + PADDING, ends("tiny"))


def test_what_was_compiled_is_kept_and_no_state_shared(compiled, monkeypatch):
    monkeypatch.setattr(structured_output, "MAX_CACHED", 3)
    lark = Mock(wraps=structured_output._lark)
    monkeypatch.setattr(structured_output, "_lark", lark)
    compiler = new_compiler()
    first, second = (compiler.compile(StructuredOutputsParams(regex="ab")) for _ in range(2))
    assert compiled.call_count == 1
    assert lark.call_count == 1, "nor is its text made again"
    accept_bytes("tiny", first, b"a")
    assert [allowed("tiny", g) for g in (first, second)] == [{ord("b")}, {ord("a")}]
    compiler.compile(StructuredOutputsParams(choice=["ab"]))  # another form of the same text
    assert compiled.call_count == 2
    for i in range(10):
        compiler.compile(StructuredOutputsParams(regex="ab"))  # used again and again
        compiler.compile(StructuredOutputsParams(regex=f"a{i}"))
    assert compiled.call_count == 12
    compiler.compile(StructuredOutputsParams(choice=["ab"]))  # forgotten
    assert compiled.call_count == 13
    assert allowed("tiny", second) == {ord("a")}


def test_kept_forms_are_bounded_by_their_size(compiled, monkeypatch):
    """And one that is larger than that is kept, too, while it is the last."""
    monkeypatch.setattr(structured_output, "MAX_CACHED_BYTES", 3000)
    forms = [StructuredOutputsParams(choice=[f"{i}{'x' * 900}"]) for i in range(9)]
    large = StructuredOutputsParams(choice=["y" * 5000])
    compiler = new_compiler()
    for form, num in [(forms[0], 1), (forms[1], 2), (forms[2], 3), (forms[0], 3), (forms[3], 4)]:
        compiler.compile(form)
        assert compiled.call_count == num
    compiler.compile(forms[1])  # the one that was used least lately
    assert compiled.call_count == 5
    for _ in range(4):
        compiler.compile(large)
    assert compiled.call_count == 6
    for form in forms[:3] * 2:
        compiler.compile(form)
    assert compiled.call_count == 9


def test_each_thread_has_a_matcher(compiled, monkeypatch):
    """Copies of one wait for each other. Of large forms there are fewer, so that they stay."""
    monkeypatch.setattr(structured_output, "NUM_THREADS", 4)
    monkeypatch.setattr(structured_output, "MAX_CACHED_BYTES", 3000)
    compiler = new_compiler()
    used = [compiler.compile(StructuredOutputsParams(json_object=True)) for _ in range(12)]
    assert compiled.call_count == 4
    matchers = [id(grammar._compiled) for grammar in used]
    assert matchers == matchers[:4] * 3
    for _ in range(12):
        compiler.compile(StructuredOutputsParams(regex="x" * 1400))
    assert compiled.call_count == 6


# -- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"regex": "("}, "'(': regex parse error: unclosed group"),
        ({"regex": "(?=a)"}, "'(?=a)': regex parse error: look-around, including look-ahead"),
        ({"regex": "[a&&b]"}, "'[a&&b]': no text matches it"),
        ({"regex": "\ud800"}, "surrogates not allowed"),
        ({"regex": "a\\"}, "'a\\\\': a backslash at the end escapes nothing"),
        ({"regex": "(a|\\\\\\"}, "a backslash at the end escapes nothing"),
        ({"regex": "a/)(/"}, "regex parse error: unopened group"),
        ({"regex": "(" * 5000}, "'((((((((((((...(((((((((((((': regex parse error: "),
        ({"choice": ["\ud800"]}, "error parsing string"),
        ({"json": {"type": "foo"}}, """'{"type": "foo"}': Invalid type: foo"""),
        ({"json": '{"maximum": NaN}'}, 'failed to parse "%json"'),
        ({"json": {"$ref": "https://x.org/y"}}, "retriever does not fetch"),
        ({"json": {"x-guidance": 5}}, "'int' object is not a mapping"),
        ({"grammar": ""}, "'': no start rule found"),
        ({"grammar": 'a: "a"\nstart: b'}, 'line 2, column 8: unknown name: "b"'),
        ({"grammar": "start: A\nA: /(/"}, "line 2, column 4: invalid regex"),
        ({"grammar": "root ::= x"}, "'root ::= x': Rule 'x' not found"),
        ({"grammar": 'root ::= "a'}, "Unexpected end of input at line 1"),
        ({"grammar": "root ::= root"}, "'root ::= root': no text matches it"),
        ({"grammar": "start: start"}, "'start: start': no text matches it"),
    ],
)
def test_bad_forms_are_refused_in_one_sentence(form, message):
    for _ in range(2):  # a refusal is not kept as if it were a grammar
        with pytest.raises(ValueError) as error:
            new("tiny", **form)
        text = str(error.value)
        assert text.startswith(f"`{next(iter(form))}` must be supported by llguidance, got ")
        assert message in text
        assert "\n" not in text
        assert len(text) < 500


def word_level() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "</s>": 1}, unk_token="a"))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


@pytest.mark.parametrize(
    ("tokenizer", "vocab_size", "eos", "message"),
    [
        (lambda: None, 272, [258], "for a model without tokenizer"),
        (lambda: get_tokenizer("tiny"), 272, [], "it has no end-of-sequence token to end"),
        (lambda: get_tokenizer("tiny"), 272, [271], "it has no end-of-sequence token to end"),
        (lambda: get_tokenizer("tiny"), 200, [258], "vocab size too small; 200 vs 259"),
        (word_level, 2, [1], "a [A-Za-z]+: can't determine decoder type"),
        (object, 2, [1], "with this tokenizer, a object: 'object' object has no attribute"),
    ],
)
def test_models_without_the_means_are_refused(tokenizer, vocab_size, eos, message):
    compiler = GrammarCompiler(tokenizer(), vocab_size, eos)
    with pytest.raises(ValueError, match=f"`structured_outputs` must be None .*{message}"):
        compiler.compile(StructuredOutputsParams(regex="a"))


def test_ends_beyond_the_tokenizer_are_never_allowed():
    tokenizer = get_tokenizer("tiny")
    compiler = GrammarCompiler(tokenizer, len(tokenizer) + PADDING, [258, 265, 10_000])
    grammar = compiler.compile(StructuredOutputsParams(regex="a?"))
    assert allowed("tiny", grammar) == {258, ord("a")}


def test_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    compiler = GrammarCompiler(get_tokenizer("tiny"), 272, [258])
    with pytest.raises(ImportError, match='pip install "llguidance'):
        compiler.compile(StructuredOutputsParams(regex="a"))


def test_nothing_is_read_ahead_without_the_means(monkeypatch):
    GrammarCompiler(None, 272, [258]).prepare()
    monkeypatch.setitem(sys.modules, "llguidance", None)
    GrammarCompiler(get_tokenizer("tiny"), 272, [258]).prepare()


def test_threads_compile_side_by_side(monkeypatch):
    """Requests are checked before they wait for their turn: "OrderedDict mutated during iteration"
    came out of `chat`.
    """
    monkeypatch.setattr(GrammarCompiler, "_new_matcher", lambda *_: Mock())
    compiler = GrammarCompiler(get_tokenizer("tiny"), 272, [258])
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:

        def work(thread):
            for i in range(300):
                compiler.compile(StructuredOutputsParams(regex=f"{thread} {i % 150}"))

        in_threads(6, work)
    finally:
        sys.setswitchinterval(interval)


@pytest.mark.parametrize("kind", ["rules", "references"])
def test_deep_forms_are_compiled_in_a_thread_of_a_small_stack(kind):
    """The library reads them by recursion: on a usual stack the process would end."""
    chained = range(5000)
    if kind == "rules":
        lines = ["start: r0", *(f"r{i}: r{i + 1}" for i in chained), 'r5000: "a"']
        form = {"grammar": "\n".join(lines)}
    else:
        refs = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in chained}
        form = {"json": {"$ref": "#/$defs/d0", "$defs": {**refs, "d5000": {"const": "a"}}}}
    before = threading.stack_size()
    threads = [threading.Thread(target=lambda: made.append(new("tiny", **form))) for _ in range(2)]
    made: list[Grammar] = []
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert threading.stack_size() == before
    texts = [bytes([token]) for token in allowed("tiny", made[0])]
    assert len(made) == 2 and texts == ([b"a"] if kind == "rules" else [b'"'])


def test_the_longest_form_has_a_bound():
    with pytest.raises(ValueError, match="at most 1,048,576"):
        new("tiny", grammar="a" * (1 << 20) + "a")
