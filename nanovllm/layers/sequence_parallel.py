"""Rows and sums that are spread over GPUs, as layers use them (sequence parallelism).

Sums may be left to the norm that follows. Large steps on several GPUs divide their rows: each rank
has the residual stream of its own rows only, and normalises those.
"""

from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F

from nanovllm.distributed.bulk import Gathered, Scattered
from nanovllm.distributed.group import Group
from nanovllm.layers.base import Hidden
from nanovllm.tensors.image_rows import ImageRows
from nanovllm.utils.context import get_context


class Owned(NamedTuple):
    """This rank's rows of the residual stream, in a large step on several GPUs.

    Attributes:
        rows: [len(held) or more, M]
        held: indices of these rows in the step.
    """

    rows: torch.Tensor
    held: range


Residual: TypeAlias = torch.Tensor | Owned | None  # [T, M], None before the first layer


def sum_over_ranks(x: torch.Tensor, group: Group) -> torch.Tensor | Scattered:
    """Sum x: [T, M] over the ranks. If kernels exchange rows, the sum is left to the norm that
    follows: the result is partial then, [1, T, M] or `Scattered`.
    """
    if bulk := group.bulk_for(x):
        return bulk.scatter(len(x), lambda rows, out: out.copy_(x[rows]))
    if group.can_exchange(x):
        return x.unsqueeze(0)
    return group.all_reduce(x)


def gather_owned_rows(own: torch.Tensor, index: torch.Tensor, held: range) -> torch.Tensor:
    """Rows of a matrix that is split over the ranks. Rows of other ranks are 0, so the sum over the
    ranks has all rows.

    Args:
        own: [len(held) or more, M], this rank's rows.
        index: [n] int32, indices of rows in the whole matrix.
        held: indices in the whole matrix of the rows in `own`.

    Returns:
        [n, M]
    """
    if not held:
        return own.new_zeros(len(index), own.shape[1])
    place = index - held.start
    nearest = place.clamp(0, len(held) - 1)
    return F.embedding(nearest, own).masked_fill_((nearest != place).unsqueeze(1), 0)


def whole_rows(x: Hidden) -> torch.Tensor:
    """All normalised rows [T, M]; those of other ranks are waited for, and the next step overwrites
    them.
    """
    if isinstance(x, Gathered):
        return x.whole()
    assert isinstance(x, torch.Tensor), "normalised values, not codes"
    return x


def kept(residual: Residual, num_rows: int, group: Group) -> torch.Tensor | None:
    """The rows of the residual that are left after attention, `num_rows` of them. None if there is
    no residual.
    """
    if isinstance(residual, Owned):
        # This must come after attention's product and before the norm below, whose kernel sums that
        # product and waits for the ranks. Once this sum is complete, all ranks have the gathered
        # rows, so none waits for rows while another's norm waits for it, perhaps on its whole GPU.
        return group.all_reduce(gather_owned_rows(residual.rows, _kept_rows(), residual.held))
    if residual is None or residual.shape[0] == num_rows:
        return residual
    return residual.index_select(0, _kept_rows())


def _kept_rows() -> torch.Tensor:
    rows = get_context().kept_rows
    assert rows is not None, "x and residual have different rows"
    return rows


def embed_images(rows: torch.Tensor, images: ImageRows, group: Group) -> None:
    """Write embeddings of images over those of their tokens in rows: [T, M], whose sum over the
    ranks follows: rank 0 has them.
    """
    if group.rank == 0:
        rows.index_copy_(0, images.rows, images.values[:, 0])
    else:
        rows.index_fill_(0, images.rows, 0)


def add_images(residual: Residual, images: ImageRows, i: int) -> None:
    """Add to the residual stream after layer i what images have for it, if anything."""
    if i + 1 >= images.values.shape[1]:
        return
    values = images.values[:, i + 1]
    if isinstance(residual, Owned):
        places = images.rows - residual.held.start
        nearest = places.clamp(0, len(residual.rows) - 1)
        is_own = (places == nearest) & (places < len(residual.held))
        residual.rows.index_add_(0, nearest, values * is_own.unsqueeze(1))
        return
    assert residual is not None, "a layer has been computed"
    residual.index_add_(0, images.rows, values)
