"""The model families against transformers: what distinguishes them from Qwen3, and from each other.

Small random checkpoints in which each special feature matters, on one rank and on two.
"""

import json
import math
import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import fp8_checkpoints
import int4_checkpoints
import mxfp4_checkpoints
import pytest
import torch
from attention_cases import HAS_CUDA
from new_weights import assert_models_fit, assert_weights_change, with_other_values
from plain_modules import assert_layers_know_their_names
from ranks_in_threads import ranks_of
from safetensors.torch import load_file, save_file
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from checkpoints import (
    LLAMA3,
    PARAMS,
    PROMPTS,
    SMALL,
    assert_greedy,
    greedy,
    make_checkpoint,
    rare,
    reference_logprobs,
    small_config,
    with_rare,
)
from nanovllm import LLM
from nanovllm.attention.torch_backend import TorchBackend
from nanovllm.attention.triton_backend import HEAD_DIMS, TritonBackend
from nanovllm.checkpoint.int8 import Int8
from nanovllm.checkpoint.model_config import LayerConfig, ModelConfig
from nanovllm.checkpoint.modules import Modules
from nanovllm.checkpoint.quantization import WHILE_LOADING, Quantization, Rule
from nanovllm.checkpoint.rope import RopeParameters
from nanovllm.distributed.group import Group
from nanovllm.layers.base import Build
from nanovllm.layers.linear import LinearBase
from nanovllm.layers.rotary_embedding import frequencies
from nanovllm.layers.weights.quantized import dequantize
from nanovllm.layers.weights.weight import Weight
from nanovllm.models import model_class
from nanovllm.models.loader import load_model
from nanovllm.tensors.fp8 import FP8, Codes
from nanovllm.tensors.int4 import Int4Codes
from nanovllm.tensors.kv_cache import KVCache
from nanovllm.tensors.mxfp4 import Mxfp4Codes
from nanovllm.utils.context import Context, use_context

SLIDES = {"sliding_window": 20}  # shorter than prompts, and no multiple of a block or a tile
ROPE = {"rope_theta": 1000.0, "original_max_position_embeddings": 32}
YARN = {**ROPE, "rope_type": "yarn", "factor": 4.0}
LONG = {
    **ROPE,
    "rope_type": "longrope",
    "original_max_position_embeddings": 200,
    "short_factor": [1.0, 1.5, 2.0, 3.0],
    "long_factor": [2.0, 3.0, 5.0, 9.0],
}
BY_KIND = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, a KV head for each query": ("llama", {"num_key_value_heads": 4, "seed": 1}),
    "llama, products in tiles": (
        "llama",
        {
            "hidden_size": 512,
            "intermediate_size": 512,
            "num_hidden_layers": 1,
            "attention_bias": True,
            "mlp_bias": True,
            "initializer_range": 0.1,
        },
    ),
    "llama 3": ("llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen2, windows": (
        "qwen2",
        {**SLIDES, "use_sliding_window": True, "max_window_layers": 1, "num_hidden_layers": 3},
    ),
    "qwen3": ("qwen3", {"attention_bias": True}),
    "mistral": ("mistral", {"sliding_window": None, "head_dim": 24}),
    "mistral, windows": ("mistral", SLIDES),
    "ministral 3": (
        "ministral3",
        {
            "head_dim": 32,
            "rope_parameters": {
                **YARN,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.5,
            },
        },
    ),
    "phi 3": ("phi3", SLIDES),
    "phi 4 mini": (
        "phi3",
        {
            "partial_rotary_factor": 0.5,
            "original_max_position_embeddings": 200,
            "rope_parameters": LONG,
        },
    ),
    "smollm 3": ("smollm3", {"num_hidden_layers": 4}),
    "smollm 3, windows": (
        "smollm3",
        {
            **SLIDES,
            "use_sliding_window": True,
            "no_rope_layer_interval": 2,
            "num_hidden_layers": 4,
        },
    ),
    "granite": (
        "granite",
        {
            "attention_bias": True,
            "attention_multiplier": 0.1,
            "embedding_multiplier": 3.0,
            "logits_scaling": 2.0,
            "residual_multiplier": 0.4,
        },
    ),
    "glm 4 9b": ("glm", {"head_dim": 32}),
    "glm 4": ("glm4", {"head_dim": 32}),
    "olmo 2": ("olmo2", {}),
    "olmo 2, one KV head": ("olmo2", {"num_key_value_heads": 1}),
    "olmo 3": (
        "olmo3",
        {
            **SLIDES,
            "num_hidden_layers": 5,
            "rope_parameters": {
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
            },
        },
    ),
    "gemma 2": (
        "gemma2",
        {
            **SLIDES,
            "head_dim": 32,
            "query_pre_attn_scalar": 20,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 5.0,
            "num_hidden_layers": 3,
        },
    ),
    "gemma 3": (
        "gemma3_text",
        {
            **SLIDES,
            "head_dim": 32,
            "query_pre_attn_scalar": 20,
            "num_hidden_layers": 7,
            "rope_parameters": BY_KIND,
        },
    ),
    "exaone 4": (
        "exaone4",
        {"sliding_window_pattern": 2, **SLIDES, "num_hidden_layers": 4},
    ),
    "exaone 4, no window": (
        "exaone4",
        {"sliding_window": None, "layer_types": ["full_attention"] * 2},
    ),
    "qwen 3 moe": (
        "qwen3_moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "mlp_only_layers": [1],
            "norm_topk_prob": True,
            "num_hidden_layers": 3,
        },
    ),
    "mixtral, one expert": ("mixtral", {"num_local_experts": 3, "num_experts_per_tok": 1}),
    "gpt oss": (
        "gpt_oss",
        {
            "head_dim": 16,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "initializer_range": 0.35,  # gates beyond the limit
            "rope_parameters": {**YARN, "factor": 32.0, "truncate": False},
            **SLIDES,
        },
    ),
    "mixtral": ("mixtral", {"num_local_experts": 5}),
}
TEXT = [(7 * i) % 127 for i in range(100)]
NUM_PREFILLED = 24  # by fused layers: more than a window, and than a tile of 16


# What distinguishes them is tried with another family, or without a whole model.
COVERED = {"exaone 4, no window", "llama, a KV head for each query", "mistral"}
COVERED |= {"olmo 2, one KV head", "smollm 3", "qwen2, tied", "mixtral, one expert", "qwen3"}


@pytest.fixture(scope="module", params=with_rare(CHECKPOINTS, *COVERED))
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, options = CHECKPOINTS[request.param]
    return make_checkpoint(tmp_path_factory.mktemp("families") / "model", family, **options)


MODES: list[dict[str, Any]] = [
    {},
    {"max_num_batched_tokens": 12, "num_kvcache_blocks": 8},
    {"kvcache_block_size": 256, "max_model_len": 200},
]


@pytest.mark.usefixtures("low_guesses")
def test_tokens_are_those_of_transformers(path: Path) -> None:
    """In chunks, after preemptions, with prefix hits, and in blocks of 16 and 256."""
    seen = dict.fromkeys(("num_preemptions", "num_cached_tokens"), 0)
    for n, options in zip((8, 20, 8), MODES, strict=True):  # only small pools need time to preempt
        with LLM(path, **{**SMALL, **options}) as llm:
            outputs = llm.generate(PROMPTS, greedy(n), use_tqdm=False)
            assert [len(output["token_ids"]) for output in outputs] == [n] * len(PROMPTS)
            assert_greedy(path, PROMPTS, outputs)
            metrics = llm.metrics()
        seen = {key: count + metrics[key] for key, count in seen.items()}
    if any(layer.window for layer in ModelConfig.from_pretrained(str(path)).layers):
        del seen["num_preemptions"]  # blocks come back, so the pool may be large enough
    assert min(seen.values()) > 0, seen


@pytest.mark.usefixtures("low_guesses")
def test_blocks_behind_the_window_of_all_layers_are_given_back(tmp_path: Path) -> None:
    """Four sequences of up to 77 tokens, 5 blocks each, end side by side in a pool of 14."""
    path = make_checkpoint(tmp_path / "model", "mistral", **SLIDES)
    prompts = [[7 * i + j for j in range(9 + i)] for i in range(4)]
    with LLM(path, **{**SMALL, "num_kvcache_blocks": 14}) as llm:
        assert_greedy(path, prompts, llm.generate(prompts, greedy(65), use_tqdm=False))
        assert llm.metrics()["num_preemptions"] == 0


@pytest.mark.usefixtures("low_guesses")
@pytest.mark.parametrize("overlap", [False, True])
def test_layers_that_slide_keep_a_window(overlap: bool, tmp_path: Path) -> None:
    """One layer of five sees all tokens. Six sequences of up to 79 tokens, 5 blocks each, run side
    by side in a pool of 22; a pool for 96 tokens in all layers computes one of 182.
    """
    family, config = CHECKPOINTS["olmo 3"]
    path = make_checkpoint(tmp_path / "model", family, **config)
    rng = random.Random(3)
    prompts = [[rng.randrange(127) for _ in range(9 + i)] for i in range(6)]
    long = [rng.randrange(127) for _ in range(170)]
    options = {**SMALL, "max_model_len": 256, "max_num_batched_tokens": 16, "overlap": overlap}
    with LLM(path, **{**options, "num_kvcache_blocks": 22}) as llm:
        assert_greedy(path, prompts, llm.generate(prompts, greedy(65), use_tqdm=False))
        assert llm.metrics()["num_preemptions"] == 0
    with LLM(path, **{**options, "num_kvcache_blocks": 6}) as llm:
        for num_cached in (0, 160):
            assert_greedy(path, [long], llm.generate([long], greedy(12), use_tqdm=False))
            assert llm.metrics()["num_cached_tokens"] == num_cached


def test_logprobs_are_those_of_transformers(path: Path) -> None:
    """Log-probabilities of prompts of one to several blocks, within 1e-4."""
    wanted = reference_logprobs(path, TEXT)
    texts = [TEXT[:n] for n in (2, 15, 16, 17, 48, 100)]
    with LLM(path, **SMALL) as llm:
        for text, score in zip(texts, llm.score(texts, use_tqdm=False), strict=True):
            following = torch.tensor(text[1:])
            want = wanted[: len(text) - 1].gather(1, following[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(score.logprobs), want, atol=1e-4, rtol=0)


# Packed tensors, biases, tied heads, experts, windows.
REPLACED = {"phi 3", "qwen2, tied", "llama, biases", "qwen 3 moe", "gpt oss", "gemma 2"}


@pytest.mark.parametrize(
    "path", with_rare(CHECKPOINTS, *(CHECKPOINTS.keys() - REPLACED)), indirect=True
)
def test_new_weights_are_those_of_a_fresh_engine(path: Path, tmp_path: Path) -> None:
    assert_weights_change(path, with_other_values(path, tmp_path / "other"))


# Experts that the checkpoint has one by one, or under other names; packed tensors; tied heads.
LEARNT = {"qwen 3 moe", "mixtral", "gpt oss", "phi 3", "qwen2, tied"}


@pytest.mark.parametrize(
    "path", with_rare(CHECKPOINTS, *(CHECKPOINTS.keys() - LEARNT)), indirect=True
)
def test_new_weights_of_a_model_of_transformers(path: Path, tmp_path: Path) -> None:
    assert_models_fit(path, with_other_values(path, tmp_path / "other"))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("path", ["mixtral"], indirect=True)
@pytest.mark.parametrize("options", [{"tensor_parallel_size": 2}, rare({"data_parallel_size": 2})])
def test_new_weights_of_a_model_for_several_ranks(
    options: dict[str, int], path: Path, tmp_path: Path
) -> None:
    assert_models_fit(path, with_other_values(path, tmp_path / "other"), **options)


@pytest.mark.parametrize("path", CHECKPOINTS, indirect=True)
def test_layers_know_their_names_and_sizes(path: Path) -> None:
    assert_layers_know_their_names(path)


# Packed tensors, biases, multipliers, norms over all heads, KV heads that several ranks have.
DIVIDED = {"granite", "llama, biases", "olmo 2, one KV head", "gpt oss", "phi 3", "qwen 3 moe"}
DIVIDED |= {"qwen2, tied"}


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(
    "path", with_rare(CHECKPOINTS, *(CHECKPOINTS.keys() - DIVIDED)), indirect=True
)
def test_tokens_of_two_ranks_are_those_of_transformers(path: Path) -> None:
    with LLM(path, tensor_parallel_size=2, **SMALL) as llm:
        assert len(ranks_of(llm).runners) == 2
        assert_greedy(path, PROMPTS, llm.generate(PROMPTS, PARAMS, use_tqdm=False))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(
    "path", with_rare(CHECKPOINTS, *(CHECKPOINTS.keys() - {"qwen2, tied"})), indirect=True
)
def test_new_weights_of_two_ranks(path: Path, tmp_path: Path) -> None:
    other = with_other_values(path, tmp_path / "other")
    assert_weights_change(path, other, tensor_parallel_size=2)


# With Triton's interpreter each takes seconds; these have every switch of the kernels.
SWITCHES = {
    "llama, products in tiles",
    "qwen3",
    "gemma 2",
    "olmo 2",
    "gpt oss",
    "mixtral, one expert",
}


@pytest.mark.parametrize(
    "path",
    CHECKPOINTS if HAS_CUDA else with_rare(CHECKPOINTS, *(CHECKPOINTS.keys() - SWITCHES)),
    indirect=True,
)
def test_fused_layers_compute_what_plain_layers_do(path: Path, kernel_device: str) -> None:
    """A prefill and a decode step, the fused one through Triton's interpreter where there is no
    GPU: biases, norms and windows must not get lost in a kernel.
    """
    config = ModelConfig.from_pretrained(str(path))
    if config.head_dim not in HEAD_DIMS:
        pytest.skip(f"no kernels for heads of {config.head_dim}")
    compare_fused_layers(path, torch.float16, kernel_device)


@pytest.mark.parametrize("path", ["qwen3", rare("gemma 2")], indirect=True)
def test_fused_layers_with_an_fp8_cache(path: Path, kernel_device: str) -> None:
    compare_fused_layers(path, FP8, kernel_device)


@pytest.mark.parametrize("path", ["qwen3", rare("qwen2, tied"), rare("gemma 2")], indirect=True)
def test_fused_layers_with_fp8_weights(
    path: Path, kernel_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One layer, the plain one with activations rounded likewise. Where theirs is the other
    neighbour, a number differs by 2 ** -3: that is seldom, but later layers would amplify it.
    """
    pytest.importorskip("triton")
    from nanovllm.kernels.products import fp8_linear

    quantize, shapes = fp8_linear.quantize, []
    monkeypatch.setattr(
        fp8_linear, "quantize", lambda x, n: shapes.append(x.shape) or quantize(x, n)
    )
    for plain, fused in compared_layers(path, torch.float16, kernel_device, WHILE_LOADING):
        assert (plain - fused).norm() < 2.0**-4 * plain.norm()
    # The embedding, and attention's outputs: norms and activations have done the rest.
    assert [len(shape) for shape in shapes] == [2, 2] and shapes[0][0] == shapes[1][
        0
    ] == NUM_PREFILLED


# Modules that stay in 16 bits, and the products in FP8 that quantise what they multiply, because no
# norm and no activation does: those of the embedding and of attention's outputs.
LEFT = {
    "o_proj": ["qkv_proj"],
    "self_attn": [],
    "(gate|up)_proj": ["qkv_proj", "o_proj"],
    "down_proj": ["qkv_proj", "o_proj"],
    "layers.0": ["o_proj"],
    "layers.1": ["qkv_proj", "o_proj"],
}


@pytest.mark.parametrize("path", ["qwen3", rare("gemma 2")], indirect=True)
@pytest.mark.parametrize("left", LEFT)
def test_fused_layers_of_which_some_are_in_fp8(
    path: Path, left: str, kernel_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A norm quantises where the product that follows is in FP8, and so does an activation."""
    pytest.importorskip("triton")
    from nanovllm.kernels.products import fp8_linear

    quantize, shapes = fp8_linear.quantize, []
    monkeypatch.setattr(
        fp8_linear, "quantize", lambda x, n: shapes.append(x.shape) or quantize(x, n)
    )
    rule = Rule("ignore", Modules.named("ignore", [f"re:.*{left}"]))
    partly = replace(WHILE_LOADING, rules=(rule,))
    num_layers = 2 if left.startswith("layers") else 1
    for plain, fused in compared_layers(path, torch.float16, kernel_device, partly, num_layers):
        assert (plain - fused).norm() < 2.0**-4 * plain.norm()

    assert len(shapes) == len(LEFT[left])


@pytest.mark.parametrize("path", ["qwen 3 moe", rare("mixtral")], indirect=True)
def test_fused_layers_with_experts_in_fp8(
    path: Path, kernel_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention's products alone have rounded activations: kernels take the codes of experts,
    which no dequantised numbers replace.
    """
    pytest.importorskip("triton")
    from nanovllm.kernels.experts import gated_experts as experts

    gated_experts, taken = experts.gated_experts, []
    monkeypatch.setattr(
        experts, "gated_experts", lambda x, w, *more: taken.append(w) or gated_experts(x, w, *more)
    )
    for plain, fused in compared_layers(path, torch.float16, kernel_device, WHILE_LOADING):
        assert (plain - fused).norm() < 2.0**-4 * plain.norm()
    assert len(taken) == 2
    assert all(isinstance(codes, Codes) for weights in taken for codes in weights[:2])


@pytest.mark.parametrize("held", ["int4", "int4, one matrix without kernels", "mxfp4"])
def test_fused_layers_with_experts_in_4_bits(
    held: str, kernel_device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One token of the decode, too, goes through tiles. Matrices of 96 columns have no kernels, and
    so both of an expert are dequantised.
    """
    pytest.importorskip("triton")
    from nanovllm.kernels.experts import gated_experts as experts

    if held == "mxfp4":
        path, _ = mxfp4_checkpoints.checkpoints(tmp_path)
    else:
        inner = 128 if held == "int4" else 96
        shape = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": inner}
        says = {"modules_to_not_convert": ["self_attn"], "group_size": math.gcd(128, inner)}
        path, _ = int4_checkpoints.checkpoints(
            tmp_path, "awq", "qwen3_moe", lambda module: "self_attn" in module, says, **shape
        )
    gated_experts, taken = experts.gated_experts, []
    monkeypatch.setattr(
        experts, "gated_experts", lambda x, w, *more: taken.append(w) or gated_experts(x, w, *more)
    )
    found = ModelConfig.from_pretrained(str(path)).quantization
    for plain, fused in compared_layers(path, torch.float16, kernel_device, found, 2):
        assert (plain - fused).norm() < 0.01 * plain.norm()
    format = {"mxfp4": Mxfp4Codes, "int4": Int4Codes}.get(held, torch.Tensor)
    assert len(taken) == 4
    assert all(isinstance(codes, format) for weights in taken for codes in weights[:2])


@pytest.mark.parametrize("way", ["int8 rows", "int8 tensor"])
def test_fused_layers_in_int8(way: str, kernel_device: str, tmp_path: Path) -> None:
    """Products of several rows round their activations, too: where the numbers before differ in
    their last bit, some fall to another integer, a hundredth of the largest away.
    """
    pytest.importorskip("triton")
    from nanovllm.kernels.products import int8_linear

    path, _ = fp8_checkpoints.checkpoints(tmp_path, way, hidden_size=128)
    found = ModelConfig.from_pretrained(str(path)).quantization
    with patch.object(int8_linear, "linear", wraps=int8_linear.linear) as products:
        compared = compared_layers(path, torch.float16, kernel_device, found)
    assert products.call_count == 7, "four products of the prefill, and all but a gated row's"
    for plain, fused in compared:
        assert (plain - fused).norm() < 0.02 * plain.norm()


def test_fused_layers_with_experts_in_int8(kernel_device: str, tmp_path: Path) -> None:
    """Experts have activations in 16 bits."""
    says = {"ignore": ["lm_head", "re:.*self_attn.*"]}
    path, _ = fp8_checkpoints.checkpoints(
        tmp_path, "int8 rows", "qwen3_moe", lambda module: "self_attn" in module, says
    )
    found = ModelConfig.from_pretrained(str(path)).quantization
    for plain, fused in compared_layers(path, torch.float16, kernel_device, found, 2):
        assert (plain - fused).norm() < 0.01 * plain.norm()


def round_activations(model: torch.nn.Module) -> None:
    """Let products round several rows to FP8 or INT8, each with a scale of its own."""

    def rounded(x: torch.Tensor, to_int8: bool) -> torch.Tensor:
        if len(x) == 1:
            return x
        scales = x.float().abs().amax(1, keepdim=True) / (127 if to_int8 else 448)
        scaled = x.float() / scales
        return ((scaled.round() if to_int8 else scaled.to(FP8).float()) * scales).to(x.dtype)

    def product(weight: Weight, x: torch.Tensor, bias: Any, *_: Any) -> torch.Tensor:
        return torch.nn.functional.linear(rounded(x, weight.to_int8), weight.data, bias)

    for module in model.modules():
        found = module.build.quantization if isinstance(module, LinearBase) else None
        format = None if found is None else found.of(module.sources(module.build.path))
        if format is not None:
            module.weight.to_int8 = isinstance(format, Int8)
            module.weight.product = partial(product, module.weight)


def compare_fused_layers(path: Path, cache_dtype: torch.dtype, kernel_device: str) -> None:
    for plain, fused in compared_layers(path, cache_dtype, kernel_device):
        torch.testing.assert_close(fused, plain, atol=4e-2, rtol=4e-2)


def compared_layers(
    path: Path,
    cache_dtype: torch.dtype,
    kernel_device: str,
    quantization: Quantization | None = None,
    num_layers: int = 1,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Hidden states of a prefill and of a decode step, by plain layers and by fused ones: by few
    layers, if they are quantised.
    """
    pytest.importorskip("triton")
    from nanovllm.kernels.attention import decode_few as paged_own

    config, own = ModelConfig.from_pretrained(str(path)), (paged_own, "own_decode")
    states: list[list[torch.Tensor]] = []
    n = NUM_PREFILLED
    for fused, backend in ((False, TorchBackend()), (True, TritonBackend())):
        build = Build(torch.float16, fused, Group(), backend, 128, 16, cache_dtype, quantization)
        with torch.device(kernel_device), torch.inference_mode():
            model = model_class(config.architecture)(config, build)
            load_model(model, path)
            dequantize(model)
            if quantization is not None:
                del model.model.layers[num_layers:]
                if not fused:
                    round_activations(model)
            shape = 1, 64, config.num_key_value_heads, config.head_dim
            for layer in model.model.layers:
                cache = KVCache.empty(shape, cache_dtype, torch.device(kernel_device))
                parts = {k: part for k, part in cache._asdict().items() if part is not None}
                layer.self_attn.attn.bind(**parts)
            ids = torch.tensor(TEXT[: n + 1], dtype=torch.int32)
            positions, table = torch.arange(n + 1, dtype=torch.int32), torch.zeros(1, 1).int()
            lens = torch.tensor([0, n]).int()
            prefill = Context(0, positions[:n], lens[1:], table, lens, lens, n, n)
            with use_context(prefill):
                prefilled = model(ids[:n], positions[:n])
            decode = Context(1, positions[n:], lens[1:] + 1, table)
            with use_context(decode), patch.object(*own, wraps=getattr(*own)) as by_itself:
                states.append([prefilled, model(ids[n:], positions[n:])])
            layers = [layer.self_attn.attn for layer in model.model.layers]
            assert by_itself.call_count == sum(layer.max_fused_decodes > 0 for layer in layers)
            assert fused or not any(layer.max_fused_decodes for layer in layers)
            assert not any(
                layer.max_fused_decodes for layer in layers if layer.rope.query_scale is not None
            )
    return list(zip(*states, strict=True))


# -- facts ----------------------------------------------------------------------------------------


ROPES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "default": ("llama", 128, {"rope_type": "default"}),
    "linear": ("llama", 128, {"rope_type": "linear", "factor": 8.0}),
    "dynamic": ("llama", 128, {"rope_type": "dynamic", "factor": 4.0}),
    "dynamic, beyond": ("llama", 700, {"rope_type": "dynamic", "factor": 4.0}),
    "llama 3.1 8b": ("llama", 128, {**LLAMA3, "original_max_position_embeddings": 8192}),
    "yarn": ("qwen3", 128, YARN),
    "gpt-oss's yarn": (
        "qwen3",
        128,
        {**YARN, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    ),
    "mscale": ("qwen3", 128, {**YARN, "mscale": 0.7, "mscale_all_dim": 1.2}),
    "longrope, short": ("phi3", 200, LONG),
    "longrope, long": ("phi3", 201, LONG),
    "half of a head": ("glm", 128, {"rope_type": "default", "partial_rotary_factor": 0.5}),
}


@pytest.mark.parametrize("name", ROPES)
def test_rotations_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """For contexts of that length, as the engine is told them."""
    family, length, rope = ROPES[name]
    rope = {"rope_theta": 50000.0, **rope}
    size = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1}
    size |= {"num_key_value_heads": 4}
    size |= {"head_dim": 16} if family != "phi3" else {"original_max_position_embeddings": 200}
    size |= {"partial_rotary_factor": 0.5} if family == "phi3" else {}
    config = AutoConfig.for_model(
        family, max_position_embeddings=400, rope_parameters=rope, pad_token_id=0, **size
    )
    config.architectures = [f"{family.title()}ForCausalLM"]
    config.save_pretrained(tmp_path)
    read = ModelConfig.from_pretrained(str(tmp_path)).layers[0].rope
    if rope["rope_type"] == "default":
        half = read.rotary_dim // 2
        wanted, factor = 50000.0 ** (-torch.arange(half) / half), 1.0
    else:
        init = ROPE_INIT_FUNCTIONS[rope["rope_type"]]
        wanted, factor = init(config, torch.device("cpu"), seq_len=length)
    torch.testing.assert_close(frequencies(read, length), wanted, rtol=1e-5, atol=1e-9)
    assert read.attention_factor == pytest.approx(factor)


BY_LENGTH: dict[str, tuple[str, dict[str, Any]]] = {
    "dynamic": ("llama", {"rope_parameters": {"rope_theta": 100.0, "rope_type": "dynamic"}}),
    "longrope": (
        "phi3",
        {"rope_parameters": {**LONG, "short_factor": [1.0] * 8, "long_factor": [1.0, 6.0] * 4}},
    ),
}


@pytest.mark.parametrize("name", BY_LENGTH)
def test_scalings_that_go_by_the_length_go_by_the_longest(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """So texts of the longest length are those of transformers; and all others, with a limit of the
    original context. What is not is said.
    """
    family, options = BY_LENGTH[name]
    rope = {**options["rope_parameters"], "factor": 4.0, "original_max_position_embeddings": 32}
    sizes = {"max_position_embeddings": 32 if name == "dynamic" else 128, "rope_parameters": rope}
    if name == "longrope":
        sizes["original_max_position_embeddings"] = 32
    path = make_checkpoint(tmp_path / "model", family, **sizes)
    for longest, length in ((32, 32), (32, 9), (100, 100), (100, 9)):
        caplog.clear()
        with LLM(path, **{**SMALL, "max_model_len": longest}) as llm:
            [score] = llm.score([TEXT[: length - 1]], use_tqdm=False)
        following = torch.tensor(TEXT[1 : length - 1])[:, None]
        # The last token is not looked at, but makes the text as long as the limit.
        want = reference_logprobs(path, TEXT[:length])[: length - 2].gather(1, following)[:, 0]
        difference = (torch.tensor(score.logprobs) - want).abs().max()
        warned = [r for r in caplog.records if "depends on max_model_len (100)" in r.getMessage()]
        assert (difference < 1e-4) == (longest == 32 or length == 100), (longest, length)
        assert len(warned) == (longest == 100)


LLAMA32 = RopeParameters(
    500000.0,
    64,
    "llama3",
    factor=32.0,
    original_max_position_embeddings=8192,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
)
PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Llama-2-7b-hf": (
        {
            "architectures": ["LlamaForCausalLM"],
            "hidden_act": "silu",
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "max_position_embeddings": 4096,
            "model_type": "llama",
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 32,
            "pretraining_tp": 1,
            "rms_norm_eps": 1e-05,
            "rope_scaling": None,
            "tie_word_embeddings": False,
            "torch_dtype": "float16",
            "vocab_size": 32000,
            "eos_token_id": 2,
        },
        {
            "head_dim": 128,
            "layers": (LayerConfig(RopeParameters(10000.0, 128)),) * 32,
            "qk_norm": "",
            "qkv_bias": False,
            "output_bias": False,
            "mlp_bias": False,
            "eos_token_ids": frozenset({2}),
        },
    ),
    "Llama-3.2-1B": (
        {
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": False,
            "eos_token_id": [128001, 128008, 128009],
            "head_dim": 64,
            "hidden_act": "silu",
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "max_position_embeddings": 131072,
            "mlp_bias": False,
            "model_type": "llama",
            "num_attention_heads": 32,
            "num_hidden_layers": 16,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "factor": 32.0,
                "high_freq_factor": 4.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
            "rope_theta": 500000.0,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "vocab_size": 128256,
        },
        {
            "head_dim": 64,
            "layers": (LayerConfig(LLAMA32),) * 16,
            "eos_token_ids": frozenset({128001, 128008, 128009}),
        },
    ),
    "Phi-3-mini-128k-instruct": (
        {
            "architectures": ["Phi3ForCausalLM"],
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "max_position_embeddings": 131072,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 32,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "long_factor": [2.0] * 48,
                "short_factor": [1.5] * 48,
                "type": "longrope",
            },
            "rope_theta": 10000.0,
            "sliding_window": 262144,
            "vocab_size": 32064,
            "eos_token_id": 32000,
        },
        {
            "head_dim": 96,
            "layers": (
                LayerConfig(
                    RopeParameters(
                        10000.0,
                        96,
                        "longrope",
                        factor=32.0,
                        original_max_position_embeddings=4096,
                        attention_factor=math.sqrt(1 + math.log(32) / math.log(4096)),
                        short_factor=(1.5,) * 48,
                        long_factor=(2.0,) * 48,
                    ),
                    window=262144,
                ),
            )
            * 32,
            "packed_qkv": True,
        },
    ),
    "gemma-2-9b": (
        {
            "architectures": ["Gemma2ForCausalLM"],
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": None,
            "head_dim": 256,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size": 3584,
            "intermediate_size": 14336,
            "max_position_embeddings": 8192,
            "num_attention_heads": 16,
            "num_hidden_layers": 2,
            "num_key_value_heads": 8,
            "query_pre_attn_scalar": 256,
            "rope_theta": 10000.0,
            "sliding_window": 4096,
            "vocab_size": 256000,
        },
        {
            "attention_multiplier": 1 / 16,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 0.0,
            "layers": (
                LayerConfig(RopeParameters(10000.0, 256), window=4096),
                LayerConfig(RopeParameters(10000.0, 256)),
            ),
            "tie_word_embeddings": True,
        },
    ),
    "gemma-3-4b-it": (
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "eos_token_id": [1, 106],
            "text_config": {
                "hidden_size": 2560,
                "intermediate_size": 10240,
                "model_type": "gemma3_text",
                "num_hidden_layers": 6,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                "sliding_window": 1024,
            },
            "torch_dtype": "bfloat16",
            "vision_config": {"hidden_size": 1152, "image_size": 896, "patch_size": 14},
        },
        {
            "head_dim": 256,
            "layers": (
                *(LayerConfig(RopeParameters(10000.0, 256), window=1024),) * 5,
                LayerConfig(
                    RopeParameters(
                        1e6,
                        256,
                        "linear",
                        factor=8.0,
                        original_max_position_embeddings=131072,
                    )
                ),
            ),
            "num_key_value_heads": 4,
            "vocab_size": 262208,
            "eos_token_ids": frozenset({1, 106}),
        },
    ),
    "Olmo-3-7B": (
        {
            "architectures": ["Olmo3ForCausalLM"],
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "max_position_embeddings": 65536,
            "num_attention_heads": 32,
            "num_hidden_layers": 4,
            "rope_scaling": {
                "attention_factor": 1.2,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "factor": 8.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "yarn",
            },
            "rope_theta": 500000,
            "sliding_window": 4096,
            "vocab_size": 100278,
        },
        {
            "layers": (
                *(LayerConfig(RopeParameters(500000.0, 128), window=4096),) * 3,
                LayerConfig(
                    RopeParameters(
                        500000.0,
                        128,
                        "yarn",
                        factor=8.0,
                        original_max_position_embeddings=8192,
                        attention_factor=1.2,
                    )
                ),
            ),
            "qk_norm": "whole",
        },
    ),
    "Qwen2.5-7B-Instruct": (
        {
            "architectures": ["Qwen2ForCausalLM"],
            "bos_token_id": 151643,
            "eos_token_id": 151645,
            "hidden_act": "silu",
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "max_position_embeddings": 32768,
            "max_window_layers": 28,
            "model_type": "qwen2",
            "num_attention_heads": 28,
            "num_hidden_layers": 28,
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-06,
            "rope_theta": 1000000.0,
            "sliding_window": 131072,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "use_sliding_window": False,
            "vocab_size": 152064,
        },
        {
            "head_dim": 128,
            "layers": (LayerConfig(RopeParameters(1000000.0, 128)),) * 28,
            "qk_norm": "",
            "qkv_bias": True,
            "output_bias": False,
        },
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_are_read(name: str, tmp_path: Path) -> None:
    raw, wanted = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = ModelConfig.from_pretrained(str(tmp_path))
    assert {field: getattr(config, field) for field in wanted} == wanted


# -- checkpoints with other parts, and what cannot run --------------------------------------------


@pytest.mark.parametrize("spelling", ["transformers 4", "transformers 5"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "own head"])
def test_of_a_model_that_sees_the_language_part_runs(
    tied: bool, spelling: str, tmp_path: Path
) -> None:
    """Gemma 3 from 4B on: the part for text is told apart by the names of its tensors."""
    _, options = CHECKPOINTS["gemma 3"]
    text = make_checkpoint(tmp_path / "text", "gemma3_text", **options, tie_word_embeddings=tied)
    whole = tmp_path / "whole"
    whole.mkdir()
    prefixes = ("language_model.model.", "language_model.lm_head.")
    if spelling == "transformers 5":
        prefixes = ("model.language_model.", "lm_head.")
    tensors = {"vision_tower.patch.weight": torch.zeros(3, 3)}
    for name, tensor in load_file(text / "model.safetensors").items():
        prefix = prefixes[name.startswith("lm_head.")]
        tensors[prefix + name.removeprefix("model.").removeprefix("lm_head.")] = tensor
    save_file(tensors, whole / "model.safetensors")
    config = json.loads((text / "config.json").read_text())
    outer = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "vision_config": {"image_size": 896, "patch_size": 14},
    }
    (whole / "config.json").write_text(json.dumps({**outer, "text_config": config}))
    with LLM(whole, **SMALL) as llm:
        assert_greedy(text, PROMPTS, llm.generate(PROMPTS, PARAMS, use_tqdm=False))
    save_file({**tensors, "extra.weight": torch.zeros(3)}, whole / "model.safetensors")
    with pytest.raises(ValueError, match=r"not used by this model: extra\.weight"):
        LLM(whole, **SMALL)


def test_what_is_no_checkpoint_says_what_to_do(tmp_path: Path) -> None:
    adapter, gguf, pickled = (tmp_path / name for name in ("adapter", "gguf", "pickled"))
    for directory in (adapter, gguf, pickled):
        directory.mkdir()
    base = {"base_model_name_or_path": "Qwen/Qwen3-0.6B"}
    (adapter / "adapter_config.json").write_text(json.dumps(base))
    (gguf / "model-Q4_K_M.gguf").write_bytes(b"GGUF")
    small_config(pickled)
    (pickled / "pytorch_model.bin").write_bytes(b"")
    for directory, match in (
        (adapter, r"holds an adapter.*pass its base model 'Qwen/Qwen3-0.6B' as `model`"),
        (gguf, r"holds GGUF files, which are not supported: pass the original"),
        (pickled, r"no \*\.safetensors, but pytorch_model\.bin: .* convert .*save_pretrained"),
    ):
        with pytest.raises(ValueError, match=match):
            LLM(directory, **SMALL)
