"""The forms in which callers may pass prompts and sampling parameters. Imports no torch."""

import re
from collections.abc import Collection, Iterable, Mapping
from numbers import Integral
from typing import Any, Protocol, TypeAlias

from typing_extensions import NotRequired, TypedDict

from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.checks import shown

Prompt: TypeAlias = "str | Iterable[int] | Mapping[str, Any]"
Prompts: TypeAlias = "Prompt | Iterable[Prompt]"
Params: TypeAlias = "SamplingParams | Iterable[SamplingParams] | None"


class TextPrompt(TypedDict):
    """A prompt as text, with its images where it has any (docs/reference/images.md)."""

    prompt: str
    multi_modal_data: NotRequired[Mapping[str, Any]]
    mm_processor_kwargs: NotRequired[Mapping[str, Any]]


class TokensPrompt(TypedDict):
    """A prompt as token ids, with optional text to show in its result, and its images."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    multi_modal_data: NotRequired[Mapping[str, Any]]
    mm_processor_kwargs: NotRequired[Mapping[str, Any]]


class Tokenizer(Protocol):
    """The part of a tokenizer that is needed here."""

    def encode(self, text: str, *, verbose: bool, add_special_tokens: bool = True) -> list[int]: ...


def name_prompts(prompts: Prompts) -> dict[str, Any]:
    """One prompt or many, keyed by their names in errors."""
    if isinstance(prompts, (str, Mapping)):
        return {"prompts": prompts}
    items = listed(prompts)
    if items is None:
        raise TypeError(
            "`prompts` must be a string, token ids, a dictionary, or a list of those, "
            f"got {type(prompts).__name__}"
        )
    # A text or list among them is a prompt; integers alone are the tokens of one prompt.
    kinds = set(map(type, items))
    if any(map(_is_int, items[:1])) and not any(issubclass(kind, Iterable) for kind in kinds):
        return {"prompts": items}
    return {f"prompts[{i}]": prompt for i, prompt in enumerate(items)}


def spread_sampling_params(
    params: Params, count: int, default: SamplingParams
) -> list[tuple[str, SamplingParams]]:
    """The parameters of each of `count` prompts, after their name in errors. `params` is one for
    all, one for each, or None for the default.
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


def special_stops(
    params: SamplingParams, special_tokens: Mapping[str, int], name: str = "sampling_params"
) -> dict[int, str]:
    """The stop strings that are special tokens, by token id, where texts leave these out. They end
    a text without being in it. `name` stands for the parameters in errors.

    Raises:
        ValueError: for a stop string that contains such a token and more: no text contains it.
    """
    found: dict[int, str] = {}
    for text in params.stop or () if params.skip_special_tokens else ():
        if text in special_tokens:
            found[special_tokens[text]] = text
            continue
        for token, token_id in special_tokens.items():
            if token in text:
                raise ValueError(
                    f"`{name}.stop` must hold strings that can occur in a text, got {shown(text)}: "
                    f"{token} is a special token, which is left out. Pass "
                    f"stop_token_ids=[{token_id}], or skip_special_tokens=False"
                )
    return found


def bad_word_tokens(
    tokenizer: Tokenizer, bad_words: Iterable[str], name: str = "bad_words"
) -> list[tuple[int, ...]]:
    """The token sequences that must not be generated.

    A word is forbidden at the start of a text and after a space, whether it is given with a leading
    space or not: it is tokenised in both forms. vLLM drops the form with the space if it has
    another number of tokens; here it is dropped only if it ends with the other form, which forbids
    it already. Other tokens that spell the same word are not found, nor is another case. A token
    that is also a part of longer words cannot occur in these, either.

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
            raise ValueError(f"`{name}[{i}]` must have tokens, got {shown(word)}")
        sequences.append(plain)
        if spaced[-len(plain) :] != plain:
            sequences.append(spaced)
    return list(dict.fromkeys(sequences))


def max_characters(tokenizer: Any, num_tokens: int) -> int:
    """The maximum number of characters that so many tokens can spell."""
    return num_tokens * max(map(len, tokenizer.get_vocab()), default=0)


def encode(
    tokenizer: Tokenizer, text: str, name: str, *, max_chars: int | None = None, **options: bool
) -> list[int]:
    """The token ids of a text. `name` stands for it in errors.

    Raises:
        ValueError: if it has more characters than `max_chars`, which is quickly seen, or cannot be
            tokenised.
    """
    if max_chars is not None and len(text) > max_chars:
        raise ValueError(
            f"`{name}` must have at most {max_chars:,} characters, as many as max_model_len tokens "
            f"can spell, got {len(text):,}: shorten it"
        )
    try:
        # The tokenizer's own warning of long texts would precede our error, which says more.
        return tokenizer.encode(text, verbose=False, **options)
    except (TypeError, UnicodeError) as error:
        reason: object = error
        if re.search("[\ud800-\udfff]", text):
            reason = "it has lone surrogates, which are not characters"
        raise ValueError(f"`{name}` cannot be tokenised: {reason}") from None


def check_vocabulary(name: str, token_ids: Collection[int], vocab_size: int) -> None:
    """ValueError unless all tokens are in the vocabulary. `name` stands for them in the error."""
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
        wrong = next(i for i in token_ids if not 0 <= i < vocab_size)
        raise ValueError(
            f"`{name}` must hold token ids in 0..{vocab_size - 1} (the vocabulary), got {wrong}"
        )


def listed(value: Any) -> list[Any] | None:
    """The items of an iterable as a list (a list itself, not a copy).

    None for anything that does not count as a list: texts, mappings, tables (which iterate over
    column names), and sets, which have no order.
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


def whole_numbers(items: list[Any], name: str) -> list[int]:
    """Integers of any kind as Python's own. `name` stands for them in errors.

    Raises:
        TypeError: for anything else.
    """
    if set(map(type, items)) <= {int}:
        return list(items)
    wrong = [item for item in items if not _is_int(item)]  # numpy's integers, say, are right
    if wrong:
        is_prompt = isinstance(wrong[0], (str, Mapping)) or listed(wrong[0]) is not None
        remedy = ": it is one prompt, not a list of prompts" if is_prompt else ""
        raise TypeError(f"`{name}` must hold integer token ids, got {shown(wrong[0])}{remedy}")
    return [int(item) for item in items]


def _is_int(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)
