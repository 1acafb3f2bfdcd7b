"""The vision tower of Qwen3-VL (Qwen team, 2025), and without deepstack of Qwen3.5.

Module names are those of the checkpoints. Letters: P patches, D head size, V hidden size of the
tower, M that of the language model, T embeddings: P / merge^2, K blocks of deepstack.
"""

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.checkpoint.vision import VisionConfig
from nanovllm.layers.base import Build
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
    find_spans,
    to_device,
)
from nanovllm.vision.patches import cut

THETA = 10_000.0


class Places(NamedTuple):
    """The places of patches in their images.

    Attributes:
        taps: [4, P] int64, the nearest rows of the table of learned positions.
        weights: [4, P, 1] float32, their shares.
        cos_sin: [P, D] float32, the rotation of queries and keys, cosines before sines.
    """

    taps: torch.Tensor
    weights: torch.Tensor
    cos_sin: torch.Tensor


def make_places(images: list[Alike], config: VisionConfig, device: torch.device) -> Places:
    """The places of the patches of images, in the order of `cut`.

    A patch's learned position is sampled bilinearly from a square table, whose corners are those of
    the grid. Its rotation is by its row in the first half of the pairs, by its column in the other.
    All images are computed at once: on a GPU each operator takes as long for a few patches.
    """
    m = config.merge
    sizes = np.array([(each.rows, each.columns, each.num_patches) for each in images])
    totals = sizes[:, 2] * [each.num_images for each in images]
    facts = np.stack([*sizes.T, totals, totals.cumsum() - totals])
    of_sizes = to_device(facts, device)  # [5, sizes]
    of_patches = of_sizes.repeat_interleave(of_sizes[3], 1, output_size=int(totals.sum()))
    rows, columns, num_patches, _, begin = of_patches  # [P] each
    i = (torch.arange(len(rows), device=device) - begin) % num_patches
    square, inside = i // (m * m), i % (m * m)
    per_row = columns // m
    row = square // per_row * m + inside // m  # [P]
    column = square % per_row * m + inside % m
    side = round(config.num_positions**0.5)
    low_row, share_row = _nearest(row, rows, side)
    low_column, share_column = _nearest(column, columns, side)
    taps, weights = [], []
    for step_row, of_row in ((0, 1 - share_row), (1, share_row)):
        for step_column, of_column in ((0, 1 - share_column), (1, share_column)):
            tap_row = (low_row + step_row).clamp(max=side - 1)
            tap_column = (low_column + step_column).clamp(max=side - 1)
            taps.append(tap_row * side + tap_column)
            weights.append(of_row * of_column)
    half = config.head_dim // 2
    exponents = torch.arange(0, half, 2, dtype=torch.float32, device=device) / half
    inverse = 1.0 / THETA**exponents  # [D / 4]
    angles = torch.cat([torch.outer(x.float(), inverse) for x in (row, column)], dim=1)
    shares = torch.stack(weights).unsqueeze(2)
    return Places(torch.stack(taps), shares, torch.cat([angles.cos(), angles.sin()], dim=1))


def _nearest(
    index: torch.Tensor, count: torch.Tensor, side: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The row of a table of `side` rows below each place, and the share of the one above it."""
    at = index.float() * (side - 1) / (count - 1).clamp(min=1)
    low = at.floor()
    return low.long(), at - low


class PatchEmbed(nn.Module):
    """The embedding of patches: [P, 3 x frames x size x size] -> [P, V]"""

    def __init__(self, config: VisionConfig, build: Build) -> None:
        super().__init__()
        size = config.patch_size
        shape = config.hidden_size, 3, config.temporal_patch_size, size, size
        self.proj = PatchProduct(shape, build)

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        return self.proj(patches)


class Attention(nn.Module):
    """Attention within each image, with rotated queries and keys."""

    def __init__(self, config: VisionConfig, build: Build) -> None:
        super().__init__()
        V, self._num_heads, self._fused = config.hidden_size, config.num_heads, build.fused
        self.qkv, self.proj = Linear(V, 3 * V, build), Linear(V, V, build)

    def forward(self, x: torch.Tensor, spans: Spans, cos_sin: torch.Tensor) -> torch.Tensor:
        """[P, V] -> [P, V]; cos_sin: [P, D]"""
        H = self._num_heads
        qkv = self.qkv(x).view(len(x), 3 * H, -1)  # [P, 3 H, D]
        if self._fused:
            from nanovllm.kernels.attention.rotate import rotate_

            rotate_(qkv[:, : 2 * H], cos_sin)
            q, k, v = qkv.chunk(3, dim=1)
        else:
            q, k = _rotate(qkv[:, : 2 * H], cos_sin).chunk(2, dim=1)
            v = qkv[:, 2 * H :]
        return self.proj(attend_within_images(q, k, v, spans).flatten(1))


def _rotate(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Rotate x: [P, H, D], in float32, by the rows of cos_sin: [P, D]."""
    cos, sin = cos_sin.unsqueeze(1).chunk(2, dim=-1)
    x1, x2 = x.float().chunk(2, dim=-1)
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1).to(x.dtype)


class Block(nn.Module):
    """x = x + attention(norm(x)); x = x + mlp(norm(x))"""

    def __init__(self, config: VisionConfig, build: Build) -> None:
        super().__init__()
        V, eps = config.hidden_size, config.norm_eps
        self.norm1, self.norm2 = LayerNorm(V, eps, build), LayerNorm(V, eps, build)
        self.attn = Attention(config, build)
        self.mlp = MLP(V, config.intermediate_size, ("linear_fc1", "linear_fc2"), build)

    def forward(self, x: torch.Tensor, spans: Spans, cos_sin: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm1(x), spans, cos_sin)
        return x + self.mlp(self.norm2(x))


class Merger(nn.Module):
    """The embeddings of squares of patches: [P, V] -> [T, M].

    Args:
        joins_first: whether the norm is over a square's patches together, as in deepstack.
    """

    def __init__(self, config: VisionConfig, build: Build, *, joins_first: bool) -> None:
        super().__init__()
        self._width = config.merge**2 * config.hidden_size
        self._joins_first = joins_first
        size = self._width if joins_first else config.hidden_size
        self.norm = LayerNorm(size, config.norm_eps, build)
        self.linear_fc1 = Linear(self._width, self._width, build)
        self.linear_fc2 = Linear(self._width, config.out_hidden_size, build)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._joins_first:
            x = self.norm(x.view(-1, self._width))
        else:
            x = self.norm(x).view(-1, self._width)
        return self.linear_fc2(F.gelu(self.linear_fc1(x)))


class Qwen3VLTower(Tower):
    """The tower, from patches to embeddings."""

    def __init__(self, config: VisionConfig, build: Build) -> None:
        super().__init__()
        self.config = config
        self.patch_embed = PatchEmbed(config, build)
        self.pos_embed = Table(config.num_positions, config.hidden_size, build)
        self.blocks = nn.ModuleList(Block(config, build) for _ in range(config.depth))
        self.merger = Merger(config, build, joins_first=False)
        if config.deepstack:
            self.deepstack_merger_list = nn.ModuleList(
                Merger(config, build, joins_first=True) for _ in config.deepstack
            )
        self._fused = build.fused

    def cut(self, images: torch.Tensor) -> torch.Tensor:
        config = self.config
        return cut(images, config.patch_size, config.merge, config.temporal_patch_size)

    def forward(self, patches: torch.Tensor, images: list[Alike]) -> torch.Tensor:
        x = self.patch_embed(patches)
        places = make_places(images, self.config, x.device)
        learned = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for taps, shares in zip(places.taps, places.weights, strict=True):
            learned.addcmul_(F.embedding(taps, self.pos_embed.weight), shares)
        x = x + learned.to(x.dtype)
        spans = find_spans(images, self._fused, x.device)
        stacked = []
        for i, block in enumerate(self.blocks):
            x = block(x, spans, places.cos_sin)
            if i in self.config.deepstack:
                merger = self.deepstack_merger_list[self.config.deepstack.index(i)]
                stacked.append(merger(x))
        return torch.stack([self.merger(x), *stacked], dim=1)
