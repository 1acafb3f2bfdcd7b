"""`make_tower`: the vision tower of a model."""

from nanovllm.checkpoint.vision import VisionConfig
from nanovllm.layers.base import Build
from nanovllm.vision.layers import Tower
from nanovllm.vision.qwen3_vl import Qwen3VLTower


def make_tower(config: VisionConfig, build: Build) -> Tower:
    """The tower, its weights uninitialised."""
    return Qwen3VLTower(config, build)
