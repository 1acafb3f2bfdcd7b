"""Reads what callers pass to `generate`: prompts and sampling parameters, in every accepted form.

Everything is checked here, before anything is queued. Imports no torch.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
from typing_extensions import NotRequired, TypedDict

from nanovllm.engine.controls import RequestControls, request_controls
from nanovllm.sampling_params import SamplingParams

Prompt: TypeAlias = "str | Sequence[int] | Mapping[str, Any]"
Prompts: TypeAlias = "Prompt | Sequence[Prompt]"

PROMPT_KEYS = ("prompt", "prompt_token_ids")
TEXT_FIELDS = {  # of sampling parameters, and what there is for token ids
    "stop": "pass stop_token_ids",
    "bad_words": "pass logit_bias",
    "structured_outputs": "pass allowed_token_ids",
}


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str


class TokensPrompt(TypedDict):
    """A prompt as token ids, with the text that its result is to show."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]


class Tokenizer(Protocol):
    """What is needed of a tokenizer."""

    def encode(self, text: str, *, verbose: bool, add_special_tokens: bool = True) -> list[int]: ...


class ParsedPrompt(NamedTuple):
    """A checked prompt."""

    text: str | None
    token_ids: list[int]


class PromptReader:
    """Parses and checks prompts for one engine.

    Args:
        tokenizer: None if the model directory has none; text prompts are refused then.
        vocab_size: token ids must be below it.
        max_model_len: the most tokens of prompt and output, by the model and the options.
        pool_tokens: tokens that the KV pool holds.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, vocab_size: int, max_model_len: int, pool_tokens: int
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._pool_tokens = pool_tokens

    def parse_all(self, prompts: Prompts) -> list[ParsedPrompt]:
        """One prompt or many; see `LLMEngine.generate`."""
        if isinstance(prompts, (str, Mapping)) or _is_token_list(prompts):
            return [self.parse(prompts, "prompts")]
        if not _is_sequence(prompts):
            raise TypeError(
                "`prompts` must be a string, token ids, a dictionary, or a list of those, "
                f"got {type(prompts).__name__}"
            )
        return [self.parse(prompt, f"prompts[{i}]") for i, prompt in enumerate(prompts)]

    def parse(self, prompt: Any, name: str = "prompt") -> ParsedPrompt:
        """One prompt; `name` is what errors call it.

        Raises:
            TypeError, ValueError: naming what is wrong with it.
        """
        text, token_ids = None, prompt
        if isinstance(prompt, Mapping):
            unknown = set(prompt) - set(PROMPT_KEYS)
            if unknown or not prompt:
                raise ValueError(
                    f"`{name}` must have the keys `prompt` or `prompt_token_ids`, "
                    f"got {sorted(map(str, prompt))}"
                )
            text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
            if token_ids is None and "prompt" in prompt:
                token_ids = text
            elif not _is_sequence(token_ids):
                raise TypeError(
                    f'`{name}["prompt_token_ids"]` must hold token ids, '
                    f"got {type(token_ids).__name__}"
                )
            if not isinstance(text, (str, type(None))) or token_ids is None:
                raise TypeError(f'`{name}["prompt"]` must be a string, got {type(text).__name__}')
        if isinstance(token_ids, str):
            text = token_ids
            token_ids = self._encode(text, name)
        elif not _is_sequence(token_ids):
            raise TypeError(
                f"`{name}` must be a string, a list of token ids or a dictionary, "
                f"got {type(token_ids).__name__}"
            )
        return ParsedPrompt(text, self._check(token_ids, name))

    def _encode(self, text: str, name: str) -> list[int]:
        if self._tokenizer is None:
            raise ValueError(
                f"`{name}` is text, but the model directory has no tokenizer: pass token ids"
            )
        return encode(self._tokenizer, text, name)

    def _check(self, token_ids: Sequence[Any], name: str) -> list[int]:
        if len(token_ids) == 0:
            raise ValueError(f"`{name}` must have at least one token, got none")
        if set(map(type, token_ids)) == {int}:
            ids = list(token_ids)
        else:  # numpy's integers, say
            wrong = [token for token in token_ids if not _is_int(token)]
            if wrong:
                is_prompt = isinstance(wrong[0], (str, Mapping)) or _is_sequence(wrong[0])
                remedy = ": it is one prompt, no list of them" if is_prompt else ""
                raise TypeError(f"`{name}` must hold integer token ids, got {wrong[0]!r}{remedy}")
            ids = [int(token) for token in token_ids]
        _check_vocabulary(name, ids, self._vocab_size)
        if len(ids) >= self._max_model_len:
            raise ValueError(
                f"`{name}` must leave room for one token within max_model_len "
                f"{self._max_model_len}, got {len(ids)} tokens: shorten it, or raise "
                "max_model_len if the model allows it"
            )
        if len(ids) >= self._pool_tokens:
            raise ValueError(
                f"`{name}` must fit the KV cache of {self._pool_tokens} tokens and leave room for "
                f"one more, got {len(ids)} tokens: shorten it, or raise num_kvcache_blocks or "
                "the memory for the cache"
            )
        return ids


class ParsedParams(NamedTuple):
    """Checked sampling parameters, and what they mean for the logits."""

    params: SamplingParams
    controls: RequestControls | None


class SamplingParamsReader:
    """Checks for one engine what sampling parameters cannot check themselves.

    Args:
        tokenizer: None if the model directory has none; what is about text is refused then.
        vocab_size: token ids must be below it.
        default: what None stands for.
        eos_token_ids: tokens that end a text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        default: SamplingParams,
        eos_token_ids: Collection[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._default = default
        self._eos_token_ids = eos_token_ids

    def parse_all(
        self, params: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> list[ParsedParams]:
        """One per prompt; see `LLMEngine.generate`."""
        spread = spread_sampling_params(params, count, self._default)
        is_list = params is not None and not isinstance(params, SamplingParams)
        parsed: dict[int, ParsedParams] = {}  # by their identity: most often they are one object
        for i, item in enumerate(spread):
            if id(item) not in parsed:
                name = f"sampling_params[{i}]" if is_list else "sampling_params"
                parsed[id(item)] = self.parse(item, name)
        return [parsed[id(item)] for item in spread]

    def parse(self, params: Any, name: str = "sampling_params") -> ParsedParams:
        """Those of one prompt; `name` is what errors call them.

        Raises:
            TypeError, ValueError: naming what is wrong with them.
        """
        if params is None:
            params = self._default
        bad_words = self._check(params, name)
        return ParsedParams(
            params, request_controls(params, self._vocab_size, self._eos_token_ids, bad_words)
        )

    def _check(self, params: Any, name: str) -> list[tuple[int, ...]]:
        """Returns the tokens of bad words."""
        if not isinstance(params, SamplingParams):
            remedy = ": there is one prompt for them" if _is_sequence(params) else ""
            raise TypeError(
                f"`{name}` must be a SamplingParams, got {type(params).__name__}{remedy}"
            )
        if self._tokenizer is None:
            for field, remedy in TEXT_FIELDS.items():
                if getattr(params, field):
                    raise ValueError(
                        f"`{name}.{field}` is about text, but the model directory has no "
                        f"tokenizer: {remedy}"
                    )
        for field in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
            _check_vocabulary(f"{name}.{field}", getattr(params, field) or (), self._vocab_size)
        if self._tokenizer is None or not params.bad_words:
            return []
        words = bad_word_tokens(self._tokenizer, params.bad_words, f"{name}.bad_words")
        _check_vocabulary(f"{name}.bad_words", list(chain(*words)), self._vocab_size)
        return words


def spread_sampling_params(
    params: SamplingParams | Sequence[SamplingParams] | None,
    count: int,
    default: SamplingParams = SamplingParams(),  # noqa: B008 (it is frozen)
) -> list[SamplingParams]:
    """One `SamplingParams` per prompt, from one for all, one each, or None for the default."""
    if params is None:
        params = default
    if isinstance(params, SamplingParams):
        return [params] * count
    if not _is_sequence(params):
        raise TypeError(
            "`sampling_params` must be a SamplingParams, a list of them or None, "
            f"got {type(params).__name__}"
        )
    if len(params) != count:
        raise ValueError(
            f"`sampling_params` must be one for all or one per prompt, got {len(params)} for "
            f"{count} prompts"
        )
    for i, item in enumerate(params):
        if not isinstance(item, SamplingParams):
            raise TypeError(
                f"`sampling_params[{i}]` must be a SamplingParams, got {type(item).__name__}"
            )
    return list(params)


def bad_word_tokens(
    tokenizer: Tokenizer, bad_words: Iterable[str], name: str = "bad_words"
) -> list[tuple[int, ...]]:
    """The token sequences that must not be generated.

    A word is forbidden at the start of a text and after a space, whether it is given with a space
    before it or not: it is tokenised in both forms. vLLM leaves out the one with the space where
    it has another number of tokens; here it is left out only where it ends with the other one,
    which forbids it already. Other tokens that spell the same word are not found, nor is another
    case, and a token that also is a part of longer words is missing from these too.

    Raises:
        ValueError: for a word that has no tokens.
    """
    sequences = []
    for i, word in enumerate(bad_words):
        text = word.lstrip(" ") or word
        plain, spaced = (
            tuple(encode(tokenizer, form, f"{name}[{i}]", add_special_tokens=False))
            for form in (text, f" {text}")
        )
        if not plain or not spaced:
            raise ValueError(f"`{name}[{i}]` must have tokens, got {word!r}")
        sequences.append(plain)
        if spaced[-len(plain) :] != plain:
            sequences.append(spaced)
    return list(dict.fromkeys(sequences))


def encode(tokenizer: Tokenizer, text: str, name: str, **options: bool) -> list[int]:
    """The tokens of a text; `name` is what errors call it."""
    try:
        # Its warning of long texts would come before our error, which says more.
        return tokenizer.encode(text, verbose=False, **options)
    except (TypeError, UnicodeError) as error:
        reason: object = error
        if re.search("[\ud800-\udfff]", text):
            reason = "it has lone surrogates, which are no characters"
        raise ValueError(f"`{name}` cannot be tokenised: {reason}") from error


def _check_vocabulary(name: str, token_ids: Collection[int], vocab_size: int) -> None:
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
        wrong = next(i for i in token_ids if not 0 <= i < vocab_size)
        raise ValueError(
            f"`{name}` must hold token ids in 0..{vocab_size - 1} (the vocabulary), got {wrong}"
        )


def _is_sequence(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.ndim > 0
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray))


def _is_int(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _is_token_list(prompts: Any) -> bool:
    return _is_sequence(prompts) and len(prompts) > 0 and _is_int(prompts[0])
