"""`SamplingParams`: the sampling of one request, its end, and the contents of its result.

`BeamSearchParams`: the same for a beam search. Names, defaults and meanings are those of vLLM,
except that the default of `max_tokens` is 64.
"""

import copy
import json
import math
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from numbers import Integral
from typing import TYPE_CHECKING, Any

from typing_extensions import Self

from nanovllm.utils.checks import (
    check_bool,
    check_choice,
    check_float,
    check_int,
    plain_numbers,
    shown,
)
from nanovllm.utils.options import Foreign, missing_name, only, takes_foreign_fields

MAX_LOGPROBS = 20  # most likely tokens at one position
MAX_LABELS = 1024  # tokens of `logprob_token_ids`
# Distributions of log-probabilities, from the model's own to the one that is drawn from.
LOGPROBS_MODES = ("raw_logprobs", "temperature_logprobs", "processed_logprobs")
NO_TOKEN = -1  # in the place of a token, in a row whose logits have a NaN
MIN_TEMPERATURE = 1e-5  # below it rounding, not chance, would choose
LARGEST = 1e9  # bound of changes to logits: float32 has to hold the outcome
MAX_BEAM_WIDTH = MAX_LOGPROBS // 2  # as many tokens again may end their beams
MAX_CHOICES, MAX_CHOICE_BYTES = 20_000, 1 << 20  # within the limits of llguidance
BEAMS = "call beam_search() with BeamSearchParams"
FOREIGN_PARAMS: Foreign = {
    "best_of": (only(None, 1), "pass n"),
    "early_stopping": (
        only(None, False),
        "call beam_search(), which stops when no beam can improve",
    ),
    "extra_args": (only(None, {}), "there are no other parameters"),
    "flat_logprobs": (only(False), "logprobs are one dictionary per token"),
    "guided_decoding": (only(None), "pass structured_outputs"),
    "length_penalty": (only(None, 1, 1.0), BEAMS),
    "logits_processors": (
        only(None, []),
        "pass logit_bias, allowed_token_ids or structured_outputs",
    ),
    "output_kind": (only(None, 0), "call stream() or generate()"),
    "repetition_detection": (only(None), "pass repetition_penalty"),
    "skip_reading_prefix_cache": (only(None, False), "pass LLM(enable_prefix_caching=False)"),
    "spaces_between_special_tokens": (only(True), "the tokenizer decides"),
    "truncate_prompt_tokens": (only(None), "shorten the prompt"),
    "use_beam_search": (only(None, False), "call beam_search()"),
}
FOREIGN_BEAM_PARAMS: Foreign = {
    "include_stop_str_in_output": (only(False), "results include the token that ended them"),
}
REPLACED = {  # classes of vLLM that have other names or means here
    "GuidedDecodingParams": "pass StructuredOutputsParams as structured_outputs",
    "RequestOutputKind": "call generate() for the full text, stream() for the new part",
}


if not TYPE_CHECKING:  # a checker would believe that every name exists

    def __getattr__(name: str) -> Any:
        raise missing_name(__name__, name, REPLACED)


@takes_foreign_fields({})
@dataclass(frozen=True)
class StructuredOutputsParams:
    """The form that a completion must have. Exactly one of these is given.

    A completion ends with an end-of-sequence token, where its text has the form. Such a token may
    spell text elsewhere ("\\n", say): without `ignore_eos` it only ends, and the form continues
    with other tokens. If there are none, the text ends unfinished, and a warning is logged.

    Attributes:
        json: JSON Schema, as a dictionary or as text; kept as text.
        regex: regular expression that the whole text matches.
        choice: strings of which the text is one, at most 20,000 of together 1 MiB.
        grammar: context-free grammar in Lark's syntax, or in GBNF (`root ::= "a" | "b"`), read
            as Lark: a terminal consumes all the characters that it matches.
        json_object: True for any JSON object.
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
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise TypeError(f"`{name}` must be a string, got {shown(value)}")
        if self.choice is not None:
            object.__setattr__(self, "choice", _strings("choice", self.choice))
            if not self.choice:
                raise ValueError("`choice` must have at least one string, got none")
            self._check_size(self.choice)
        if self.json_object is not None:
            check_bool("json_object", self.json_object)
            if not self.json_object:
                raise ValueError("`json_object` must be True if it is given, got False")

    def _check_size(self, choice: Sequence[str]) -> None:
        num_bytes = sum(len(text.encode(errors="surrogatepass")) for text in choice)
        if len(choice) > MAX_CHOICES or num_bytes > MAX_CHOICE_BYTES:
            raise ValueError(
                f"`choice` must have at most {MAX_CHOICES:,} strings with "
                f"{MAX_CHOICE_BYTES:,} bytes in total, got {len(choice):,} with {num_bytes:,}"
            )


@takes_foreign_fields(FOREIGN_PARAMS)
@dataclass(frozen=True)
class SamplingParams:
    """The sampling of a request.

    Logits are changed in this order: `allowed_token_ids`, `bad_words`, `min_tokens` and
    `logit_bias`; the penalties; `temperature`; `min_p`, `top_k`, `top_p`. Lists, sets and arrays
    given here are kept as tuples, `logit_bias` as a copy.

    Attributes:
        temperature: divisor of the logits; 0 draws the most likely token (greedy decoding),
            and so does anything below 1e-5.
        max_tokens: maximum number of tokens to generate, at least 1; None: as many as the model
            allows.
        ignore_eos: go on after an end-of-sequence token, up to `max_tokens` (for benchmarks).
        top_k: draw from the k most likely tokens, and those equally likely as the last of them;
            0 or -1: from all.
        top_p: draw from the most likely tokens that together have at least this probability;
            1: from all.
        min_p: leave out tokens less likely than this share of the most likely one.
        repetition_penalty: divisor of positive logits, and factor of negative ones, for tokens in
            the prompt or the output; 1: none (Keskar et al., 2019).
        presence_penalty: value subtracted from the logits of tokens in the output.
        frequency_penalty: value subtracted from these logits, once for each time that the output
            has the token.
        seed: seed of the draws, which also depend on the position; None: they depend on the
            engine's seed and the place of the request among all. The same seed draws the same
            tokens, in any batch; requests of one seed whose prompts have one length draw by the
            same numbers, so give each its own, `n` apart.
        n: number of completions for each prompt; the seed of the i-th is `seed + i`.
        stop: strings that end the text, which then ends before them. One that is a special token
            of the tokenizer ends it there, even if the text leaves it out; one that contains such
            a token and more needs `skip_special_tokens=False`.
        stop_token_ids: tokens that end the text.
        include_stop_str_in_output: end the text after the stop string, not before it.
        min_tokens: number of first tokens among which neither `stop_token_ids` nor, without
            `ignore_eos`, end-of-sequence tokens are drawn, and no stop string is looked for.
        logprobs: return the log-probability of each token, and of this many most likely ones (at
            most 20), without those that have no probability. None: none.
        logprobs_mode: distribution of log-probabilities, and of ranks; None: the engine's.
            "raw_logprobs": the model's own, before all changes above. "temperature_logprobs": the
            softmax over the whole vocabulary at `temperature`, after masks, bias and penalties and
            before `min_p`, `top_k` and `top_p`: what trainers compute. "processed_logprobs": after
            these too, over the tokens that they leave; others have -inf. At temperature 0 the two
            latter are those of temperature 1, and nothing is left out but what is masked.
        logprob_token_ids: return the log-probabilities of these tokens beside each token's own, at
            most 1,024, without ranks: to read labels with `max_tokens=1`. Not with `logprobs`
            above 0.
        return_sampling_mask: return the tokens that could have been drawn: those that masks,
            `min_p`, `top_k` and `top_p` have left (`CompletionOutput.sampling_mask`).
        prompt_logprobs: return the log-probability of each token of the prompt, and of this many
            most likely ones, by the model alone, whatever `logprobs_mode` is.
        logit_bias: values added to the logits of tokens, by token id.
        allowed_token_ids: tokens that may be drawn; all others may not.
        bad_words: strings whose tokens are not generated; of several tokens the last is not.
        structured_outputs: form that the text must have; not with `min_tokens`,
            `allowed_token_ids` or `bad_words`.
        skip_special_tokens: leave special tokens out of the text.
        detokenize: return text; False: token ids only.

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
    logprobs_mode: str | None = None
    logprob_token_ids: Sequence[int] | None = None
    return_sampling_mask: bool = False
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)  # a dict has no hash
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
        check_bool("return_sampling_mask", self.return_sampling_mask)
        if self.logprobs_mode is not None:
            check_logprobs_mode(self.logprobs_mode)
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
        if self.structured_outputs is not None:
            for name in ("min_tokens", "allowed_token_ids", "bad_words"):
                if getattr(self, name):
                    raise ValueError(
                        f"`{name}` must not be combined with structured_outputs: together they may "
                        f"allow no token; got {shown(getattr(self, name))}"
                    )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"`min_tokens` must be at most max_tokens {self.max_tokens}, got {self.min_tokens}"
            )
        plain_numbers(self)

    def _check_numbers(self) -> None:
        check_float("temperature", self.temperature, 0.0, LARGEST)
        if self.max_tokens is not None:
            check_int("max_tokens", self.max_tokens, 1)
        check_int("top_k", self.top_k, -1, 2**31 - 1)
        check_float("top_p", self.top_p, math.ulp(0.0), 1.0, "above 0 and at most 1")
        check_float("min_p", self.min_p, 0.0, 1.0)
        rule = f"above 0, {1 / LARGEST:g} to {LARGEST:g}"
        check_float("repetition_penalty", self.repetition_penalty, 1 / LARGEST, LARGEST, rule)
        check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if isinstance(self.seed, Integral) and self.seed == -1:  # vLLM's other name for None
            object.__setattr__(self, "seed", None)
        if self.seed is not None:
            check_int("seed", self.seed, 0, 2**64 - 1)
        check_int("n", self.n, 1)
        check_int("min_tokens", self.min_tokens, 0)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), 0, MAX_LOGPROBS)

    def _normalize(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        bias = {} if self.logit_bias is None else self.logit_bias
        if not isinstance(bias, Mapping):
            raise TypeError(f"`logit_bias` must map token ids to numbers, got {shown(bias)}")
        _tokens("logit_bias", list(bias))
        rule = (
            f"finite and {-LARGEST:g} to {LARGEST:g} (to forbid a token: -100, bad_words or "
            "allowed_token_ids)"
        )
        for token, value in bias.items():
            check_float(f"logit_bias[{token}]", value, -LARGEST, LARGEST, rule)
        plain: dict[str, Any] = {
            "stop": _strings("stop", stop),
            "bad_words": _strings("bad_words", self.bad_words),
            "stop_token_ids": _tokens("stop_token_ids", self.stop_token_ids),
            "logit_bias": {int(token): float(value) for token, value in bias.items()},
        }
        if self.allowed_token_ids is not None:
            plain["allowed_token_ids"] = _tokens("allowed_token_ids", self.allowed_token_ids)
            if not plain["allowed_token_ids"]:
                raise ValueError("`allowed_token_ids` must have at least one token, got none")
        if self.logprob_token_ids is not None:
            plain["logprob_token_ids"] = _tokens("logprob_token_ids", self.logprob_token_ids)
            self._check_labels(plain["logprob_token_ids"])
        for name, value in plain.items():
            object.__setattr__(self, name, value)

    def _check_labels(self, labels: Sequence[int]) -> None:
        if not 0 < len(labels) <= MAX_LABELS:
            raise ValueError(
                f"`logprob_token_ids` must have 1 to {MAX_LABELS:,} tokens, got {len(labels):,}"
            )
        if self.logprobs:
            raise ValueError(
                "`logprobs` must be 0 or None with logprob_token_ids, which name the tokens, "
                f"got {self.logprobs}"
            )

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always drawn."""
        return self.temperature < MIN_TEMPERATURE

    def clone(self) -> Self:
        """A copy, as in vLLM; `dataclasses.replace` makes changed ones."""
        return copy.copy(self)


@takes_foreign_fields(FOREIGN_BEAM_PARAMS)
@dataclass(frozen=True)
class BeamSearchParams:
    """The parameters of `LLM.beam_search`.

    Attributes:
        beam_width: number of sequences kept at each step and returned, at most 10.
        max_tokens: maximum number of tokens to generate, at least 1.
        ignore_eos: go on after an end-of-sequence token, up to `max_tokens`.
        temperature: always 0, as nothing is drawn; for calls that pass it.
        length_penalty: exponent p in the score log-probability / length ** p, so that a larger one
            favours longer sequences. The length is that of prompt and output, without the token
            that ended it.

    Raises:
        TypeError: for a value of the wrong type, or an unknown argument.
        ValueError: for a value out of range.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    _: KW_ONLY
    temperature: float = 0.0
    length_penalty: float = 1.0

    def __post_init__(self) -> None:
        check_int("beam_width", self.beam_width, 1, MAX_BEAM_WIDTH)
        check_int("max_tokens", self.max_tokens, 1)
        check_bool("ignore_eos", self.ignore_eos)
        check_float("temperature", self.temperature, -math.inf)
        if self.temperature != 0:
            raise ValueError(
                f"`temperature` must be 0, got {self.temperature!r}: beams are the most likely "
                "sequences, generate() draws others"
            )
        check_float("length_penalty", self.length_penalty, -10.0, 10.0)  # powers stay finite
        plain_numbers(self)


def check_logprobs_mode(mode: Any) -> None:
    """Raise unless `mode` is one of `LOGPROBS_MODES`."""
    if mode in ("raw_logits", "processed_logits"):
        raise ValueError(
            f"`logprobs_mode` must be one of {', '.join(LOGPROBS_MODES)}, got {mode!r}: logits are "
            f"not returned; {mode.replace('logits', 'logprobs')} differ from them by a constant"
        )
    check_choice("logprobs_mode", mode, LOGPROBS_MODES)


def _items(name: str, value: Any, kind: str) -> list[Any]:
    """The items of a list, set or array; empty for None."""
    if value is None:
        return []
    if not isinstance(value, (str, bytes, bytearray, Mapping)):
        with suppress(TypeError):  # it is not iterable
            return list(value)
    raise TypeError(f"`{name}` must be a list of {kind}, got {shown(value)}")


def _strings(name: str, value: Any) -> tuple[str, ...]:
    items = _items(name, value, "strings")
    for item in items:
        if not isinstance(item, str):
            raise TypeError(f"`{name}` must hold strings, got {shown(item)}")
        if not item:
            raise ValueError(f"`{name}` must hold strings that are not empty, got ''")
    strings = [str.__str__(item) for item in items]  # str(item) of an Enum would be its name
    return tuple(sorted(strings) if isinstance(value, Set) else strings)


def _tokens(name: str, value: Any) -> tuple[int, ...]:
    items = _items(name, value, "token ids")
    for item in items:
        if isinstance(item, bool) or not isinstance(item, Integral):
            raise TypeError(f"`{name}` must hold integer token ids, got {shown(item)}")
        if int(item) < 0:
            raise ValueError(f"`{name}` must hold token ids of at least 0, got {shown(item)}")
    tokens = [int(item) for item in items]
    return tuple(sorted(tokens) if isinstance(value, Set) else tokens)


def _schema_text(schema: Any) -> str:
    """A JSON Schema as text, which the caller cannot change afterwards."""
    if not isinstance(schema, (str, Mapping)):
        raise TypeError(f"`json` must be a dictionary or a string, got {shown(schema)}")
    try:
        text = schema if isinstance(schema, str) else json.dumps(dict(schema), allow_nan=False)
        is_object = isinstance(json.loads(text), dict)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"`json` must be a JSON Schema, got {shown(schema)}: {error}") from None
    if not is_object:
        raise ValueError(f"`json` must be a JSON Schema, which is an object, got {shown(schema)}")
    return text
