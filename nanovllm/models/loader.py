"""Load checkpoint weights into a model: fill every parameter and use every tensor, or raise.

Knows safetensors files; each layer names the tensors that fill it (`Layer.shards`).
"""

import logging
import re
from collections import Counter
from collections.abc import (
    Callable,
    Collection,
    Container,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from nanovllm.adapters.adapter import Adapter
from nanovllm.adapters.merge import Merge
from nanovllm.checkpoint.files import ADAPTER, INDEX, PROCESSORS, has_file, read_json
from nanovllm.checkpoint.model_config import ModelConfig
from nanovllm.checkpoint.names import (
    EMBEDDING,
    HEAD,
    OTHER_PARTS,
    UNUSED,
    as_saved,
    has_tower,
    left_out_prefixes,
    other_names,
)
from nanovllm.checkpoint.quantization import OF_CODES
from nanovllm.layers.base import Layer
from nanovllm.layers.weights.shard import Shard
from nanovllm.utils.checks import listed
from nanovllm.utils.progress import startup_bar

logger = logging.getLogger(__name__)

SINGLE = "model.safetensors"
GATES = re.compile(r"\.in_proj_(a|b|ba)\.")  # of Gated DeltaNet, in names
STACKED = ".mlp.experts.gate_up_proj"  # end of the name of experts in one tensor
ROWS = 4096  # rows of a matrix to compare at once


def find_weights(directory: Path) -> dict[str, Path]:
    """The file of each tensor in a checkpoint.

    An index file decides which checkpoint shards count, as in vLLM (transformers prefers
    `model.safetensors`). Without an index it is `model.safetensors`, or if there is no such file
    all *.safetensors.

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
                f"{listed(elsewhere)}: put them there, and their plain names into the index"
            )
        if missing := [file for file in named if not has_file(directory / file)]:
            raise ValueError(f"{directory}: files named in {INDEX} are missing: {listed(missing)}")
        return {name: directory / file for name, file in weight_map.items()}
    single = directory / SINGLE
    candidates = [single] if has_file(single) else sorted(directory.glob("*.safetensors"))
    files = [file for file in candidates if has_file(file)]
    if not files:
        others = sorted(path.name for path in directory.glob("*.bin"))
        found_instead = f", but {listed(others)}" if others else ""
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
    """The tensors of a safetensors file, memory-mapped."""
    try:
        tensors = safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{file} is not a complete safetensors file ({error}): download it again"
        ) from None
    with tensors as opened:
        yield opened


def checkpoint_shards(model: nn.Module) -> dict[str, Shard]:
    """Map each checkpoint tensor's name to the parameter, or the rows of a packed one, it fills."""
    found: dict[str, Shard] = {}
    for path, layer in model.named_modules():
        for name, shard in layer.shards(path) if isinstance(layer, Layer) else ():
            assert name not in found, f"{name} fills two parameters"
            found[name] = shard
    return found


def shards_of_all(model: nn.Module) -> dict[str, Shard]:
    """The same for a model that has just been built, of which they must fill every element."""
    found = checkpoint_shards(model)
    filled: Counter[int] = Counter()  # elements filled, by storage
    for shard in found.values():
        if not shard.comes_last:
            for target in shard.targets:
                filled[target.untyped_storage().data_ptr()] += target.numel()
    for name, param in model.named_parameters():
        size = filled.get(param.untyped_storage().data_ptr())
        assert size in (param.numel(), 0), f"not all of {name} is filled"  # 0: rank without tokens
    return found


def without_unusable_vision(
    config: ModelConfig, directory: Path, *, has_weights: bool
) -> ModelConfig:
    """The facts of a checkpoint, as of a model of text if it lacks its vision tower or its image
    processor: some are saved so.
    """
    if config.vision is None:
        return config
    lacks = ""
    if not any(has_file(directory / name) for name in PROCESSORS):
        lacks = " or ".join(PROCESSORS)
    elif has_weights and not any(n.startswith(OTHER_PARTS) for n in find_weights(directory)):
        lacks = "vision tower, which config.json describes"
    if not lacks:
        return config
    logger.warning("%s has no %s: it is read as a model of text", directory, lacks)
    return replace(config, vision=None)


def as_stored(config: ModelConfig, directory: Path) -> ModelConfig:
    """The facts of a checkpoint, with those that only its tensors tell."""
    experts = config.experts
    # One by one, or all in one tensor: no config.json of these models says which.
    may_be_stacked = experts is not None and (
        experts.has_shared or (experts.packed and not experts.bias)
    )
    if not (config.tie_word_embeddings or config.delta_net is not None or may_be_stacked):
        return config
    files = find_weights(directory)
    changes: dict[str, Any] = {}
    if config.delta_net is not None:
        has_codes = any(GATES.search(name) and name.endswith(OF_CODES) for name in files)
        changes["delta_net"] = replace(config.delta_net, gates_in_codes=has_codes)
    if experts is not None and may_be_stacked:
        stacked = [name for name in files if name.endswith(STACKED)]
        changes["experts"] = replace(
            experts,
            packed=bool(stacked),
            inputs_first=any(
                _shape(files, name)[1:] != [2 * experts.intermediate_size, config.hidden_size]
                for name in stacked[:1]
            ),
        )
    if config.tie_word_embeddings and _has_own_head(config, files, directory):
        changes["tie_word_embeddings"] = False
    return replace(config, **changes)


def _has_own_head(config: ModelConfig, files: Mapping[str, Path], directory: Path) -> bool:
    """Whether a checkpoint whose config.json ties the LM head to the embedding has a head with
    other values. It counts, as in transformers, with a warning.
    """
    names = other_names(files, config.is_part)
    embedding, head = names.get(EMBEDDING, EMBEDDING), names.get(HEAD, HEAD)
    if not {embedding, head} <= files.keys() or _are_equal(files, embedding, head):
        return False
    logger.warning(
        "%s: config.json sets `tie_word_embeddings`, but %s differs from %s: both are loaded, as "
        "in transformers; set `tie_word_embeddings` to false",
        directory,
        head,
        embedding,
    )
    return True


def _shape(files: Mapping[str, Path], name: str) -> list[int]:
    """The shape of a tensor of a checkpoint."""
    with _open(files[name]) as tensors:
        return list(tensors.get_slice(name).get_shape())


def _are_equal(files: Mapping[str, Path], name: str, other: str) -> bool:
    """Whether two matrices of a checkpoint have the same values."""
    with _open(files[name]) as tensors, _open(files[other]) as others:
        one, two = tensors.get_slice(name), others.get_slice(other)
        shape = one.get_shape()
        return shape == two.get_shape() and all(
            torch.equal(one[i : i + ROWS].float(), two[i : i + ROWS].float())
            for i in range(0, shape[0], ROWS)
        )


def _warn_of_unread_files(directory: Path, read: Container[Path]) -> None:
    """Warn of weights that other libraries would read from a checkpoint and this one does not."""
    if directory / SINGLE not in read and has_file(directory / SINGLE):
        logger.warning(
            "%s is ignored because %s names other files: delete whichever is out of date",
            directory / SINGLE,
            INDEX,
        )
    if directory / ADAPTER not in read and has_file(directory / ADAPTER):
        logger.warning(
            "%s is ignored: if its adapter is not in the weights yet, pass adapter=%r",
            directory / ADAPTER,
            str(directory),
        )


class Matching(NamedTuple):
    """The shards of a model and the tensors of a checkpoint, matched by their names.

    Attributes:
        shards: shards by the names of their tensors in the checkpoint, which may lack optional
            ones.
        missing: tensors that the model needs and the checkpoint lacks.
        unused: tensors of the checkpoint that nothing needs, without those that are ignored.
    """

    shards: dict[str, Shard]
    missing: list[str]
    unused: list[str]

    def problems(self) -> list[str]:
        """Reasons not to load the checkpoint; none if it fits."""
        problems = []
        if self.missing:
            problems.append(f"missing from the checkpoint: {listed(self.missing)}")
        if self.unused:
            problems.append(f"not used by this model: {listed(self.unused)}")
        of_codes = [name for name in self.missing + self.unused if name.endswith(OF_CODES)]
        if of_codes and not any(name.endswith(OF_CODES) for name in self.shards):
            problems.append(
                "its weights are quantised without a `quantization_config` that describes them"
            )
        elif of_codes:
            problems.append(
                "unless a file is missing, its quantisation contradicts `quantization_config`: "
                "name the linear layers that are not quantised there, and no others "
                "(`modules_to_not_convert`; compressed-tensors: `ignore`), or use the original "
                "weights"
            )
        return problems


def match(own: Mapping[str, Shard], saved: Collection[str], is_part: bool = False) -> Matching:
    """Match the shards of a model to the tensors of a checkpoint.

    Args:
        own: shards of the model, see `checkpoint_shards`.
        saved: names of the tensors in the checkpoint, without `OTHER_PARTS`.
        is_part: whether the checkpoint may have such parts.
    """
    names = other_names(saved, is_part)
    shards = {as_saved(name, names, saved): shard for name, shard in own.items()}
    embedding, head = names.get(EMBEDDING, EMBEDDING), names.get(HEAD, HEAD)
    ignored = {name for name in saved if name.endswith(UNUSED)}
    is_tied = HEAD not in own
    if is_tied and embedding in saved:
        ignored.add(head)  # saved twice; `as_stored` has compared them
    elif is_tied and head in saved:
        shards[head] = shards.pop(embedding)
    needed = {name for name, shard in shards.items() if not shard.wanted.is_optional}
    missing = sorted(needed - set(saved))
    unused = sorted(set(saved) - set(shards) - ignored)
    return Matching(shards, missing, unused)


def _not_left_out(
    files: Mapping[str, Path], is_part: bool, with_tower: bool = False
) -> dict[str, Path]:
    """The files of the tensors that a model may have, without those that are left out."""
    left_out = left_out_prefixes(is_part, with_tower)
    return {name: file for name, file in files.items() if not name.startswith(left_out)}


def check_files(directory: Path) -> None:
    """Refuse a checkpoint with files that are missing or incomplete.

    Raises:
        ValueError: naming one.
    """
    files = find_weights(directory)
    for _ in _slices(sorted(files, key=files.__getitem__), files):
        pass


def check_adapters(adapters: Sequence[Adapter], directory: Path, config: ModelConfig) -> None:
    """Refuse adapters that cannot be merged into a checkpoint, before a model is built.

    Args:
        adapters: adapters, in the order in which they are merged.
        directory: directory of the checkpoint.
        config: the checkpoint's facts.

    Raises:
        ValueError: naming what is wrong.
    """
    if not adapters:
        return
    files = _not_left_out(find_weights(directory), config.is_part)
    device = torch.device("cpu")
    merge = Merge(
        adapters,
        files,
        is_tied=config.tie_word_embeddings,
        leaves_images=config.is_part and config.vision is None,
        device=device,
    )
    by_file = sorted(merge.changed, key=lambda name: (files[name], name))
    for name, source in _slices(by_file, files):
        merge.source(name, source)
    merge.check_finite()


def load_model(
    model: nn.Module,
    directory: Path,
    check: Callable[[], None] = lambda: None,
    *,
    is_part: bool = False,
    adapters: Sequence[Adapter] = (),
) -> None:
    """Copy the checkpoint in `directory` into `model`, converting to the parameters' dtype. Only
    this rank's part of each tensor is read.

    Args:
        model: model to fill.
        directory: directory of the checkpoint.
        check: function called before each tensor, which may raise.
        is_part: whether the checkpoint may have `OTHER_PARTS`, which are left out unless the model
            has them.
        adapters: adapters to merge into it, one after the other.

    Raises:
        ValueError: naming tensors that are missing, left over or of the wrong shape.
    """
    device = next(model.parameters()).device
    fill(shards_of_all(model), directory, device, check, is_part=is_part, adapters=adapters)


def fill(
    own: Mapping[str, Shard],
    directory: Path,
    device: torch.device,
    check: Callable[[], None] = lambda: None,
    *,
    is_part: bool = False,
    adapters: Sequence[Adapter] = (),
) -> None:
    """`load_model` for the shards of a model on a device."""
    files = find_weights(directory)
    merged = {Path(adapter.name) / ADAPTER for adapter in adapters}
    _warn_of_unread_files(directory, merged.union(files.values()))
    files = _not_left_out(files, is_part, has_tower(own))
    matching = match(own, files, is_part)
    if problems := matching.problems():
        raise ValueError(f"{directory} does not match its config.json: {'; '.join(problems)}")
    shards = {name: shard for name, shard in matching.shards.items() if name in files}
    by_file = sorted(shards, key=lambda name: (shards[name].comes_last, files[name]))
    leaves_images = is_part and not has_tower(own)
    merge = Merge(
        adapters, files, is_tied=HEAD not in own, leaves_images=leaves_images, device=device
    )
    for name, source in _slices(by_file, files):
        shards[name].check(name, merge.source(name, source))
    merge.log()
    with startup_bar(by_file, "Loading weights", "tensor") as bar:
        for name, source in _slices(bar, files):
            check()
            shards[name].fill(merge.source(name, source))


def _slices(by_file: Iterable[str], files: Mapping[str, Path]) -> Iterator[tuple[str, Any]]:
    """Tensors of a checkpoint, of which nothing is read yet.

    Args:
        by_file: their names, those of a file together.
        files: files by name.

    Raises:
        ValueError: if a file lacks one.
    """
    for file, of_file in groupby(by_file, key=files.__getitem__):
        with _open(file) as tensors:
            present = set(tensors.keys())
            for name in of_file:
                if name not in present:
                    raise ValueError(f"{file} lacks the tensor {name} that {INDEX} assigns to it")
                yield name, tensors.get_slice(name)


def load_dummy(model: nn.Module, seed: int) -> None:
    """Fill a model with random weights: N(0, 0.02^2), norms 1, biases 0. They are the same for the
    same seed and kind of device, whatever the number of ranks.
    """
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    with startup_bar(list(shards_of_all(model).items()), "Loading weights", "tensor") as bar:
        for name, shard in bar:
            if shard.comes_last:
                continue
            if name.endswith("bias"):
                shard.target.zero_()
            elif shard.target.dim() == 1:
                shard.target.fill_(1.0)
            else:
                dtype = shard.target.dtype
                shape = [part.total for part in shard.parts]
                if not dtype.is_floating_point or dtype.itemsize == 1:  # codes
                    dtype = torch.float32 if len(shape) < 3 else torch.bfloat16  # of all experts
                whole = torch.empty(shape, dtype=dtype, device=device)
                shard.put(shard.read(whole.normal_(0.0, 0.02, generator=generator)))
