"""`Step`: the whole step on the device, from token ids to tokens; `Built`: all that steps need."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch

from nanovllm.engine.single_tokens import OneByOne
from nanovllm.engine.step_inputs import Computed, StepInputs, fill_in
from nanovllm.layers.base import Build
from nanovllm.layers.sampler import Sampler
from nanovllm.models.qwen3 import Qwen3ForCausalLM
from nanovllm.utils.context import decodes_as_prompts, use_context

if TYPE_CHECKING:
    from nanovllm.compiling.compiler import Compiler
    from nanovllm.engine.kv_pool import KVCachePool
    from nanovllm.engine.plan import SlotTable
    from nanovllm.graphs.step_graphs import StepGraphs
    from nanovllm.sampling.extras import Extras
    from nanovllm.updates.sleeper import Sleeper
    from nanovllm.updates.weights import Weights
    from nanovllm.vision.encoder import Encoder

Compute: TypeAlias = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # of a model
ComputeLogits: TypeAlias = Callable[..., torch.Tensor]  # `Qwen3ForCausalLM.compute_logits`


class Step:
    """The model, and the sampler without controls. CUDA graphs capture it.

    Args:
        model: model on its device.
        build: values that its layers were built with.
        vocab_size: V
        max_num_seqs: maximum number of running sequences.
        device: torch.device of the model.

    Attributes:
        model: the model, as given.
        compute_logits: its LM head: [n, M] -> [n, V of this rank], see `ParallelLMHead.forward`.
        last_tokens: [max_num_seqs + 1] int32, each running sequence's last sampled token, by slot;
            row 0 is for padding.
        logits: [max_num_seqs, V of this rank], on a GPU those of the last step, outside of graphs.
    """

    def __init__(
        self,
        model: Qwen3ForCausalLM,
        build: Build,
        vocab_size: int,
        max_num_seqs: int,
        device: torch.device,
    ) -> None:
        self.model, self._group = model, build.group
        self._fixed_order = build.fixed_order
        self._one_by_one = OneByOne(model) if build.one_by_one else None
        self._compute: Compute = self._one_by_one or model
        self.compute_logits: ComputeLogits = (self._one_by_one or model).compute_logits
        self._max_model_len = build.max_model_len
        self.sampler = Sampler(vocab_size, build.group)
        self.last_tokens = torch.zeros(max_num_seqs + 1, dtype=torch.int32, device=device)
        self.logits: torch.Tensor | None = None
        if device.type != "cpu":
            shape = max_num_seqs, model.lm_head.weight.num_rows
            self.logits = torch.empty(shape, dtype=build.dtype, device=device)

    def abridged(self) -> AbstractContextManager[None]:
        """The scope of steps that only show what steps need, see `OneByOne.abridged`."""
        return nullcontext() if self._one_by_one is None else self._one_by_one.abridged()

    def run_model(self, inputs: StepInputs) -> Computed:
        """Compute a step."""
        self._group.check()
        input_ids, rows = inputs.input_ids, inputs.sample_rows
        context = dataclasses.replace(inputs.context, longest=self._max_model_len)
        if context.num_decodes:
            assert context.slots is not None
            decode_slots = context.slots[: context.num_decodes]
            input_ids = fill_in(input_ids, decode_slots, self.last_tokens)
            if self._fixed_order:  # before the embedding: later kernels may read them early
                decodes_as_prompts(context)
        with use_context(context):
            hidden = states = self._compute(input_ids, inputs.positions)
        if rows is not None and context.kept_rows is None:
            states = hidden.index_select(0, rows)
        n, divisors = len(states), inputs.sampling.logprob_divisors
        if not n:  # chunks of prompts only
            return Computed(input_ids.new_empty(0), states, hidden, divisors)
        out = None if self.logits is None else self.logits[:n]
        logits = self.compute_logits(states, out)
        tokens = self.sampler(logits, inputs.sampling, self.last_tokens)
        return Computed(tokens, logits, hidden, divisors)


@dataclass(frozen=True)
class Built:
    """All that a rank's steps need.

    Attributes:
        device: torch.device of this rank.
        build: values that the layers were built with.
        backend_reason: reason for the attention backend.
        members: decodes of a tile of shared prefixes; 0: none share.
        step: the model and the sampler.
        pool: the memory of the KV blocks.
        num_blocks: KV blocks, of each kind, of the smallest rank's pool.
        table: the rank's memory of running sequences.
        graphs: CUDA graphs of steps; None in eager mode.
        extras: results of a step that only some requests ask for.
        compiler: compiler of kernels beside this process; None where none is.
        weights: the model's weights, to be filled again.
        sleeper: object that gives the memory back; None without `enable_sleep_mode`.
        encoder: encoder of images; None: the model reads none.
    """

    device: torch.device
    build: Build
    backend_reason: str
    members: int
    step: Step
    pool: KVCachePool
    num_blocks: int
    table: SlotTable
    graphs: StepGraphs | None
    extras: Extras
    compiler: Compiler | None
    weights: Weights
    sleeper: Sleeper | None
    encoder: Encoder | None = None

    @property
    def pool_tokens(self) -> int:
        """The number of tokens of the longest sequence that the pool holds, alone."""
        return self.pool.max_tokens(self.num_blocks)
