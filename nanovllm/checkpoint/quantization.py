"""The format of linear layers' matrices in 8 or 4 bits, read from config.json.

FP8 (e4m3) codes have a scale per block of values. Two spellings are read: `quant_method` "fp8"
(Qwen, DeepSeek: blocks of 128 x 128; Mistral, AutoFP8: one scale per tensor), and
"compressed-tensors" with `type` "float" (a scale per row, tensor or block). Scales of activations
are not read: activations are quantised by their own values.

INT4 codes have a scale, and mostly a zero point, per group of columns in a row. Three spellings:
"awq" (AutoAWQ's "gemm"), "gptq" (AutoGPTQ's, and GPTQModel's "gptq_v2"), and "compressed-tensors"
with `type` "int".
"""

from dataclasses import dataclass
from typing import Any, TypeAlias

from nanovllm.checkpoint.files import read_value

# Suffixes of tensors that are ignored: activations, keys and values get scales by their own values.
NOT_READ = (
    *(".input_scale", ".activation_scale", ".output_scale"),
    *(".q_scale", ".k_scale", ".v_scale", ".kv_scale", ".weight_shape"),
)
# Suffixes of tensors that only a quantised matrix has.
OF_CODES = (
    *(".qweight", ".qzeros", ".scales", ".weight_packed", ".weight_zero_point"),
    *(".weight_scale", ".weight_scale_inv"),
)
# Keys in config.json that list modules left unquantised, and names of modules that must not be.
PLAIN_KEYS = ("ignore", "modules_to_not_convert", "ignored_layers")
QUANTIZED = ("_proj", "self_attn", "mlp", "moe", "experts", "layers")
OF_OTHER_PARTS = ("vis", "audio", "multi_modal", "router", "norm")
ROUTER = ".gate"  # routers of experts stay in 16 bits
GROUPS = (32, 64, 128)  # columns of INT4 that share a scale


@dataclass(frozen=True)
class Fp8:
    """The format of FP8 matrices.

    Attributes:
        block: rows and columns that share a scale; 0: all of them.
        scale: name of the scales in the checkpoint, after that of the module; "": it has none, and
            values are quantised while they are loaded.
        method: name of the checkpoint's method, as in `quant_method`.
    """

    block: tuple[int, int]
    scale: str
    method: str = "fp8"


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
        method: name of the checkpoint's method, as in `quant_method`.
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
    method: str = ""


Quantization: TypeAlias = Fp8 | Int4
WHILE_LOADING = Fp8((1, 0), "")


def read_quantization(raw: dict[str, Any]) -> Quantization | None:
    """The format in a config.json; None if it names none.

    Raises:
        ValueError: if the checkpoint has any other format.
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
    if method == "awq":
        return _read_awq(found)
    if method == "gptq":
        return _read_gptq(found)
    raise _refusal(method)


def choose(asked: str | None, found: Quantization | None, packed: bool) -> Quantization | None:
    """The format of a model's linear layers, from the option and from its config.json.

    Args:
        asked: option `quantization`; None: as the checkpoint says.
        found: format of the checkpoint; None: not quantised.
        packed: whether the checkpoint stores all experts of a layer as one tensor.

    Raises:
        ValueError: if the checkpoint has another format than `asked`, or `asked` would quantise
            packed experts.
    """
    if asked is None or (found is not None and asked in (found.method, format_of(found))):
        return found
    if found is not None or asked != WHILE_LOADING.method:
        has = f"is quantised by {found.method!r}" if found else "is not quantised"
        raise ValueError(
            f"`quantization` {asked!r} contradicts the checkpoint, which {has}: leave it out"
        )
    if packed:
        raise ValueError(
            f"`quantization` {asked!r} is not supported for experts that are stored in one tensor "
            "(gpt-oss): leave it out"
        )
    return WHILE_LOADING


def format_of(found: Quantization | None) -> str:
    """The name of a format: "none", "fp8" or "int4"."""
    if found is None:
        return "none"
    return "fp8" if isinstance(found, Fp8) else "int4"


def _refusal(method: Any) -> ValueError:
    return ValueError(
        f"config.json: `quantization_config` {method!r} is not supported: use a checkpoint in FP8 "
        "(`fp8`, or `compressed-tensors` of 8-bit floats) or in INT4 (`awq`, `gptq`, or "
        "`compressed-tensors` of 4-bit integers), or the original weights"
    )


def _check_all_are(found: dict[str, Any]) -> None:
    """Refuse checkpoints that leave some linear layers unquantised or quantise other modules."""
    for key in PLAIN_KEYS:
        names = found.get(key) or []
        if not isinstance(names, list):
            raise ValueError(f"config.json: `{key}` must be a list of modules, got {names!r}")
        for name in names:
            is_other = any(part in str(name) for part in OF_OTHER_PARTS)
            is_other |= str(name).rstrip("$").endswith(ROUTER)
            if any(part in str(name) for part in QUANTIZED) and not is_other:
                raise ValueError(
                    f"config.json: `{key}` leaves {name} unquantised, which is not supported: use "
                    "a checkpoint with all linear layers quantised, or the original weights"
                )
    for key, effect in (("lm_head", "the LM head"), ("dynamic", "some layers differently")):
        if found.get(key):
            raise _refusal(f"{found.get('quant_method')}, {key} (which quantises {effect})")


def _read_fp8(found: dict[str, Any]) -> Fp8:
    if (found.get("fmt") or "e4m3") != "e4m3":
        raise _refusal(f"fp8, {found['fmt']}")
    block = found.get("weight_block_size")
    if block is None:
        return Fp8((0, 0), "weight_scale")
    return Fp8(_read_block(block), "weight_scale_inv")


def _read_compressed(found: dict[str, Any]) -> Quantization:
    groups = found.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        raise _refusal("compressed-tensors without exactly one config group")
    unused = {"transform_config": ("config_groups", {}), "sparsity_config": ("format", "dense")}
    for key, (part, nothing) in unused.items():
        what = found.get(key) or {}
        if not isinstance(what, dict) or what.get(part, nothing) not in (None, nothing):
            raise _refusal(f"compressed-tensors, {key}")
    [group] = groups.values()
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict) or group.get("targets") != ["Linear"]:
        raise _refusal("compressed-tensors with other targets than Linear")
    kind, bits = weights.get("type"), read_value(weights, "num_bits", int, 0)
    strategy, method = weights.get("strategy"), "compressed-tensors"
    if (kind, bits) == ("int", 4):
        form = group.get("format") or found.get("format")
        if (strategy, form) != ("group", "pack-quantized"):
            raise _refusal(f"{method}, 4-bit int, strategy {strategy}, format {form}")
        order = weights.get("actorder") or ""
        _refuse_act_order(str(order).lower() not in ("", "weight", "static"))
        zeros = "" if read_value(weights, "symmetric", bool, True) else "weight_zero_point"
        size = _read_group(weights)
        return Int4(size, "weight_packed", "weight_scale", zeros, transposed=False, method=method)
    if (kind, bits) != ("float", 8):
        raise _refusal(f"{method}, {bits}-bit {kind}, strategy {strategy}")
    if strategy == "block":
        return Fp8(_read_block(weights.get("block_structure")), "weight_scale", method)
    if strategy not in ("channel", "tensor"):
        raise _refusal(f"{method}, strategy {strategy}")
    return Fp8((1, 0) if strategy == "channel" else (0, 0), "weight_scale", method)


def _read_block(block: Any) -> tuple[int, int]:
    if not isinstance(block, list) or [type(n) for n in block] != [int, int] or min(block) < 1:
        raise ValueError(
            f"config.json: blocks of FP8 weights must be [rows, columns], got {block!r}"
        )
    return block[0], block[1]


def _read_awq(found: dict[str, Any]) -> Int4:
    _check_bits(found)
    version = found.get("version") or found.get("checkpoint_format") or found.get("format")
    if str(version or "gemm").lower() != "gemm":
        raise _refusal(f"awq, version {version}")
    if not read_value(found, "zero_point", bool, True):
        raise _refusal("awq, without zero points")
    # AutoAWQ interleaves: an int32 holds, from its lowest bits up, rows 0 2 4 6 1 3 5 7.
    order = 0, 4, 1, 5, 2, 6, 3, 7
    return Int4(
        _read_group(found),
        codes="qweight",
        scales="scales",
        zeros="qzeros",
        along_rows=True,
        order=order,
        method="awq",
    )


def _read_gptq(found: dict[str, Any]) -> Int4:
    _check_bits(found)
    _refuse_act_order(found.get("desc_act"))
    form = found.get("checkpoint_format") or found.get("format") or "gptq"
    form = "marlin" if found.get("is_marlin_format") else form
    if form not in ("gptq", "gptq_v2"):
        raise _refusal(f"gptq, {form}")
    return Int4(
        _read_group(found),
        codes="qweight",
        scales="scales",
        zeros="qzeros",
        groups="g_idx",
        added=int(form == "gptq"),  # the first version stores each zero point minus 1
        method="gptq",
    )


def _check_bits(found: dict[str, Any]) -> None:
    key = "bits" if found.get("w_bit") is None else "w_bit"  # AutoAWQ's own name
    if (bits := read_value(found, key, int)) != 4:
        raise _refusal(f"{found['quant_method']}, {bits} bits")


def _refuse_act_order(has: Any) -> None:
    if has:
        raise ValueError(
            "config.json: act-order (`desc_act`, `actorder`) is not supported: use a checkpoint "
            "without it, or the original weights"
        )


def _read_group(found: dict[str, Any]) -> int:
    key = "group_size" if found.get("q_group_size") is None else "q_group_size"
    size = read_value(found, key, int, minimum=-1)
    if size not in GROUPS:
        raise ValueError(
            f"config.json: `{key}` of INT4 weights must be 32, 64 or 128, got {size}: use another "
            "checkpoint, or the original weights"
        )
    return size
