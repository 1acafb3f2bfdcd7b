"""`StaticInputs`: what CUDA graphs read, always at the same addresses, padded to a `Shape`."""

import dataclasses
import functools
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch

from nanovllm.engine.plan import Batch
from nanovllm.engine.step_inputs import StepInputs
from nanovllm.layers.sampler import SamplingMetadata
from nanovllm.scheduling.prefixes import most_tiles
from nanovllm.utils.context import Context, Prefixes
from nanovllm.utils.integers import cdiv

# Shapes have room for so many prompts, and a multiple of TOKENS of them.
PROMPTS, TOKENS, MOST_TOKENS = 8, 128, 2048
# Multiplications of a layer that an H200 is done with in less time (0.5 ms) than the host takes to
# launch the layer's kernels one by one. By data sheets, GPUs of other generations have a third of
# its rate or less.
HIDDEN, HIDDEN_BY_OTHERS = 2**37, 2**35
FAST = 9, 10  # compute capabilities


class Shape(NamedTuple):
    """What a graph has room for.

    Attributes:
        decodes: D
        tokens: of prompts, a multiple of TOKENS; 0: there are none.
        shares: whether decodes share prefixes.
    """

    decodes: int
    tokens: int = 0
    shares: bool = False

    @property
    def prompts(self) -> int:
        """P"""
        return PROMPTS if self.tokens else 0


def most_tokens(numbers: float, capability: tuple[int, int]) -> int:
    """Of prompts, for which graphs pay: the device takes longer for more of them than the host to
    launch the step, and would compute their padding, too.

    Args:
        numbers: of a layer's matrices, by which a token is multiplied.
        capability: of the device.
    """
    hidden = HIDDEN if capability[0] in FAST else HIDDEN_BY_OTHERS
    return min(MOST_TOKENS, int(hidden / numbers) // TOKENS * TOKENS)


class Parts(NamedTuple):
    """The parts of a buffer of int32, as arrays of numpy or as tensors. Rows of decodes come first,
    and those of prompts from the D-th on; up to N sequences sample.
    """

    input_ids: Any  # [D + T]
    positions: Any  # [D + T]
    slot_mapping: Any  # [D + T]
    context_lens: Any  # [D + P]
    block_tables: Any  # [D + P, W]
    sample_rows: Any  # [N]
    lens: Any  # [N], `context_lens` of those that sample
    slots: Any  # [N]
    temperatures: Any  # [N], the bits of float32
    random_keys: Any  # [2, N]
    cu_seqlens_q: Any  # [P + 1]
    cu_seqlens_k: Any  # [P + 1]
    prefix_lens: Any  # [D] of `SharedPrefixes`, as the next three; [0] if nothing is shared
    prefix_rows: Any
    prefix_begins: Any
    prefix_ends: Any


_NONE = np.zeros(0, np.int32)
NOTHING = Batch(
    num_decodes=0,
    input_ids=_NONE,
    positions=_NONE,
    slot_mapping=_NONE,
    context_lens=_NONE,
    block_tables=_NONE.reshape(0, 0),
    cu_seqlens_q=np.zeros(1, np.int32),
    cu_seqlens_k=np.zeros(1, np.int32),
    slots=_NONE,
    samples=np.zeros(0, np.bool_),
    sample_rows=_NONE,
    temperatures=np.zeros(0, np.float32),
    random_keys=_NONE.reshape(2, 0),
)


def sizes_of(shape: Shape, width: int, max_num_seqs: int) -> list[int]:
    """The numbers of each of the `Parts`; width: W, blocks of the longest sequence."""
    D, P = shape.decodes, shape.prompts
    T, B, N = D + shape.tokens, D + P, min(D + P, max_num_seqs)
    return [*[T] * 3, B, B * width, *[N] * 4, 2 * N, *[P + 1] * 2, *[D * shape.shares] * 4]


def divide(buffer: Any, shape: Shape, width: int, max_num_seqs: int) -> Parts:
    """The parts of a buffer, each at a multiple of 16 bytes, as kernels are compiled for."""
    sizes = sizes_of(shape, width, max_num_seqs)
    begins = accumulate(map(_spaced, sizes[:-1]), initial=0)
    parts = Parts(*(buffer[begin : begin + n] for begin, n in zip(begins, sizes, strict=True)))
    tables, keys = parts.block_tables.reshape(-1, width), parts.random_keys.reshape(2, -1)
    return parts._replace(block_tables=tables, random_keys=keys)


def _spaced(size: int) -> int:
    return cdiv(size, 4) * 4


@functools.cache
def room_for(shape: Shape, width: int, max_num_seqs: int) -> int:
    """Numbers of a buffer that has all parts."""
    return sum(map(_spaced, sizes_of(shape, width, max_num_seqs)))


def _place(part: np.ndarray, values: np.ndarray, n: int, begin: int, padding: int) -> None:
    """The first n values at the beginning, the others from `begin` on, and `padding` elsewhere."""
    part[:n], part[n:] = values[:n], padding
    if len(values) > n:
        part[begin : begin + len(values) - n] = values[n:]


def lay_out(parts: Parts, shape: Shape, batch: Batch, max_num_seqs: int) -> None:
    """Write a batch that fits `shape` over the batch before.

    Padding computes nothing of use: slot mapping -1 is not stored, context length 0 reads nothing,
    and what is sampled goes to the row past the last of the table of last tokens. Tokens behind
    those of the prompts belong to none, so attention leaves them any numbers.
    """
    n, D = batch.num_decodes, shape.decodes
    width = batch.block_tables.shape[1]
    for part, values, padding in (
        (parts.input_ids, batch.input_ids, 0),
        (parts.positions, batch.positions, 0),
        (parts.slot_mapping, batch.slot_mapping, -1),
        (parts.context_lens, batch.context_lens, 0),
        (parts.block_tables[:, :width], batch.block_tables, 0),
    ):
        _place(part, values, n, D, padding)
    parts.block_tables[:, width:] = 0
    rows, temperatures = batch.sample_rows, batch.temperatures.view(np.int32)
    shared = batch.prefixes or [_NONE] * 4
    for part, values, padding in (
        (parts.sample_rows, rows + np.where(rows < n, 0, D - n), 0),
        (parts.lens, batch.context_lens, 0),
        (parts.slots, batch.slots, max_num_seqs),
        (parts.temperatures, temperatures, 0),
        (parts.random_keys.T, batch.random_keys.T, 0),
        (parts.cu_seqlens_q, batch.cu_seqlens_q, batch.cu_seqlens_q[-1]),
        (parts.cu_seqlens_k, batch.cu_seqlens_k, batch.cu_seqlens_k[-1]),
        *((part, values, 0) for part, values in zip(parts[-4:], shared, strict=True)),
    ):
        part[: len(values)], part[len(values) :] = values, padding


class StaticInputs:
    """One buffer of int32 on the device, which each shape divides into `Parts` of its own, and
    pinned twins on the host.

    A step fills a twin and copies it in one go. There are two twins, taken in turn, and before one
    is filled again its last copy is waited for: the host may be a step ahead of the device.
    """

    def __init__(
        self, device: torch.device, max_num_seqs: int, table_width: int, most_tokens: int
    ) -> None:
        self._B, self._W = max_num_seqs, table_width
        size = room_for(Shape(max_num_seqs, most_tokens, True), table_width, max_num_seqs)
        self._device = torch.zeros(size, dtype=torch.int32, device=device)
        self._twins = [torch.zeros(size, dtype=torch.int32, pin_memory=True) for _ in range(2)]
        self._copied = [torch.cuda.Event() for _ in self._twins]
        self._divided: dict[Shape, list[Parts]] = {}  # of each twin
        self._turn = 0

    def fill(self, batch: Batch, shape: Shape) -> None:
        """Copy a batch to the device, padded to `shape`."""
        if shape not in self._divided:
            buffers = (twin.numpy() for twin in self._twins)
            self._divided[shape] = [divide(x, shape, self._W, self._B) for x in buffers]
        self._turn = 1 - self._turn
        self._copied[self._turn].synchronize()
        lay_out(self._divided[shape][self._turn], shape, batch, self._B)
        used = room_for(shape, self._W, self._B)
        self._device[:used].copy_(self._twins[self._turn][:used], non_blocking=True)
        self._copied[self._turn].record()

    def views(self, shape: Shape, members: int) -> StepInputs:
        """The device's inputs of this shape; `members`: decodes of a tile of shared prefixes."""
        parts = divide(self._device, shape, self._W, self._B)
        prefixes, rows = None, None
        if shape.shares:
            num_tiles = most_tiles(shape.decodes, members)
            lens, own, begins, ends = parts[-4:]
            prefixes = Prefixes(lens, own, begins[:num_tiles], ends[:num_tiles])
        context = Context(
            shape.decodes,
            parts.slot_mapping,
            parts.context_lens,
            parts.block_tables,
            prefixes=prefixes,
        )
        if shape.tokens:
            rows = parts.sample_rows
            context = dataclasses.replace(
                context,
                cu_seqlens_q=parts.cu_seqlens_q,
                cu_seqlens_k=parts.cu_seqlens_k,
                max_seqlen_q=shape.tokens,
                kept_rows=rows,
            )
        return StepInputs(
            input_ids=parts.input_ids,
            positions=parts.positions,
            context=context,
            decode_slots=parts.slots[: shape.decodes],
            sample_rows=rows,
            sampling=SamplingMetadata(
                parts.temperatures.view(torch.float32), parts.random_keys, parts.lens, parts.slots
            ),
        )
