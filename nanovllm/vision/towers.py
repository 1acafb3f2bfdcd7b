"""`make_tower`: the vision tower of a model."""

from nanovllm.checkpoint.vision import QWEN3_VL, SIGLIP, VisionConfig
from nanovllm.layers.base import Build
from nanovllm.vision.layers import Tower
from nanovllm.vision.qwen3_vl import Qwen3VLTower
from nanovllm.vision.siglip import Gemma3Tower

TOWERS: dict[str, type[Qwen3VLTower | Gemma3Tower]] = {
    QWEN3_VL: Qwen3VLTower,
    SIGLIP: Gemma3Tower,
}


def make_tower(config: VisionConfig, build: Build) -> Tower:
    """The tower, its weights uninitialised."""
    return TOWERS[config.tower](config, build)
