"""The meaning of names of fields, and of sampling parameters, for the rows of a job."""

from dataclasses import fields
from typing import Any

from nanovllm.sampling_params import SamplingParams
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
ADAPTERS = (  # names of adapters without underscores, ours and those of other libraries
    *("adapter", "adapters", "adaptername", "adapterpath"),
    *("lora", "loraadapter", "loraname", "lorapath", "lorarequest"),
)
CLOSE = 0.9  # one letter in ten differs; with more, columns of data look like parameters


def parameter_like(name: Any) -> str | None:
    """The sampling parameter that a field of another name may stand for."""
    plain = _plain(name).replace("-", "")
    return NAMES.get(nearest(plain, NAMES, CLOSE)) if len(plain) > 1 else None


def names_images(name: Any) -> bool:
    """Whether a field has a name that stands for pictures elsewhere."""
    return _plain(name) in ("image", "images", "imageurl", "imagepath", "imagefile")


def names_adapter(name: Any) -> bool:
    """Whether a field has a name that stands for an adapter, here or elsewhere."""
    return _plain(name) in ADAPTERS


def _plain(name: Any) -> str:
    """A field's name without the differences of ways to write it."""
    return str(name).lower().replace("_", "")


def wants_outputs(params: SamplingParams) -> bool:
    """Whether a request asks for more than one text, so that its result has all completions."""
    return (
        params.n > 1
        or params.logprobs is not None
        or params.logprob_token_ids is not None
        or params.return_sampling_mask
        or not params.detokenize
    )
