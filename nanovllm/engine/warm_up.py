"""The start of an engine on a GPU: kernels are compiled ahead of the first request, attention's and
those of sampling by themselves, and the largest steps show what memory they take.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from nanovllm.config import Config
from nanovllm.engine.kv_cache import KVCachePool, block_shape
from nanovllm.engine.plan import Batch, running_sum
from nanovllm.engine.step_inputs import Computed, StepInputs, fill_in, to_device
from nanovllm.layers.attention import scoring_of
from nanovllm.layers.base import Build
from nanovllm.layers.sampler import Sampler, SamplingMetadata
from nanovllm.model_config import ModelConfig
from nanovllm.utils.ahead import CompileAhead
from nanovllm.utils.device import capturing, wait_for_device
from nanovllm.utils.kv_cache import KVCache

SMALL_STEP = 256  # tokens up to which kernels depend on their number (`kernels.linear.MOST_ROWS`)


def attention_variants(
    config: Config, model_config: ModelConfig, build: Build, device: torch.device
) -> list[Callable[[], object]]:
    """Of all layers, by a cache of one block."""
    shape = block_shape(config, model_config, build.group)
    cache = KVCache.empty((1, *shape), build.cache_dtype or build.dtype, device)
    num_heads = model_config.num_attention_heads // build.group.size
    q = torch.zeros(1, num_heads, shape[-1], dtype=build.dtype, device=device)
    max_context = -(-build.max_model_len // shape[0]) * shape[0]
    sinks = q.new_zeros(num_heads) if model_config.attention_sinks else None
    layers = range(model_config.num_hidden_layers)
    scorings = {scoring_of(model_config, i, build.max_model_len) for i in layers}
    with_sinks = [scoring._replace(sinks=sinks) for scoring in scorings]
    return build.backend.variants(q, cache, max_context, with_sinks)


def sampling_variants(
    sampler: Sampler, logits: torch.Tensor, last_tokens: torch.Tensor, num_ranks: int
) -> list[Callable[[], object]]:
    """What begins and ends a decode step, of a full batch of zeros."""
    ids = torch.zeros(len(logits), dtype=torch.int32, device=logits.device)
    metadata = SamplingMetadata(ids.float(), torch.stack([ids, ids]), ids, ids)
    calls: list[Callable[[], object]] = [partial(fill_in, ids, ids, last_tokens)]
    if num_ranks == 1:  # several ranks sample together
        calls.append(partial(sampler, logits, metadata, last_tokens))
    return calls


def warm_up(
    compute: Callable[[StepInputs], Computed],
    pool: KVCachePool,
    config: Config,
    max_model_len: int,
    device: torch.device,
    most_bytes: int,
    ahead: CompileAhead,
) -> int:
    """Run the largest steps, and when threads have compiled the kernels that they were given, small
    ones of each power of two tokens.

    Args:
        compute: the step.
        pool: without blocks.
        config, device: of the engine.
        max_model_len: tokens of the longest sequence.
        most_bytes: that rows with controls may need.
        ahead: the threads.

    Returns:
        The most bytes that were allocated beside what is left: activations.
    """
    budget = config.max_num_batched_tokens
    with capturing:
        torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    pool.allocate(1)

    def run(num_seqs: int, num_tokens: int) -> None:
        batch = warmup_batch(num_seqs, num_tokens, max_model_len, config.kvcache_block_size)
        compute(to_device(batch, device))

    run(config.max_num_seqs, budget)
    run(1, budget)
    ahead.wait()  # or the same kernels would be compiled here, too
    for i in range(min(budget, SMALL_STEP).bit_length()):
        num_tokens = 1 << i
        run(min(config.max_num_seqs, -(-num_tokens // max_model_len)), num_tokens)
    torch.empty(most_bytes, dtype=torch.uint8, device=device)
    wait_for_device(device)
    peak = torch.cuda.max_memory_allocated(device)
    pool.free()
    with capturing:
        torch.cuda.empty_cache()
    # What is left are no activations: weights, tables, other engines, libraries' workspaces.
    return peak - torch.cuda.memory_allocated(device)


def warmup_batch(num_seqs: int, num_tokens: int, max_model_len: int, block_size: int) -> Batch:
    """A prefill of `num_tokens`, as far as `max_model_len` allows, in `num_seqs` sequences that all
    sample.

    Nothing is stored (slots are -1), and every block table points at block 0 only.
    """
    lens = np.full(num_seqs, num_tokens // num_seqs)
    lens[: num_tokens % num_seqs] += 1
    lens = np.minimum(lens, max_model_len)
    T = int(lens.sum())
    return Batch(
        num_decodes=0,
        input_ids=np.zeros(T, np.int32),
        positions=np.concatenate([np.arange(n, dtype=np.int32) for n in lens]),
        slot_mapping=np.full(T, -1, np.int32),
        context_lens=lens.astype(np.int32),
        block_tables=np.zeros((num_seqs, -(-int(lens.max()) // block_size)), np.int32),
        cu_seqlens_q=running_sum(lens),
        cu_seqlens_k=running_sum(lens),
        slots=np.arange(num_seqs, dtype=np.int32),
        samples=np.ones(num_seqs, np.bool_),
        sample_rows=(np.cumsum(lens) - 1).astype(np.int32),
        temperatures=np.ones(num_seqs, np.float32),
        random_keys=np.zeros((2, num_seqs), np.int32),
    )
