"""`Fp8`: the format of matrices in 8 bits, and how config.json spells it.

FP8 (e4m3) codes have a scale per block of values. Two spellings are read: `quant_method` "fp8"
(Qwen, DeepSeek: blocks of 128 x 128; Mistral, AutoFP8: one scale per tensor), and a group of
"compressed-tensors" with `type` "float" (a scale per row, tensor or block). Scales of activations
are not read: activations are quantised by their own values.
"""

from dataclasses import dataclass
from typing import Any

from nanovllm.checkpoint.refusals import unsupported_quantization


@dataclass(frozen=True)
class Fp8:
    """The format of FP8 matrices.

    Attributes:
        block: rows and columns that share a scale; 0: all of them.
        scale: name of the scales in the checkpoint, after that of the module; "": it has none, and
            values are quantised while they are loaded.
    """

    block: tuple[int, int]
    scale: str


def read_fp8(found: dict[str, Any]) -> Fp8:
    """The format of a `quantization_config` with the method "fp8"."""
    if (found.get("fmt") or "e4m3") != "e4m3":
        raise unsupported_quantization(f"fp8, {found['fmt']}")
    block = found.get("weight_block_size")
    if block is None:
        return Fp8((0, 0), "weight_scale")
    return Fp8(_read_block(block), "weight_scale_inv")


def read_fp8_group(weights: dict[str, Any]) -> Fp8:
    """The format of a group of compressed-tensors, whose `weights` are 8-bit floats."""
    strategy = weights.get("strategy")
    if strategy == "block":
        return Fp8(_read_block(weights.get("block_structure")), "weight_scale")
    if strategy not in ("channel", "tensor"):
        raise unsupported_quantization(f"compressed-tensors, strategy {strategy}")
    return Fp8((1, 0) if strategy == "channel" else (0, 0), "weight_scale")


def _read_block(block: Any) -> tuple[int, int]:
    if not isinstance(block, list) or [type(n) for n in block] != [int, int] or min(block) < 1:
        raise ValueError(
            f"config.json: blocks of FP8 weights must be [rows, columns], got {block!r}"
        )
    return block[0], block[1]
