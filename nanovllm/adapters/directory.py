"""The directories of adapters that are given by their paths or names. Imports no torch."""

from collections.abc import Iterable
from pathlib import Path

from nanovllm.checkpoint.files import ADAPTER, ADAPTER_WEIGHTS, has_file
from nanovllm.checkpoint.hub import adapter_directory
from nanovllm.utils.checks import listed


def adapter_directories(adapters: Iterable[str]) -> tuple[str, ...]:
    """The directories of adapters.

    Args:
        adapters: directories, or names on the hub.

    Raises:
        ValueError: naming one that cannot be found, or is no adapter in safetensors.
    """
    found = tuple(adapter_directory(adapter) for adapter in adapters)
    for directory in found:
        _refuse_others(Path(directory))
    return found


def _refuse_others(directory: Path) -> None:
    """ValueError if a directory holds anything but an adapter in safetensors."""
    if not has_file(directory / ADAPTER):
        remedy = "pass a directory that peft's `save_pretrained` has written"
        inner = sorted(path.parent.name for path in directory.glob(f"*/{ADAPTER}"))
        if has_file(directory / "config.json"):
            remedy = "it holds a whole model, which is passed as `model`"
        elif inner:
            remedy = f"pass one of the directories in it that have one: {listed(inner)}"
        raise ValueError(f"`adapter` {str(directory)!r} has no {ADAPTER}: {remedy}")
    if not has_file(directory / ADAPTER_WEIGHTS):
        found = sorted(path.name for path in directory.glob("*.bin"))
        raise ValueError(
            f"`adapter` {str(directory)!r} has no {ADAPTER_WEIGHTS}"
            f"{f', but {found[0]}' if found else ''}: only that format is read; load it with peft "
            "and save it with `save_pretrained(..., safe_serialization=True)`"
        )
