"""`Places`: the checkpoint's tensors for the parameters of the trained model. Imports no torch.

transformers 5 holds the matrices of all experts of a layer in one parameter, and peft changes it as
one. A checkpoint may have them one by one (Qwen3-MoE, Mixtral), or in one tensor, too.
"""

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from nanovllm.adapters.config import AdapterConfig
from nanovllm.checkpoint.modules import without_prefix
from nanovllm.checkpoint.quantization import OF_CODES

# Parameters of experts in transformers 5, in the order in which its classes define them.
OF_EXPERTS = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")
# Matrices of experts, and the names of their parts in each expert of a checkpoint.
MATRICES = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "down_proj": (("down_proj",), ("w2",)),
}
NUMBERED = re.compile(r"(.+)\.(\d+)\.(?:gate_proj|w1)\.\w+")  # a tensor of a numbered expert
RENAMED = ".block_sparse_moe.", ".mlp."  # Mixtral: in checkpoints, and in transformers 5
BLOCKS = "_blocks"  # end of the name of a matrix in MXFP4
WRAPPER = ".base_layer"  # in the path of what peft has wrapped
WRAPPERS = re.compile(rf"(?:{re.escape(WRAPPER)})+\Z")


class Place(NamedTuple):
    """A tensor of the checkpoint that holds a parameter of the model, or a part of it.

    Attributes:
        name: its name in the checkpoint.
        is_of_experts: whether the parameter has a matrix for each expert.
        expert: number of the expert whose matrix it holds; None: all of them.
        half: half of the matrix's rows that it holds, 0 or 1; None: all rows.
        is_transposed: whether it holds the matrices as [inputs, outputs].
    """

    name: str
    is_of_experts: bool = False
    expert: int | None = None
    half: int | None = None
    is_transposed: bool = False


class Places:
    """The places of a model's parameters in a checkpoint.

    Args:
        saved: names of the checkpoint's tensors.
    """

    def __init__(self, saved: Iterable[str]) -> None:
        own = {without_prefix(name): name for name in saved}
        self._names = {path.replace(*RENAMED): name for path, name in own.items()} | own
        self._experts: defaultdict[str, set[int]] = defaultdict(set)
        for name in self._names:
            if found := NUMBERED.fullmatch(name):
                self._experts[found[1]].add(int(found[2]))

    def num_experts(self, module: str) -> int:
        """The number of a module's experts that are stored one by one; 0: none are."""
        return len(self._experts.get(without_prefix(module), ()))

    def find(self, parameter: str) -> list[Place]:
        """The tensors that hold a parameter; none if the checkpoint lacks it.

        Args:
            parameter: path in the model, such as "model.layers.0.mlp.experts.gate_up_proj".
        """
        own = without_prefix(parameter)
        module, _, name = own.rpartition(".")
        if own in self._names:
            # Only gpt-oss's experts have biases, and only its matrices are [inputs, outputs].
            is_transposed = name in MATRICES and f"{module}.gate_up_proj_bias" in self._names
            return [Place(self._names[own], name in MATRICES, is_transposed=is_transposed)]
        return [
            Place(self._names[path], True, i, half if len(parts) > 1 else None)
            for i in range(self.num_experts(module))
            for parts in MATRICES.get(name, ())
            for half, part in enumerate(parts)
            if (path := f"{module}.{i}.{part}.weight") in self._names
        ]

    def in_codes(self, parameter: str) -> bool:
        """Whether the checkpoint has a parameter as codes."""
        module, _, name = without_prefix(parameter).rpartition(".")
        modules = [module]
        for parts in MATRICES.get(name, ()):
            count = self.num_experts(module)
            modules += [f"{module}.{i}.{part}" for i in range(count) for part in parts]
        return self.in_mxfp4(parameter) or any(
            f"{path}{ending}" in self._names for path in modules for ending in OF_CODES
        )

    def in_mxfp4(self, parameter: str) -> bool:
        """Whether the checkpoint has a parameter in MXFP4."""
        return without_prefix(parameter) + BLOCKS in self._names


def parameters(paths: Iterable[str], config: AdapterConfig, places: Places) -> dict[str, str]:
    """The parameters that an adapter changes, by the paths of their changes in its file.

    A change has the path of its module. Of a module with several changed parameters, peft wraps the
    one that it defines first, wraps the result for the next one, and so on; so paths name no
    parameter, but have a `base_layer` for each wrapper further out.

    Args:
        paths: paths of changes, such as "model.layers.0.mlp.experts.base_layer".
        config: configuration of the adapter.
        places: places in the checkpoint.

    Raises:
        ValueError: if a module has more or fewer changes than its configuration says.
    """
    by_module: defaultdict[str, list[str]] = defaultdict(list)
    for path in paths:
        by_module[WRAPPERS.sub("", path)].append(path)
    found: dict[str, str] = {}
    for module, given in by_module.items():
        names = [name for name in OF_EXPERTS if _changes(f"{module}.{name}", config, places)]
        if not names:
            found |= {path: f"{path}.weight" for path in given}
            continue
        nested = [module + WRAPPER * depth for depth in reversed(range(len(names)))]
        if set(nested) != set(given):
            raise ValueError(
                f"it has {len(given)} changes of parameters of {module}, but by its "
                f"`target_parameters` they are those of {', '.join(names)}: save it again"
            )
        found |= {path: f"{module}.{name}" for path, name in zip(nested, names, strict=True)}
    return found


def _changes(parameter: str, config: AdapterConfig, places: Places) -> bool:
    """Whether an adapter changes a parameter of experts that this model has."""
    return config.is_target(parameter) and (
        bool(places.find(parameter)) or places.in_codes(parameter)
    )
