"""The registry of architectures, by their names in config.json. Imports no torch."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from nanovllm.checkpoint.files import read_value
from nanovllm.checkpoint.vision import QWEN3_VL, SIGLIP
from nanovllm.utils.integers import cdiv

Raw = dict[str, Any]  # config.json

# In `layer_types`.
FULL, SLIDING = "full_attention", "sliding_attention"
LINEAR, CONV = "linear_attention", "conv"  # layers with a state for each sequence


def _as_it_is(raw: Raw) -> Raw:
    return {}


class Family(NamedTuple):
    """A model, and the facts that an architecture's name adds to config.json.

    Attributes:
        model: class of the model, as `file.Class` in models/.
        qk_norm: kind of normalisation of queries and keys, as in `ModelConfig`.
        norm_plus_one: whether norms multiply by 1 + weight, as in `ModelConfig`.
        qkv_bias, output_bias: whether attention's projections have biases; None: `attention_bias`
            in config.json decides.
        mlp_bias: whether config.json may ask for biases in the MLP.
        packed_qkv, packed_gate_up: whether the checkpoint stores `qkv_proj`, `gate_up_proj` as one
            tensor each.
        num_experts: keys in config.json for the number of experts, of which the first one present
            counts; empty: the model is dense.
        expert_size: key in config.json for the intermediate size of an expert.
        experts_path: path of a layer's experts, in that layer.
        expert_names: names of gate, up and down in an expert.
        expert_bias: whether router and experts have biases.
        swiglu_limit: default of `swiglu_limit` in config.json; 0: that key is ignored.
        attention_sinks: whether attention has sinks (see `Scoring`).
        packed_experts: whether the checkpoint stores all experts of a layer as one tensor, possibly
            in MXFP4.
        has_shared_expert: whether sparse layers have an expert for all tokens, too.
        attention_gate: see `ModelConfig`.
        layer_kinds: kinds of layers that `layer_types` in config.json may name.
        by_key_head: see `DeltaNetConfig`.
        interleaved_rope: whether RoPE rotates neighbours (see `RopeParameters`).
        is_part: whether the text model is part of a checkpoint that has others, such as one for
            images; only text is read and written.
        tower: kind of the vision tower (see `VisionConfig`); empty: images are not read.
        may_have_parts: whether a checkpoint of the text model may have these parts, too, and the
            names of the whole.
        defaults: values for keys that config.json lacks or has as null.
        absent: values for keys that config.json lacks, where null means none (a window, a
            soft-cap). Like `defaults`, all come from the classes of transformers.
        complete: function that returns the keys to add to config.json (whose `num_hidden_layers` is
            valid) for facts that this family spells differently.
    """

    model: str
    qk_norm: str = ""
    norm_plus_one: bool = False
    qkv_bias: bool | None = None
    output_bias: bool | None = None
    mlp_bias: bool = False
    packed_qkv: bool = False
    packed_gate_up: bool = False
    num_experts: tuple[str, ...] = ()
    expert_size: str = "moe_intermediate_size"
    experts_path: str = "mlp.experts"
    expert_names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    expert_bias: bool = False
    swiglu_limit: float = 0.0
    attention_sinks: bool = False
    packed_experts: bool = False
    has_shared_expert: bool = False
    attention_gate: bool = False
    layer_kinds: tuple[str, ...] = (FULL, SLIDING)
    by_key_head: bool = False
    interleaved_rope: bool = False
    is_part: bool = False
    tower: str = ""
    may_have_parts: bool = False
    defaults: Mapping[str, Any] = MappingProxyType({})
    absent: Mapping[str, Any] = MappingProxyType({})
    complete: Callable[[Raw], Raw] = _as_it_is


def _all_slide(raw: Raw) -> Raw:
    return _layer_types(raw, lambda i: bool(raw.get("sliding_window")))


def _upper_layers_slide(raw: Raw) -> Raw:
    """Qwen: the layers from `max_window_layers` up slide, if `use_sliding_window` asks for it."""
    if not read_value(raw, "use_sliding_window", bool, False):
        return {"sliding_window": None}
    first = read_value(raw, "max_window_layers", int, 28, minimum=0)
    return _layer_types(raw, lambda i: i >= first)


def _some_do_not_turn(raw: Raw) -> Raw:
    """SmolLM3: every fourth layer has no rotation, and only such layers may slide."""
    interval = read_value(raw, "no_rope_layer_interval", int, 4)
    turns = raw.get("no_rope_layers")
    if turns is None:
        turns = [int((i + 1) % interval != 0) for i in range(raw["num_hidden_layers"])]
    slide = read_value(raw, "use_sliding_window", bool, False) and isinstance(turns, list)
    kinds = _layer_types(raw, lambda i: slide and not any(turns[i : i + 1]))
    return {"no_rope_layers": turns, **kinds}


def _mixtral(raw: Raw) -> Raw:
    return {**_all_slide(raw), "norm_topk_prob": True}


def _gpt_oss(raw: Raw) -> Raw:
    """gpt-oss: every other layer slides."""
    if (alpha := read_value(raw, "swiglu_alpha", float, 1.702, 0, 1e6)) != 1.702:
        raise ValueError(f"config.json: `swiglu_alpha` {alpha} is not supported, only 1.702")
    facts = {**_layer_types(raw, lambda i: i % 2 == 0), "norm_topk_prob": True}
    if raw.get("rope_scaling") is None and raw.get("rope_parameters") is None:
        facts["rope_scaling"] = GPT_OSS_ROPE
    return facts


def _qwen3_moe(raw: Raw) -> Raw:
    """Qwen3 MoE: all layers slide, if `use_sliding_window` asks for it."""
    asked = read_value(raw, "use_sliding_window", bool, False)
    return _all_slide(raw) if asked else {"sliding_window": None}


def _qwen3_next(raw: Raw) -> Raw:
    """Qwen3-Next and 3.5: all layers but every fourth are linear."""
    gate = raw.get("output_gate_type", "swish")
    if gate not in ("swish", "silu"):
        raise ValueError(f"config.json: `output_gate_type` {gate!r} is not supported, only 'swish'")
    if not read_value(raw, "attn_output_gate", bool, True):
        raise ValueError("config.json: `attn_output_gate` false is not supported, only true")
    if raw.get("layer_types") is not None:
        return {}
    interval = read_value(raw, "full_attention_interval", int, 4)
    layers = range(raw["num_hidden_layers"])
    return {"layer_types": [FULL if (i + 1) % interval == 0 else LINEAR for i in layers]}


def _qwen3_5_moe(raw: Raw) -> Raw:
    return {**_qwen3_next(raw), "norm_topk_prob": True}


def _qwen3_vl_moe(raw: Raw) -> Raw:
    return {"norm_topk_prob": True, "sliding_window": None}


def _lfm2(raw: Raw) -> Raw:
    """LFM2: the intermediate size is adjusted, and layers that attend may be given by number."""
    facts: Raw = {"rms_norm_eps": read_value(raw, "norm_eps", float, 1e-5, 1e-30, 1)}
    facts["tie_word_embeddings"] = read_value(
        raw, "tie_embedding", bool, read_value(raw, "tie_word_embeddings", bool, True)
    )
    key = "block_ff_dim" if raw.get("block_ff_dim") is not None else "intermediate_size"
    size = read_value(raw, key, int)
    if read_value(raw, "block_auto_adjust_ff_dim", bool, True):
        size = int(2 * size / 3)
        if raw.get("block_ffn_dim_multiplier") is not None:
            factor = read_value(raw, "block_ffn_dim_multiplier", float, None, 1e-6, 1e6)
            multiple = read_value(raw, "block_multiple_of", int, 256)
            size = multiple * cdiv(int(factor * size), multiple)
    facts["intermediate_size"] = size
    if raw.get("layer_types") is None:
        layers = range(raw["num_hidden_layers"])
        attend = raw.get("full_attn_idxs")
        if attend is None:
            return facts  # all of them
        if not isinstance(attend, list) or not all(type(i) is int for i in attend):
            raise ValueError(
                f"config.json: `full_attn_idxs` must be a list of numbers, got {attend!r}"
            )
        facts["layer_types"] = [FULL if i in attend else CONV for i in layers]
    return facts


def _gemma2(raw: Raw) -> Raw:
    """Gemma 2: every other layer slides."""
    return {**_gemma(raw), **_layer_types(raw, lambda i: i % 2 == 0)}


def _gemma3(raw: Raw) -> Raw:
    """Gemma 3: all layers but every sixth slide, and rotate with a base of their own."""
    pattern = read_value(raw, "sliding_window_pattern", int, 6)
    local = read_value(raw, "rope_local_base_freq", float, 10_000.0, maximum=1e30)
    if read_value(raw, "use_bidirectional_attention", bool, False):
        raise ValueError(
            "config.json: `use_bidirectional_attention` is not supported: such a model encodes "
            "text and generates none"
        )
    return {
        **_gemma(raw),
        **_layer_types(raw, lambda i: (i + 1) % pattern != 0),
        **_plain_rope_where_it_slides(raw, local),
    }


def _gemma(raw: Raw) -> Raw:
    """Gemma: scores and embeddings have multipliers of their own."""
    return {
        "attention_multiplier": read_value(raw, "query_pre_attn_scalar", float, 256.0) ** -0.5,
        "embedding_multiplier": read_value(raw, "hidden_size", int) ** 0.5,
    }


def _exaone4(raw: Raw) -> Raw:
    """EXAONE 4: if there is a window, every fourth layer sees all tokens, without rotation."""
    if not raw.get("sliding_window"):
        return {}
    kinds = raw.get("layer_types")
    if kinds is None:
        interval = read_value(raw, "sliding_window_pattern", int, 4)
        kinds = _layer_types(raw, lambda i: (i + 1) % interval != 0)["layer_types"]
    turns = [int(kind == SLIDING) for kind in kinds] if isinstance(kinds, list) else None
    return {"layer_types": kinds, "no_rope_layers": turns}


def _olmo3(raw: Raw) -> Raw:
    """OLMo 3: all layers but every fourth slide; RoPE scaling is for those that do not."""
    kinds = _layer_types(raw, lambda i: (i + 1) % 4 != 0)
    return {**kinds, **_plain_rope_where_it_slides(raw, None)}


def _plain_rope_where_it_slides(raw: Raw, theta: float | None) -> Raw:
    """`rope_parameters` by kind of layer, for files whose scaling spares the sliding layers.
    `theta` is the base of the sliding layers; None: that of the whole file.
    """
    rope, scaling = raw.get("rope_parameters") or {}, raw.get("rope_scaling") or {}
    if not isinstance(rope, dict) or not isinstance(scaling, dict):
        return {}
    full = rope.get(FULL, {} if SLIDING in rope else rope)
    if not isinstance(full, dict):
        return {}
    if "type" in scaling or "rope_type" in scaling:  # added by hand, so it counts
        full = {key: value for key, value in full.items() if key not in ("type", "rope_type")}
    full = {"rope_theta": raw.get("rope_theta"), **full, **scaling}
    of_file = raw.get("rope_theta") if FULL in rope else full["rope_theta"]
    sliding = {"rope_type": "default", "rope_theta": theta or of_file}
    if isinstance(own := rope.get(SLIDING), dict):
        sliding |= own
    return {"rope_scaling": None, "rope_parameters": {FULL: full, SLIDING: sliding}}


def _layer_types(raw: Raw, slides: Callable[[int], bool]) -> Raw:
    """The kinds of the layers, unless config.json has them."""
    if raw.get("layer_types") is not None:
        return {}
    layers = range(raw["num_hidden_layers"])
    return {"layer_types": [SLIDING if slides(i) else FULL for i in layers]}


QWEN3 = "qwen3.Qwen3ForCausalLM"  # the other families differ from it in facts only
THETA, EPS = {"rope_theta": 10_000.0}, {"rms_norm_eps": 1e-5}
WINDOW = {"sliding_window": 4096}
KV_8, KV_32 = ({"num_key_value_heads": count} for count in (8, 32))
NO_BIASES: dict[str, Any] = {"qkv_bias": False, "output_bias": False}
GEMMA = {
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
}
GEMMA3 = Family(
    "gemma.Gemma2ForCausalLM",
    norm_plus_one=True,
    qk_norm="head",
    defaults={
        **GEMMA,
        "image_token_index": 262_144,
        "max_position_embeddings": 131_072,
        "mm_tokens_per_image": 256,
        "num_attention_heads": 8,
        "rope_theta": 1_000_000.0,
        "vocab_size": 262_208,
    },
    absent=WINDOW,
    complete=_gemma3,
)
GLM: dict[str, Any] = {
    "output_bias": False,
    "packed_gate_up": True,
    "interleaved_rope": True,
    "defaults": {
        **THETA,
        "attention_bias": True,
        "head_dim": 128,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1.5625e-7,
    },
    "absent": {"num_key_value_heads": 2},
}
MISTRAL = Family(QWEN3, **NO_BIASES, defaults=THETA, absent={**KV_8, **WINDOW}, complete=_all_slide)
QWEN3_VL_KEYS: dict[str, Any] = {
    "deepstack_visual_indexes": [8, 16, 24],
    "image_token_id": 151_655,
    "mrope_section": [24, 20, 20],
    "rope_theta": 500_000.0,
}
QWEN3_NEXT: dict[str, Any] = {
    "norm_plus_one": True,
    "qk_norm": "head",
    "attention_gate": True,
    "layer_kinds": (FULL, LINEAR),
}
QWEN3_5_SIZES = {
    "head_dim": 256,
    "image_token_id": 248_056,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "mrope_section": [11, 11, 10],
    "partial_rotary_factor": 0.25,
    "rope_theta": 10_000.0,
    "vocab_size": 248_320,
}
QWEN3_5 = Family(
    "qwen3_5.Qwen3_5ForCausalLM",
    **QWEN3_NEXT,
    may_have_parts=True,
    defaults=QWEN3_5_SIZES,
    absent={"num_key_value_heads": 4},
    complete=_qwen3_next,
)
QWEN3_5_MOE = Family(
    "qwen3_5.Qwen3_5MoeForCausalLM",
    **QWEN3_NEXT,
    num_experts=("num_local_experts", "num_experts"),
    has_shared_expert=True,
    may_have_parts=True,
    defaults={
        **QWEN3_5_SIZES,
        "moe_intermediate_size": 512,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "shared_expert_intermediate_size": 512,
    },
    absent={"num_key_value_heads": 2},
    complete=_qwen3_5_moe,
)
GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
FAMILIES = {
    "Exaone4ForCausalLM": Family(
        "exaone4.Exaone4ForCausalLM",
        **NO_BIASES,
        qk_norm="head",
        defaults={**THETA, **EPS},
        absent={**KV_32, **WINDOW},
        complete=_exaone4,
    ),
    "Gemma2ForCausalLM": Family(
        "gemma.Gemma2ForCausalLM",
        norm_plus_one=True,
        defaults={**THETA, **GEMMA},
        absent={**WINDOW, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        complete=_gemma2,
    ),
    "Gemma3ForCausalLM": GEMMA3,
    "Gemma3ForConditionalGeneration": GEMMA3._replace(is_part=True, tower=SIGLIP),
    "Glm4ForCausalLM": Family("gemma.Glm4ForCausalLM", **GLM),
    "GlmForCausalLM": Family(QWEN3, **GLM),
    "GptOssForCausalLM": Family(
        "gpt_oss.GptOssForCausalLM",
        num_experts=("num_local_experts",),
        expert_size="intermediate_size",
        expert_bias=True,
        swiglu_limit=7.0,
        attention_sinks=True,
        packed_experts=True,
        defaults={
            **EPS,
            "attention_bias": True,
            "head_dim": 64,
            "num_experts_per_tok": 4,
            "num_local_experts": 128,
            "rope_theta": 150_000.0,
        },
        absent={**KV_8, "sliding_window": 128},
        complete=_gpt_oss,
    ),
    "GraniteForCausalLM": Family(
        QWEN3, mlp_bias=True, defaults={**THETA, "attention_multiplier": 1.0}
    ),
    "Lfm2ForCausalLM": Family(
        "lfm2.Lfm2ForCausalLM",
        **NO_BIASES,
        qk_norm="head",
        layer_kinds=(FULL, CONV),
        defaults={"conv_L_cache": 3, "rope_theta": 1_000_000.0},
        absent={**KV_8, "block_ffn_dim_multiplier": 1.0},
        complete=_lfm2,
    ),
    "LlamaForCausalLM": Family(QWEN3, mlp_bias=True, defaults=THETA),
    "Ministral3ForCausalLM": Family(
        QWEN3,
        **NO_BIASES,
        defaults={**EPS, "head_dim": 128},
        absent=KV_8,
        complete=_all_slide,
    ),
    "MinistralForCausalLM": MISTRAL,
    "Mistral3ForConditionalGeneration": MISTRAL._replace(is_part=True),
    "MistralForCausalLM": MISTRAL,
    "MixtralForCausalLM": Family(
        "qwen3_moe.MixtralForCausalLM",
        **NO_BIASES,
        num_experts=("num_local_experts",),
        expert_size="intermediate_size",
        experts_path="block_sparse_moe.experts",
        expert_names=("w1", "w3", "w2"),
        defaults={
            **EPS,
            "num_experts_per_tok": 2,
            "num_local_experts": 8,
            "rope_theta": 1_000_000.0,
        },
        absent=KV_8,
        complete=_mixtral,
    ),
    "Olmo2ForCausalLM": Family(
        "olmo2.Olmo2ForCausalLM", qk_norm="whole", defaults={**THETA, **EPS}
    ),
    "Olmo3ForCausalLM": Family(
        "olmo2.Olmo2ForCausalLM",
        qk_norm="whole",
        defaults={**EPS, "rope_theta": 500_000.0},
        absent=WINDOW,
        complete=_olmo3,
    ),
    "Phi3ForCausalLM": Family(
        QWEN3,
        **NO_BIASES,
        packed_qkv=True,
        packed_gate_up=True,
        defaults={**THETA, **EPS, "original_max_position_embeddings": 4096},
        complete=_all_slide,
    ),
    "Qwen2ForCausalLM": Family(
        QWEN3,
        qkv_bias=True,
        output_bias=False,
        absent={**KV_32, **WINDOW},
        complete=_upper_layers_slide,
    ),
    "Qwen3ForCausalLM": Family(
        QWEN3,
        qk_norm="head",
        defaults={"head_dim": 128},
        absent={**KV_32, **WINDOW},
        complete=_upper_layers_slide,
    ),
    "Qwen3MoeForCausalLM": Family(
        "qwen3_moe.Qwen3MoeForCausalLM",
        qk_norm="head",
        num_experts=("num_local_experts", "num_experts"),  # in transformers 5, and 4
        defaults={"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8},
        absent={"num_key_value_heads": 4, **WINDOW},
        complete=_qwen3_moe,
    ),
    "Qwen3NextForCausalLM": QWEN3_5_MOE._replace(
        by_key_head=True,
        defaults={
            **QWEN3_5_MOE.defaults,
            "norm_topk_prob": True,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "vocab_size": 151_936,
        },
        complete=_qwen3_next,
    ),
    "Qwen3VLForConditionalGeneration": Family(
        QWEN3,
        qk_norm="head",
        is_part=True,
        tower=QWEN3_VL,
        defaults={**QWEN3_VL_KEYS, "head_dim": 128},
        absent=KV_32,
    ),
    "Qwen3VLMoeForConditionalGeneration": Family(
        "qwen3_moe.Qwen3VLMoeForConditionalGeneration",
        qk_norm="head",
        num_experts=("num_local_experts", "num_experts"),
        packed_experts=True,
        is_part=True,
        tower=QWEN3_VL,
        defaults={
            **QWEN3_VL_KEYS,
            "moe_intermediate_size": 1408,
            "num_experts": 60,
            "num_experts_per_tok": 4,
        },
        absent={"num_key_value_heads": 16},
        complete=_qwen3_vl_moe,
    ),
    "Qwen3_5ForCausalLM": QWEN3_5,
    "Qwen3_5ForConditionalGeneration": QWEN3_5._replace(is_part=True, tower=QWEN3_VL),
    "Qwen3_5MoeForCausalLM": QWEN3_5_MOE,
    "Qwen3_5MoeForConditionalGeneration": QWEN3_5_MOE._replace(is_part=True, tower=QWEN3_VL),
    "SmolLM3ForCausalLM": Family(
        QWEN3,
        mlp_bias=True,
        defaults={"rope_theta": 2_000_000.0, "tie_word_embeddings": True},
        absent={"num_key_value_heads": 4},
        complete=_some_do_not_turn,
    ),
}


def family_of(raw: Raw) -> Family:
    """The family of a config.json whose architecture is known. For Mistral 3, `text_config` tells
    Mistral Small from Ministral 3.
    """
    family, text = FAMILIES[raw["architectures"][0]], raw.get("text_config")
    if family.is_part and isinstance(text, dict) and text.get("model_type") == "ministral3":
        return FAMILIES["Ministral3ForCausalLM"]._replace(is_part=True)
    return family
