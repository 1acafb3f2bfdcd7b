"""`ImageRows`: the embeddings of images in a step."""

from typing import NamedTuple

import torch

from nanovllm.images.stored import Span


class ImageRows(NamedTuple):
    """The embeddings of a step's placeholders.

    Attributes:
        rows: [n] int64, their rows in the step.
        values: [n, 1 + K, M], embeddings, and the values added after each of the first K layers.
        spans: images whose tokens see each other; empty: each token sees those before it.
        limits: [T] int32, number of its sequence's first tokens that each token of the step sees:
            up to itself, or to the end of its image; None: there are no spans.
    """

    rows: torch.Tensor
    values: torch.Tensor
    spans: tuple[Span, ...] = ()
    limits: torch.Tensor | None = None

    def of_row(self, row: int) -> "ImageRows | None":
        """The same for a step of this row alone; None: it has no image."""
        index = (self.rows == row).nonzero().squeeze(1)
        return ImageRows(self.rows[index] * 0, self.values[index]) if len(index) else None
