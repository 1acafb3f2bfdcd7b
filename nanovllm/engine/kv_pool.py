"""`KVCachePool`: the memory that a rank's layers keep from step to step; how many blocks fit."""

import logging

import numpy as np
import torch
from torch import nn

from nanovllm.config import Config
from nanovllm.distributed.group import Group
from nanovllm.layers.base import Per, State, StatefulLayer
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
        device: torch.device of the tensors.

    Attributes:
        group: the ranks, as given.
        num_blocks: number of KV blocks that there are.
        num_rows: number of rows by sequence, for all that may run and for padding.
        block_bytes: bytes of a block in all layers, on this rank.
        sequence_bytes: bytes of a sequence in all layers, beside its blocks.
    """

    def __init__(
        self, model: nn.Module, config: Config, group: Group, device: torch.device
    ) -> None:
        stateful = (module for module in model.modules() if isinstance(module, StatefulLayer))
        self._layers = [(layer, states) for layer in stateful if (states := layer.states())]
        self._config, self.group, self._device = config, group, device
        self.num_rows = config.max_num_seqs + 1
        self.num_blocks = self.block_bytes = self.sequence_bytes = 0
        for state in (state for _, states in self._layers for state in states.values()):
            if state.per is Per.SEQUENCE:
                self.sequence_bytes += state.row_bytes
            else:
                self.block_bytes += state.row_bytes

    def how_many_fit(self, max_model_len: int, own_now: int, own_peak: int) -> int:
        """The number of blocks that the options ask for, or that the device has room for.

        Args:
            max_model_len: tokens of the longest sequence.
            own_now, own_peak: on a GPU, see `memory.num_blocks_for_cuda`.

        Raises:
            ValueError: if not one block fits.
        """
        config, block_bytes = self._config, self.block_bytes
        states = self.num_rows * self.sequence_bytes
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

    def allocate(self, num_blocks: int, num_rows: int | None = None) -> None:
        """Have this many blocks of zeros instead of those before.

        Args:
            num_blocks: number of KV blocks.
            num_rows: number of rows by sequence; None: one for each that may run, and one for
                padding.

        Raises:
            MemoryError, ValueError, torch.OutOfMemoryError: of numpy and torch, if they do not fit.
        """
        self.free()
        rows = self.num_rows if num_rows is None else num_rows
        counts = {Per.BLOCK: num_blocks, Per.SEQUENCE: rows}
        num_bytes = sum(
            _room(state, counts[state.per])
            for _, states in self._layers
            for state in states.values()
        )
        if self._device.type == "cpu":
            # numpy's zeros take physical memory only where they are written; torch's everywhere.
            pages = torch.from_numpy(np.zeros(num_bytes, np.uint8))
        else:
            pages = torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)
        begin = 0
        for layer, states in self._layers:
            tensors = {}
            for name, state in states.items():
                count = counts[state.per]
                used = pages[begin : begin + count * state.row_bytes]
                tensors[name] = used.view(state.dtype).view(count, *state.shape)
                begin += _room(state, count)
            layer.bind(**tensors)
        self.num_blocks = num_blocks

    def num_bytes(self, num_blocks: int) -> int:
        """Bytes of so many blocks, and of the rows by sequence."""
        return num_blocks * self.block_bytes + self.num_rows * self.sequence_bytes

    def free(self) -> None:
        """Have no blocks."""
        self.num_blocks = 0
        for layer, states in self._layers:
            empty = {name: torch.empty(0, dtype=state.dtype) for name, state in states.items()}
            layer.bind(**empty)

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


def _room(state: State, count: int) -> int:
    """Bytes of so many rows of a state, up to where the next may begin."""
    return cdiv(count * state.row_bytes, ALIGNMENT) * ALIGNMENT
