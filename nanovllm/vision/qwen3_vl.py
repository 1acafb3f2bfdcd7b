"""The vision tower of Qwen3-VL (Qwen team, 2025), and without deepstack of Qwen3.5.

Module names are those of the checkpoints. Letters: P patches, D head size, V hidden size of the
tower, M that of the language model, T embeddings: P / merge^2, K blocks of deepstack.
"""

from collections import OrderedDict
from typing import NamedTuple

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
    Table,
    Tower,
    attend_within_images,
)
from nanovllm.vision.patches import cut

THETA = 10_000.0
NUM_KEPT = 16  # grids whose places are remembered


class Places(NamedTuple):
    """The places of an image's patches.

    Attributes:
        taps: [P, 4] int64, the nearest rows of the table of learned positions.
        weights: [P, 4] float32, their shares.
        cos, sin: [P, 1, D / 2] float32, the rotation of queries and keys.
    """

    taps: torch.Tensor
    weights: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor


def make_places(
    rows: int, columns: int, config: VisionConfig, device: torch.device | None = None
) -> Places:
    """The places of a grid's patches, in the order of `cut`.

    A patch's learned position is sampled bilinearly from a square table, whose corners are those of
    the grid. Its rotation is by its row in the first half of the pairs, by its column in the other.
    """
    m = config.merge
    i = torch.arange(rows * columns, device=device)
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
    cos, sin = angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)
    return Places(torch.stack(taps, 1), torch.stack(weights, 1), cos, sin)


def _nearest(index: torch.Tensor, count: int, side: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The row of a table of `side` rows below each place, and the share of the one above it."""
    at = index.float() * (side - 1) / max(count - 1, 1)
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
        V, self._num_heads = config.hidden_size, config.num_heads
        self.qkv, self.proj = Linear(V, 3 * V, build), Linear(V, V, build)

    def forward(
        self, x: torch.Tensor, images: list[Alike], cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        """[P, V] -> [P, V]; cos, sin: [P, 1, D / 2]"""
        qkv = self.qkv(x).unflatten(-1, (3, self._num_heads, -1))  # [P, 3, H, D]
        q, k = _rotate(qkv[:, :2], cos.unsqueeze(1), sin.unsqueeze(1)).unbind(1)
        return self.proj(attend_within_images(q, k, qkv[:, 2], images).flatten(1))


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x: [P, 2, H, D], in float32. Few operators: each reads all from memory."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    x1, x2 = x.float().chunk(2, dim=-1)
    out1, out2 = out.chunk(2, dim=-1)
    out1.copy_((x1 * cos).addcmul_(x2, sin, value=-1))
    out2.copy_((x2 * cos).addcmul_(x1, sin))
    return out


class Block(nn.Module):
    """x = x + attention(norm(x)); x = x + mlp(norm(x))"""

    def __init__(self, config: VisionConfig, build: Build) -> None:
        super().__init__()
        V, eps = config.hidden_size, config.norm_eps
        self.norm1, self.norm2 = LayerNorm(V, eps, build), LayerNorm(V, eps, build)
        self.attn = Attention(config, build)
        self.mlp = MLP(V, config.intermediate_size, ("linear_fc1", "linear_fc2"), build)

    def forward(
        self, x: torch.Tensor, images: list[Alike], cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        x = x + self.attn(self.norm1(x), images, cos, sin)
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
        self._places: OrderedDict[tuple[int, int], Places] = OrderedDict()

    def cut(self, images: torch.Tensor) -> torch.Tensor:
        config = self.config
        return cut(images, config.patch_size, config.merge, config.temporal_patch_size)

    def forward(self, patches: torch.Tensor, images: list[Alike]) -> torch.Tensor:
        x = self.patch_embed(patches)
        learned, turns = [], []
        for each in images:
            places, n = self._places_of(each, x.device), each.num_images
            taps = F.embedding(places.taps, self.pos_embed.weight)  # [P, 4, V]
            learned.append((taps * places.weights.unsqueeze(2)).sum(1).repeat(n, 1))
            turns.append((places.cos.repeat(n, 1, 1), places.sin.repeat(n, 1, 1)))
        x = x + torch.cat(learned).to(x.dtype)
        cos, sin = map(torch.cat, zip(*turns, strict=True))
        stacked = []
        for i, block in enumerate(self.blocks):
            x = block(x, images, cos, sin)
            if i in self.config.deepstack:
                merger = self.deepstack_merger_list[self.config.deepstack.index(i)]
                stacked.append(merger(x))
        return torch.stack([self.merger(x), *stacked], dim=1)

    def _places_of(self, images: Alike, device: torch.device) -> Places:
        """The places of a grid, the most recent of which are kept."""
        grid = images.rows, images.columns
        if grid not in self._places:
            self._places[grid] = make_places(*grid, self.config, device)
        self._places.move_to_end(grid)
        if len(self._places) > NUM_KEPT:
            self._places.popitem(last=False)
        return self._places[grid]
