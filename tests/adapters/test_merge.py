"""Adapters that are merged while a checkpoint is loaded, against peft's `merge_and_unload`."""

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from fp8_checkpoints import checkpoints as fp8_checkpoints
from peft_adapters import (
    PREFIX,
    make_adapter,
    merge,
    save_adapter,
    tensors_of,
    unmerged_logprobs,
)
from ranks_in_threads import ranks_of
from safetensors.torch import load_file, save_file

from checkpoints import (
    PARAMS,
    PROMPTS,
    SMALL,
    assert_greedy,
    copy_checkpoint,
    edit_tensors,
    make_checkpoint,
    rare,
    reference_logprobs,
    tokens,
    with_rare,
)
from nanovllm import LLM
from nanovllm.adapters.adapter import Adapter, Source
from nanovllm.attention.torch_backend import TorchBackend
from nanovllm.checkpoint.files import ADAPTER
from nanovllm.checkpoint.model_config import ModelConfig
from nanovllm.checkpoint.quantization import WHILE_LOADING
from nanovllm.distributed.group import Group
from nanovllm.layers.base import Build
from nanovllm.models import model_class
from nanovllm.models.loader import as_stored, load_model

Q_0 = r"layers\.0\.self_attn\.q_proj"
# Configurations of adapters, merged one after the other.
CASES: dict[str, list[dict[str, Any]]] = {
    "names": [{"target_modules": ["q_proj", "o_proj", "self_attn.v_proj"], "lora_alpha": 7}],
    "expression": [{"target_modules": r".*layers\.1\..*\.(k|gate|down)_proj"}],
    "all": [{"target_modules": "all-linear"}],
    "patterns": [
        {
            "rank_pattern": {"down_proj": 6, Q_0: 2},
            # The first that matches counts, up to a dot: "_proj" matches nothing.
            "alpha_pattern": {"_proj": 99, Q_0: 3, "q_proj": 5, "^model.layers.1.mlp.up_proj": 1},
        }
    ],
    "roots": [{"use_rslora": True, "rank_pattern": {"o_proj": 9}, "lora_alpha": 5}],
    "lengths": [{"use_dora": True, "alpha_pattern": {"o_proj": 3}, "use_rslora": True}],
    "whole layers": [{"target_modules": ["k_proj"], "modules_to_save": ["norm", "up_proj"]}],
    "ends": [{"target_modules": ["embed_tokens", "lm_head"]}],
    "lengths of ends": [{"target_modules": ["embed_tokens", "lm_head"], "use_dora": True}],
    "whole ends": [
        {"target_modules": ["v_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
    ],
    "several": [
        {"target_modules": ["q_proj", "down_proj"], "modules_to_save": ["lm_head"]},
        {"use_dora": True, "target_modules": ["q_proj", "o_proj"], "r": 2},
        {"target_modules": ["q_proj", "lm_head", "up_proj"], "lora_alpha": -4},
    ],
}
TEXT = [(7 * i) % 127 for i in range(100)]


def of_text(logprobs: torch.Tensor) -> torch.Tensor:
    """Those of TEXT's own tokens, as `score` returns them, of all [n, V]."""
    return logprobs[:-1].gather(1, torch.tensor(TEXT[1:])[:, None])[:, 0]


class Merged(NamedTuple):
    """A checkpoint, adapters, and the checkpoint that peft makes of them."""

    base: Path
    adapters: list[Path]
    whole: Path


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3 in several files."""
    path = tmp_path_factory.mktemp("base") / "model"
    return make_checkpoint(path, shard="60KB", initializer_range=0.1, attention_bias=True, seed=2)


@pytest.fixture(scope="module")
def case(
    request: pytest.FixtureRequest, base: Path, tmp_path_factory: pytest.TempPathFactory
) -> Merged:
    path = tmp_path_factory.mktemp("case")
    adapters = [
        make_adapter(base, path / f"adapter{i}", seed=i, **config)
        for i, config in enumerate(CASES[request.param])
    ]
    return Merged(base, adapters, merge(base, path / "merged", *adapters))


@pytest.mark.parametrize("case", CASES, indirect=True)
def test_logits_and_tokens_are_those_of_peft(case: Merged) -> None:
    """Log-probabilities within 1e-5, of which the base's differ."""
    wanted = of_text(reference_logprobs(case.whole, TEXT))
    given = case.adapters if len(case.adapters) > 1 else case.adapters[0]
    with LLM(case.base, adapter=given, **SMALL) as llm, LLM(case.base, **SMALL) as plain:
        found, without = (
            torch.tensor(engine.score([TEXT], use_tqdm=False)[0].logprobs)
            for engine in (llm, plain)
        )
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)
        assert (found - without).abs().max() > 0.05
        assert_greedy(case.whole, PROMPTS, llm.generate(PROMPTS, PARAMS, use_tqdm=False))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(
    "case", with_rare(CASES, *(CASES.keys() - {"lengths", "ends"})), indirect=True
)
def test_tokens_of_two_ranks_are_those_of_peft(case: Merged) -> None:
    with LLM(case.base, adapter=case.adapters, tensor_parallel_size=2, **SMALL) as llm:
        assert len(ranks_of(llm).runners) == 2
        assert_greedy(case.whole, PROMPTS, llm.generate(PROMPTS, PARAMS, use_tqdm=False))


# -- the parameters of a rank ---------------------------------------------------------------------


def loaded(
    path: Path, adapters: list[Adapter], rank: int = 0, size: int = 1, **options: Any
) -> dict[str, torch.Tensor]:
    """The parameters of a rank; NaN where they are not filled."""
    config = as_stored(ModelConfig.from_pretrained(str(path)), path)
    how = Build(torch.float32, False, Group(rank, size), TorchBackend(), 64)
    model = model_class(config.architecture)(config, how._replace(**options))
    for param in model.parameters():
        param.data.fill_(torch.nan if param.dtype.is_floating_point else 99)
    load_model(model, path, is_part=config.is_part, adapters=adapters)
    return {name: param.data for name, param in model.named_parameters()}


def opened(case: Merged) -> list[Adapter]:
    return [Adapter.open(path) for path in case.adapters]


def assert_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, wanted[name], atol=1e-6, rtol=1e-6, msg=name)


LINEAR = r".*\.([qkvo]|qkv|out|in|gate|up|down|gate_up)_proj(_\w+)?"  # not experts, all of them
MIXERS = r".*\.(([qkvo]|out)_proj|in_proj_\w+)"
SHARED = rf"{MIXERS}|.*\.shared_expert(\.\w+_proj|_gate)"
HYBRID: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 48,
}
LFM2 = ["conv", "full_attention", "conv", "conv"]
# Families whose checkpoints have tensors in another form than parameters do.
FAMILIES: dict[str, tuple[str, dict[str, Any], str]] = {
    "phi3": ("phi3", {}, LINEAR),  # packed
    "glm4": ("glm4", {"head_dim": 32}, LINEAR),
    "llama, one KV head": ("llama", {"num_key_value_heads": 1}, LINEAR),
    "gpt-oss": ("gpt_oss", {"head_dim": 16, "num_local_experts": 4}, LINEAR),
    "qwen3.5": ("qwen3_5_text", HYBRID, LINEAR),
    "qwen3.5 moe": ("qwen3_5_moe_text", HYBRID | EXPERTS, SHARED),
    "qwen3-next": ("qwen3_next", HYBRID | EXPERTS, MIXERS),
    "lfm2": (
        "lfm2",
        {"conv_L_cache": 3, "layer_types": LFM2, "num_hidden_layers": 4},
        r".*\.(\w+_proj|w[123])",
    ),
    "gemma3": ("gemma3_text", {"head_dim": 32}, LINEAR),
    "olmo2": ("olmo2", {}, LINEAR),
}


@pytest.fixture(scope="module")
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Merged:
    name, options, targets = FAMILIES[request.param]
    path = tmp_path_factory.mktemp("family")
    base = make_checkpoint(path / "base", name, initializer_range=0.1, **options)
    adapters = [
        make_adapter(base, path / "lora", target_modules=targets, r=3),
        make_adapter(base, path / "dora", target_modules=targets, use_dora=True, seed=1),
    ]
    return Merged(base, adapters, merge(base, path / "merged", *adapters))


@pytest.mark.parametrize("family", FAMILIES, indirect=True)
@pytest.mark.parametrize("size", [1, 2])
def test_parameters_of_families_are_those_of_peft(family: Merged, size: int) -> None:
    """Of each rank."""
    changed = 0
    for rank in range(size):
        found = loaded(family.base, opened(family), rank, size)
        assert_equal(found, loaded(family.whole, [], rank, size))
        plain = loaded(family.base, [], rank, size)
        changed += sum(not torch.equal(found[name], plain[name]) for name in found)
    assert changed >= 4 * size


@pytest.mark.parametrize(
    "family", with_rare(FAMILIES, *(FAMILIES.keys() - {"phi3", "lfm2"})), indirect=True
)
def test_logits_of_families_are_those_of_peft(family: Merged) -> None:
    wanted = of_text(reference_logprobs(family.whole, TEXT))
    with LLM(family.base, adapter=family.adapters, **SMALL) as llm:
        [score] = llm.score([TEXT], use_tqdm=False)
        torch.testing.assert_close(torch.tensor(score.logprobs), wanted, atol=1e-4, rtol=0)
        assert_greedy(family.whole, PROMPTS, llm.generate(PROMPTS, PARAMS, use_tqdm=False))


@pytest.mark.parametrize("size", [1, 2])
def test_experts_by_number(size: int, tmp_path: Path) -> None:
    """As adapters of transformers 4 have them; peft makes them adapters of stacked ones."""
    base = make_checkpoint(
        *(tmp_path / "base", "qwen3_moe"),
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
    )
    generator, tensors = torch.Generator().manual_seed(4), {}
    for name, weight in load_file(base / "model.safetensors").items():
        if re.search(r"experts\.\d+\.|[qo]_proj\.", name):
            module = PREFIX + name.removesuffix(".weight")
            for factor, shape in (("A", (4, weight.shape[1])), ("B", (weight.shape[0], 4))):
                tensors[f"{module}.lora_{factor}.weight"] = 0.2 * torch.randn(
                    shape, generator=generator
                )
    names = ["gate_proj", "up_proj", "down_proj", "q_proj", "o_proj"]
    adapter = save_adapter(tmp_path / "adapter", tensors, target_modules=names)
    assert len(tensors) == 2 * 2 * (4 * 3 + 2)
    whole = merge(base, tmp_path / "merged", adapter)
    for rank in range(size):
        found = loaded(base, [Adapter.open(adapter)], rank, size)
        assert_equal(found, loaded(whole, [], rank, size))


@pytest.mark.parametrize("case", ["all", rare("ends"), "several"], indirect=True)
def test_quantised_while_loading_as_the_merged_checkpoint(case: Merged) -> None:
    """Bit for bit: codes and scales, and what an engine computes with them. The factors of these
    changes are powers of two, so that it makes no difference when they are multiplied by.
    """
    adapters, how = opened(case), {"quantization": WHILE_LOADING}
    found, wanted = loaded(case.base, adapters, **how), loaded(case.whole, [], **how)
    assert {tensor.dtype for tensor in found.values()} > {torch.float8_e4m3fn}
    for name, tensor in found.items():
        assert torch.equal(tensor, wanted[name]), name
    options = {**SMALL, "quantization": "fp8"}
    with (
        LLM(case.base, adapter=case.adapters, **options) as llm,
        LLM(case.whole, **options) as other,
    ):
        scores = [engine.score([TEXT], use_tqdm=False)[0].logprobs for engine in (llm, other)]
        assert scores[0] == scores[1]
        [ours, theirs] = (
            engine.generate(PROMPTS, PARAMS, use_tqdm=False) for engine in (llm, other)
        )
        assert tokens(ours) == tokens(theirs)


def test_layers_that_a_quantised_checkpoint_leaves(tmp_path: Path) -> None:
    """In 16 or 32 bits, beside others in FP8."""
    plain = {"modules_to_not_convert": ["o_proj", "lm_head"]}
    quantised, exact = fp8_checkpoints(
        *(tmp_path, "blocks", "qwen3"), lambda module: module.endswith("o_proj"), plain
    )
    adapter = make_adapter(exact, tmp_path / "adapter", target_modules=["o_proj", "lm_head"])
    how = {"quantization": ModelConfig.from_pretrained(str(quantised)).quantization}
    found = loaded(quantised, [Adapter.open(adapter)], **how)
    plain, merged = (
        loaded(quantised, [], **how),
        loaded(merge(exact, tmp_path / "merged", adapter), []),
    )
    changed = [name for name in found if "o_proj" in name or "lm_head" in name]
    assert len(changed) == 3
    for name, tensor in found.items():
        if name in changed:
            torch.testing.assert_close(tensor, merged[name], atol=1e-6, rtol=1e-6)
            assert not torch.equal(tensor, plain[name])
        else:
            assert torch.equal(tensor, plain[name]), name


@pytest.mark.parametrize("case", ["several"], indirect=True)
def test_numbers_in_16_bits_are_rounded_once(case: Merged, tmp_path: Path) -> None:
    """Also those of a matrix that several adapters change."""
    base = in_bfloat16(case.base, tmp_path / "base")
    wanted = loaded(merge(base, tmp_path / "merged", *case.adapters), [])
    found = loaded(base, opened(case), dtype=torch.bfloat16)
    for name, tensor in found.items():
        assert tensor.dtype == torch.bfloat16 and torch.equal(tensor, wanted[name].bfloat16()), name
    first = in_bfloat16(merge(base, tmp_path / "first", case.adapters[0]), tmp_path / "rounded")
    twice = loaded(first, opened(case)[1:], dtype=torch.bfloat16)
    name = "model.layers.0.self_attn.qkv_proj.weight.data"
    assert not torch.equal(twice[name], found[name]), "rounding in between makes no difference"


def in_bfloat16(path: Path, out: Path) -> Path:
    """A copy in bfloat16."""
    copy = copy_checkpoint(path, out, dtype="bfloat16")
    for file in copy.glob("*.safetensors"):
        save_file({name: x.bfloat16() for name, x in load_file(file).items()}, file)
    return copy


class Watched:
    """A tensor of an adapter; counts the numbers that are read."""

    def __init__(self, name: str, source: Source, read: Counter[str]) -> None:
        self.name, self.source, self.read = name, source, read

    def get_shape(self) -> list[int]:
        return self.source.get_shape()

    def get_dtype(self) -> str:
        return self.source.get_dtype()

    def __getitem__(self, index: Any) -> torch.Tensor:
        part = self.source[index]
        self.read[self.name] += part.numel()
        return part


@pytest.mark.parametrize("case", ["all", "lengths", rare("ends")], indirect=True)
@pytest.mark.parametrize("how", [{}, {"quantization": WHILE_LOADING}], ids=["plain", "fp8"])
def test_a_rank_reads_its_part_only(case: Merged, how: dict[str, Any]) -> None:
    """Rows of B, columns of A; whole rows of W, and A, where the lengths of rows are needed."""
    read: Counter[str] = Counter()
    [adapter] = opened(case)
    watched = {name: Watched(name, source, read) for name, source in adapter.tensors.items()}
    needs_rows = adapter.config.use_dora or bool(how)
    for rank in range(2):
        read.clear()
        loaded(case.base, [Adapter(adapter.name, adapter.config, watched)], rank, 2, **how)
        assert read.keys() == watched.keys()
        for name, numel in read.items():
            module, _, kind = name.removesuffix(".weight").rpartition(".")
            if module.endswith(("o_proj", "down_proj")):
                is_split = kind == "lora_A" and not needs_rows
            else:
                is_split = kind not in ("lora_A", "lora_embedding_B")
            size = torch.Size(watched[name].get_shape()).numel()
            assert numel == (size // 2 if is_split else size), name


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": ["q_proj", "down_proj"], "use_dora": True, "lora_alpha": 3},
        {"target_modules": ["embed_tokens", "lm_head"]},  # whose layers are saved, too
    ],
    ids=str,
)
def test_an_adapter_in_memory(config: dict[str, Any], base: Path, tmp_path: Path) -> None:
    """With the dictionary of a `LoraConfig`, as trainers have it. It stays as it was."""
    from peft import LoraConfig

    path = make_adapter(base, tmp_path / "adapter", r=5, **config)
    tensors = tensors_of(path)
    for tensor in tensors.values():
        tensor.requires_grad_()
    held = Adapter.from_tensors(LoraConfig(r=5, **config).to_dict(), tensors)
    assert not any(source[:1].requires_grad for source in held.tensors.values())
    found, again = loaded(base, [held]), loaded(base, [held])
    wanted, plain = loaded(base, [Adapter.open(path)]), loaded(base, [])
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor) and torch.equal(again[name], tensor), name
    assert any(not torch.equal(tensor, plain[name]) for name, tensor in found.items())
    saved = tensors_of(path)
    assert all(torch.equal(tensor, saved[name]) for name, tensor in tensors.items())


@pytest.mark.parametrize(
    "config", [{"modules_to_save": ["lm_head"]}, {"target_modules": ["embed_tokens"]}], ids=str
)
def test_ends_that_were_one_matrix(config: dict[str, Any], tmp_path: Path) -> None:
    """With a copy of it as the head they are what peft computes before it merges."""
    tied = make_checkpoint(tmp_path / "tied", tie_word_embeddings=True, initializer_range=0.1)
    adapter = make_adapter(tied, tmp_path / "adapter", **{"target_modules": ["q_proj"], **config})
    wanted = of_text(unmerged_logprobs(tied, adapter, TEXT))
    base = copy_checkpoint(tied, tmp_path / "base", tie_word_embeddings=False)
    matrix = load_file(tied / "model.safetensors")["model.embed_tokens.weight"]
    edit_tensors(base, lm_head__weight=matrix.clone())
    with LLM(base, adapter=adapter, **SMALL) as llm:
        [score] = llm.score([TEXT], use_tqdm=False)
        torch.testing.assert_close(torch.tensor(score.logprobs), wanted, atol=1e-5, rtol=0)


# -- names ----------------------------------------------------------------------------------------


SPELLINGS: dict[str, Callable[[str], str]] = {
    "text": lambda name: name,
    "transformers 4": lambda name: re.sub(r"^(model|lm_head)\.", r"language_model.\1.", name),
    "transformers 5": lambda name: re.sub(r"^model\.", "model.language_model.", name),
}


@pytest.mark.parametrize("adapter", SPELLINGS)
@pytest.mark.parametrize("checkpoint", SPELLINGS)
def test_the_text_model_may_have_another_prefix(
    adapter: str, checkpoint: str, tmp_path: Path
) -> None:
    """In the adapter, in the checkpoint, and where they differ."""
    text = make_checkpoint(tmp_path / "text", "gemma3_text", head_dim=32)
    made = make_adapter(
        text, tmp_path / "made", modules_to_save=["lm_head"], alpha_pattern={"layers.0": 1}
    )
    wanted = loaded(merge(text, tmp_path / "merged", made), [])
    base = copy_checkpoint(text, tmp_path / "base")
    if checkpoint != "text":
        spell = SPELLINGS[checkpoint]
        tensors = {spell(name): x for name, x in load_file(text / "model.safetensors").items()}
        tensors["vision_tower.layers.0.self_attn.q_proj.weight"] = torch.zeros(2, 2)
        save_file(tensors, base / "model.safetensors")
        config = json.loads((text / "config.json").read_text())
        outer = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": config}
        (base / "config.json").write_text(json.dumps(outer))
    spell = SPELLINGS[adapter]
    renamed = {PREFIX + spell(name.removeprefix(PREFIX)): x for name, x in tensors_of(made).items()}
    config = json.loads((made / ADAPTER).read_text())
    assert_equal(loaded(base, [Adapter.from_tensors(config, renamed)]), wanted)


@pytest.mark.parametrize(
    ("path", "wrapped"),
    [
        ("base_model.", "_orig_mod.base_model."),
        ("base_model.model.", "base_model.model._orig_mod."),
        ("layers.0.", "layers.0._orig_mod."),
        ("base_model.", "module.base_model."),
        ("base_model.", "module._orig_mod.base_model."),
        ("base_model.model.", "base_model.model.module."),
        ("layers.0.", "layers.0._fsdp_wrapped_module."),
    ],
)
def test_names_of_models_that_torch_compile_and_ddp_have_wrapped(
    path: str, wrapped: str, base: Path, tmp_path: Path
) -> None:
    """Of the whole or of its layers, before or after peft's wrapper; patterns have them, too."""
    own = "model.layers.0.self_attn.q_proj"
    patterns: dict[str, Any] = {"alpha_pattern": {own: 99}, "rank_pattern": {own: 3}}
    made = make_adapter(base, tmp_path / "made", modules_to_save=["norm"], **patterns)
    renamed = {name.replace(path, wrapped): x for name, x in tensors_of(made).items()}
    assert renamed.keys() != tensors_of(made).keys()
    config = json.loads((made / ADAPTER).read_text())
    inside = (PREFIX + own).replace(path, wrapped).partition(PREFIX)[2]
    config |= {"alpha_pattern": {re.escape(inside): 99}, "rank_pattern": {inside: 3}}
    wanted = loaded(merge(base, tmp_path / "merged", made), [])
    assert_equal(loaded(base, [Adapter.from_tensors(config, renamed)]), wanted)


def test_of_a_checkpoint_without_a_head(base: Path, tmp_path: Path) -> None:
    """As embedding models are saved, with adapters of `AutoModel`."""
    path = make_checkpoint(tmp_path / "base", tie_word_embeddings=True)
    adapter = make_adapter(path, tmp_path / "adapter")
    wanted = loaded(merge(path, tmp_path / "merged", adapter), [])
    bare = copy_checkpoint(path, tmp_path / "bare")
    tensors = load_file(path / "model.safetensors")
    save_file(
        {name.removeprefix("model."): x for name, x in tensors.items()}, bare / "model.safetensors"
    )
    config = json.loads((adapter / ADAPTER).read_text())
    for prefix in (PREFIX, ""):
        renamed = {
            prefix + name.removeprefix(f"{PREFIX}model."): x
            for name, x in tensors_of(adapter).items()
        }
        for target in (bare, path):
            assert_equal(loaded(target, [Adapter.from_tensors(config, renamed)]), wanted)
