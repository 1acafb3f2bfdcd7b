"""What cannot be merged is refused by name, before weights are read and processes are started."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fp8_checkpoints import checkpoints as fp8_checkpoints
from int4_checkpoints import checkpoints as int4_checkpoints
from mxfp4_checkpoints import checkpoints as mxfp4_checkpoints
from peft_adapters import PREFIX, make_adapter, save_adapter, tensors_of

from checkpoints import SMALL, make_checkpoint
from nanovllm import LLM
from nanovllm.checkpoint.files import ADAPTER, ADAPTER_WEIGHTS

BY_PEFT = r"merge it with peft \(`merge_and_unload`\) and pass the saved model as `model`"
Q = f"{PREFIX}model.layers.0.self_attn.q_proj"
K = f"{PREFIX}model.layers.1.self_attn.k_proj"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("base") / "model")


@pytest.fixture(scope="module")
def tensors(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """Those of an adapter that can be merged."""
    path = make_adapter(
        base, tmp_path_factory.mktemp("adapter"), target_modules=["q_proj", "k_proj"]
    )
    return tensors_of(path)


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused before: no engine begins to start."""

    def fail(self: LLM) -> None:
        raise AssertionError("it was not refused")

    monkeypatch.setattr(LLM, "_make_executor", fail)


def refuse(model: Path | str, adapter: Path | str, match: str, **options: Any) -> None:
    with pytest.raises(ValueError, match=match) as caught:
        LLM(model, adapter=str(adapter), **{**SMALL, **options})
    assert "\n" not in str(caught.value)


# -- configurations -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"peft_type": "IA3"}, f"`peft_type` must be LORA, got IA3: {BY_PEFT}$"),
        *(
            ({"peft_type": name}, f"`peft_type` must be LORA, got {name}: .* run it in peft$")
            for name in (
                *("ADAPTION_PROMPT", "CARTRIDGE", "CPT", "MULTITASK_PROMPT_TUNING"),
                *("PREFIX_TUNING", "PROMPT_TUNING", "P_TUNING"),
            )
        ),
        ({"peft_type": None}, "`peft_type` must be LORA, got None"),
        (
            {"bias": "lora_only"},
            rf"`bias` must be 'none', got 'lora_only' \(trained .*: {BY_PEFT}$",
        ),
        ({"bias": "all"}, "`bias` must be 'none', got 'all'"),
        ({"lora_bias": True}, f"`lora_bias` asks for biases of `lora_B`, .*: {BY_PEFT}$"),
        ({"fan_in_fan_out": True}, f"`fan_in_fan_out` asks for .* transposed, .*: {BY_PEFT}$"),
        ({"target_parameters": "a"}, "`target_parameters` must be a list of names, got 'a'$"),
        ({"target_parameters": [1]}, r"`target_parameters` must be a list of names, got \[1\]$"),
        ({"trainable_token_indices": [1]}, f"`trainable_token_indices` asks for .*: {BY_PEFT}$"),
        ({"layer_replication": [[0, 2]]}, f"`layer_replication` asks for .*: {BY_PEFT}$"),
        ({"alora_invocation_tokens": [5]}, "`alora_invocation_tokens` .*: .* run it in peft$"),
        ({"arrow_config": {"top_k": 2}}, "`arrow_config` .*: .* run it in peft$"),
        ({"use_qalora": True}, "`use_qalora` .*: .* run it in peft$"),
        ({"use_bdlora": {"nblocks": 2}}, f"`use_bdlora` .*: {BY_PEFT}$"),
        ({"megatron_config": {"a": 1}}, "`megatron_config` .*: convert it to PEFT's format$"),
        ({"kasa_config": {"beta": 1}}, f"`kasa_config` .*: {BY_PEFT}$"),
        ({"monteclora_config": {"a": 1}}, f"`monteclora_config` .*: {BY_PEFT}$"),
        ({"velora_config": {"a": 1}}, f"`velora_config` .*: {BY_PEFT}$"),
        *(
            ({"init_lora_weights": name}, f".* '{name}' changes the base .*_for_weight_conversion=")
            for name in ("pissa", "pissa_niter_16", "olora", "corda", "lora_ga")
        ),
        (
            {"init_lora_weights": "loftq"},
            ".* 'loftq' belongs to a base model .* quantised: merge it",
        ),
        ({"r": None}, "`r` must be an integer, got None"),
        ({"r": 0}, "`r` must be at least 1, got 0"),
        ({"lora_alpha": "8"}, "`lora_alpha` must be a number, got '8'"),
        ({"use_rslora": "yes"}, "`use_rslora` must be True or False, got 'yes'"),
        ({"rank_pattern": [1]}, r"`rank_pattern` must be an object, got \[1\]"),
        ({"rank_pattern": {"q_proj": 0}}, r"`rank_pattern\['q_proj'\]` must be at least 1, got 0"),
        ({"alpha_pattern": {"(": 2}}, r"`alpha_pattern` must have .*expressions, got '\('"),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else "",
)
def test_fields_that_cannot_be_merged(
    changes: dict[str, Any],
    match: str,
    base: Path,
    tensors: dict[str, torch.Tensor],
    tmp_path: Path,
) -> None:
    adapter = save_adapter(tmp_path / "adapter", tensors, **changes)
    refuse(base, adapter, rf"^adapter {tmp_path}/adapter: adapter_config.json: {match}")


# -- tensors --------------------------------------------------------------------------------------


def with_(**changes: Any) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    """Change tensors of modules: `Q_A` is A of Q."""
    modules = {"Q": Q, "K": K, "N": f"{PREFIX}model.layers.9.self_attn.q_proj"}
    ends = {"A": ".lora_A.weight", "B": ".lora_B.weight", "M": ".lora_magnitude_vector"}

    def changed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        named = {modules[key[0]] + ends[key[2]]: value for key, value in changes.items()}
        return {k: v for k, v in {**tensors, **named}.items() if v is not None}

    return changed


def renamed(old: str, new: str) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    return lambda tensors: {name.replace(old, new): x for name, x in tensors.items()}


def added(**more: torch.Tensor) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    """Add tensors; `__` is a dot in a name."""
    return lambda tensors: {
        **tensors,
        **{PREFIX + name.replace("__", "."): x for name, x in more.items()},
    }


TRAINED = r"pass the model \(our/base\) that the adapter was trained on"


@pytest.mark.parametrize(
    ("change", "config", "match"),
    [
        (
            renamed("self_attn", "attention"),
            {},
            rf"has no weights for {PREFIX}model.layers.0.attention.k_proj.lora_A.weight, "
            rf"{PREFIX}.*: {TRAINED}$",
        ),
        (
            with_(N_A=torch.ones(4, 64), N_B=torch.ones(128, 4)),
            {},
            rf"no weights for {PREFIX}model.layers.9.self_attn.q_proj.lora_A.weight, "
            rf"{PREFIX}model.layers.9.self_attn.q_proj.lora_B.weight: {TRAINED}$",
        ),
        (added(other__weight=torch.ones(2, 64)), {}, f"no weights for {PREFIX}other.weight: "),
        *(
            (
                added(**{f"{layer}__weight": torch.ones(2, 64), f"{layer}__bias": torch.ones(2)}),
                {"task_type": task, "modules_to_save": [layer]},
                rf"it has layers for labels, {PREFIX}{layer}.(weight|bias), {PREFIX}{layer}.*, "
                r"which are not supported: .* \(docs/tasks/rerank.md\)$",
            )
            for layer, task in (("score", "SEQ_CLS"), ("classifier", "TOKEN_CLS"))
        ),
        (
            added(model__layers__0__self_attn__q_proj__lora_A__default__weight=torch.ones(4, 64)),
            {},
            rf"{Q}.lora_A.default.weight is a name inside .* get_peft_model_state_dict",
        ),
        (
            added(model__visual__blocks__0__attn__qkv__lora_A__weight=torch.ones(4, 64)),
            {},
            rf"an adapter must not change parts for images, got "
            rf"{PREFIX}model.visual.blocks.0.attn.qkv.lora_A.weight: {BY_PEFT}$",
        ),
        (with_(K_B=None), {}, "it lacks model.layers.1.self_attn.k_proj.lora_B: save it again$"),
        (with_(Q_A=None), {}, "it lacks model.layers.0.self_attn.q_proj.lora_A: save it again$"),
        (lambda tensors: {}, {}, "it has no tensors: save it again"),
        (
            with_(Q_A=torch.ones(4, 60)),
            {},
            rf"{Q}.lora_B.weight times {Q}.lora_A.weight has shape \[128, 60\], but "
            rf"model.layers.0.self_attn.q_proj.weight of this model has \[128, 64\]: {TRAINED}$",
        ),
        (
            added(lm_head__weight=torch.ones(130, 64)),
            {},
            rf"{PREFIX}lm_head.weight has shape \[130, 64\], but lm_head.weight of this model has "
            rf"\[128, 64\]: {TRAINED}, with a vocabulary of the same size$",
        ),
        (
            with_(Q_A=torch.ones(5, 64), Q_B=torch.ones(128, 5)),
            {},
            r"the factors of model.layers.0.self_attn.q_proj have shapes \[5, 64\] and \[128, 5\], "
            r"but its configuration says that their rank is 4: save it again$",
        ),
        (lambda same: same, {"rank_pattern": {"k_proj": 8}}, "k_proj .* their rank is 8"),
        (
            with_(Q_A=torch.ones(4, 64, 3)),
            {},
            rf"the change of model.layers.0.self_attn.q_proj has no matrices, but .*: {BY_PEFT}$",
        ),
        (with_(Q_A=torch.ones(4, 64).to(torch.float8_e4m3fn)), {}, f"{Q}.*is F8_E4M3, but must be"),
        (
            with_(Q_A=torch.ones(4, 64, dtype=torch.int32)),
            {},
            "is I32, but must be one of F64, F32",
        ),
        (lambda same: same, {"use_dora": True}, "it lacks .*k_proj.lora_magnitude_vector: save it"),
        (with_(Q_M=torch.ones(128)), {}, f"no use for {Q}.lora_magnitude_vector: save it again$"),
        (
            lambda tensors: with_(Q_M=torch.ones(64))(
                {name: x for name, x in tensors.items() if Q in name}
            ),
            {"use_dora": True},
            rf"tensor {Q}.lora_magnitude_vector has shape \[64\], but its factors imply \[128\]",
        ),
        (
            lambda tensors: added(
                model__embed_tokens__lora_embedding_A=torch.ones(4, 128),
                model__embed_tokens__lora_embedding_B=torch.ones(64, 4),
                model__embed_tokens__lora_magnitude_vector=torch.ones(128),
            )({}),
            {"use_dora": True},
            rf"tensor {PREFIX}model.embed_tokens.lora_magnitude_vector has shape \[128\], but its "
            r"factors imply \[64\]$",
        ),
        (
            added(
                layers__0__self_attn__q_proj__lora_A__weight=torch.ones(4, 64),
                layers__0__self_attn__q_proj__lora_B__weight=torch.ones(128, 4),
            ),
            {},
            "it has two changes of model.layers.0.self_attn.q_proj.weight, under different names",
        ),
        (
            added(lm_head__weight=torch.ones(2), lm_head__base_layer__weight=torch.ones(2)),
            {},
            f"{PREFIX}lm_head.(base_layer.)?weight and {PREFIX}lm_head.* mean the same: save it",
        ),
        (
            added(
                norm__lora_magnitude_vector=torch.ones(2),
                norm__lora_magnitude_vector__weight=torch.ones(2),
            ),
            {},
            f"{PREFIX}norm.lora_magnitude_vector.* and .* mean the same: save it again$",
        ),
    ],
)
def test_tensors_that_fit_nothing(
    change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]],
    config: dict[str, Any],
    match: str,
    base: Path,
    tensors: dict[str, torch.Tensor],
    tmp_path: Path,
) -> None:
    config = {"base_model_name_or_path": "our/base", **config}
    adapter = save_adapter(tmp_path / "adapter", change(tensors), **config)
    refuse(base, adapter, rf"^adapter {tmp_path}/adapter: .*{match}")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("part", [f"{Q}.lora_A.weight", f"{PREFIX}model.norm.weight"])
def test_numbers_that_are_not_finite(
    part: str, value: float, base: Path, tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    changed = {name: x.clone() for name, x in tensors.items()} | {
        f"{PREFIX}model.norm.weight": torch.ones(64)
    }
    changed[part].view(-1)[-1] = value
    adapter = save_adapter(tmp_path / "adapter", changed)
    refuse(
        base,
        adapter,
        rf"^adapter {tmp_path}/adapter: tensor {part} has NaN or infinite values: pass an adapter",
    )


@pytest.mark.parametrize(
    "config",
    [
        {"modules_to_save": ["lm_head"]},
        {"modules_to_save": ["embed_tokens"]},
        {"target_modules": ["embed_tokens"]},
        {"target_modules": ["lm_head"]},
    ],
    ids=str,
)
def test_ends_that_are_one_matrix(config: dict[str, Any], tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path / "base", tie_word_embeddings=True)
    adapter = make_adapter(base, tmp_path / "adapter", **{"target_modules": ["q_proj"], **config})
    refuse(
        base,
        adapter,
        r"it changes (lm_head|model\.embed_tokens), but embedding and LM head of this model are one"
        " matrix.*: save the model with a copy as `lm_head.weight` and `tie_word_embeddings` false",
    )


@pytest.mark.parametrize("way", ["rows", "blocks", "awq", "compressed"])
def test_weights_that_are_codes(way: str, tmp_path: Path) -> None:
    make = fp8_checkpoints if way in ("rows", "blocks") else int4_checkpoints
    quantised, exact = make(tmp_path, way)
    adapter = make_adapter(exact, tmp_path / "adapter", target_modules=["o_proj"])
    refuse(
        quantised,
        adapter,
        r"it changes model\.layers\.0\.self_attn\.o_proj, whose weights are codes in this "
        r'checkpoint: pass the original weights as `model` \(quantization="fp8" quantises them',
    )


# -- experts --------------------------------------------------------------------------------------

BOTH = ["experts.gate_up_proj", "experts.down_proj"]
MODULE = f"{PREFIX}model.layers.0.mlp.experts"
OUTER = {
    f"{MODULE}.lora_A.weight": torch.ones(16, 48),
    f"{MODULE}.lora_B.weight": torch.ones(64, 16),
}
INNER = {
    f"{MODULE}.base_layer.lora_A.weight": torch.ones(16, 64),
    f"{MODULE}.base_layer.lora_B.weight": torch.ones(96, 16),
}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3 with four experts, one by one."""
    path = tmp_path_factory.mktemp("mixture") / "model"
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    return make_checkpoint(path, "qwen3_moe", **sizes)


@pytest.mark.parametrize(
    ("tensors", "config", "match"),
    [
        (
            OUTER,
            {"target_parameters": BOTH},
            "it has 1 changes of parameters of model.layers.0.mlp.experts, but by its "
            "`target_parameters` they are those of gate_up_proj, down_proj: save it again$",
        ),
        ({**OUTER, **INNER}, {"target_parameters": BOTH[1:]}, "it has 2 .* those of down_proj: "),
        (INNER, {"target_parameters": BOTH[:1]}, "it has 1 .* those of gate_up_proj: save it"),
        (OUTER, {}, f"no weights for {MODULE}.lora_A.weight, {MODULE}.lora_B.weight: {TRAINED}$"),
        (
            {name.replace("mlp", "moe"): tensor for name, tensor in OUTER.items()},
            {"target_parameters": ["down_proj"]},
            f"no weights for {PREFIX}model.layers.0.moe.experts.lora_A.weight, ",
        ),
        (
            OUTER,
            {"target_parameters": ["down_proj"], "r": 2},
            rf"{MODULE}.lora_B.weight and {MODULE}.lora_A.weight are for 8 experts, but this model "
            f"has 4: {TRAINED}$",
        ),
        (
            OUTER,
            {"target_parameters": ["down_proj"], "rank_pattern": {"down_proj": 5}},
            r"the factors of model.layers.0.mlp.experts.down_proj have shapes \[16, 48\] and "
            r"\[64, 16\], but .* that their rank is 5, for each expert: save it again$",
        ),
        (
            OUTER,
            {"target_parameters": ["gate_up_proj"]},
            rf"times {MODULE}.lora_A.weight has shape \[32, 48\], but model.layers.0.mlp.experts.0"
            rf".gate_proj.weight of this model has \[48, 64\]: {TRAINED}$",
        ),
        (
            {**OUTER, f"{MODULE}.lora_B.weight": torch.ones(65, 16)},
            {"target_parameters": ["gate_up_proj"]},
            "the change of model.layers.0.mlp.experts.gate_up_proj has 65 rows, not as many for "
            f"gate as for up: {TRAINED}$",
        ),
        (
            {**OUTER, f"{MODULE}.lora_magnitude_vector": torch.ones(64)},
            {"target_parameters": ["down_proj"], "use_dora": True},
            "`use_dora` is not supported for experts, got model.layers.0.mlp.experts.down_proj: "
            f"{BY_PEFT}$",
        ),
        (
            {f"{MODULE}.down_proj": torch.ones(4, 64, 48)},
            {},
            f"{MODULE}.down_proj replaces the matrices of all experts, which this checkpoint has "
            f"one by one: {BY_PEFT}$",
        ),
    ],
    ids=lambda _: "",
)
def test_experts_that_fit_nothing(
    tensors: dict[str, torch.Tensor],
    config: dict[str, Any],
    match: str,
    mixture: Path,
    tmp_path: Path,
) -> None:
    config = {"base_model_name_or_path": "our/base", **config}
    adapter = save_adapter(tmp_path / "adapter", tensors, **config)
    refuse(mixture, adapter, rf"^adapter {tmp_path}/adapter: .*{match}")


@pytest.mark.parametrize("parameter", ["gate_up_proj", "down_proj"])
def test_experts_that_are_codes(parameter: str, tmp_path: Path) -> None:
    """Stacked in MXFP4, and one by one in FP8."""
    how = {"target_modules": [], "target_parameters": [f"experts.{parameter}"]}
    packed, plain = mxfp4_checkpoints(tmp_path / "mxfp4")
    refuse(
        packed,
        make_adapter(plain, tmp_path / "of gpt-oss", **how),
        rf"it changes model\.layers\.0\.mlp\.experts\.{parameter}, whose values are codes in this "
        r"checkpoint: load the model with transformers' `Mxfp4Config\(dequantize=True\)`, save it",
    )
    quantised, exact = fp8_checkpoints(tmp_path / "fp8", "blocks", "qwen3_moe")
    refuse(
        quantised,
        make_adapter(exact, tmp_path / "of qwen3", **how),
        rf"it changes model\.layers\.0\.mlp\.experts\.{parameter}, whose weights are codes in this "
        "checkpoint: pass the original weights as `model`",
    )


# -- directories ----------------------------------------------------------------------------------


def test_directories_without_an_adapter(base: Path, tmp_path: Path) -> None:
    inner, pickled, torn = (tmp_path / name for name in ("inner", "pickled", "torn"))
    for path in (inner / "checkpoint-7", pickled, torn):
        path.mkdir(parents=True)
        (path / ADAPTER).write_text('{"peft_type": "LORA", "r": 4, "lora_alpha": 8}')
    (pickled / "adapter_model.bin").write_bytes(b"")
    (torn / ADAPTER_WEIGHTS).write_bytes(b"\xff" * 20)
    (tmp_path / "file").write_text("")
    for directory, match in (
        (base, "has no adapter_config.json: it holds a whole model, which is passed as `model`"),
        (inner, "adapter_config.json: pass one of the directories in it .*: checkpoint-7"),
        (tmp_path / "torn" / "..", "adapter_config.json: pass one of .*: pickled, torn"),
        (pickled, "no adapter_model.safetensors, but adapter_model.bin: .*safe_serialization=True"),
        (torn, "adapter_model.safetensors is not a complete safetensors file .*: save or download"),
        (
            "no/such/adapter",
            "`adapter` must be the directory of a PEFT adapter or a name on the hub",
        ),
        (
            tmp_path / "file",
            "`adapter` must be the directory of a PEFT adapter or a name on the hub",
        ),
    ):
        refuse(base, directory, match)
    (torn / ADAPTER).write_text("{")
    refuse(base, torn, "adapter_config.json is not valid JSON")
    with pytest.raises(
        ValueError, match="holds an adapter, not a model: pass its base model as `model`"
    ):
        LLM(pickled, **SMALL)


def test_no_weights_are_no_base(base: Path) -> None:
    with pytest.raises(ValueError, match=r"`adapter` changes .* load_format='dummy' does not read"):
        LLM(base, adapter=str(base), load_format="dummy")


@pytest.mark.parametrize("adapter", [3, "", [""], ["a", None], {"a": 1}, b"a"])
def test_what_is_no_path(adapter: Any, base: Path) -> None:
    with pytest.raises(TypeError, match="`adapter` must be the directory of a PEFT adapter, its"):
        LLM(base, adapter=adapter)


def test_a_pair_is_for_load_adapter(base: Path) -> None:
    """Its tensors are not printed."""
    pair: Any = {}, {"a": torch.ones(1)}
    own = r"got a tuple of dict, dict: load_adapter\(\) takes pairs of a configuration and tensors$"
    with pytest.raises(TypeError, match=own):
        LLM(base, adapter=pair)
