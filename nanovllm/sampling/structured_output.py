"""Structured outputs: masks of the tokens that keep a completion in the form asked for.

llguidance does the work: one wheel without dependencies, which compiles in a millisecond and
refuses what it cannot enforce; xgrammar needs torch, compiles for up to seconds, and passes over
keywords of schemas in silence.

Dead ends of grammars aside, the masks are exact: a token is allowed if and only if some text of the
form begins with the completion so far and the token, in any tokenization. So a model that keeps to
the form by itself is not led elsewhere. Special tokens, and ids beyond the tokenizer's, spell
nothing.

An end-of-sequence token may be an ordinary one ("\\n", say). It ends its sequence, so it is never
text then: it is allowed if the text is complete, and the form goes on by other tokens. A text that
can go on by no other token ends there, incomplete, with a warning. With `ignore_eos`, such a token
ends nothing and is only text.
"""

import functools
import json
import logging
import os
import re
import reprlib
import textwrap
import threading
from collections import OrderedDict, deque
from collections.abc import Collection, Sequence
from contextlib import suppress
from copy import copy
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import decoders

from nanovllm.sampling.deep_calls import call_deep
from nanovllm.sampling_params import StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

logger = logging.getLogger(__name__)

NOT_ALLOWED = "token {} is not allowed by the structured output"
MAX_CACHED = 64  # compiled forms; a small one takes 0.1 MB per thread
# Bytes of all their texts, times the threads that have them. A byte takes 20 to 30 when compiled,
# and up to 140 as the library stores the states that it has met.
MAX_CACHED_BYTES = 1 << 20
NUM_THREADS = min(8, os.cpu_count() or 1)
MAX_CHARACTERS = 1 << 20  # of a form
# The library reads a form by recursion: chained rules take up to a kilobyte for each character, so
# a usual stack of 8 MiB would overflow at 3,000 of them, which ends the process.
MIN_STACK, STACK_PER_CHARACTER, MAX_STACK = 1 << 26, 2048, 1 << 30  # bytes
WHITESPACE = r"[ \n\r\t]{1,40}"  # in JSON; without a bound, a model may write nothing else for ever
# Without this, if only one text can follow, the library allows only the tokenizer's own tokens for
# it; and it would look for ever for the end of such a text in "start: A A", A: /a+/.
EXACT = '\n%llguidance {"no_forcing": true}'
ESCAPED = re.compile(r"\\.?|/", re.DOTALL)
TAG = re.compile(r"<[!-~]+>")  # added tokens that the library takes for special ones
GBNF = re.compile(r"(?:\s|#.*\n)*[\w-]+[ \t]*::=")  # start of such a grammar, not of Lark's


class Grammar:
    """The state of one completion in its form. `GrammarCompiler.compile` makes them.

    Args:
        compiled: matcher at the beginning of the form.
        eos_token_ids: tokens that end the text.
        by_hand: tokens for which the library's masks are wrong: those of `eos_token_ids` that it
            regards as text, and a token that it regards as an end.

    Attributes:
        is_incomplete: whether the text must end before its form does.
    """

    def __init__(
        self, compiled: "LLMatcher", eos_token_ids: Collection[int], by_hand: Collection[int] = ()
    ) -> None:
        self._compiled, self._eos_token_ids, self._by_hand = compiled, eos_token_ids, by_hand
        self.is_incomplete = False
        self.num_followed = 0  # tokens of the completion that it knows, as the control table counts
        self.reset()

    def reset(self) -> None:
        """Begin the text anew."""
        self._matcher, self._has_ended = self._compiled.deep_copy(), False

    def _end(self, token_id: int) -> None:
        """Follow the text by an end-of-sequence token; refuse any other, as only that may come.

        Raises:
            RuntimeError: the mask does not allow the token.
        """
        if token_id not in self._eos_token_ids or not self._may_end(token_id):
            raise RuntimeError(NOT_ALLOWED.format(token_id))
        self._has_ended = True

    def _may_end(self, token_id: int) -> bool:
        matcher = self._matcher
        if self._by_hand:
            mask = np.frombuffer(matcher.compute_bitmask(), np.int32).copy()
            self._place_ends(mask)
            return bool(mask[token_id >> 5] >> (token_id & 31) & 1)
        if matcher.is_stopped() or matcher.try_consume_tokens([token_id]):
            return True
        return matcher.is_error()  # the library has given up

    def _place_ends(self, mask: NDArray[np.int32]) -> None:
        """Correct the bits of ends in a mask [ceil(V / 32)] int32 of the library's; for grammars
        that have tokens `by_hand`.
        """
        words = mask.view(np.uint32)
        for token_id in self._by_hand:
            words[token_id >> 5] &= ~np.uint32(1 << (token_id & 31))
        is_complete = self._matcher.is_accepting()
        if not is_complete and not words.any():
            self._break_off("only an end-of-sequence token spells the rest of the form")
        if is_complete or not words.any():
            for token_id in self._eos_token_ids:
                words[token_id >> 5] |= np.uint32(1 << (token_id & 31))

    def _break_off(self, reason: str) -> None:
        if not self.is_incomplete:  # a step may be repeated
            logger.warning("a structured output is incomplete: %s", reason)
        self.is_incomplete = True


def accept_tokens(grammars: Sequence[Grammar], token_ids: Sequence[int]) -> None:
    """Follow each text by a token. Tokens after a text's end are ignored. Works in parallel and
    without the interpreter's lock.

    Raises:
        RuntimeError: a mask does not allow its token; the state of all grammars is undefined then.
    """
    consumed = []
    for grammar, token_id in zip(grammars, token_ids, strict=True):
        if grammar._has_ended:
            continue
        watched = token_id in grammar._eos_token_ids or token_id in grammar._by_hand
        if watched or grammar._matcher.is_stopped():
            grammar._end(token_id)
        else:
            consumed.append((grammar._matcher, token_id))
    if consumed:
        results = _executor().consume_token_par(consumed)
        for (matcher, token_id), accepted in zip(consumed, results, strict=True):
            # If the library itself has given up, the masks will allow only the end.
            if not accepted and "doesn't satisfy the grammar" in matcher.get_error():
                raise RuntimeError(NOT_ALLOWED.format(token_id))


def fill_masks(grammars: Sequence[Grammar], masks: NDArray[np.int32]) -> None:
    """Set bit t % 32 of word t // 32 if token t may come next, and clear the others.

    The end-of-sequence tokens may come if the text is complete, and only they may come if nothing
    can follow: at a dead end of a grammar, or a limit of the library's, the text ends incomplete,
    with a warning. After its end, which a request may ignore, every token may come. Works in
    parallel and without the interpreter's lock.

    Args:
        grammars: n grammars, each once.
        masks: [n, ceil(V / 32)] int32, contiguous.
    """
    live = []
    for row, grammar in enumerate(grammars):
        if grammar._has_ended:
            masks[row] = -1
        else:
            live.append((grammar._matcher, row))
    if live:
        from llguidance.numpy import fill_next_token_bitmask_par

        fill_next_token_bitmask_par(_executor(), live, masks)
    for matcher, row in live:
        if matcher.is_error():  # the library has given up
            grammars[row]._break_off(_reason("grammar", matcher.get_error()))
        if grammars[row]._by_hand:
            grammars[row]._place_ends(masks[row])


@functools.cache
def _executor() -> "LLExecutor":
    from llguidance import LLExecutor

    return LLExecutor(NUM_THREADS)


class _Form:
    """The compiled matchers of a form: one per thread, because copies of one share its learned
    states and a lock; fewer for a long form, lest it alone fill the cache.

    Attributes:
        matchers: matchers, the next to use first and the last used last.
    """

    def __init__(self, lark: str) -> None:
        self._num_bytes = len(lark.encode())
        self.matchers: deque[LLMatcher] = deque()
        self.max_matchers = max(1, min(NUM_THREADS, MAX_CACHED_BYTES // self._num_bytes))

    @property
    def size(self) -> int:
        """The number of bytes of text that were compiled."""
        return self._num_bytes * len(self.matchers)


def check_package() -> None:
    """Raise ImportError, with the remedy, if the package for grammars is missing."""
    try:
        import llguidance  # noqa: F401
    except ImportError:
        raise ImportError(
            "`structured_outputs` needs the package llguidance where the engine runs: "
            'pip install "llguidance>=1.8,<2"'
        ) from None


class GrammarCompiler:
    """A compiler of the forms that requests ask for, with a cache of recent ones.

    Args:
        tokenizer: fast tokenizer of transformers, of bytes; None: every request is refused.
        vocab_size: vocabulary size V of the model, which may be larger than the tokenizer's.
        eos_token_ids: tokens that end a text; those that the tokenizer lacks are ignored.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._forms: OrderedDict[tuple[str, Any], _Form] = OrderedDict()  # the latest last
        self._lock = threading.Lock()  # guards `_forms`: callers check requests concurrently

    def prepare(self) -> None:
        """Read the tokenizer, if forms can be compiled at all. This takes up to a second, and holds
        the interpreter's lock. Errors are left to `compile`, which also reads it if need be.
        """
        with suppress(ImportError, ValueError):
            self._ll_tokenizer  # noqa: B018

    def compile(self, params: StructuredOutputsParams, ignore_eos: bool = False) -> Grammar:
        """The grammar of a new completion.

        JSON has its properties in the order of the schema, and at most 40 blanks in a row, unless
        the schema says otherwise under "x-guidance" (see llguidance). Regular expressions are
        those of Rust, without look-around and back references.

        Args:
            params: form of the output.
            ignore_eos: whether end-of-sequence tokens end nothing; those that spell text are text.

        Raises:
            ImportError: the package llguidance is missing.
            ValueError: the form is wrong, not supported or without any text; or the model has no
                tokenizer, one that is not supported, or no end-of-sequence token.
        """
        tokenizer, ends = self._ll_tokenizer
        name, value = next(item for item in vars(params).items() if item[1] is not None)
        kind = "gbnf" if name == "grammar" and GBNF.match(value) else name
        try:
            matcher = self._matcher(kind, value)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(
                f"`{name}` must be supported by llguidance, got {reprlib.repr(value)}: "
                f"{_reason(kind, str(error))}"
            ) from None
        known = frozenset(tokenizer.eos_tokens)
        return Grammar(matcher, known) if ignore_eos else Grammar(matcher, ends, ends ^ known)

    def _matcher(self, kind: str, value: Any) -> "LLMatcher":
        """A matcher of the form: a new one, or that which was used least recently."""
        key = kind, value
        with self._lock:
            form = self._forms.get(key)
            if form is not None and len(form.matchers) >= form.max_matchers:
                form.matchers.rotate(-1)
                self._forms.move_to_end(key)
                return form.matchers[-1]
        stack = MIN_STACK
        if isinstance(value, str):
            if len(value) > MAX_CHARACTERS:
                raise ValueError(f"it has {len(value):,} characters, at most {MAX_CHARACTERS:,}")
            stack = min(max(stack, len(value) * STACK_PER_CHARACTER >> 16 << 16), MAX_STACK)
        # Without the lock: nobody waits for the form of another.
        lark, matcher = call_deep(lambda: self._compiled(kind, value), stack)
        with self._lock:
            form = self._forms.pop(key, None) or _Form(lark)
            form.matchers.append(matcher)
            self._forms[key] = form
            while len(self._forms) > 1 and (
                len(self._forms) > MAX_CACHED
                or sum(form.size for form in self._forms.values()) > MAX_CACHED_BYTES
            ):
                self._forms.popitem(last=False)
        return matcher

    def _compiled(self, kind: str, value: Any) -> "tuple[str, LLMatcher]":
        """The form in Lark, and a matcher of it."""
        lark = _lark(kind, value) + EXACT
        return lark, self._new_matcher(lark)

    def _new_matcher(self, lark: str) -> "LLMatcher":
        from llguidance import LLMatcher

        tokenizer, _ = self._ll_tokenizer
        matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(lark), log_level=0)
        matcher.compute_bitmask()  # finds out whether any text can begin
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return matcher

    @functools.cached_property
    def _ll_tokenizer(self) -> "tuple[LLTokenizer, frozenset[int]]":
        """The tokenizer, and the tokens that end a text.

        The library gets only those that spell nothing: it could not tell whether any other is text
        or the end. If all of them spell text, a special token stands in for them.
        """
        tokenizer = self._tokenizer
        if tokenizer is None:
            raise ValueError("`structured_outputs` must be None for a model without tokenizer")
        check_package()
        from llguidance import LLTokenizer

        try:
            ends = [t for t in self._eos_token_ids if tokenizer.convert_ids_to_tokens(t)]
            if not ends:
                raise ValueError("it has no end-of-sequence token to end a text with")
            special = [t for t, added in tokenizer.added_tokens_decoder.items() if added.special]
            known = [t for t in ends if t in special] or special[:1]
            if not known:
                raise ValueError("it has no special token to end a text with")
            whole = _whole_tokenizer(tokenizer)
            return LLTokenizer(whole, n_vocab=self._vocab_size, eos_token=known), frozenset(ends)
        except (AttributeError, ValueError) as error:
            raise ValueError(
                "`structured_outputs` must be None with this tokenizer, a "
                f"{type(tokenizer).__name__}: {error}"
            ) from None


def _whole_tokenizer(tokenizer: Any) -> str:
    """A fast tokenizer as JSON, for the library. It knows decoders of bytes, and the replacement of
    a character by a space, which equals Metaspace except for a text's first space.

    Raises:
        ValueError: for a tokenizer of another kind.
    """
    if not hasattr(tokenizer, "backend_tokenizer"):
        raise ValueError("only fast tokenizers are supported")
    backend = copy(tokenizer.backend_tokenizer)
    backend.no_padding()
    backend.no_truncation()
    decoder = json.loads(backend.decoder.__getstate__()) if backend.decoder else {}
    for part in decoder.get("decoders", [decoder]):
        if part.get("type") == "Metaspace":
            spaces = decoders.Replace(part["replacement"], " ")
            backend.decoder = decoders.Sequence([spaces, decoders.ByteFallback()])
    added = tokenizer.added_tokens_decoder
    tags = {t for t, token in added.items() if TAG.fullmatch(token.content) and not token.special}
    whole: str = backend.to_str()
    return _with_tags_as_text(whole, tags) if tags else whole


def _with_tags_as_text(whole: str, tags: Collection[int]) -> str:
    """A tokenizer as JSON, in which these added tokens are ordinary ones.

    The library takes each added token like `<think>` for a special one, which spells nothing.
    """
    key, decoder = '"added_tokens":', json.JSONDecoder()
    begin = whole.index(key) + len(key)
    added, end = decoder.raw_decode(whole, begin)
    vocab = whole.index('"vocab":', whole.index('"model":{', end)) + len('"vocab":')
    if whole[vocab] != "{":  # its ids are places in a list
        return whole
    # All, as ids of others are numbered after the vocabulary. Most of the text stays as it is.
    entries = json.dumps({token["content"]: token["id"] for token in added})[1:-1]
    kept = json.dumps([token for token in added if token["id"] not in tags])
    comma = "" if whole[vocab + 1] == "}" else ", "
    return f"{whole[:begin]}{kept}{whole[end:vocab]}{{{entries}{comma}{whole[vocab + 1 :]}"


def _lark(name: str, value: Any) -> str:
    """The form in llguidance's dialect of Lark."""
    if name == "json_object":
        name, value = "json", '{"type": "object"}'
    if name == "json":
        return f"start: {json_rule(value)}"
    if name == "regex":
        return f"start: /{re.sub(ESCAPED, _in_slashes, value)}/"
    if name == "choice":
        # A terminal: alternatives of a rule would each be a parser item, of which 2,000 may exist.
        return "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(text) for text in value)
    if name == "gbnf":
        from llguidance.gbnf_to_lark import gbnf_to_lark

        try:
            text = re.sub(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", _character, value)
            return gbnf_to_lark(text)
        except Exception as error:  # its own are of no narrower kind
            raise ValueError(str(error)) from None
    return value


def json_rule(schema: str) -> str:
    """The part of a Lark rule that stands for JSON of a schema."""
    read = json.loads(schema)
    options = {"whitespace_pattern": WHITESPACE, **read.get("x-guidance", {})}
    return "%json " + json.dumps({**read, "x-guidance": options})


def _in_slashes(part: re.Match[str]) -> str:
    """A slash or an escape, as written between the slashes of Lark."""
    if part[0] == "\\":
        raise ValueError("a backslash at the end escapes nothing")
    return {"/": r"\/", "\\\n": r"\n"}.get(part[0], part[0])


def _character(escape: re.Match[str]) -> str:
    """A safe replacement of an escape: the library would read `\\u00e9a` as `\\ue9a`."""
    digits = escape[1] or escape[2]
    if digits is None:
        return escape[0]
    code = int(digits, 16)
    return chr(code) if code >= 0x80 else f"\\x{code:02x}"


def _reason(name: str, message: str) -> str:
    """The library's message as one line; with a place in the text only if the user wrote that."""
    first, *rest = message.splitlines() or [""]
    causes = [line.removeprefix("error: ") for line in rest if line.startswith("error: ")]
    reason = " ".join([first, *causes])
    where = r"^(?:at )?(\d+)\((\d+)\): "
    if name == "grammar":
        reason = re.sub(where, r"line \1, column \2: ", reason)
    else:
        wrapping = r"(invalid regex .*\(in regex\): |failed to compile JSON schema: )?"
        reason = re.sub(where + wrapping, "", reason)
    return textwrap.shorten(reason.replace("NoExtensionBias", "no text matches it"), 300)
