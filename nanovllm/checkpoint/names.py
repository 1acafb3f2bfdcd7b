"""Names of a checkpoint's tensors in all their spellings, and the requirements on each."""

from collections.abc import Container, Iterable, Mapping
from typing import NamedTuple

from nanovllm.checkpoint import modules
from nanovllm.checkpoint.quantization import NOT_READ

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
