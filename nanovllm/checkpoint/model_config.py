"""`ModelConfig`: the facts of a checkpoint that the engine needs, read from its JSON files.

Reads config.json directly, in the spelling of transformers 4 and 5 alike (`torch_dtype`/`dtype`,
`rope_theta`/`rope_parameters`). A model that the engine cannot run is refused here, by name, before
any weight is read. Imports no torch.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from nanovllm.checkpoint.families import CONV, FULL, LINEAR, SLIDING, Family, family_of
from nanovllm.checkpoint.files import read_json, read_value
from nanovllm.checkpoint.generation_config import read_eos
from nanovllm.checkpoint.quantization import Quantization, read_quantization
from nanovllm.checkpoint.refusals import refuse_architecture, refuse_directory
from nanovllm.checkpoint.rope import RopeParameters, read_rope
from nanovllm.checkpoint.vision import VisionConfig, read_vision

MAX_LAYERS = 10_000
TIED = "tie_word_embeddings"
MXFP4_BLOCK = 32  # values that share a scale, which is a power of two
SUPPORTED_ACTIVATIONS = ("silu", "gelu_pytorch_tanh")

T = TypeVar("T")


@dataclass(frozen=True)
class LayerConfig:
    """The facts that may differ from layer to layer.

    Attributes:
        rope: rotary embedding of queries and keys; None: the layer has no attention, but a state
            for each sequence.
        window: number of tokens that a token sees, itself and those before it; 0: all.
        is_sparse: whether the layer has experts in the place of an MLP.
    """

    rope: RopeParameters | None
    window: int = 0
    is_sparse: bool = False


@dataclass(frozen=True)
class ExpertConfig:
    """The experts of a sparse layer. Names are those of config.json.

    Attributes:
        num_experts: experts in a layer.
        num_experts_per_tok: experts active per token.
        intermediate_size: intermediate size of each expert.
        norm_topk_prob: whether the weights of a token's experts are scaled to add up to 1.
        bias: whether router and experts have biases.
        swiglu_limit: clamp on gate and up (see `layers/experts.py`); 0: none.
        packed: whether the checkpoint stores all experts of a layer as one tensor.
        is_mxfp4: whether the checkpoint stores them in MXFP4.
        has_shared: whether a layer has one expert more, which all tokens choose, with a gate.
        path: path of a layer's experts in the checkpoint, in that layer.
        names: names of gate, up and down in the checkpoint, in each expert.
        inputs_first: whether matrices of experts in one tensor are [inputs, outputs] there.
    """

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    norm_topk_prob: bool
    bias: bool
    swiglu_limit: float
    packed: bool
    is_mxfp4: bool
    has_shared: bool
    path: str
    names: tuple[str, str, str]
    inputs_first: bool = False

    def modules(self, path: str) -> Iterator[str]:
        """The paths of all modules of experts in the checkpoint.

        Args:
            path: path of the layer's experts, which the checkpoint stores one by one.
        """
        experts = [f"{path}.{i}" for i in range(self.num_experts)]
        if self.has_shared:
            experts.append(self.shared(path))
        for expert in experts:
            yield from (f"{expert}.{name}" for name in self.names)

    def shared(self, path: str) -> str:
        """The path of the expert that all tokens choose, beside the experts of this path."""
        return f"{path.rpartition('.')[0]}.shared_expert"


@dataclass(frozen=True)
class DeltaNetConfig:
    """The heads of Gated DeltaNet layers; `linear_` precedes their names in config.json.

    Attributes:
        num_key_heads, num_value_heads: heads; each key head belongs to as many value heads.
        key_head_dim, value_head_dim: numbers in a head.
        conv_kernel_dim: tokens that the convolution sees, the newest included.
        by_key_head: whether the checkpoint has the projections of each key head side by side.
        gates_in_codes: whether the projections to gates are quantised, which few checkpoints do.
    """

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel_dim: int
    by_key_head: bool
    gates_in_codes: bool = False


@dataclass(frozen=True)
class ShortConvConfig:
    """The convolutions in the place of attention (LFM2).

    Attributes:
        kernel_size: tokens that a convolution sees, the newest included.
        bias: whether it and its projections have biases.
    """

    kernel_size: int
    bias: bool


@dataclass(frozen=True)
class ModelConfig:
    """Shape and numerics of a model. Names are those of Hugging Face's config.json."""

    architecture: str
    dtype: str  # dtype of the checkpoint: "bfloat16", "float16" or "float32"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    layers: tuple[LayerConfig, ...]
    experts: ExpertConfig | None  # in the sparse layers
    delta_net: DeltaNetConfig | None  # in layers without attention
    short_conv: ShortConvConfig | None  # in such layers of another family
    hidden_act: str  # "silu" or "gelu_pytorch_tanh"
    norm_plus_one: bool  # norms multiply by 1 + weight
    qk_norm: str  # normalisation of queries and keys: by "head", over all heads ("whole"), or ""
    qkv_bias: bool
    output_bias: bool  # bias of attention's output projection
    attention_gate: bool  # whether the query projection has a gate of each head's output, too
    mlp_bias: bool
    packed_qkv: bool  # one tensor in the checkpoint
    packed_gate_up: bool
    is_part: bool  # the checkpoint may have other parts, such as one for images
    attention_multiplier: float  # factor of attention scores
    attention_sinks: bool  # see `Scoring`
    attn_logit_softcapping: float  # see `Scoring`; 0: none
    final_logit_softcapping: float  # soft-cap of logits; 0: none
    embedding_multiplier: float
    residual_multiplier: float  # factor of attention's and the MLP's outputs, before they are added
    logits_scaling: float  # divisor of logits
    quantization: Quantization | None  # of linear layers
    vision: VisionConfig | None  # of models that read images
    eos_token_ids: frozenset[int]  # from generation_config.json, else from config.json
    source: dict[str, Any] = field(repr=False, hash=False)  # config.json

    @classmethod
    def from_pretrained(cls, model: str, *, language_model_only: bool = False) -> "ModelConfig":
        """Read the model directory `model`; `language_model_only` leaves out the part that sees.

        Raises:
            ValueError: for a missing directory or file, and for anything unsupported.
        """
        directory = Path(model)
        refuse_directory(directory)
        source = raw = read_json(directory / "config.json")
        refuse_architecture(raw)
        architecture = raw["architectures"][0]
        family = family_of(raw)
        if family.is_part:
            text = raw.get("text_config")
            if not isinstance(text, dict):
                raise ValueError(f"config.json: `text_config` must be an object, got {text!r}")
            whole = _without_nulls(raw)
            raw = {**text, **whole, **_without_nulls(text)}
            if TIED in whole:  # the value of the whole model counts, as in transformers
                raw[TIED] = whole[TIED]
        absent = {key: value for key, value in family.absent.items() if key not in raw}
        raw = {**family.defaults, **absent, **_without_nulls(raw)}
        read_value(raw, "num_hidden_layers", int, maximum=MAX_LAYERS)
        raw |= family.complete(raw)
        facts = _facts(raw, family)
        if family.tower and not language_model_only and source.get("vision_config") is not None:
            facts["vision"] = read_vision(source, raw, family.tower, facts["hidden_size"])
            _check_deepstack(facts["vision"], len(facts["layers"]))
        config = cls(architecture, eos_token_ids=read_eos(directory, raw), source=source, **facts)
        config._check_shapes()
        return config

    @property
    def is_recurrent(self) -> bool:
        """Whether layers keep a state for each sequence beside its KV blocks."""
        return any(layer.rope is None for layer in self.layers)

    @property
    def is_mxfp4(self) -> bool:
        """Whether the checkpoint has its experts in MXFP4."""
        return self.experts is not None and self.experts.is_mxfp4

    @property
    def ropes(self) -> list[RopeParameters]:
        """The rotary embeddings of the layers, each once."""
        return list(dict.fromkeys(layer.rope for layer in self.layers if layer.rope is not None))

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
        divided = {"num_attention_heads": heads, "intermediate_size": self.intermediate_size}
        if self.experts is not None:
            divided["the experts' intermediate_size"] = self.experts.intermediate_size
        if self.delta_net is not None:
            divided["linear_num_key_heads"] = self.delta_net.num_key_heads
        if self.short_conv is not None:
            divided["hidden_size"] = self.hidden_size
        for name, value in divided.items():
            if value % size:
                raise ValueError(
                    f"`tensor_parallel_size` must divide {name} {value} of this model, got {size}"
                )
        if kv_heads % size and size % kv_heads:
            raise ValueError(
                f"`tensor_parallel_size` must divide num_key_value_heads {kv_heads} of this model, "
                f"or be a multiple of it, got {size}"
            )


def _without_nulls(raw: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in raw.items() if value is not None}


def _facts(raw: dict[str, Any], family: Family) -> dict[str, Any]:
    """The fields of `ModelConfig`, all but three, from config.json and its family."""
    num_heads, hidden_size = (
        read_value(raw, key, int) for key in ("num_attention_heads", "hidden_size")
    )
    head_dim = _read_head_dim(raw, hidden_size, num_heads)
    layers = _read_layers(raw, head_dim, family)
    bias = read_value(raw, "attention_bias", bool, False)
    return {
        "dtype": _read_dtype(raw),
        "vocab_size": read_value(raw, "vocab_size", int),
        "hidden_size": hidden_size,
        "intermediate_size": _read_intermediate_size(raw, layers),
        "num_hidden_layers": len(layers),
        "num_attention_heads": num_heads,
        "num_key_value_heads": read_value(raw, "num_key_value_heads", int, num_heads),
        "head_dim": head_dim,
        "rms_norm_eps": read_value(raw, "rms_norm_eps", float, 1e-6, minimum=1e-30, maximum=1),
        "max_position_embeddings": max(
            read_value(raw, "max_position_embeddings", int),
            *(layer.rope.max_position_embeddings for layer in layers if layer.rope is not None),
        ),
        TIED: read_value(raw, TIED, bool, False),
        "layers": layers,
        "experts": _read_experts(raw, family),
        "delta_net": _read_delta_net(raw, family) if LINEAR in family.layer_kinds else None,
        "short_conv": _read_short_conv(raw) if CONV in family.layer_kinds else None,
        "hidden_act": _read_activation(raw),
        "norm_plus_one": family.norm_plus_one,
        "qk_norm": family.qk_norm,
        "qkv_bias": bias if family.qkv_bias is None else family.qkv_bias,
        "output_bias": bias if family.output_bias is None else family.output_bias,
        "attention_gate": family.attention_gate,
        "mlp_bias": family.mlp_bias and read_value(raw, "mlp_bias", bool, False),
        "quantization": _read_quantization(raw, family),
        "packed_qkv": family.packed_qkv,
        "packed_gate_up": family.packed_gate_up,
        "is_part": family.is_part or family.may_have_parts,
        "attention_multiplier": _read_multiplier(raw, "attention_multiplier", head_dim**-0.5),
        "attention_sinks": family.attention_sinks,
        "attn_logit_softcapping": _read_cap(raw, "attn_logit_softcapping"),
        "final_logit_softcapping": _read_cap(raw, "final_logit_softcapping"),
        "embedding_multiplier": _read_multiplier(raw, "embedding_multiplier"),
        "residual_multiplier": _read_multiplier(raw, "residual_multiplier"),
        "logits_scaling": _read_multiplier(raw, "logits_scaling"),
        "vision": None,
    }


def _check_deepstack(vision: VisionConfig, num_layers: int) -> None:
    if len(vision.deepstack) >= num_layers:
        raise ValueError(
            "config.json: `deepstack_visual_indexes` must be fewer than the layers of the language "
            f"model, got {len(vision.deepstack)} and {num_layers}"
        )


def _read_short_conv(raw: dict[str, Any]) -> ShortConvConfig:
    taps = read_value(raw, "conv_L_cache", int, minimum=2)
    return ShortConvConfig(taps, read_value(raw, "conv_bias", bool, False))


def _quantization(raw: dict[str, Any]) -> Any:
    """The method of a quantised checkpoint; None if it is not quantised."""
    quantization = raw.get("quantization_config") or None
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    return method or quantization


def _read_quantization(raw: dict[str, Any], family: Family) -> Quantization | None:
    if family.packed_experts and _quantization(raw) == "mxfp4":
        return None  # only the experts are quantised
    return read_quantization(raw)


def _read_head_dim(raw: dict[str, Any], hidden_size: int, num_heads: int) -> int:
    if raw.get("head_dim") is None and hidden_size % num_heads:
        raise ValueError(
            "config.json: without `head_dim`, `hidden_size` must be a multiple of "
            f"`num_attention_heads`, got {hidden_size} and {num_heads}"
        )
    return read_value(raw, "head_dim", int, hidden_size // num_heads)


def _read_layers(raw: dict[str, Any], head_dim: int, family: Family) -> tuple[LayerConfig, ...]:
    """The facts of each layer, in order."""
    kinds = _read_list(raw, "layer_types", FULL, family.layer_kinds)
    turns = _read_list(raw, "no_rope_layers", 1, (0, 1))
    window = read_value(raw, "sliding_window", int, 0, minimum=0)
    sparse = _sparse_layers(raw) if family.num_experts else set()
    ropes = {
        kind: read_rope(raw, kind, head_dim, family.interleaved_rope)
        for kind in dict.fromkeys(kinds)
        if kind in (FULL, SLIDING)
    }
    layers = []
    for i, kind in enumerate(kinds):
        rope = ropes.get(kind)
        if rope is not None and not turns[i]:
            rope = replace(rope, rope_type="none")
        layers.append(LayerConfig(rope, window if kind == SLIDING else 0, i in sparse))
    if not ropes:
        raise ValueError("config.json: `layer_types` must have a layer with attention, got none")
    return tuple(layers)


def _read_intermediate_size(raw: dict[str, Any], layers: tuple[LayerConfig, ...]) -> int:
    """The intermediate size of dense layers; 0 if there are none, and none is given."""
    all_sparse = all(layer.is_sparse for layer in layers)
    return read_value(raw, "intermediate_size", int, 0 if all_sparse else None)


def _read_delta_net(raw: dict[str, Any], family: Family) -> DeltaNetConfig:
    names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
    key_heads, value_heads, K, V = (read_value(raw, f"linear_{name}", int) for name in names)
    taps = read_value(raw, "linear_conv_kernel_dim", int, minimum=2)
    if value_heads % key_heads:
        raise ValueError(
            "config.json: `linear_num_value_heads` must be a multiple of `linear_num_key_heads`, "
            f"got {value_heads} and {key_heads}"
        )
    return DeltaNetConfig(key_heads, value_heads, K, V, taps, family.by_key_head)


def _sparse_layers(raw: dict[str, Any]) -> set[int]:
    """The layers with experts: every `decoder_sparse_step`-th, without `mlp_only_layers`."""
    step, dense = read_value(raw, "decoder_sparse_step", int, 1), raw.get("mlp_only_layers", [])
    if not isinstance(dense, list) or not all(type(i) is int for i in dense):
        raise ValueError(f"config.json: `mlp_only_layers` must be a list of numbers, got {dense!r}")
    return {i for i in range(raw["num_hidden_layers"]) if (i + 1) % step == 0} - set(dense)


def _read_experts(raw: dict[str, Any], family: Family) -> ExpertConfig | None:
    if not family.num_experts:
        return None
    key = next((key for key in family.num_experts if key in raw), family.num_experts[0])
    num_experts, taken = read_value(raw, key, int), read_value(raw, "num_experts_per_tok", int)
    limit, size = family.swiglu_limit, read_value(raw, family.expert_size, int)
    is_mxfp4 = _quantization(raw) == "mxfp4"
    for name in ("hidden_size", family.expert_size) if is_mxfp4 else ():
        if raw[name] % MXFP4_BLOCK:
            raise ValueError(
                f"config.json: `{name}` must be a multiple of {MXFP4_BLOCK} with MXFP4, got "
                f"{raw[name]}"
            )
    shared = read_value(raw, "shared_expert_intermediate_size", int, 0, minimum=0)
    if family.has_shared_expert and shared != size:
        raise ValueError(
            "config.json: `shared_expert_intermediate_size` must be that of the other experts, "
            f"{size}, got {shared}"
        )
    if taken > num_experts:
        raise ValueError(
            f"config.json: `num_experts_per_tok` must be at most `{key}`, got {taken} and "
            f"{num_experts}"
        )
    return ExpertConfig(
        num_experts,
        taken,
        size,
        read_value(raw, "norm_topk_prob", bool, False),
        family.expert_bias,
        limit and read_value(raw, "swiglu_limit", float, limit, 1e-6, 1e6),
        family.packed_experts,
        is_mxfp4,
        family.has_shared_expert,
        family.experts_path,
        family.expert_names,
    )


def _read_list(raw: dict[str, Any], key: str, default: T, allowed: tuple[T, ...]) -> list[T]:
    """The list `key`, a value for each layer; `default` for each if config.json lacks it."""
    count, values = raw["num_hidden_layers"], raw.get(key)
    if values is None:
        return [default] * count
    if not isinstance(values, list) or len(values) < count:
        raise ValueError(
            f"config.json: `{key}` must be a list of `num_hidden_layers` values, {count}, got "
            f"{values!r}"
        )
    for value in values:
        if type(value) is not type(default) or value not in allowed:
            raise ValueError(
                f"config.json: `{key}` {value!r} is not supported, only "
                f"{', '.join(map(str, allowed))}"
            )
    return values[:count]


def _read_activation(raw: dict[str, Any]) -> str:
    key = "hidden_activation" if raw.get("hidden_activation") is not None else "hidden_act"
    activation = raw.get(key, SUPPORTED_ACTIVATIONS[0])
    if activation not in SUPPORTED_ACTIVATIONS:
        raise ValueError(
            f"config.json: activation `{key}` {activation!r} is not supported; "
            f"supported: {', '.join(SUPPORTED_ACTIVATIONS)}"
        )
    return str(activation)


def _read_cap(raw: dict[str, Any], key: str) -> float:
    return read_value(raw, key, float, 0.0, 0, 1e6)


def _read_multiplier(raw: dict[str, Any], key: str, default: float = 1.0) -> float:
    return read_value(raw, key, float, default, 1e-6, 1e6)


def _read_dtype(raw: dict[str, Any]) -> str:
    dtype = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    if dtype not in ("bfloat16", "float16", "float32"):
        raise ValueError(
            f"config.json: `dtype` {dtype!r} is not supported, only bfloat16, float16, float32"
        )
    return str(dtype)
