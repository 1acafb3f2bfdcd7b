"""Matrices in 4 bits, in the layouts of `int4_checkpoints`.

The oracle is transformers with the numbers that the codes mean.
"""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from int4_checkpoints import AUTO_ROUND, AWQ, GPTQ, WAYS, checkpoints, compressed, quantize
from plain_modules import LISTS, OTHERS, assert_loaded
from ranks_in_threads import ranks_of
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from checkpoints import (
    PARAMS,
    PROMPTS,
    SMALL,
    assert_right,
    edit_json,
    make_checkpoint,
    rare,
)
from nanovllm import LLM
from nanovllm.attention.torch_backend import TorchBackend
from nanovllm.checkpoint.int4 import Int4
from nanovllm.checkpoint.quantization import read_quantization
from nanovllm.distributed.group import Group
from nanovllm.layers.base import Build
from nanovllm.layers.linear import ReplicatedLinear
from nanovllm.layers.weights.int4 import Int4Weight
from nanovllm.layers.weights.shard import Part
from nanovllm.models.loader import load_dummy


@pytest.mark.parametrize("way", WAYS)
def test_tokens_are_those_of_the_same_numbers(
    way: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    quantised, exact = checkpoints(tmp_path, way)
    with caplog.at_level("INFO", "nanovllm"), LLM(quantised, **SMALL) as llm:
        assert "quantised matrices were dequantised" in caplog.text
        assert_right(exact, llm.generate(PROMPTS, PARAMS, use_tqdm=False))
        assert llm.metrics()["quantization"] == "none"  # nothing here multiplies by codes


def test_packed_projections(tmp_path: Path) -> None:
    """Phi-3 has query, key and value as one module, gate and up as another."""
    quantised, exact = checkpoints(tmp_path, "awq", "phi3")
    with LLM(quantised, quantization="awq", **SMALL) as llm:
        assert_right(exact, llm.generate(PROMPTS, PARAMS, use_tqdm=False))


QKV = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
IN_16 = {"bits": 16, "data_type": "fp"}
# What config.json says, and a regular expression found in the paths of what stays as it was.
PARTLY: dict[str, tuple[str, dict[str, Any], str]] = {
    f"{way}, {left}": (way, {key: LISTS[left].names + OTHERS}, LISTS[left].pattern)
    for way, key, left in (
        ("awq", "modules_to_not_convert", "a name"),
        ("awq", "modules_to_not_convert", "the last layer"),
        ("gptq", "modules_to_not_convert", "parts"),
        ("compressed", "ignore", "paths"),
        ("compressed, zeros", "ignore", "paths and expressions"),
        ("awq of auto-round", "modules_to_not_convert", "regular expressions"),
    )
} | {
    "dynamic": (
        "gptq",
        {
            "dynamic": {
                "-:.*self_attn.*": {},
                "-:.*mtp.*": {},
                r"+:.*layers\.1\.": {"bits": 4, "group_size": 32},
                r"-:model\.layers\.1\.mlp": {},  # not the first that matches
                "+:model.visual": {"bits": 8},
            }
        },
        "self_attn",
    ),
    "modules of a block": (
        "gptq_v2",
        {"modules_in_block_to_quantize": [QKV, ["mlp.down_proj"]]},
        "o_proj|gate_proj|up_proj",
    ),
    "auto-round's table": (
        "gptq of auto-round",
        {
            "extra_config": {
                ".*self_attn.*": IN_16,
                "model.language_model.layers.0.mlp.down_proj": IN_16,
                "model.layers.1.self_attn.o_proj": {"bits": 4, "group_size": 128},
                "model.language_model.layers.1.linear_attn.in_proj_a": IN_16,
                "model.visual.merger": {"bits": 8},
                "lm_head": {"data_type": "float"},
            },
            "block_name_to_quantize": "model.language_model.layers,model.visual.blocks",
        },
        r"self_attn\.[qkv]|0\.self_attn|0\.mlp\.down",
    ),
    "auto-round's blocks": (
        "awq of auto-round",
        {"to_quant_block_names": [["model.layers.1", "model.layers.2"]]},
        r"layers\.0\.",
    ),
}


@pytest.mark.parametrize("case", PARTLY)
def test_layers_that_stay_as_they_were(case: str, tmp_path: Path) -> None:
    way, says, pattern = PARTLY[case]
    quantised, exact = checkpoints(
        tmp_path, way, is_plain=lambda module: re.search(pattern, module) is not None, says=says
    )
    names = load_file(quantised / "model.safetensors").keys()
    assert any(name.endswith("_proj.weight") for name in names), "none stays"
    assert any(name.endswith(("_proj.qweight", "_proj.weight_packed")) for name in names)
    assert_loaded(quantised, exact)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("case", ["compressed, paths", "awq, a name"])
def test_two_ranks_read_what_is_quantised_and_what_is_not(case: str, tmp_path: Path) -> None:
    way, says, pattern = PARTLY[case]
    quantised, exact = checkpoints(
        tmp_path, way, is_plain=lambda module: re.search(pattern, module) is not None, says=says
    )
    assert_loaded(quantised, exact, tensor_parallel_size=2)


def test_a_packed_projection_stays_as_it_was(tmp_path: Path) -> None:
    says = {"modules_to_not_convert": ["qkv_proj", "model.layers.1.mlp.gate_up_proj"]}
    quantised, exact = checkpoints(
        tmp_path,
        "awq",
        "phi3",
        lambda module: module.endswith(("qkv_proj", "1.mlp.gate_up_proj")),
        says,
    )
    assert_loaded(quantised, exact)


def test_experts_that_stay_as_they_were_may_have_attention_in_4_bits_beside_them(
    tmp_path: Path,
) -> None:
    says = {"modules_to_not_convert": ["block_sparse_moe"]}
    quantised, exact = checkpoints(
        tmp_path, "awq", "mixtral", lambda module: "moe" in module, says, num_local_experts=3
    )
    assert_loaded(quantised, exact)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(
    ("way", "size"), [("awq", 1), ("gptq", 2), rare("gptq_v2", 1), rare("compressed, zeros", 2)]
)
def test_experts(way: str, size: int, tmp_path: Path) -> None:
    shape = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
    quantised, exact = checkpoints(tmp_path, way, "qwen3_moe", head_dim=32, **shape)
    assert_loaded(quantised, exact, tensor_parallel_size=size)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("way", ["awq", "gptq", "compressed, zeros"])
def test_two_ranks_read_their_parts(way: str, tmp_path: Path) -> None:
    quantised, exact = checkpoints(tmp_path, way)
    with LLM(quantised, tensor_parallel_size=2, **SMALL) as llm:
        assert len(ranks_of(llm).runners) == 2
        assert_right(exact, llm.generate(PROMPTS, PARAMS, use_tqdm=False))


@pytest.mark.usefixtures("threads")
def test_a_group_cannot_be_cut(tmp_path: Path) -> None:
    quantised, _ = checkpoints(tmp_path, "gptq, symmetric")  # o_proj has one group of 128 inputs
    with pytest.raises(
        ValueError, match="o_proj: each rank's shard must consist of whole INT4 groups of 128"
    ):
        LLM(quantised, tensor_parallel_size=2, **SMALL)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("g_idx", lambda x: x.flip(0), r"q_proj.g_idx: reordered columns"),
        ("g_idx", lambda x: x * 0, r"q_proj.g_idx: reordered columns"),
        ("g_idx", lambda x: x * 0 - 1, r"q_proj.g_idx: reordered columns"),
        (
            "bias",
            lambda x: x + 1,
            r"q_proj.bias has values other than 0, but config.json says that there is none",
        ),
        ("qweight", lambda x: x.long(), r"q_proj.qweight is I64, but config.json implies I32"),
        (
            "scales",
            lambda x: x.to(torch.int8),
            r"q_proj.scales is I8, but config.json implies F64 ",
        ),
        (
            "qzeros",
            lambda x: x[:, :-1],
            r"q_proj.qzeros has shape \[4, 15\], but config.json implies",
        ),
        ("scales", lambda x: None, r"missing from the checkpoint: model.layers.0.self_attn.q_proj"),
    ],
)
def test_what_does_not_fit_is_named(
    name: str, change: Callable[[torch.Tensor], Any], message: str, tmp_path: Path
) -> None:
    quantised, _ = checkpoints(tmp_path, "gptq")
    file = quantised / "model.safetensors"
    tensors, key = load_file(file), f"model.layers.0.self_attn.q_proj.{name}"
    changed = change(tensors.pop(key))
    if changed is not None:
        tensors[key] = changed.contiguous()
    save_file(tensors, file)
    with pytest.raises(ValueError, match=message):
        LLM(quantised, **SMALL)


def test_a_checkpoint_without_a_description_is_named(tmp_path: Path) -> None:
    quantised, _ = checkpoints(tmp_path, "awq")
    edit_json(quantised / "config.json", quantization_config=None)
    with pytest.raises(ValueError, match="are quantised without a `quantization_config`"):
        LLM(quantised, **SMALL)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (GPTQ | {"desc_act": True}, "act-order .* is not supported"),
        (compressed(actorder="group"), "act-order .* is not supported"),
        (compressed(actorder="Dynamic"), "act-order .* is not supported"),
        (compressed() | {"format": "marlin-24"}, "strategy group, format marlin-24' is not"),
        (GPTQ | {"group_size": 16}, "must be 32, 64 or 128, got 16"),
        (GPTQ, "`group_size` is missing"),
        ({"quant_method": "gptq", "group_size": 128}, "`bits` is missing"),
        ({"quant_method": "awq", "w_bit": None, "bits": 3}, "'awq, 3 bits' is not"),
        (AWQ | {"q_group_size": None, "group_size": 16}, "`group_size` of INT4 .* got 16"),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 16}, "128, got 16"),
        ({"quant_method": "awq", "w_bit": 3, "q_group_size": 128}, "'awq, 3 bits' is not"),
        (GPTQ | {"is_marlin_format": True}, "'gptq, marlin' is not supported"),
        (AWQ | {"version": None, "format": "gemv_fast"}, "'awq, version gemv_fast' is not"),
        (
            AWQ | {"group_size": 32, "modules_to_not_convert": "mlp"},
            "must be a list of modules, got 'mlp'",
        ),
        (GPTQ | {"group_size": -1}, "`group_size` of INT4 weights must be 32, 64 or 128, got -1"),
        (GPTQ | {"bits": 8}, "'gptq, 8 bits' is not supported"),
        (GPTQ | {"checkpoint_format": "marlin"}, "'gptq, marlin' is not supported"),
        (GPTQ | {"lm_head": True}, "'gptq, lm_head .*' is not supported"),
        (
            GPTQ | {"group_size": 32, "dynamic": {"+:.*1.*down.*": {"bits": 8}}},
            r"`dynamic` quantises model\.layers\.1\.mlp\.down_proj in another way .*\(`bits` 8\)",
        ),
        (
            GPTQ | {"group_size": 32, "dynamic": {".*1.*down.*": {"group_size": 64}}},
            r"`dynamic` quantises model\.layers\.1\.mlp\.down_proj .*\(`group_size` 64\)",
        ),
        (
            GPTQ | {"group_size": 32, "dynamic": {"+:lm_head": {"bits": 4}}},
            "'gptq, lm_head .*' is not supported",
        ),
        (GPTQ | {"group_size": 32, "dynamic": ["-:x"]}, "`dynamic` must be an object of objects"),
        (
            GPTQ | {"group_size": 32, "modules_in_block_to_quantize": "mlp"},
            "`modules_in_block_to_quantize` must be a list of modules, got 'mlp'",
        ),
        (
            GPTQ | {"group_size": 32, "modules_in_block_to_quantize": [QKV[:2]]},
            r"leaves model\.layers\.0\.self_attn\.v_proj in 16 bits and quantises .*\.q_proj",
        ),
        (
            AUTO_ROUND | {"group_size": 32, "extra_config": {"o_proj": {"bits": 8}}},
            r"`extra_config` quantises model\.layers\.0\.self_attn\.o_proj .*\(`bits` 8\)",
        ),
        (
            AUTO_ROUND
            | {"group_size": 32, "extra_config": {".*1.*up": {"bits": 4, "data_type": "mx_fp"}}},
            r"`extra_config` quantises model\.layers\.1\.mlp\.up_proj .*\(`data_type` 'mx_fp'\)",
        ),
        (
            AUTO_ROUND | {"group_size": 32, "extra_config": {"lm_head": {"bits": 4}}},
            "'auto-round, lm_head .*' is not supported",
        ),
        (
            AUTO_ROUND | {"group_size": 32, "packing_format": "auto_round:llm_compressor"},
            "'auto-round, auto_round:llm_compressor, of int, activations of 16 bits' is not",
        ),
        (
            AUTO_ROUND | {"group_size": 32, "data_type": "mx_fp", "act_bits": 4},
            "'auto-round, auto_round:auto_gptq, of mx_fp, activations of 4 bits' is not",
        ),
        (AUTO_ROUND | {"bits": 2, "group_size": 32}, "'auto-round, 2 bits' is not supported"),
        (AUTO_ROUND | {"group_size": -1}, "`group_size` of INT4 .* got -1"),
        (AWQ | {"version": "gemv"}, "'awq, version gemv' is not supported"),
        (AWQ | {"zero_point": False}, "'awq, without zero points' is not supported"),
        (
            AWQ | {"group_size": 32, "modules_to_not_convert": ["gate_proj"]},
            r"leaves model\.layers\.0\.mlp\.gate_proj in 16 bits and quantises .*0\.mlp\.up_proj",
        ),
        (compressed(num_bits=8), "'compressed-tensors, symmetric 8-bit int, strategy group, fo"),
    ],
)
def test_other_ways_are_refused(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "plain")
    edit_json(path / "config.json", quantization_config=config)
    with pytest.raises(ValueError, match=message):
        LLM(path, **SMALL)


def test_the_option_must_say_what_the_checkpoint_is(tmp_path: Path) -> None:
    quantised, _ = checkpoints(tmp_path, "awq")
    with pytest.raises(
        ValueError, match="'fp8' contradicts the checkpoint, which is quantised by 'awq'"
    ):
        LLM(quantised, quantization="fp8", **SMALL)
    plain = make_checkpoint(tmp_path / "plain")
    with pytest.raises(
        ValueError, match="'awq' contradicts the checkpoint, which is not quantised"
    ):
        LLM(plain, quantization="awq", **SMALL)


def test_without_triton_the_numbers_are_multiplied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("int4", "int4_linear", "int4_row"):
        monkeypatch.setitem(sys.modules, f"nanovllm.kernels.products.{module}", None)
    quantised, exact = checkpoints(tmp_path, "gptq")
    with LLM(quantised, **SMALL) as llm:
        assert_right(exact, llm.generate(PROMPTS, PARAMS, use_tqdm=False))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("way", WAYS)
def test_parts_in_16_bits(way: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Rows in an order of their own, the second half of the columns; zero points 0 and 15."""
    generator = torch.Generator().manual_seed(6)
    found = read_quantization({"quantization_config": WAYS[way][0]})
    assert found is not None and isinstance(found.format, Int4)
    N, K = 48, 256
    x = torch.randn(N, K, generator=generator)
    x[:4], x[4:8] = x[:4].abs(), -x[4:8].abs()
    tensors, numbers = quantize(x, way, found.format.group)
    save_file({f"m.{name}": tensor for name, tensor in tensors.items()}, tmp_path / "t")
    rows = torch.randperm(N, generator=generator)[:29].tolist()
    weight = Int4Weight(40, K // 2, dtype, False, found.format)
    cols = Part(range(K // 2, K), K)
    with safe_open(tmp_path / "t", framework="pt") as opened:
        for name, shard in weight.shards("m", 8, Part(rows, N), cols):
            if not shard.is_optional:
                shard.check(name, opened.get_slice(name))
                shard.fill(opened.get_slice(name))
    wanted = numbers[rows][:, K // 2 :]
    unit = torch.finfo(dtype).eps / 2  # of scales
    torch.testing.assert_close(weight.codes.numbers()[8:37], wanted, rtol=1.01 * unit, atol=1e-7)


def test_dummies_are_of_the_usual_size() -> None:
    build = Build(torch.bfloat16, False, Group(), TorchBackend(), 64)
    how = read_quantization({"quantization_config": WAYS["gptq"][0]})
    layer = ReplicatedLinear(256, 128, False, build._replace(quantization=how))
    load_dummy(layer, seed=0)
    assert isinstance(layer.weight, Int4Weight)
    numbers = layer.weight.codes.numbers()
    assert (
        0.018 < numbers.std() < 0.022 and numbers.abs().max() < 0.06 and numbers.mean().abs() < 1e-3
    )
