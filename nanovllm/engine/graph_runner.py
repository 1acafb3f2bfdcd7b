"""`DecodeGraphs`: the model's decode step as CUDA graphs, one for each bucket of batch sizes."""

import bisect
import logging
from collections.abc import Callable

import numpy as np
import torch

from nanovllm.engine.batch import Batch
from nanovllm.utils.context import Context, use_context

logger = logging.getLogger(__name__)


def bucket_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4, 8, 16, 32, 48, ... and always `max_num_seqs` itself, ascending."""
    sizes = {1, 2, 4, 8, *range(16, max_num_seqs, 16), max_num_seqs}
    return sorted(size for size in sizes if size <= max_num_seqs)


class DecodeGraphs:
    """Captures the decode step and replays it.

    The graphs read one static int32 buffer on the device, laid out as

        input_ids [B] | positions [B] | slot_mapping [B] | context_lens [B] | block_tables [B, W]

    with B = `max_num_seqs`, and a pinned twin on the host is filled and copied for each step: one
    copy, and a step that follows waits for this one (sampled tokens are read), so the twin is
    never overwritten under a running copy. Rows from the batch up to the bucket are padding:
    slot -1 is not stored, context length 0 reads nothing.

    Args:
        forward: the model's (input_ids [b], positions [b]) -> hidden states [b, M].
        max_num_seqs: the largest batch.
        table_width: W, blocks of the longest sequence.
    """

    def __init__(
        self,
        forward: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        device: torch.device,
        max_num_seqs: int,
        table_width: int,
    ) -> None:
        self.sizes = bucket_sizes(max_num_seqs)
        self.num_replays = 0
        self._forward = forward
        self._B, self._W = max_num_seqs, table_width
        size = max_num_seqs * (4 + table_width)
        self._host = torch.zeros(size, dtype=torch.int32, pin_memory=True)
        self._device = torch.zeros(size, dtype=torch.int32, device=device)
        self._host_views = self._views(self._host.numpy())
        self._pad(0, max_num_seqs)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._outputs: dict[int, torch.Tensor] = {}

    def _views(self, buffer: np.ndarray) -> list[np.ndarray]:
        B, W = self._B, self._W
        return [*buffer[: 4 * B].reshape(4, B), buffer[4 * B :].reshape(B, W)]

    def _pad(self, begin: int, end: int) -> None:
        input_ids, positions, slot_mapping, context_lens, block_tables = self._host_views
        for view, value in ((input_ids, 0), (positions, 0), (slot_mapping, -1), (context_lens, 0)):
            view[begin:end] = value
        block_tables[begin:end] = 0

    def capture(self) -> None:
        """Capture all buckets, the largest first, so that the others fit into its memory."""
        self._device.copy_(self._host)
        pool = None
        for size in reversed(self.sizes):
            inputs = self._inputs(size)
            self._run(*inputs)  # warm-up: kernels compile, libraries allocate
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                self._outputs[size] = self._run(*inputs)
            self._graphs[size] = graph
            pool = pool or graph.pool()

    def _inputs(self, size: int) -> tuple[torch.Tensor, torch.Tensor, Context]:
        B, W = self._B, self._W
        rows = self._device[: 4 * B].view(4, B)[:, :size]
        context = Context(
            num_decodes=size,
            slot_mapping=rows[2],
            context_lens=rows[3],
            block_tables=self._device[4 * B :].view(B, W)[:size],
        )
        return rows[0], rows[1], context

    def _run(
        self, input_ids: torch.Tensor, positions: torch.Tensor, context: Context
    ) -> torch.Tensor:
        with use_context(context):
            return self._forward(input_ids, positions)

    def replay(self, batch: Batch) -> torch.Tensor:
        """Hidden states [n, M] of a decode batch of n sequences."""
        n = len(batch.input_ids)
        size = self.sizes[bisect.bisect_left(self.sizes, n)]
        sources = (batch.input_ids, batch.positions, batch.slot_mapping, batch.context_lens)
        for view, source in zip(self._host_views[:4], sources, strict=True):
            view[:n] = source
        tables = self._host_views[4]
        tables[:n, : batch.block_tables.shape[1]] = batch.block_tables
        tables[:n, batch.block_tables.shape[1] :] = 0
        self._pad(n, size)
        used = self._B * 4 + size * self._W
        self._device[:used].copy_(self._host[:used], non_blocking=True)
        self._graphs[size].replay()
        self.num_replays += 1
        return self._outputs[size][:n]
