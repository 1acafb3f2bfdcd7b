"""An adapter as users pass it: its directory or name on the hub, or configuration and tensors."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from nanovllm.adapters.adapter import Given
from nanovllm.adapters.directory import adapter_directories
from nanovllm.checkpoint.hub import checkpoint_name
from nanovllm.tensors.source import check_plain

IN_MEMORY = "in memory"


def read_given(adapter: Any) -> tuple[Given, str]:
    """An adapter for `open_adapters`, whose tensors are on the CPU, and its name.

    Args:
        adapter: as for `LLM.load_adapter`.

    Raises:
        TypeError: if it is nothing of the kind.
        ValueError: if it cannot be found, is no adapter in safetensors, or a tensor has no values.
    """
    if isinstance(adapter, (str, Path)):
        [directory] = adapter_directories([os.fspath(adapter)])
        return directory, checkpoint_name(directory)
    if not isinstance(adapter, tuple) or len(adapter) != 2:
        found = f"{len(adapter)} values" if isinstance(adapter, tuple) else type(adapter).__name__
        raise TypeError(
            "`adapter` must be a directory, a name on the hub, or a pair of a configuration and "
            f"tensors, got {found}"
        )
    config, tensors = adapter
    return (_configuration(config), _tensors(tensors)), IN_MEMORY


def _configuration(config: Any) -> Mapping[str, Any]:
    found = config.to_dict() if hasattr(config, "to_dict") else config
    if not isinstance(found, Mapping):
        raise TypeError(
            "the configuration of `adapter` must be a LoraConfig, or the object in "
            f"adapter_config.json, got {type(config).__name__}"
        )
    return dict(found)


def _tensors(tensors: Any) -> dict[str, torch.Tensor]:
    if not isinstance(tensors, Mapping):
        raise TypeError(
            "the tensors of `adapter` must be a dictionary, as get_peft_model_state_dict(model) "
            f"returns it, got {type(tensors).__name__}"
        )
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise TypeError(
                "the tensors of `adapter` must be torch.Tensors by their names, got "
                f"{name!r}: {type(tensor).__name__}"
            )
        check_plain(name, tensor)
    return {name: tensor.detach().cpu() for name, tensor in tensors.items()}
