"""`Builder`: the start of a rank, which makes a `Built`."""

import logging
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch

from nanovllm.adapters.adapter import open_adapters
from nanovllm.checkpoint.model_config import ModelConfig
from nanovllm.compiling.compiler import Compiler, num_processes, target_of
from nanovllm.compiling.rehearsal import Rehearsal, run_distinct_layers
from nanovllm.config import Config
from nanovllm.device_memory import pieces
from nanovllm.distributed.group import Group
from nanovllm.engine.kv_pool import KVCachePool
from nanovllm.engine.plan import SlotTable
from nanovllm.engine.step import Built, Step
from nanovllm.graphs.static_inputs import max_captured_tokens
from nanovllm.graphs.step_graphs import StepGraphs
from nanovllm.images.processor import ImageProcessor
from nanovllm.layers.attention import members_of_tile
from nanovllm.layers.base import Build
from nanovllm.layers.weights.onednn import can_use_onednn, use_onednn
from nanovllm.layers.weights.quantized import dequantize, is_to_be_plain
from nanovllm.models import model_class
from nanovllm.models.loader import load_dummy, load_model
from nanovllm.models.qwen3 import Qwen3ForCausalLM
from nanovllm.sampling.extras import Extras
from nanovllm.sizing import memory
from nanovllm.sizing.activations import max_activations
from nanovllm.sizing.model_size import model_size
from nanovllm.startup.build import choose_build, read_image_processor
from nanovllm.tensors.fp8 import FP8
from nanovllm.updates import settling
from nanovllm.updates.sleeper import Sleeper
from nanovllm.updates.weights import Weights
from nanovllm.utils.device import (
    capability,
    computing_on,
    prepare_device,
    resolve_device,
    triton_refusal,
)
from nanovllm.utils.integers import cdiv
from nanovllm.vision.encoder import Encoder

logger = logging.getLogger(__name__)


class Builder:
    """The builder of a rank: model, sampler, pool, graphs, while other processes compile kernels.

    Args:
        config: the engine's options.
        model_config: the checkpoint's facts.
        group: the ranks that the model is split over; this is one of them.
    """

    def __init__(self, config: Config, model_config: ModelConfig, group: Group) -> None:
        self.config, self.model_config, self.group = config, model_config, group
        self.device = resolve_device(config.device, group.rank, group.size)
        self.compiler: Compiler | None = None

    def build(
        self,
        connect: Callable[[], None] = lambda: None,
        beside: Callable[[bool], None] = lambda has_time: None,
    ) -> Built:
        """Build everything.

        Args:
            connect: function that meets the other ranks, if the group has not.
            beside: function called while other processes compile kernels, and told whether any do.

        Raises:
            ValueError: for an option that the device or the checkpoint does not allow, a checkpoint
                that is not what its config says, and too little memory.
        """
        self.compiler = self.start_compiler()
        try:
            with computing_on(self.device):
                return self._build(connect, beside)
        except BaseException:
            self.close_compiler()
            raise

    def _build(self, connect: Callable[[], None], beside: Callable[[bool], None]) -> Built:
        config, group = self.config, self.group
        model_config = self.model_config
        build, reason = self.choose()
        shares = config.share_prefixes and config.enable_prefix_caching
        members = members_of_tile(model_config, build) if shares else 0
        max_prompt_tokens = self.max_prompt_tokens(build)
        connect()
        if not group.minimum(int(self.compiler is not None)):  # ranks do alike
            self.close_compiler()
        model = self.build_model(build)
        encoder = self.make_encoder(model, build)
        pool = KVCachePool(model, config, group, self.device)
        step = Step(model, build, model_config.vocab_size, config.max_num_seqs, self.device)
        extras = Extras(
            step.compute_logits,
            model_config.vocab_size,
            config.max_num_seqs,
            group,
            step.last_tokens,
            build.batch_invariant,
        )
        as_built = not is_to_be_plain(model)
        rehearse = partial(self.rehearse, step, pool, build, members, max_prompt_tokens)
        if as_built:
            rehearse()
        beside(self.compiler is not None and self.compiler.num_pending > 0)
        self.load(model, build.dtype)
        sleeper = self.make_sleeper(model, step, encoder)
        if not as_built:
            rehearse()
        activations = self.measure(step, pool, extras, build, encoder)
        own = weight_bytes(model) + (0 if encoder is None else encoder.store.nbytes)
        num_blocks = self.allocate_kv_cache(pool, own, activations, build.max_model_len)
        if sleeper is not None and pool.piece is not None:
            sleeper.add(pool.piece)
        width = self.table_width(pool.max_tokens(num_blocks), build)
        graphs = None
        if self.can_capture(build):
            sizes = width, members, max_prompt_tokens
            graphs = self.capture_cudagraph(step, pool, *sizes, activations)
        if self.compiler is not None:
            self.compiler.load(self.device)
        group.minimum(0)  # all ranks are there
        return Built(
            device=self.device,
            build=build,
            backend_reason=reason,
            members=members,
            step=step,
            pool=pool,
            num_blocks=num_blocks,
            table=SlotTable(config.max_num_seqs + 1, width, len(pool.kinds)),
            graphs=graphs,
            extras=extras,
            compiler=self.compiler,
            weights=Weights(model, self.device, Path(config.model), model_config.is_part),
            sleeper=sleeper,
            encoder=encoder,
        )

    def choose(self) -> tuple[Build, str]:
        """See `choose_build`."""
        return choose_build(self.config, self.model_config, self.group, self.device)

    def start_compiler(self) -> Compiler | None:
        """The compile server; None where no kernels of ours run, or no process can be started."""
        if self.device.type != "cuda" or triton_refusal(self.device) is not None:
            return None
        preparing = prepare_device(self.device)
        try:
            num_ranks = self.group.size * self.config.data_parallel_size
            return Compiler(target_of(self.device), num_processes(num_ranks))
        except OSError as error:
            logger.warning(
                "the compile server cannot be started (%s): kernels are compiled at their first "
                "launch, which takes longer",
                error,
            )
            return None
        finally:
            preparing.join()

    def close_compiler(self) -> None:
        """Compile nothing more."""
        if self.compiler is not None:
            self.compiler.close()
            self.compiler = None

    def build_model(self, build: Build) -> Qwen3ForCausalLM:
        """The model on its device, its weights uninitialised, and what lets kernels sum over the
        ranks.
        """
        config, model = self.config, model_class(self.model_config.architecture)
        if build.batch_invariant:
            self.group.keep_order()
        elif build.fused and self.group.size > 1 and not config.disable_custom_all_reduce:
            self.group.open_peer_memory(
                build.dtype,
                self.model_config.hidden_size,
                config.max_num_seqs,
                0 if model.adds_after_norms else config.max_num_batched_tokens,
            )
        with torch.device(self.device):
            return model(self.model_config, build).eval()

    def make_encoder(self, model: Qwen3ForCausalLM, build: Build) -> Encoder | None:
        """The encoder of images; None if the model reads none. As in vLLM, its store has room for
        the tokens of a step, and for one image of any size.
        """
        vision = self.model_config.vision
        if vision is None:
            return None
        processor = read_image_processor(self.config, self.model_config)
        self.check_whole_images(build, processor)
        largest = min(build.max_model_len, processor.max_tokens)
        capacity = max(self.config.max_num_batched_tokens, largest)
        rope = next(iter(model.model.ropes.values())) if vision.mrope_section else None
        return Encoder(model.visual, vision, processor, rope, build, capacity, self.device)

    def check_whole_images(self, build: Build, processor: ImageProcessor) -> None:
        """ValueError if tokens of images see each other and the options would part them."""
        vision, most = self.model_config.vision, self.config.max_num_batched_tokens
        if vision is None or not vision.are_whole:
            return
        if processor.max_tokens > most:
            raise ValueError(
                f"`max_num_batched_tokens` must be at least {processor.max_tokens}, the tokens of "
                f"an image of this model, got {most}: raise it, or pass language_model_only=True"
            )
        if build.one_by_one:
            raise ValueError(
                "`batch_invariant` without kernels computes tokens one by one, but those of an "
                "image of this model see each other: pass language_model_only=True"
            )

    def load(self, model: Qwen3ForCausalLM, dtype: torch.dtype) -> None:
        """Fill the weights."""
        start = time.perf_counter()
        if self.config.load_format == "dummy":
            load_dummy(model, self.config.seed)
        else:
            load_model(
                model,
                Path(self.config.model),
                self.group.check,
                is_part=self.model_config.is_part,
                adapters=open_adapters(self.config.adapters),
            )
        dequantize(model)
        if self.config.fused_kernels and can_use_onednn(self.device, dtype):
            use_onednn(model)
        logger.info(
            "weights: %s, %.2f GiB in %s on %s, loaded in %.1f s",
            self.model_config.architecture,
            weight_bytes(model) / memory.GIB,
            str(dtype).removeprefix("torch."),
            self.device,
            time.perf_counter() - start,
        )

    def make_sleeper(
        self, model: Qwen3ForCausalLM, step: Step, encoder: Encoder | None
    ) -> Sleeper | None:
        """Move weights, logits and embeddings of images to memory that can sleep; None if the
        options do not ask for it.

        Raises:
            ValueError: if there is no such memory here.
        """
        if not self.config.enable_sleep_mode:
            return None
        if (reason := pieces.refusal(self.device)) is not None:
            raise ValueError(f"`enable_sleep_mode` {reason}")
        sleeper = Sleeper(model, settling.settle(model, self.device), self.device)
        if step.logits is not None:
            step.logits, piece = settling.move(step.logits)
            sleeper.add(piece)
        if encoder is not None:
            encoder.store, piece = settling.move(encoder.store)
            sleeper.add(piece)
        return sleeper

    def rehearse(
        self,
        step: Step,
        pool: KVCachePool,
        build: Build,
        members: int,
        max_prompt_tokens: int,
    ) -> None:
        """Have kernels compiled, whatever the weights are."""
        if self.compiler is None:
            return
        steps = Rehearsal(
            step.run_model,
            step.model,
            pool,
            self.config,
            self.model_config,
            self.group,
            self.device,
            max_model_len=build.max_model_len,
            members=members,
            max_prompt_tokens=max_prompt_tokens,
        )
        for rehearse in (steps.first_steps, steps.other_steps):
            with self.compiler.rehearsal(), step.abridged():
                rehearse()

    def measure(
        self,
        step: Step,
        pool: KVCachePool,
        extras: Extras,
        build: Build,
        encoder: Encoder | None = None,
    ) -> int:
        """Bytes that activations take at most. With a compiler no kernel is waited for."""
        if self.device.type == "cpu":
            return 0
        rehearsal = nullcontext() if self.compiler is None else self.compiler.rehearsal()
        with rehearsal, step.abridged():
            most = max_activations(
                partial(run_distinct_layers, step.run_model, step.model, of_each=2),
                pool,
                self.config,
                build.max_model_len,
                self.device,
                extras.max_bytes,
            )
        if self.compiler is not None:
            self.compiler.finish()
        if encoder is not None:
            most += self.config.max_num_batched_tokens * encoder.max_bytes_of_step
            most = max(most, encoder.measure())
        return most + (build.backend.max_gathered() if build.cache_dtype == FP8 else 0)

    def allocate_kv_cache(
        self, pool: KVCachePool, own: int, activations: int, max_model_len: int
    ) -> int:
        """Allocate as many blocks as fit all ranks beside `own` bytes that are held and those of
        `activations`, and return their number.
        """
        own += self.group.peer_bytes
        pool.limit_rows(own, own + activations)
        num_blocks = self.group.minimum(pool.how_many_fit(max_model_len, own, own + activations))
        try:
            pool.allocate(num_blocks)
        except (MemoryError, ValueError, OSError, torch.OutOfMemoryError):  # see `allocate`
            size = pool.num_bytes(num_blocks) / memory.GIB
            raise ValueError(
                f"a KV cache of {num_blocks} blocks ({size:.2f} GiB) does not fit into "
                "the device's memory: lower num_kvcache_blocks or kv_cache_memory_bytes"
            ) from None
        pool.log(max_model_len)
        return num_blocks

    def table_width(self, pool_tokens: int, build: Build) -> int:
        """Blocks of the longest sequence."""
        return cdiv(min(build.max_model_len, pool_tokens), self.config.kvcache_block_size)

    def can_capture(self, build: Build) -> bool:
        """Whether CUDA graphs are wanted, and possible: plain experts, and plain layers with
        states, wait for the device, and so do tokens that are computed one by one.
        """
        if self.device.type == "cpu" or self.config.enforce_eager or build.one_by_one:
            return False
        waits = self.model_config.experts is not None or self.model_config.is_recurrent
        return build.backend.supports_cuda_graph and (build.fused or not waits)

    def capture_cudagraph(
        self,
        step: Step,
        pool: KVCachePool,
        width: int,
        members: int,
        max_prompt_tokens: int,
        activations: int,
    ) -> StepGraphs:
        """Capture the decode step for all buckets of batch sizes.

        Args:
            step: the step to capture.
            pool: KV pool.
            width: W, blocks of the longest sequence.
            members: decodes of a tile of shared prefixes.
            max_prompt_tokens: maximum number of prompt tokens that graphs have room for.
            activations: bytes that the largest step needs.
        """
        return StepGraphs(
            step.run_model,
            self.device,
            pool.max_num_seqs,
            width,
            members,
            max_prompt_tokens,
            activations,
            prepare=partial(run_distinct_layers, step.run_model, step.model),
            windowed=len(pool.kinds) > 1,
        )

    def max_prompt_tokens(self, build: Build) -> int:
        """Tokens of prompts that a CUDA graph has room for, beside decodes; 0: none has any."""
        if self.device.type == "cpu" or not build.backend.captures_prompts:
            return 0
        if self.group.size > 1:  # several divide large steps
            return 0
        numbers = model_size(self.model_config).of_token / len(self.model_config.layers)
        most = max_captured_tokens(numbers, capability(self.device.index))
        return min(most, self.config.max_num_batched_tokens)


def weight_bytes(model: Qwen3ForCausalLM) -> int:
    """Bytes of the weights; a tied one counts once."""
    return sum(p.nbytes for p in model.parameters())
