"""What lists in config.json mean, without a model: which modules stay as they were."""

import re
from typing import Any

import pytest
from transformers.quantizers.quantizers_utils import should_convert_module

from nanovllm.checkpoint.fp8 import Fp8
from nanovllm.checkpoint.modules import Modules
from nanovllm.checkpoint.quantization import Quantization, read_quantization

MODULES = (
    *("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj"),
    *("linear_attn.in_proj_a", "linear_attn.in_proj_qkv", "linear_attn.out_proj", "mlp.gate"),
    *("mlp.shared_expert.up_proj", "mlp.shared_expert_gate", "mlp.experts.1.up_proj"),
)
PATHS = [f"model.layers.{i}.{name}" for i in (0, 1, 11) for name in MODULES]
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def quantization(**found: Any) -> Quantization:
    read = read_quantization({"quantization_config": found})
    assert read is not None
    return read


@pytest.mark.parametrize(
    "name",
    [
        *("model.layers.1", "model.layers.11.mlp", "model.layers.0.linear_attn.in_proj_a"),
        *("model.layers.1.mlp.gate", "mlp.gate", "o_proj", "mlp.experts.1.up_proj", "lm_head"),
        *("model.layers.*.self_attn", r"model\.layers\.(0|11)\.mlp", r".*gate$", ".*_attn.*"),
        *("model.layers.1.*", "model.layers.[01].mlp.gate", "model.visual", "mtp.layers.0.mlp"),
    ],
)
def test_a_name_means_what_it_does_in_transformers(name: str) -> None:
    modules = Modules.named("ignore", [name])
    found = [path for path in PATHS if path in modules]
    assert found == [path for path in PATHS if not should_convert_module(path, [name])]


NOTHING = "(?!)"


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("linear_attn", r"linear_attn\."),  # AWQ's names may stand anywhere in a path
        ("layers.1.", r"layers\.1\."),
        ("mlp.experts", r"mlp\.experts\."),
        ("gate", r"\.gate$"),
        ("proj", NOTHING),  # a component is meant as a whole
        ("model.language_model.layers.1", r"layers\.1\."),
        ("language_model.model.layers.0.mlp.gate", r"0\.mlp\.gate$"),
        ("language_model.layers.11", r"layers\.11\."),
        ("layers.0.self_attn", r"0\.self_attn\."),
        ("language_model", ""),
        ("model.visual.layers.0", NOTHING),
        ("vision_tower.transformer.layers.0.self_attn.q_proj", NOTHING),
        ("re:.*audio_tower.layers.0.mlp", NOTHING),
        ("re:.*mlp.gate$", r"mlp\.gate$"),
        ("re:.*mlp.gate", r"mlp\.gate"),  # no boundary, as in compressed-tensors
        (r"re:model\.language_model\.layers\.1\.", r"layers\.1\."),
        (r"re:language_model\.model\.layers\.1\.mlp", r"layers\.1\.mlp"),
    ],
)
def test_a_name_is_meant_in_any_spelling(name: str, pattern: str) -> None:
    modules = Modules.named("ignore", [name])
    wanted = [path for path in PATHS if re.search(pattern, path)]
    for prefix in ("model.", "model.language_model.", "language_model.model."):
        found = [path for path in PATHS if path.replace("model.", prefix, 1) in modules]
        assert found == wanted


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("model.layers.1.mlp.gate", r"\.1\.mlp\.gate$"),
        ("model.language_model.layers.0.self_attn.o_proj", r"\.0\.self_attn\.o_proj"),
        ("model.layers.1", NOTHING),  # compressed-tensors looks for a module of this name
        ("linear_attn", NOTHING),
        (r"re:.*layers\.1\..*", r"layers\.1\."),
        ("re:.*self_attn", "self_attn"),
        ("Linear", ""),
        ("Conv1d", NOTHING),
    ],
)
def test_a_name_of_compressed_tensors_is_a_path(name: str, pattern: str) -> None:
    modules = Modules.exactly("ignore", [name])
    assert [path for path in PATHS if path in modules] == [
        path for path in PATHS if re.search(pattern, path)
    ]


def test_published_lists_leave_what_they_name() -> None:
    """As FP8 releases of Qwen3.5 do, by path, and community checkpoints by regular expressions."""
    names = ["lm_head", "model.language_model.embed_tokens", "model.visual.merger.linear_fc1"]
    for i in range(12):
        own = ("linear_attn.in_proj_a", "linear_attn.conv1d", "mlp.gate", "mlp.shared_expert_gate")
        names += [f"model.language_model.layers.{i}.{name}" for name in own]
    fp8 = quantization(**BLOCKS, modules_to_not_convert=names)
    left = [path for path in PATHS if fp8.of([path]) is None]
    plain = ("in_proj_a", ".gate", "shared_expert_gate")
    assert left == [path for path in PATHS if path.endswith(plain)]
    assert fp8.of(PATHS[:2]) == Fp8((128, 128), "weight_scale_inv")
    dynamic = {"-:.*attn.*": {}, "-:.*shared_expert.*": {}, "-:.*mtp.*": {}, "-:.*visual.*": {}}
    gptq = quantization(quant_method="gptq", bits=4, group_size=128, dynamic=dynamic, lm_head=False)
    left = [path for path in PATHS if gptq.of([path]) is None]
    assert left == [path for path in PATHS if "attn" in path or "shared_expert" in path]


def test_a_module_by_its_path_counts_before_regular_expressions() -> None:
    """Of AutoRound's table, wherever it stands; and modules of no block are not quantised."""
    table = {
        ".*self_attn.*": {"bits": 16},
        ".*q_proj": {"bits": 8},
        "model.layers.1.self_attn.q_proj": {"bits": 4, "sym": False},
        ".*down_proj": {"group_size": 64},
    }
    found = quantization(
        quant_method="auto-round",
        bits=4,
        group_size=128,
        extra_config=table,
        block_name_to_quantize=["model.layers.1", "model.layers.11"],
    )
    assert found.of(["model.layers.1.self_attn.q_proj"]) == found.format
    assert found.of(["model.layers.11.self_attn.q_proj"]) is None
    assert found.of(["model.layers.11.mlp.gate_proj"]) == found.format
    assert found.of(["model.layers.0.mlp.gate_proj"]) is None
    with pytest.raises(ValueError, match=r"model\.layers\.11\.mlp\.down_proj .*`group_size` 64\)"):
        found.of(["model.layers.11.mlp.down_proj"])


def test_a_quantisation_is_a_value() -> None:
    """Configurations are compared and hashed."""
    one, other = (quantization(**BLOCKS, ignored_layers=["o_proj"]) for _ in range(2))
    assert one == other and hash(one) == hash(other)
    assert one != quantization(**BLOCKS, ignored_layers=["q_proj"])
