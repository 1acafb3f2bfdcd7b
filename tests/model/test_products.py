"""Products of a model: all of them pass `Weight.multiply`, which a wrapper of weights relies on."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import SMALL, make_checkpoint
from nanovllm import LLM, SamplingParams
from nanovllm.layers.embed_head import ParallelLMHead
from nanovllm.layers.experts import Experts
from nanovllm.layers.linear import LinearBase
from nanovllm.layers.weights.onednn import OneDnnWeight
from nanovllm.layers.weights.weight import Gate, PlainWeight, Weight


@pytest.mark.parametrize("options", [{}, {"fused_kernels": False}], ids=["oneDNN", "plain"])
def test_every_product_passes_one_door(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside, passed, gated = list[Weight](), Counter[int](), Counter[int]()
    multiply = Weight.multiply

    def watched(weight: Weight, x: Any, *args: Any, gate: Gate | None = None, **how: Any) -> Any:
        inside.append(weight)
        passed[id(weight)] += 1
        gated[id(weight)] += gate is not None
        try:
            return multiply(weight, x, *args, gate=gate, **how)
        finally:
            inside.pop()

    monkeypatch.setattr(Weight, "multiply", watched)
    for kind in (PlainWeight, OneDnnWeight):

        def product(weight: Weight, *args: Any, of: Any = kind.product) -> torch.Tensor:
            assert inside and inside[-1] is weight, "a product beside the door"
            return of(weight, *args)

        monkeypatch.setattr(kind, "product", product)
    shape = {"hidden_size": 512, "intermediate_size": 1024, "vocab_size": 1024}
    with LLM(make_checkpoint(tmp_path, **shape), **{**SMALL, **options}) as llm:
        params = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=2)
        llm.generate([[5, 7, 11, 2], [3] * 9], params, use_tqdm=False)
        assert llm.model_runner is not None
        modules = llm.model_runner.model.modules()
        layers = [each for each in modules if isinstance(each, (LinearBase, ParallelLMHead))]
    assert len(layers) == 4 * 2 + 1
    assert all(passed[id(layer.weight)] >= 3 for layer in layers)
    assert sum(gated[id(layer.weight)] > 0 for layer in layers) == 2, "the MLPs'"


def test_every_product_of_experts_passes_one_door(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An adapter of experts relies on it: what `multiply` returns is all that they add."""
    path = make_checkpoint(tmp_path / "sparse", "qwen3_moe")
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=5)

    def logprob() -> float:
        with LLM(path, **SMALL) as llm:
            [output] = llm.generate([[5, 7, 11, 2]], params, use_tqdm=False)
        return output.outputs[0].cumulative_logprob

    plain, multiply = logprob(), Experts.multiply
    assert logprob() == plain
    for factor, is_same in ((1.0, True), (0.0, False)):
        monkeypatch.setattr(Experts, "multiply", lambda *args, by=factor: multiply(*args) * by)
        assert (logprob() == plain) == is_same
