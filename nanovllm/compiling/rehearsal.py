"""The rehearsal of an engine's steps: every kernel that a request may need is launched once,
without effect (`Compiler.rehearsal`). Kernels of every step come first, then those of only some
requests.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise, product

import numpy as np
import torch
from torch import nn

from nanovllm.checkpoint.model_config import ModelConfig
from nanovllm.config import Config
from nanovllm.distributed.group import Group
from nanovllm.engine.kv_pool import KVCachePool
from nanovllm.engine.plan import running_sum
from nanovllm.engine.step_inputs import Computed, StepInputs, to_device
from nanovllm.graphs.static_inputs import TOKENS, Shape, StaticInputs
from nanovllm.layers.attention import Attention
from nanovllm.layers.weights.weight import Weight
from nanovllm.models.qwen3 import Qwen3ForCausalLM
from nanovllm.sampling.controls import NO_FILTERS, NO_PENALTIES, PROCESSED, Controls, Reports
from nanovllm.sampling.extras import Extras
from nanovllm.sampling.logprobs import logprobs_of
from nanovllm.sampling_params import MAX_LOGPROBS
from nanovllm.sizing.activations import warmup_batch
from nanovllm.tensors.image_rows import ImageRows
from nanovllm.utils.integers import cdiv

# Numbers of tokens: together they use all kernels that any number uses, in all models' layers.
ROWS = (1, 2, 16, 32, 64, 128, 160, 192, 256, 512, 896, 1024, 2048)


@contextmanager
def distinct_layers(model: Qwen3ForCausalLM, of_each: int = 1) -> Iterator[None]:
    """Have a model compute only the first layer of each kind, and the last layer, which alone drops
    rows: these use all kernels of the model. Two `of_each` kind also use as much memory: the very
    first layer has no residual to add to.
    """
    own = model.model
    whole = own.layers
    formats = [_formats(layer) for layer in whole]
    kinds = list(zip(model.config.layers, formats, strict=True))
    chosen = {len(kinds) - 1}
    for kind in set(kinds):
        chosen.update([i for i, each in enumerate(kinds) if each == kind][:of_each])
    if len(set(formats)) > 1:  # a layer's first norm depends on the layer before, too
        pairs = list(pairwise(formats))
        for pair in set(pairs):
            chosen.update([pairs.index(pair), pairs.index(pair) + 1])
    own.layers = nn.ModuleList(whole[i] for i in sorted(chosen))
    try:
        yield
    finally:
        own.layers = whole


def _formats(layer: nn.Module) -> tuple[type[Weight], ...]:
    """The formats of a layer's matrices, which a checkpoint may leave unquantised."""
    return tuple(type(module) for module in layer.modules() if isinstance(module, Weight))


def run_distinct_layers(
    compute: Callable[[StepInputs], Computed],
    model: Qwen3ForCausalLM,
    inputs: StepInputs,
    of_each: int = 1,
) -> None:
    """Compute a step with a model's distinct layers only."""
    with distinct_layers(model, of_each):
        compute(inputs)


class Rehearsal:
    """The steps of all kinds.

    Args:
        compute: function that computes a step.
        model: model that it computes.
        pool: KV pool, without blocks.
        config, model_config, group, device: configurations, ranks and device of the engine.
        max_model_len: maximum length of a sequence in tokens.
        members: maximum number of decodes in a tile of a shared prefix; 0: prefixes are not shared.
        max_prompt_tokens: maximum number of prompt tokens in CUDA graphs.
    """

    def __init__(
        self,
        compute: Callable[[StepInputs], Computed],
        model: Qwen3ForCausalLM,
        pool: KVCachePool,
        config: Config,
        model_config: ModelConfig,
        group: Group,
        device: torch.device,
        *,
        max_model_len: int,
        members: int,
        max_prompt_tokens: int,
    ) -> None:
        self._compute, self._model, self._pool = compute, model, pool
        self._config, self._model_config, self._device = config, model_config, device
        self._group = group
        self._max_model_len, self._members = max_model_len, members
        self._budget = config.max_num_batched_tokens
        width = cdiv(max_model_len, config.kvcache_block_size)
        self._inputs = StaticInputs(
            device, config.max_num_seqs, width, members, max(TOKENS, max_prompt_tokens)
        )
        most = config.max_num_seqs
        powers = (1 << i for i in range(most.bit_length()))
        self._batches = sorted({most, *powers})  # decodes choose splits by these
        vision = model_config.vision
        # Whether tokens of images may see each other: those steps have kernels of their own.
        self._in_images = [False, True] if vision is not None and vision.are_whole else [False]

    def first_steps(self) -> None:
        """Rehearse decodes, for which the start waits, and the largest step, whose attention takes
        longest to compile.
        """
        with self._one_block():
            self._prompt(self._least(self._budget), self._budget)
            layers = [each for each in self._model.modules() if isinstance(each, Attention)]
            own = max(layer.max_fused_decodes for layer in layers)
            for size in (self._batches[-1], *(size for size in self._batches if size <= own)):
                self._decodes(Shape(size))
            for size in self._batches:
                beside = min(TOKENS, self._budget - size)
                if beside > 0:  # with prompts of other sizes, they use the kernels of decodes alone
                    self._decodes(Shape(size, beside))

    def other_steps(self) -> None:
        """Rehearse steps that only some requests cause."""
        with self._one_block():
            if self._pool.rows is not None and self._pool.sequence_bytes:
                self._pool.rows.copy(np.zeros((2, 1), np.int32))
            self._prompts()
            for size in self._batches[1:] if self._members else ():
                self._decodes(Shape(size, shares=True))
        if self._device.type == "cuda":
            self._controls()

    @contextmanager
    def _one_block(self) -> Iterator[None]:
        self._pool.allocate(1, num_rows=1)
        try:
            with distinct_layers(self._model):
                yield
        finally:
            self._pool.free()

    def _least(self, num_tokens: int) -> int:
        """The least number of sequences for `num_tokens` prompt tokens."""
        return min(self._config.max_num_seqs, cdiv(num_tokens, self._max_model_len))

    def _prompts(self) -> None:
        """Rehearse prompts of few sequences, and of many. Some follow a computed chunk."""
        for num_tokens in sorted((rows for rows in ROWS if rows < self._budget), reverse=True):
            self._prompt(self._least(num_tokens), num_tokens)
        for num_tokens in {2, self._budget} if any(self._in_images) else ():
            self._prompt(self._least(num_tokens), num_tokens, in_images=True)
        for num_tokens in {2, TOKENS, self._budget}:
            few = self._least(num_tokens)
            after_one = min(num_tokens, self._budget, few * (self._max_model_len - 1))
            longest = self._max_model_len - cdiv(after_one, few)
            for num_cached in {1, longest} if after_one >= few else ():
                for in_images in self._in_images:
                    self._prompt(few, after_one, num_cached, in_images)
        self._prompt(min(self._config.max_num_seqs, self._budget), self._budget)

    def _prompt(
        self, num_seqs: int, num_tokens: int, num_cached: int = 0, in_images: bool = False
    ) -> None:
        size = self._config.kvcache_block_size
        batch = warmup_batch(num_seqs, num_tokens, self._max_model_len, size)
        lens = batch.context_lens + num_cached
        batch = batch._replace(
            context_lens=lens,
            cu_seqlens_k=running_sum(lens),
            block_tables=np.zeros((num_seqs, cdiv(int(lens.max()), size)), np.int32),
        )
        inputs = to_device(batch, self._device)
        if in_images:
            rows = torch.empty(0, dtype=torch.int64, device=self._device)
            shape, dtype = (0, 1, self._model_config.hidden_size), self._model.lm_head.weight.dtype
            values = torch.empty(shape, dtype=dtype, device=self._device)
            images = ImageRows(rows, values, limits=inputs.positions + 1)
            inputs = inputs._replace(context=replace(inputs.context, images=images))
        self._compute(inputs)

    def _decodes(self, shape: Shape) -> None:
        """Rehearse decodes with the static inputs of CUDA graphs."""
        self._compute(self._inputs.view(shape))

    def _controls(self) -> None:
        """Rehearse draws with controls, log-probabilities and embeddings, for one row."""
        vocab_size, dtype = self._model_config.vocab_size, self._model.lm_head.weight.dtype
        zeros = partial(torch.zeros, device=self._device)
        ids, hidden = zeros(1, dtype=torch.int32), zeros(2, self._model_config.hidden_size)
        own = zeros(1, self._model.lm_head.weight.num_rows, dtype=dtype)
        computed = Computed(ids, own, hidden, zeros(1))
        batch = warmup_batch(1, 1, self._max_model_len, self._config.kvcache_block_size)
        for filters, penalties in product((False, True), repeat=2):
            extras = Extras(self._model.compute_logits, vocab_size, 1, self._group, ids)
            controls = one_row(vocab_size, filters, penalties)
            given = controls if self._group.rank == 0 else None
            extras.sample(batch, np.ones(1, np.bool_), computed, given)
        logits = zeros(1, vocab_size, dtype=dtype)
        logprobs_of(logits, ids, MAX_LOGPROBS)
        torch.stack(
            [hidden[-1].to(dtype).float(), hidden.to(dtype).sum(0, dtype=torch.float32) / 2]
        )


def one_row(vocab_size: int, filters: bool, penalties: bool) -> Controls:
    """The controls of one row, with all reports: a banned token, and filters and penalties if asked
    for.
    """
    top_k, top_p, min_p = (5, 0.9, 0.1) if filters else NO_FILTERS
    row = (1.1, 0.5, 0.5) if penalties else NO_PENALTIES
    return Controls(
        top_k=np.array([top_k], np.int32),
        top_p=np.array([top_p], np.float32),
        min_p=np.array([min_p], np.float32),
        penalties=np.array(row, np.float32)[:, None],
        edit_starts=np.array([0, 1], np.int32),
        edit_tokens=np.zeros(1, np.int32),
        edit_biases=np.zeros(1, np.float32),
        masks=np.zeros((1, cdiv(vocab_size, 32)), np.int32),
        mask_rows=np.zeros(1, np.int32),
        reset=np.zeros(0, np.int32),
        counts=np.zeros((3, 0), np.int32),
        reports=Reports(
            num_logprobs=np.zeros(1, np.int32),
            modes=np.full(1, PROCESSED, np.int32),
            divisors=np.ones(1, np.float32),
            label_rows=np.zeros(1, np.int32),
            label_tokens=np.zeros(1, np.int32),
            masks=np.ones(1, np.bool_),
        ),
    )
