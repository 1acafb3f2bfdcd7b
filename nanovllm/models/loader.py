"""Checkpoint weights into a model: every parameter filled, every tensor used, or an error.

Knows safetensors files; each layer says which tensors fill it (`Layer.shards`).
"""

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from nanovllm.layers.base import Layer
from nanovllm.layers.shard import Shard
from nanovllm.quantization import NOT_READ, OF_CODES
from nanovllm.utils.files import INDEX, has_file, read_json
from nanovllm.utils.progress import startup_bar

SINGLE = "model.safetensors"
# Of the part for text in checkpoints with others, in the spellings of transformers 4 and 5.
TEXT_PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "lm_head.": "lm_head.",
}
_SHOWN = 8  # names listed in an error


def find_weights(directory: Path) -> dict[str, Path]:
    """The file of each tensor in a checkpoint.

    An index file decides which files of the directory count; without one it is `model.safetensors`,
    or all files if there is none of that name.

    Raises:
        ValueError: if there are no safetensors, or a file of the index is missing or elsewhere.
    """
    if has_file(directory / INDEX):
        weight_map = read_json(directory / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(
            isinstance(file, str) for file in weight_map.values()
        ):
            raise ValueError(f"{directory / INDEX}: `weight_map` must map tensors to file names")
        named = sorted(set(weight_map.values()))
        if elsewhere := [file for file in named if Path(file).name != file]:
            raise ValueError(
                f"{directory / INDEX}: `weight_map` must name files of the same directory, got "
                f"{_names(elsewhere)}: put them there, and their plain names into the index"
            )
        if missing := [file for file in named if not has_file(directory / file)]:
            raise ValueError(f"{directory}: files named in {INDEX} are missing: {_names(missing)}")
        return {name: directory / file for name, file in weight_map.items()}
    single = directory / SINGLE
    candidates = [single] if has_file(single) else sorted(directory.glob("*.safetensors"))
    files = [file for file in candidates if has_file(file)]
    if not files:
        others = sorted(path.name for path in directory.glob("*.bin"))
        found_instead = f", but {_names(others)}" if others else ""
        raise ValueError(
            f"{directory} has no *.safetensors{found_instead}: only that format is read; convert "
            "others with transformers' `save_pretrained`"
        )
    found: dict[str, Path] = {}
    for file in files:
        with _open(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a dictionary)
                if name in found:
                    raise ValueError(f"tensor {name} is in both {found[name]} and {file}")
                found[name] = file
    return found


@contextmanager
def _open(file: Path) -> Iterator[Any]:
    """The tensors of a safetensors file, by memory map."""
    try:
        tensors = safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{file} is not a complete safetensors file ({error}): download it again"
        ) from None
    with tensors as opened:
        yield opened


def checkpoint_shards(model: nn.Module) -> dict[str, Shard]:
    """Checkpoint tensor name -> the parameter, or the rows of a packed one, that it fills."""
    found: dict[str, Shard] = {}
    filled: Counter[int] = Counter()  # elements, by the storage that they are in
    for path, layer in model.named_modules():
        for name, shard in layer.shards(path) if isinstance(layer, Layer) else ():
            assert name not in found, f"{name} fills two parameters"
            found[name] = shard
            if not shard.comes_last:
                for target in shard.targets:
                    filled[target.untyped_storage().data_ptr()] += target.numel()
    for name, param in model.named_parameters():
        size = filled.get(param.untyped_storage().data_ptr())
        assert size in (param.numel(), 0), f"not all of {name} is filled"  # 0: rank without tokens
    return found


def text_names(names: Iterable[str]) -> dict[str, str]:
    """Tensor name in a model of text alone -> its name in a checkpoint that has other parts."""
    return {
        own + name.removeprefix(prefix): name
        for name in names
        for prefix, own in TEXT_PREFIXES.items()
        if name.startswith(prefix)
    }


def bare_names(names: Iterable[str]) -> dict[str, str]:
    """Likewise in one that was saved without its head (Qwen3-Embedding), where nothing is called
    `model.`; empty for others.
    """
    names = list(names)
    if any(name.startswith("model.") for name in names):
        return {}
    return {f"model.{name}": name for name in names if not name.startswith("lm_head.")}


def as_saved(own: str, names: Mapping[str, str], files: Container[str]) -> str:
    """The name of a tensor in a checkpoint, where others may have other `names`. Transformers calls
    the scale of a whole tensor as it calls those of blocks (`FP8Linear`).
    """
    spellings = [own, f"{own}_inv"] if own.endswith(".weight_scale") else [own]
    found = [names.get(spelling, spelling) for spelling in spellings]
    return next((name for name in found if name in files), found[0])


def load_model(
    model: nn.Module,
    directory: Path,
    check: Callable[[], None] = lambda: None,
    *,
    is_part: bool = False,
) -> None:
    """Copy the checkpoint in `directory` into `model`, converting to the parameters' dtype. Of each
    tensor only the part that this rank holds is read. `check` is called before each, and may raise.

    Args:
        is_part: the checkpoint has other parts, which are left out.

    Raises:
        ValueError: naming tensors that are missing, left over or of the wrong shape.
    """
    files, targets, head = find_weights(directory), checkpoint_shards(model), "lm_head.weight"
    is_tied = head not in targets
    names = text_names(files) if is_part else bare_names(files)
    if is_part:
        files = {name: files[name] for name in names.values()}
    targets = {as_saved(own, names, files): shard for own, shard in targets.items()}
    head = names.get(head, head)
    # Tied embeddings are often saved twice; old checkpoints carry the rotary frequencies.
    ignored = {name for name in files if name.endswith(("rotary_emb.inv_freq", *NOT_READ))}
    if is_tied:
        ignored.add(head)
    problems = []
    needed = {name for name, shard in targets.items() if not shard.is_optional}
    if missing := sorted(needed - set(files)):
        problems.append(f"missing from the checkpoint: {_names(missing)}")
    if unused := sorted(set(files) - set(targets) - ignored):
        problems.append(f"not used by this model: {_names(unused)}")
    of_codes = [name for name in [*missing, *unused] if name.endswith(OF_CODES)]
    if of_codes and not any(name.endswith(OF_CODES) for name in targets):
        problems.append("its weights are quantised, which `quantization_config` must describe")
    elif of_codes:
        problems.append(
            "if no file is missing, it is not quantised as `quantization_config` says, with all "
            "linear layers and nothing else: take a checkpoint that is, or the original weights"
        )
    if problems:
        raise ValueError(f"{directory} does not fit its config.json: {'; '.join(problems)}")
    there = [name for name in targets if name in files]
    by_file = sorted(there, key=lambda name: (targets[name].comes_last, files[name]))
    for file, of_file in groupby(by_file, key=files.__getitem__):
        with _open(file) as tensors:
            present = set(tensors.keys())
            for name in of_file:
                if name not in present:
                    raise ValueError(f"{file} lacks the tensor {name} that {INDEX} puts there")
                targets[name].check(name, tensors.get_slice(name))
    with startup_bar(by_file, "Loading weights", "tensor") as bar:
        for file, of_file in groupby(bar, key=files.__getitem__):
            with _open(file) as tensors:
                for name in of_file:
                    check()
                    targets[name].fill(tensors.get_slice(name))


def load_dummy(model: nn.Module, seed: int) -> None:
    """Random weights, the same for the same seed and kind of device, however many ranks divide
    them: N(0, 0.02^2), norms 1, biases 0.
    """
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    with startup_bar(list(checkpoint_shards(model).items()), "Loading weights", "tensor") as bar:
        for name, shard in bar:
            if shard.comes_last:
                continue
            if name.endswith("bias"):
                shard.target.zero_()
            elif shard.target.dim() == 1:
                shard.target.fill_(1.0)
            else:
                dtype = shard.target.dtype
                if not dtype.is_floating_point or dtype.itemsize == 1:  # codes
                    dtype = torch.float32
                shape = [part.total for part in shard.parts]
                whole = torch.empty(shape, dtype=dtype, device=device)
                shard.put(shard.read(whole.normal_(0.0, 0.02, generator=generator)))


def _names(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
