"""`DecodeGraphs`: the whole decode step as CUDA graphs, one for each bucket of batch sizes."""

import bisect
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from nanovllm.engine.plan import Batch
from nanovllm.engine.prefixes import most_tiles
from nanovllm.engine.step_inputs import Computed, StepInputs
from nanovllm.engine.step_timer import StepTimer
from nanovllm.layers.sampler import SamplingMetadata
from nanovllm.utils.context import Context, Prefixes
from nanovllm.utils.device import capturing
from nanovllm.utils.progress import startup_bar

NUM_ROWS = 12  # of the static buffer, before the block tables


def bucket_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4, 8, 16, 32, 48, ... and always `max_num_seqs` itself, ascending."""
    sizes = {1, 2, 4, 8, *range(16, max_num_seqs, 16), max_num_seqs}
    return sorted(size for size in sizes if size <= max_num_seqs)


def lay_out(rows: np.ndarray, tables: np.ndarray, batch: Batch | None, size: int) -> None:
    """Write a decode batch of n sequences, padded to `size`, over whatever is there.

    Padding computes nothing of use: slot mapping -1 is not stored, context length 0 reads
    nothing, and the token goes to the row past the last in the table of last tokens.

    Args:
        rows: [NUM_ROWS, B] int32.
        tables: [B, W] int32.
        batch: None for padding only.
        size: at most B.
    """
    n, rows, prefixes = 0, rows[:8], rows[8:]
    prefixes[:, :size] = 0
    if batch is not None:
        n, width = batch.block_tables.shape
        values = (
            batch.input_ids,
            batch.positions,
            batch.slot_mapping,
            batch.context_lens,
            batch.slots,
            batch.temperatures.view(np.int32),
            *batch.random_keys,
        )
        for row, value in zip(rows, values, strict=True):
            row[:n] = value
        for row, value in zip(prefixes, batch.prefixes or (), strict=False):
            row[: len(value)] = value
        tables[:n, :width] = batch.block_tables
        tables[:n, width:] = 0
    for row, value in zip(rows, (0, 0, -1, 0, rows.shape[1], 0, 0, 0), strict=True):
        row[n:size] = value
    tables[n:size] = 0


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all engines: PyTorch keeps 32 MiB for cuBLAS on each stream, for ever. (PyTorch's own
    stream for captures is on the first device used.) Graphs of two engines may share these, so they
    are to be replayed on one stream, as they are where nobody chooses another.
    """
    return torch.cuda.Stream(device)


class StaticInputs:
    """The inputs of the graphs: one int32 buffer on the device, and pinned twins on the host.

    Laid out as NUM_ROWS rows of B = `max_num_seqs`, then the block tables [B, W]:

        input_ids | positions | slot_mapping | context_lens | slots | temperatures | 2 key words
        | the 4 arrays of `SharedPrefixes`

    A step fills a twin and copies it in one go. There are two twins, taken in turn, and before one
    is filled again its last copy is waited for: the host may be a step ahead of the device.
    """

    def __init__(self, device: torch.device, max_num_seqs: int, table_width: int) -> None:
        self._B, self._W = max_num_seqs, table_width
        size = max_num_seqs * (NUM_ROWS + table_width)
        self._device = torch.zeros(size, dtype=torch.int32, device=device)
        self._twins = [torch.zeros(size, dtype=torch.int32, pin_memory=True) for _ in range(2)]
        self._copied = [torch.cuda.Event() for _ in self._twins]
        self._turn = 0

    def fill(self, batch: Batch | None, size: int) -> None:
        """Copy a decode batch to the device, padded to `size` rows; None: padding only."""
        self._turn = 1 - self._turn
        self._copied[self._turn].synchronize()
        twin = self._twins[self._turn]
        lay_out(*self._split(twin.numpy()), batch, size)
        used = NUM_ROWS * self._B + size * self._W
        self._device[:used].copy_(twin[:used], non_blocking=True)
        self._copied[self._turn].record()

    def _split(self, buffer: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        rows = buffer[: NUM_ROWS * self._B].reshape(NUM_ROWS, self._B)
        return rows, buffer[NUM_ROWS * self._B :].reshape(self._B, self._W)

    def views(self, size: int, num_tiles: int = 0) -> StepInputs:
        """The device's inputs of a batch of `size`, with so many tiles of shared prefixes."""
        rows = self._device[: NUM_ROWS * self._B].view(NUM_ROWS, self._B)[:, :size]
        input_ids, positions, slot_mapping, context_lens, slots, temperatures = rows[:6]
        tables = self._device[NUM_ROWS * self._B :].view(self._B, self._W)[:size]
        lens, own, begins, ends = rows[8:]
        prefixes = Prefixes(lens, own, begins[:num_tiles], ends[:num_tiles])
        return StepInputs(
            input_ids=input_ids,
            positions=positions,
            context=Context(
                size,
                slot_mapping,
                context_lens,
                tables,
                prefixes=prefixes if num_tiles else None,
            ),
            decode_slots=slots,
            sample_rows=None,
            sampling=SamplingMetadata(
                temperatures.view(torch.float32), rows[6:8], context_lens, slots
            ),
        )


class DecodeGraphs:
    """Captures the decode step, from the tokens' embedding to the next tokens, and replays it.
    Steps that share prefixes have graphs of their own, captured when the first of their size comes.

    Args:
        compute: the step: its inputs -> what it computes for b sequences.
        device: a CUDA device.
        max_num_seqs: the largest batch.
        table_width: W, blocks of the longest sequence.
        members: decodes of a tile of shared prefixes.
    """

    def __init__(
        self,
        compute: Callable[[StepInputs], Computed],
        device: torch.device,
        max_num_seqs: int,
        table_width: int,
        members: int = 0,
    ) -> None:
        self.sizes = bucket_sizes(max_num_seqs)
        self.num_replays = 0
        self._compute, self._device, self._members = compute, device, members
        self._inputs = StaticInputs(device, max_num_seqs, table_width)
        self._graphs: dict[tuple[int, bool], tuple[torch.cuda.CUDAGraph, Computed]] = {}
        self._pool: Any = None
        # Largest first: the others fit into its memory.
        with startup_bar(self.sizes[::-1], "Capturing CUDA graphs", "graph") as bar:
            for size in bar:
                self._capture(size, False)

    def _capture(self, size: int, shares: bool) -> tuple[torch.cuda.CUDAGraph, Computed]:
        self._inputs.fill(None, size)
        num_tiles = most_tiles(size, self._members) if shares else 0
        self._compute(self._inputs.views(size, num_tiles))  # kernels compile, libraries allocate
        inputs = self._inputs.views(size, num_tiles)  # its `Context.shared` is the graph's own
        graph, stream = torch.cuda.CUDAGraph(), _capture_stream(self._device)
        # Other threads, those that watch the workers, may use CUDA meanwhile.
        mode = "thread_local"
        with capturing, torch.cuda.graph(graph, self._pool, stream, capture_error_mode=mode):
            computed = self._compute(inputs)
        self._pool = self._pool or graph.pool()
        self._graphs[size, shares] = graph, computed
        return graph, computed

    def replay(self, batch: Batch, timer: StepTimer | None = None) -> Computed:
        """What the step computes for a decode batch of n sequences, until the next replay. `timer`
        is told when the device begins.
        """
        n, shares = len(batch.input_ids), batch.prefixes is not None
        size = self.sizes[bisect.bisect_left(self.sizes, n)]
        graph, computed = self._graphs.get((size, shares)) or self._capture(size, shares)
        self._inputs.fill(batch, size)
        if timer is not None:
            timer.begin()
        graph.replay()
        self.num_replays += 1
        return Computed(*(part[:n] for part in computed))
