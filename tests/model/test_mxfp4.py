"""gpt-oss's experts in 4 bits against transformers' reading of them."""

from pathlib import Path

import pytest
import torch
from mxfp4_checkpoints import checkpoints
from ranks_in_threads import ranks_of
from safetensors.torch import load_file, save_file

from checkpoints import PARAMS, PROMPTS, SMALL, assert_right
from nanovllm import LLM
from nanovllm.attention.torch_backend import TorchBackend
from nanovllm.checkpoint.model_config import ModelConfig
from nanovllm.distributed.group import Group
from nanovllm.layers.base import Build
from nanovllm.layers.weights.shard import Part
from nanovllm.models import model_class
from nanovllm.models.loader import load_model
from nanovllm.tensors.mxfp4 import Mxfp4Codes


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("size", [1, 2])
def test_tokens_are_those_of_transformers(size: int, tmp_path: Path) -> None:
    """By the numbers that the codes mean, without kernels; two ranks divide them within a block."""
    packed, plain = checkpoints(tmp_path)
    with LLM(packed, tensor_parallel_size=size, **SMALL) as llm:
        assert size == 1 or len(ranks_of(llm).runners) == size
        assert_right(plain, llm.generate(PROMPTS, PARAMS, use_tqdm=False))


def numbers(path: Path, rank: int, size: int) -> list[torch.Tensor]:
    """The first layer's experts on a rank, by expert: [E, 2, I, M] and [E, M, I]."""
    config = ModelConfig.from_pretrained(str(path))
    build = Build(torch.bfloat16, True, Group(rank, size), TorchBackend(), 64)
    model = model_class(config.architecture)(config, build)
    load_model(model, path)
    experts = model.model.layers[0].mlp.experts
    codes = experts.gate_up.codes, experts.down.codes
    assert all(isinstance(each, Mxfp4Codes) for each in codes)
    E, M = config.experts.num_experts, config.hidden_size
    gate_up, down = (each.numbers() for each in codes)
    return [gate_up.view(E, 2, -1, M), down.view(E, M, -1)]


def test_ranks_hold_whole_blocks(tmp_path: Path) -> None:
    """Of three blocks two ranks have one and two; gpt-oss's 90 are divided by four and eight."""
    packed, plain = checkpoints(tmp_path)
    stored = load_file(plain / "model.safetensors")
    gate_up, down = (
        stored[f"model.layers.0.mlp.experts.{name}"] for name in ("gate_up_proj", "down_proj")
    )
    gate_up = torch.stack([gate_up[..., ::2].mT, gate_up[..., 1::2].mT], 1)  # [E, 2, I, M]
    ranks = [numbers(packed, rank, 2) for rank in range(2)]
    assert torch.cat([of_rank[0] for of_rank in ranks], 2).equal(gate_up)
    assert torch.cat([of_rank[1] for of_rank in ranks], 2).equal(down.mT)
    assert [of_rank[1].shape[2] for of_rank in ranks] == [32, 64]
    for size, widths in ((4, {704, 736}), (8, {352, 384})):
        parts = [Part.blocks(2880, 32, Group(rank, size)) for rank in range(size)]
        assert [i for part in parts for i in part.held] == list(range(2880))
        assert {len(part.held) for part in parts} == widths


def test_scales_too_large_for_kernels_are_refused(tmp_path: Path) -> None:
    packed, _ = checkpoints(tmp_path)
    file = packed / "a-scales.safetensors"
    scales = load_file(file)
    name = "model.layers.1.mlp.experts.down_proj_scales"
    scales[name][2, 3, 1] = 129
    save_file(scales, file)
    with pytest.raises(ValueError, match=f"{name} has scales above 2, .* fused_kernels=False"):
        numbers(packed, 0, 1)
