"""`Adapter`: the configuration and the tensors of a LoRA adapter, on disk or in memory."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
from safetensors import SafetensorError, safe_open

from nanovllm.adapters.config import AdapterConfig
from nanovllm.checkpoint.files import ADAPTER, ADAPTER_WEIGHTS, read_json
from nanovllm.checkpoint.names import FLOATS
from nanovllm.tensors.source import TensorSource

# The directory of an adapter, or its configuration and tensors, see `Adapter.from_tensors`.
Given: TypeAlias = str | tuple[Mapping[str, Any], Mapping[str, torch.Tensor]]


class Source(Protocol):
    """A tensor of which parts are read, with the methods of a slice of safetensors."""

    def get_shape(self) -> list[int]: ...

    def get_dtype(self) -> str: ...

    def __hash__(self) -> int: ...

    def __getitem__(self, index: Any) -> torch.Tensor: ...


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter.

    Attributes:
        name: its directory, or its name in messages.
        config: facts that its tensors do not tell.
        tensors: its tensors by PEFT's names, such as
            "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight".
    """

    name: str
    config: AdapterConfig
    tensors: Mapping[str, Source]

    @classmethod
    def open(cls, directory: Path) -> "Adapter":
        """The adapter in a directory. Its tensors are read when they are used.

        Raises:
            ValueError: if it cannot be read, or not be merged.
        """
        config = _read(str(directory), read_json(directory / ADAPTER))
        file = directory / ADAPTER_WEIGHTS
        try:
            opened = safe_open(file, framework="pt")
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"{file} is not a complete safetensors file ({error}): save or download it again"
            ) from None
        slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
        return cls(str(directory), config, slices)

    @classmethod
    def from_tensors(
        cls,
        config: Mapping[str, Any],
        tensors: Mapping[str, torch.Tensor],
        name: str = "in memory",
    ) -> "Adapter":
        """An adapter in memory, which must not change until it is merged.

        Args:
            config: the object in adapter_config.json, or `LoraConfig.to_dict()`.
            tensors: tensors by PEFT's names, see `Adapter`.
            name: its name in messages.

        Raises:
            ValueError: if it cannot be merged.
        """
        held = {key: TensorSource(tensor.detach()) for key, tensor in tensors.items()}
        return cls(name, _read(name, config), held)

    def __post_init__(self) -> None:
        for key, tensor in self.tensors.items():
            if (dtype := tensor.get_dtype()) not in FLOATS:
                raise ValueError(
                    f"adapter {self.name}: tensor {key} is {dtype}, but must be one of "
                    f"{', '.join(FLOATS)}: save it again"
                )

    def check_finite(self, keys: Iterable[str]) -> None:
        """Refuse NaN and infinite values in these of its tensors, which are read.

        Raises:
            ValueError: naming a tensor that has some.
        """
        for key in sorted(keys):
            if not self.tensors[key][...].isfinite().all():
                raise ValueError(
                    f"adapter {self.name}: tensor {key} has NaN or infinite values: pass an "
                    "adapter from before its training diverged"
                )


def _read(name: str, config: Mapping[str, Any]) -> AdapterConfig:
    try:
        return AdapterConfig.read(config)
    except (TypeError, ValueError) as error:
        raise ValueError(f"adapter {name}: {ADAPTER}: {error}") from None


def open_adapters(given: Iterable[Given]) -> list[Adapter]:
    """The adapters in these directories, see `Adapter.open`, or of these tensors."""
    return [
        Adapter.open(Path(each)) if isinstance(each, str) else Adapter.from_tensors(*each)
        for each in given
    ]
