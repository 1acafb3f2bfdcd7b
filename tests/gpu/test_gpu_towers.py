"""Vision towers on a CUDA device, by kernels and in bfloat16, against themselves in float32 on a
CPU, where tests compare them with transformers.
"""

from typing import Any

import numpy as np
import pytest
import torch

from nanovllm.attention.torch_backend import TorchBackend
from nanovllm.checkpoint.vision import QWEN3_VL, SIGLIP, VisionConfig
from nanovllm.distributed.group import Group
from nanovllm.images.processor import ImageProcessor
from nanovllm.layers.base import Build
from nanovllm.vision.encoder import Encoder
from nanovllm.vision.towers import make_tower

pytestmark = pytest.mark.gpu
SEED = 5
PROCESSOR = ImageProcessor(16, 2, "bicubic", max_pixels=1 << 20)
KINDS: dict[str, dict[str, Any]] = {
    "heads of 64": {"hidden_size": 256, "num_heads": 4},
    "heads of 72": {"hidden_size": 288, "num_heads": 4},
    "of one size": {"hidden_size": 288, "num_heads": 4, "tower": SIGLIP, "fixed_side": 16},
}


def make_encoders(kind: str) -> tuple[VisionConfig, list[Encoder]]:
    """The same tower in float32 on the CPU, and in bfloat16 on the device."""
    facts = {"tower": QWEN3_VL, "deepstack": (0, 1), **KINDS[kind]}
    if facts["tower"] == SIGLIP:
        facts |= {"deepstack": (), "are_whole": True}
    config = VisionConfig(
        image_token_id=7,
        depth=3,
        intermediate_size=520,
        patch_size=16,
        temporal_patch_size=1 if facts["tower"] == SIGLIP else 2,
        merge=2,
        num_positions=256,
        norm_eps=1e-6,
        out_hidden_size=128,
        **facts,
    )
    print("seed", SEED)
    encoders = []
    weights: dict[str, torch.Tensor] = {}
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.bfloat16)):
        build = Build(dtype, device == "cuda", Group(), TorchBackend(), 64)
        with torch.device(device):
            tower = make_tower(config, build)
        generator = torch.Generator().manual_seed(SEED)
        for name, param in tower.named_parameters():
            if name not in weights:
                size = 0.3 if param.dim() == 1 else param[0].numel() ** -0.5
                weights[name] = size * torch.randn(param.shape, generator=generator)
                weights[name] += param.dim() == 1 and name.endswith("norm.weight")
            param.data.copy_(weights[name].bfloat16())
        rope = None
        encoders.append(Encoder(tower, config, PROCESSOR, rope, build, 4096, torch.device(device)))
    return config, encoders


def make_images(sizes: list[tuple[int, int]]) -> list[np.ndarray]:
    rng = np.random.default_rng(SEED)
    return [rng.integers(0, 256, (*size, 3), np.uint8) for size in sizes]


@pytest.mark.parametrize("kind", KINDS)
def test_a_tower_by_kernels(kind: str) -> None:
    """Images of one size, and of several in one launch. Once everything is compiled, the host waits
    for nothing: PyTorch raises where it would.
    """
    config, (plain, ours) = make_encoders(kind)
    sizes = [(480, 640), (480, 640), (256, 1024), (64, 64), (640, 480), (32, 32)]
    if config.fixed_side:
        sizes = [(256, 256)] * 5
    images = make_images(sizes)
    counts = [h * w // 1024 for h, w in sizes]
    rows = np.split(np.arange(sum(counts), dtype=np.int32), np.cumsum(counts)[:-1])
    with torch.inference_mode():
        plain.encode_into(images, rows)
        ours.encode_into(images, rows)
        found, wanted = ours.store.float().cpu()[: sum(counts)], plain.store[: sum(counts)]
        assert (found - wanted).norm() < 0.03 * wanted.norm()
        assert torch.nn.functional.cosine_similarity(found, wanted, dim=-1).min() > 0.98
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            ours.encode_into(images[::-1], rows[::-1])
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(ours.store.float().cpu()[: sum(counts)], found, atol=0.1, rtol=0.1)
