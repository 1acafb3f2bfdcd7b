"""`KVCachePool`: the memory of the KV blocks on one rank, and how many of them fit."""

import logging
import math
from itertools import chain

import numpy as np
import torch
from torch import nn

from nanovllm.checkpoint.model_config import ModelConfig
from nanovllm.config import Config
from nanovllm.distributed.group import Group
from nanovllm.layers.attention import Attention
from nanovllm.layers.linear import local_kv_heads
from nanovllm.sizing import memory
from nanovllm.tensors.fp8 import FP8
from nanovllm.tensors.kv_cache import KVCache

logger = logging.getLogger(__name__)


def block_shape(config: Config, model_config: ModelConfig, group: Group) -> tuple[int, int, int]:
    """(S, Hkv, D) of this rank."""
    num_kv_heads = len(local_kv_heads(model_config.num_key_value_heads, group))
    return config.kvcache_block_size, num_kv_heads, model_config.head_dim


class KVCachePool:
    """The blocks of keys and values. Each attention layer of the model is bound to its part.

    Args:
        model: on its device.
        config: the engine's options.
        model_config: the checkpoint's facts.
        group: the ranks that the model is split over.
        device, dtype: of the keys and values.

    Attributes:
        group: as given.
        block_bytes: of a block, on this rank.
        tensor: [2, L, N, S, Hkv, D] of `dtype`, empty while there are no blocks.
    """

    def __init__(
        self,
        model: nn.Module,
        config: Config,
        model_config: ModelConfig,
        group: Group,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._layers = [module for module in model.modules() if isinstance(module, Attention)]
        self._config, self.group = config, group
        self._device, self._dtype = device, dtype
        self._block_shape = block_shape(config, model_config, group)
        has_exponents = dtype == FP8
        self.block_bytes = memory.kv_block_bytes(
            len(self._layers), *self._block_shape, dtype.itemsize, has_exponents
        )
        self.tensor = torch.empty(0)

    def how_many_fit(self, max_model_len: int, own_now: int, own_peak: int) -> int:
        """How many blocks the options ask for, or the device has room for.

        Args:
            max_model_len: tokens of the longest sequence.
            own_now, own_peak: on a GPU, see `memory.num_blocks_for_cuda`.

        Raises:
            ValueError: if not one block fits.
        """
        config, block_bytes = self._config, self.block_bytes
        if config.num_kvcache_blocks != -1:
            return config.num_kvcache_blocks
        if config.kv_cache_memory_bytes is not None:
            return memory.num_blocks_for_limit(block_bytes, config.kv_cache_memory_bytes)
        if self._device.type == "cpu":
            per_seq = -(-max_model_len // config.kvcache_block_size)
            num_processes = self.group.size * config.data_parallel_size
            available = memory.available_cpu_memory() // num_processes
            limit = max(per_seq, memory.CPU_TOKENS // config.kvcache_block_size)
            most = min(config.max_num_seqs * per_seq, limit)
            return memory.num_blocks_for_cpu(block_bytes, available, most)
        free, total = torch.cuda.mem_get_info(self._device)
        return memory.num_blocks_for_cuda(
            block_bytes, total, free, own_now, own_peak, config.gpu_memory_utilization
        )

    def allocate(self, num_blocks: int) -> None:
        """Have this many blocks of zeros instead of those before.

        Raises:
            MemoryError, ValueError, torch.OutOfMemoryError: of numpy and torch, if they do not fit.
        """
        self.free()
        num_bytes = num_blocks * self.block_bytes
        if self._device.type == "cpu":
            # numpy's zeros take physical memory only where they are written; torch's everywhere.
            pages = torch.from_numpy(np.zeros(num_bytes, np.uint8))
        else:
            pages = torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)
        S, Hkv, D = self._block_shape
        shape = 2, len(self._layers), num_blocks, S, Hkv, D
        numbers = pages[: math.prod(shape) * self._dtype.itemsize]
        self.tensor = numbers.view(self._dtype).view(shape)
        parts = [self.tensor]
        if self._dtype == FP8:  # the exponents lie behind the codes
            exponents = pages[numbers.nbytes :].view(torch.int8)
            parts.append(exponents.view(2, len(self._layers), num_blocks, Hkv, S))
        by_layer = zip(*(part.unbind(1) for part in parts), strict=True)
        self._bind([KVCache(*chain.from_iterable(layer)) for layer in by_layer])

    def free(self) -> None:
        """Have no blocks."""
        self.tensor = torch.empty(0)
        self._bind([KVCache(self.tensor, self.tensor)] * len(self._layers))

    def _bind(self, caches: list[KVCache]) -> None:
        for layer, cache in zip(self._layers, caches, strict=True):
            layer.bind_kv_cache(cache)

    def log(self, max_model_len: int) -> None:
        """Say how large the pool is."""
        block_size, num_blocks = self._config.kvcache_block_size, self.tensor.shape[2]
        tokens = num_blocks * block_size
        logger.info(
            "KV cache: %d blocks of %d tokens (%.2f GiB), %.1f sequences of %d tokens at once",
            num_blocks,
            block_size,
            num_blocks * self.block_bytes / memory.GIB,
            tokens / max_model_len,
            max_model_len,
        )
        if tokens < max_model_len:
            logger.warning(
                "the KV cache holds %d tokens, so sequences end there and not at max_model_len %d",
                tokens,
                max_model_len,
            )
