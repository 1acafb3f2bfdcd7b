"""The text of a growing completion, against `tokenizer.decode` of all its tokens."""

import codecs
import functools
from os.path import commonprefix
from typing import Any

import pytest
import transformers
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from checkpoints import TINY, rare, with_rare
from nanovllm.requests import detokenizer
from nanovllm.requests.detokenizer import Detokenizer
from nanovllm.requests.request import Decoder
from nanovllm.requests.text import as_text

FFFD = "\ufffd"
BYTES = bytes_to_unicode()  # how byte-level tokens are written
BYTE_OF = {token: byte for byte, token in BYTES.items()}
SPECIAL, ADDED = "<|end|>", "<tool>"


# -- tokenizers -----------------------------------------------------------------------------------


def wrap(tokenizer: Tokenizer, **options: Any) -> Any:
    """A tokenizer of transformers with a special token, and an added one that is not."""
    tokenizer.add_tokens([ADDED, AddedToken("reserved", special=True)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=SPECIAL, **options
    )


def byte_level() -> Any:
    """A tokenizer like Qwen's. Some tokens begin or end within a character."""
    words = ["he", "the", " the", "lo", "\n\n", "  ", "é", "stop", FFFD, b"\xf0\x9f", b"\x98\x80 x"]
    pieces = [word if isinstance(word, bytes) else word.encode() for word in words]
    vocab = [*BYTES.values(), *("".join(BYTES[b] for b in piece) for piece in pieces)]
    ids = {token: i for i, token in enumerate(dict.fromkeys(vocab))}
    merges = [("h", "e"), ("l", "o"), (BYTES[0xF0], BYTES[0x9F])]
    tokenizer = Tokenizer(models.BPE(ids, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return wrap(tokenizer)


PIECES = ["▁", "▁▁", "▁the", "▁a", "a", "the", ".", "▁.", "n", "'", "t", "▁n", "é", "€", FFFD, "日"]
BYTE_PIECES = [f"<0x{byte:02X}>" for byte in range(256)]


def metaspace(pieces: list[str] = PIECES) -> Any:
    """A tokenizer like Llama 2's: leading spaces, and bytes where no piece fits."""
    vocab = {piece: i for i, piece in enumerate(["<unk>", *BYTE_PIECES, *pieces])}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
    return wrap(tokenizer)


def unigram(**options: Any) -> Any:
    """A tokenizer like T5's, but with bytes where no piece fits."""
    vocab = [(piece, -1.0) for piece in ["<unk>", *BYTE_PIECES, *PIECES]]
    tokenizer = Tokenizer(models.Unigram(vocab, 0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return wrap(tokenizer, **options)


def word_piece() -> Any:
    """A tokenizer like BERT's."""
    pieces = [
        "[UNK]",
        "do",
        "##ing",
        "n",
        "'",
        "t",
        "s",
        "ve",
        ".",
        ",",
        "?",
        "##s",
        "it",
        "日",
        "é",
    ]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return wrap(tokenizer)


class SlowBytes(transformers.PreTrainedTokenizer):
    """Written in Python; each token is a byte."""

    errors: str

    @property
    def vocab_size(self) -> int:
        return 256

    def get_vocab(self) -> dict[str, int]:
        return {**BYTE_OF, **self.added_tokens_encoder}

    def _convert_token_to_id(self, token: str) -> int | None:
        return BYTE_OF.get(token)

    def _convert_id_to_token(self, index: int) -> str:
        return BYTES[index]

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        return [BYTES[byte] for byte in text.encode()]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return bytes(BYTE_OF[char] for char in "".join(tokens)).decode(errors=self.errors)


codecs.register_error("each", lambda error: (FFFD * (error.end - error.start), error.end))


def slow(errors: str) -> Any:
    """A slow tokenizer: U+FFFD per wrong character, as GPT-2's, or per byte, as sentencepiece."""
    tokenizer = SlowBytes(eos_token=SPECIAL)
    tokenizer.errors = errors
    tokenizer.add_tokens([ADDED])
    return tokenizer


TOKENIZERS = {
    "tiny": lambda: transformers.AutoTokenizer.from_pretrained(TINY),
    "byte_level": byte_level,
    "metaspace": metaspace,
    "unigram": unigram,
    "word_piece": word_piece,
    "slow": lambda: slow("replace"),
    "slow_each": lambda: slow("each"),
    "slow_ignoring": lambda: transformers.ByT5Tokenizer(extra_ids=0),  # leaves wrong bytes out
}
RUNS = ("metaspace", "unigram")  # decode bytes in a row together


@functools.cache
def get(name: str) -> Any:
    return TOKENIZERS[name]()


def encode(name: str, text: str) -> list[int]:
    return get(name).encode(text, add_special_tokens=False)


def byte_ids(name: str, *values: int) -> list[int]:
    if name == "slow_ignoring":
        return [value + 3 for value in values]
    names = BYTE_PIECES if name in RUNS else BYTES
    return get(name).convert_tokens_to_ids([names[value] for value in values])


TEXTS = [
    *("hello", " the", "stop", "a\u0301\u0302", "👩‍👩‍👧", "日本", "שלום", " مرحبا", FFFD, "é€😀"),
    *("  ", "\n", " n ' t", " ' s .", "do n't", "it 's ,", "\x00", "<tool>"),
]


@st.composite
def token_ids(draw: st.DrawFn, name: str, max_size: int = 14) -> list[int]:
    """Pieces of text, single tokens of any kind, often bytes, and the same again and again."""
    size = num_tokens(name)
    token = st.integers(0, size - 1)
    kinds = [
        st.sampled_from(TEXTS).map(lambda text: encode(name, text)),
        st.text(max_size=4).map(lambda text: encode(name, text)),
        token.map(lambda t: [t]),
        st.integers(max(0, size - 30), size - 1).map(lambda t: [t]),  # the special ones among them
        st.tuples(token, st.integers(2, 40)).map(lambda pair: [pair[0]] * pair[1]),
    ]
    if name != "word_piece":
        byte_value = st.sampled_from(
            [0x20, 0x41, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x98, 0xFF, 0xEF, 0xBF]
        )
        several = st.lists(byte_value, min_size=1, max_size=8)
        kinds.append(several.map(lambda values: byte_ids(name, *values)))
    return [t for part in draw(st.lists(st.one_of(kinds), max_size=max_size)) for t in part]


def num_tokens(name: str) -> int:
    """Number of token ids to try, with two unknown to the tokenizer if it accepts them."""
    return len(get(name)) + (0 if name.startswith("slow") else 2)


def feed(detokenizer: Detokenizer, ids: list[int], min_tokens: int = 0) -> tuple[str | None, int]:
    """Append until a stop string is found. Returns it, and how many tokens there were."""
    for n, token in enumerate(ids, 1):
        stop = detokenizer.append(token, may_stop=n > min_tokens)
        if stop is not None:
            return stop, n
    return None, len(ids)


# -- the text -------------------------------------------------------------------------------------


def check_text(name: str, ids: list[int], skip: bool) -> None:
    tokenizer = get(name)
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    taken = ""
    for n, token in enumerate(ids, 1):
        assert detokenizer.append(token) is None
        taken += detokenizer.take()
        assert detokenizer.text.startswith(taken)
        if name not in RUNS:
            decoded = as_text(tokenizer, ids[:n], skip)
            assert detokenizer.text == decoded[: len(detokenizer.text)]
            assert decoded[len(detokenizer.text) :] in ("", FFFD, FFFD * 2, FFFD * 3)
    detokenizer.finish()
    taken += detokenizer.take()
    assert detokenizer.text == taken == as_text(tokenizer, ids, skip)
    assert detokenizer.take() == ""


@pytest.mark.parametrize("name", with_rare(TOKENIZERS, "slow_each", "slow_ignoring"))
def test_text_is_that_of_decode(name):
    @settings(max_examples=50, deadline=None, derandomize=True)
    @given(token_ids(name), st.booleans())
    def check(ids, skip):
        check_text(name, ids, skip)

    check()


@pytest.mark.parametrize("name", ["byte_level", "tiny", "metaspace", "slow_each"])
@pytest.mark.parametrize("skip", [True, False])
def test_special_tokens(name, skip):
    """Within a character, at the beginning before a space, and very many."""
    end = get(name).eos_token_id
    check_text(name, [end, *encode(name, " the")], skip)
    check_text(name, [*[end] * 100, *encode(name, " the")], skip)
    check_text(name, [*[end] * 3, *byte_ids(name, *b" a")], skip)
    check_text(name, [*byte_ids(name, 0xE2), *[end] * 50, *byte_ids(name, 0x82, 0xAC)], skip)


@pytest.mark.parametrize("name", ["byte_level", "metaspace", "unigram"])
def test_a_special_token_that_the_configuration_does_not_name(name):
    reserved = get(name).convert_tokens_to_ids("reserved")
    assert reserved not in get(name).all_special_ids
    ids = [*byte_ids(name, 0xE2), *[reserved] * 50, *byte_ids(name, 0x82, 0xAC)]
    check_text(name, ids, True)
    check_text(name, ids, False)


@pytest.mark.parametrize("name", ["metaspace", "unigram"])
def test_only_the_first_space_is_stripped(name):
    """A window without the text before would begin with spaces of its own."""
    spaces = get(name).convert_tokens_to_ids(["▁"]) * 40
    check_text(name, [*spaces, *encode(name, "the"), *spaces], True)
    check_text(name, [*spaces[:1], *[get(name).eos_token_id] * 60, *spaces], True)


def test_a_wrong_byte_takes_its_run_along():
    ids = byte_ids("metaspace", *b"ab", 0xFF, *b"cd" * 30)
    detokenizer = Detokenizer(get("metaspace"))
    feed(detokenizer, ids[:2])
    assert detokenizer.text == "ab" and detokenizer.take() == ""
    feed(detokenizer, ids[2:])
    assert detokenizer.text == detokenizer.take() == FFFD * 63
    check_text("metaspace", [*encode("metaspace", "a"), *ids, *encode("metaspace", "a")], True)
    check_text("metaspace", byte_ids("metaspace", *"é€😀".encode() * 30, 0xE2), True)


def test_a_stripped_space_of_a_run_is_never_shown():
    detokenizer = Detokenizer(get("metaspace"), [" a"])
    assert feed(detokenizer, byte_ids("metaspace", *b" a b")) == (None, 4)
    assert detokenizer.text == "a b"


def test_a_decoder_that_takes_text_back_stops_nobody():
    """It has no right text while it grows; the library's stream raises an error."""
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "b": 2, "c": 3}, "<unk>"))
    tokenizer.decoder = decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "-")])
    detokenizer, ids = Detokenizer(wrap(tokenizer)), [3, 1, 2, 3, 3]
    assert tokenizer.decode(ids) == "c-cc"
    feed(detokenizer, ids)
    detokenizer.finish()
    assert detokenizer.text == "cacc"


def test_spaces_are_not_cleaned_up():
    """`clean_up_tokenization_spaces` would delete them, in code too; transformers 5 does not do it
    for BPE any more.
    """
    tokenizer = unigram(clean_up_tokenization_spaces=True)
    ids = tokenizer.convert_tokens_to_ids(["a", "▁.", "▁n"])
    assert (tokenizer.decode(ids), Decoder(tokenizer)(ids, True)) == ("a. n", "a . n")
    detokenizer = Detokenizer(tokenizer)
    feed(detokenizer, ids)
    assert detokenizer.text == "a . n"


# -- after a prompt -------------------------------------------------------------------------------


def check_behind(name: str, prompt: list[int], ids: list[int], skip: bool) -> None:
    """The text is what the tokens add to that of all tokens of the prompt. Only where wrong bytes
    of either would spoil the other, in a run over the border, each is on its own.
    """
    tokenizer = get(name)
    before, whole = as_text(tokenizer, prompt, skip), as_text(tokenizer, [*prompt, *ids], skip)
    decoder = Decoder(tokenizer)
    context = decoder.context(prompt, skip)
    added = decoder(ids, skip, context)
    blanks = tokenizer.convert_tokens_to_ids(["▁", "<0x20>"])  # show nothing alone
    shown = [t for t in prompt if as_text(tokenizer, [t], skip) or t in blanks]
    is_in_run = name in RUNS and shown and tokenizer.convert_ids_to_tokens(shown[-1]) in BYTE_PIECES
    if not is_in_run or FFFD not in before + whole:
        assert added == whole[len(commonprefix([before, whole])) :]  # noqa: RUF071 - no paths
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip, context=context)
    assert detokenizer.text == detokenizer.take() == ""
    taken = ""
    for token in ids:
        detokenizer.append(token)
        taken += detokenizer.take()
        assert detokenizer.text.startswith(taken)
    detokenizer.finish()
    assert taken + detokenizer.take() == detokenizer.text == added


@pytest.mark.parametrize("name", with_rare(TOKENIZERS, "slow_each", "slow_ignoring"))
def test_text_behind_a_prompt_is_what_it_adds(name):
    @settings(max_examples=75, deadline=None, derandomize=True)
    @given(token_ids(name, 4), token_ids(name, 6), st.booleans())
    def check(prompt, ids, skip):
        check_behind(name, prompt, ids, skip)

    check()


@pytest.mark.parametrize("name", ["metaspace", "unigram"])
@pytest.mark.parametrize("skip", [True, False])
def test_the_first_space_of_a_completion(name, skip):
    """A space after any text, and none where the text begins."""
    the, space, end = get(name).convert_tokens_to_ids(["▁the", "▁", SPECIAL])
    for prompt in ([the], [space], [the, *[end] * 40], byte_ids(name, *b"ab"), [end, space]):
        context = Decoder(get(name)).context(prompt, skip)
        detokenizer = Detokenizer(get(name), [" the"], skip_special_tokens=skip, context=context)
        assert Decoder(get(name))([the], skip, context) == " the"
        assert detokenizer.append(the) == " the", prompt
    check_behind(name, [end] * 9, [the], skip)
    assert Decoder(get(name))([the], True, Decoder(get(name)).context([end] * 9, True)) == "the"
    kept = Decoder(get(name)).context([end] * 9, True, keeps_first_space=True)
    assert Decoder(get(name))([the], True, kept) == " the"


@pytest.mark.parametrize("name", ["tiny", "byte_level", "metaspace", "slow"])
def test_a_character_goes_on_behind_the_prompt(name):
    """Also where the prompt ends in many special tokens, or in a long run of bytes."""
    end = [get(name).eos_token_id] * 40
    euro = byte_ids(name, *"€".encode())
    letters = byte_ids(name, *b"ab" * 40)
    for prompt, rest in [
        (euro[:1], euro[1:]),
        (euro[:2], euro[2:]),
        ([*euro[:2], *end], euro[2:]),
        ([euro[0], *end, euro[1]], euro[2:]),
        ([*letters, *euro[:1]], euro[1:]),
    ]:
        check_behind(name, prompt, [*rest, *letters[:3]], True)
        check_behind(name, prompt, letters[:3], True)
        context = Decoder(get(name)).context(prompt, True)
        assert Decoder(get(name))([*rest, *letters[:1]], True, context) == "€a"
    wrong = byte_ids(name, 0x41, 0xFF, 0x42)
    check_behind(name, letters, wrong, True)
    context = Decoder(get(name)).context(letters, True)
    assert Decoder(get(name))(wrong, True, context) in (FFFD * 3, f"A{FFFD}B")


def test_a_letter_of_bytes_does_not_stand_before_bytes():
    """It would be wrong with them, and then right with them: text that is added."""
    tokenizer = metaspace(["▁"])
    euro = tokenizer.convert_tokens_to_ids([BYTE_PIECES[byte] for byte in "€".encode()])
    context = Decoder(tokenizer).context(euro[:1], True)
    assert Decoder(tokenizer)(euro[1:], True, context) == "€"


def test_a_long_prompt_costs_a_few_tokens():
    for name in TOKENIZERS:
        tokenizer = Counting(get(name))
        decoder = Decoder(tokenizer)
        text = encode(name, "it ' . n")
        many = text * 500
        assert decoder.context(many, True) == many[-1:] and tokenizer.count <= 4
        for last in (FFFD, " "):
            tokenizer.count = 0
            decoder.context([*many, *encode(name, last) * 2], True)
            assert tokenizer.count <= 60, (name, last)
        tokenizer.count = 0
        assert decoder.context([*many[:-3], *many[-1:]], True) == many[-1:]
        assert tokenizer.count == 0, "known from before"
        if name in RUNS:  # one of bytes may be wrong from its first on
            decoder.context(byte_ids(name, *b"ab" * 500), True)
            assert tokenizer.count <= 60


def test_texts_of_single_tokens_are_those_within_a_text():
    ids = get("metaspace").convert_tokens_to_ids(["▁the", "the", "▁", "<0x20>", "<0xE2>", SPECIAL])
    texts = [Decoder(get("metaspace")).token(token) for token in ids]
    assert texts == [" the", "the", " ", " ", FFFD, SPECIAL]
    for name in ("byte_level", "slow", "tiny"):  # the same as alone
        decoder = Decoder(get(name))
        for token in range(len(get(name))):
            assert decoder.token(token) == as_text(get(name), [token], False)


# -- streaming ------------------------------------------------------------------------------------


def test_a_character_comes_with_its_last_byte():
    detokenizer = Detokenizer(get("tiny"))
    texts = []
    for token in encode("tiny", "a€b"):
        detokenizer.append(token)
        assert detokenizer.text == "".join(texts) + detokenizer.take()
        texts.append(detokenizer.text[sum(map(len, texts)) :])
    assert texts == ["a", "", "", "€", "b"]


def test_incomplete_bytes_become_replacement_characters_in_the_end():
    detokenizer = Detokenizer(get("tiny"))
    feed(detokenizer, byte_ids("tiny", *b"a\xf0\x9f\x98"))
    assert detokenizer.take() == detokenizer.text == "a"
    detokenizer.finish()
    detokenizer.finish()
    assert detokenizer.take() == FFFD and detokenizer.text == "a" + FFFD


@pytest.mark.parametrize("name", ["tiny", "slow_each", "metaspace"])
@pytest.mark.parametrize("values", [[0xFF], [0x80], [0xE2], [0xE2, 0x82], [0xF0, 0x9F, 0x98]])
def test_wrong_bytes_do_not_block_the_stream(name, values):
    detokenizer = Detokenizer(get(name))
    taken = ""
    for n in range(1, 40):
        feed(detokenizer, byte_ids(name, *values))
        taken += detokenizer.take()
        assert taken == detokenizer.text == FFFD * len(taken)
        assert len(taken) >= n - 3


class Counting:
    """A tokenizer that counts the tokens it decodes, by itself and for `CountingStream`."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.count = 0
        if hasattr(tokenizer, "backend_tokenizer"):
            self.backend_tokenizer = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def decode(self, ids: list[int], **options: Any) -> str:
        self.count += len(ids)
        return self.tokenizer.decode(ids, **options)


class CountingStream:
    """`DecodeStream` in Python."""

    def __init__(self, skip_special_tokens: bool) -> None:
        self.skip, self.ids, self.prefix, self.num_prefix = skip_special_tokens, [], "", 0

    def step(self, tokenizer: Counting, token_id: int) -> str | None:
        if self.ids and not self.prefix:
            text = tokenizer.decode(self.ids, skip_special_tokens=self.skip)
            if not text.endswith(FFFD):
                self.prefix, self.num_prefix = text, len(self.ids)
        self.ids.append(token_id)
        text = tokenizer.decode(self.ids, skip_special_tokens=self.skip)
        if len(text) <= len(self.prefix) or text.endswith(FFFD):
            return None
        assert text.startswith(self.prefix)
        new = text[len(self.prefix) :]
        self.ids, self.num_prefix = self.ids[self.num_prefix :], len(self.ids) - self.num_prefix
        self.prefix = tokenizer.decode(self.ids, skip_special_tokens=self.skip)
        return new


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_token_costs_the_same_everywhere(name, monkeypatch):
    """Also of endless wrong bytes, special tokens, unknown ones, spaces and byte runs."""
    monkeypatch.setattr(detokenizer, "DecodeStream", CountingStream)
    size, tokenizer = len(get(name)), Counting(get(name))
    endless = [encode(name, "the n ' t ."), encode(name, "  "), [size - 1]]
    endless += [[token] for token in (get(name).eos_token_id,) if token is not None]
    if not name.startswith("slow"):
        endless.append([size + 5])
    if name != "word_piece":
        endless += [byte_ids(name, 0xFF), byte_ids(name, 0xE2), byte_ids(name, 0x41)]
    for ids in endless:
        for prefix in ([], ids * 2, encode(name, "it ' ")):
            tokenizer.count = 0
            growing = Detokenizer(tokenizer)
            tokens = [*prefix, *(ids * 400)[:400]]
            feed(growing, tokens)
            growing.finish()
            assert tokenizer.count <= 60 * len(tokens), (ids, prefix)
            assert tokenizer.count or not tokens


# -- stop strings ---------------------------------------------------------------------------------


def first_stop(
    name: str, ids: list[int], stop: list[str], min_tokens: int
) -> tuple[int, str, int, int] | None:
    """Number of tokens, stop string, its begin and end, by decoding every prefix."""
    seen = len(as_text(get(name), ids[:min_tokens], True).rstrip(FFFD))
    for n in range(min_tokens + 1, len(ids) + 1):
        text = as_text(get(name), ids[:n], True)
        places = [
            (begin + len(s), begin, s)
            for s in stop
            for begin in range(len(text))
            if text.startswith(s, begin) and begin + len(s) > seen
        ]
        if places:
            end, begin, s = min(places)
            return n, s, begin, end
    return None


def check_stops(
    name: str, ids: list[int], stop: list[str], include: bool, min_tokens: int = 0
) -> None:
    detokenizer = Detokenizer(get(name), stop, include)
    whole = as_text(get(name), ids, True)
    expected = first_stop(name, ids, stop, min_tokens)
    taken, found = "", None
    for n, token in enumerate(ids, 1):
        found = detokenizer.append(token, may_stop=n > min_tokens)
        taken += detokenizer.take()
        if found is not None:
            break
        held = detokenizer.text.removeprefix(taken)
        if include or name in RUNS:
            assert name in RUNS or held == ""
        else:
            assert not held or any(s.startswith(held) and s != held for s in stop)
    detokenizer.finish()
    taken += detokenizer.take()
    assert taken == detokenizer.text
    if expected is None:
        assert found is None and taken == whole
    else:
        n_tokens, string, begin, end = expected
        assert (found, n) == (string, n_tokens)
        text = as_text(get(name), ids[:n], True)
        assert taken == text[: end if include else begin]


@st.composite
def stops_in(draw: st.DrawFn, text: str) -> list[str]:
    """Parts of the text, parts that then go on differently, and letters."""
    text = text or "x"
    begin = st.integers(0, len(text) - 1)
    part = st.tuples(begin, st.integers(1, 6)).map(lambda p: text[p[0] : p[0] + p[1]])
    return draw(
        st.lists(
            st.one_of(part, part.map(lambda s: s + "~"), st.sampled_from("a t.\n")),
            min_size=1,
            max_size=4,
        )
    )


@pytest.mark.parametrize(
    "name", ["byte_level", rare("tiny"), "unigram", rare("slow_each"), rare("metaspace")]
)
def test_stop_strings_against_every_prefix(name):
    @settings(max_examples=50, deadline=None, derandomize=True)
    @given(st.data(), st.booleans(), st.integers(0, 12))
    def check(data, include, min_tokens):
        ids = data.draw(token_ids(name, 5))
        stop = data.draw(stops_in(as_text(get(name), ids, True)))
        # The oracle would take incomplete bytes for U+FFFD, which they are in the end only.
        assume(not any(FFFD in s for s in stop))
        check_stops(name, ids, stop, include, 0 if name in RUNS else min_tokens)

    check()


def run(name: str, text: str, *stop: str, include: bool = False, min_tokens: int = 0) -> Any:
    """The stop found, the number of tokens until then, and the text."""
    detokenizer = Detokenizer(get(name), stop, include)
    found, n = feed(detokenizer, encode(name, text), min_tokens)
    detokenizer.finish()
    assert detokenizer.take() == detokenizer.text
    return found, n, detokenizer.text


@pytest.mark.parametrize(
    ("text", "stop", "include", "expected"),
    [
        ("one two three", ["two"], False, ("two", 7, "one ")),  # over several tokens
        ("one two three", ["two"], True, ("two", 7, "one two")),
        ("one", ["o"], False, ("o", 1, "")),  # at the first token
        ("one", ["o"], True, ("o", 1, "o")),
        ("one", ["x"], False, (None, 3, "one")),
        ("a€b", ["€"], False, ("€", 4, "a")),  # of several tokens
        ("a€b", ["€"], True, ("€", 4, "a€")),
        ("a€b", ["b"], False, ("b", 5, "a€")),
        ("aaab", ["aab"], False, ("aab", 4, "a")),  # begins within its own beginning
        ("abcd", ["d", "bcx", "c"], False, ("c", 3, "ab")),  # of several the first to be complete
        ("abcd", ["c", "bc"], False, ("bc", 3, "a")),  # with the same last character
        ("abcd", ["bc", "c"], True, ("bc", 3, "abc")),
        ("abab", ["ab", "ab"], False, ("ab", 2, "")),
    ],
)
def test_stop_strings(text, stop, include, expected):
    assert run("tiny", text, *stop, include=include) == expected  # its tokens are bytes


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (["top"], ("top", "s")),  # within the one token
        (["t", "st"], ("st", "")),
        (["stop", "o"], ("o", "st")),  # as if its characters came one by one
        (["op", "to"], ("to", "s")),
        (["p!", "stop"], ("stop", "")),
    ],
)
def test_stop_strings_within_a_token(stop, expected):
    token = get("byte_level").convert_tokens_to_ids("stop")
    detokenizer = Detokenizer(get("byte_level"), stop)
    assert detokenizer.append(token) == expected[0]
    assert detokenizer.take() == detokenizer.text == expected[1]


def test_the_text_behind_a_stop_string_in_its_token_goes():
    ids = [*encode("byte_level", "a"), *get("byte_level").convert_tokens_to_ids(["stop"])]
    detokenizer = Detokenizer(get("byte_level"), ["as"], True)
    assert feed(detokenizer, ids) == ("as", 2)
    assert detokenizer.take() == detokenizer.text == "as"


def test_a_stop_string_ends_within_the_bytes_of_a_token():
    """The token has the second half of one character, and more."""
    name = "byte_level"
    tail = "".join(BYTES[byte] for byte in b"\x98\x80 x")
    ids = get(name).convert_tokens_to_ids(["a", BYTES[0xF0] + BYTES[0x9F], tail])
    for stop, text in ((["😀"], "a"), ([" "], "a😀"), (["a😀 "], ""), (["😀 x"], "a")):
        detokenizer = Detokenizer(get(name), stop)
        assert feed(detokenizer, ids) == (stop[0], 3)
        assert detokenizer.text == text


def test_a_beginning_of_a_stop_string_is_held_back():
    detokenizer = Detokenizer(get("tiny"), ["stop!", "ops"])
    taken = []
    for token in encode("tiny", "a stopop"):
        assert detokenizer.append(token) is None
        taken.append(detokenizer.take())
    assert taken == ["a", " ", "", "", "", "", "stop", ""]
    assert detokenizer.text == "a stopop"
    detokenizer.finish()
    assert detokenizer.take() == "op"


def test_nothing_is_held_back_that_stays_anyway():
    detokenizer = Detokenizer(get("tiny"), ["stop!"], True)
    for token, char in zip(encode("tiny", "a stop"), "a stop", strict=True):
        detokenizer.append(token)
        assert detokenizer.take() == char
    assert detokenizer.append(encode("tiny", "!")[0]) == "stop!"
    assert detokenizer.take() == "!" and detokenizer.text == "a stop!"


@pytest.mark.parametrize(
    ("text", "stop", "min_tokens", "expected"),
    [
        ("ab ab", ["ab"], 2, ("ab", 5, "ab ")),  # complete before: never looked for
        ("ab ab", ["ab"], 1, ("ab", 2, "")),  # begun before, complete after
        ("aaa", ["aa"], 2, ("aa", 3, "a")),
        ("ab", ["ab"], 2, (None, 2, "ab")),
        ("a€", ["€"], 3, ("€", 4, "a")),
    ],
)
def test_min_tokens(text, stop, min_tokens, expected):
    assert run("tiny", text, *stop, min_tokens=min_tokens) == expected


def test_a_stop_string_that_min_tokens_ignores_is_not_held_back():
    detokenizer = Detokenizer(get("tiny"), ["ab", "xxx"])
    assert feed(detokenizer, encode("tiny", "ab"), min_tokens=2) == (None, 2)
    assert detokenizer.take() == "ab"


def test_a_stop_string_in_a_byte_run():
    """The text is cut as it was, whatever the next bytes would have made of it."""
    detokenizer = Detokenizer(get("metaspace"), ["b"])
    assert feed(detokenizer, byte_ids("metaspace", *b"aab", 0xFF)) == ("b", 3)
    assert detokenizer.take() == detokenizer.text == "aa"


def test_nothing_follows_the_end():
    for end in ("finish", "stop"):
        detokenizer = Detokenizer(get("tiny"), ["b"])
        feed(detokenizer, encode("tiny", "ab" if end == "stop" else "a"))
        detokenizer.finish()
        with pytest.raises(AssertionError, match="ended"):
            detokenizer.append(1)
        assert detokenizer.take() == detokenizer.text == "a"
