"""`ModelRunner`: the model on its device. Launches scheduled steps.

Knows nothing of queues or blocks beyond the arrays of a `Batch`.
"""

import dataclasses
import gc
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from nanovllm.checkpoint.model_config import ModelConfig
from nanovllm.compiling.compiler import Compiler, num_processes, target_of
from nanovllm.compiling.rehearsal import Rehearsal, distinct_layers
from nanovllm.config import Config
from nanovllm.distributed.group import Group
from nanovllm.engine.kv_pool import KVCachePool
from nanovllm.engine.plan import Batch, SlotTable, StepPlan, build_batch
from nanovllm.engine.step_inputs import Computed, PendingTokens, StepInputs, fill_in, to_device
from nanovllm.graphs.static_inputs import most_tokens
from nanovllm.graphs.step_graphs import StepGraphs
from nanovllm.layers.attention import members_of_tile
from nanovllm.layers.sampler import Sampler
from nanovllm.layers.weights.onednn import can_use_onednn, use_onednn
from nanovllm.layers.weights.quantized import dequantize, held_in, is_to_be_plain
from nanovllm.models import model_class
from nanovllm.models.loader import load_dummy, load_model
from nanovllm.sampling.controls import Controls
from nanovllm.sampling.extras import Extras
from nanovllm.sizing import memory
from nanovllm.sizing.activations import most_activations
from nanovllm.sizing.build import choose_build
from nanovllm.sizing.model_size import weights
from nanovllm.tensors.fp8 import FP8
from nanovllm.tracing.step_timer import Span, StepTimer
from nanovllm.utils.context import use_context
from nanovllm.utils.cpu_wait import CpuWait
from nanovllm.utils.device import (
    capability,
    capturing,
    prepare_device,
    resolve_device,
    triton_refusal,
    wait_for_device,
)

logger = logging.getLogger(__name__)


class LaunchedStep(NamedTuple):
    """A step whose model has been launched."""

    plan: StepPlan
    batch: Batch
    computed: Computed
    span: Span | None
    began: float  # seconds of time.perf_counter


class ModelRunner:
    """Loads the model, sizes the KV cache and runs steps.

    Args:
        config: the engine's options.
        model_config: the checkpoint's facts.
        group: the ranks that the model is split over; this is one of them.
        connect: meets the other ranks, if the group has not.
        beside: is called while other processes compile kernels, and told whether any do.

    Attributes:
        num_blocks: KV blocks of the pool.
        pool: the memory of those blocks.
        graphs: the CUDA graphs, None in eager mode.
        timer: times steps on the device, None where nobody wants to know.
        compiler: compiles kernels beside this process; None where none are.
    """

    def __init__(
        self,
        config: Config,
        model_config: ModelConfig,
        group: Group,
        connect: Callable[[], None] = lambda: None,
        beside: Callable[[bool], None] = lambda has_time: None,
    ) -> None:
        self.config = config
        self.model_config = model_config
        self.group = group
        self.device = resolve_device(config.device, group.rank, group.size)
        self.compiler = self._start_compiler()
        try:
            build, self._backend_reason = choose_build(config, model_config, group, self.device)
            self.build, self.dtype, self.backend = build, build.dtype, build.backend
            self.fused, self.max_model_len = build.fused, build.max_model_len
            self.cache_dtype = build.cache_dtype or build.dtype
            shares = config.share_prefixes and config.enable_prefix_caching
            self._members = members_of_tile(model_config, build) if shares else 0
            self.num_shared_steps = 0
            self.sampler = Sampler(model_config.vocab_size, group)
            # [max_num_seqs + 1] int32: each running sequence's last sampled token, by slot; the row
            # past the last is for padding.
            num_rows = config.max_num_seqs + 1
            self.last_tokens = torch.zeros(num_rows, dtype=torch.int32, device=self.device)
            self.graphs: StepGraphs | None = None
            self.timer: StepTimer | None = None
            has_threads = self.device.type == "cpu" and torch.get_num_threads() > 1
            self._cpu_wait = CpuWait() if has_threads else None
            with self._scope():
                self._build(connect, beside)
        except BaseException:
            self._close_compiler()
            raise
        self._log_backend()

    # -- construction ---------------------------------------------------------------------------

    def _start_compiler(self) -> Compiler | None:
        """None where no kernels of ours run, and where no process can be started."""
        if self.device.type != "cuda" or triton_refusal(self.device) is not None:
            return None
        preparing = prepare_device(self.device)
        try:
            num_ranks = self.group.size * self.config.data_parallel_size
            return Compiler(target_of(self.device), num_processes(num_ranks))
        except OSError as error:
            logger.warning(
                "no process that compiles kernels can be started (%s): they are compiled when they "
                "are first launched, which takes longer",
                error,
            )
            return None
        finally:
            preparing.join()

    def _build(self, connect: Callable[[], None], beside: Callable[[bool], None]) -> None:
        """Model, sampler, pool and graphs, while kernels are compiled beside."""
        config, model_config, group = self.config, self.model_config, self.group
        on_cpu = self.device.type == "cpu"
        connect()
        if not group.minimum(int(self.compiler is not None)):  # ranks do alike
            self._close_compiler()
        self.build_model()
        self.pool = KVCachePool(self.model, config, group, self.device)
        # [max_num_seqs, V of this rank]: on a GPU, of the last step, outside of the graphs.
        self.logits: torch.Tensor | None = None
        if not on_cpu:
            shape = config.max_num_seqs, len(self.model.lm_head.weight.data)
            self.logits = torch.empty(shape, dtype=self.dtype, device=self.device)
        self.extras = Extras(
            self.model.compute_logits,
            model_config.vocab_size,
            config.max_num_seqs,
            group,
            self.last_tokens,
        )
        as_built = not is_to_be_plain(self.model)
        if as_built:
            self._rehearse()
        beside(self.compiler is not None and self.compiler.num_pending > 0)
        self.load()
        if not as_built:
            self._rehearse()
        own = self._weight_bytes() + group.peer_bytes
        activations = 0 if on_cpu else self._measure()
        num_blocks = self.pool.how_many_fit(self.max_model_len, own, own + activations)
        self.num_blocks = group.minimum(num_blocks)
        longest = min(self.max_model_len, self.num_blocks * config.kvcache_block_size)
        self._max_blocks = -(-longest // config.kvcache_block_size)  # of a sequence
        self._table = SlotTable(config.max_num_seqs, self._max_blocks)
        self.allocate_kv_cache()
        can_capture = self.backend.supports_cuda_graph and (self.fused or not model_config.experts)
        if not on_cpu and not config.enforce_eager and can_capture:  # plain experts sync
            self.capture_cudagraph(activations)
        if self.compiler is not None:
            self.compiler.load(self.device)
        group.minimum(0)  # all ranks are there

    def build_model(self) -> None:
        """Build the model on its device, and what lets kernels sum over the ranks. The weights
        start uninitialised.
        """
        model = model_class(self.model_config.architecture)
        if self.fused and self.group.size > 1 and not self.config.disable_custom_all_reduce:
            self.group.open_peer_memory(
                self.dtype,
                self.model_config.hidden_size,
                self.config.max_num_seqs,
                0 if model.adds_behind_norms else self.config.max_num_batched_tokens,
            )
        with torch.device(self.device):
            self.model = model(self.model_config, self.build)
        self.model.eval()

    def load(self) -> None:
        """Fill the weights."""
        start = time.perf_counter()
        if self.config.load_format == "dummy":
            load_dummy(self.model, self.config.seed)
        else:
            is_part = self.model_config.is_part
            load_model(self.model, Path(self.config.model), self.group.check, is_part=is_part)
        dequantize(self.model)
        if self.config.fused_kernels and can_use_onednn(self.device, self.dtype):
            use_onednn(self.model)
        logger.info(
            "weights: %s, %.2f GiB in %s on %s, loaded in %.1f s",
            self.model_config.architecture,
            self._weight_bytes() / memory.GIB,
            str(self.dtype).removeprefix("torch."),
            self.device,
            time.perf_counter() - start,
        )

    def _rehearse(self) -> None:
        """Have kernels compiled, whatever the weights are."""
        if self.compiler is None:
            return
        sizes = self.max_model_len, self._members, self._most_graph_tokens()
        how = self.config, self.model_config, self.group, self.device, *sizes
        steps = Rehearsal(self.run_model, self.model, self.pool, *how)
        for rehearse in (steps.first_steps, steps.other_steps):
            with self.compiler.rehearsal():
                rehearse()

    def _measure(self) -> int:
        """Bytes that activations take at most. With a compiler no kernel is waited for."""
        sizes = self.max_model_len, self.device, self.extras.most_bytes
        with nullcontext() if self.compiler is None else self.compiler.rehearsal():
            compute = partial(self._run_distinct_layers, of_each=2)
            most = most_activations(compute, self.pool, self.config, *sizes)
        if self.compiler is not None:
            self.compiler.finish()
        return most + (self.backend.most_gathered() if self.cache_dtype == FP8 else 0)

    def _close_compiler(self) -> None:
        if self.compiler is not None:
            self.compiler.close()
            self.compiler = None

    def _weight_bytes(self) -> int:
        return sum(p.nbytes for p in self.model.parameters())  # a tied weight appears once

    def allocate_kv_cache(self) -> None:
        """Allocate the pool and give each layer its part."""
        try:
            self.pool.allocate(self.num_blocks)
        except (MemoryError, ValueError, torch.OutOfMemoryError):  # numpy's and torch's
            size = self.num_blocks * self.pool.block_bytes / memory.GIB
            raise ValueError(
                f"a KV cache of {self.num_blocks} blocks ({size:.2f} GiB) does not fit the memory "
                "of the device: lower num_kvcache_blocks or kv_cache_memory_bytes"
            ) from None
        self.pool.log(self.max_model_len)

    def capture_cudagraph(self, activations: int) -> None:
        """Capture the decode step for all buckets of batch sizes.

        Args:
            activations: bytes that the largest step needs.
        """
        sizes = self.config.max_num_seqs, self._max_blocks, self._members
        room = self._most_graph_tokens(), activations
        prepare = self._run_distinct_layers
        self.graphs = StepGraphs(self.run_model, self.device, *sizes, *room, prepare=prepare)

    def _run_distinct_layers(self, inputs: StepInputs, of_each: int = 1) -> None:
        with distinct_layers(self.model, self.model_config, of_each):
            self.run_model(inputs)

    def _most_graph_tokens(self) -> int:
        """Tokens of prompts that a CUDA graph has room for, beside decodes; 0: none has any."""
        if not self.backend.captures_prompts or self.group.size > 1:  # several divide large steps
            return 0
        numbers = weights(self.model_config).of_token / len(self.model_config.layers)
        most = most_tokens(numbers, capability(self.device.index))
        return min(most, self.config.max_num_batched_tokens)

    def _log_backend(self) -> None:
        graphs = "no CUDA graphs"
        if self.graphs is not None:
            graphs = f"{len(self.graphs.sizes)} CUDA graphs up to batch {self.graphs.sizes[-1]}"
        logger.info("attention: %s (%s); %s", self.backend.name, self._backend_reason, graphs)

    def describe(self) -> dict[str, str | int]:
        """What took effect, for `LLMEngine.metrics`."""
        return {
            "attention_backend": self.backend.name,
            "device": str(self.device),
            "dtype": str(self.dtype).removeprefix("torch."),
            "quantization": held_in(self.model),
            "kv_cache_dtype": str(self.cache_dtype).removeprefix("torch."),
            "tensor_parallel_size": self.group.size,
            "all_reduce": self.group.describe(),
            "cuda_graphs": 0 if self.graphs is None else len(self.graphs.sizes),
            "num_kernels_compiling": 0 if self.compiler is None else self.compiler.num_pending,
            "num_graph_replays": 0 if self.graphs is None else self.graphs.num_replays,
            "num_shared_prefix_steps": self.num_shared_steps,
        }

    # -- a step ---------------------------------------------------------------------------------

    @contextmanager
    def _scope(self) -> Iterator[None]:
        """No gradients, and our device as the current one (kernels run on the current one)."""
        on_cuda = self.device.type == "cuda"
        with torch.inference_mode(), torch.cuda.device(self.device) if on_cuda else nullcontext():
            yield

    def time_steps(self, on: bool) -> None:
        """Time steps on the device from now on, or no more. A CPU is the host itself."""
        self.timer = StepTimer() if on and self.device.type == "cuda" else None

    def run(self, plan: StepPlan) -> None:
        """A whole step, on a rank above 0."""
        self.finish(self.launch(plan), None)

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Launch the model for a step, the same on all ranks, and sample without controls."""
        began = time.perf_counter()
        self._table.update(plan)
        batch = build_batch(plan, self._table, self.config.kvcache_block_size, self._members)
        self.num_shared_steps += batch.prefixes is not None
        with self._scope():
            every_row = bool(plan.prompt_logprobs.size or plan.pooling.size)
            computed = None
            if self.graphs is not None and not every_row:
                computed = self.graphs.replay(batch, self.timer)
            if computed is None:
                inputs = to_device(batch, self.device, every_row)
                if self.timer is not None:
                    self.timer.begin()
                computed = self.run_model(inputs)
        span = None if self.timer is None else self.timer.span
        return LaunchedStep(plan, batch, computed, span, began)

    def finish(self, step: LaunchedStep, controls: Controls | None) -> PendingTokens:
        """Sample the rows with controls again, and send the step's results to the host.

        Args:
            controls: those of the step, on rank 0; None if no row has any.
        """
        plan, batch, computed, span, began = step
        with self._scope():
            extras = None
            if plan.has_extras:
                extras = self.extras.compute(plan, batch, computed, controls)
            if self._cpu_wait is not None:
                self._cpu_wait.look(began)
            return PendingTokens(computed.tokens, extras, span)

    def run_model(self, inputs: StepInputs) -> Computed:
        """The whole step on the device, from token ids to sampled tokens."""
        self.group.check()
        input_ids, rows = inputs.input_ids, inputs.sample_rows
        context = dataclasses.replace(inputs.context, longest=self.max_model_len)
        if context.num_decodes:
            assert context.slots is not None
            decode_slots = context.slots[: context.num_decodes]
            input_ids = fill_in(input_ids, decode_slots, self.last_tokens)
        with use_context(context):
            hidden = states = self.model(input_ids, inputs.positions)
        if rows is not None and context.kept_rows is None:
            states = hidden.index_select(0, rows)
        n = len(states)
        if not n:  # chunks of prompts only
            return Computed(input_ids.new_empty(0), states, hidden)
        out = None if self.logits is None else self.logits[:n]
        logits = self.model.compute_logits(states, out)
        tokens = self.sampler(logits, inputs.sampling, self.last_tokens)
        return Computed(tokens, logits, hidden)

    def drop_graphs(self) -> None:
        """Run no CUDA graphs any more. Waits for those that run, see `Group.abort`."""
        try:
            if self.device.type == "cuda":
                wait_for_device(self.device)
        finally:
            self.graphs = None
            gc.collect()

    def exit(self) -> None:
        """Give the device's memory back. May be called again."""
        self._close_compiler()
        for name in ("graphs", "model", "pool", "last_tokens", "logits", "extras"):
            self.__dict__.pop(name, None)
        gc.collect()
        if self.device.type == "cuda":
            with capturing:
                wait_for_device(self.device)
                torch.cuda.empty_cache()
