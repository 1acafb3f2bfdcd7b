"""Matrix products through oneDNN against plain PyTorch, and against transformers."""

from pathlib import Path

import pytest
import torch

from checkpoints import PARAMS, PROMPTS, SMALL, assert_right, make_checkpoint
from nanovllm import LLM
from nanovllm.attention.torch_backend import TorchBackend
from nanovllm.distributed.group import Group
from nanovllm.layers.base import Build
from nanovllm.layers.linear import ReplicatedLinear
from nanovllm.layers.weights import onednn
from nanovllm.layers.weights.onednn import can_use_onednn, use_onednn

PLAIN = Build(torch.float32, False, Group(), TorchBackend(), 64)

needs_onednn = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN"
)


@needs_onednn
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 7, 64, 2000])
def test_product_is_that_of_float64(rows: int, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn, "MIN_WEIGHT", 0)
    generator = torch.Generator().manual_seed(rows)
    layer = ReplicatedLinear(96, 40, bias, PLAIN)
    for param in layer.parameters():
        param.normal_(generator=generator)
    x = torch.randn(96, rows, generator=generator).t()  # not contiguous
    expected = x.double() @ layer.weight.data.double().t()
    if layer.bias is not None:
        expected += layer.bias.double()
    use_onednn(layer)
    assert layer.weight.data.is_mkldnn
    torch.testing.assert_close(layer(x).double(), expected, rtol=1e-5, atol=1e-4)


@needs_onednn
@pytest.mark.parametrize("overrides", [{}, {"tie_word_embeddings": True}, {"attention_bias": True}])
def test_engine_takes_it_unless_told_otherwise(
    overrides: dict[str, bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onednn, "MIN_WEIGHT", 0)
    path = make_checkpoint(tmp_path / "model", **overrides)
    for fused in (True, False):
        with LLM(path, fused_kernels=fused, **SMALL) as llm:
            model = llm.model_runner.model
            assert model.lm_head.weight.data.is_mkldnn == fused
            assert model.model.layers[1].self_attn.qkv_proj.weight.data.is_mkldnn == fused
            assert not model.model.embed_tokens.weight.data.is_mkldnn
            outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
            assert_right(path, outputs)


@needs_onednn
def test_small_products_are_left_alone() -> None:
    """Below a size a call costs more than it gains."""
    for rows, taken in ((256, False), (1024, True)):
        layer = ReplicatedLinear(512, rows, False, PLAIN)
        use_onednn(layer)
        assert layer.weight.data.is_mkldnn == taken


def test_only_float32_on_a_cpu() -> None:
    cpu = torch.device("cpu")
    assert can_use_onednn(cpu, torch.float32) == torch.backends.mkldnn.is_available()
    assert not can_use_onednn(cpu, torch.bfloat16)
    assert not can_use_onednn(torch.device("cuda"), torch.float32)
