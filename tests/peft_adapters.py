"""Adapters with random numbers, saved by peft, and the checkpoints that peft merges them into."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from checkpoints import edit_json
from nanovllm.checkpoint.files import ADAPTER, ADAPTER_WEIGHTS

PREFIX = "base_model.model."


def make_adapter(path: Path, out: Path, *, seed: int = 0, **config: Any) -> Path:
    """Save an adapter of the checkpoint in `path`, all of whose numbers are random.

    Args:
        config: fields of `LoraConfig`.
    """
    given = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", **config}
    model = get_peft_model(_model(path), LoraConfig(task_type="CAUSAL_LM", **given))
    generator = torch.Generator().manual_seed(seed)
    for param in model.parameters():
        if param.requires_grad:  # as training does: B begins with zeros
            param.data += 0.1 * torch.randn(param.shape, generator=generator)
    model.save_pretrained(out)
    return out


def tensors_of(adapter: Path) -> dict[str, torch.Tensor]:
    """The tensors of an adapter."""
    return load_file(adapter / ADAPTER_WEIGHTS)


def save_adapter(out: Path, tensors: Mapping[str, torch.Tensor], **config: Any) -> Path:
    """Save tensors as an adapter, without peft."""
    out.mkdir(exist_ok=True)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, out / ADAPTER_WEIGHTS
    )
    given = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8}
    edit_json(out / ADAPTER, **{**given, **config})
    return out


def merge(path: Path, out: Path, *adapters: Path) -> Path:
    """Save the checkpoint in `path` with these adapters merged, in float32."""
    model = _model(path)
    for adapter in adapters:
        model = PeftModel.from_pretrained(model, adapter).merge_and_unload()
    model.save_pretrained(out)
    return out


def unmerged_logprobs(path: Path, adapter: Path, token_ids: list[int]) -> torch.Tensor:
    """Log-probabilities after each token of a text, with the adapter beside the weights: [n, V]."""
    model = PeftModel.from_pretrained(_model(path), adapter)
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0].log_softmax(-1)


def _model(path: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
