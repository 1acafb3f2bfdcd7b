"""The PyTorch backend gathers little more than the sequences hold."""

import random

import pytest
import torch
from attention_cases import Case, close, run_case

from checkpoints import SMALL, TINY, greedy
from nanovllm import LLM
from nanovllm.attention import torch_backend
from nanovllm.attention.torch_backend import MIN_PADDING, TorchBackend


@pytest.mark.parametrize(
    "lens",
    [
        [5, 17, 4000, *random.Random(0).choices(range(1, 80), k=40)],
        [*random.Random(1).choices(range(1, 2500), k=12), 1, 1],
        [64, 129, 1, 65, 130, 2000],
        [4000],
    ],
    ids=["one-long", "spread", "bounds", "alone"],
)
def test_decode_of_mixed_lengths_pads_little(lens, monkeypatch):
    """One long sequence made every row of the step gather as many slots as it has."""
    gathered, slots = [], torch_backend.slots_of

    def counting(tables: torch.Tensor, positions: torch.Tensor, block_size: int) -> torch.Tensor:
        gathered.append(len(tables) * positions.shape[1])
        return slots(tables, positions, block_size)

    monkeypatch.setattr(torch_backend, "slots_of", counting)
    case = Case([1] * len(lens), lens, num_decodes=len(lens), hq=2, hkv=1, d=16)
    out = run_case(TorchBackend(), case)
    assert sum(lens) <= sum(gathered) <= 1.5 * sum(lens) + MIN_PADDING * len(lens)
    assert len(gathered) <= 8, "sequences of similar length share a gather"
    wanted = case.wanted()  # one by one in float64, in the order of the rows
    close(out, wanted)
    if len(lens) > 1:
        assert (wanted[:-1] - wanted[1:]).abs().amax((1, 2)).min() > 1e-3, "rows can be told apart"


def test_layers_share_the_plan_of_a_step(monkeypatch):
    """The gathered rows are the same in all layers, and differ between steps."""
    planned, plan = [], torch_backend._plan

    def counting(*args):
        planned.append(args)
        return plan(*args)

    monkeypatch.setattr(torch_backend, "_plan", counting)
    with LLM(TINY, **{**SMALL, "device": "cpu"}, attention_backend="torch") as llm:
        layers = len(llm.model_runner.model.model.layers)
        [output] = llm.generate(["37+48="], greedy(6, ignore_eos=True), use_tqdm=False)
    assert layers > 1 and len(output.outputs[0].token_ids) == 6
    assert len(planned) == 5, "steps that decode"
