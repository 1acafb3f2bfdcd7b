"""Refusals of unsupported models, each with a remedy, before weights are read. Imports no torch."""

import re
from pathlib import Path
from typing import Any

from nanovllm.checkpoint.families import FAMILIES
from nanovllm.checkpoint.files import ADAPTER, has_file, read_json

MAMBA, OTHER = "its layers keep a state of Mamba's", "its layers keep a state of another kind"
# Patterns of unsupported architectures, the reason, and the nearest supported model.
UNSUPPORTED = {
    r"Qwen4": ("it has hyper-connections and sparse attention", "Qwen3.5"),
    r"GraniteMoeHybrid|GraniteHybrid": (MAMBA, "Granite 3"),
    r"NemotronH|FalconH1": (MAMBA, "Qwen3.5"),
    r"Mamba|Jamba|Zamba|Bamba|Plamo2": (MAMBA, "LFM2"),
    r"Lfm2Moe|Lfm3": ("it has layers that LFM2 has not", "LFM2"),
    r"OlmoHybrid": ("its layers with a state differ from Qwen3.5's", "Qwen3.5"),
    r"RecurrentGemma": (OTHER, "Gemma 2"),
    r"RWKV|Rwkv|KimiLinear|BailingHybrid|MiniMaxText|MiniMaxM1": (OTHER, "Qwen3.5"),
}
LATENT = "kv_lora_rank"  # key of models whose attention keeps latents (MLA)


def refuse_directory(directory: Path) -> None:
    """ValueError if a directory holds anything but a checkpoint of a whole model."""
    if has_file(directory / ADAPTER) and not any(directory.glob("model*.safetensors")):
        name = read_json(directory / ADAPTER).get("base_model_name_or_path")
        base = f" {name!r}" if name else ""
        raise ValueError(
            f"{directory} holds an adapter, not a model: pass its base model{base} as `model`, "
            "and this directory as `adapter`"
        )
    if not has_file(directory / "config.json") and any(directory.glob("*.gguf")):
        raise ValueError(
            f"{directory} holds GGUF files, which are not supported: pass the original checkpoint "
            "in safetensors"
        )


def refuse_architecture(raw: dict[str, Any]) -> None:
    """ValueError unless config.json names a supported architecture."""
    architectures = raw.get("architectures") or [f"of model_type {raw.get('model_type')!r}"]
    name = architectures[0] if isinstance(architectures, list) else architectures
    if isinstance(name, str) and isinstance(architectures, list) and name in FAMILIES:
        return
    raise ValueError(f"config.json: `architectures` {name} is not supported{_why(str(name), raw)}")


def unsupported_quantization(what: Any) -> ValueError:
    """The error for a `quantization_config` that is not supported."""
    return ValueError(
        f"config.json: `quantization_config` {what!r} is not supported: use a checkpoint in FP8 "
        "(`fp8`, or `compressed-tensors` of 8-bit floats), in INT8 (`compressed-tensors` of 8-bit "
        "integers, activations too) or in INT4 (`awq`, `gptq`, `auto-round`, or "
        "`compressed-tensors` of 4-bit integers), or the original weights"
    )


def _why(name: str, raw: dict[str, Any]) -> str:
    for pattern, (reason, nearest) in UNSUPPORTED.items():
        if re.search(pattern, name):
            return f": {reason}; the nearest supported model is {nearest}"
    text = raw.get("text_config")
    if LATENT in raw or (isinstance(text, dict) and LATENT in text):
        return (
            ": its attention keeps latents, not keys and values (MLA); the nearest supported model "
            "is Qwen3-MoE"
        )
    if "vision_config" in raw or "audio_config" in raw:
        return (
            ": it reads images or sound; pass a text-only model, or for images Qwen3-VL, Qwen3.5 "
            "or Gemma 3"
        )
    if raw.get("auto_map"):
        return (
            ": it is Python code in the checkpoint (`auto_map`), which is never run; pass a model "
            "that transformers implements itself"
        )
    return f"; supported: {', '.join(FAMILIES)}"
