"""How the matrices of linear layers are stored in 8 bits, as config.json says it.

FP8 (e4m3) codes have scales for blocks of numbers. Two spellings are read: `quant_method` "fp8"
(Qwen, DeepSeek: blocks of 128 x 128; others: one scale for a tensor), and "compressed-tensors" with
`type` "float" (a scale for each row, for a tensor, or for blocks). Scales of activations are not
read: activations are quantised by what they are.
"""

from dataclasses import dataclass
from typing import Any

from nanovllm.utils.files import read_value

# Tensors' names end so. Activations are quantised by what they are, keys and values likewise.
NOT_READ = (".input_scale", ".output_scale", ".q_scale", ".k_scale", ".v_scale", ".kv_scale")
# What config.json calls the modules that are not quantised, and which of them must be.
PLAIN_KEYS = ("ignore", "modules_to_not_convert", "ignored_layers")
QUANTIZED = ("_proj", "self_attn", "mlp")
OF_OTHER_PARTS = ("vis", "audio", "multi_modal", "router", "norm")


@dataclass(frozen=True)
class Quantization:
    """FP8 matrices.

    Attributes:
        block: rows and columns that share a scale; 0: all of them.
        scale: what the checkpoint calls the scales, behind the name of the module; "": it has
            none, and numbers are quantised while they are loaded.
    """

    block: tuple[int, int]
    scale: str


WHILE_LOADING = Quantization((1, 0), "")


def read_quantization(raw: dict[str, Any]) -> Quantization | None:
    """Of a config.json; None if it says nothing.

    Raises:
        ValueError: if the checkpoint is stored in another way.
    """
    found = raw.get("quantization_config")
    if not found:
        return None
    if not isinstance(found, dict):
        raise _refusal(found)
    method = found.get("quant_method")
    _check_all_are(found)
    if method == "fp8":
        return _read_fp8(found)
    if method == "compressed-tensors":
        return _read_compressed(found)
    raise _refusal(method)


def choose(asked: str | None, found: Quantization | None, has_experts: bool) -> Quantization | None:
    """What a model's linear layers have, by the option and by its config.json.

    Raises:
        ValueError: if experts were asked to be quantised.
    """
    if asked is None or found is not None:
        return found
    if has_experts:
        raise ValueError(
            f"`quantization` {asked!r} is not supported for a mixture of experts: leave it out"
        )
    return WHILE_LOADING


def _refusal(method: Any) -> ValueError:
    return ValueError(
        f"config.json: `quantization_config` {method!r} is not supported: take a checkpoint in FP8 "
        "(`fp8`, or `compressed-tensors` of 8-bit floats), or the original weights"
    )


def _check_all_are(found: dict[str, Any]) -> None:
    """Refuse checkpoints in which some linear layers are not quantised."""
    for key in PLAIN_KEYS:
        for name in found.get(key) or ():
            is_other = any(part in str(name) for part in OF_OTHER_PARTS)
            if any(part in str(name) for part in QUANTIZED) and not is_other:
                raise ValueError(
                    f"config.json: `{key}` leaves {name} as it is, which is not supported: take a "
                    "checkpoint in which all linear layers are quantised, or the original weights"
                )


def _read_fp8(found: dict[str, Any]) -> Quantization:
    if (found.get("fmt") or "e4m3") != "e4m3":
        raise _refusal(f"fp8, {found['fmt']}")
    block = found.get("weight_block_size")
    if block is None:
        return Quantization((0, 0), "weight_scale")
    return Quantization(_read_block(block), "weight_scale_inv")


def _read_compressed(found: dict[str, Any]) -> Quantization:
    groups = found.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        raise _refusal("compressed-tensors without one group of layers")
    [group] = groups.values()
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict) or group.get("targets") != ["Linear"]:
        raise _refusal("compressed-tensors of other layers than all linear ones")
    kind, bits = weights.get("type"), read_value(weights, "num_bits", int, 0)
    if (kind, bits) != ("float", 8):
        raise _refusal(f"compressed-tensors, {bits}-bit {kind}")
    strategy = weights.get("strategy")
    if strategy == "block":
        return Quantization(_read_block(weights.get("block_structure")), "weight_scale")
    if strategy not in ("channel", "tensor"):
        raise _refusal(f"compressed-tensors, strategy {strategy}")
    return Quantization((1, 0) if strategy == "channel" else (0, 0), "weight_scale")


def _read_block(block: Any) -> tuple[int, int]:
    if not isinstance(block, list) or [type(n) for n in block] != [int, int] or min(block) < 1:
        raise ValueError(
            f"config.json: blocks of FP8 weights must be [rows, columns], got {block!r}"
        )
    return block[0], block[1]
