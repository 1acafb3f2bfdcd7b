"""Reader of a checkpoint's generation_config.json: sampling defaults, and tokens that end a text.

Imports no torch.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from nanovllm.checkpoint.files import MOST, has_file, read_json
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.options import only

logger = logging.getLogger(__name__)

GENERATION_CONFIG = "generation_config.json"
# The keys there that set sampling parameters, and our names for them.
SAMPLING_KEYS = {
    **{key: key for key in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")},
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",  # after the one above, which it must not exceed
    "stop_strings": "stop",
}
# Unsupported keys that would change texts, each with a test for values that would not.
UNREAD_KEYS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("bad_words_ids", "suppress_tokens", "sequence_bias"), only(None, [], {})),
    **dict.fromkeys(("begin_suppress_tokens", "forced_eos_token_id"), only(None, [])),
    **dict.fromkeys(("forced_bos_token_id", "max_time", "top_h"), only(None)),
    **dict.fromkeys(("exponential_decay_length_penalty", "watermarking_config"), only(None)),
    **dict.fromkeys(("no_repeat_ngram_size", "min_length", "penalty_alpha"), only(None, 0, 0.0)),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff"), only(None, 0, 0.0)),
    **dict.fromkeys(("typical_p", "guidance_scale"), only(None, 1, 1.0)),
    **dict.fromkeys(("num_beams", "num_return_sequences"), only(None, 1)),
}


def read_sampling_params(model: str) -> SamplingParams:
    """The sampling parameters in generation_config.json, with our defaults for missing keys.

    As in vLLM, `do_sample` and `max_length` are ignored: a missing temperature means 1, where
    transformers would decode greedily unless `do_sample` is true. `min_new_tokens` and
    `stop_strings`, which vLLM ignores, count as in transformers, except that the text ends before
    the stop string. A warning names the keys that would change texts and have no counterpart here.

    Raises:
        ValueError: for a value of a wrong type or out of range.
    """
    values = _read_generation(Path(model))
    ignored = [key for key, is_nothing in UNREAD_KEYS.items() if not is_nothing(values.get(key))]
    if ignored:
        logger.warning(
            "%s: ignoring %s, which transformers would apply",
            Path(model) / GENERATION_CONFIG,
            ", ".join(f"`{key}`" for key in ignored),
        )
    params = SamplingParams()
    for key, name in SAMPLING_KEYS.items():
        if (value := values.get(key)) is None:
            continue
        try:
            changes = {name: value}
            if key == "min_new_tokens" and values.get("max_new_tokens") is None:
                changes["max_tokens"] = _at_least(params.max_tokens, value)
            params = replace(params, **changes)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"`{key}` of {Path(model) / GENERATION_CONFIG} is no valid sampling default: "
                f'{error}; correct it, or pass generation_config="vllm" to leave all of them out'
            ) from None
    return params


def _at_least(default: int | None, least: Any) -> Any:
    """Our own bound, unless the checkpoint asks for more; a faulty value is left to the check."""
    is_more = type(least) is int and default is not None and least > default
    return least if is_more else default


def _read_generation(directory: Path) -> dict[str, Any]:
    """The contents of generation_config.json; empty if there is no such file."""
    file = directory / GENERATION_CONFIG
    return read_json(file) if has_file(file) else {}


def read_eos(directory: Path, raw: dict[str, Any]) -> frozenset[int]:
    """The tokens that end a text: from generation_config.json, else from config.json, `raw`."""
    file, eos = GENERATION_CONFIG, _read_generation(directory).get("eos_token_id")
    if eos is None:
        file, eos = "config.json", raw.get("eos_token_id")
    ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
    if not all(type(i) is int and 0 <= i <= MOST for i in ids):
        raise ValueError(f"{file}: `eos_token_id` must be token ids, got {eos!r}")
    return frozenset(ids)
