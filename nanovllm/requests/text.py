"""Text of tokens: `Decoder`, and facts about a tokenizer that a `Detokenizer` needs."""

import codecs
import re
import string
from functools import cached_property
from os.path import commonprefix
from typing import Any

REPLACEMENT = "\ufffd"  # stands for bytes that are not UTF-8
MAX_INCOMPLETE = 3  # bytes of a character that lacks one more
CONTEXT = 6  # tokens that are decoded again; more than incomplete bytes can be
BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def as_text(tokenizer: Any, token_ids: list[int], skip_special_tokens: bool) -> str:
    """The text of tokens, without `clean_up_tokenization_spaces`, which some tokenizers ask for: it
    would delete spaces before punctuation, in code, too.
    """
    return tokenizer.decode(
        token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
    )


def is_left_out(tokenizer: Any, token_id: int, skip_special_tokens: bool) -> bool:
    """Whether the text lacks a token because it is special or unknown to the tokenizer."""
    if as_text(tokenizer, [token_id], skip_special_tokens):
        return False
    is_known = tokenizer.convert_ids_to_tokens(token_id) is not None
    return not is_known or bool(as_text(tokenizer, [token_id], skip_special_tokens=False))


def byte_of(token: str | None) -> bytes | None:
    """The byte that a byte token spells, such as `<0x0A>`; None for other tokens."""
    match = BYTE_TOKEN.fullmatch(token or "")
    return bytes.fromhex(match[1]) if match else None


def num_incomplete(run: bytes) -> int:
    """The number of bytes at the end that begin a UTF-8 character without completing it."""
    for count in range(1, min(MAX_INCOMPLETE, len(run)) + 1):
        try:
            if not codecs.getincrementaldecoder("utf-8")().decode(run[-count:]):
                return count
        except UnicodeDecodeError:
            continue
    return 0


def added_text(before: str, whole: str) -> str:
    """The end of `whole`, which tokens add to the text `before` them. It includes bytes that were
    incomplete before, as the character that they have become.
    """
    return whole[len(commonprefix([before, whole])) :]  # noqa: RUF071 - strings, not paths


class Decoder:
    """Text of tokens. The text of a completion is what it adds to the prompt's text: decoded alone,
    it would be the beginning of a text, where tokenizers like sentencepiece drop a space.

    Args:
        tokenizer: tokenizer of transformers; None: there is no text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}  # texts of single tokens, remembered
        self._sufficient: dict[tuple[int, bool], bool] = {}

    def __call__(
        self, token_ids: list[int], skip_special_tokens: bool, context: list[int] | None = None
    ) -> str:
        """The text of tokens, or the text that they add to that of the `context` before them."""
        if self._tokenizer is None:
            return ""
        if not context:
            return as_text(self._tokenizer, token_ids, skip_special_tokens)
        before = as_text(self._tokenizer, context, skip_special_tokens)
        whole = as_text(self._tokenizer, [*context, *token_ids], skip_special_tokens)
        return added_text(before, whole)

    def token(self, token_id: int) -> str | None:
        """The text of a token within a text, special tokens included."""
        if self._tokenizer is None:
            return None
        if token_id not in self._texts:
            self._texts[token_id] = self([token_id], False, self._letter)
        return self._texts[token_id]

    def context(
        self, prompt: list[int], skip_special_tokens: bool, *, keeps_first_space: bool = False
    ) -> list[int]:
        """The tokens after which to decode a completion: the last ones of the prompt, as many as
        affect its text. Most often that is one.

        Args:
            prompt: token ids of the prompt.
            skip_special_tokens: whether special tokens are left out of the text.
            keeps_first_space: whether, after a prompt without text, a letter takes its place, so
                that a completion keeps its leading space.
        """
        if self._tokenizer is None:
            return []
        if prompt and self._suffices(prompt[-1], skip_special_tokens):
            return prompt[-1:]
        tail: list[int] = []
        text = ""
        for token_id in reversed(prompt):
            if is_left_out(self._tokenizer, token_id, skip_special_tokens):
                continue
            tail.insert(0, token_id)
            text = as_text(self._tokenizer, tail, skip_special_tokens)
            has_character = text.strip(REPLACEMENT) or len(text) > MAX_INCOMPLETE
            if len(tail) == CONTEXT or (has_character and not self._bytes(tail[:1])):
                break
        if run := self._bytes(tail):
            # A run is right or wrong as a whole: complete characters in it must not share the fate
            # of later bytes. A letter takes their place.
            return [*self._letter, *tail[len(tail) - num_incomplete(run) :]]
        return self._letter if keeps_first_space and not text else tail

    def _suffices(self, token_id: int, skip: bool) -> bool:
        """Whether a token alone is enough context for later ones. Remembered, as most prompts end
        alike.
        """
        key = token_id, skip
        if key not in self._sufficient:
            text = as_text(self._tokenizer, [token_id], skip)
            is_text = bool(text) and REPLACEMENT not in text
            self._sufficient[key] = is_text and not self._bytes([token_id])
        return self._sufficient[key]

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        """The ids of the tokens that `skip_special_tokens` leaves out, by their texts; no token
        without a tokenizer.
        """
        if self._tokenizer is None:
            return {}
        added = self._tokenizer.added_tokens_decoder.items()
        return {token.content: token_id for token_id, token in added if token.special}

    def _bytes(self, token_ids: list[int]) -> bytes:
        """The bytes of the byte tokens at the end."""
        run = b""
        for token in reversed(self._tokenizer.convert_ids_to_tokens(token_ids)):
            if (byte := byte_of(token)) is None:
                break
            run = byte + run
        return run

    @cached_property
    def _letter(self) -> list[int]:
        """The tokens of a letter; none if the tokenizer spells letters in bytes only."""
        for letter in string.ascii_letters:
            token_ids = self._tokenizer.encode(letter, add_special_tokens=False)
            tokens = self._tokenizer.convert_ids_to_tokens(token_ids)
            is_text = as_text(self._tokenizer, token_ids, skip_special_tokens=True) == letter
            if is_text and not any(map(byte_of, tokens)):
                return token_ids
        return []
