"""Matrices in 8 bits: checkpoints as published, in `fp8_checkpoints`, and quantising while loading.

The oracle is transformers with the numbers that the codes mean.
"""

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from fp8_checkpoints import (
    CHANNEL,
    COMPRESSED,
    E4M3,
    EXPERTS,
    GROUP,
    PROJECTIONS,
    WAYS,
    checkpoints,
    in_int8,
    quantize,
)
from plain_modules import LISTS, OTHERS, assert_loaded
from ranks_in_threads import ranks_of
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

from checkpoints import (
    PARAMS,
    PROMPTS,
    SMALL,
    assert_right,
    copy_checkpoint,
    edit_json,
    edit_tensors,
    make_checkpoint,
    rare,
    reference_logprobs,
)
from nanovllm import LLM
from nanovllm.tensors import fp8 as utils_fp8


@pytest.mark.parametrize("family", ["qwen3", rare("llama"), *EXPERTS])
@pytest.mark.parametrize("way", WAYS)
def test_tokens_are_those_of_the_same_numbers(way: str, family: str, tmp_path: Path) -> None:
    quantised, exact = checkpoints(tmp_path, way, family)
    with LLM(quantised, **SMALL) as llm:
        assert_right(exact, llm.generate(PROMPTS, PARAMS, use_tqdm=False))


def test_without_triton_the_numbers_are_multiplied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "nanovllm.kernels.products.fp8_linear", None)
    quantised, exact = checkpoints(tmp_path, "rows")
    with LLM(quantised, **SMALL) as llm:
        assert_right(exact, llm.generate(PROMPTS, PARAMS, use_tqdm=False))
        assert llm.metrics()["quantization"] == "none"


@pytest.mark.parametrize(
    "prefixes",
    [
        {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."},
        {"model.": "model.language_model.", "lm_head.": "lm_head."},
    ],
)
@pytest.mark.parametrize("way", ["tensor, inverse", "rows"])
def test_the_part_for_text_of_a_checkpoint_with_others(
    way: str, prefixes: dict[str, str], tmp_path: Path
) -> None:
    quantised, exact = checkpoints(tmp_path, way, "llama")
    file = quantised / "model.safetensors"
    tensors = {
        prefixes[own] + name.removeprefix(own): x
        for name, x in load_file(file).items()
        for own in prefixes
        if name.startswith(own)
    }
    save_file({**tensors, "vision_tower.patches.weight": torch.ones(2, 2)}, file)
    config = json.loads((quantised / "config.json").read_text())
    how = config.pop("quantization_config")
    plain = ["model.vision_tower", "model.multi_modal_projector", "lm_head"]
    edit_json(
        quantised / "config.json",
        architectures=["Mistral3ForConditionalGeneration"],
        text_config=config,
        quantization_config={**how, "modules_to_not_convert": plain},
    )
    with LLM(quantised, **SMALL) as llm:
        assert_right(exact, llm.generate(PROMPTS, PARAMS, use_tqdm=False))


FP8_KEYS = {"blocks": "modules_to_not_convert", "tensor": "ignored_layers", "rows": "ignore"}
PARTLY = [
    ("blocks", "paths"),
    ("blocks", "the first layer"),
    ("blocks", "other spellings"),
    ("blocks", "regular expressions"),
    ("tensor", "the last layer"),
    ("tensor", "a name"),
    ("tensor", "parts"),
    ("rows", "paths"),
    ("rows", "paths and expressions"),
]


@pytest.mark.parametrize(("way", "left"), PARTLY)
def test_layers_that_a_list_names_stay_as_they_were(way: str, left: str, tmp_path: Path) -> None:
    names = {FP8_KEYS[way]: LISTS[left].names + OTHERS}
    quantised, exact = checkpoints(tmp_path, way, is_plain=LISTS[left].has, says=names)
    assert_loaded(quantised, exact)


def test_modules_that_a_group_targets_are_quantised_alone(tmp_path: Path) -> None:
    targets = [r"re:.*mlp\.(gate|up)_proj", "model.layers.1.self_attn.o_proj"]
    group = {"targets": targets, "weights": CHANNEL}
    quantised, exact = checkpoints(
        tmp_path,
        "rows",
        is_plain=lambda name: not name.endswith(("gate_proj", "up_proj", "1.self_attn.o_proj")),
        says={"config_groups": {"group_0": group}},
    )
    assert_loaded(quantised, exact)


@pytest.mark.parametrize(
    ("way", "family", "names", "plain"),
    [
        (
            "blocks",
            "qwen3_moe",
            ["model.layers.0.mlp.experts", "layers.1"],
            ("0.mlp.experts", "1."),
        ),
        ("rows", "mixtral", ["re:.*layers.1.block_sparse_moe.*"], ("1.block_sparse_moe",)),
    ],
)
def test_experts_of_a_layer_stay_as_they_were(
    way: str, family: str, names: list[str], plain: tuple[str, ...], tmp_path: Path
) -> None:
    key = FP8_KEYS[way]
    names = names + EXPERTS[family][1]
    quantised, exact = checkpoints(
        tmp_path,
        way,
        family,
        lambda module: module.removeprefix("model.layers.").startswith(plain),
        says={"modules_to_not_convert": [], key: names},
    )
    assert_loaded(quantised, exact)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(
    ("way", "family"),
    [*((way, "qwen3") for way in WAYS), ("blocks", "mixtral"), ("rows", "qwen3_moe")],
)
def test_two_ranks_read_their_parts(way: str, family: str, tmp_path: Path) -> None:
    quantised, exact = checkpoints(tmp_path, way, family)
    with LLM(quantised, tensor_parallel_size=2, **SMALL) as llm:
        assert len(ranks_of(llm).runners) == 2
        assert_right(exact, llm.generate(PROMPTS, PARAMS, use_tqdm=False))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("left", ["paths", "other spellings"])
def test_two_ranks_read_what_is_quantised_and_what_is_not(left: str, tmp_path: Path) -> None:
    says = {"modules_to_not_convert": LISTS[left].names}
    quantised, exact = checkpoints(tmp_path, "blocks", is_plain=LISTS[left].has, says=says)
    assert_loaded(quantised, exact, tensor_parallel_size=2)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("family", "num_ranks"), [("qwen3", 1), ("qwen3", 2), ("mixtral", 2)])
def test_numbers_are_quantised_while_they_are_loaded(
    family: str, num_ranks: int, tmp_path: Path
) -> None:
    """A scale for each row, as "rows" has, also where ranks have parts of it."""
    path = make_checkpoint(tmp_path / "plain", family)
    tensors = load_file(path / "model.safetensors")
    exact = copy_checkpoint(path, tmp_path / "exact")
    for name, x in tensors.items():
        if name.split(".")[-2] in PROJECTIONS and name.endswith(".weight"):
            tensors[name] = quantize(x, 1, 0)[2]
    save_file(tensors, exact / "model.safetensors")
    text = [(7 * i) % 127 for i in range(60)]
    wanted = reference_logprobs(exact, text)[:-1].gather(1, torch.tensor(text[1:])[:, None])[:, 0]
    with LLM(path, quantization="fp8", tensor_parallel_size=num_ranks, **SMALL) as llm:
        assert_right(exact, llm.generate(PROMPTS, PARAMS, use_tqdm=False))
        [score] = llm.score([text], use_tqdm=False)
    torch.testing.assert_close(torch.tensor(score.logprobs), wanted, atol=1e-4, rtol=0)


def of_inputs(changes: dict[str, Any] | None) -> dict[str, Any]:
    """A `quantization_config` in INT8 with other activations, or without any."""
    config = copy.deepcopy(in_int8("channel"))
    group = config["config_groups"]["group_0"]
    if changes is None:
        del group["input_activations"]
    else:
        group["input_activations"].update(changes)
    return config


@pytest.mark.parametrize("zero", [0, 1])
def test_zero_points_of_symmetric_codes_are_0(zero: int, tmp_path: Path) -> None:
    """Some checkpoints have them."""
    quantised, exact = checkpoints(tmp_path, "int8 rows")
    tensors = load_file(quantised / "model.safetensors")
    for name, scales in dict(tensors).items():
        if name.endswith("weight_scale"):
            zeros = torch.zeros(scales.shape, dtype=torch.int8)
            tensors[name.replace("scale", "zero_point")] = zeros
    zeros[5] = zero
    save_file(tensors, quantised / "model.safetensors")
    if zero:
        with pytest.raises(ValueError, match="weight_zero_point has values other than 0"):
            LLM(quantised, **SMALL)
    else:
        with LLM(quantised, **SMALL) as llm:
            assert_right(exact, llm.generate(PROMPTS, PARAMS, use_tqdm=False))


@pytest.mark.parametrize(("num_ranks", "remedy"), [(1, "the original"), (2, "another tensor_par")])
@pytest.mark.usefixtures("threads")
def test_a_block_cannot_be_cut(num_ranks: int, remedy: str, tmp_path: Path) -> None:
    quantised, _ = checkpoints(tmp_path, "blocks")
    config = {**WAYS["blocks"], "weight_block_size": [128, 16]}
    edit_json(quantised / "config.json", quantization_config=config)
    with pytest.raises(ValueError, match=f"whole FP8 scale blocks \\(128 x 16\\): use {remedy}"):
        LLM(quantised, tensor_parallel_size=num_ranks, **SMALL)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"quant_method": "bitsandbytes"},
            "'bitsandbytes' is not supported: use a",
        ),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "'fp8, e5m2' is not supported"),
        ({"quant_method": "fp8", "weight_block_size": [0, 1]}, r"must be \[rows, columns\], got"),
        (COMPRESSED, "without exactly one"),
        ("fp8", "'fp8' is not supported"),
        (of_inputs(None), "8-bit int, activations in 16 bits' is not supported"),
        (of_inputs({"num_bits": 4}), "8-bit int, activations in 4-bit int' is not"),
        (of_inputs({"type": "float"}), "8-bit int, activations in 8-bit float' is not"),
        (of_inputs({"symmetric": False}), "8-bit int, activations asymmetric' is not"),
        (of_inputs({"strategy": "group"}), "activations with strategy group' is not"),
        (
            {"quant_method": "fp8", "ignored_layers": ["model.layers.1.mlp.up_proj"]},
            r"leaves model\.layers\.1\.mlp\.up_proj in 16 bits and quantises "
            r"model\.layers\.1\.mlp\.gate_proj, .* use a checkpoint that treats them alike",
        ),
        (
            {"quant_method": "fp8", "modules_to_not_convert": ["re:.*[qv]_proj"]},
            r"leaves model\.layers\.0\.self_attn\.q_proj in 16 bits and quantises .*attn\.k_proj",
        ),
        (
            {"quant_method": "fp8", "modules_to_not_convert": ["*.mlp"]},
            r"`modules_to_not_convert` must have names or regular expressions, got '\*\.mlp'",
        ),
        (
            {"quant_method": "fp8", "modules_to_not_convert": [7]},
            r"`modules_to_not_convert` must be a list of modules, got \[7\]",
        ),
        (
            GROUP | {"transform_config": {"config_groups": {"u": {"type": "hadamard"}}}},
            "compressed-tensors, transform_config' is not",
        ),
        (GROUP | {"transform_config": "dense"}, "compressed-tensors, transform_config' is not"),
        (GROUP | {"sparsity_config": ["2:4"]}, "compressed-tensors, sparsity_config' is not"),
        (
            GROUP | {"sparsity_config": {"format": "sparse-24-bitmask"}},
            "compressed-tensors, sparsity_config' is not",
        ),
        (
            COMPRESSED
            | {"config_groups": {"group_0": {"targets": ["Conv1d"], "weights": CHANNEL}}},
            "compressed-tensors with other targets than Linear, or modules' is not",
        ),
        (
            COMPRESSED
            | {
                "config_groups": {
                    "group_0": {"targets": ["Linear"], "weights": {**CHANNEL, "num_bits": 4}}
                }
            },
            "4-bit float",
        ),
    ],
)
def test_other_ways_are_refused(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "model")
    edit_json(path / "config.json", quantization_config=config)
    with pytest.raises(ValueError, match=message):
        LLM(path, **SMALL)


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        (torch.ones(95, 1), r"weight_scale has shape \[95, 1\], but config.json implies \[96, 1\]"),
        (
            None,
            r"missing from the checkpoint: model.layers.0.mlp.up_proj.weight_scale; unless a "
            r"file is missing, its quantisation contradicts `quantization_config`: name the linear",
        ),
    ],
)
def test_scales_that_are_missing_or_do_not_fit(
    scales: torch.Tensor | None, message: str, tmp_path: Path
) -> None:
    quantised, _ = checkpoints(tmp_path, "rows")
    edit_tensors(quantised, **{"model.layers.0.mlp.up_proj.weight_scale": scales})
    with pytest.raises(ValueError, match=message):
        LLM(quantised, **SMALL)


def test_experts_in_one_tensor_are_never_quantised(tmp_path: Path) -> None:
    """gpt-oss, with attention in 8 bits."""
    shape = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
    quantised, exact = checkpoints(
        tmp_path, "rows", "gpt_oss", lambda module: "experts" in module, **shape
    )
    assert_loaded(quantised, exact)


def test_experts_in_other_formats_are_refused(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "oss", "gpt_oss", num_local_experts=4, num_experts_per_tok=2)
    with pytest.raises(ValueError, match=r"'fp8' is not supported for experts .*: leave it out"):
        LLM(path, quantization="fp8", **SMALL)
    path = make_checkpoint(tmp_path / "mixtral", "mixtral")
    fp8 = {"quant_method": "fp8", "modules_to_not_convert": ["block_sparse_moe.experts.3.w1"]}
    edit_json(path / "config.json", quantization_config=fp8)
    with pytest.raises(
        ValueError, match=r"leaves .*0\.block_sparse_moe\.experts\.3\.w1 in 16 bits and .*\.0\.w1, "
    ):
        LLM(path, **SMALL)


class Sizes(TorchDispatchMode):
    """Sizes of the results of operations."""

    def __init__(self) -> None:
        super().__init__()
        self.of: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.of[str(func)] = max(result.numel(), self.of.get(str(func), 0))
        return result


@pytest.mark.parametrize("block", [(1, 40), (16, 16), (16, 128)])
def test_numbers_take_no_more_memory_than_they_have(
    block: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The experts of a layer took 4.8 GB beside their 0.8, where no kernel has codes."""
    monkeypatch.setattr(utils_fp8, "PART", 300)
    N, K = 70, 40
    scales = torch.rand(-(-N // block[0]), -(-K // block[1]))
    codes = utils_fp8.Codes(torch.randn(N, K).to(E4M3), scales, block)
    wanted = codes.codes.float()
    for i in range(N):
        for j in range(K):
            wanted[i, j] *= scales[i // block[0], j // block[1]]
    with Sizes() as sizes:
        numbers = codes.numbers(torch.bfloat16)
    assert torch.equal(numbers, wanted.bfloat16())
    assert sizes.of.pop("aten.empty.memory_format") == N * K
    assert max(sizes.of.values()) < N * K / 3


def test_a_checkpoint_in_fp8_may_be_asked_for(tmp_path: Path) -> None:
    quantised, exact = checkpoints(tmp_path, "blocks")
    with LLM(quantised, quantization="fp8", **SMALL) as llm:
        assert_right(exact, llm.generate(PROMPTS, PARAMS, use_tqdm=False))


def test_tensors_that_config_json_does_not_describe(tmp_path: Path) -> None:
    quantised, _ = checkpoints(tmp_path, "rows")
    name = "model.layers.0.mlp.up_proj.weight"
    edit_tensors(quantised, **{name: torch.zeros(96, 64)})
    with pytest.raises(ValueError, match=f"{name} is F32, but config.json implies F8_E4M3"):
        LLM(quantised, **SMALL)
