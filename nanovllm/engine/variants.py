"""The calls that compile the kernels of attention and of sampling ahead of the first request."""

from collections.abc import Callable
from functools import partial

import torch

from nanovllm.config import Config
from nanovllm.engine.kv_cache import block_shape
from nanovllm.engine.step_inputs import fill_in
from nanovllm.layers.attention import scoring_of
from nanovllm.layers.base import Build
from nanovllm.layers.sampler import Sampler, SamplingMetadata
from nanovllm.model_config import ModelConfig
from nanovllm.utils.kv_cache import KVCache


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
