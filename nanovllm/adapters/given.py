"""Adapters as users pass them: by directory or name on the hub, or configuration and tensors."""

import os
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch

from nanovllm.adapters.adapter import Given
from nanovllm.adapters.directory import adapter_directories
from nanovllm.checkpoint.hub import checkpoint_name
from nanovllm.tensors.source import check_plain

IN_MEMORY = "in memory"
OF_PEFT = "pass (model.peft_config['default'], peft.get_peft_model_state_dict(model))"
PATHS = (str, os.PathLike)
# The directory of an adapter or its name on the hub, or its configuration and tensors.
AnyAdapter: TypeAlias = str | os.PathLike[str] | tuple[Any, Mapping[str, torch.Tensor]]


def read_given(adapter: Any) -> list[tuple[Given, str]]:
    """Adapters for `open_adapters`, whose tensors are on the CPU, and their names.

    Args:
        adapter: as for `LLM.load_adapter`.

    Raises:
        TypeError: if it is nothing of the kind.
        ValueError: if one cannot be found, is no adapter in safetensors, or a tensor has no values;
            for a list of none.
    """
    several = isinstance(adapter, list)
    if isinstance(adapter, tuple):  # a pair of a configuration and tensors has no path
        several = not adapter or any(isinstance(each, PATHS) for each in adapter)
    if not several:
        return [_read(adapter)]
    if not adapter:
        raise ValueError(
            "`adapter` must have at least one adapter, got none: unload_adapter() leaves none"
        )
    return [_read(each) for each in adapter]


def _read(adapter: Any) -> tuple[Given, str]:
    """One of `read_given`."""
    if isinstance(adapter, PATHS):
        [directory] = adapter_directories([os.fspath(adapter)])
        return directory, checkpoint_name(directory)
    if not isinstance(adapter, tuple) or len(adapter) != 2:
        found = f"{len(adapter)} values" if isinstance(adapter, tuple) else type(adapter).__name__
        is_of_peft = isinstance(adapter, Mapping) or hasattr(adapter, "peft_config")
        raise TypeError(
            "`adapter` must be a directory, a name on the hub, a pair of a configuration and "
            f"tensors, or a list of these, got {found}{f': {OF_PEFT}' if is_of_peft else ''}"
        )
    config, tensors = adapter
    return (_configuration(config), _tensors(tensors)), IN_MEMORY


def _configuration(config: Any) -> Mapping[str, Any]:
    if isinstance(config, Mapping) and any(hasattr(each, "peft_type") for each in config.values()):
        names = ", ".join(map(repr, config))
        raise TypeError(
            f"the configuration of `adapter` must be one, got a dictionary of {names}: {OF_PEFT}"
        )
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
