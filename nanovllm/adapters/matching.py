"""`match`: what each tensor of an adapter changes in a checkpoint. Imports no torch.

Names of an adapter are paths in the model that was trained, behind PEFT's prefix; those of the
checkpoint may begin in another way (`checkpoint/modules.py`). Every tensor of an adapter changes
something, or the adapter is refused.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeAlias

from nanovllm.adapters.config import BY_PEFT, AdapterConfig
from nanovllm.checkpoint.modules import OTHER_PARTS, without_prefix
from nanovllm.checkpoint.quantization import OF_CODES
from nanovllm.utils.checks import listed

PREFIX = "base_model.model."
FACTORS, OF_EMBEDDING = ("lora_A", "lora_B"), ("lora_embedding_A", "lora_embedding_B")
MAGNITUDE = "lora_magnitude_vector"
PART = re.compile(rf"(.+)\.({'|'.join((*FACTORS, *OF_EMBEDDING, MAGNITUDE))})(?:\.weight)?")
SAVED_BASE = re.compile(r"\.base_layer(?=\.\w+$)")  # in names of layers saved beside their change
ENDS = ("embed_tokens", "lm_head")  # modules that may share a matrix

Parts: TypeAlias = Mapping[str, str]  # of a module's change -> name


class LowRank(NamedTuple):
    """The change of a matrix by a product of two factors.

    Attributes:
        a, b: names of the factors A [r, in] and B [out, r]; of an embedding, whose matrix is
            stored transposed, [r, out] and [in, r].
        is_embedding: whether it is one.
        shape: shape of the matrix, [out, in].
        scale: factor of the product.
        magnitude: name of the tensor [out] with the lengths of rows; None: they have none.
    """

    a: str
    b: str
    is_embedding: bool
    shape: list[int]
    scale: float
    magnitude: str | None


class Change(NamedTuple):
    """What an adapter does to a tensor of the checkpoint.

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
    parts: defaultdict[str, dict[str, str]] = defaultdict(dict)
    wholes: dict[str, str] = {}
    for name in shapes:
        path = name.removeprefix(PREFIX)
        if found := PART.fullmatch(path):
            group, key = parts[found[1]], found[2]
        else:
            group, key = wholes, SAVED_BASE.sub("", path)
        if key in group:
            raise ValueError(f"{group[key]} and {name} mean the same: save it again")
        group[key] = name
    places = {without_prefix(name): name for name in saved}
    modules = [*parts, *(path.rpartition(".")[0] for path in wholes)]
    _refuse_modules(modules, places, is_tied)
    _refuse_unmatched(parts, wholes, places, config.remedy)
    changes: dict[str, Change] = {}
    for path, name in wholes.items():
        _add(changes, places[without_prefix(path)], Change(whole=name))
    for path, names in parts.items():
        low_rank = _low_rank(path, names, shapes, config)
        _add(changes, places[without_prefix(f"{path}.weight")], Change(low_rank=low_rank))
    return changes


def _add(changes: dict[str, Change], place: str, new: Change) -> None:
    """Add a change to a tensor, which may have one of the other kind."""
    old = changes.get(place, Change())
    if (old.whole and new.whole) or (old.low_rank and new.low_rank):
        raise ValueError(f"it has two changes of {place}, under different names: save it again")
    changes[place] = Change(new.whole or old.whole, new.low_rank or old.low_rank)


def _refuse_modules(modules: Iterable[str], places: Mapping[str, str], is_tied: bool) -> None:
    """ValueError if an adapter changes a module whose matrix is codes, or is another's, too."""
    for path in modules:
        own = without_prefix(path)
        if is_tied and own in ENDS:
            raise ValueError(
                f"it changes {path}, but embedding and LM head of this model are one matrix, and "
                "would have to differ: save the model with a copy as `lm_head.weight` and "
                "`tie_word_embeddings` false, and pass that as `model` (docs/adapters.md)"
            )
        if any(f"{own}{ending}" in places for ending in OF_CODES):
            raise ValueError(
                f"it changes {path}, whose weights are codes in this checkpoint: pass the original "
                'weights as `model` (quantization="fp8" quantises them once they are merged)'
            )


def _refuse_unmatched(
    parts: Mapping[str, Parts], wholes: Mapping[str, str], places: Mapping[str, str], remedy: str
) -> None:
    """ValueError for tensors of modules that the checkpoint lacks."""
    lost = [
        name
        for path, names in parts.items()
        if without_prefix(f"{path}.weight") not in places
        for name in names.values()
    ]
    lost += [name for path, name in wholes.items() if without_prefix(path) not in places]
    if any(f".{part}." in name for name in lost for part in OTHER_PARTS):
        remedy = f"parts for images are left out here; {BY_PEFT}"
    if lost:
        raise ValueError(f"this model has no weights for {listed(lost)}: {remedy}")


def _low_rank(
    path: str, names: Parts, shapes: Mapping[str, list[int]], config: AdapterConfig
) -> LowRank:
    """The change of a module by tensors of these names."""
    is_embedding = not names.keys().isdisjoint(OF_EMBEDDING)
    factors = OF_EMBEDDING if is_embedding else FACTORS
    if is_embedding and config.use_dora:
        raise ValueError(f"`use_dora` is not supported for embeddings, got {path}: {BY_PEFT}")
    needed = (*factors, MAGNITUDE) if config.use_dora else factors
    if missing := [f"{path}.{part}" for part in needed if part not in names]:
        raise ValueError(f"it lacks {listed(missing)}: save it again")
    if unused := [name for part, name in names.items() if part not in needed]:
        raise ValueError(f"by its configuration it has no use for {listed(unused)}: save it again")
    a, b = (shapes[names[part]] for part in factors)
    if not len(a) == len(b) == 2:
        raise ValueError(f"the change of {path} has no matrices, but {a} and {b}: {BY_PEFT}")
    rank = config.rank(path)
    if a[0] != rank or b[1] != rank:
        raise ValueError(
            f"the factors of {path} have shapes {a} and {b}, but its configuration says that their "
            f"rank is {rank}: save it again"
        )
    shape = [a[1], b[0]] if is_embedding else [b[0], a[1]]
    magnitude = names.get(MAGNITUDE)
    if magnitude is not None and shapes[magnitude] != shape[:1]:
        raise ValueError(
            f"tensor {magnitude} has shape {shapes[magnitude]}, but its factors imply {shape[:1]}"
        )
    return LowRank(
        a=names[factors[0]],
        b=names[factors[1]],
        is_embedding=is_embedding,
        shape=shape,
        scale=config.scale(path),
        magnitude=magnitude,
    )
