"""Sampling parameters as they stand in JSON and in columns of tables."""

from collections.abc import Mapping
from dataclasses import fields
from numbers import Integral, Real
from typing import Any

from nanovllm.sampling_params import SamplingParams, StructuredOutputsParams
from nanovllm.utils.options import nearest

# Names without underscores, ours and those of other libraries, and the parameter of each.
NAMES = {
    **{field.name.replace("_", ""): field.name for field in fields(SamplingParams)},
    **dict.fromkeys(("maxnewtokens", "maxcompletiontokens", "maxoutputtokens"), "max_tokens"),
    **dict.fromkeys(("maxtokenstosample", "numpredict"), "max_tokens"),
    **dict.fromkeys(("stopsequences", "stopstrings"), "stop"),
    **dict.fromkeys(("guidedjson", "guidedregex", "guidedchoice"), "structured_outputs"),
    **{"guidedgrammar": "structured_outputs", "responseformat": "structured_outputs"},
    **{"minnewtokens": "min_tokens", "toplogprobs": "logprobs", "randomseed": "seed"},
    **{"repeatpenalty": "repetition_penalty", "numreturnsequences": "n", "dosample": "temperature"},
}
# Parameters that are integers, or lists of them.
INTEGERS = (
    *("max_tokens", "top_k", "seed", "n", "min_tokens", "logprobs", "prompt_logprobs"),
    *("stop_token_ids", "allowed_token_ids", "logprob_token_ids", "best_of", "output_kind"),
)
CLOSE = 0.9  # one letter in ten differs; with more, columns of data look like parameters


def parameter_like(name: Any) -> str | None:
    """The sampling parameter that a field of another name may stand for."""
    plain = str(name).lower().replace("_", "").replace("-", "")
    return NAMES.get(nearest(plain, NAMES, CLOSE)) if len(plain) > 1 else None


def from_json(values: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of `SamplingParams`, from JSON's types.

    There, keys of `logit_bias` are strings, and `structured_outputs` is an object.

    Raises:
        TypeError, ValueError: for wrong `structured_outputs`.
    """
    given = dict(values)
    bias, form = given.get("logit_bias"), given.get("structured_outputs")
    if isinstance(bias, Mapping):
        given["logit_bias"] = {_token(token): value for token, value in bias.items()}
    if isinstance(form, Mapping):
        given["structured_outputs"] = StructuredOutputsParams(**form)
    return given


def wants_outputs(params: SamplingParams) -> bool:
    """Whether a request asks for more than one text, so that its result has all completions."""
    return (
        params.n > 1
        or params.logprobs is not None
        or params.logprob_token_ids is not None
        or params.return_sampling_mask
        or not params.detokenize
    )


def with_integers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of a row, with floats that are `whole` as integers."""
    given = {name: whole(v) if name in INTEGERS else v for name, v in values.items()}
    if isinstance(bias := given.get("logit_bias"), Mapping):
        given["logit_bias"] = {whole(token): value for token, value in bias.items()}
    return given


def whole(value: Any) -> Any:
    """An integer for a float that is one, also in a list: pandas writes 8.0 in a column of integers
    that has a gap. Anything else is left to the check.
    """
    if isinstance(value, list):
        return [whole(item) for item in value]
    is_float = isinstance(value, Real) and not isinstance(value, Integral)
    return int(value) if is_float and float(value).is_integer() else value


def _token(key: Any) -> Any:
    """A token id that may be written as a string; anything else is left to the check."""
    return int(key) if isinstance(key, str) and key.isdecimal() else key
