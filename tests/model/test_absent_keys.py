"""Keys that config.json lacks or has as null: they mean what transformers takes for them.

Its classes fill in their defaults and write all keys out; our reader must find the same facts in
the file before and after. Each family has a case, in which its features differ from the defaults.
"""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig

from checkpoints import SMALL, make_checkpoint
from nanovllm import LLM
from nanovllm.checkpoint.families import FAMILIES
from nanovllm.checkpoint.model_config import ModelConfig

Raw = dict[str, Any]

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": None,
}
# Twice the largest default of num_key_value_heads: where that key is absent, it is seen.
MANY_HEADS = {"hidden_size": 256, "num_attention_heads": 64}
SLIDES = {"sliding_window": 20}
UPPER_SLIDE = {**SLIDES, "use_sliding_window": True, "max_window_layers": 2}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 16.0,
    "beta_slow": 2.0,
}
FAR_APART = {
    "full_attention": YARN,
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
EXPERTS = {"num_experts_per_tok": 3, "norm_topk_prob": True}
LINEAR = {
    "head_dim": 64,
    "layer_types": ["full_attention", *["linear_attention"] * 2, "full_attention"],
    "linear_conv_kernel_dim": 3,
    "linear_key_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 32,
    "rope_parameters": {**YARN, "partial_rotary_factor": 0.5},
}
SHARED = {
    "num_experts_per_tok": 3,
    "num_experts": 6,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 48,
}
CASES: dict[str, tuple[str, Raw]] = {
    "Exaone4ForCausalLM": ("exaone4", {**SLIDES, "sliding_window_pattern": 2}),
    "Gemma2ForCausalLM": (
        "gemma2",
        {
            **SLIDES,
            "head_dim": 32,
            "query_pre_attn_scalar": 20,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 5.0,
        },
    ),
    "Gemma3ForCausalLM": (
        "gemma3_text",
        {**SLIDES, "head_dim": 32, "query_pre_attn_scalar": 20, "rope_parameters": FAR_APART},
    ),
    "Glm4ForCausalLM": ("glm4", {"head_dim": 32}),
    "GlmForCausalLM": ("glm", {"head_dim": 32, "attention_bias": False}),
    "GptOssForCausalLM": (
        "gpt_oss",
        {**SLIDES, **EXPERTS, "head_dim": 16, "num_local_experts": 5, "rope_parameters": YARN},
    ),
    "GraniteForCausalLM": (
        "granite",
        {
            "attention_bias": True,
            "attention_multiplier": 0.1,
            "embedding_multiplier": 3.0,
            "logits_scaling": 2.0,
            "residual_multiplier": 0.4,
        },
    ),
    "Lfm2ForCausalLM": (
        "lfm2",
        {
            "block_auto_adjust_ff_dim": True,
            "block_ffn_dim_multiplier": 0.7,
            "block_multiple_of": 16,
            "conv_L_cache": 4,
            "conv_bias": True,
            "layer_types": ["conv", "full_attention", "conv", "full_attention"],
            "norm_eps": 1e-4,
            "rope_parameters": YARN,
        },
    ),
    "LlamaForCausalLM": (
        "llama",
        {"attention_bias": True, "mlp_bias": True, "rope_parameters": YARN},
    ),
    "Ministral3ForCausalLM": (
        "ministral3",
        {**SLIDES, "head_dim": 32, "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.5}},
    ),
    "MinistralForCausalLM": ("ministral", {**SLIDES, "head_dim": 16}),
    "MistralForCausalLM": ("mistral", {**SLIDES, "head_dim": 24}),
    "MixtralForCausalLM": ("mixtral", {**SLIDES, **EXPERTS, "num_local_experts": 5}),
    "Olmo2ForCausalLM": ("olmo2", {"attention_bias": True}),
    "Olmo3ForCausalLM": ("olmo3", {**SLIDES, "rope_parameters": FAR_APART}),
    "Phi3ForCausalLM": (
        "phi3",
        {**SLIDES, "partial_rotary_factor": 0.5, "original_max_position_embeddings": 200},
    ),
    "Qwen2ForCausalLM": ("qwen2", UPPER_SLIDE),
    "Qwen3ForCausalLM": ("qwen3", {**UPPER_SLIDE, "head_dim": 32, "attention_bias": True}),
    "Qwen3MoeForCausalLM": (
        "qwen3_moe",
        {
            **EXPERTS,
            **UPPER_SLIDE,
            "num_experts": 6,
            "moe_intermediate_size": 48,
            "mlp_only_layers": [1],
        },
    ),
    "Qwen3NextForCausalLM": ("qwen3_next", {**LINEAR, **SHARED, "mlp_only_layers": [1]}),
    "Qwen3_5ForCausalLM": ("qwen3_5_text", LINEAR),
    "Qwen3_5MoeForCausalLM": ("qwen3_5_moe_text", {**LINEAR, **SHARED}),
    "SmolLM3ForCausalLM": (
        "smollm3",
        {**SLIDES, "use_sliding_window": True, "no_rope_layer_interval": 2},
    ),
}
# Other names of those above, and the text of models that see: its class, and that of the whole.
PARTS = {
    "gemma 3": ("Gemma3ForConditionalGeneration", "gemma3", "Gemma3ForCausalLM"),
    "ministral 3": ("Mistral3ForConditionalGeneration", "mistral3", "Ministral3ForCausalLM"),
    "qwen 3 vl": ("Qwen3VLForConditionalGeneration", "qwen3_vl", "Qwen3VLTextModel"),
    "qwen 3 vl moe": (
        "Qwen3VLMoeForConditionalGeneration",
        "qwen3_vl_moe",
        "Qwen3VLMoeTextModel",
    ),
    "qwen 3.5": ("Qwen3_5ForConditionalGeneration", "qwen3_5", "Qwen3_5ForCausalLM"),
    "qwen 3.5 moe": (
        "Qwen3_5MoeForConditionalGeneration",
        "qwen3_5_moe",
        "Qwen3_5MoeForCausalLM",
    ),
    "mistral 3": ("Mistral3ForConditionalGeneration", "mistral3", "MistralForCausalLM"),
}
TEXTS = {
    **CASES,
    "Qwen3VLTextModel": ("qwen3_vl_text", {"head_dim": 32}),
    "Qwen3VLMoeTextModel": (
        "qwen3_vl_moe_text",
        {**EXPERTS, "num_experts": 6, "moe_intermediate_size": 48, "mlp_only_layers": [1]},
    ),
}
# Without them nothing is guessed: the refusal names the key.
REQUIRED = {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"}
REQUIRED |= {"num_attention_heads", "max_position_embeddings"}
REQUIRE_THETA = {"Ministral3ForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
REQUIRE_THETA |= {"Qwen3MoeForCausalLM"}
# In the files of all families alike, and about no layer.
COMMON = {*json.loads(transformers.PretrainedConfig().to_json_string(use_diff=False))} - {"dtype"}
LISTS = ("layer_types", "no_rope_layers")  # what follows from other keys, in files that lack them


def test_every_family_has_a_case() -> None:
    named = {*CASES, *(architecture for architecture, _, _ in PARTS.values())}
    assert named == set(FAMILIES)


def full_config(name: str, **sizes: int) -> Raw:
    """All keys that transformers knows, of a case."""
    family, options = TEXTS[name]
    config = AutoConfig.for_model(family, **{**SIZES, **sizes, **options})
    config.architectures = [name]
    return written(config)


def written(config: Any) -> Raw:
    return dict(json.loads(config.to_json_string(use_diff=False)))


def without_each(full: Raw) -> Iterator[tuple[str, Raw]]:
    """`full` without each key, with each as null, and without each of RoPE's."""
    lists = {key: None for key in LISTS if key in full}
    bare = {key: value for key, value in full.items() if key not in lists}
    for key in full:
        if key in ("architectures", "model_type"):
            continue
        yield f"no {key}", {k: v for k, v in full.items() if k != key}
        if key in COMMON:
            continue
        yield f"null {key}", {**full, key: None}
        yield f"no {key}, no lists", {k: v for k, v in bare.items() if k != key}
    required = {"architectures", "model_type", *REQUIRED, *SIZES}
    yield "sizes alone", {k: v for k, v in full.items() if k in required}
    rope = full["rope_parameters"]
    for path in [(k,) for k in rope] + [
        (k, i) for k, v in rope.items() if type(v) is dict for i in v
    ]:
        copy = json.loads(json.dumps(full))
        inner = copy["rope_parameters"] if len(path) == 1 else copy["rope_parameters"][path[0]]
        del inner[path[-1]]
        yield f"no {'.'.join(path)}", copy


def write(directory: Path, raw: Raw) -> None:
    """A config.json in the place of the last: one that is overwritten goes to the disk at once."""
    file = directory / "config.json"
    file.unlink(missing_ok=True)
    file.write_text(json.dumps(raw))


def facts(directory: Path, raw: Raw) -> Raw | str:
    """Facts that we read in a config.json, or the error. End-of-text tokens are left out, as the
    tokenizer knows more of them than the defaults of a class.
    """
    write(directory, raw)
    try:
        config = ModelConfig.from_pretrained(str(directory))
    except ValueError as error:
        return str(error)
    left_out = ("source", "eos_token_ids")
    names = [f.name for f in dataclasses.fields(config) if f.name not in left_out]
    return {name: getattr(config, name) for name in names}


def filled_in(directory: Path, raw: Raw) -> Raw | None:
    """`raw` with the defaults of transformers; None where it fails."""
    write(directory, raw)
    try:
        return written(AutoConfig.from_pretrained(directory))
    except Exception:  # of many kinds, some of none of its checks
        return None


def check(directory: Path, name: str, what: str, raw: Raw) -> bool:
    """The facts are those of the file that transformers fills in. Whether there are any."""
    full = filled_in(directory, raw)
    if full is None:
        return False
    found, wanted = facts(directory, raw), facts(directory, full)
    if isinstance(found, str):
        required = [*REQUIRED, *["rope_theta"] * (name in REQUIRE_THETA)]
        is_missing = any(f"`{key}` is missing" in found for key in required)
        assert is_missing or isinstance(wanted, str), (what, found)
        return False
    if isinstance(wanted, str):  # the tensors cannot have these sizes
        return False
    differing = {k: (v, wanted[k]) for k, v in found.items() if v != wanted[k]}
    assert not differing, (what, differing)
    return True


@pytest.mark.parametrize("name", CASES)
def test_absent_keys_mean_the_defaults_of_transformers(name: str, tmp_path: Path) -> None:
    """`sliding_window` absent was read as none, where the classes have 4,096."""
    full = full_config(name, **MANY_HEADS)
    read = sum(check(tmp_path, name, what, raw) for what, raw in without_each(full))
    assert read > 40


@pytest.mark.parametrize("name", PARTS)
def test_absent_keys_of_a_text_beside_other_parts(name: str, tmp_path: Path) -> None:
    architecture, family, text = PARTS[name]
    read = 0
    for what, raw in without_each(full_config(text, **MANY_HEADS)):
        whole = {"architectures": [architecture], "model_type": family, "text_config": raw}
        if "hidden_size" in raw:
            whole["vision_config"] = {"out_hidden_size": raw["hidden_size"]}
            if family == "gemma3":
                whole["vision_config"] = {"image_size": 896, "patch_size": 14}
        read += check(tmp_path, text, what, {**whole, "tie_word_embeddings": False})
    assert read > 35


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_logprobs_without_a_key_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Wherever the absence of a key changes a fact, and the tensors still fit."""
    family, options = CASES[name]
    path = make_checkpoint(tmp_path / "model", family, **{**SIZES, **options})
    full = full_config(name)
    text = torch.randint(128, (60,), generator=torch.Generator().manual_seed(0)).tolist()
    known: list[Raw] = []
    for what, raw in [("all keys", full), *without_each(full)]:
        found = facts(path, raw)
        if isinstance(found, str) or found in known or (wanted := logprobs(path, text)) is None:
            continue
        try:
            llm = LLM(path, **SMALL)
        except ValueError:  # its tensors do not fit
            continue
        with llm:
            [score] = llm.score([text], use_tqdm=False)
        known.append(found)
        difference = (torch.tensor(score.logprobs) - wanted).abs().max()
        assert difference < 5e-4, what
    assert known


def logprobs(path: Path, text: list[int]) -> torch.Tensor | None:
    """Log-probabilities of a text by transformers; None where it fails."""
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        with torch.inference_mode():
            logits = model(torch.tensor([text])).logits[0, :-1]
    except Exception:  # of many kinds, some of none of its checks
        return None
    return logits.log_softmax(-1).gather(1, torch.tensor(text[1:])[:, None])[:, 0]
