"""`Merge`: adapters in the tensors of a checkpoint, while parts of these are read.

Changes are computed in float32, by the formulas of LoRA and DoRA, for the part of a tensor that is
read; the result is rounded once, where it fills a parameter.
"""

import logging
from collections.abc import Collection, Sequence

import torch

from nanovllm.adapters.adapter import Adapter, Source
from nanovllm.adapters.experts import ChangedExperts, Factors
from nanovllm.adapters.matching import ENDS, Change, LowRank, is_of_images, match, without_tensors
from nanovllm.checkpoint.names import FLOATS
from nanovllm.utils.checks import listed

logger = logging.getLogger(__name__)

ROWS = 4096  # rows of an embedding to measure at once


class Merge:
    """The changes of adapters to a checkpoint's tensors, one adapter after the other.

    Args:
        adapters: adapters, in the order of their changes.
        saved: names of the checkpoint's tensors.
        is_tied: whether embedding and LM head are one matrix.
        leaves_images: whether the checkpoint's part for images is left out; changes of it are, too.
        device: torch.device to compute on.

    Raises:
        ValueError: for an adapter that does not fit, naming what is wrong with it.
    """

    def __init__(
        self,
        adapters: Sequence[Adapter],
        saved: Collection[str],
        *,
        is_tied: bool,
        leaves_images: bool,
        device: torch.device,
    ) -> None:
        self._device, self._factors = device, Factors(device, len(adapters))
        self._saved, self._is_tied, self._leaves_images = saved, is_tied, leaves_images
        self._changes = [(adapter, self._matched(adapter)) for adapter in adapters]

    @property
    def changed(self) -> set[str]:
        """Names of the tensors that change."""
        return {name for _, changes in self._changes for name in changes}

    def source(self, name: str, base: Source) -> Source:
        """A tensor of the checkpoint as the adapters leave it; itself if they do not change it.

        Args:
            name: name of the tensor.
            base: slice of safetensors.

        Raises:
            ValueError: if a change has another shape.
        """
        for adapter, changes in self._changes:
            if name in changes:
                base = self._apply(adapter, changes[name], name, base)
        return base

    def _matched(self, adapter: Adapter) -> dict[str, Change]:
        left_out = self._left_out(adapter)
        shapes = {
            name: list(tensor.get_shape())
            for name, tensor in adapter.tensors.items()
            if name not in left_out
        }
        try:
            if left_out and not shapes:
                raise ValueError(
                    "it changes the part for images alone, which is left out: leave it out, too"
                )
            return match(shapes, adapter.config, self._saved, self._is_tied)
        except ValueError as error:
            raise ValueError(f"adapter {adapter.name}: {error}") from None

    def check_finite(self) -> None:
        """Refuse NaN and infinite values in the tensors that are merged.

        Raises:
            ValueError: naming a tensor that has some.
        """
        for adapter, _ in self._changes:
            adapter.check_finite(adapter.tensors.keys() - self._left_out(adapter))

    def _left_out(self, adapter: Adapter) -> set[str]:
        """Names of an adapter's tensors that are left out with the part that they change."""
        return set(filter(is_of_images, adapter.tensors)) if self._leaves_images else set()

    def _apply(self, adapter: Adapter, change: Change, name: str, base: Source) -> Source:
        shape = list(base.get_shape())
        if change.whole is not None:
            whole = adapter.tensors[change.whole]
            _check_shape(adapter, change.whole, list(whole.get_shape()), name, shape)
            base = whole
        if (low_rank := change.low_rank) is None:
            return base
        _check_shape(adapter, f"{low_rank.b} times {low_rank.a}", low_rank.shape, name, shape)
        if low_rank.experts is not None:
            return ChangedExperts(base, adapter, low_rank, self._factors, self._device)
        return _Changed(base, adapter, low_rank, self._device)

    def log(self) -> None:
        """Log the adapters, and the parts of their configurations without a meaning or tensors."""
        for adapter, changes in self._changes:
            base = f" (trained on {adapter.config.base})" if adapter.config.base else ""
            logger.info("adapter: %s%s, merged into %d tensors", adapter.name, base, len(changes))
            if left_out := self._left_out(adapter):
                logger.info(
                    "adapter %s: its %d tensors for images are left out, as the model's are",
                    adapter.name,
                    len(left_out),
                )
            if adapter.config.unknown:
                logger.warning(
                    "adapter %s: its configuration has fields that are unknown here and ignored: "
                    "%s; if they change what the adapter computes, merge it with peft",
                    adapter.name,
                    ", ".join(adapter.config.unknown),
                )
            if missing := without_tensors(adapter.config, self._saved, changes, self._is_tied):
                logger.warning(
                    "adapter %s: it has no tensors for %s, which its configuration names: save or "
                    "download it again, if it should change them",
                    adapter.name,
                    listed(missing),
                )


def _check_shape(
    adapter: Adapter, what: str, shape: list[int], name: str, wanted: list[int]
) -> None:
    if shape != wanted:
        is_resized = any(f"{end}.weight" in name for end in ENDS)
        raise ValueError(
            f"adapter {adapter.name}: {what} has shape {shape}, but {name} of this model has "
            f"{wanted}: {adapter.config.remedy}"
            f"{', with a vocabulary of the same size' if is_resized else ''}"
        )


class _Changed:
    """A matrix W [out, in] as an adapter leaves it, as a `Source` of float32:

        W + s B A                        Hu et al., LoRA, 2021
        m (W + s B A) / |W + s B A|      Liu et al., DoRA, 2024; lengths |.| of rows, or of columns
                                         of an embedding, which peft sees as a product's transpose

    Args:
        base: W
        adapter: adapter with A, B and m.
        change: their names, and s.
        device: torch.device to compute on.
    """

    def __init__(
        self, base: Source, adapter: Adapter, change: LowRank, device: torch.device
    ) -> None:
        self._base, self._change, self._device = base, change, device
        self._a, self._b = adapter.tensors[change.a], adapter.tensors[change.b]
        self._lengths = None if change.magnitude is None else adapter.tensors[change.magnitude]

    def get_shape(self) -> list[int]:
        return self._change.shape

    def get_dtype(self) -> str:
        dtype = self._base.get_dtype()
        return "F32" if dtype in FLOATS else dtype  # codes, which are refused later

    def __getitem__(self, index: tuple[slice, slice]) -> torch.Tensor:
        """These rows and columns."""
        rows, columns = index
        if self._lengths is None:
            return self._sum(rows, columns)
        if self._change.is_embedding:
            lengths = self._read(self._lengths, columns).float()
            return self._sum(rows, columns).mul_(lengths / self._column_lengths(columns))
        whole = self._sum(rows, slice(None))
        lengths = self._read(self._lengths, rows).float().unsqueeze(1)
        factor = lengths / torch.linalg.vector_norm(whole, dim=1, keepdim=True)
        return whole[:, columns] * factor

    def _column_lengths(self, columns: slice) -> torch.Tensor:
        """The lengths of these columns of W + s B A, over all rows: [columns]."""
        begins = range(0, self._change.shape[0], ROWS)
        parts = (self._sum(slice(begin, begin + ROWS), columns) for begin in begins)
        squares = [part.square_().sum(0) for part in parts]
        return torch.stack(squares).sum(0).sqrt_().float()

    def _sum(self, rows: slice, columns: slice) -> torch.Tensor:
        """W + s B A, of these rows and columns."""
        if self._change.is_embedding:
            b, a = self._read(self._a, (slice(None), rows)).T, self._read(self._b, columns).T
        else:
            b, a = self._read(self._b, rows), self._read(self._a, (slice(None), columns))
        # A copy: the tensor may be memory of the file, or of the adapter's owner.
        w = self._read(self._base, (rows, columns)).to(torch.float32, copy=True)
        return w.addmm_(b.float(), a.float(), alpha=self._change.scale)

    def _read(self, source: Source, index: slice | tuple[slice, slice]) -> torch.Tensor:
        """A part on the device, in its own dtype: converted before, it would be more to send."""
        return source[index].to(self._device)
