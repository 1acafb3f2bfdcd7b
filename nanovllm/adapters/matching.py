"""`match`: the changes of a checkpoint by each tensor of an adapter. Imports no torch.

Names of an adapter are paths in the model that was trained, after PEFT's prefix; `parameters.py`
finds these in the checkpoint. Every tensor of an adapter changes something, or the adapter is
refused.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple, TypeAlias

from nanovllm.adapters.config import BY_PEFT, AdapterConfig, unwrapped
from nanovllm.adapters.parameters import parameters
from nanovllm.checkpoint.modules import OTHER_PARTS, without_prefix
from nanovllm.checkpoint.names import Place, Places, left_out_prefixes
from nanovllm.utils.checks import listed

PREFIX = "base_model.model."
FACTORS, OF_EMBEDDING = ("lora_A", "lora_B"), ("lora_embedding_A", "lora_embedding_B")
MAGNITUDE = "lora_magnitude_vector"
PARTS = "|".join((*FACTORS, *OF_EMBEDDING, MAGNITUDE))
PART = re.compile(rf"(.+)\.({PARTS})(?:\.weight)?")
IN_MODEL = re.compile(rf"\.({PARTS})\.\w+")  # in names of a model, which have the adapter's, too
SAVED_BASE = re.compile(r"\.base_layer(?=\.\w+$)")  # in names of layers saved beside their change
ENDS = ("embed_tokens", "lm_head")  # modules that may share a matrix
OF_LABELS = ("score", "classifier")  # the last layers of models that classify, in transformers

Parts: TypeAlias = Mapping[str, str]  # of a module's change -> name


class OfExperts(NamedTuple):
    """A tensor's part of a change to the matrices of all experts, which is one in the adapter.

    Attributes:
        num_experts: number of experts, E.
        expert: number of its expert; None: it stacks the matrices of all.
        first_row: row of its first one in each expert's matrix.
        is_transposed: whether it gets the transpose of each expert's product.
    """

    num_experts: int
    expert: int | None
    first_row: int
    is_transposed: bool


class LowRank(NamedTuple):
    """The change of a matrix by a product of two factors.

    Attributes:
        a, b: names of the factors A [r, in] and B [out, r]; of an embedding, whose matrix is
            stored transposed, [r, out] and [in, r]; of experts [E r, in] and [out, r E], of which
            an expert has neighbouring rows and every E-th column.
        is_embedding: whether the matrix is one.
        shape: shape of the tensor that changes, [out, in]; of stacked experts [E, out, in] or
            [E, in, out], as stored.
        scale: factor of the product.
        magnitude: name of the tensor with the lengths of rows [out], of an embedding those of
            columns [in]; None: they have none.
        experts: its part of a change to experts; None: it is of another kind.
    """

    a: str
    b: str
    is_embedding: bool
    shape: list[int]
    scale: float
    magnitude: str | None
    experts: OfExperts | None


class Change(NamedTuple):
    """The change of a checkpoint's tensor by an adapter.

    Attributes:
        whole: name of the tensor that replaces it; None: none does.
        low_rank: change of the tensor, or of that one; None: none.
    """

    whole: str | None = None
    low_rank: LowRank | None = None


def match(
    shapes: Mapping[str, list[int]], config: AdapterConfig, saved: Iterable[str], is_tied: bool
) -> dict[str, Change]:
    """The changes of an adapter, by names of the checkpoint's tensors.

    Args:
        shapes: shapes of the adapter's tensors, by name.
        config: its configuration.
        saved: names of the checkpoint's tensors.
        is_tied: whether embedding and LM head are one matrix.

    Raises:
        ValueError: naming tensors that change nothing, lack others, or have the wrong shape.
    """
    if not shapes:
        raise ValueError("it has no tensors: save it again")
    parts, wholes = _grouped(shapes)
    places = Places(saved)
    paths = parameters(parts, config, places)
    _refuse_modules([*paths.values(), *wholes], places, is_tied)
    found = {path: places.find(path) for path in (*paths.values(), *wholes)}
    _refuse_wholes(wholes, found)
    lost = [name for path, name in wholes.items() if not found[path]]
    lost += [name for path in parts if not found[paths[path]] for name in parts[path].values()]
    _refuse_lost(lost, config.remedy)
    changes: dict[str, Change] = {}
    for path, name in wholes.items():
        for place in found[path]:
            _add(changes, place.name, Change(whole=name))
    for path, names in parts.items():
        for place, low_rank in _low_rank(paths[path], names, shapes, config, found[paths[path]]):
            _add(changes, place.name, Change(low_rank=low_rank))
    return changes


def is_of_images(name: str) -> bool:
    """Whether an adapter's tensor changes a part for images."""
    return any(f".{part}." in f".{name}" for part in OTHER_PARTS)


def without_tensors(
    config: AdapterConfig, saved: Iterable[str], changed: Collection[str], is_tied: bool
) -> list[str]:
    """Weights of modules that an adapter's configuration names and its tensors do not change, but
    for experts, which peft names otherwise, and parts that no adapter changes.

    Args:
        config: configuration of the adapter.
        saved: names of the checkpoint's tensors.
        changed: names of those that it changes.
        is_tied: whether embedding and LM head are one matrix, which has either's name.
    """
    ends = tuple(f".{name}.weight" for name in config.modules if not (is_tied and name in ENDS))
    never_changed = left_out_prefixes(is_part=True, has_tower=False)
    return [
        name
        for name in saved
        if f".{name}".endswith(ends)
        and name not in changed
        and not name.startswith(never_changed)
        and ".experts." not in name
    ]


def _grouped(names: Iterable[str]) -> tuple[dict[str, dict[str, str]], dict[str, str]]:
    """The names of an adapter's tensors: the parts of changes by their paths, and those of whole
    tensors by their own.
    """
    parts: defaultdict[str, dict[str, str]] = defaultdict(dict)
    wholes: dict[str, str] = {}
    for name in names:
        path = unwrapped(name).removeprefix(PREFIX)
        if found := PART.fullmatch(path):
            group, key = parts[found[1]], found[2]
        elif IN_MODEL.search(path):
            raise ValueError(
                f"{name} is a name inside peft's model, not one of its files: pass what "
                "get_peft_model_state_dict(model) returns, or save it with `save_pretrained`"
            )
        else:
            group, key = wholes, SAVED_BASE.sub("", path)
        if key in group:
            raise ValueError(f"{group[key]} and {name} mean the same: save it again")
        group[key] = name
    return dict(parts), wholes


def _add(changes: dict[str, Change], place: str, new: Change) -> None:
    """Add a change to a tensor, which may have one of the other kind."""
    old = changes.get(place, Change())
    if (old.whole and new.whole) or (old.low_rank and new.low_rank):
        raise ValueError(f"it has two changes of {place}, under different names: save it again")
    changes[place] = Change(new.whole or old.whole, new.low_rank or old.low_rank)


def _refuse_modules(paths: Iterable[str], places: Places, is_tied: bool) -> None:
    """ValueError if an adapter changes a matrix that is codes, or is another's, too."""
    for path in paths:
        module = path.rpartition(".")[0]
        if is_tied and without_prefix(module) in ENDS:
            raise ValueError(
                f"it changes {module}, but embedding and LM head of this model are one matrix, and "
                "would have to differ: save the model with a copy as `lm_head.weight` and "
                "`tie_word_embeddings` false, and pass that as `model` (docs/reference/adapters.md)"
            )
        if places.in_mxfp4(path):
            raise ValueError(
                f"it changes {path}, whose values are codes in this checkpoint: load the model "
                "with transformers' `Mxfp4Config(dequantize=True)`, save it, and pass that as "
                "`model`"
            )
        if places.in_codes(path):
            raise ValueError(
                f"it changes {path.removesuffix('.weight')}, whose weights are codes in this "
                'checkpoint: pass the original weights as `model` (quantization="fp8" quantises '
                "them once they are merged)"
            )


def _refuse_wholes(wholes: Mapping[str, str], found: Mapping[str, list[Place]]) -> None:
    """ValueError for a whole tensor of all experts where the checkpoint has these one by one."""
    for path, name in wholes.items():
        if any(place.expert is not None for place in found[path]):
            raise ValueError(
                f"{name} replaces the matrices of all experts, which this checkpoint has one by "
                f"one: {BY_PEFT}"
            )


def _refuse_lost(lost: list[str], remedy: str) -> None:
    """ValueError for tensors that the checkpoint lacks, or whose weights no adapter changes."""
    if of_images := [name for name in lost if is_of_images(name)]:
        raise ValueError(
            f"an adapter must not change parts for images, got {listed(of_images)}: {BY_PEFT}"
        )
    if of_labels := [name for name in lost if any(f".{layer}." in name for layer in OF_LABELS)]:
        raise ValueError(
            f"it has layers for labels, {listed(of_labels)}, which are not supported: train the "
            "model to answer with a token for each label, whose probabilities can be read "
            "(docs/tasks/rerank.md)"
        )
    if lost:
        raise ValueError(f"this model has no weights for {listed(lost)}: {remedy}")


def _low_rank(
    parameter: str,
    names: Parts,
    shapes: Mapping[str, list[int]],
    config: AdapterConfig,
    places: list[Place],
) -> Iterator[tuple[Place, LowRank]]:
    """The changes of the tensors that hold a parameter, by an adapter's tensors of these names."""
    path = parameter if config.is_target(parameter) else parameter.removesuffix(".weight")
    of_experts = places[0].is_of_experts
    if of_experts and config.use_dora:
        raise ValueError(f"`use_dora` is not supported for experts, got {path}: {BY_PEFT}")
    is_embedding = not names.keys().isdisjoint(OF_EMBEDDING)
    factors = OF_EMBEDDING if is_embedding else FACTORS
    _check_parts(path, names, (*factors, MAGNITUDE) if config.use_dora else factors)
    a, b = (shapes[names[part]] for part in factors)
    if not len(a) == len(b) == 2:
        raise ValueError(f"the change of {path} has no matrices, but {a} and {b}: {BY_PEFT}")
    rank = config.rank(path)
    count, rest = divmod(a[0], rank) if of_experts else (1, a[0] - rank)
    if rest or b[1] != count * rank:
        raise ValueError(
            f"the factors of {path} have shapes {a} and {b}, but its configuration says that their "
            f"rank is {rank}{', for each expert' if of_experts else ''}: save it again"
        )
    shape = [a[1], b[0]] if is_embedding else [b[0], a[1]]
    magnitude = names.get(MAGNITUDE)
    lengths = shape[1:] if is_embedding else shape[:1]
    if magnitude is not None and shapes[magnitude] != lengths:
        raise ValueError(
            f"tensor {magnitude} has shape {shapes[magnitude]}, but its factors imply {lengths}"
        )
    whole = LowRank(
        a=names[factors[0]],
        b=names[factors[1]],
        is_embedding=is_embedding,
        shape=shape,
        scale=config.scale(path),
        magnitude=magnitude,
        experts=None,
    )
    if of_experts:
        yield from _of_experts(path, whole, count, places, config)
    else:
        yield from ((place, whole) for place in places)


def _check_parts(path: str, names: Parts, needed: tuple[str, ...]) -> None:
    """ValueError for parts of a change that are missing, or that nothing needs."""
    if missing := [f"{path}.{part}" for part in needed if part not in names]:
        raise ValueError(f"it lacks {listed(missing)}: save it again")
    if unused := [name for part, name in names.items() if part not in needed]:
        raise ValueError(f"by its configuration it has no use for {listed(unused)}: save it again")


def _of_experts(
    path: str, whole: LowRank, num_experts: int, places: list[Place], config: AdapterConfig
) -> Iterator[tuple[Place, LowRank]]:
    """A change of the matrices of E experts, divided over the tensors that hold these."""
    found = len({place.expert for place in places})
    if places[0].expert is not None and found != num_experts:
        raise ValueError(
            f"{whole.b} and {whole.a} are for {num_experts} experts, but this model has {found}: "
            f"{config.remedy}"
        )
    is_transposed = config.adds_transpose(places[0].is_transposed)
    rows, columns = reversed(whole.shape) if is_transposed else whole.shape
    if places[0].half is not None and rows % 2:
        raise ValueError(
            f"the change of {path} has {rows} rows, not as many for gate as for up: {config.remedy}"
        )
    for place in places:
        shape = [rows if place.half is None else rows // 2, columns]
        if place.expert is None:
            shape = [num_experts, *shape]
        first_row = (place.half or 0) * rows // 2
        experts = OfExperts(num_experts, place.expert, first_row, is_transposed)
        yield place, whole._replace(shape=shape, experts=experts)
