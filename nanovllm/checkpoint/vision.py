"""`VisionConfig`: the facts of a model's vision tower, read from config.json. Imports no torch.

Names are those of `vision_config` there.
"""

from dataclasses import dataclass
from typing import Any

from nanovllm.checkpoint.files import read_value

# Towers, and the models with them.
QWEN3_VL = "qwen3_vl"  # Qwen3-VL, and without deepstack Qwen3.5
SIGLIP = "siglip"  # Gemma 3
MAX_DEPTH = 1000


@dataclass(frozen=True)
class VisionConfig:
    """The facts of a vision tower.

    Attributes:
        tower: kind of the tower.
        image_token_id: token that stands for an image's embeddings in a prompt.
        depth: number of blocks.
        hidden_size, intermediate_size, num_heads: sizes of a block.
        patch_size: pixels of a patch's side.
        temporal_patch_size: frames of a patch; an image is repeated as so many.
        merge: patches on each side of the square that becomes one embedding.
        num_positions: rows of the table of learned positions, a square.
        norm_eps: epsilon of norms.
        out_hidden_size: size of the embeddings, that of the language model.
        deepstack: blocks whose states are added after the first layers of the language model, too.
        mrope_section: number of pairs of a head that are rotated by a token's position on each of
            three axes (see `axes_of_pairs`); empty: tokens have one position each.
        are_whole: whether all tokens of an image see each other in the language model.
        fixed_side: side of all images in patches; 0: images have any size.
    """

    tower: str
    image_token_id: int
    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    patch_size: int
    temporal_patch_size: int
    merge: int
    num_positions: int
    norm_eps: float
    out_hidden_size: int
    deepstack: tuple[int, ...] = ()
    mrope_section: tuple[int, ...] = ()
    are_whole: bool = False
    fixed_side: int = 0

    @property
    def head_dim(self) -> int:
        """Numbers of a head."""
        return self.hidden_size // self.num_heads

    @property
    def values_of_token(self) -> int:
        """Numbers that the language model gets for a token: its embedding, and deepstack."""
        return (1 + len(self.deepstack)) * self.out_hidden_size


def read_vision(
    whole: dict[str, Any], text: dict[str, Any], tower: str, hidden_size: int
) -> VisionConfig:
    """The vision tower of a config.json.

    Args:
        whole: config.json.
        text: the keys of the language model, with the family's defaults.
        tower: kind of the tower.
        hidden_size: hidden size of the language model.

    Raises:
        ValueError: naming the key that is missing, wrong or not supported.
    """
    raw = whole.get("vision_config")
    if not isinstance(raw, dict):
        raise ValueError(f"config.json: `vision_config` must be an object, got {raw!r}")
    raw = {**DEFAULTS[tower], **{k: v for k, v in raw.items() if v is not None}}
    if (activation := raw["hidden_act"]) != "gelu_pytorch_tanh":
        raise ValueError(
            f"config.json: `hidden_act` {activation!r} of `vision_config` is not supported, only "
            "'gelu_pytorch_tanh'"
        )
    found = _qwen3_vl(raw, text) if tower == QWEN3_VL else _gemma3(raw, text, hidden_size)
    if found.out_hidden_size != hidden_size:
        raise ValueError(
            "config.json: `out_hidden_size` of `vision_config` must be the hidden size of the "
            f"language model, {hidden_size}, got {found.out_hidden_size}"
        )
    if found.hidden_size % (4 * found.num_heads):
        raise ValueError(
            "config.json: `hidden_size` of `vision_config` must be a multiple of 4 times the "
            f"number of heads, got {found.hidden_size} and {found.num_heads}"
        )
    return found


def _qwen3_vl(raw: dict[str, Any], text: dict[str, Any]) -> VisionConfig:
    depth = read_value(raw, "depth", int, maximum=MAX_DEPTH)
    num_positions = read_value(raw, "num_position_embeddings", int)
    if round(num_positions**0.5) ** 2 != num_positions:
        raise ValueError(
            "config.json: `num_position_embeddings` of `vision_config` must be a square, got "
            f"{num_positions}"
        )
    if read_value(raw, "in_channels", int) != 3:
        raise ValueError("config.json: `in_channels` of `vision_config` must be 3")
    return VisionConfig(
        QWEN3_VL,
        read_value(text, "image_token_id", int, minimum=0),
        depth,
        read_value(raw, "hidden_size", int),
        read_value(raw, "intermediate_size", int),
        read_value(raw, "num_heads", int),
        read_value(raw, "patch_size", int),
        read_value(raw, "temporal_patch_size", int),
        read_value(raw, "spatial_merge_size", int),
        num_positions,
        1e-6,
        read_value(raw, "out_hidden_size", int),
        deepstack=_read_deepstack(raw, text, depth),
        mrope_section=_read_section(text),
    )


def _gemma3(raw: dict[str, Any], text: dict[str, Any], hidden_size: int) -> VisionConfig:
    image, patch = read_value(raw, "image_size", int), read_value(raw, "patch_size", int)
    num_tokens = read_value(text, "mm_tokens_per_image", int)
    side, tokens_side = image // patch, round(num_tokens**0.5)
    if image % patch or tokens_side**2 != num_tokens or side % tokens_side:
        raise ValueError(
            "config.json: `image_size` of `vision_config` must be a multiple of `patch_size` and "
            "of the side of `mm_tokens_per_image`, a square, got "
            f"{image}, {patch} and {num_tokens}"
        )
    return VisionConfig(
        SIGLIP,
        read_value(text, "image_token_index", int, minimum=0),
        read_value(raw, "num_hidden_layers", int, maximum=MAX_DEPTH),
        read_value(raw, "hidden_size", int),
        read_value(raw, "intermediate_size", int),
        read_value(raw, "num_attention_heads", int),
        patch,
        1,
        side // tokens_side,
        side * side,
        read_value(raw, "layer_norm_eps", float, None, 1e-30, 1),
        hidden_size,
        are_whole=True,
        fixed_side=side,
    )


QWEN3_VL_DEFAULTS = {  # of transformers' classes
    "depth": 27,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "in_channels": 3,
    "intermediate_size": 4304,
    "num_heads": 16,
    "num_position_embeddings": 2304,
    "out_hidden_size": 3584,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
SIGLIP_DEFAULTS = {
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 768,
    "image_size": 224,
    "intermediate_size": 3072,
    "layer_norm_eps": 1e-6,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "patch_size": 16,
}
DEFAULTS: dict[str, dict[str, Any]] = {QWEN3_VL: QWEN3_VL_DEFAULTS, SIGLIP: SIGLIP_DEFAULTS}


def _read_deepstack(raw: dict[str, Any], text: dict[str, Any], depth: int) -> tuple[int, ...]:
    """The blocks of deepstack; none in families without a default for them."""
    key = "deepstack_visual_indexes"
    if key not in text:
        return ()
    indexes = raw.get(key, text[key])
    rising = isinstance(indexes, list) and all(type(i) is int for i in indexes)
    if not rising or indexes != sorted({*indexes}) or not all(0 <= i < depth for i in indexes):
        raise ValueError(
            f"config.json: `{key}` must be rising numbers of blocks below `depth` {depth}, got "
            f"{indexes!r}"
        )
    return tuple(indexes)


def _read_section(text: dict[str, Any]) -> tuple[int, ...]:
    """`mrope_section` of RoPE, wherever it stands."""
    key, section = "mrope_section", text["mrope_section"]
    for name in ("rope_scaling", "rope_parameters"):
        rope = text.get(name)
        if isinstance(rope, dict) and rope.get(key) is not None:
            section = rope[key]
    of_integers = isinstance(section, list) and all(type(n) is int and n >= 0 for n in section)
    if not of_integers or len(section) != 3:
        raise ValueError(f"config.json: `{key}` must be three whole numbers, got {section!r}")
    return tuple(section)
