"""Adapters of experts as transformers 5 has them, all of a layer in one parameter, against peft's
`merge_and_unload`; whatever the checkpoint has.
"""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from mxfp4_checkpoints import checkpoints as mxfp4_checkpoints
from peft_adapters import make_adapter, merge, tensors_of
from ranks_in_threads import ranks_of
from safetensors.torch import load_file
from test_merge import EXPERTS, HYBRID, TEXT, Merged, Watched, assert_equal, loaded, of_text, opened

from checkpoints import (
    PARAMS,
    PROMPTS,
    SMALL,
    assert_greedy,
    make_checkpoint,
    reference_logprobs,
    stack_experts,
    with_rare,
)
from nanovllm import LLM
from nanovllm.adapters.adapter import Adapter
from nanovllm.checkpoint.files import ADAPTER
from nanovllm.checkpoint.quantization import WHILE_LOADING

BOTH = ["experts.gate_up_proj", "experts.down_proj"]
# Patterns are of paths of parameters, not of modules: "experts" and "mlp.gate" match nothing.
PATTERNS: dict[str, Any] = {
    "rank_pattern": {"gate_up_proj": 3, "experts": 7, r"layers\.0\..*\.down_proj": 5},
    "alpha_pattern": {r"layers\.1\.mlp\.experts\.gate_up_proj": 5, "mlp.gate": 99, "weight": 2},
}


class Case(NamedTuple):
    """A family, its options, whether its checkpoint stacks experts, and fields of adapters."""

    family: str
    options: dict[str, Any]
    is_stacked: bool
    adapters: list[dict[str, Any]]


E = 5  # experts
QWEN3 = {"num_experts": E, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
# Down projections are square, so that their shape does not say what is stored transposed.
GPT_OSS = {"head_dim": 16, "num_local_experts": E, "intermediate_size": 64}
CASES = {
    "qwen3, all-linear": Case("qwen3_moe", QWEN3, False, [{"target_modules": "all-linear"}]),
    "qwen3, names of transformers 4": Case(
        *("qwen3_moe", QWEN3, False),
        [{"target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj"]}],
    ),
    "qwen3, patterns": Case(
        *("qwen3_moe", QWEN3, False),
        [{"target_modules": [], "target_parameters": [*BOTH, "gate.weight"], **PATTERNS}],
    ),
    "qwen3, several": Case(
        *("qwen3_moe", QWEN3, False),
        [
            {"target_modules": "all-linear", "use_rslora": True},
            {"target_modules": ["q_proj"], "target_parameters": BOTH[1:], "lora_alpha": -3},
            {"target_modules": ["o_proj"], "target_parameters": BOTH[:1], "r": 1},
        ],
    ),
    "mixtral": Case(
        *("mixtral", {"num_local_experts": 4}, False),
        [
            {"target_modules": "all-linear"},
            {"target_modules": ["v_proj"], "modules_to_save": ["gate"], "target_parameters": BOTH},
        ],
    ),
    "gpt-oss": Case(
        *("gpt_oss", GPT_OSS, True),
        [
            {"target_modules": "all-linear", "target_parameters": BOTH, "use_rslora": True},
            {"target_modules": [], "target_parameters": [*BOTH, "router.weight"], **PATTERNS},
        ],
    ),
    "gpt-oss, biases": Case(
        *("gpt_oss", GPT_OSS, True),
        [
            {
                "target_modules": [],
                "target_parameters": [*BOTH, *(f"{name}_bias" for name in BOTH)],
                "rank_pattern": {"down_proj": 2, "gate_up_proj_bias": 3},
            },
            {"target_modules": [], "target_parameters": ["down_proj_bias", "gate_up_proj"]},
        ],
    ),
    "qwen3.5": Case(
        *("qwen3_5_moe_text", HYBRID | EXPERTS, True),
        [{"target_modules": "all-linear", "target_parameters": BOTH, **PATTERNS}],
    ),
    "qwen3-next": Case("qwen3_next", HYBRID | EXPERTS, False, [{"target_modules": "all-linear"}]),
}


# Those that parameters show to be right as well as logits do.
RARE = CASES.keys() - {"qwen3, all-linear", "qwen3, several", "mixtral", "gpt-oss"}


@pytest.fixture(scope="module")
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Merged:
    family, options, is_stacked, configs = CASES[request.param]
    path = tmp_path_factory.mktemp("case")
    base = make_checkpoint(path / "base", family, initializer_range=0.1, **options)
    if is_stacked and family != "gpt_oss":
        stack_experts(base)
    adapters = [
        make_adapter(base, path / f"adapter{i}", seed=i, **config)
        for i, config in enumerate(configs)
    ]
    names = load_file(base / "model.safetensors").keys()
    assert any(name.endswith(".experts.down_proj") for name in names) == is_stacked
    of_experts = [name for name in tensors_of(adapters[0]) if ".experts." in name]
    assert of_experts and not any(re.search(r"\d", name.split("mlp")[1]) for name in of_experts)
    return Merged(base, adapters, merge(base, path / "merged", *adapters))


@pytest.mark.parametrize("case", CASES, indirect=True)
@pytest.mark.parametrize("size", [1, 2])
def test_parameters_are_those_of_peft(case: Merged, size: int) -> None:
    """Of each rank."""
    for rank in range(size):
        found = loaded(case.base, opened(case), rank, size)
        assert_equal(found, loaded(case.whole, [], rank, size))
        plain = loaded(case.base, [], rank, size)
        changed = [name for name in found if not torch.equal(found[name], plain[name])]
        assert any("experts" in name for name in changed)


@pytest.mark.parametrize("case", with_rare(CASES, *RARE), indirect=True)
def test_logits_and_tokens_are_those_of_peft(case: Merged) -> None:
    """Log-probabilities within 1e-5, with Gated DeltaNet 1e-4, of which the base's differ."""
    is_hybrid = "linear_num_key_heads" in (case.base / "config.json").read_text()
    wanted = of_text(reference_logprobs(case.whole, TEXT))
    with LLM(case.base, adapter=case.adapters, **SMALL) as llm, LLM(case.base, **SMALL) as plain:
        found, without = (
            torch.tensor(engine.score([TEXT], use_tqdm=False)[0].logprobs)
            for engine in (llm, plain)
        )
        torch.testing.assert_close(found, wanted, atol=1e-4 if is_hybrid else 1e-5, rtol=0)
        assert (found - without).abs().max() > 0.05
        assert_greedy(case.whole, PROMPTS, llm.generate(PROMPTS, PARAMS, use_tqdm=False))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("case", ["qwen3, several", "gpt-oss"], indirect=True)
def test_tokens_of_two_ranks_are_those_of_peft(case: Merged) -> None:
    with LLM(case.base, adapter=case.adapters, tensor_parallel_size=2, **SMALL) as llm:
        assert len(ranks_of(llm).runners) == 2
        assert_greedy(case.whole, PROMPTS, llm.generate(PROMPTS, PARAMS, use_tqdm=False))


@pytest.mark.parametrize("case", ["qwen3, all-linear", "mixtral"], indirect=True)
def test_quantised_while_loading_as_the_merged_checkpoint(case: Merged) -> None:
    """Bit for bit: codes and scales. Factors are powers of two."""
    how = {"quantization": WHILE_LOADING}
    found, wanted = loaded(case.base, opened(case), **how), loaded(case.whole, [], **how)
    codes = [tensor for name, tensor in found.items() if name.endswith("experts.down.data")]
    assert {tensor.dtype for tensor in codes} == {torch.float8_e4m3fn}
    for name, tensor in found.items():
        assert torch.equal(tensor, wanted[name]), name


@pytest.mark.parametrize("case", ["qwen3, all-linear", "gpt-oss"], indirect=True)
def test_a_rank_reads_its_part_once(case: Merged) -> None:
    """Rows of B, columns of A; although a checkpoint may have tensors for each expert."""
    for adapter in opened(case):
        read: Counter[str] = Counter()
        watched = {name: Watched(name, x, read) for name, x in adapter.tensors.items()}
        loaded(case.base, [Adapter(adapter.name, adapter.config, watched)], 1, 2)
        assert read.keys() == watched.keys()
        for name, numel in read.items():
            if ".experts." in name:
                size = torch.Size(watched[name].get_shape()).numel()
                is_split = ("base_layer" in name) == ("lora_B" in name)  # the inner is gate and up
                assert numel == (size // 2 if is_split else size), name


def test_a_set_of_parameters_in_memory(tmp_path: Path) -> None:
    """As a `LoraConfig` has it in a trainer."""
    base = make_checkpoint(tmp_path / "base", "qwen3_moe", **QWEN3)
    path = make_adapter(base, tmp_path / "adapter", target_modules="all-linear")
    config = json.loads((path / ADAPTER).read_text("utf-8"))
    config["target_parameters"] = set(config["target_parameters"])
    found = loaded(base, [Adapter.from_tensors(config, tensors_of(path))])
    for name, tensor in loaded(base, [Adapter.open(path)]).items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize(
    ("case", "version", "is_swapped"),
    [
        ("qwen3, all-linear", "0.18.1", True),
        ("qwen3, all-linear", "0.19.0", True),
        ("gpt-oss", "0.18.1", False),
        ("gpt-oss", "0.19.0", True),
        ("gpt-oss", "0.19.1", False),
    ],
    indirect=["case"],
)
def test_versions_of_peft_that_swap_the_factors(
    case: Merged, version: str, is_swapped: bool
) -> None:
    """A of each expert is B's transpose there, and B is A's; the shapes of square matrices do not
    say so.
    """
    adapters = []
    for path in case.adapters:
        config = json.loads((path / ADAPTER).read_text("utf-8")) | {"peft_version": version}
        tensors = tensors_of(path)
        for name, a in tensors_of(path).items() if is_swapped else ():
            if name.endswith("experts.lora_A.weight") or "base_layer.lora_A" in name:
                other = name.replace("lora_A", "lora_B")
                b = tensors[other]
                tensors[name] = b.view(len(b), -1, E).permute(2, 1, 0).flatten(0, 1)
                tensors[other] = a.view(E, -1, a.shape[1]).permute(2, 1, 0).flatten(1)
        adapters.append(Adapter.from_tensors(config, tensors))
    assert_equal(loaded(case.base, adapters), loaded(case.whole, []))


def test_layers_beside_experts_in_mxfp4(tmp_path: Path) -> None:
    """Attention and the router, which such checkpoints have in 16 bits."""
    packed, plain = mxfp4_checkpoints(tmp_path)
    adapter = make_adapter(plain, tmp_path / "adapter", target_parameters=["router.weight"])
    found, base = (loaded(packed, given) for given in ([Adapter.open(adapter)], []))
    wanted = loaded(merge(plain, tmp_path / "merged", adapter), [])
    changed = [name for name, tensor in found.items() if not torch.equal(tensor, base[name])]
    assert len(changed) == 3 * 2  # QKV, output and router in each layer
    for name in changed:
        torch.testing.assert_close(found[name], wanted[name], atol=1e-6, rtol=1e-6)
