"""LFM2's convolution in Triton against float64, and copies of states from row to row."""

from itertools import accumulate

import numpy as np
import pytest
import torch
from attention_cases import DEVICE, close, randn

pytest.importorskip("triton")
from nanovllm.kernels.recurrent import copies, short_conv
from nanovllm.kernels.recurrent.delta_prompt import chunks_of


class Sequences:
    """Three sequences, by the formula: their inputs so far, and rows of others full of NaN."""

    def __init__(self, J: int, M: int, dtype: torch.dtype, has_bias: bool) -> None:
        self.weight, self.M, self.J = randn(M, J, dtype=dtype, seed=1), M, J
        self.bias = randn(M, dtype=dtype, seed=2) if has_bias else None
        self.tail = torch.full((7, J - 1, M), torch.nan, dtype=dtype, device=DEVICE)
        self.slots, self.inputs = [5, 2, 6], [torch.zeros(0, M, dtype=dtype)] * 3
        self.seed = 10

    def append(self, i: int, num: int) -> tuple[torch.Tensor, torch.Tensor]:
        """B, C and x of new tokens, and their results in float64."""
        self.seed += 1
        bcx = randn(num, 3 * self.M, dtype=self.weight.dtype, seed=self.seed).cpu()
        before, gate, x = bcx.chunk(3, 1)
        self.inputs[i] = torch.cat([self.inputs[i], before * x])
        padded = torch.cat([torch.zeros(self.J - 1, self.M), self.inputs[i]]).double()
        windows = padded.unfold(0, self.J, 1)[-num:]  # [num, M, J]
        total = (windows * self.weight.cpu().double()).sum(-1)
        if self.bias is not None:
            total += self.bias.cpu().double()
        return bcx, gate.double() * total

    def check_tails(self) -> None:
        """They have the last inputs, zeros before the first; other rows are as they were."""
        for slot, inputs in zip(self.slots, self.inputs, strict=True):
            if len(inputs):
                zeros = torch.zeros(self.J - 1, self.M, dtype=inputs.dtype)
                wanted = torch.cat([zeros, inputs])[-(self.J - 1) :]
                assert torch.equal(self.tail[slot].cpu(), wanted)
        for row in (1, 3, 4):
            assert self.tail[row].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("J", "M", "has_bias"), [(3, 48, False), (2, 300, True), (4, 16, True)])
def test_convolutions(J: int, M: int, has_bias: bool, dtype: torch.dtype) -> None:
    """Prompts, which begin and go on, some of fewer tokens than taps; decodes; padding."""
    seqs = Sequences(J, M, dtype, has_bias)
    for counts in ([1, 70, 0], [2, 65, 3], [1, 1, 130], [0, 64, 1]):
        parts, wanted = zip(*(seqs.append(i, n) for i, n in enumerate(counts) if n), strict=True)
        padding = randn(5, 3 * M, dtype=dtype, seed=3).cpu()
        bcx = torch.cat([*parts, padding]).to(DEVICE)
        lens = [len(inputs) for inputs in seqs.inputs]
        cu_q, cu_k = (
            torch.tensor([0, *accumulate(each)], dtype=torch.int32, device=DEVICE)
            for each in (counts, lens)
        )
        slots = torch.tensor(seqs.slots, dtype=torch.int32, device=DEVICE)
        given = seqs.weight, seqs.bias, seqs.tail, slots, cu_q, cu_k
        out = short_conv.prompts(bcx, *given, chunks_of(cu_q, len(bcx)))
        close(out[: -len(padding)], torch.cat(wanted).to(DEVICE, dtype))
        assert not out[-len(padding) :].any()
        seqs.check_tails()
    parts, wanted = zip(*(seqs.append(i, 1) for i in range(3)), strict=True)
    bcx = torch.cat([*parts, padding[:2]]).to(DEVICE)
    slots = torch.tensor([*seqs.slots, 0, 0], dtype=torch.int32, device=DEVICE)
    lens = [*(len(inputs) for inputs in seqs.inputs), 0, 0]
    context_lens = torch.tensor(lens, dtype=torch.int32, device=DEVICE)
    out = short_conv.decode(bcx, seqs.weight, seqs.bias, seqs.tail, slots, context_lens)
    close(out[:3], torch.cat(wanted).to(DEVICE, dtype))
    seqs.check_tails()
    fresh = Sequences(J, M, dtype, has_bias)  # the first token of a sequence is a decode, too
    parts, wanted = zip(*(fresh.append(i, 1) for i in range(3)), strict=True)
    ones = torch.ones(3, dtype=torch.int32, device=DEVICE)
    args = fresh.weight, fresh.bias, fresh.tail, slots[:3], ones
    close(
        short_conv.decode(torch.cat(parts).to(DEVICE), *args), torch.cat(wanted).to(DEVICE, dtype)
    )
    fresh.check_tails()


def test_copies_of_rows() -> None:
    """States of several sizes in one piece of memory, one of them longer than a program copies."""
    rng = np.random.default_rng(0)
    shapes = [(6, 40), (6, 2 * copies.BLOCK + 17), (6, 3)]
    sizes = [(shape[1] + 60) * 6 for shape in shapes]
    memory = torch.from_numpy(rng.integers(0, 99, sum(sizes), np.int32)).to(DEVICE)
    places, begin, states = [], 0, []
    for shape, size in zip(shapes, sizes, strict=True):
        places.append((begin, shape[1]))
        states.append(memory[begin : begin + shape[0] * shape[1]].view(shape))
        begin += size
    wanted = memory.clone()
    sources, targets = [1, 3, 1], [2, 5, 4]
    for (first, width), (rows, _) in zip(places, shapes, strict=True):
        state = wanted[first : first + rows * width].view(rows, width)
        state[targets] = state[sources]
    rows = [torch.tensor(each, dtype=torch.int32, device=DEVICE) for each in (sources, targets)]
    largest = max(width for _, width in places)
    copies.copy_rows(memory, torch.tensor(places, device=DEVICE), largest, *rows)
    assert torch.equal(memory, wanted)
