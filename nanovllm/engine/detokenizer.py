"""`Detokenizer`: the text of a completion that grows by tokens, and the stop strings in it."""

import codecs
import re
from collections.abc import Sequence
from functools import partial
from os.path import commonprefix
from typing import Any

REPLACEMENT = "\ufffd"  # stands for bytes that are not UTF-8
MAX_INCOMPLETE = 3  # bytes of a character that lacks one
BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
# transformers' clean-up deletes spaces: " n '" loses its first one when " t" follows. None goes
# that has more behind it, as trying all strings of a few of the characters in its patterns shows.
CLEAN_UP_REACH = 4
# Tokens that are decoded again for what comes before a new one: more than incomplete bytes and
# the reach of the clean-up can be, so that a character cut at their beginning does no harm.
CONTEXT, CLEAN_UP_CONTEXT = 6, 24


class ByteRun:
    """Byte tokens in a row, of a tokenizer that decodes them together.

    They are the text that their bytes are in UTF-8. One wrong or missing byte makes each byte of
    the run U+FFFD, the right ones before it too: nothing is certain before a run ends or fails.
    """

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.text = ""  # the complete characters
        self.is_valid = True
        self._utf8 = codecs.getincrementaldecoder("utf-8")()

    def append(self, token_id: int, byte: bytes) -> None:
        self.token_ids.append(token_id)
        if self.is_valid:
            try:
                self.text += self._utf8.decode(byte)
            except UnicodeDecodeError:
                self.is_valid = False


class Detokenizer:
    """The text of one completion while it grows; ends it at a stop string.

    The text is that of `tokenizer.decode` for all tokens, but only a window of them is decoded:
    the first token, some of context and those whose text is open. The context makes the tokenizer
    treat the last tokens as it does in the whole, the first one keeps it from stripping a leading
    space from anything else. What the window shows at its beginning may be wrong, so positions in
    it count only relative to its end, where it agrees with the whole.

    That holds where a token changes no text before it, except bytes of the same character or the
    same run of byte tokens, and the spaces that `clean_up_tokenization_spaces` deletes: for
    byte-level BPE, for sentencepiece and metaspace, for WordPiece with that clean-up. It does not
    for decoders that look further, as those that merge equal tokens (CTC), and may not for those
    that put spaces around added tokens and leave wrong bytes out (ByT5's in transformers 4).

    A stop string counts when its last character has arrived. Of several the one ends the text
    that is complete first, and of those the one that begins first: as if the text came character
    by character, whatever the tokens are, and in whatever order the strings are listed.

    Args:
        tokenizer: of transformers, fast or slow.
        stop: strings that end the text, none of them empty.
        include_stop_str_in_output: end it behind the stop string, not before.
        skip_special_tokens: leave special tokens out of the text.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._decode = partial(tokenizer.decode, skip_special_tokens=skip_special_tokens)
        self._stop = tuple(stop)
        self._max_stop_len = max(map(len, self._stop), default=1)
        self._include_stop = include_stop_str_in_output
        self._cleans_up = bool(getattr(tokenizer, "clean_up_tokenization_spaces", False))
        self._context = CLEAN_UP_CONTEXT if self._cleans_up else CONTEXT
        self._has_runs = self._decodes_runs()

        self._window: list[int] = []
        self._run = ByteRun()  # behind the window
        self._window_text = ""
        self._offset = 0  # of the text of window and run: what is certain
        self._parts: list[str] = []  # the text before the tail
        self._tail = ""  # the text that is not certain or may begin a stop string
        self._num_certain = 0  # characters of the tail that no token changes any more
        self._num_ready = 0  # and those that `take` has been given
        self._ready: list[str] = []
        self._ended = False

    @property
    def text(self) -> str:
        """All text so far, but for U+FFFD at its end that may be a character's first bytes."""
        return "".join(self._parts) + self._tail

    def append(self, token_id: int, *, may_stop: bool = True) -> str | None:
        """Add a token. Returns the stop string that has ended the text, if one has.

        `may_stop=False` is for the tokens below `min_tokens`: a stop string that is complete with
        one of them is never looked for, one that has begun there is.
        """
        assert not self._ended, "the text has ended"
        certain, uncertain = self._extend(token_id)
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
        """The completion has ended: incomplete bytes become U+FFFD, and nothing is held back.

        No stop string is looked for in that.
        """
        if not self._ended:
            text = self._decode(self._window + self._run.token_ids)
            self._end(self._tail[: self._num_certain] + text[self._offset :])

    def take(self) -> str:
        """The text that is new since the last call, and final.

        What may be the beginning of a stop string is held back, unless stop strings stay in the
        output: it belongs there in any case.
        """
        text = "".join(self._ready)
        self._ready.clear()
        return text

    def _extend(self, token_id: int) -> tuple[str, str]:
        """Decode one more token. Returns the text that is certain now, and what follows that."""
        byte = self._byte(token_id) if self._has_runs else None
        if byte is not None:
            return self._extend_run(token_id, byte)
        run = self._run.token_ids
        window = [*self._window, *run, token_id]
        text = self._decode(window)
        if (run or text == self._window_text) and self._is_left_out(token_id):
            return "", self._tail[self._num_certain :]  # bytes may go on behind it
        if run:
            self._run = ByteRun()

        # Wrong bytes look like incomplete ones, but only so many can be incomplete.
        end = max(len(text.rstrip(REPLACEMENT)), len(text) - MAX_INCOMPLETE)
        space = text.find(" ", max(end - CLEAN_UP_REACH, 0), end) if self._cleans_up else -1
        start, self._offset = self._offset, max(self._offset, end if space < 0 else space)
        certain, uncertain = text[start : self._offset], text[self._offset : end]

        if len(window) > 2 * self._context:
            begin = len(window) - self._context
            while begin > 1 and self._has_runs and self._byte(window[begin]):
                begin -= 1  # a part of a run would not be the text that it is in the whole
            shorter = [window[0], *window[begin:]]
            shorter_text = self._decode(shorter)
            if shorter_text.endswith(text[self._offset :]):
                self._offset += len(shorter_text) - len(text)
                window, text = shorter, shorter_text
        self._window, self._window_text = window, text
        return certain, uncertain

    def _extend_run(self, token_id: int, byte: bytes) -> tuple[str, str]:
        """The same for a byte token of a run."""
        was_valid = self._run.is_valid
        self._run.append(token_id, byte)
        window_rest = self._window_text[self._offset :] if was_valid else ""
        if self._run.is_valid:
            text = self._run.text
            if not self._window and not self._decode(self._run.token_ids[:1]):
                text = text[1:]  # the space that a completion may begin with is stripped
            return "", window_rest + text
        num_new = len(self._run.token_ids) if was_valid else 1
        certain = window_rest + REPLACEMENT * num_new
        self._offset += len(certain)
        return certain, ""

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
        """Hand out what is certain, and cut from the tail what cannot be part of a stop string."""
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
        token_ids = self._tokenizer.convert_tokens_to_ids(["<0x41>", "<0xFF>"])
        return None not in token_ids and self._decode(token_ids) == REPLACEMENT * 2

    def _byte(self, token_id: int) -> bytes | None:
        """The byte of a byte token."""
        match = BYTE_TOKEN.fullmatch(self._tokenizer.convert_ids_to_tokens(token_id) or "")
        return bytes.fromhex(match[1]) if match else None

    def _is_left_out(self, token_id: int) -> bool:
        """Whether the tokenizer leaves a token out: a special one, or none of its own."""
        if self._decode([token_id]):
            return False
        is_known = self._tokenizer.convert_ids_to_tokens(token_id) is not None
        return not is_known or bool(self._tokenizer.decode([token_id], skip_special_tokens=False))
