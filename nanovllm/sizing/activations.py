"""The memory for activations of the largest steps, found at the start of an engine on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch

from nanovllm.config import Config
from nanovllm.engine.plan import Batch, fact_dtype, running_sum
from nanovllm.engine.step_inputs import StepInputs, to_device
from nanovllm.utils.device import capturing, wait_for_device
from nanovllm.utils.integers import cdiv

if TYPE_CHECKING:
    from nanovllm.engine.kv_pool import KVCachePool


def max_activations(
    compute: Callable[[StepInputs], object],
    pool: KVCachePool,
    config: Config,
    max_model_len: int,
    device: torch.device,
    max_bytes: int,
) -> int:
    """The bytes of activations: peak memory of the largest steps, less what stays after them.

    Tensors have the same sizes whether kernels run or are rehearsed (`Compiler.rehearsal`). This
    empties PyTorch's cache of memory.

    Args:
        compute: function that computes a step.
        pool: KV pool, without blocks.
        config, device: configuration and device of the engine.
        max_model_len: maximum length of a sequence, in tokens.
        max_bytes: bytes that rows with controls may need.
    """
    budget = config.max_num_batched_tokens
    with capturing:
        torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    pool.allocate(1, num_rows=1)
    for num_seqs in (config.max_num_seqs, 1):
        batch = warmup_batch(num_seqs, budget, max_model_len, config.kvcache_block_size)
        compute(to_device(batch, device))
    torch.empty(max_bytes, dtype=torch.uint8, device=device)
    wait_for_device(device)
    peak = torch.cuda.max_memory_allocated(device)
    pool.free()
    with capturing:
        torch.cuda.empty_cache()
    # The rest is no activations: weights, tables, other engines, libraries' workspaces.
    return peak - torch.cuda.memory_allocated(device)


def warmup_batch(num_seqs: int, num_tokens: int, max_model_len: int, block_size: int) -> Batch:
    """A prefill of `num_tokens` tokens, as far as `max_model_len` allows, in `num_seqs` sequences
    that all sample.

    No KV is stored (slot mapping -1), all block tables have block 0 only, and all sequences have
    slot 0.
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
        block_tables=np.zeros((num_seqs, cdiv(int(lens.max()), block_size)), np.int32),
        cu_seqlens_q=running_sum(lens),
        cu_seqlens_k=running_sum(lens),
        slots=np.zeros(num_seqs, np.int32),
        samples=np.ones(num_seqs, np.bool_),
        sample_rows=(np.cumsum(lens) - 1).astype(np.int32),
        facts=np.zeros(num_seqs, fact_dtype()),
        token_rows=np.repeat(np.arange(num_seqs, dtype=np.int32), lens),
    )
