"""Checkpoints that leave some linear layers as they were: what lists say, and what they mean."""

import re
from pathlib import Path
from typing import Any, NamedTuple

import torch

from checkpoints import PARAMS, PROMPTS, SMALL, assert_right, reference_logprobs
from nanovllm import LLM
from nanovllm.attention.torch_backend import TorchBackend
from nanovllm.checkpoint.model_config import ModelConfig
from nanovllm.checkpoint.quantization import WHILE_LOADING
from nanovllm.distributed.group import Group
from nanovllm.layers.base import Build
from nanovllm.layers.experts import Experts
from nanovllm.layers.linear import LinearBase
from nanovllm.layers.weights.weight import PlainWeight
from nanovllm.models import model_class
from nanovllm.sizing.model_size import matrices

TEXT = [(7 * i) % 127 for i in range(60)]


class Left(NamedTuple):
    """Modules that stay as they were.

    Attributes:
        names: how a list in config.json says it.
        pattern: regular expression found in their paths, and in no others.
    """

    names: list[str]
    pattern: str

    def has(self, module: str) -> bool:
        return re.search(self.pattern, module) is not None


# What concerns other parts, or is never quantised, may stand in any list.
OTHERS = ["lm_head", "model.visual.blocks.0.attn.proj", "mtp.layers.0.mlp", "re:.*mlp.gate$"]
LISTS = {
    "paths": Left(
        ["model.layers.0.self_attn.o_proj", "model.layers.1.mlp.down_proj"],
        r"0\.self_attn\.o_proj|1\.mlp\.down",
    ),
    "the first layer": Left(["model.layers.0"], r"layers\.0\."),
    "the last layer": Left(["layers.1."], r"layers\.1\."),
    "a name": Left(["o_proj"], "o_proj"),
    "parts": Left(["self_attn", "mlp.down_proj"], r"self_attn|down_proj"),
    "other spellings": Left(
        ["model.language_model.layers.0.mlp", "language_model.model.layers.1.self_attn"],
        r"0\.mlp|1\.self_attn",
    ),
    "regular expressions": Left(
        ["model.layers.*.self_attn", r"re:.*layers\.1\.mlp\.(gate|up)_proj$"],
        r"self_attn|1\.mlp\.(gate|up)_proj",
    ),
    # Of compressed-tensors, where "self_attn" would be the path of one module.
    "paths and expressions": Left(
        ["self_attn", "re:.*mlp.down_proj", "model.language_model.layers.1.self_attn.o_proj"],
        r"down_proj|1\.self_attn\.o_proj",
    ),
}


def assert_loaded(path: Path, exact: Path, **options: Any) -> None:
    """An engine of the first has the tokens and log-probabilities of transformers of the second."""
    wanted = reference_logprobs(exact, TEXT)[:-1].gather(1, torch.tensor(TEXT[1:])[:, None])
    with LLM(path, **{**SMALL, **options}) as llm:
        assert_right(exact, llm.generate(PROMPTS, PARAMS, use_tqdm=False))
        [score] = llm.score([TEXT], use_tqdm=False)
    found = torch.tensor(score.logprobs)
    torch.testing.assert_close(found, wanted[:, 0], atol=1e-4, rtol=0)


def assert_layers_know_their_names(path: Path) -> None:
    """What config.json says of a module is meant for the layer that is called so; and the sizes of
    all matrices, and which no format is for, are known without a model.
    """
    config = ModelConfig.from_pretrained(str(path))
    build = Build(torch.float32, False, Group(), TorchBackend(), 64, quantization=WHILE_LOADING)
    with torch.device("meta"):
        model = model_class(config.architecture)(config, build)
    found: dict[str, int] = {}
    for name, module in model.named_modules():
        if isinstance(module, Experts):
            assert module.build.path == name
            of_one = (module.gate_up.data.numel() + module.down.data.numel()) // module.num_experts
            modules = [*module.facts.modules(name)]
            is_plain = isinstance(module.gate_up, PlainWeight)
            count = module.num_experts * of_one
        elif isinstance(module, LinearBase):
            assert module.build.path == name
            modules, count = module.sources(name), module.weight.data.numel()
            is_plain = isinstance(module.weight, PlainWeight)
        else:
            continue
        key = "plain" if is_plain else " ".join(modules)
        found[key] = found.get(key, 0) + count
    computed: dict[str, int] = {}
    for matrix in matrices(config):
        key = "plain" if matrix.modules is None else " ".join(matrix.modules)
        computed[key] = computed.get(key, 0) + matrix.size
        assert "expert" in key or not matrix.is_sparse
    assert found == computed
