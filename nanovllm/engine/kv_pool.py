"""`KVCachePool`: the memory that a rank's layers keep from step to step, and its number of blocks.

Layers that slide over a window may have blocks of their own, in the same pages as those of layers
that see all tokens: `nanovllm.windows.places`.
"""

import logging
from typing import Any

import numpy as np
import torch
from torch import nn

from nanovllm.config import Config
from nanovllm.device_memory.pieces import Piece
from nanovllm.distributed.group import Group
from nanovllm.layers.base import Per, State, StatefulLayer
from nanovllm.recurrent.state_rows import StateRows
from nanovllm.sizing import memory
from nanovllm.utils.integers import cdiv
from nanovllm.windows.pages import max_blocks_of_one, num_slabs
from nanovllm.windows.places import divide_pages

logger = logging.getLogger(__name__)

GIB = memory.GIB
ROWS_PER_SNAPSHOT = 8  # one of them is for a snapshot, where memory limits the number of rows
ALIGNMENT = 256  # bytes, of where a tensor begins


class KVCachePool:
    """The states of a model's layers: each declares its own (`StatefulLayer.states`), and is bound
    to its part.

    Args:
        model: model on its device.
        config: the engine's options.
        group: the ranks that the model is split over.
        device: torch.device of the tensors.

    Attributes:
        group: the ranks, as given.
        kinds: kinds of KV blocks.
        num_blocks: number of KV blocks, of each kind, that there is memory for.
        num_rows: number of rows by sequence: that of padding, one for each that may run, and those
            of snapshots.
        max_num_seqs: number of sequences that may run: that of the options, or as many as memory
            for their states allows.
        block_bytes: bytes of a block of each kind, on this rank.
        sequence_bytes: bytes of a sequence in all layers, beside its blocks.
        rows: the rows by sequence, once allocated.
        piece: its memory, with `enable_sleep_mode`.
    """

    def __init__(
        self, model: nn.Module, config: Config, group: Group, device: torch.device
    ) -> None:
        stateful = (module for module in model.modules() if isinstance(module, StatefulLayer))
        self._layers = [(layer, states) for layer in stateful if (states := layer.states())]
        self._config, self.group, self._device = config, group, device
        self.max_num_seqs = config.max_num_seqs
        self.num_rows = config.max_num_seqs + 1
        by_block = [_of(states, Per.BLOCK) for _, states in self._layers]
        self._plan = divide_pages(by_block)
        self.kinds = self._plan.kinds
        self._ratio = max(kind.pages for kind in self.kinds)
        # The states by block of each place of a page: those of its first layer.
        self._places: dict[int, dict[str, State]] = {}
        for states, place in zip(by_block, self._plan.places, strict=True):
            if place is not None:
                self._places.setdefault(place[0], states)
        self._page_bytes = sum(map(_row_bytes, self._places.values()))
        self.num_blocks = 0
        self.rows: StateRows | None = None
        self.piece: Piece | None = None
        self.block_bytes = self._page_bytes * sum(kind.pages for kind in self.kinds)
        self.sequence_bytes = sum(_row_bytes(_of(s, Per.SEQUENCE)) for _, s in self._layers)

    @property
    def snapshot_rows(self) -> range:
        """The rows for snapshots of states."""
        return range(self.max_num_seqs + 1, self.num_rows)

    def limit_rows(self, own_now: int, own_peak: int) -> None:
        """Take no more rows by sequence than half of the memory for blocks and rows holds, on all
        ranks. Arguments: see `how_many_fit`.

        Raises:
            ValueError: if not one fits beside that of padding.
        """
        if not self.sequence_bytes:
            return
        config = self._config
        if config.kv_cache_memory_bytes is not None:
            available = config.kv_cache_memory_bytes
        elif self._device.type == "cpu":
            available = min(memory.CPU_LIMIT, self._cpu_memory())
        else:
            free, total = torch.cuda.mem_get_info(self._device)
            available = memory.available_for_cuda(
                total, free, own_now, own_peak, config.gpu_memory_utilization
            )
        fit = self.group.minimum(max(0, available // 2 // self.sequence_bytes)) - 1
        if fit < 1:
            raise ValueError(
                f"no memory for states of sequences: each takes {self.sequence_bytes / GIB:.3f} "
                f"GiB, and half of what is left for them and the KV cache is "
                f"{available / 2 / GIB:.2f} GiB; free memory, or use a smaller model"
            )
        spare = 0
        if config.enable_prefix_caching:
            spare = min(max(1, fit // ROWS_PER_SNAPSHOT), max(1, config.max_num_seqs // 2), fit - 1)
        self.max_num_seqs = min(fit - spare, config.max_num_seqs)
        self.num_rows = 1 + self.max_num_seqs + spare
        asked = ""
        if self.max_num_seqs < config.max_num_seqs:
            asked = f" of the {config.max_num_seqs} of max_num_seqs, for want of memory"
        logger.info(
            "states: %d sequences at once%s, room for %d snapshots%s; %.2f GiB, %.3g MiB each",
            self.max_num_seqs,
            asked,
            spare,
            "" if spare else ", so no prefix cache",
            self.num_rows * self.sequence_bytes / GIB,
            self.sequence_bytes / 2**20,
        )

    def _cpu_memory(self) -> int:
        """Bytes that this process may use on a CPU."""
        num_processes = self.group.size * self._config.data_parallel_size
        return memory.available_cpu_memory() // num_processes

    def how_many_fit(self, max_model_len: int, own_now: int, own_peak: int) -> int:
        """The number of blocks that the options ask for, or that the device has room for.

        Args:
            max_model_len: tokens of the longest sequence.
            own_now, own_peak: memory used on a GPU, see `memory.num_blocks_for_cuda`.

        Raises:
            ValueError: if not one block fits.
        """
        config, block_bytes = self._config, self.block_bytes
        if config.num_kvcache_blocks != -1:
            return config.num_kvcache_blocks
        if config.kv_cache_memory_bytes is not None:
            limit = config.kv_cache_memory_bytes - self.num_rows * self.sequence_bytes
            most = memory.num_blocks_for_limit(block_bytes, limit)
            return most if most == 1 or self._bytes_of_pages(most) <= limit else most - 1
        # Rows by sequence, and slabs that are not full.
        beside = self.num_bytes(1) - block_bytes
        if self._device.type == "cpu":
            per_seq = -(-max_model_len // config.kvcache_block_size)
            available = self._cpu_memory() - beside
            limit = max(per_seq, memory.CPU_TOKENS // config.kvcache_block_size)
            most = min(config.max_num_seqs * per_seq, limit)
            return memory.num_blocks_for_cpu(block_bytes, available, most)
        free, total = torch.cuda.mem_get_info(self._device)
        return memory.num_blocks_for_cuda(
            block_bytes, total, free, own_now, own_peak + beside, config.gpu_memory_utilization
        )

    def allocate(self, num_blocks: int, num_rows: int | None = None) -> None:
        """Have this many blocks of zeros instead of those before.

        Args:
            num_blocks: number of KV blocks.
            num_rows: number of rows by sequence; None: one for each that may run, and one for
                padding.

        Raises:
            MemoryError, ValueError, OSError, torch.OutOfMemoryError: of numpy, mmap and torch, if
                they do not fit.
        """
        self.free()
        rows = self.num_rows if num_rows is None else num_rows
        num_pages = self._num_pages(num_blocks)
        wanted: dict[tuple[Any, str], tuple[State, int]] = {}
        for place, states in self._places.items():
            wanted |= {(place, name): (state, num_pages) for name, state in states.items()}
        for layer, states in self._layers:
            own = _of(states, Per.SEQUENCE)
            wanted |= {(layer, name): (state, rows) for name, state in own.items()}
        piece, tensors = self._zeros(wanted)
        for (layer, states), where in zip(self._layers, self._plan.places, strict=True):
            bound = {name: tensors[layer, name] for name in _of(states, Per.SEQUENCE)}
            if where is not None:
                place, page = where
                bound |= {name: tensors[place, name][page:] for name in self._places[place]}
            layer.bind(**bound)
        by_sequence = [
            tensors[layer, name]
            for layer, states in self._layers
            for name in _of(states, Per.SEQUENCE)
        ]
        self.rows = StateRows(piece, by_sequence)
        self.num_blocks = num_blocks

    def _zeros(
        self, wanted: dict[tuple[Any, str], tuple[State, int]]
    ) -> tuple[torch.Tensor, dict[tuple[Any, str], torch.Tensor]]:
        """One piece of memory, and tensors of these states in it, with so many rows each."""
        num_bytes = sum(_room(state, count) for state, count in wanted.values())
        if self._config.enable_sleep_mode:
            self.piece = Piece(num_bytes, self._device)
            piece = self.piece.bytes
        elif self._device.type == "cpu":
            # numpy's zeros take physical memory only where they are written; torch's everywhere.
            piece = torch.from_numpy(np.zeros(num_bytes, np.uint8))
        else:
            piece = torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)
        tensors, begin = {}, 0
        for key, (state, count) in wanted.items():
            used = piece[begin : begin + count * state.row_bytes]
            tensors[key] = used.view(state.dtype).view(count, *state.shape)
            begin += _room(state, count)
        return piece, tensors

    def num_bytes(self, num_blocks: int) -> int:
        """Bytes of so many blocks, and of the rows by sequence."""
        return self._bytes_of_pages(num_blocks) + self.num_rows * self.sequence_bytes

    def _num_pages(self, num_blocks: int) -> int:
        return num_slabs(num_blocks, self.kinds) * self._ratio

    def _bytes_of_pages(self, num_blocks: int) -> int:
        return self._num_pages(num_blocks) * self._page_bytes

    def max_tokens(self, num_blocks: int) -> int:
        """The number of tokens of the longest sequence that so many blocks hold, alone."""
        block_size, (*_, sliding) = self._config.kvcache_block_size, self.kinds
        # Blocks that a step sees or computes; the first and the last are not full.
        step = sliding.window + self._config.max_num_batched_tokens
        most = cdiv(step, block_size) + 2
        return max_blocks_of_one(num_blocks, self.kinds, most) * block_size

    def free(self) -> None:
        """Have no blocks."""
        self.num_blocks, self.rows, self.piece = 0, None, None
        for layer, states in self._layers:
            empty = {name: torch.empty(0, dtype=state.dtype) for name, state in states.items()}
            layer.bind(**empty)

    def log(self, max_model_len: int) -> None:
        """Say how large the pool is."""
        block_size, num_blocks = self._config.kvcache_block_size, self.num_blocks
        tokens = self.max_tokens(num_blocks)
        sliding, per_seq = self.kinds[-1], cdiv(max_model_len, block_size)
        kept = cdiv(sliding.window, block_size) + 1 if sliding.window else per_seq
        pages = per_seq * sum(kind.pages for kind in self.kinds[:-1])
        pages += min(kept, per_seq) * sliding.pages
        logger.info(
            "KV cache: %d blocks of %d tokens (%.2f GiB), %.1f sequences of %d tokens at once",
            num_blocks,
            block_size,
            self._bytes_of_pages(num_blocks) / GIB,
            self._num_pages(num_blocks) / pages,
            max_model_len,
        )
        if tokens < max_model_len:
            logger.warning(
                "the KV cache holds %d tokens, so sequences end there, before max_model_len %d%s",
                tokens,
                max_model_len,
                "" if len(self.kinds) == 1 else "; a lower max_num_batched_tokens leaves room",
            )


def _of(states: dict[str, State], per: Per) -> dict[str, State]:
    return {name: state for name, state in states.items() if state.per is per}


def _row_bytes(states: dict[str, State]) -> int:
    return sum(state.row_bytes for state in states.values())


def _room(state: State, count: int) -> int:
    """Bytes of so many rows of a state, up to where the next may begin."""
    return cdiv(count * state.row_bytes, ALIGNMENT) * ALIGNMENT
