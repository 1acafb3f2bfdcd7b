"""The vision tower of Gemma 3 (Gemma team, 2025): SigLIP (Zhai et al., 2023) and a projector.

Module names are those of the checkpoints. Letters: n images, P patches of all, V hidden size of the
tower, M that of the language model, T embeddings.
"""

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.checkpoint.vision import VisionConfig
from nanovllm.layers.base import Build, Layer
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.vision.layers import (
    MLP,
    Alike,
    LayerNorm,
    Linear,
    PatchProduct,
    Spans,
    Table,
    Tower,
    attend_within_images,
)
from nanovllm.vision.patches import cut


class Embeddings(nn.Module):
    """The embedding of patches, and learned positions: [P, 3 x size x size] -> [P, V]"""

    def __init__(self, config: VisionConfig, build: Build) -> None:
        super().__init__()
        size, V = config.patch_size, config.hidden_size
        self.patch_embedding = PatchProduct((V, 3, size, size), build)
        self.position_embedding = Table(config.num_positions, V, build)

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        x = self.patch_embedding(patches).unflatten(0, (-1, len(self.position_embedding.weight)))
        return (x + self.position_embedding.weight).flatten(0, 1)


class Attention(nn.Module):
    """Attention within each image: [P, V] -> [P, V]"""

    def __init__(self, config: VisionConfig, build: Build) -> None:
        super().__init__()
        V, self._num_heads = config.hidden_size, config.num_heads
        self.q_proj, self.k_proj = Linear(V, V, build), Linear(V, V, build)
        self.v_proj, self.out_proj = Linear(V, V, build), Linear(V, V, build)

    def forward(self, x: torch.Tensor, spans: Spans) -> torch.Tensor:
        q, k, v = (
            proj(x).unflatten(1, (self._num_heads, -1))
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.out_proj(attend_within_images(q, k, v, spans).flatten(1))


class Block(nn.Module):
    """x = x + attention(norm(x)); x = x + mlp(norm(x))"""

    def __init__(self, config: VisionConfig, build: Build) -> None:
        super().__init__()
        V, eps = config.hidden_size, config.norm_eps
        self.layer_norm1, self.layer_norm2 = LayerNorm(V, eps, build), LayerNorm(V, eps, build)
        self.self_attn = Attention(config, build)
        self.mlp = MLP(V, config.intermediate_size, ("fc1", "fc2"), build)

    def forward(self, x: torch.Tensor, spans: Spans) -> torch.Tensor:
        x = x + self.self_attn(self.layer_norm1(x), spans)
        return x + self.mlp(self.layer_norm2(x))


class Encoder(nn.Module):
    """The blocks."""

    def __init__(self, config: VisionConfig, build: Build) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(config, build) for _ in range(config.depth))


class SiglipTower(nn.Module):
    """SigLIP without its head: [P, 3 x size x size] -> [P, V]"""

    def __init__(self, config: VisionConfig, build: Build) -> None:
        super().__init__()
        self.embeddings = Embeddings(config, build)
        self.encoder = Encoder(config, build)
        self.post_layernorm = LayerNorm(config.hidden_size, config.norm_eps, build)

    def forward(self, patches: torch.Tensor, images: list[Alike]) -> torch.Tensor:
        x = self.embeddings(patches)
        spans = Spans(images)  # of one size
        for block in self.encoder.layers:
            x = block(x, spans)
        return self.post_layernorm(x)


class Projector(Layer):
    """The means of squares of patches, normalised and projected: [n, side, side, V] -> [T, M]"""

    def __init__(self, config: VisionConfig, build: Build) -> None:
        super().__init__()
        self._merge = config.merge
        shape = config.hidden_size, config.out_hidden_size
        self.mm_input_projection_weight = nn.Parameter(torch.empty(shape, dtype=build.dtype), False)
        plain = build._replace(fused=False)
        self.mm_soft_emb_norm = RMSNorm(config.hidden_size, config.norm_eps, plain, plus_one=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        means = F.avg_pool2d(x.permute(0, 3, 1, 2), self._merge)  # [n, V, ...]
        rows = means.flatten(2).transpose(1, 2).flatten(0, 1)
        return self.mm_soft_emb_norm(rows) @ self.mm_input_projection_weight


class Gemma3Tower(Tower):
    """The tower and its projector."""

    def __init__(self, config: VisionConfig, build: Build) -> None:
        super().__init__()
        self.config = config
        self.vision_tower = SiglipTower(config, build)
        self.multi_modal_projector = Projector(config, build)

    def cut(self, images: torch.Tensor) -> torch.Tensor:
        return cut(images, self.config.patch_size, 1, 1)

    def forward(self, patches: torch.Tensor, images: list[Alike]) -> torch.Tensor:
        [each] = images  # they all have one size
        x = self.vision_tower(patches, images)
        grid = each.num_images, each.rows, each.columns
        return self.multi_modal_projector(x.unflatten(0, grid)).unsqueeze(1)
