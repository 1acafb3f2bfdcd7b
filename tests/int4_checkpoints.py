"""Checkpoints in 4 bits, written by hand as AutoAWQ, AutoGPTQ, AutoRound and compressed-tensors
publish.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from checkpoints import copy_checkpoint, make_checkpoint

PROJECTIONS = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    *("qkv_proj", "gate_up_proj"),
    *("in_proj", "in_proj_qkv", "in_proj_z", "in_proj_qkvz", "out_proj", "w1", "w2", "w3"),
)
AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": True}
GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "desc_act": False}
AUTO_ROUND: dict[str, Any] = {
    "quant_method": "auto-round",
    "bits": 4,
    "data_type": "int",
    "autoround_version": "0.12.3",
}
INT = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}


def compressed(**weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": INT | weights}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


# Contents of config.json, and whether groups have zero points of their own.
WAYS: dict[str, tuple[dict[str, Any], bool]] = {
    "awq": (AWQ | {"group_size": 64}, True),
    "gptq": (GPTQ | {"group_size": 32, "sym": False}, True),
    "gptq, symmetric": (GPTQ | {"group_size": 128, "sym": True}, False),
    "gptq_v2": (GPTQ | {"group_size": 32, "checkpoint_format": "gptq_v2"}, True),
    "compressed": (compressed(symmetric=True), False),
    "compressed, zeros": (compressed(symmetric=False, actorder="weight"), True),
    "gptq of auto-round": (
        AUTO_ROUND | {"group_size": 128, "sym": True, "packing_format": "auto_round:auto_gptq"},
        False,
    ),
    "awq of auto-round": (
        AUTO_ROUND | {"group_size": 32, "sym": False, "packing_format": "auto_round:auto_awq"},
        True,
    ),
}


def packed(codes: np.ndarray, order: tuple[int, ...] = tuple(range(8))) -> np.ndarray:
    """Eight neighbours of a row in an int32: the lowest four bits are of neighbour order[0]."""
    words = np.zeros((len(codes), codes.shape[1] // 8), np.uint32)
    for i, neighbour in enumerate(order):
        words |= codes[:, neighbour::8].astype(np.uint32) << np.uint32(4 * i)
    return words.view(np.int32)


def quantize(x: torch.Tensor, way: str, group: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Tensors by their names after the module's, and the numbers that they mean."""
    has_zeros = WAYS[way][1]
    groups = x.double().numpy().reshape(len(x), -1, group)
    least = np.minimum(groups.min(2), 0) if has_zeros else -np.abs(groups).max(2)
    most = np.maximum(groups.max(2), 0) if has_zeros else np.abs(groups).max(2)
    scales = ((most - least) / 15).astype(np.float16).astype(np.float64)
    zeros = np.round(-least / scales).astype(int) if has_zeros else np.full(scales.shape, 8)
    codes = np.clip(np.round(groups / scales[..., None]) + zeros[..., None], 0, 15).astype(int)
    numbers = ((codes - zeros[..., None]) * scales[..., None]).reshape(x.shape)
    codes = codes.reshape(x.shape)
    if way.startswith("awq"):
        order = 0, 2, 4, 6, 1, 3, 5, 7
        tensors = {
            "qweight": packed(codes.T, order),
            "qzeros": packed(zeros.T, order),
            "scales": scales.T.astype(np.float16),
        }
    elif way.startswith("gptq"):
        stored = zeros if way == "gptq_v2" else (zeros - 1) % 16
        tensors = {
            "qweight": packed(codes).T,
            "qzeros": packed(stored.T),
            "scales": scales.T.astype(np.float16),
        }
        if way in ("gptq", "gptq, symmetric"):  # others leave these out
            tensors["g_idx"] = (np.arange(x.shape[1]) // group).astype(np.int32)
            tensors["bias"] = np.zeros(len(x), np.float16)  # AutoGPTQ: one for every layer
    else:
        tensors = {
            "weight_packed": packed(codes),
            "weight_scale": scales.astype(np.float16),
            "weight_shape": np.array(x.shape),
        }
        if has_zeros:
            tensors["weight_zero_point"] = packed(zeros.T).T
    arrays = {name: torch.from_numpy(array.copy()) for name, array in tensors.items()}
    return arrays, torch.from_numpy(numbers).float()


def checkpoints(
    tmp_path: Path,
    way: str,
    family: str = "qwen3",
    is_plain: Callable[[str], bool] = lambda module: False,
    says: dict[str, Any] | None = None,
    **shape: Any,
) -> tuple[Path, Path]:
    """One in 4 bits, and one with the same numbers as float32.

    Args:
        is_plain: whether a module stays as it is.
        says: keys of `quantization_config` that say so.
    """
    shape = {"hidden_size": 128, "intermediate_size": 256} | shape
    config = WAYS[way][0] | (says or {})
    group = config.get("group_size", 32)
    exact = make_checkpoint(tmp_path / "exact", family, **shape)
    quantised = copy_checkpoint(exact, tmp_path / "quantised", quantization_config=config)
    tensors = load_file(exact / "model.safetensors")
    plain, stored = dict(tensors), dict(tensors)
    for name, x in tensors.items():
        module = name.removesuffix(".weight")
        if module.split(".")[-1] in PROJECTIONS and not is_plain(module):
            parts, plain[name] = quantize(x, way, group)
            del stored[name]
            stored = {f"{module}.{part}": array for part, array in parts.items()} | stored
    save_file(plain, exact / "model.safetensors")
    save_file(stored, quantised / "model.safetensors")
    return quantised, exact
