"""`StateRows`: the states of sequences in all layers, which are copied from row to row."""

import torch

from nanovllm.utils.arrays import Int32
from nanovllm.utils.device import runs_kernels, upload


class StateRows:
    """The rows of all states.

    Args:
        memory: [bytes] uint8, in which they all lie.
        states: tensors [R, ...], each contiguous and at a multiple of 4 bytes.
    """

    def __init__(self, memory: torch.Tensor, states: list[torch.Tensor]) -> None:
        self.states, self._device = states, memory.device
        self._words: torch.Tensor | None = None
        if states and runs_kernels(memory):
            sizes = [state[0].numel() * state.itemsize for state in states]
            begins = [state.data_ptr() - memory.data_ptr() for state in states]
            assert all(size % 4 == 0 for size in (*sizes, *begins)), "states consist of words"
            places = [(begin // 4, size // 4) for begin, size in zip(begins, sizes, strict=True)]
            self._words = memory[: len(memory) // 4 * 4].view(torch.int32)
            self._places = torch.tensor(places, device=memory.device)
            self._largest = max(sizes) // 4

    def copy(self, pairs: Int32) -> None:
        """Copy rows: [2, n], sources and targets."""
        sources, targets = upload(self._device, *pairs)
        if self._words is not None:
            from nanovllm.kernels.recurrent.copies import copy_rows

            copy_rows(self._words, self._places, self._largest, sources, targets)
            return
        for state in self.states:
            state[targets.long()] = state[sources.long()]
