"""Vision towers alone against transformers' classes: tiny random weights, float32, CPU."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3_5Config, Qwen3VLConfig
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

from nanovllm.attention.torch_backend import TorchBackend
from nanovllm.checkpoint.vision import QWEN3_VL, read_vision
from nanovllm.distributed.group import Group
from nanovllm.images.processor import ImageProcessor
from nanovllm.kernels.attention import prefill
from nanovllm.layers.base import Build
from nanovllm.models.loader import shards_of_all
from nanovllm.vision import encoder
from nanovllm.vision.encoder import Encoder
from nanovllm.vision.towers import make_tower

SEED = 3
PROCESSOR = ImageProcessor(16, 2, "bicubic", mean=(0.4, 0.5, 0.6), std=(0.5, 0.2, 0.3))
SIZES: dict[str, Any] = {
    "depth": 3,
    "num_heads": 2,
    "intermediate_size": 48,
    "out_hidden_size": 24,
    "num_position_embeddings": 49,
    "initializer_range": 0.06,
}
# Height and width: square, wide, tall, one square of patches high, two alike, a single square.
IMAGES = [(64, 64), (32, 256), (192, 64), (96, 32), (64, 64), (32, 32)]


def make_images(sizes: list[tuple[int, int]]) -> list[np.ndarray]:
    """Random pixels, no two images alike."""
    print("seed", SEED)
    rng = np.random.default_rng(SEED)
    return [rng.integers(0, 256, (*size, 3), np.uint8) for size in sizes]


def make_encoders(
    kind: str,
    head_dim: int,
    dtype: torch.dtype = torch.float32,
    *,
    invariant: bool = False,
    fused: bool = False,
) -> tuple[Any, Encoder]:
    """The tower of transformers, and ours with the same weights."""
    sizes = {**SIZES, "hidden_size": 2 * head_dim}
    if kind == "qwen3-vl":
        config = Qwen3VLConfig(vision_config={**sizes, "deepstack_visual_indexes": [0, 2]})
        theirs = Qwen3VLVisionModel
    else:
        config, theirs = Qwen3_5Config(vision_config=sizes), Qwen3_5VisionModel
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        reference = theirs(config.vision_config).eval()
        for param in reference.parameters():
            if param.dim() == 1:
                param.data += 0.2 * torch.randn_like(param)
    reference.to(dtype)
    whole = {"vision_config": config.vision_config.to_dict()}
    text: dict[str, Any] = {"mrope_section": [24, 20, 20], "image_token_id": 7}
    if kind == "qwen3-vl":
        text["deepstack_visual_indexes"] = [8, 16, 24]
    facts = read_vision(whole, text, QWEN3_VL, sizes["out_hidden_size"])
    build = Build(dtype, fused, Group(), TorchBackend(), 64, batch_invariant=invariant)
    tower = make_tower(facts, build)
    weights = reference.state_dict()
    shards = shards_of_all(tower)
    assert shards.keys() == weights.keys()
    for name, shard in shards.items():
        shard.put(weights[name])
    return reference, Encoder(tower, facts, PROCESSOR, None, build, 64, torch.device("cpu"))


def reference_rows(reference: Any, images: list[np.ndarray]) -> list[torch.Tensor]:
    """Embeddings and states of deepstack by transformers, from its own patches: [T, 1 + K, M]."""
    size = {"shortest_edge": 1, "longest_edge": 1 << 24}
    colours = {"image_mean": [*PROCESSOR.mean], "image_std": [*PROCESSOR.std]}
    processor = Qwen2VLImageProcessorPil(size=size, patch_size=16, merge_size=2, **colours)
    found = processor([Image.fromarray(image) for image in images], return_tensors="pt")
    grid = found["image_grid_thw"]
    assert grid[:, 1:].tolist() == [[image.shape[i] // 16 for i in (0, 1)] for image in images]
    with torch.inference_mode():
        out = reference(found["pixel_values"], grid_thw=grid)
    stacked = getattr(out, "deepstack_features", None) or []
    rows = torch.stack([out.pooler_output, *stacked], dim=1)
    return list(rows.split([int(n) // 4 for n in grid.prod(1)]))


@pytest.mark.parametrize(
    ("kind", "head_dim", "most", "fused"),
    [
        ("qwen3-vl", 64, 50, False),
        ("qwen3-vl", 72, 32_768, False),
        ("qwen3-vl", 72, 32_768, True),
        ("qwen3.5", 64, 0, False),
        ("qwen3.5", 64, 50, True),
    ],
    ids=[
        *("qwen3-vl, two at once", "qwen3-vl, all at once", "qwen3-vl, all by kernels"),
        *("qwen3.5, one at a time", "qwen3.5, two by kernels"),
    ],
)
def test_towers_are_those_of_transformers(
    monkeypatch: pytest.MonkeyPatch, kind: str, head_dim: int, most: int, fused: bool
) -> None:
    """Images of all forms, in any order, encoded together and apart, into rows as assigned."""
    monkeypatch.setattr(encoder, "MAX_PATCHES", most)
    sizes: list[int] = []
    attend = prefill.attend_to_limits

    def spy(*args: Any) -> torch.Tensor:
        sizes.append(len(args[3]) - 1)
        return attend(*args)

    monkeypatch.setattr(prefill, "attend_to_limits", spy)
    reference, ours = make_encoders(kind, head_dim, fused=fused)
    images = make_images(IMAGES)
    wanted = reference_rows(reference, images)
    lens = [len(each) for each in wanted]
    assert lens == [h * w // 1024 for h, w in IMAGES]
    places = random.Random(SEED).sample(range(64), sum(lens))
    rows = np.split(np.array(places, np.int32), np.cumsum(lens)[:-1])
    before = ours.store.clone()
    with torch.inference_mode():
        ours.encode_into(images, rows)
    for own, want in zip(rows, wanted, strict=True):
        torch.testing.assert_close(ours.store[own.tolist()], want, atol=1e-4, rtol=1e-4)
    left = sorted({*range(64)} - {*places})
    assert torch.equal(ours.store[left], before[left])
    by_kernel = {(False, most): 0, (True, 32_768): 3 * 6, (True, 50): 3 * 5}
    assert sum(sizes) == by_kernel[fused, most], "images in batches of several sizes, by blocks"


class Waits(TorchDispatchMode):
    """The operators that would wait for a GPU, for numbers that the host looks at."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("_local_scalar_dense", "nonzero", "masked_select"):
            self.found.append(name)
        if name == "repeat_interleave" and not (kwargs or {}).get("output_size"):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("sizes", [IMAGES, IMAGES[:1]], ids=["several sizes", "one"])
def test_encoding_waits_for_nothing(
    sizes: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does it copy from memory that is not pinned, as `torch.tensor` does."""
    _, ours = make_encoders("qwen3-vl", 64, fused=True)
    images = make_images(sizes)
    rows = np.arange(sum(h * w // 1024 for h, w in sizes), dtype=np.int32)
    lens = np.cumsum([h * w // 1024 for h, w in sizes])[:-1]
    monkeypatch.delattr(torch, "tensor")
    with torch.inference_mode(), Waits() as waits:
        ours.encode_into(images, np.split(rows, lens))
    assert waits.found == []


def test_a_tower_in_bfloat16_is_near_that_in_float32() -> None:
    images = make_images(IMAGES[:3])
    reference, _ = make_encoders("qwen3-vl", 64)
    _, ours = make_encoders("qwen3-vl", 64, torch.bfloat16)
    wanted = torch.cat(reference_rows(reference, images))
    with torch.inference_mode():
        found = ours.encode(images).float()
    assert (found - wanted).norm() < 0.03 * wanted.norm()
    assert torch.nn.functional.cosine_similarity(found, wanted, dim=-1).min() > 0.99


def test_batch_invariance_encodes_one_image_at_a_time() -> None:
    """The same bits, whatever is encoded beside it."""
    _, ours = make_encoders("qwen3-vl", 64, invariant=True)
    images = make_images([(64, 64), (64, 64), (32, 96)])
    rows = np.split(np.arange(11, dtype=np.int32), [4, 8])
    with torch.inference_mode():
        ours.encode_into(images, rows)
        for image, own in zip(images, rows, strict=True):
            assert torch.equal(ours.store[own.tolist()], ours.encode([image]))
