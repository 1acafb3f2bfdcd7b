"""`ChangedExperts`: matrices of experts as an adapter leaves them, and `Factors`, which has them by
expert.
"""

from functools import lru_cache
from typing import Any

import torch

from nanovllm.adapters.adapter import Adapter, Source
from nanovllm.adapters.matching import LowRank
from nanovllm.checkpoint.names import FLOATS

KEPT = 3  # A or B of gate, up and down of a layer


class Factors:
    """The factors of experts' changes, by expert. Those that were read last are kept, as a
    checkpoint may have tensors for each expert, one after the other.

    Args:
        device: torch.device to have them on.
        num_adapters: number of adapters that change a tensor.
    """

    def __init__(self, device: torch.device, num_adapters: int) -> None:
        self._device = device
        self._a = lru_cache(KEPT * num_adapters)(self._read_a)
        self._b = lru_cache(KEPT * num_adapters)(self._read_b)

    def a(self, source: Source, count: int, columns: range) -> torch.Tensor:
        """These columns of A [E r, in]: [E, r, columns] float32."""
        return self._a(source, count, columns.start, columns.stop)

    def b(self, source: Source, count: int, rows: range) -> torch.Tensor:
        """These rows of B [out, r E]: [E, rows, r] float32."""
        return self._b(source, count, rows.start, rows.stop)

    def _read_a(self, source: Source, count: int, begin: int, end: int) -> torch.Tensor:
        part = source[:, begin:end].to(self._device)
        return part.float().view(count, -1, end - begin)

    def _read_b(self, source: Source, count: int, begin: int, end: int) -> torch.Tensor:
        part = source[begin:end].to(self._device)
        return part.float().view(end - begin, -1, count).permute(2, 0, 1).contiguous()


class ChangedExperts:
    """The matrix of an expert, or a part of its rows, or those of all experts, as an adapter leaves
    them, as a `Source` of float32: W + s B A, or W + s (B A)^T, with factors of each expert.

    Args:
        base: W [out, in]; of all experts [E, out, in] or [E, in, out].
        adapter: adapter with A and B.
        change: their names, s, and the tensor's part of it.
        factors: factors of experts.
        device: torch.device to compute on.
    """

    def __init__(
        self,
        base: Source,
        adapter: Adapter,
        change: LowRank,
        factors: Factors,
        device: torch.device,
    ) -> None:
        assert change.experts is not None, "a change of experts"
        self._base, self._change, self._experts = base, change, change.experts
        self._a, self._b = adapter.tensors[change.a], adapter.tensors[change.b]
        self._factors, self._device = factors, device

    def get_shape(self) -> list[int]:
        return self._change.shape

    def get_dtype(self) -> str:
        dtype = self._base.get_dtype()
        return "F32" if dtype in FLOATS else dtype  # codes, which are refused later

    def __getitem__(self, index: Any) -> torch.Tensor:
        """These rows and columns; of stacked experts, those of these, or all of one expert."""
        if isinstance(index, int):
            return self[index : index + 1, :, :][0]
        *of, rows, columns = (
            range(*part.indices(size)) for part, size in zip(index, self.get_shape(), strict=True)
        )
        # A copy: the tensor may be memory of the file.
        w = self._base[index].to(self._device).to(torch.float32, copy=True)
        left, right = self._of_each(rows, columns)
        if (expert := self._experts.expert) is not None:
            return w.addmm_(left[expert], right[expert], alpha=self._change.scale)
        [these] = (slice(span.start, span.stop) for span in of)
        return w.baddbmm_(left[these], right[these], alpha=self._change.scale)

    def _of_each(self, rows: range, columns: range) -> tuple[torch.Tensor, torch.Tensor]:
        """The factors of each expert's change of these rows and columns: [E, rows, r] and
        [E, r, columns].
        """
        count, first = self._experts.num_experts, self._experts.first_row
        rows = range(first + rows.start, first + rows.stop)
        if self._experts.is_transposed:
            a, b = self._factors.a(self._a, count, rows), self._factors.b(self._b, count, columns)
            return a.mT, b.mT
        return self._factors.b(self._b, count, rows), self._factors.a(self._a, count, columns)
