"""The parameters of a request as they stand in JSON and in columns of tables. Imports no torch."""

from collections.abc import Mapping
from dataclasses import fields, replace
from numbers import Integral, Real
from typing import Any

from nanovllm.sampling_params import FOREIGN_PARAMS, SamplingParams, StructuredOutputsParams
from nanovllm.utils.checks import shown

PARAMETERS = {field.name for field in fields(SamplingParams)} | set(FOREIGN_PARAMS)
# Arguments of `LLM.chat` that stand beside a conversation.
CHAT_FIELDS = ("tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")
# Parameters that are integers, or lists of them.
INTEGERS = (
    *("max_tokens", "top_k", "seed", "n", "min_tokens", "logprobs", "prompt_logprobs"),
    *("stop_token_ids", "allowed_token_ids", "logprob_token_ids", "best_of", "output_kind"),
)


def read_params(
    values: Mapping[str, Any], default: SamplingParams, seed: int | None = None
) -> SamplingParams:
    """Sampling parameters over the default ones.

    Args:
        values: fields of a request; those of other names are left out.
        default: parameters used where there are none.
        seed: seed for a request that is sampled at random and has none.

    Raises:
        TypeError, ValueError: naming the parameter that is wrong.
    """
    nested = values.get("sampling_params")
    if nested is not None and not isinstance(nested, Mapping):
        raise TypeError(f"`sampling_params` must be an object, got {shown(nested)}")
    own = {name: value for name, value in values.items() if name in PARAMETERS}
    given = {name: value for name, value in {**own, **(nested or {})}.items() if value is not None}
    has_seed = default.seed is not None or given.get("seed", -1) != -1  # -1 means none, too
    if seed is not None and not has_seed and given.get("temperature", default.temperature) != 0:
        given["seed"] = seed
    return replace(default, **from_json(_with_integers(given))) if given else default


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


def _with_integers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters, with floats that are `whole` as integers."""
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
