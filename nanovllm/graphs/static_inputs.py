"""`StaticInputs`: the inputs of CUDA graphs, always at the same addresses, padded to a `Shape`."""

from typing import Any, NamedTuple

import numpy as np
import torch

from nanovllm.engine.plan import Batch, fact_dtype
from nanovllm.engine.step_inputs import StepInputs, view
from nanovllm.engine.step_layout import Size, divide, lay_out, num_words
from nanovllm.scheduling.prefixes import max_tiles

# Shapes have room for so many prompts, and a multiple of TOKENS of them.
PROMPTS, TOKENS, MAX_TOKENS = 8, 128, 2048
# Multiplications of a layer that an H200 is done with in less time (0.5 ms) than the host takes to
# launch the layer's kernels one by one. By data sheets, GPUs of other generations have a third of
# its rate or less.
HIDDEN, HIDDEN_BY_OTHERS = 2**37, 2**35
FAST = 9, 10  # compute capabilities


class Shape(NamedTuple):
    """The room of a graph.

    Attributes:
        decodes: D
        tokens: tokens of prompts, a multiple of TOKENS; 0: there are none.
        shares: whether decodes share prefixes.
    """

    decodes: int
    tokens: int = 0
    shares: bool = False

    @property
    def prompts(self) -> int:
        """P"""
        return PROMPTS if self.tokens else 0

    def size(self, width: int, max_num_seqs: int, members: int, windowed: bool = False) -> Size:
        """The room as numbers of rows.

        Args:
            width: W, blocks of the longest sequence.
            max_num_seqs: the most sequences that sample.
            members: decodes of a tile of shared prefixes.
            windowed: whether layers that slide have block tables of their own.
        """
        D, P = self.decodes, self.prompts
        samples = min(D + P, max_num_seqs)
        size = Size(D, self.tokens, P, samples, width, windowed=windowed)
        if not self.shares:
            return size
        return size._replace(sharing=D, members=D, tiles=max_tiles(D, members))


def max_captured_tokens(numbers: float, capability: tuple[int, int]) -> int:
    """The maximum number of prompt tokens in a captured step. For more the device takes longer than
    the host to launch the step, and would compute padding, too.

    Args:
        numbers: values of a layer's matrices that a token is multiplied by.
        capability: compute capability of the device.
    """
    hidden = HIDDEN if capability[0] in FAST else HIDDEN_BY_OTHERS
    return min(MAX_TOKENS, int(hidden / numbers) // TOKENS * TOKENS)


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
    facts=np.zeros(0, fact_dtype()),
    token_rows=_NONE,
)


class _Room(NamedTuple):
    """The room of a shape: in rows, in words, and as arrays of each twin."""

    size: Size
    words: int
    parts: list[dict[str, Any]]


class StaticInputs:
    """One buffer of int32 on the device, which each shape divides into arrays of its own, and
    pinned twins on the host.

    A step fills a twin and copies it in one go. There are two twins, taken in turn, and before one
    is filled again its last copy is waited for: the host may be a step ahead of the device.

    Args:
        device: a CUDA device.
        max_num_seqs: the largest batch.
        table_width: W, blocks of the longest sequence.
        members: decodes of a tile of shared prefixes; 0: none share.
        max_prompt_tokens: maximum number of prompt tokens.
        windowed: whether layers that slide have block tables of their own.
    """

    def __init__(
        self,
        device: torch.device,
        max_num_seqs: int,
        table_width: int,
        members: int,
        max_prompt_tokens: int,
        windowed: bool = False,
    ) -> None:
        self._room = table_width, max_num_seqs, members, windowed
        words = num_words(self.size(Shape(max_num_seqs, max_prompt_tokens, members > 0)))
        self._device = torch.zeros(words, dtype=torch.int32, device=device)
        self._twins = [torch.zeros(words, dtype=torch.int32, pin_memory=True) for _ in range(2)]
        self._copied = [torch.cuda.Event() for _ in self._twins]
        self._rooms: dict[Shape, _Room] = {}
        self._turn = 0

    def size(self, shape: Shape) -> Size:
        """The room of a shape."""
        return shape.size(*self._room)

    def fill(self, batch: Batch, shape: Shape) -> None:
        """Copy a batch to the device, padded to `shape`."""
        if shape not in self._rooms:
            size = self.size(shape)
            parts = [divide(twin.numpy(), size) for twin in self._twins]
            self._rooms[shape] = _Room(size, num_words(size), parts)
        room = self._rooms[shape]
        self._turn = 1 - self._turn
        self._copied[self._turn].synchronize()
        lay_out(room.parts[self._turn], room.size, batch)
        used = self._twins[self._turn][: room.words]
        self._device[: room.words].copy_(used, non_blocking=True)
        self._copied[self._turn].record()

    def view(self, shape: Shape) -> StepInputs:
        """The device's inputs of this shape."""
        size = self.size(shape)
        return view(divide(self._device, size), size, max_seqlen_q=shape.tokens)
