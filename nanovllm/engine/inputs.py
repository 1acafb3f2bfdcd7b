"""Reads what callers pass to `generate`: prompts and sampling parameters, in every accepted form.

Everything is checked here, before anything is queued. Imports no torch.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from itertools import chain
from numbers import Integral
from typing import Any, NamedTuple, Protocol, TypeAlias

from typing_extensions import NotRequired, TypedDict

from nanovllm.engine.request_controls import RequestControls, request_controls
from nanovllm.sampling_params import SamplingParams

Prompt: TypeAlias = "str | Iterable[int] | Mapping[str, Any]"
Prompts: TypeAlias = "Prompt | Iterable[Prompt]"
Params: TypeAlias = "SamplingParams | Iterable[SamplingParams] | None"

OTHERS = '; on_error="return" completes the others'
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
            text, given = prompt.get("prompt"), prompt.get("prompt_token_ids")
            if given is None and "prompt" in prompt:
                token_ids = text
            elif (token_ids := listed(given)) is None:
                raise TypeError(
                    f'`{name}["prompt_token_ids"]` must hold token ids, got {type(given).__name__}'
                )
            if not isinstance(text, (str, type(None))) or token_ids is None:
                raise TypeError(f'`{name}["prompt"]` must be a string, got {type(text).__name__}')
        if isinstance(token_ids, str):
            return ParsedPrompt(token_ids, self._check(self._encode(token_ids, name), name))
        items = listed(token_ids)
        if items is None:
            raise TypeError(
                f"`{name}` must be a string, a list of token ids or a dictionary, "
                f"got {type(token_ids).__name__}"
            )
        return ParsedPrompt(text, self._check(items, name))

    def _encode(self, text: str, name: str) -> list[int]:
        if self._tokenizer is None:
            raise ValueError(
                f"`{name}` is text, but the model directory has no tokenizer: pass token ids"
            )
        return encode(self._tokenizer, text, name)

    def _check(self, token_ids: list[Any], name: str) -> list[int]:
        if not token_ids:
            raise ValueError(f"`{name}` must have at least one token, got none")
        if set(map(type, token_ids)) == {int}:
            ids = list(token_ids)
        else:  # numpy's integers, say
            wrong = [token for token in token_ids if not _is_int(token)]
            if wrong:
                is_prompt = isinstance(wrong[0], (str, Mapping)) or listed(wrong[0]) is not None
                remedy = ": it is one prompt, no list of them" if is_prompt else ""
                raise TypeError(f"`{name}` must hold integer token ids, got {wrong[0]!r}{remedy}")
            ids = [int(token) for token in token_ids]
        _check_vocabulary(name, ids, self._vocab_size)
        others = OTHERS if name.endswith("]") else ""  # there may be some
        if len(ids) >= self._max_model_len:
            raise ValueError(
                f"`{name}` must leave room for one token within max_model_len "
                f"{self._max_model_len}, got {len(ids)} tokens: shorten it, or raise "
                f"max_model_len if the model allows it{others}"
            )
        if len(ids) >= self._pool_tokens:
            raise ValueError(
                f"`{name}` must fit the KV cache of {self._pool_tokens} tokens and leave room for "
                f"one more, got {len(ids)} tokens: shorten it, or raise num_kvcache_blocks or "
                f"the memory for the cache{others}"
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
        default: what None stands for; kept in the attribute of that name.
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
        self.default = default
        self._eos_token_ids = eos_token_ids

    def parse(self, params: Any, name: str = "sampling_params") -> ParsedParams:
        """Those of one prompt; `name` is what errors call them.

        Raises:
            TypeError, ValueError: naming what is wrong with them.
        """
        if params is None:
            params = self.default
        bad_words = self._check(params, name)
        return ParsedParams(
            params, request_controls(params, self._vocab_size, self._eos_token_ids, bad_words)
        )

    def _check(self, params: Any, name: str) -> list[tuple[int, ...]]:
        """Returns the tokens of bad words."""
        if not isinstance(params, SamplingParams):
            remedy = ": there is one prompt for them" if listed(params) is not None else ""
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


def name_prompts(prompts: Prompts) -> dict[str, Any]:
    """One prompt or many, by what errors call them."""
    if isinstance(prompts, (str, Mapping)):
        return {"prompts": prompts}
    items = listed(prompts)
    if items is None:
        raise TypeError(
            "`prompts` must be a string, token ids, a dictionary, or a list of those, "
            f"got {type(prompts).__name__}"
        )
    # A text or list among them is a prompt; numbers alone are the tokens of one.
    kinds = set(map(type, items))
    if any(map(_is_int, items[:1])) and not any(issubclass(kind, Iterable) for kind in kinds):
        return {"prompts": items}
    return {f"prompts[{i}]": prompt for i, prompt in enumerate(items)}


def spread_sampling_params(
    params: Params,
    count: int,
    default: SamplingParams = SamplingParams(),  # noqa: B008 (it is frozen)
) -> list[tuple[str, SamplingParams]]:
    """Those of each prompt, from one for all, one each, or None for the default, behind what errors
    call them.
    """
    if params is None:
        params = default
    if isinstance(params, SamplingParams):
        return [("sampling_params", params)] * count
    items = listed(params)
    if items is None:
        raise TypeError(
            "`sampling_params` must be a SamplingParams, a list of them or None, "
            f"got {type(params).__name__}"
        )
    if len(items) != count:
        raise ValueError(
            f"`sampling_params` must be one for all or one per prompt, got {len(items)} for "
            f"{count} prompts"
        )
    for i, item in enumerate(items):
        if not isinstance(item, SamplingParams):
            raise TypeError(
                f"`sampling_params[{i}]` must be a SamplingParams, got {type(item).__name__}"
            )
    return [(f"sampling_params[{i}]", item) for i, item in enumerate(items)]


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


def listed(value: Any) -> list[Any] | None:
    """What an iterable gives, in a list (a list as it is).

    None for what is no list of anything: texts, mappings, tables (which give the names of their
    columns), and sets, which have no order.
    """
    if isinstance(value, list):
        return value
    if isinstance(value, (str, bytes, bytearray, Mapping, set, frozenset)):
        return None
    if hasattr(value, "tolist"):  # arrays of numpy, torch and pandas: Python's own numbers
        items = value.tolist()
        return items if isinstance(items, list) else None
    if hasattr(value, "keys"):
        return None
    try:
        items = iter(value)
    except TypeError:
        return None
    return list(items)


def _is_int(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)
