"""Sampling parameters as JSON and columns of tables have them."""

from collections.abc import Mapping
from typing import Any

from nanovllm.sampling_params import StructuredOutputsParams


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
