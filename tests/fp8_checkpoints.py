"""Checkpoints in 8 bits, written by hand as they are published."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from checkpoints import copy_checkpoint, make_checkpoint

E4M3 = torch.float8_e4m3fn
PROJECTIONS = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    *("w1", "w2", "w3"),  # Mixtral's experts
    *("in_proj", "in_proj_qkv", "in_proj_z", "in_proj_qkvz", "out_proj"),  # layers with a state
)
# Families whose layers are not all alike, with what their checkpoints leave as it is.
EXPERTS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "qwen3_moe": (
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "mlp_only_layers": [1],
            "num_hidden_layers": 3,
        },
        ["lm_head", "model.layers.0.mlp.gate", "model.layers.2.mlp.gate"],
    ),
    "mixtral": ({"num_local_experts": 5}, ["lm_head", "re:.*block_sparse_moe.gate$"]),
}
COMPRESSED: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "ignore": ["lm_head"],
}
CHANNEL = {"num_bits": 8, "type": "float", "strategy": "channel", "dynamic": False}
GROUP = COMPRESSED | {"config_groups": {"group_0": {"targets": ["Linear"], "weights": CHANNEL}}}


def in_int8(strategy: str) -> dict[str, Any]:
    """Weights and activations in INT8, as llm-compressor writes it."""
    of_tokens = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
    weights = {"num_bits": 8, "type": "int", "strategy": strategy, "symmetric": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": of_tokens}
    return COMPRESSED | {"format": "int-quantized", "config_groups": {"group_0": group}}


# Contents of config.json.
WAYS: dict[str, dict[str, Any]] = {
    "blocks": {"quant_method": "fp8", "weight_block_size": [16, 16], "fmt": "e4m3"},
    "tensor": {"quant_method": "fp8", "activation_scheme": "static"},
    # As transformers' `FP8Linear` saves it (Ministral 3).
    "tensor, inverse": {"quant_method": "fp8", "weight_block_size": None},
    # llm-compressor writes what it did not do, too.
    "rows": GROUP | {"transform_config": {}, "sparsity_config": {"format": "dense"}},
    "int8 rows": in_int8("channel"),
    "int8 tensor": in_int8("tensor"),
}


def quantize(
    x: torch.Tensor, rows: int, cols: int, dtype: torch.dtype = E4M3
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales and the numbers that these mean, one block at a time."""
    N, K = x.shape
    rows, cols = rows or N, cols or K
    scales = torch.empty(math.ceil(N / rows), math.ceil(K / cols))
    codes, numbers = torch.empty(N, K, dtype=dtype), torch.empty(N, K)
    for i in range(len(scales)):
        for j in range(scales.shape[1]):
            span = slice(i * rows, (i + 1) * rows), slice(j * cols, (j + 1) * cols)
            scales[i, j] = x[span].abs().max() / (448 if dtype == E4M3 else 127)
            scaled = x[span] / scales[i, j]
            codes[span] = (scaled if dtype == E4M3 else scaled.round()).to(dtype)
            numbers[span] = codes[span].float() * scales[i, j]
    return codes, scales, numbers


def checkpoints(
    tmp_path: Path,
    way: str,
    family: str = "qwen3",
    is_plain: Callable[[str], bool] = lambda module: False,
    says: dict[str, Any] | None = None,
    **shape: Any,
) -> tuple[Path, Path]:
    """One in 8 bits, and one with the same numbers as float32.

    Args:
        is_plain: whether a module stays as it is.
        says: keys of `quantization_config` that say so.
    """
    own, plain_modules = EXPERTS.get(family, ({}, []))
    if plain_modules:
        says = {"modules_to_not_convert": plain_modules} | (says or {})
    exact = make_checkpoint(tmp_path / "exact", family, **own, **shape)
    return quantised_copy(exact, tmp_path / "quantised", way, is_plain, says), exact


def quantised_copy(
    exact: Path,
    path: Path,
    way: str,
    is_plain: Callable[[str], bool] = lambda module: False,
    says: dict[str, Any] | None = None,
) -> Path:
    """A copy in 8 bits of a checkpoint, which gets the numbers that the codes mean. For arguments
    see `checkpoints`.
    """
    config, is_tensor = WAYS[way] | (says or {}), "tensor" in way
    rows, cols = (1, 0) if "rows" in way else config.get("weight_block_size") or (0, 0)
    dtype = torch.int8 if "int8" in way else E4M3
    copy_checkpoint(exact, path, quantization_config=config)
    tensors = load_file(exact / "model.safetensors")
    plain, packed = dict(tensors), dict(tensors)
    name_of_scales = "weight_scale_inv" if way in ("blocks", "tensor, inverse") else "weight_scale"
    of_activations = "input_scale" if way == "tensor" else "activation_scale"  # not read
    for name, x in tensors.items():
        module = name.removesuffix(".weight")
        if module.split(".")[-1] in PROJECTIONS and not is_plain(module):
            codes, scales, plain[name] = quantize(x, rows, cols, dtype)
            packed[name] = codes
            shape = [] if is_tensor else list(scales.shape)
            packed[f"{module}.{name_of_scales}"] = scales.reshape(shape)
            if is_tensor:
                packed[f"{module}.{of_activations}"] = torch.ones(())
    assert len(packed) > len(tensors), "nothing is quantised"
    save_file(plain, exact / "model.safetensors")
    save_file(packed, path / "model.safetensors")
    return path
