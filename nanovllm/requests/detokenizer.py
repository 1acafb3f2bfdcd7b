"""`Detokenizer`: the text of a completion as its tokens arrive, and the stop strings in it."""

import codecs
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from os.path import commonprefix
from typing import Any

from tokenizers.decoders import DecodeStream

from nanovllm.requests.text import (
    CONTEXT,
    MAX_INCOMPLETE,
    REPLACEMENT,
    added_text,
    as_text,
    byte_of,
    is_left_out,
)


class WindowText:
    """The text of tokens as they arrive, each piece as soon as no later token can change it: the
    tokens whose text is open are decoded again with each new one, after the token before them, so
    that no leading space is stripped from them.

    Args:
        tokenizer: tokenizer of transformers.
        decode: function that returns the text of tokens.
        skip: whether special tokens are left out.
        context: tokens before the first one.

    Attributes:
        tokens: last token before the open text, and the tokens of that text.
        num_left_out: tokens so far that have no text.
        is_shortened: whether tokens of open text have been dropped.
    """

    def __init__(
        self, tokenizer: Any, decode: Callable[[list[int]], str], skip: bool, context: list[int]
    ) -> None:
        self._tokenizer, self._decode, self._skip = tokenizer, decode, skip
        self.tokens = context
        self.num_left_out = 0
        self.is_shortened = False
        self._text: str | None = None  # text of `tokens`, once needed
        self._begin = 0  # position of the open text in it
        self._num_given = 0  # characters of it that have been returned

    def step(self, token_id: int) -> str:
        """Add a token. Returns the text that has become certain."""
        if self._text is None:
            self._text = self._decode(self.tokens)
            self._begin = self._num_given = len(self._text)
        tokens = [*self.tokens, token_id]
        text = self._decode(tokens)
        if text == self._text and is_left_out(self._tokenizer, token_id, self._skip):
            self.num_left_out += 1
            return ""
        start = self._num_given
        # Wrong bytes look like incomplete ones, but only MAX_INCOMPLETE can be incomplete.
        end = max(start, len(text.rstrip(REPLACEMENT)), len(text) - MAX_INCOMPLETE)
        self.tokens, self._text, self._num_given = tokens, text, end
        if len(tokens) > 2 * CONTEXT:
            self._shorten(text[end:])
        return text[start:end]

    def _shorten(self, open_text: str) -> None:
        """Bound the window, so that endless wrong bytes do not take ever longer. The first token
        keeps its place. The beginning of the others' text may then be wrong; its end agrees with
        the whole.
        """
        tokens = [self.tokens[0], *self.tokens[-CONTEXT:]]
        text = self._decode(tokens)
        if text.endswith(open_text):
            self.tokens, self._text, self._num_given = tokens, text, len(text) - len(open_text)
            self.is_shortened = True

    def restart(self, token_id: int) -> int:
        """Begin again after a token that ends the open text, of which others return the rest.
        Returns how many characters of the open text have been returned here.
        """
        num_given = self._num_given - self._begin
        self.tokens, self._text, self._begin, self._num_given = [token_id], None, 0, 0
        return num_given

    def rest(self) -> str:
        """The text that is not certain yet: incomplete bytes."""
        return (self._text or "")[self._num_given :]


class StreamText:
    """The text of tokens by `DecodeStream`, for tokenizers of the tokenizers library.

    A stream returns nothing while the text ends in U+FFFD: then a `WindowText` returns the part of
    it that is certain. It goes on alone when the stream cannot.

    Args:
        tokenizer, decode, skip, context: see `WindowText`.
    """

    def __init__(
        self, tokenizer: Any, decode: Callable[[list[int]], str], skip: bool, context: list[int]
    ) -> None:
        self._window = WindowText(tokenizer, decode, skip, context)
        self._backend = tokenizer.backend_tokenizer
        self._new_stream = partial(DecodeStream, skip_special_tokens=skip)
        self._stream = self._begin_stream()

    def _begin_stream(self) -> DecodeStream | None:
        """A stream after the window; None if it would return the text of the window once more."""
        self._num_left_out_before = self._window.num_left_out
        stream, given = self._new_stream(), ""
        for token_id in self._window.tokens:
            given = stream.step(self._backend, token_id) or ""
        return stream if given or not self._window.tokens else None

    def step(self, token_id: int) -> str:
        """Add a token. Returns the text that has become certain."""
        if self._stream is None:
            return self._window.step(token_id)
        try:
            text = self._stream.step(self._backend, token_id)
        except Exception:  # it has no type of its own: the token changes text already returned
            self._stream = None
            return self._window.step(token_id)
        if text is not None:
            return text[self._window.restart(token_id) :]
        certain = self._window.step(token_id)
        if self._window.is_shortened:
            self._stream = None  # it would go on decoding all of them
        elif self._window.num_left_out > self._num_left_out_before + CONTEXT:
            self._stream = self._begin_stream()  # the old one decodes again all that had no text
        return certain

    def rest(self) -> str:
        """The text that is not certain yet: incomplete bytes."""
        return self._window.rest()


class ByteRun:
    """Consecutive byte tokens, of a tokenizer that decodes them together.

    Their text is what their bytes spell in UTF-8. One wrong or missing byte makes each byte of the
    run U+FFFD, right ones before it included: nothing is certain before a run ends or fails.

    Args:
        strips: whether the tokenizer drops the first byte, a space at the beginning of the text.
    """

    def __init__(self, strips: bool) -> None:
        self._text = ""  # the complete characters
        self._begin = int(strips)
        self._num_bytes, self._num_given = 0, 0
        self._utf8 = codecs.getincrementaldecoder("utf-8")()
        self._is_valid = True

    def append(self, byte: bytes) -> str:
        """Add a byte. Returns the text that is certain."""
        self._num_bytes += 1
        if self._is_valid:
            try:
                self._text += self._utf8.decode(byte)
            except UnicodeDecodeError:
                self._is_valid, self._text = False, ""
        if self._is_valid:
            return ""
        certain, self._num_given = self._wrong, self._num_bytes
        return certain

    @property
    def text(self) -> str:
        """The complete characters, while no byte is wrong."""
        return self._text[self._begin :]

    def end(self) -> str:
        """The rest of the text."""
        is_complete = self._is_valid and not self._utf8.getstate()[0]
        return self.text if is_complete else self._wrong

    @property
    def _wrong(self) -> str:
        return REPLACEMENT * (self._num_bytes - self._num_given)


class Detokenizer:
    """The text of one completion as it grows; ends it at a stop string.

    The text is the part that its tokens add to the prompt's text, by `tokenizer.decode` for all
    tokens of both, without the clean-up of spaces (`clean_up_tokenization_spaces`) that some
    tokenizers ask for and that spoils code. That holds if a token changes no text before it, except
    bytes of the same character or the same run of byte tokens: for byte-level BPE, sentencepiece
    and metaspace. It does not hold for decoders that look further back, such as those that merge
    equal tokens (CTC).

    A stop string counts when its last character has arrived. If there are several, the one that is
    complete first ends the text, and of those the one that begins first: as if the text came
    character by character, whatever the tokens and the order of the list. A stop string that is a
    special token ends the text there, too, although it is no part of the text.

    Args:
        tokenizer: tokenizer of transformers, fast or slow.
        stop: strings that end the text, none of them empty.
        include_stop_str_in_output: whether the text ends after the stop string, not before it.
        skip_special_tokens: whether special tokens are left out of the text.
        context: tokens before the first one (`Decoder.context`).
        stop_tokens: stop strings that are special tokens left out of the text, by token id.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
        context: Sequence[int] = (),
        stop_tokens: Mapping[int, str] | None = None,
    ) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._decode = partial(as_text, tokenizer, skip_special_tokens=skip_special_tokens)
        has_backend = getattr(tokenizer, "backend_tokenizer", None) is not None
        text = StreamText if has_backend else WindowText
        self._make_text = partial(text, tokenizer, self._decode, skip_special_tokens)
        self._stop, self._stop_tokens = tuple(stop), stop_tokens or {}
        self._max_stop_len = max(map(len, self._stop), default=1)
        self._include_stop = include_stop_str_in_output
        self._has_runs = self._decodes_runs()

        self._text = self._make_text([])
        self._run: ByteRun | None = None  # after that text
        self._has_begun = bool(context)  # whether a token that is not left out has arrived
        self._shown = ""  # the end of the prompt's text, which the next token may change
        for token_id in context:
            self._extend(token_id)
        if context:
            self._shown = self._rest()
        self._parts: list[str] = []  # the text before the tail
        self._tail = ""  # the text that is not certain or may begin a stop string
        self._num_certain = 0  # characters of the tail that no token can change any more
        self._num_ready = 0  # characters of the tail that are ready for `take`
        self._ready: list[str] = []
        self._ended = False

    @property
    def text(self) -> str:
        """All text so far, except for U+FFFD at its end that may be a character's first bytes."""
        return "".join(self._parts) + self._tail

    def append(self, token_id: int, *, may_stop: bool = True) -> str | None:
        """Add a token. Returns the stop string that has ended the text, if one has.

        `may_stop=False` is for the tokens before `min_tokens`: a stop string that such a token
        completes does not count, but one may begin there.
        """
        assert not self._ended, "the text has ended"
        if may_stop and token_id in self._stop_tokens:
            self.finish()
            return self._stop_tokens[token_id]
        certain, uncertain = self._extend(token_id)
        if self._shown:
            certain, uncertain = self._cut(certain, uncertain)
        before = self._tail
        self._tail = before[: self._num_certain] + certain + uncertain
        self._num_certain += len(certain)
        found = self._find_stop(before) if may_stop else None
        if found:
            end, begin, stop = found
            self._end(self._tail[: end if self._include_stop else begin])
            return stop
        self._release()
        return None

    def finish(self) -> None:
        """End the completion: incomplete bytes become U+FFFD, and nothing is held back any more.

        That text is not searched for stop strings.
        """
        if not self._ended:
            rest = added_text(self._shown, self._rest())
            self._end(self._tail[: self._num_certain] + rest)

    def take(self) -> str:
        """The final text that is new since the last call.

        Text that may begin a stop string is held back, unless stop strings stay in the output: then
        it belongs there in any case.
        """
        text = "".join(self._ready)
        self._ready.clear()
        return text

    def _extend(self, token_id: int) -> tuple[str, str]:
        """Decode one more token. Returns the text that is certain now, and the text after that."""
        byte = self._byte(token_id) if self._has_runs else None
        if byte is not None:
            return self._extend_run(byte)
        if self._run is None and self._has_begun:
            return self._text.step(token_id), ""
        if is_left_out(self._tokenizer, token_id, self._skip):
            if self._run is None:
                return self._text.step(token_id), ""
            return "", self._run.text  # the run may go on after it
        self._has_begun = True
        certain = "" if self._run is None else self._run.end()
        self._run = None
        return certain + self._text.step(token_id), ""

    def _extend_run(self, byte: bytes) -> tuple[str, str]:
        """Decode a byte token of a run. Returns the same."""
        certain = ""
        if self._run is None:
            certain = self._text.rest()
            strips = not self._has_begun and byte == b" " and self._strips_space
            self._run, self._has_begun = ByteRun(strips), True
            self._text = self._make_text([self._letter])  # later text does not begin the text
        certain += self._run.append(byte)
        return certain, self._run.text

    def _rest(self) -> str:
        """The text that is not certain, if no token follows."""
        return self._text.rest() if self._run is None else self._run.end()

    def _cut(self, certain: str, uncertain: str) -> tuple[str, str]:
        """The certain and uncertain text, without the part that the prompt has already shown."""
        new = added_text(self._shown, certain)
        if new:
            self._shown = ""
            return new, uncertain
        self._shown = self._shown[len(certain) :]
        return "", added_text(self._shown, uncertain)

    def _find_stop(self, before: str) -> tuple[int, int, str] | None:
        """End, beginning and text of the first stop string that was not in the tail before."""
        tail = self._tail
        unchanged = len(before)
        if not tail.startswith(before):
            unchanged = len(commonprefix([before, tail]))  # noqa: RUF071 - strings, not paths
        found = []
        for stop in self._stop:
            begin = tail.find(stop, max(unchanged - len(stop) + 1, 0))
            if begin >= 0:
                found.append((begin + len(stop), begin, stop))
        return min(found, default=None)

    def _release(self) -> None:
        """Release certain text, and cut off the tail's part that cannot be in a stop string."""
        certain = self._tail[: self._num_certain]
        begin = max(len(certain) - self._max_stop_len + 1, 0)
        while begin < len(certain) and not self._begins_stop(certain[begin:]):
            begin += 1
        ready = len(certain) if self._include_stop else begin
        self._ready.append(certain[self._num_ready : ready])
        self._parts.append(certain[:begin])
        self._tail = self._tail[begin:]
        self._num_certain -= begin
        self._num_ready = ready - begin

    def _begins_stop(self, text: str) -> bool:
        return any(stop.startswith(text) and stop != text for stop in self._stop)

    def _end(self, tail: str) -> None:
        self._ended = True
        self._ready.append(tail[self._num_ready :])
        self._tail = tail

    def _decodes_runs(self) -> bool:
        """Whether byte tokens are decoded together, as tokenizers' ByteFallback does."""
        token_ids = self._tokenizer.convert_tokens_to_ids(["<0x41>", "<0xFF>", "<0x20>"])
        if None in token_ids or self._decode(token_ids[:2]) != REPLACEMENT * 2:
            return False
        self._letter, self._strips_space = token_ids[0], not self._decode(token_ids[2:])
        return True

    def _byte(self, token_id: int) -> bytes | None:
        """The byte of a byte token; None for other tokens."""
        return byte_of(self._tokenizer.convert_ids_to_tokens(token_id))
