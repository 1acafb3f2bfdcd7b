"""`KVCachePool`: the memory that a rank's layers keep from step to step; how many blocks fit."""

import logging

import numpy as np
import torch
from torch import nn

from nanovllm.config import Config
from nanovllm.distributed.group import Group
from nanovllm.layers.base import State, StatefulLayer
from nanovllm.sizing import memory
from nanovllm.utils.integers import cdiv

logger = logging.getLogger(__name__)

ALIGNMENT = 256  # bytes, of where a tensor begins


class KVCachePool:
    """The states of a model's layers: each declares its own (`StatefulLayer.states`), and is bound
    to its part.

    Args:
        model: on its device.
        config: the engine's options.
        group: the ranks that the model is split over.
        device: of the tensors.

    Attributes:
        group: as given.
        num_blocks: KV blocks that there are.
        block_bytes: bytes of a block in all layers, on this rank.
        sequence_bytes: bytes of a sequence in all layers, beside its blocks.
    """

    def __init__(
        self, model: nn.Module, config: Config, group: Group, device: torch.device
    ) -> None:
        self._layers = [module for module in model.modules() if isinstance(module, StatefulLayer)]
        self._config, self.group, self._device = config, group, device
        self.num_blocks = self.block_bytes = self.sequence_bytes = 0
        for state in (state for layer in self._layers for state in layer.states().values()):
            if state.by_sequence:
                self.sequence_bytes += state.row_bytes
            else:
                self.block_bytes += state.row_bytes

    def how_many_fit(self, max_model_len: int, own_now: int, own_peak: int) -> int:
        """How many blocks the options ask for, or the device has room for.

        Args:
            max_model_len: tokens of the longest sequence.
            own_now, own_peak: on a GPU, see `memory.num_blocks_for_cuda`.

        Raises:
            ValueError: if not one block fits.
        """
        config, block_bytes = self._config, self.block_bytes
        states = (config.max_num_seqs + 1) * self.sequence_bytes
        if config.num_kvcache_blocks != -1:
            return config.num_kvcache_blocks
        if config.kv_cache_memory_bytes is not None:
            return memory.num_blocks_for_limit(block_bytes, config.kv_cache_memory_bytes)
        if self._device.type == "cpu":
            per_seq = -(-max_model_len // config.kvcache_block_size)
            num_processes = self.group.size * config.data_parallel_size
            available = memory.available_cpu_memory() // num_processes - states
            limit = max(per_seq, memory.CPU_TOKENS // config.kvcache_block_size)
            most = min(config.max_num_seqs * per_seq, limit)
            return memory.num_blocks_for_cpu(block_bytes, available, most)
        free, total = torch.cuda.mem_get_info(self._device)
        return memory.num_blocks_for_cuda(
            block_bytes, total, free, own_now, own_peak + states, config.gpu_memory_utilization
        )

    def allocate(self, num_blocks: int) -> None:
        """Have this many blocks of zeros instead of those before.

        Raises:
            MemoryError, ValueError, torch.OutOfMemoryError: of numpy and torch, if they do not fit.
        """
        self.free()
        states = [layer.states() for layer in self._layers]
        num_bytes = sum(self._room(state, num_blocks) for each in states for state in each.values())
        if self._device.type == "cpu":
            # numpy's zeros take physical memory only where they are written; torch's everywhere.
            pages = torch.from_numpy(np.zeros(num_bytes, np.uint8))
        else:
            pages = torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)
        begin = 0
        for layer, own in zip(self._layers, states, strict=True):
            tensors = {}
            for name, state in own.items():
                shape = self._num_rows(state, num_blocks), *state.shape
                used = pages[begin : begin + shape[0] * state.row_bytes]
                tensors[name] = used.view(state.dtype).view(shape)
                begin += self._room(state, num_blocks)
            layer.bind(**tensors)
        self.num_blocks = num_blocks

    def _num_rows(self, state: State, num_blocks: int) -> int:
        return self._config.max_num_seqs + 1 if state.by_sequence else num_blocks

    def _room(self, state: State, num_blocks: int) -> int:
        num_bytes = self._num_rows(state, num_blocks) * state.row_bytes
        return cdiv(num_bytes, ALIGNMENT) * ALIGNMENT

    def free(self) -> None:
        """Have no blocks."""
        self.num_blocks = 0
        for layer in self._layers:
            states = layer.states().items()
            layer.bind(**{name: torch.empty(0, dtype=state.dtype) for name, state in states})

    def log(self, max_model_len: int) -> None:
        """Say how large the pool is."""
        block_size, num_blocks = self._config.kvcache_block_size, self.num_blocks
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
