"""What a checkpoint's generation_config.json says: how to sample, and what ends a text.

Imports no torch.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.files import MOST, has_file, read_json

GENERATION_CONFIG = "generation_config.json"
# The keys there that say how to sample, and our names for them.
SAMPLING_KEYS = {
    **{key: key for key in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")},
    "max_new_tokens": "max_tokens",
}


def read_sampling_params(model: str) -> SamplingParams:
    """The sampling parameters of generation_config.json, and our defaults for keys that it lacks.

    As in vLLM, `do_sample` is not looked at: without a temperature, 1 is taken, where transformers
    would decode greedily unless `do_sample` is true.

    Raises:
        ValueError: for a value of a wrong type or out of range.
    """
    values = _read_generation(Path(model))
    params = SamplingParams()
    for key, name in SAMPLING_KEYS.items():
        if values.get(key) is None:
            continue
        try:
            params = replace(params, **{name: values[key]})
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"`{key}` of {Path(model) / GENERATION_CONFIG} is no default to sample by: "
                f'{error}; correct it, or pass generation_config="vllm" to leave all of them out'
            ) from None
    return params


def _read_generation(directory: Path) -> dict[str, Any]:
    """generation_config.json; nothing without it."""
    file = directory / GENERATION_CONFIG
    return read_json(file) if has_file(file) else {}


def read_eos(directory: Path, raw: dict[str, Any]) -> frozenset[int]:
    """The tokens that end a text: those of generation_config.json, else of config.json, `raw`."""
    file, eos = GENERATION_CONFIG, _read_generation(directory).get("eos_token_id")
    if eos is None:
        file, eos = "config.json", raw.get("eos_token_id")
    ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
    if not all(type(i) is int and 0 <= i <= MOST for i in ids):
        raise ValueError(f"{file}: `eos_token_id` must be token ids, got {eos!r}")
    return frozenset(ids)
