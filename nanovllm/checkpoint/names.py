"""Names of a checkpoint's tensors in all their spellings, the requirements on each, and `Places`:
those of the parameters that a model of transformers has.
"""

import re
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import NamedTuple

from nanovllm.checkpoint import modules
from nanovllm.checkpoint.modules import without_prefix
from nanovllm.checkpoint.quantization import NOT_READ, OF_CODES

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Prefixes of the text model in checkpoints that have other parts, as transformers 4 and 5 write it.
TEXT_PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "lm_head.": "lm_head.",
}
TOWER = "visual."  # prefix of the vision tower in our models, and in Qwen's checkpoints
VISION_PREFIXES = {
    f"{model}{part}.": TOWER if f"{part}." == TOWER else f"{TOWER}{part}."
    for model in ("model.", "")
    for part in modules.OTHER_PARTS
}
# SigLIP as transformers 4 writes it; and its head, which no model here has.
VISION_PREFIXES |= {
    f"{model}vision_tower.vision_model.": f"{TOWER}vision_tower." for model in ("model.", "")
}
HEADS = tuple(
    f"{model}vision_tower.{tower}head."
    for model in ("model.", "")
    for tower in ("", "vision_model.")
)
# Prefixes of the other parts of such checkpoints, in both spellings.
OTHER_PARTS = tuple(f"{model}{part}." for model in ("", "model.") for part in modules.OTHER_PARTS)
DRAFTS = "mtp."  # prefix of layers that draft tokens (Qwen3.5), which are left out of any model
# Ends of names of tensors that nothing reads; old checkpoints carry the rotary frequencies.
UNUSED = ("rotary_emb.inv_freq", *NOT_READ)
# Matrices of experts, and the names of their parts in each expert of a checkpoint.
MATRICES = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "down_proj": (("down_proj",), ("w2",)),
}
NUMBERED = re.compile(r"(.+)\.(\d+)\.(?:gate_proj|w1)\.\w+")  # a tensor of a numbered expert
RENAMED = ".block_sparse_moe.", ".mlp."  # Mixtral: in checkpoints, and in transformers 5
# Parts of names in models that something has wrapped, and what; and in patterns of such names.
WRAPPERS = {"_orig_mod": "torch.compile", "_fsdp_wrapped_module": "FSDP", "module": "DDP"}
OF_WRAPPERS = re.compile(r"(_orig_mod|_fsdp_wrapped_module|(?<![^.])module)\\?\.")
FLOATS = ("F64", "F32", "F16", "BF16")  # dtypes that are no codes, as safetensors names them
BLOCKS = "_blocks"  # end of the name of a matrix in MXFP4
SCALE, INVERSE = ".weight_scale", "_inv"  # ends of names of scales


class Wanted(NamedTuple):
    """The requirements on a checkpoint's tensor.

    Attributes:
        shape: its shape, of all ranks.
        dtypes: the dtypes that it may have, as safetensors names them.
        is_optional: whether it may be missing.
        ignores_ones: whether it may lack dimensions of size 1, or have more of them.
    """

    shape: list[int]
    dtypes: tuple[str, ...]
    is_optional: bool = False
    ignores_ones: bool = False

    @property
    def is_of_codes(self) -> bool:
        """Whether the tensor has codes of quantised weights."""
        return not any(dtype in FLOATS for dtype in self.dtypes)

    def check(self, name: str, shape: list[int], dtype: str, source: str = "config.json") -> None:
        """Refuse a tensor of another shape or dtype.

        Args:
            name: its name.
            shape, dtype: its shape and dtype.
            source: origin of these requirements, for the message.

        Raises:
            ValueError: naming it.
        """
        fits = shape == self.shape
        if self.ignores_ones:
            fits = [n for n in shape if n != 1] == [n for n in self.shape if n != 1]
        if not fits:
            raise ValueError(f"tensor {name} has shape {shape}, but {source} implies {self.shape}")
        if dtype not in self.dtypes:
            wanted = " or ".join(self.dtypes)
            raise ValueError(f"tensor {name} is {dtype}, but {source} implies {wanted}")


def text_names(names: Iterable[str]) -> dict[str, str]:
    """Map names of our models' tensors to their names in a checkpoint with other parts."""
    return {
        own + name.removeprefix(prefix): name
        for name in names
        for prefix, own in (TEXT_PREFIXES | VISION_PREFIXES).items()
        if name.startswith(prefix)
    }


def bare_names(names: Iterable[str]) -> dict[str, str]:
    """Map the same names to those in a checkpoint saved without its head (Qwen3-Embedding), where
    no name begins with `model.`; empty for other checkpoints.
    """
    names = list(names)
    if any(name.startswith("model.") for name in names):
        return {}
    return {f"model.{name}": name for name in names if not name.startswith("lm_head.")}


def as_saved(own: str, names: Mapping[str, str], files: Container[str]) -> str:
    """The name of a tensor in a checkpoint, which may have other `names`. Transformers names the
    scale of a whole tensor like those of scale blocks (`FP8Linear`).
    """
    both = [own, own + INVERSE] if own.endswith(SCALE) else [own]
    found = [names.get(spelling, spelling) for spelling in both]
    return next((name for name in found if name in files), found[0])


def other_names(files: Iterable[str], is_part: bool) -> dict[str, str]:
    """Map names of a model's tensors to their names in a checkpoint, if those differ."""
    files = list(files)
    return bare_names(files) | (text_names(files) if is_part else {})


def spellings(own: str, is_part: bool) -> list[str]:
    """All names that a model's tensor may have in a checkpoint.

    Args:
        own: its name in a model of text alone.
        is_part: whether the checkpoint may have other parts.
    """
    bases = [own]
    if is_part:
        bases += [
            prefix + own.removeprefix(of_text)
            for prefix, of_text in (TEXT_PREFIXES | VISION_PREFIXES).items()
            if own.startswith(of_text)
        ]
    if own.startswith("model."):
        bases.append(own.removeprefix("model."))
    return [*bases, *(base + INVERSE for base in bases if base.endswith(SCALE))]


def is_left_out(name: str, is_part: bool, has_tower: bool) -> bool:
    """Whether no model has a place for this tensor of a checkpoint, nor misses it."""
    return name.startswith(left_out_prefixes(is_part, has_tower)) or name.endswith(UNUSED)


def left_out_prefixes(is_part: bool, has_tower: bool) -> tuple[str, ...]:
    """The beginnings of names of tensors that are left out.

    Args:
        is_part: whether the checkpoint may have other parts.
        has_tower: whether the model has the part for images.
    """
    if has_tower:
        return (*HEADS, DRAFTS)
    return (*OTHER_PARTS, DRAFTS) if is_part else (DRAFTS,)


def has_tower(own: Iterable[str]) -> bool:
    """Whether these are names of a model with a vision tower."""
    return any(name.startswith(TOWER) for name in own)


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

    transformers 5 holds the matrices of all experts of a layer in one parameter. A checkpoint may
    have them one by one (Qwen3-MoE, Mixtral), or in one tensor, too.

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

    def stacks(self) -> Iterator[tuple[str, list[Place]]]:
        """The parameters whose matrices the checkpoint has one by one, with their places."""
        for module in self._experts:
            for name in MATRICES:
                if places := self.find(f"{module}.{name}"):
                    yield f"model.{module}.{name}", places

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
