"""Sampling parameters as JSON and columns of tables have them."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from nanovllm.sampling_params import SamplingParams, StructuredOutputsParams
from nanovllm.utils.checks import nearest

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
CLOSE = 0.9  # a letter in ten: with more, columns of data look like parameters


def parameter_like(name: Any) -> str | None:
    """The sampling parameter that a field of another name may be meant for."""
    plain = str(name).lower().replace("_", "").replace("-", "")
    return NAMES.get(nearest(plain, NAMES, CLOSE)) if len(plain) > 1 else None


def from_json(values: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of `SamplingParams`, from what JSON can hold.

    Keys of `logit_bias` are strings there, and `structured_outputs` is an object.

    Raises:
        TypeError, ValueError: for `structured_outputs` that are wrong.
    """
    given = dict(values)
    bias, form = given.get("logit_bias"), given.get("structured_outputs")
    if isinstance(bias, Mapping):
        given["logit_bias"] = {_token(token): value for token, value in bias.items()}
    if isinstance(form, Mapping):
        given["structured_outputs"] = StructuredOutputsParams(**form)
    return given


def _token(key: Any) -> Any:
    """A token id that may be written as a string; what is none is left for the check."""
    return int(key) if isinstance(key, str) and key.isdecimal() else key
