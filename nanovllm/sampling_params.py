"""`SamplingParams`: how one request is sampled, when it ends, and what its result carries.

Names, defaults and meanings are those of vLLM; only the default of `max_tokens` is 64.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

from nanovllm.utils.checks import check_bool, check_float, check_int, plain_integers

MAX_LOGPROBS = 20  # of the most likely tokens, for one position
MIN_TEMPERATURE = 1e-5  # below it rounding, not chance, would choose


@dataclass(frozen=True)
class StructuredOutputsParams:
    """The form that a completion must have. Exactly one of these is given.

    Attributes:
        json: a JSON Schema, as a dictionary or as text.
        regex: a regular expression that the whole text matches.
        choice: strings of which the text is one.
        grammar: a context-free grammar in Lark's syntax.
        json_object: any JSON object.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def __post_init__(self) -> None:
        given = [name for name, value in vars(self).items() if value is not None]
        if len(given) != 1:
            raise ValueError(
                "`structured_outputs` must have exactly one of json, regex, choice, grammar and "
                f"json_object, got {', '.join(given) or 'none'}"
            )
        if self.json is not None and not isinstance(self.json, (str, Mapping)):
            raise TypeError(f"`json` must be a dictionary or a string, got {self.json!r}")
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise TypeError(f"`{name}` must be a string, got {value!r}")
        if self.choice is not None:
            object.__setattr__(self, "choice", _strings("choice", self.choice))
            if not self.choice:
                raise ValueError("`choice` must have at least one string, got none")
        if self.json_object is not None and self.json_object is not True:
            raise ValueError(f"`json_object` must be True where given, got {self.json_object!r}")


@dataclass(frozen=True)
class SamplingParams:
    """How to sample a request.

    What is done to the logits, in this order: `allowed_token_ids`, `bad_words`, `min_tokens` and
    `logit_bias`; the penalties; `temperature`; `min_p`, `top_k`, `top_p`. Sequences given here are
    kept as tuples.

    Attributes:
        temperature: divides the logits; 0 takes the most likely token (greedy decoding),
            and so does anything below 1e-5.
        max_tokens: the most tokens to generate, at least 1; None: as far as the model allows.
        ignore_eos: go on after an end-of-sequence token, up to `max_tokens` (for benchmarks).
        top_k: draw from the k most likely tokens, and those equally likely as the last of them;
            0 or -1: from all.
        top_p: draw from the most likely tokens that together have at least this probability;
            1: from all.
        min_p: leave out tokens less likely than this share of the most likely one.
        repetition_penalty: divides positive logits of tokens that the prompt or the output has,
            and multiplies negative ones; 1: none (Keskar et al., 2019).
        presence_penalty: taken from the logits of tokens that the output has.
        frequency_penalty: the same, once for each time it has them.
        seed: what the draws depend on, besides the position; None: on the engine's seed and the
            place of the request among all. The same seed draws the same tokens, in any batch.
        n: completions for each prompt; the seed of the i-th is `seed + i`.
        stop: strings that end the text, which then ends before them.
        stop_token_ids: tokens that end it.
        include_stop_str_in_output: the text ends behind the stop string.
        min_tokens: neither end-of-sequence tokens nor `stop_token_ids` are drawn, and no stop
            string is looked for, before this many tokens.
        logprobs: give the log-probability of each token, and of this many most likely ones, by the
            model alone: before everything above. None: none.
        prompt_logprobs: the same for the tokens of the prompt.
        logit_bias: added to the logits of tokens, by their ids.
        allowed_token_ids: nothing else is drawn.
        bad_words: strings whose tokens are not generated; of several tokens the last is not.
        structured_outputs: the form that the text must have.
        skip_special_tokens: leave special tokens out of the text.
        detokenize: give text; False: token ids only.

    Raises:
        TypeError: for a value of the wrong type, or an unknown argument.
        ValueError: for a value out of range.
    """

    temperature: float = 1.0
    max_tokens: int | None = 64
    ignore_eos: bool = False
    _: KW_ONLY
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    n: int = 1
    stop: Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    structured_outputs: StructuredOutputsParams | None = None
    skip_special_tokens: bool = True
    detokenize: bool = True

    def __post_init__(self) -> None:
        self._check_numbers()
        self._normalize()
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            check_bool(name, getattr(self, name))
        check_bool("detokenize", self.detokenize)
        if not isinstance(self.structured_outputs, (StructuredOutputsParams, type(None))):
            raise TypeError(
                "`structured_outputs` must be a StructuredOutputsParams, got "
                f"{type(self.structured_outputs).__name__}"
            )
        if self.stop and not self.detokenize:
            raise ValueError("`stop` must be empty without `detokenize`: pass stop_token_ids")
        if self.n > 1 and self.is_greedy:
            raise ValueError(
                f"`n` must be 1 at temperature 0, where all completions are the same, got {self.n}"
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"`min_tokens` must be at most max_tokens {self.max_tokens}, got {self.min_tokens}"
            )
        plain_integers(self)

    def _check_numbers(self) -> None:
        check_float("temperature", self.temperature, 0.0)
        if self.max_tokens is not None:
            check_int("max_tokens", self.max_tokens, 1)
        check_int("top_k", self.top_k, -1)
        check_float("top_p", self.top_p, 0.0, 1.0)
        if self.top_p <= 0:
            raise ValueError(f"`top_p` must be above 0, got {self.top_p!r}")
        check_float("min_p", self.min_p, 0.0, 1.0)
        check_float("repetition_penalty", self.repetition_penalty, 0.0)
        if self.repetition_penalty <= 0:
            raise ValueError(
                f"`repetition_penalty` must be above 0, got {self.repetition_penalty!r}"
            )
        check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.seed is not None:
            check_int("seed", self.seed, 0, 2**64 - 1)
        check_int("n", self.n, 1)
        check_int("min_tokens", self.min_tokens, 0)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), 0, MAX_LOGPROBS)

    def _normalize(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        object.__setattr__(self, "stop", _strings("stop", stop or ()))
        object.__setattr__(self, "bad_words", _strings("bad_words", self.bad_words or ()))
        object.__setattr__(
            self, "stop_token_ids", _tokens("stop_token_ids", self.stop_token_ids or ())
        )
        if self.allowed_token_ids is not None:
            allowed = _tokens("allowed_token_ids", self.allowed_token_ids)
            if not allowed:
                raise ValueError("`allowed_token_ids` must have at least one token, got none")
            object.__setattr__(self, "allowed_token_ids", allowed)
        bias = {} if self.logit_bias is None else self.logit_bias
        if not isinstance(bias, Mapping):
            raise TypeError(f"`logit_bias` must map token ids to numbers, got {bias!r}")
        _tokens("logit_bias", bias)
        for token, value in bias.items():
            check_float(f"logit_bias[{token}]", value, -math.inf)
        plain = {int(token): float(value) for token, value in bias.items()}
        object.__setattr__(self, "logit_bias", plain)

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.temperature < MIN_TEMPERATURE


def _strings(name: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise TypeError(f"`{name}` must be a list of strings, got {value!r}")
    for item in value:
        if not isinstance(item, str):
            raise TypeError(f"`{name}` must hold strings, got {item!r}")
        if not item:
            raise ValueError(f"`{name}` must hold strings that are not empty, got ''")
    return tuple(value)


def _tokens(name: str, value: Any) -> tuple[int, ...]:
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise TypeError(f"`{name}` must hold token ids, got {value!r}")
    tokens = tuple(value)
    for token in tokens:
        check_int(name, token, 0)
    return tuple(int(token) for token in tokens)
