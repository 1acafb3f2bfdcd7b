"""`ModelConfig`: the facts of a checkpoint that the engine needs, read from its JSON files.

Reads config.json and generation_config.json directly, in the spelling of transformers 4 and 5
alike (`torch_dtype`/`dtype`, `rope_theta`/`rope_parameters`). What the engine cannot run is
refused here, by name, before any weight is read. `read_sampling_params` gives the checkpoint's
own sampling parameters. Imports no torch.
"""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from nanovllm.families import FAMILIES
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.checks import check_bool, check_float, check_int
from nanovllm.utils.files import has_file, read_json

SUPPORTED_ACTIVATIONS = ("silu",)
ROPE_TYPES = ("default", "llama3")
GENERATION_CONFIG = "generation_config.json"
# The keys there that say how to sample, and our names for them.
SAMPLING_KEYS = {
    **{key: key for key in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")},
    "max_new_tokens": "max_tokens",
}

MOST = 2**31 - 1  # tokens and positions are int32

T = TypeVar("T", int, float, bool)


@dataclass(frozen=True)
class RopeParameters:
    """Rotary embedding, in the names of config.json's `rope_parameters`. The factors are those of
    "llama3", whose long wavelengths are divided (see `RotaryEmbedding`).
    """

    rope_theta: float
    rope_type: str = "default"  # or "llama3"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position_embeddings: int = 0


@dataclass(frozen=True)
class ModelConfig:
    """Shape and numerics of a model. Names are those of Hugging Face's config.json."""

    architecture: str
    dtype: str  # of the checkpoint: "bfloat16", "float16" or "float32"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeParameters
    max_position_embeddings: int
    tie_word_embeddings: bool
    qk_norm: bool  # queries and keys are normalised, each head for itself
    qkv_bias: bool
    output_bias: bool  # of attention's output projection
    mlp_bias: bool
    eos_token_ids: frozenset[int]  # of generation_config.json, else of config.json

    @classmethod
    def from_pretrained(cls, model: str) -> "ModelConfig":
        """Read the model directory `model`.

        Raises:
            ValueError: for a missing directory or file, and for everything unsupported.
        """
        directory = Path(model)
        if not os.path.isdir(model):
            raise ValueError(
                f"`model` must be the directory of a checkpoint, and {model!r} is no directory: "
                "download the model first (nothing is fetched from a hub)"
            )
        raw = read_json(directory / "config.json")
        _refuse_unsupported(raw)
        architecture = raw["architectures"][0]
        family = FAMILIES[architecture]
        num_heads = _read(raw, "num_attention_heads", int)
        hidden_size = _read(raw, "hidden_size", int)
        bias = _read(raw, "attention_bias", bool, False)
        config = cls(
            architecture=architecture,
            dtype=_read_dtype(raw),
            vocab_size=_read(raw, "vocab_size", int),
            hidden_size=hidden_size,
            intermediate_size=_read(raw, "intermediate_size", int),
            num_hidden_layers=_read(raw, "num_hidden_layers", int),
            num_attention_heads=num_heads,
            num_key_value_heads=_read(raw, "num_key_value_heads", int, num_heads),
            head_dim=_read_head_dim(raw, family.head_dim, hidden_size, num_heads),
            rms_norm_eps=_read(raw, "rms_norm_eps", float, 1e-6, minimum=1e-30, maximum=1),
            rope=_read_rope(raw, family.rope_theta),
            max_position_embeddings=_read(raw, "max_position_embeddings", int),
            tie_word_embeddings=_read(raw, "tie_word_embeddings", bool, False),
            qk_norm=family.qk_norm,
            qkv_bias=bias if family.qkv_bias is None else family.qkv_bias,
            output_bias=bias if family.output_bias is None else family.output_bias,
            mlp_bias=family.mlp_bias and _read(raw, "mlp_bias", bool, False),
            eos_token_ids=_read_eos(directory, raw),
        )
        config._check_shapes()
        return config

    def _check_shapes(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"config.json: `num_attention_heads` must be a multiple of `num_key_value_heads`, "
                f"got {self.num_attention_heads} and {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"config.json: `head_dim` must be even, got {self.head_dim}")

    def check_tensor_parallel(self, size: int) -> None:
        """ValueError unless the model can be split over `size` ranks."""
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        for name, value in (
            ("num_attention_heads", heads),
            ("intermediate_size", self.intermediate_size),
        ):
            if value % size:
                raise ValueError(
                    f"`tensor_parallel_size` must divide {name} {value} of this model, got {size}"
                )
        if kv_heads % size and size % kv_heads:
            raise ValueError(
                f"`tensor_parallel_size` must divide num_key_value_heads {kv_heads} of this model, "
                f"or be a multiple of it, got {size}"
            )


def read_sampling_params(model: str) -> SamplingParams:
    """How the model directory's generation_config.json says to sample; what it leaves out is ours.

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
            ) from error
    return params


def _read(
    raw: dict[str, Any],
    key: str,
    kind: type[T],
    default: T | None = None,
    minimum: float = 1,
    maximum: float = MOST,
) -> T:
    """`raw[key]`, an int or float in `minimum`..`maximum`, or a bool. Without a default the key is
    required.
    """
    value = raw.get(key)
    if value is None:
        if default is None:
            raise ValueError(f"config.json: `{key}` is missing")
        return default
    try:
        if kind is bool:
            check_bool(key, value)
        elif kind is int:
            check_int(key, value, int(minimum), int(maximum))
        else:
            check_float(key, value, minimum, maximum)
    except (TypeError, ValueError) as error:
        raise ValueError(f"config.json: {error}") from None
    return kind(value)


def _refuse_unsupported(raw: dict[str, Any]) -> None:
    architectures = raw.get("architectures") or [f"of model_type {raw.get('model_type')!r}"]
    name = architectures[0] if isinstance(architectures, list) else architectures
    if not isinstance(name, str) or not isinstance(architectures, list) or name not in FAMILIES:
        raise ValueError(
            f"config.json: `architectures` {name} is not supported; "
            f"supported: {', '.join(FAMILIES)}"
        )
    activation = raw.get("hidden_act", "silu")
    if activation not in SUPPORTED_ACTIVATIONS:
        raise ValueError(
            f"config.json: activation `hidden_act` {activation!r} is not supported; "
            f"supported: {', '.join(SUPPORTED_ACTIVATIONS)}"
        )
    quantization = raw.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        raise ValueError(
            "quantised checkpoints are not supported, and config.json has `quantization_config` "
            f"{method or quantization!r}: use the original bfloat16, float16 or float32 weights"
        )
    layer_types = raw.get("layer_types") or ["full_attention"]
    if not isinstance(layer_types, list) or not all(isinstance(kind, str) for kind in layer_types):
        raise ValueError(f"config.json: `layer_types` must be a list of names, got {layer_types!r}")
    if raw.get("use_sliding_window") or set(layer_types) != {"full_attention"}:
        raise ValueError(
            "sliding-window attention is not supported: config.json has `use_sliding_window` "
            f"{raw.get('use_sliding_window')} and `layer_types` {sorted(set(layer_types))}"
        )


def _read_head_dim(
    raw: dict[str, Any], default: int | None, hidden_size: int, num_heads: int
) -> int:
    if raw.get("head_dim") is None and default is None and hidden_size % num_heads:
        raise ValueError(
            "config.json: without `head_dim`, `hidden_size` must be a multiple of "
            f"`num_attention_heads`, got {hidden_size} and {num_heads}"
        )
    return _read(raw, "head_dim", int, default or hidden_size // num_heads)


def _read_rope(raw: dict[str, Any], default_theta: float | None) -> RopeParameters:
    """Transformers 4 has `rope_theta`, and scaling as `rope_scaling`; 5 both as `rope_parameters`,
    for all layers or for each kind of layer.
    """
    theta, scaling = raw.get("rope_theta"), None
    for key in ("rope_scaling", "rope_parameters"):
        rope = raw.get(key) or {}
        if not isinstance(rope, dict):
            raise ValueError(f"config.json: `{key}` must be an object, got {rope!r}")
        for part in (rope, *(value for value in rope.values() if isinstance(value, dict))):
            _refuse_rope(key, part)
        full = rope.get("full_attention")
        rope = full if isinstance(full, dict) else rope
        theta = theta if rope.get("rope_theta") is None else rope["rope_theta"]
        if _rope_type(rope) == "llama3":
            scaling = rope
    read_theta = _read({"rope_theta": theta}, "rope_theta", float, default_theta, maximum=1e30)
    if scaling is None:
        return RopeParameters(read_theta)
    low, high = (
        _read(scaling, key, float, minimum=1e-3) for key in ("low_freq_factor", "high_freq_factor")
    )
    if low >= high:
        raise ValueError(
            "config.json: `low_freq_factor` of RoPE must be below `high_freq_factor`, got "
            f"{low} and {high}"
        )
    factor = _read(scaling, "factor", float)
    original = _read(scaling, "original_max_position_embeddings", int)
    return RopeParameters(read_theta, "llama3", factor, low, high, original)


def _rope_type(rope: dict[str, Any]) -> Any:
    return rope.get("rope_type", rope.get("type")) or "default"


def _refuse_rope(key: str, rope: dict[str, Any]) -> None:
    if _rope_type(rope) not in ROPE_TYPES:
        raise ValueError(
            f"RoPE scaling {_rope_type(rope)!r} is not supported, only {' and '.join(ROPE_TYPES)} "
            f"are: config.json has it as `{key}`"
        )
    if rope.get("partial_rotary_factor") not in (None, 1.0):
        raise ValueError(
            "rotating a part of each head is not supported: config.json has "
            f"`partial_rotary_factor` {rope['partial_rotary_factor']!r} in `{key}`"
        )


def _read_dtype(raw: dict[str, Any]) -> str:
    dtype = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    if dtype not in ("bfloat16", "float16", "float32"):
        raise ValueError(
            f"config.json: `dtype` {dtype!r} is not supported, only bfloat16, float16, float32"
        )
    return str(dtype)


def _read_generation(directory: Path) -> dict[str, Any]:
    """generation_config.json; nothing without it."""
    file = directory / GENERATION_CONFIG
    return read_json(file) if has_file(file) else {}


def _read_eos(directory: Path, raw: dict[str, Any]) -> frozenset[int]:
    file, eos = GENERATION_CONFIG, _read_generation(directory).get("eos_token_id")
    if eos is None:
        file, eos = "config.json", raw.get("eos_token_id")
    ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
    if not all(type(i) is int and 0 <= i <= MOST for i in ids):
        raise ValueError(f"{file}: `eos_token_id` must be token ids, got {eos!r}")
    return frozenset(ids)
