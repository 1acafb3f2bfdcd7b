"""Sampling parameters as JSON and columns of tables have them."""

import difflib
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from nanovllm.sampling_params import SamplingParams, StructuredOutputsParams

NAMES = {  # parameters by their names, and by those that other libraries have for them
    **{field.name.replace("_", ""): field.name for field in fields(SamplingParams)},
    **dict.fromkeys(("maxnewtokens", "maxcompletiontokens", "maxoutputtokens"), "max_tokens"),
    **dict.fromkeys(("stopsequences", "stopstrings"), "stop"),
    **{"maxlength": "max_tokens", "numreturnsequences": "n", "dosample": "temperature"},
    "responseformat": "structured_outputs",
}
CLOSE = 0.9  # a letter in ten: with more, columns of data look like parameters


def parameter_like(name: Any) -> str | None:
    """The sampling parameter that a field of another name may be meant for."""
    plain = str(name).lower().replace("_", "").replace("-", "")
    near = difflib.get_close_matches(plain, NAMES, 1, CLOSE)
    return NAMES[near[0]] if near else None


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
