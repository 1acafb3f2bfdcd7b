"""`Quantization`: the modules of a checkpoint that are quantised, and their format.

config.json names a method, which determines the format (`fp8.py`, `int8.py`, `int4.py`), and lists
modules that it leaves as they were, in 16 bits. "auto-round" names one of the other formats, and
has a table of modules that differ. A module that is quantised in any other way is refused by its
name.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from nanovllm.checkpoint.files import read_value
from nanovllm.checkpoint.fp8 import Fp8, read_fp8, read_fp8_group
from nanovllm.checkpoint.int4 import Int4, read_awq, read_gptq, read_int4_group
from nanovllm.checkpoint.int8 import Int8, read_int8_group
from nanovllm.checkpoint.modules import MARK, Modules, flat, is_pattern
from nanovllm.checkpoint.refusals import unsupported_quantization

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
PLAIN_KEYS = ("modules_to_not_convert", "ignored_layers", "ignore")  # lists of modules left out
BLOCK_KEYS = ("block_name_to_quantize", "to_quant_block_names")  # AutoRound's lists of blocks
# Packings of AutoRound, by its names for them.
GPTQ_PACKINGS = ("auto_round:auto_gptq", "auto_round:gptq")
AWQ_PACKINGS = ("auto_round:auto_awq", "auto_round:awq")
# Settings that may differ from module to module, with the defaults.
SETTINGS = {"bits": None, "group_size": None, "data_type": "int", "desc_act": False}
FLOATS = ("float", "fp", "fp16", "bf16")  # data types of AutoRound that are not quantised
HEAD = "lm_head"
REMEDY = "use another checkpoint, or the original weights"

Format: TypeAlias = Fp8 | Int8 | Int4


class Rule(NamedTuple):
    """A statement of config.json about some modules.

    Attributes:
        key: key in config.json.
        modules: the modules.
        format: format of their matrices; None: they stay in 16 bits.
        refused: unsupported fact about them; "": none.
    """

    key: str
    modules: Modules
    format: Format | None = None
    refused: str = ""


@dataclass(frozen=True)
class Quantization:
    """The quantisation of a checkpoint's linear layers.

    Attributes:
        format: format of the matrices that are quantised.
        method: name of the checkpoint's method, as in `quant_method`.
        rules: exceptions, of which the first one counts that has a module.
        others_are_plain: whether modules without a rule stay in 16 bits.
    """

    format: Format
    method: str
    rules: tuple[Rule, ...] = ()
    others_are_plain: bool = False

    def of(self, modules: Iterable[str]) -> Format | None:
        """The format of a layer's matrix; None: it is not quantised.

        Args:
            modules: paths of the checkpoint's modules that the matrix consists of.

        Raises:
            ValueError: if they differ, or are quantised in a way that is not supported.
        """
        if not self.rules and not self.others_are_plain:
            return self.format
        found: dict[Format | None, str] = {}
        for module in modules:
            found.setdefault(self._of_one(module), module)
        assert found, "a matrix of no module"
        if len(found) > 1:
            quantised = next(module for format, module in found.items() if format is not None)
            plain = next(module for module in found.values() if module != quantised)
            raise ValueError(
                f"config.json: `quantization_config` leaves {plain} in 16 bits and quantises "
                f"{quantised}, which is not supported, because both are multiplied as one matrix: "
                "use a checkpoint that treats them alike, or the original weights"
            )
        return next(iter(found))

    def _of_one(self, module: str) -> Format | None:
        for rule in self.rules:
            if module in rule.modules:
                if rule.refused:
                    raise ValueError(
                        f"config.json: `{rule.key}` quantises {module} in another way than the "
                        f"rest ({rule.refused}), which is not supported: {REMEDY}"
                    )
                return rule.format
        return None if self.others_are_plain else self.format


WHILE_LOADING = Quantization(Fp8((1, 0), ""), "fp8")


def read_quantization(raw: dict[str, Any]) -> Quantization | None:
    """The quantisation in a config.json; None if it names none.

    Raises:
        ValueError: if the checkpoint has any format that is not supported.
    """
    found = raw.get("quantization_config")
    if not found:
        return None
    if not isinstance(found, dict):
        raise unsupported_quantization(found)
    method = found.get("quant_method")
    if found.get(HEAD):
        raise _quantised_head(method)
    if method == "fp8":
        return _by_lists(found, read_fp8(found), "fp8")
    if method == "awq":
        return _by_lists(found, read_awq(found), "awq")
    if method == "gptq":
        return _by_lists(found, read_gptq(found), "gptq")
    if method == "compressed-tensors":
        return _read_compressed(found)
    if method in ("auto-round", "intel/auto-round"):
        return _read_auto_round(found)
    raise unsupported_quantization(method)


def choose(asked: str | None, found: Quantization | None, packed: bool) -> Quantization | None:
    """The quantisation of a model's linear layers, from the option and from its config.json.

    Args:
        asked: option `quantization`; None: as the checkpoint says.
        found: quantisation of the checkpoint; None: none.
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
    """The name of a format: "none", "fp8", "int8" or "int4"."""
    if found is None:
        return "none"
    return {Fp8: "fp8", Int8: "int8", Int4: "int4"}[type(found.format)]


def _quantised_head(method: Any) -> ValueError:
    return unsupported_quantization(f"{method}, {HEAD} (which quantises the LM head)")


def _by_lists(found: dict[str, Any], format: Format, method: str) -> Quantization:
    """A quantisation with the exceptions that all methods spell alike."""
    rules = [
        *_dynamic(found, format, method),
        *(Rule(key, Modules.named(key, found[key])) for key in PLAIN_KEYS if found.get(key)),
    ]
    key = "modules_in_block_to_quantize"
    if only := found.get(key):
        names = list(flat(only)) if isinstance(only, list) else only
        rules.append(Rule(key, Modules.named(key, names), format))
    return Quantization(format, method, tuple(rules), others_are_plain=bool(only))


def _dynamic(found: dict[str, Any], format: Format, method: str) -> list[Rule]:
    """GPTQModel's table of modules that differ: regular expressions that match the beginning of a
    path, after "-:" of modules that are left out, or "+:" or nothing of others.
    """
    rules = []
    for name, own in _table("dynamic", found).items():
        pattern = name.removeprefix("-:").removeprefix("+:")
        modules = Modules.named("dynamic", [MARK + pattern])
        if name.startswith("-:"):
            rules.append(Rule("dynamic", modules))
        elif HEAD in name:
            raise _quantised_head(method)
        else:
            rules.append(Rule("dynamic", modules, format, _differences(own, found)))
    return rules


def _read_compressed(found: dict[str, Any]) -> Quantization:
    method = "compressed-tensors"
    groups = found.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        raise unsupported_quantization(f"{method} without exactly one config group")
    unused = {"transform_config": ("config_groups", {}), "sparsity_config": ("format", "dense")}
    for key, (part, nothing) in unused.items():
        what = found.get(key) or {}
        if not isinstance(what, dict) or what.get(part, nothing) not in (None, nothing):
            raise unsupported_quantization(f"{method}, {key}")
    [group] = groups.values()
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict):
        raise unsupported_quantization(f"{method} without weights")
    kind, bits = weights.get("type"), read_value(weights, "num_bits", int, 0)
    format: Format
    if (kind, bits) == ("int", 4):
        format = read_int4_group(weights, group.get("format") or found.get("format"))
    elif (kind, bits) == ("int", 8):
        format = read_int8_group(group, group.get("format") or found.get("format"))
    elif (kind, bits) == ("float", 8):
        format = read_fp8_group(weights)
    else:
        strategy = weights.get("strategy")
        raise unsupported_quantization(f"{method}, {bits}-bit {kind}, strategy {strategy}")
    ignored, targets = found.get("ignore") or [], group.get("targets")
    rules = [Rule("ignore", Modules.exactly("ignore", ignored))] if ignored else []
    rules += _by_lists({**found, "ignore": None}, format, method).rules
    if targets == ["Linear"]:
        return Quantization(format, method, tuple(rules))
    modules = Modules.exactly("targets", targets)
    if not all(name.startswith(MARK) or "." in name for name in targets):  # a path, or a class
        raise unsupported_quantization(f"{method} with other targets than Linear, or modules")
    only = Rule("targets", modules, format)
    return Quantization(format, method, (*rules, only), others_are_plain=True)


def _read_auto_round(found: dict[str, Any]) -> Quantization:
    method = "auto-round"
    packing = found.get("packing_format") or GPTQ_PACKINGS[0]
    kind, act_bits = found.get("data_type") or "int", read_value(found, "act_bits", int, 16)
    if packing not in GPTQ_PACKINGS + AWQ_PACKINGS or kind != "int" or act_bits < 16:
        raise unsupported_quantization(
            f"{method}, {packing}, of {kind}, activations of {act_bits} bits"
        )
    format = read_gptq(found) if packing in GPTQ_PACKINGS else read_awq(found)
    rules = (*_extra_config(found, format), *_by_lists(found, format, method).rules)
    key = next((key for key in BLOCK_KEYS if found.get(key)), "")
    if not key:
        return Quantization(format, method, rules)
    blocks = found[key].split(",") if isinstance(found[key], str) else found[key]
    names = list(flat(blocks)) if isinstance(blocks, list) else blocks
    only = Rule(key, Modules.named(key, names), format)
    return Quantization(format, method, (*rules, only), others_are_plain=True)


def _extra_config(found: dict[str, Any], format: Format) -> list[Rule]:
    """AutoRound's table of modules that differ: by their paths, or by regular expressions that are
    found in those, which count for modules without an entry of their own.
    """
    named: dict[tuple[Format | None, str], list[str]] = {}
    rules, key = [], "extra_config"
    for name, own in _table(key, found).items():
        bits, kind = own.get("bits"), own.get("data_type")
        is_plain = kind in FLOATS if bits is None else isinstance(bits, int) and bits >= 16
        if HEAD in name and not is_plain:
            raise _quantised_head(found["quant_method"])
        how = (None, "") if is_plain else (format, _differences(own, found))
        if is_pattern(name):
            rules.append(Rule(key, Modules.found_by(key, name), *how))
        else:
            named.setdefault(how, []).append(name)
    return [*(Rule(key, Modules.named(key, names), *how) for how, names in named.items()), *rules]


def _table(key: str, found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    table = found.get(key) or {}
    if not isinstance(table, dict) or not all(isinstance(own, dict) for own in table.values()):
        raise ValueError(f"config.json: `{key}` must be an object of objects, got {table!r}")
    return table


def _differences(own: dict[str, Any], found: dict[str, Any]) -> str:
    """The settings of some modules that differ from those of the rest, in words."""
    return ", ".join(
        f"`{key}` {own[key]!r}"
        for key, default in SETTINGS.items()
        if own.get(key) is not None and own[key] != found.get(key, default)
    )
