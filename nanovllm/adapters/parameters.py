"""`parameters`: the parameters of the trained model that an adapter changes. Imports no torch.

transformers 5 holds the matrices of all experts of a layer in one parameter, and peft changes it as
one. `Places` finds it in the checkpoint.
"""

import re
from collections import defaultdict
from collections.abc import Iterable

from nanovllm.adapters.config import AdapterConfig
from nanovllm.checkpoint.names import Places

# Parameters of experts in transformers 5, in the order in which its classes define them.
OF_EXPERTS = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")
WRAPPER = ".base_layer"  # in the path of what peft has wrapped
WRAPPERS = re.compile(rf"(?:{re.escape(WRAPPER)})+\Z")


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
