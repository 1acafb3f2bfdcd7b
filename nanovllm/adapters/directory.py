"""The directories of adapters that are given by their paths or names. Imports no torch."""

import logging
from collections.abc import Iterable
from pathlib import Path

from nanovllm.checkpoint.files import ADAPTER, ADAPTER_WEIGHTS, has_file, read_json
from nanovllm.checkpoint.hub import adapter_directory
from nanovllm.checkpoint.tokenizer import CONFIG, TEMPLATE
from nanovllm.utils.checks import listed

logger = logging.getLogger(__name__)


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


def warn_of_templates(adapters: Iterable[str], base: Path) -> None:
    """Warn of adapters whose chat template is another than the model's, which is used by default.

    Args:
        adapters: directories of the adapters.
        base: directory of the model.
    """
    for adapter in adapters:
        own = _chat_template(Path(adapter))
        if own is not None and own != _chat_template(base):
            logger.warning(
                "adapter %s has another chat template than the model, whose is the default: if the "
                "adapter was trained with its own, pass that as `chat_template` to chat() (as "
                "--chat-template to nanovllm generate), or copy its file into the directory of "
                "the model",
                adapter,
            )


def _chat_template(directory: Path) -> str | None:
    """The text of a directory's chat template, as transformers would read it; None: none."""
    file = directory / TEMPLATE
    try:
        found = file.read_text("utf-8") if has_file(file) else None
        if found is None and has_file(directory / CONFIG):
            found = read_json(directory / CONFIG).get("chat_template")
    except (OSError, ValueError):  # the model's own are refused where they are used
        return None
    if isinstance(found, list):  # of several, by name
        named = (each for each in found if isinstance(each, dict))
        found = next(
            (each.get("template") for each in named if each.get("name") == "default"), None
        )
    return found if isinstance(found, str) else None


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
