"""The registry of architectures: what each name in config.json stands for. Imports no torch."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from nanovllm.utils.files import read_value

Raw = dict[str, Any]  # config.json

FULL, SLIDING = "full_attention", "sliding_attention"  # in `layer_types`


def _as_it_is(raw: Raw) -> Raw:
    return {}


class Family(NamedTuple):
    """A model, and what the name of an architecture says of it beside config.json.

    Attributes:
        model: the class, as `file.Class` in models/.
        qk_norm: attention normalises queries and keys, each head for itself.
        qkv_bias, output_bias: whether attention's projections have biases; None: config.json says
            it as `attention_bias`.
        mlp_bias: whether config.json may ask for biases in the MLP.
        packed_qkv, packed_gate_up: the checkpoint has `qkv_proj`, `gate_up_proj` as one tensor.
        interleaved_rope: see `RopeParameters`.
        defaults: what config.json leaves out.
        complete: what to add to config.json, whose `num_hidden_layers` is right, where the family
            says in its own way what others have a key for.
    """

    model: str
    qk_norm: bool = False
    qkv_bias: bool | None = None
    output_bias: bool | None = None
    mlp_bias: bool = False
    packed_qkv: bool = False
    packed_gate_up: bool = False
    interleaved_rope: bool = False
    defaults: Mapping[str, Any] = MappingProxyType({})
    complete: Callable[[Raw], Raw] = _as_it_is


def _all_slide(raw: Raw) -> Raw:
    return _layer_types(raw, lambda i: bool(raw.get("sliding_window")))


def _upper_layers_slide(raw: Raw) -> Raw:
    """Qwen: where `use_sliding_window` asks for it."""
    if not read_value(raw, "use_sliding_window", bool, False):
        return {"sliding_window": None}
    first = read_value(raw, "max_window_layers", int, 28, minimum=0)
    return _layer_types(raw, lambda i: i >= first)


def _some_do_not_turn(raw: Raw) -> Raw:
    """SmolLM3: every fourth layer, which alone may slide."""
    interval = read_value(raw, "no_rope_layer_interval", int, 4)
    turns = raw.get("no_rope_layers")
    if turns is None:
        turns = [int((i + 1) % interval != 0) for i in range(raw["num_hidden_layers"])]
    slide = read_value(raw, "use_sliding_window", bool, False) and isinstance(turns, list)
    return {"no_rope_layers": turns, **_layer_types(raw, lambda i: slide and not turns[i])}


def _layer_types(raw: Raw, slides: Callable[[int], bool]) -> Raw:
    """The kinds of the layers, unless config.json has them."""
    if raw.get("layer_types") is not None:
        return {}
    layers = range(raw["num_hidden_layers"])
    return {"layer_types": [SLIDING if slides(i) else FULL for i in layers]}


QWEN3 = "qwen3.Qwen3ForCausalLM"  # the others differ from it in facts
THETA = {"rope_theta": 10_000.0}
NO_BIASES: dict[str, Any] = {"qkv_bias": False, "output_bias": False}
FAMILIES = {
    "GlmForCausalLM": Family(
        QWEN3,
        output_bias=False,
        packed_gate_up=True,
        interleaved_rope=True,
        defaults={**THETA, "head_dim": 128, "attention_bias": True, "partial_rotary_factor": 0.5},
    ),
    "GraniteForCausalLM": Family(
        QWEN3, mlp_bias=True, defaults={**THETA, "attention_multiplier": 1.0}
    ),
    "LlamaForCausalLM": Family(QWEN3, mlp_bias=True, defaults=THETA),
    "Ministral3ForCausalLM": Family(
        QWEN3, **NO_BIASES, defaults={"head_dim": 128}, complete=_all_slide
    ),
    "MistralForCausalLM": Family(QWEN3, **NO_BIASES, defaults=THETA, complete=_all_slide),
    "Phi3ForCausalLM": Family(
        QWEN3,
        **NO_BIASES,
        packed_qkv=True,
        packed_gate_up=True,
        defaults={**THETA, "original_max_position_embeddings": 4096},
        complete=_all_slide,
    ),
    "Qwen2ForCausalLM": Family(
        QWEN3, qkv_bias=True, output_bias=False, complete=_upper_layers_slide
    ),
    "Qwen3ForCausalLM": Family(
        QWEN3, qk_norm=True, defaults={"head_dim": 128}, complete=_upper_layers_slide
    ),
    "SmolLM3ForCausalLM": Family(
        QWEN3,
        mlp_bias=True,
        defaults={"rope_theta": 2_000_000.0, "tie_word_embeddings": True},
        complete=_some_do_not_turn,
    ),
}
