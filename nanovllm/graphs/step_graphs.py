"""`StepGraphs`: whole steps as CUDA graphs, of decodes alone and of decodes beside prompts."""

import bisect
import functools
import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from nanovllm.engine.plan import Batch
from nanovllm.engine.step_inputs import Computed, StepInputs
from nanovllm.graphs.static_inputs import NOTHING, PROMPTS, TOKENS, Shape, StaticInputs
from nanovllm.sizing.memory import RESERVE
from nanovllm.tracing.step_timer import StepTimer
from nanovllm.utils.device import capturing
from nanovllm.utils.integers import cdiv
from nanovllm.utils.progress import startup_bar

logger = logging.getLogger(__name__)

# Steps of decodes with shared prefixes that a graph of up to four times as many decodes replays
# before they have one of their size: sizes that come and go are not worth the 30 ms of a capture.
PATIENCE, MAX_PADDING = 32, 4


def bucket_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4, 8, 16, 32, 48, ... 256, 288, 320, ... and always `max_num_seqs`, ascending."""
    sizes = {1, 2, 4, 8, *range(16, 257, 16), *range(288, max_num_seqs, 32), max_num_seqs}
    return sorted(size for size in sizes if size <= max_num_seqs)


def coarse_sizes(max_num_seqs: int) -> list[int]:
    """Numbers of decodes beside prompts: 0, 16, 64, 128, 192, ... and `max_num_seqs`, ascending."""
    sizes = {0, 16, *range(64, max_num_seqs, 64), max_num_seqs}
    return sorted(size for size in sizes if size <= max_num_seqs)


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all engines: PyTorch keeps 32 MiB for cuBLAS on each stream, for ever. (PyTorch's own
    stream for captures is on the first device used.) Graphs of two engines may share these, so they
    are to be replayed on one stream, as they are where nobody chooses another.
    """
    return torch.cuda.Stream(device)


class StepGraphs:
    """Captures steps, from the tokens' embedding to the next tokens, and replays them.

    Decodes alone are captured at the start, and with shared prefixes when they first come, unless a
    larger graph will do for a while. Shapes with prompts, of which many come once, are computed
    kernel by kernel then, from the same padded inputs, and captured when they come again, as long
    as there is memory.

    Args:
        compute: the step: its inputs -> what it computes for b sequences.
        device: a CUDA device.
        max_num_seqs: the largest batch.
        table_width: W, blocks of the longest sequence.
        members: decodes of a tile of shared prefixes.
        max_prompt_tokens: maximum number of prompt tokens; 0: steps with prompts have no graphs.
        spare: bytes of the device that graphs of steps with prompts leave to larger steps.
        prepare: function that has kernels loaded for a step, and libraries allocate what they
            need; None: `compute`.
        windowed: whether layers that slide have block tables of their own.
    """

    def __init__(
        self,
        compute: Callable[[StepInputs], Computed],
        device: torch.device,
        max_num_seqs: int,
        table_width: int,
        members: int = 0,
        max_prompt_tokens: int = 0,
        spare: int = 0,
        prepare: Callable[[StepInputs], object] | None = None,
        windowed: bool = False,
    ) -> None:
        self.sizes, self._coarse = bucket_sizes(max_num_seqs), coarse_sizes(max_num_seqs)
        self.num_replays = 0
        self._compute, self._prepare = compute, prepare or compute
        self._device = device
        self._max_prompt_tokens, self._spare = max_prompt_tokens, spare + RESERVE
        self._inputs = StaticInputs(
            device, max_num_seqs, table_width, members, self._max_prompt_tokens, windowed
        )
        self._graphs: dict[Shape, tuple[torch.cuda.CUDAGraph, Computed]] = {}
        self._seen: set[Shape] = set()
        self._num_padded: Counter[Shape] = Counter()  # steps that a larger shape's graph replayed
        self._is_full = False
        self._pool: Any = None
        # Largest first: the others fit into its memory.
        with startup_bar(self.sizes[::-1], "Capturing CUDA graphs", "graph") as bar:
            for size in bar:
                self._capture_unseen(Shape(size))

    @property
    def captured(self) -> list[Shape]:
        """The shapes that have a graph."""
        return list(self._graphs)

    def _capture_unseen(self, shape: Shape) -> None:
        """Compute a shape for nobody, and capture it."""
        self._inputs.fill(NOTHING, shape)
        self._prepare(self._inputs.view(shape))
        self._capture(shape)

    def _capture(self, shape: Shape) -> None:
        """Capture a shape that has been computed before."""
        inputs = self._inputs.view(shape)  # its `Context.shared` is the graph's own
        graph, stream = torch.cuda.CUDAGraph(), _capture_stream(self._device)
        # Other threads, those that watch the workers, may use CUDA meanwhile.
        mode = "thread_local"
        with capturing, torch.cuda.graph(graph, self._pool, stream, capture_error_mode=mode):
            computed = self._compute(inputs)
        self._pool = self._pool or graph.pool()
        self._graphs[shape] = graph, computed

    def _capture_if_due(self, shape: Shape) -> None:
        try:
            if not shape.tokens:
                self._capture_unseen(shape)
            elif shape in self._seen:
                self._capture(shape)
        except Exception:
            self._is_full = True  # none with prompts is tried again
            raise

    def _has_room(self, shape: Shape) -> bool:
        """Whether a shape without a graph may get one: with prompts, as long as there is memory and
        no capture has failed.
        """
        if not shape.tokens:
            return True
        if not self._is_full and torch.cuda.mem_get_info(self._device)[0] < self._spare:
            self._is_full = True
            logger.warning(
                "too little memory for more CUDA graphs of prefill steps, which run kernel by "
                "kernel: a lower gpu_memory_utilization leaves more"
            )
        return not self._is_full

    def shape_of(self, batch: Batch) -> Shape | None:
        """The least that has room for a batch; None: no graph does."""
        if not batch.all_sample:
            return None
        n, shares = batch.num_decodes, batch.prefixes is not None
        if n == len(batch.input_ids):
            return Shape(self.sizes[bisect.bisect_left(self.sizes, n)], 0, shares)
        tokens = cdiv(len(batch.input_ids) - n, TOKENS) * TOKENS
        if tokens > self._max_prompt_tokens or len(batch.context_lens) - n > PROMPTS:
            return None
        return Shape(self._coarse[bisect.bisect_left(self._coarse, n)], tokens, shares)

    def _larger(self, shape: Shape) -> Shape:
        """The shape whose graph replays a step: another until its own has come often enough."""
        if shape.tokens or shape in self._graphs or self._num_padded[shape] == PATIENCE:
            return shape
        fitting = [
            each
            for each in self._graphs
            if each[1:] == shape[1:] and shape.decodes < each.decodes <= MAX_PADDING * shape.decodes
        ]
        if not fitting:
            return shape
        self._num_padded[shape] += 1
        return min(fitting)

    def replay(self, batch: Batch, timer: StepTimer | None = None) -> Computed | None:
        """The results of the step for a batch, until the next replay; None if no graph has room.
        `timer` is told when the device begins.
        """
        shape = self.shape_of(batch)
        if shape is None:
            return None
        shape = self._larger(shape)
        if not (shape in self._graphs or self._has_room(shape)):
            return None
        if shape not in self._graphs:
            self._capture_if_due(shape)
        self._inputs.fill(batch, shape)
        if timer is not None:
            timer.begin()
        if shape in self._graphs:
            graph, computed = self._graphs[shape]
            graph.replay()
            self.num_replays += 1
        else:
            computed = self._compute(self._inputs.view(shape))
            self._seen.add(shape)
        n = len(batch.sample_rows)
        return Computed(*(part[:n] for part in computed))
