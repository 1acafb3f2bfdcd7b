"""`ModelRunner`: launches scheduled steps on the device of one rank.

Knows nothing of queues or blocks beyond the arrays of a `Batch`. `startup.builder` builds what it
runs.
"""

import gc
import logging
import time
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from nanovllm.config import Config
from nanovllm.engine.plan import Batch, StepPlan, build_batch
from nanovllm.engine.step import Built
from nanovllm.engine.step_inputs import Computed, PendingTokens, to_device
from nanovllm.graphs.step_graphs import StepGraphs
from nanovllm.layers.weights.quantized import held_in
from nanovllm.models.qwen3 import Qwen3ForCausalLM
from nanovllm.sampling.controls import Controls
from nanovllm.threads.cpu_wait import CpuWait
from nanovllm.tracing.step_timer import Span, StepTimer
from nanovllm.utils.arrays import Int32
from nanovllm.utils.device import capturing, computing_on, wait_for_device

logger = logging.getLogger(__name__)


class LaunchedStep(NamedTuple):
    """A step whose model has been launched."""

    plan: StepPlan
    batch: Batch
    computed: Computed
    span: Span | None
    began: float  # seconds of time.perf_counter


class ModelRunner:
    """The steps of one rank.

    Args:
        config: the engine's options.
        built: parts that the steps need.

    Attributes:
        built: the argument `built`, until `exit`.
        group: the ranks that the model is split over.
        timer: timer of steps on the device; None where nobody wants to know.
    """

    def __init__(self, config: Config, built: Built) -> None:
        self.config, self.built, self.group = config, built, built.build.group
        self.timer: StepTimer | None = None
        self._num_shared_steps = 0
        has_threads = built.device.type == "cpu" and torch.get_num_threads() > 1
        self._cpu_wait = CpuWait() if has_threads else None
        shown = "no CUDA graphs"
        if self.graphs is not None:
            shown = f"{len(self.graphs.sizes)} CUDA graphs up to batch {self.graphs.sizes[-1]}"
        reason = built.backend_reason
        logger.info("attention: %s (%s); %s", built.build.backend.name, reason, shown)

    @property
    def graphs(self) -> StepGraphs | None:
        """The CUDA graphs; None in eager mode."""
        return self.built.graphs

    @graphs.setter
    def graphs(self, graphs: StepGraphs | None) -> None:
        self.built = replace(self.built, graphs=graphs)

    @property
    def model(self) -> Qwen3ForCausalLM:
        """The model, on the device."""
        return self.built.step.model

    def describe(self) -> dict[str, str | int]:
        """The configuration that took effect, for `LLMEngine.metrics`."""
        build, graphs = self.built.build, self.graphs
        compiler = self.built.compiler
        cache_dtype = build.cache_dtype or build.dtype
        return {
            "attention_backend": build.backend.name,
            "device": str(self.built.device),
            "dtype": str(build.dtype).removeprefix("torch."),
            "quantization": held_in(self.model),
            "kv_cache_dtype": str(cache_dtype).removeprefix("torch."),
            "tensor_parallel_size": self.group.size,
            "all_reduce": self.group.describe(),
            "cuda_graphs": 0 if graphs is None else len(graphs.sizes),
            "max_num_seqs": self.built.pool.max_num_seqs,
            "num_kernels_compiling": 0 if compiler is None else compiler.num_pending,
            "num_graph_replays": 0 if graphs is None else graphs.num_replays,
            "num_shared_prefix_steps": self._num_shared_steps,
        }

    def time_steps(self, on: bool) -> None:
        """Time steps on the device from now on, or no more. A CPU is the host itself."""
        self.timer = StepTimer() if on and self.built.device.type == "cuda" else None

    def run(self, plan: StepPlan) -> None:
        """A whole step, on a rank above 0."""
        self.finish(self.launch(plan), None)

    def encode(self, pixels: list[NDArray[np.uint8]], rows: list[Int32]) -> None:
        """Launch what encodes images into the store, before the step that needs them; see
        `Encoder.encode_into`.
        """
        assert self.built.encoder is not None, "the model has no tower"
        with computing_on(self.built.device):
            if self.timer is not None:
                self.timer.begin_with_images()
            self.built.encoder.encode_into(pixels, rows)

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Launch the model for a step, the same on all ranks, and sample without controls."""
        began, table = time.perf_counter(), self.built.table
        device = self.built.device  # and no name for all of it: an error's frames would hold it
        table.update(plan)
        batch = build_batch(plan, table, self.config.kvcache_block_size, self.built.members)
        self._num_shared_steps += batch.prefixes is not None
        with computing_on(device):
            if plan.loads.size:
                self._copy_states(plan.loads)
            every_row = bool(plan.prompt_logprobs.size or plan.pooling.size)
            computed = None
            if self.graphs is not None and not every_row and batch.images is None:
                computed = self.graphs.replay(batch, self.timer)
            if computed is None:
                inputs = to_device(batch, device, every_row)
                if batch.images is not None:
                    assert self.built.encoder is not None, "the model has no tower"
                    inputs = self.built.encoder.give(inputs, batch.images)
                if self.timer is not None:
                    self.timer.begin()
                computed = self.built.step.run_model(inputs)
            if plan.saves.size:
                self._copy_states(plan.saves)
        span = None if self.timer is None else self.timer.span
        return LaunchedStep(plan, batch, computed, span, began)

    def _copy_states(self, pairs: Int32) -> None:
        """Copy states of sequences: [2, n], rows to copy from and to."""
        rows = self.built.pool.rows
        assert rows is not None, "the pool has no memory"
        rows.copy(pairs)

    def finish(self, step: LaunchedStep, controls: Controls | None) -> PendingTokens:
        """Sample the rows with controls again, look up log-probabilities, and send the step's
        results to the host.

        Args:
            step: the step, launched.
            controls: controls of the step, on rank 0; None if no row has any.
        """
        plan, batch, computed, span, began = step
        with computing_on(self.built.device):
            extras = None
            if plan.has_extras or batch.facts["logprob_divisors"].any():
                extras = self.built.extras.compute(plan, batch, computed, controls)
            if self._cpu_wait is not None:
                self._cpu_wait.look(began)
            return PendingTokens(computed.tokens, extras, span)

    def drop_graphs(self) -> None:
        """Run no CUDA graphs any more. Waits for those that run, see `Group.abort`."""
        try:
            if self.built.device.type == "cuda":
                wait_for_device(self.built.device)
        finally:
            self.graphs = None
            gc.collect()

    def exit(self) -> None:
        """Give the device's memory back. May be called again."""
        built = self.__dict__.pop("built", None)
        if built is None:
            return
        if built.compiler is not None:
            built.compiler.close()
        device = built.device
        del built
        gc.collect()
        if device.type == "cuda":
            with capturing:
                wait_for_device(device)
                torch.cuda.empty_cache()
