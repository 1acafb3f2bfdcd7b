"""`AdapterConfig`: the contents of a LoRA adapter's adapter_config.json. Imports no torch.

Names of fields and their meaning are those of PEFT 0.21 (`LoraConfig`).
"""

import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from nanovllm.checkpoint.names import OF_WRAPPERS
from nanovllm.utils.checks import check_bool, check_float, check_int

T = TypeVar("T", int, float)

BY_PEFT = "merge it with peft (`merge_and_unload`) and pass the saved model as `model`"
NO_MERGE = "it cannot be merged into weights, so run it in peft"
# Fields that must be empty, what they ask for, and the remedy.
REFUSED = {
    "alora_invocation_tokens": ("a change of the tokens after an invocation alone", NO_MERGE),
    "arrow_config": ("a choice among adapters for each token", NO_MERGE),
    "fan_in_fan_out": ("layers that are stored transposed", BY_PEFT),
    "kasa_config": ("a base model without its smallest singular values", BY_PEFT),
    "layer_replication": ("layers that are repeated", BY_PEFT),
    "lora_bias": ("biases of `lora_B`", BY_PEFT),
    "megatron_config": ("layers of Megatron", "convert it to PEFT's format"),
    "monteclora_config": ("sampled weights", BY_PEFT),
    "trainable_token_indices": ("rows of the embedding", BY_PEFT),
    "use_bdlora": ("block-diagonal factors", BY_PEFT),
    "use_qalora": ("groups of a GPTQ model's columns", NO_MERGE),
    "velora_config": ("tensors for its training alone", BY_PEFT),
}
# Methods that learn prompts, or prefixes of keys and values, and change no weights.
OF_PROMPTS = (
    *("ADAPTION_PROMPT", "CARTRIDGE", "CPT", "MULTITASK_PROMPT_TUNING", "P_TUNING"),
    *("PREFIX_TUNING", "PROMPT_TUNING"),
)
# Initialisations that change the base model unless the adapter is converted on saving.
CHANGES_BASE = re.compile(r"pissa(_niter_\d+)?|olora|corda|lora_ga")
# Fields whose value makes no difference once an adapter is trained.
IGNORED = {
    *("auto_mapping", "corda_config", "ensure_weight_tying", "eva_config", "inference_mode"),
    *("layers_pattern", "loftq_config", "lora_dropout", "lora_ga_config", "megatron_core"),
    *("qalora_group_size", "revision", "runtime_config", "task_type"),
}
USED = {
    *("alpha_pattern", "base_model_name_or_path", "bias", "init_lora_weights", "lora_alpha"),
    *("exclude_modules", "layers_to_transform", "modules_to_save", "peft_type", "peft_version"),
    *("r", "rank_pattern", "target_modules", "target_parameters", "use_dora", "use_rslora"),
}


@dataclass(frozen=True)
class AdapterConfig:
    """The facts of an adapter that its tensors do not tell.

    Attributes:
        r: rank of the changes.
        lora_alpha: numerator of their scale.
        use_rslora: whether the denominator is the root of the rank, not the rank.
        use_dora: whether rows get a length of their own (DoRA).
        rank_pattern, alpha_pattern: exceptions from `r` and `lora_alpha`, by regular expressions of
            paths, see `rank`.
        target_parameters: ends of the paths of parameters that are changed by themselves, not by
            their modules.
        modules: ends of the paths of all modules that it changes or that were saved whole; ():
            unknown, without a list or with exceptions.
        version: numbers of peft's version; (): unknown.
        base: name of the model that it was trained on; "": unknown.
        unknown: fields that ask for something and have no meaning here.
    """

    r: int
    lora_alpha: float
    use_rslora: bool
    use_dora: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    target_parameters: tuple[str, ...]
    modules: tuple[str, ...]
    version: tuple[int, ...]
    base: str
    unknown: tuple[str, ...]

    @classmethod
    def read(cls, raw: Mapping[str, Any]) -> "AdapterConfig":
        """Read the object in adapter_config.json, or the dictionary of a `LoraConfig`.

        Raises:
            TypeError, ValueError: naming a field that is wrong, or cannot be merged.
        """
        _refuse(raw)
        check_int("r", raw.get("r"), 1)
        check_float("lora_alpha", raw.get("lora_alpha"), -math.inf)
        flags = {key: raw.get(key) or False for key in ("use_rslora", "use_dora")}
        for key, value in flags.items():
            check_bool(key, value)
        known = USED | IGNORED | REFUSED.keys()
        return cls(
            r=raw["r"],
            lora_alpha=raw["lora_alpha"],
            rank_pattern=_pattern(raw, "rank_pattern", lambda key, r: check_int(key, r, 1)),
            alpha_pattern=_pattern(
                raw, "alpha_pattern", lambda key, alpha: check_float(key, alpha, -math.inf)
            ),
            target_parameters=tuple(map(unwrapped, _names(raw, "target_parameters"))),
            modules=_modules(raw),
            version=_version(raw.get("peft_version")),
            base=str(raw.get("base_model_name_or_path") or ""),
            unknown=tuple(sorted(key for key in raw if key not in known and raw[key])),
            **flags,
        )

    @property
    def remedy(self) -> str:
        """The remedy for a base model that does not fit."""
        name = f" ({self.base})" if self.base else ""
        return f"pass the model{name} that the adapter was trained on"

    def is_target(self, parameter: str) -> bool:
        """Whether a parameter is one of `target_parameters`.

        Args:
            parameter: its path in the model that was trained.
        """
        ends = tuple(f".{target}" for target in self.target_parameters)
        return f".{parameter}".endswith(ends)

    def adds_transpose(self, is_transposed: bool) -> bool:
        """Whether the transpose of B A is added to stacked matrices of experts.

        Versions of peft differ in the dimension of these that is A's. Until 0.18 it was the first,
        in 0.19.0 that of the outputs; since 0.19.1 it is that of the inputs.

        Args:
            is_transposed: whether the matrices are [in, out].
        """
        if self.version and self.version < (0, 19):
            return True
        return is_transposed != (self.version == (0, 19, 0))

    def rank(self, path: str) -> int:
        """The rank of a change.

        Args:
            path: path in the model that was trained, of the changed module, or of the parameter if
                it is one of `target_parameters`.
        """
        return _first_match(self.rank_pattern, path, self.r)

    def scale(self, path: str) -> float:
        """The factor of a change: alpha / r (Hu et al., LoRA, 2021), or alpha / sqrt(r)
        (Kalajdzievski, rsLoRA, 2023). `path` is that of `rank`.
        """
        rank = self.rank(path)
        alpha = _first_match(self.alpha_pattern, path, self.lora_alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


def unwrapped(name: str) -> str:
    """A name, or a pattern of names, as in a model without wrappers."""
    return OF_WRAPPERS.sub("", name)


def _first_match(pattern: Mapping[str, T], path: str, default: T) -> T:
    """The value of the first key that matches a path whole, or from a dot on."""
    found = (value for key, value in pattern.items() if re.match(rf"(.*\.)?({key})$", path))
    return next(found, default)


def _refuse(raw: Mapping[str, Any]) -> None:
    """ValueError for an adapter that is none of LoRA, or cannot be merged here."""
    if (kind := raw.get("peft_type")) != "LORA":
        remedy = NO_MERGE if kind in OF_PROMPTS else BY_PEFT
        raise ValueError(f"`peft_type` must be LORA, got {getattr(kind, 'value', kind)}: {remedy}")
    for field, (what, remedy) in REFUSED.items():
        if raw.get(field):
            raise ValueError(f"`{field}` asks for {what}, which is not supported: {remedy}")
    if (bias := raw.get("bias") or "none") != "none":
        raise ValueError(f"`bias` must be 'none', got {bias!r} (trained biases): {BY_PEFT}")
    init = raw.get("init_lora_weights")
    if isinstance(init, str) and CHANGES_BASE.fullmatch(init):
        raise ValueError(
            f"`init_lora_weights` {init!r} changes the base model before it is trained: save the "
            "adapter with `save_pretrained(..., path_initial_model_for_weight_conversion=...)`, "
            "which makes it one for the original weights"
        )
    if init == "loftq":
        raise ValueError(
            f"`init_lora_weights` {init!r} belongs to a base model that LoftQ has quantised: merge "
            "it with peft into that one (`merge_and_unload`) and pass the saved model as `model`"
        )


def _modules(raw: Mapping[str, Any]) -> tuple[str, ...]:
    """The listed names of modules, see `AdapterConfig.modules`; () with a regular expression, or
    with exceptions.
    """
    is_expression = isinstance(raw.get("target_modules"), str)
    if is_expression or raw.get("exclude_modules") or raw.get("layers_to_transform") is not None:
        return ()
    return _names(raw, "target_modules") + _names(raw, "modules_to_save")


def _names(raw: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """A list of names, or a set in a `LoraConfig`."""
    found = raw.get(key) or ()
    is_list = isinstance(found, Collection) and not isinstance(found, str)
    if not is_list or not all(isinstance(name, str) for name in found):
        raise TypeError(f"`{key}` must be a list of names, got {found!r}")
    return tuple(found)


def _version(raw: Any) -> tuple[int, ...]:
    """The numbers of a version, such as "0.19.1" or "0.21.3.dev0@1a2b3c"."""
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", str(raw))
    return tuple(map(int, found.groups())) if found else ()


def _pattern(raw: Mapping[str, Any], key: str, check: Callable[[str, Any], None]) -> dict[str, Any]:
    found = raw.get(key) or {}
    if not isinstance(found, Mapping):
        raise ValueError(f"`{key}` must be an object, got {found!r}")
    for name, value in found.items():
        check(f"{key}[{name!r}]", value)
        try:
            re.compile(f"({name})")
        except re.error as error:
            raise ValueError(
                f"`{key}` must have names or regular expressions, got {name!r}: {error}"
            ) from None
    return {unwrapped(name): value for name, value in found.items()}
