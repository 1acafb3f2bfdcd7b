"""`Int4`: the format of matrices in 4 bits, and how config.json spells it.

INT4 codes have a scale, and mostly a zero point, per group of columns in a row. Three spellings:
"awq" (AutoAWQ's "gemm"), "gptq" (AutoGPTQ's, and GPTQModel's "gptq_v2"), and a group of
"compressed-tensors" with `type` "int".
"""

from dataclasses import dataclass
from typing import Any

from nanovllm.checkpoint.files import read_value
from nanovllm.checkpoint.refusals import unsupported_quantization

GROUPS = (32, 64, 128)  # columns that share a scale


@dataclass(frozen=True)
class Int4:
    """The format of INT4 matrices.

    Attributes:
        group: columns that share a scale and a zero point.
        codes, scales, zeros: names of these tensors in the checkpoint, after that of the module;
            `zeros` "": all zero points are 8.
        groups: name of the tensor with each column's group, which must be in order; "": none.
        transposed: whether the tensors have columns first.
        along_rows: whether an int32 packs the codes of eight neighbouring rows, not columns. Zero
            points are always packed along rows.
        order: place in an int32 of each of eight neighbours; 0: the lowest four bits.
        added: constant added to stored zero points.
    """

    group: int
    codes: str
    scales: str
    zeros: str
    groups: str = ""
    transposed: bool = True
    along_rows: bool = False
    order: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7)
    added: int = 0


def read_awq(found: dict[str, Any]) -> Int4:
    """The format of a `quantization_config` with the method "awq"."""
    _check_bits(found)
    version = found.get("version") or found.get("checkpoint_format") or found.get("format")
    if str(version or "gemm").lower() != "gemm":
        raise unsupported_quantization(f"awq, version {version}")
    if not read_value(found, "zero_point", bool, True):
        raise unsupported_quantization("awq, without zero points")
    # AutoAWQ interleaves: an int32 holds, from its lowest bits up, rows 0 2 4 6 1 3 5 7.
    order = 0, 4, 1, 5, 2, 6, 3, 7
    group = _read_group_size(found)
    return Int4(group, "qweight", "scales", "qzeros", along_rows=True, order=order)


def read_gptq(found: dict[str, Any]) -> Int4:
    """The format of a `quantization_config` with the method "gptq"."""
    _check_bits(found)
    _refuse_act_order(found.get("desc_act"))
    form = found.get("checkpoint_format") or found.get("format") or "gptq"
    form = "marlin" if found.get("is_marlin_format") else form
    if form not in ("gptq", "gptq_v2"):
        raise unsupported_quantization(f"gptq, {form}")
    added = int(form == "gptq")  # the first version stores each zero point minus 1
    group = _read_group_size(found)
    return Int4(group, "qweight", "scales", "qzeros", groups="g_idx", added=added)


def read_int4_group(weights: dict[str, Any], form: Any) -> Int4:
    """The format of a group of compressed-tensors, whose `weights` are 4-bit integers.

    Args:
        weights: description of these in the group.
        form: `format` of the group.
    """
    strategy = weights.get("strategy")
    if (strategy, form) != ("group", "pack-quantized"):
        raise unsupported_quantization(
            f"compressed-tensors, 4-bit int, strategy {strategy}, format {form}"
        )
    order = weights.get("actorder") or ""
    _refuse_act_order(str(order).lower() not in ("", "weight", "static"))
    zeros = "" if read_value(weights, "symmetric", bool, True) else "weight_zero_point"
    return Int4(_read_group_size(weights), "weight_packed", "weight_scale", zeros, transposed=False)


def _check_bits(found: dict[str, Any]) -> None:
    key = "bits" if found.get("w_bit") is None else "w_bit"  # AutoAWQ's own name
    if (bits := read_value(found, key, int)) != 4:
        raise unsupported_quantization(f"{found['quant_method']}, {bits} bits")


def _refuse_act_order(has: Any) -> None:
    if has:
        raise ValueError(
            "config.json: act-order (`desc_act`, `actorder`) is not supported: use a checkpoint "
            "without it, or the original weights"
        )


def _read_group_size(found: dict[str, Any]) -> int:
    key = "group_size" if found.get("q_group_size") is None else "q_group_size"
    size = read_value(found, key, int, minimum=-1)
    if size not in GROUPS:
        raise ValueError(
            f"config.json: `{key}` of INT4 weights must be 32, 64 or 128, got {size}: use another "
            "checkpoint, or the original weights"
        )
    return size
