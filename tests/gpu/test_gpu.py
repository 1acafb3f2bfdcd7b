"""Tests on a CUDA device: backends, graphs, memory, bf16 against transformers."""

import dataclasses
import gc
import importlib.util
import itertools
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import train_tiny
from attention_cases import CASES, Case, close, run_case
from draws import chi_square_p
from fp8_checkpoints import quantised_copy
from int4_checkpoints import checkpoints as int4_checkpoints
from process_groups import num_running
from stand_in import CONTROLS
from tiny_reference import MAX_TOKENS, assert_greedy, make_prompts
from tqdm import TMonitor
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM
from triton.runtime.jit import JITFunction

from checkpoints import LLAMA3, make_checkpoint, qwen3_06b_config, tokens
from nanovllm import LLM, CompletionOutput, SamplingParams
from nanovllm.compiling import compiler
from nanovllm.compiling.rehearsal import Rehearsal
from nanovllm.engine.kv_pool import KVCachePool
from nanovllm.kernels import device_features as hopper
from nanovllm.kernels.attention import decode_many as paged_decode
from nanovllm.layers.sampler import Sampler
from nanovllm.layers.weights.int8_head import Int8Head
from nanovllm.startup import builder
from nanovllm.startup.builder import Builder
from nanovllm.utils.device import (
    _side_stream,
    host_array,
    upload_beside,
)

pytestmark = pytest.mark.gpu
SEED = 11
HAS_FLASH = importlib.util.find_spec("flash_attn") is not None
needs_flash = pytest.mark.skipif(not HAS_FLASH, reason="flash-attn is not installed")
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
NOT_BY_FLASH = {"head-80", "softcap", "sinks"}
SMALL: dict[str, Any] = {"num_kvcache_blocks": 256, "max_num_seqs": 64}


@needs_flash
@pytest.mark.parametrize("name", sorted(CASES.keys() - {"one-block-256", *NOT_BY_FLASH}))
def test_flash_attn_agrees_with_the_oracle(name: str) -> None:
    from nanovllm.attention.flash_attn_backend import FlashAttentionBackend

    options = {**CASES[name], "block_size": 256, "dtype": torch.bfloat16}
    options["d"] = max(64, options.get("d", 64))  # type: ignore[call-overload]
    case = Case(**options)  # type: ignore[arg-type]
    # flash-attn multiplies masked values by zero, so what is masked must be finite.
    for stored in case.cache[:2]:
        assert stored is not None
        stored.nan_to_num_()
    close(run_case(FlashAttentionBackend(), case), case.wanted())


@pytest.mark.parametrize(("batch", "longest"), [(1, 4000), (8, 2000), (64, 1800), (256, 1800)])
def test_triton_agrees_with_the_oracle_on_large_batches(batch: int, longest: int) -> None:
    rng = random.Random(batch)
    lens = [rng.randint(1, longest) for _ in range(batch)]
    case = Case(
        [1] * batch, lens, num_decodes=batch, hq=16, hkv=8, d=128, block_size=256,
        dtype=torch.bfloat16,
    )  # fmt: skip
    from nanovllm.attention.triton_backend import TritonBackend

    close(run_case(TritonBackend(), case), case.wanted())
    q_lens = [min(n, rng.randint(2, 700)) for n in lens[:16]]
    case = Case(q_lens, lens[:16], hq=16, hkv=8, d=128, block_size=256, dtype=torch.bfloat16)
    close(run_case(TritonBackend(), case), case.wanted())


MODES: dict[str, dict[str, Any]] = {  # every optimisation, and without one of them
    "all": {},
    "synchronous": {"overlap": False},
    "eager": {"enforce_eager": True},
    "plain-kernels": {"fused_kernels": False},
    "unmixed": {"mixed_steps": False},
    "one-split": {},
    "one-by-one": {},
    "no-hopper": {},
}


@pytest.mark.parametrize("block_size", [16, 256])
@pytest.mark.parametrize(
    ("backend", "mode"), [("torch", "all"), ("torch", "eager"), *(("triton", m) for m in MODES)]
)
def test_float32_tokens_are_those_of_the_reference(
    tiny: str,
    reference: Any,
    backend: str,
    block_size: int,
    mode: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Chunked prefill beside decodes, a small pool, and each optimisation on and off."""
    if mode == "one-split":
        monkeypatch.setattr(paged_decode, "choose_num_splits", lambda *_: 1)
    if mode == "one-by-one":
        monkeypatch.setattr(hopper, "dependent_launch", False)
    if mode == "no-hopper":
        monkeypatch.setattr(hopper, "capability", lambda _: (8, 0))
    prompts = make_prompts()
    options = {
        **SMALL,
        "max_num_batched_tokens": 64,  # as many as sequences: chunks of one token occur
        "num_kvcache_blocks": {16: 90, 256: 20}[block_size],
        **MODES[mode],
    }
    with LLM(
        tiny,
        dtype="float32",
        attention_backend=backend,
        kvcache_block_size=block_size,
        **options,
    ) as llm:
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        metrics = llm.metrics()
    assert metrics["overlap"] == (mode != "synchronous")
    assert (metrics["num_graph_replays"] > 0) == (mode != "eager" and backend == "triton")
    assert_greedy(reference, prompts, tokens(outputs))


@pytest.mark.parametrize("block_size", [16, 256])
def test_steps_with_prompts_replay_graphs(
    tiny: str, reference: Any, block_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of other lengths than the captured ones, alone and beside decodes, with prefix hits;
    in an FP8 cache as without graphs, also where eager steps gather what is cached.
    """
    from nanovllm.kernels.attention import prefill as paged_prefill

    prompts = make_prompts()
    options = {**SMALL, "max_num_batched_tokens": 1024, "kvcache_block_size": block_size}
    options["num_kvcache_blocks"] = {16: 120, 256: 20}[block_size]
    with LLM(tiny, dtype="float32", **options) as llm:
        assert llm.model_runner is not None and llm.model_runner.graphs is not None
        for _ in range(2):
            outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
            assert_greedy(reference, prompts, tokens(outputs))
        for i in range(4):  # each alone, so none beside it has a place
            outputs = llm.generate([prompts[-1 - i]], GREEDY, use_tqdm=False)
            assert_greedy(reference, [prompts[-1 - i]], tokens(outputs))
        captured = [shape for shape in llm.model_runner.graphs.captured if shape.tokens]
        metrics = llm.metrics()
    print(captured)
    assert {shape.decodes > 0 for shape in captured} == {False, True} and len(captured) > 3
    assert metrics["num_cached_tokens"] or block_size == 256, "few prompts fill a block of 256"
    found, gathered, gather_keys = [], [], paged_prefill.gather_keys

    def gather(*args: Any) -> Any:
        gathered.append(args)
        return gather_keys(*args)

    monkeypatch.setattr(paged_prefill, "gather_keys", gather)
    for gathers, eager in ((False, False), (False, True), (True, True)):
        if gathers:
            monkeypatch.setattr(paged_prefill, "FEW_QUERIES", 0)
            monkeypatch.setattr(paged_prefill, "FEW_SCORES", 0)
            options["max_num_batched_tokens"] = 64  # in chunks, then
        with LLM(
            tiny, dtype="float32", kv_cache_dtype="fp8", enforce_eager=eager, **options
        ) as llm:
            found += [tokens(llm.generate(prompts, GREEDY, use_tqdm=False)) for _ in range(2)]
        assert bool(gathered) == gathers
    assert found[:2] == found[2:4] == found[4:]


class LogitsTap:
    """Copies the logits of each step aside, also out of CUDA graphs captured after its making."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rows: int, vocab_size: int) -> None:
        self.rows = rows
        self.logits = torch.zeros(rows, vocab_size, device="cuda")
        forward = Sampler.forward

        def tapped(sampler: Sampler, logits: torch.Tensor, *rest: Any) -> torch.Tensor:
            n = min(rows, len(logits))
            self.logits[:n].copy_(logits[:n])
            return forward(sampler, logits, *rest)

        monkeypatch.setattr(Sampler, "forward", tapped)

    def run(
        self, llm: LLM, prompts: list[list[int]], params: SamplingParams
    ) -> tuple[torch.Tensor, list[list[int]]]:
        """Log-probabilities [steps, rows, V] and tokens; every prompt samples in every step."""
        for prompt in prompts:
            llm.add_request(prompt, params)
        steps, outputs = [], []
        while not llm.is_finished():
            outputs += llm.step()
            steps.append(self.logits.log_softmax(-1))
        outputs.sort(key=lambda output: output.request_id)
        return torch.stack(steps), [output["token_ids"] for output in outputs]


def test_gpu_without_kernels_answers_as_a_cpu(
    tiny: str,
    set_capability: Callable[[tuple[int, int]], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A GPU below compute capability 8.0 does so: it launches no kernel of ours, and the host draws
    the tokens.
    """
    params = [SamplingParams(max_tokens=8, seed=5, **own) for own in CONTROLS]
    prompts = make_prompts()[: len(params)]

    def answers(device: str) -> list[Any]:
        with LLM(tiny, device=device, dtype="float32", **SMALL) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            return [llm.metrics()["attention_backend"], [o["token_ids"] for o in outputs]]

    wanted = answers("cpu")
    monkeypatch.setattr(JITFunction, "run", lambda *args, **kwargs: pytest.fail("a launch"))
    set_capability((7, 5))
    assert answers("cuda") == wanted
    assert wanted[0] == "torch"


@pytest.mark.parametrize("backend", ["triton", pytest.param("flash_attn", marks=needs_flash)])
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "plain"])
def test_bfloat16_graphs_agree_with_eager(
    tiny: str, backend: str, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits of prefill and decode, graph against eager, within bf16's resolution. Memory that is
    free once the graphs are captured belongs to others, who write to it.
    """
    prompts = make_prompts()[:48]
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    tap = LogitsTap(monkeypatch, len(prompts), 272)
    results = []
    for eager in (False, True):
        options = {"attention_backend": backend, "fused_kernels": fused, "enforce_eager": eager}
        with LLM(tiny, overlap=False, **options, **SMALL) as llm:
            others = [torch.full((128 * 2 ** (i % 4),), 7, device="cuda") for i in range(8192)]
            results.append(tap.run(llm, prompts, params)[0])
            assert all((other == 7).all() for other in others[::64])
            assert (llm.metrics()["num_graph_replays"] > 0) != eager
    assert len(results[0]) == 3
    assert (results[0] - results[1]).abs().max() < 0.1


@pytest.mark.parametrize(
    "backend", ["auto", "triton", pytest.param("flash_attn", marks=needs_flash)]
)
def test_bfloat16_still_adds(tiny: str, backend: str) -> None:
    rng = random.Random(SEED)
    pairs = [(rng.randint(100, 999), rng.randint(100, 999)) for _ in range(500)]
    with LLM(tiny, attention_backend=backend, num_kvcache_blocks=512) as llm:
        prompts = [train_tiny.addition_prompt(a, b) for a, b in pairs]
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert llm.metrics()["num_graph_replays"] > 0
        if backend == "auto":
            assert llm.metrics()["attention_backend"] == "triton"
    right = sum(o["text"] == str(a + b) for (a, b), o in zip(pairs, outputs, strict=True))
    print("right:", right, "of", len(pairs))
    assert right >= 0.98 * len(pairs)


@pytest.fixture(scope="module")
def qwen3_06b(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random checkpoint in the Qwen3-0.6B shape, made by transformers."""
    torch.manual_seed(SEED)
    config = qwen3_06b_config()
    path: Path = tmp_path_factory.mktemp("qwen3-0.6b")
    with torch.device("cuda"):
        model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    for name, param in model.named_parameters():
        if param.dim() == 1:  # norms away from 1, so that leaving them out shows
            generator = torch.Generator("cuda").manual_seed(len(name))
            param.data += 0.2 * torch.randn(param.shape, generator=generator, device="cuda").to(
                param.dtype
            )
    model.save_pretrained(path)
    return str(path)


@pytest.mark.parametrize(
    ("backend", "lengths"),
    [
        ("triton", [[n] for n in (1, 20, 255, 256, 600)]),
        pytest.param("flash_attn", [[20], [600]], marks=needs_flash),
        ("triton", [list(range(300, 0, -13))]),
        ("triton", [list(range(140, 0, -1))]),
    ],
    ids=["alone", "flash-attn", "together-24", "together-140"],
)
def test_log_probabilities_of_greedy_output(
    qwen3_06b: str, backend: str, lengths: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within 0.05 per token of transformers in bf16, prefill and graph decode; alone and in
    batches, whose products take other kernels."""
    assert largest_difference(qwen3_06b, lengths, monkeypatch, attention_backend=backend) < 0.05


# Most experts are taken: one that rounding puts in the place of another counts little.
MINISTRAL = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 256,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
DELTA_NET = {
    "head_dim": 256,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "linear_value_head_dim": 128,
}
SHARED_EXPERT = {
    "num_experts": 16,
    "num_experts_per_tok": 12,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen 3": ("qwen3", {"head_dim": 128}),
    "llama": ("llama", {"head_dim": 64, "num_attention_heads": 16, "rope_parameters": LLAMA3}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "mistral": ("mistral", {"sliding_window": 100}),
    "phi 3": ("phi3", {"hidden_size": 768, "sliding_window": 100}),  # heads of 96
    "granite": ("granite", {"residual_multiplier": 0.4, "attention_multiplier": 0.1}),
    "glm 4": ("glm4", {"head_dim": 128}),
    "olmo 2": ("olmo2", {}),
    "gemma 2": ("gemma2", {"head_dim": 256, "sliding_window": 100, "attn_logit_softcapping": 2.0}),
    "qwen 3 moe": (
        "qwen3_moe",
        {
            "head_dim": 128,
            "num_experts": 16,
            "num_experts_per_tok": 12,
            "moe_intermediate_size": 512,
            "norm_topk_prob": True,
        },
    ),
    "mixtral": ("mixtral", {"intermediate_size": 1024, "num_experts_per_tok": 6}),
    "gpt oss": (
        "gpt_oss",
        {
            "head_dim": 64,
            "num_attention_heads": 16,
            "intermediate_size": 768,
            "num_local_experts": 8,
            "num_experts_per_tok": 6,
            "sliding_window": 100,
        },
    ),
    "gemma 3": ("gemma3_text", {"head_dim": 256, "sliding_window": 100, "num_hidden_layers": 6}),
    "exaone 4": ("exaone4", {"sliding_window": 100, "sliding_window_pattern": 2}),
    "olmo 3": ("olmo3", {"sliding_window": 100}),
    "smollm 3": ("smollm3", {"no_rope_layer_interval": 2}),
    "ministral 3": ("ministral3", {"head_dim": 128, "rope_parameters": MINISTRAL}),
    "qwen 3.5": ("qwen3_5_text", DELTA_NET),
    "qwen 3.5 moe": ("qwen3_5_moe_text", {**DELTA_NET, **SHARED_EXPERT}),
    "qwen 3 next": ("qwen3_next", {**DELTA_NET, **SHARED_EXPERT}),
    "lfm 2": (
        "lfm2",
        {"layer_types": ["conv", "full_attention", "conv", "conv"], "num_attention_heads": 16},
    ),
}


def shape_of(name: str) -> tuple[str, dict[str, Any]]:
    """A family and the shape of a checkpoint of it."""
    family, changes = OTHERS[name]
    shape = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 4}
    shape |= {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 10240}
    return family, {**shape, "initializer_range": 0.05, "max_position_embeddings": 4096, **changes}


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        *((name, "triton") for name in OTHERS),
        *(
            pytest.param(name, "flash_attn", marks=needs_flash)
            for name in ("llama", "qwen2", "mistral", "olmo 2", "exaone 4", "mixtral", "qwen 3 moe")
        ),
    ],
)
def test_log_probabilities_of_other_families(
    name: str, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hardly further from float64 than transformers in bf16; prefill and graph decode, of 1, 24
    and 140 sequences."""
    family, shape = shape_of(name)
    path = str(make_checkpoint(tmp_path / "model", family, **shape))
    lengths = [[n] for n in (1, 20, 99, 130, 255, 256, 300, 400, 512, 600)]
    lengths += [list(range(300, 0, -13)), list(range(140, 0, -1))]
    errors = mean_errors(path, lengths, monkeypatch, attention_backend=backend, dtype="bfloat16")
    assert errors.keys() == {1, 24, 140}
    for ours, theirs in errors.values():
        assert 0 < ours <= 1.2 * theirs, errors


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("llama, biases", "awq"),
        ("qwen2", "gptq"),
        ("phi 3", "compressed, zeros"),
        ("gemma 2", "gptq, symmetric"),
    ],
)
def test_log_probabilities_of_int4_weights(
    name: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same of the numbers that codes mean: one row, tiles, and the library for prompts."""
    family, shape = shape_of(name)
    quantised, exact = int4_checkpoints(tmp_path, way, family, **shape)
    lengths = [[n] for n in (1, 20, 300)] + [list(range(300, 0, -13)), list(range(140, 0, -1))]
    errors = mean_errors(str(quantised), lengths, monkeypatch, str(exact), "int4", dtype="bfloat16")
    for ours, theirs in errors.values():
        assert 0 < ours <= 1.2 * theirs, errors


@pytest.mark.parametrize("left", ["layers.0", "self_attn", "o_proj", "mlp.down_proj"])
def test_log_probabilities_of_layers_that_stay_in_16_bits_beside_others(
    left: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others in FP8 with activations in FP8 too, for a norm and an activation to quantise; and
    in INT4.
    """
    family, shape = shape_of("qwen 3")
    says = {"modules_to_not_convert": [left]}
    exact = make_checkpoint(tmp_path / "exact", family, **shape)
    blocks = says | {"weight_block_size": [128, 128]}
    fp8 = quantised_copy(exact, tmp_path / "fp8", "blocks", lambda module: left in module, blocks)
    int4 = int4_checkpoints(tmp_path / "4", "awq", family, lambda m: left in m, says, **shape)
    lengths = [[1], [300], list(range(300, 0, -13))]
    for path, same, held, most in ((fp8, exact, "fp8", 16.0), (*int4, "int4", 1.2)):
        errors = mean_errors(str(path), lengths, monkeypatch, str(same), held, dtype="bfloat16")
        for ours, theirs in errors.values():
            assert 0 < ours <= most * theirs, errors


DENSE = [
    name
    for name, (_, changes) in OTHERS.items()
    if not {"num_experts_per_tok", "linear_num_key_heads"} & changes.keys() and name != "lfm 2"
]


@pytest.mark.parametrize("held", ["none", "fp8"])
@pytest.mark.parametrize("name", [*DENSE, "mixtral", "qwen 3 moe"])
def test_log_probabilities_in_eight_bits(
    name: str, held: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys and values, and weights and activations, in 8 bits: a mantissa of 3 bits, where bfloat16
    has 7, rounds 16 times as much, though not everything.
    """
    family, shape = shape_of(name)
    path = str(make_checkpoint(tmp_path / "model", family, **shape))
    lengths = [[1], [300], list(range(300, 0, -13))]
    options = {"kv_cache_dtype": "fp8"} if held == "none" else {"quantization": held}
    errors = mean_errors(path, lengths, monkeypatch, None, held, dtype="bfloat16", **options)
    for ours, theirs in errors.values():
        assert 0 < ours <= 16 * theirs, errors


GREEDY_CONTROLS: list[dict[str, Any]] = [
    {},
    {"logit_bias": {7: 2.0, 9: -100.0}},
    {"presence_penalty": 0.5, "repetition_penalty": 1.2},
    {"allowed_token_ids": list(range(0, 2048, 3))},
    {"min_tokens": 20, "stop_token_ids": [*range(100)]},
]
MANY: dict[str, Any] = {  # optimisations that meet each other, in a pool that is too small
    "kvcache_block_size": 16,
    "num_kvcache_blocks": 90,
    "max_num_batched_tokens": 96,
}
ALONE: dict[str, Any] = {"enforce_eager": True, "overlap": False, "enable_prefix_caching": False}


# Other numbers of rows, of prompts too, and nothing else: how far rounding alone leads.
FEWER: dict[str, Any] = {**ALONE, "max_num_seqs": 7, "max_num_batched_tokens": 96}


def gaps_of(plain: list[CompletionOutput], other: list[CompletionOutput]) -> list[list[float]]:
    """Differences between log-probabilities for each of `GREEDY_CONTROLS`, up to the first token
    of a sequence that differs.
    """
    gaps: list[list[float]] = [[] for _ in GREEDY_CONTROLS]
    for i, (one, two) in enumerate(zip(plain, other, strict=True)):
        for j, (token, its) in enumerate(zip(one.token_ids, two.token_ids, strict=False)):
            if token != its:
                break
            gap = one.logprobs[j][token].logprob - two.logprobs[j][token].logprob
            gaps[i % len(gaps)].append(abs(gap))
    for own, controls in zip(gaps, GREEDY_CONTROLS, strict=True):
        print(f"{[*controls]}: {len(own)} tokens equal, {np.mean(own):.2e}, {max(own):.2e}")
    return gaps


@pytest.mark.parametrize("held", ["none", "fp8", "int4"])
def test_formats_beside_everything_else(held: str, tmp_path: Path) -> None:
    """Prefix cache, chunks, preemptions, overlap, graphs and controls change nothing but rounding:
    in float32 no token, in 8 and 4 bits about as much as another number of rows changes.
    """
    shape = {"hidden_size": 1024, "intermediate_size": 2048, "head_dim": 128, "vocab_size": 2048}
    shape |= {"max_position_embeddings": 512, "initializer_range": 0.1}
    if held == "int4":
        path, _ = int4_checkpoints(tmp_path, "awq", **shape)
    else:
        path = make_checkpoint(tmp_path / "model", **shape)
    rng = random.Random(SEED)
    common = [[rng.randrange(2048) for _ in range(n)] for n in (200, 150)]
    prompts = [common[i % 2] + [rng.randrange(2048) for _ in range(5 + i)] for i in range(40)]
    params = [
        SamplingParams(temperature=0, max_tokens=40 + i % 7, logprobs=5, **controls)
        for i, controls in zip(range(40), itertools.cycle(GREEDY_CONTROLS), strict=False)
    ]
    # A single row is multiplied in 16 bits: two that outlast the others leave none alone.
    prompts = [[1] * 9, [2] * 9, *prompts]
    params = [SamplingParams(temperature=0, max_tokens=400)] * 2 + params
    same: dict[str, Any] = {"dtype": "float32"}
    if held != "none":
        same = {"dtype": "bfloat16", "kv_cache_dtype": "fp8"}
    same |= {"quantization": "fp8"} if held == "fp8" else {}
    found = []
    for options in (ALONE, FEWER, MANY):
        with LLM(str(path), **{**SMALL, **same, **options}) as llm:
            llm.generate(common, SamplingParams(max_tokens=1), use_tqdm=False)
            outputs = llm.generate(prompts, params, use_tqdm=False)
            found.append([output.outputs[0] for output in outputs[2:]])
            metrics = llm.metrics()
            assert llm.model_runner is not None
            head = llm.model_runner.model.lm_head.weight
        assert metrics["quantization"] == held
        assert isinstance(head, Int8Head) == (held == "fp8")
        assert (metrics["kv_cache_dtype"] == "float8_e4m3fn") == (held != "none")
        for name in ("num_preemptions", "num_cached_tokens", "num_graph_replays", "overlap"):
            assert bool(metrics[name]) == ("overlap" not in options), name
    if held == "none":
        assert [each.token_ids for each in found[2]] == [each.token_ids for each in found[0]]
    rounding, gaps = (gaps_of(found[0], other) for other in found[1:])
    counts, own = (sum(map(len, each)) for each in (rounding, gaps))
    means, mine = (float(np.mean([*itertools.chain(*each)])) for each in (rounding, gaps))
    print(f"rounding: {counts} tokens equal, {means:.2e}; everything: {own}, {mine:.2e}")
    assert min(map(len, gaps)) > 0 and own > counts / 2
    assert mine < 2 * means


def mean_errors(
    path: str,
    lengths: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    reference: str | None = None,
    held: str = "none",
    **options: Any,
) -> dict[int, tuple[float, float]]:
    """Errors for each size of the batches of prompts of these lengths: how far log-probabilities of
    all tokens are, after greedy ones, from transformers' in float64, ours and transformers' in
    bf16; of the checkpoint `reference`, if that is another. Weights are `held` in a format.
    """
    rng = random.Random(SEED)
    exact, rounded = (
        AutoModelForCausalLM.from_pretrained(
            reference or path,
            dtype=dtype,
            attn_implementation="eager",
            experts_implementation="eager",
        ).cuda()
        for dtype in (torch.float64, torch.bfloat16)
    )
    batch = max(map(len, lengths))
    sums = {len(batch): torch.zeros(3, dtype=torch.float64, device="cuda") for batch in lengths}
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    tap = LogitsTap(monkeypatch, batch, exact.config.vocab_size)
    with LLM(path, overlap=False, **{**SMALL, "max_num_seqs": 256, **options}) as llm:
        for prompt_lengths in lengths:  # longest first, as the rows of a decode are
            prompts = [[rng.randrange(10000) for _ in range(n)] for n in prompt_lengths]
            got, outs = tap.run(llm, prompts, params)
            for row, (prompt, out) in enumerate(zip(prompts, outs, strict=True)):
                ids = torch.tensor([prompt + out[:-1]], device="cuda")
                with torch.no_grad():
                    wanted, theirs = (
                        model(ids).logits[0, len(prompt) - 1 :].double().log_softmax(-1)
                        for model in (exact, rounded)
                    )
                for i, found in enumerate((got[:, row].double(), theirs)):
                    sums[len(prompts)][i] += (found - wanted).abs().mean(1).sum()
                sums[len(prompts)][2] += len(out)
        assert llm.metrics()["num_graph_replays"] > 0
        assert llm.metrics()["quantization"] == held
    errors = {size: tuple((part[:2] / part[2]).tolist()) for size, part in sums.items()}
    for size, (ours, theirs) in errors.items():
        print(f"{size} sequences: ours {ours:.2e}, transformers {theirs:.2e}")
    return errors


def largest_difference(
    path: str, lengths: list[list[int]], monkeypatch: pytest.MonkeyPatch, **options: Any
) -> float:
    """Largest difference of a greedy token's log-probability from transformers', for batches of
    prompts of these lengths.
    """
    rng = random.Random(SEED)
    reference = AutoModelForCausalLM.from_pretrained(path, torch_dtype=torch.bfloat16).cuda()
    batch = max(map(len, lengths))
    params = SamplingParams(temperature=0, max_tokens=32 if batch == 1 else 6, ignore_eos=True)
    tap = LogitsTap(monkeypatch, batch, reference.config.vocab_size)
    worst = 0.0
    with LLM(path, overlap=False, **{**SMALL, "max_num_seqs": 256, **options}) as llm:
        for prompt_lengths in lengths:  # longest first, as the rows of a decode are
            prompts = [[rng.randrange(10000) for _ in range(n)] for n in prompt_lengths]
            got, outs = tap.run(llm, prompts, params)
            for row, (prompt, out) in enumerate(zip(prompts, outs, strict=True)):
                with torch.no_grad():
                    ids = torch.tensor([prompt + out[:-1]], device="cuda")
                    wanted = reference(ids).logits[0, len(prompt) - 1 :].float().log_softmax(-1)
                steps = torch.arange(len(out), device="cuda")
                worst = max(worst, float((got[:, row] - wanted)[steps, out].abs().max()))
        assert llm.metrics()["num_graph_replays"] > 0
    print(path, options, "largest difference of a log-probability:", worst)
    return worst


FIRST_USES = """
import json, random, sys
from benchmarks.first_use import KINDS, Compilations, Job, Size, UnavailableError, settle
from nanovllm import LLM

kernels = Compilations()
kernels.listen()
with LLM(sys.argv[1], max_num_seqs=16, num_kvcache_blocks=256) as llm:
    settle(llm)
    assert llm.metrics()["num_kernels_compiling"] == 0
    taken = {"start": kernels.take()}
    for name, make in KINDS.items():
        try:
            make(Job(llm, random.Random(name), Size(16, 4, 128, 64, 8)))()
        except UnavailableError:
            continue
        taken[name] = kernels.take()
print(json.dumps(taken))
"""


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3", {}),
        ("gemma2", {"head_dim": 256}),
        ("qwen3_moe", {"num_experts": 16, "num_experts_per_tok": 8, "head_dim": 128}),
        ("gpt_oss", {"num_local_experts": 8, "num_experts_per_tok": 4, "head_dim": 64}),
        ("qwen3_5_moe_text", {**DELTA_NET, **SHARED_EXPERT, "num_hidden_layers": 4}),
        ("lfm2", {"layer_types": ["conv", "full_attention"]}),
    ],
)
def test_this_process_compiles_no_kernel(
    family: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """Neither at the start, with an empty cache, nor for any kind of work."""
    shape = {"hidden_size": 1024, "intermediate_size": 2048, "max_position_embeddings": 4096}
    model = make_checkpoint(tmp_path / "model", family, dtype="bfloat16", **shape, **options)
    env = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, "-c", FIRST_USES, str(model)]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    taken = json.loads(done.stdout.splitlines()[-1])
    assert {"plain", "all controls", "beam search", "embeddings"} <= taken.keys()
    assert len(taken["start"]["found"]) > 20
    assert {name: of["compiled"] for name, of in taken.items() if of["compiled"]} == {}


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (builder, "choose_build"),
        (Builder, "build_model"),
        (Rehearsal, "first_steps"),
        (Builder, "load"),
        (KVCachePool, "log"),
    ],
)
def test_an_error_at_the_start_leaves_no_compiler(
    owner: Any, name: str, tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the rehearsal, in it, while its kernels are compiled, and after all of it."""
    servers, begin = list[Any](), compiler._start

    def ours() -> list[Path]:
        return [*tmp_path.glob("nanovllm-compile-*")]

    def start(*args: Any) -> Any:
        servers.append(begin(*args))
        return servers[-1]

    def fail(*args: Any) -> None:
        assert len(ours()) == 1
        raise ZeroDivisionError

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(compiler, "_start", start)
    monkeypatch.setattr(owner, name, fail)
    threads = set(threading.enumerate())
    with pytest.raises(ZeroDivisionError):
        LLM(tiny, **SMALL)
    [server] = servers
    assert server.returncode is not None
    assert num_running(server.pid) == 0
    assert not ours()
    assert {one for one in threading.enumerate() if not isinstance(one, TMonitor)} <= threads
    assert JITFunction.run.__qualname__ == "JITFunction.run", "kernels are launched again"


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3", {"max_num_seqs": 512}),
        ("qwen3", {"kv_cache_dtype": "fp8", "max_num_batched_tokens": 1024}),
        ("gemma2", {}),
        ("qwen3_moe", {}),
        ("gpt_oss", {}),
    ],
)
def test_activations_measured_without_launches(
    family: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured by few layers, as many bytes as all layers take where kernels are launched."""
    shape = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 6}
    heads = {"head_dim": 128, "max_position_embeddings": 4096, "vocab_size": 32000}
    experts = {"num_experts": 8, "num_local_experts": 8}  # of those families that have any
    model = make_checkpoint(tmp_path, family, dtype="bfloat16", **shape, **heads, **experts)
    measure, found = Builder.measure, list[tuple[int, int]]()

    def all_layers(compute: Any, model: Any, inputs: Any, of_each: int = 1) -> None:
        compute(inputs)

    def both(own: Builder, *args: Any) -> int:
        rehearsed, compiling = measure(own, *args), own.compiler
        own.compiler = None
        with monkeypatch.context() as patch:
            patch.setattr(builder, "run_distinct_layers", all_layers)
            found.append((rehearsed, measure(own, *args)))
        own.compiler = compiling
        return rehearsed

    monkeypatch.setattr(Builder, "measure", both)
    with LLM(str(model), num_kvcache_blocks=64, **options):
        [(rehearsed, launched)] = found
    print(f"{family}: {rehearsed:,} bytes rehearsed, {launched:,} launched")
    assert launched > 32 << 20
    assert launched <= rehearsed <= 1.1 * launched


@pytest.mark.parametrize("max_num_seqs", [1, 12, 20, 100, 200, 500])
def test_defect_3_any_max_num_seqs_has_a_graph(tiny: str, max_num_seqs: int) -> None:
    """A batch of exactly `max_num_seqs`, which need not be a usual bucket."""
    params = SamplingParams(temperature=0, max_tokens=8)
    prompts = [train_tiny.addition_prompt(100 + i, 250) for i in range(max_num_seqs)]
    with LLM(tiny, max_num_seqs=max_num_seqs, num_kvcache_blocks=512) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert llm.metrics()["num_graph_replays"] > 0
    right = sum(o["text"] == str(350 + i) for i, o in enumerate(outputs))
    assert right >= 0.98 * max_num_seqs


def test_defect_14_memory_comes_back(tiny: str) -> None:
    """After exit, and after `del` alone; and a second engine fits beside the first."""
    with LLM(tiny, **SMALL) as llm:  # what libraries keep for a process is there before
        llm.generate("127+345=", GREEDY, use_tqdm=False)
    del llm
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    llm = LLM(tiny, gpu_memory_utilization=0.3)
    second = LLM(tiny, gpu_memory_utilization=0.3)
    assert torch.cuda.memory_allocated() - before > 1 << 30
    second.generate("127+345=", GREEDY, use_tqdm=False)
    second.exit()
    second.exit()
    del llm, second
    gc.collect()
    assert torch.cuda.memory_allocated() - before < 64 << 20
    with LLM(tiny, gpu_memory_utilization=0.8) as third:
        assert third.generate("127+345=", GREEDY, use_tqdm=False)[0]["text"] == "472"


def test_defect_14_engine_after_engine(tiny: str) -> None:
    """Each left 32 MiB: cuBLAS's workspace on the stream of its graphs."""
    levels = []
    for _ in range(3):
        with LLM(tiny, **SMALL) as llm:
            llm.generate("127+345=", GREEDY, use_tqdm=False)
            assert llm.metrics()["num_graph_replays"] > 0
        del llm
        gc.collect()
        levels.append(torch.cuda.memory_allocated())
    assert levels[1:] == levels[:1] * 2


def test_engines_are_built_at_once_in_two_threads(tiny: str) -> None:
    """Their graphs are captured on one stream: two captures at a time would mix."""

    def use(_: int) -> Any:
        with LLM(tiny, **SMALL) as llm:
            return llm.generate("127+345=", GREEDY, use_tqdm=False)[0]["text"]

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(use, range(2))) == ["472"] * 2


def test_defect_16_memory_of_others_is_not_ours(tiny: str) -> None:
    """30 GiB held by somebody else leave the engine its share, not a share less 30 GiB."""
    with LLM(tiny, gpu_memory_utilization=0.2) as llm:
        alone = llm.metrics()["num_kvcache_blocks"]
    other = torch.empty(30 << 30, dtype=torch.uint8, device="cuda")
    with LLM(tiny, gpu_memory_utilization=0.2) as llm:
        assert llm.metrics()["num_kvcache_blocks"] >= 0.99 * alone
    del other


def test_sampling_distribution_on_the_device(tmp_path: Path) -> None:
    model = str(make_checkpoint(tmp_path, initializer_range=0.2))
    reference = Qwen3ForCausalLM.from_pretrained(model, torch_dtype=torch.float32)
    prompt = [3, 1, 4, 1, 5]
    with torch.no_grad():
        logits = reference(torch.tensor([prompt])).logits[0, -1].double()
    params = SamplingParams(temperature=2.0, max_tokens=1)
    with LLM(model, dtype="float32", seed=SEED, max_model_len=64, num_kvcache_blocks=512) as llm:
        outputs = llm.generate([prompt] * 20_000, params, use_tqdm=False)
    drawn = [output["token_ids"][0] for output in outputs]
    assert len(set(drawn)) > 50
    assert chi_square_p(drawn, (logits / 2.0).softmax(-1).numpy()) > 1e-3


@pytest.mark.multi_gpu
def test_another_device_than_the_current_one(tiny: str) -> None:
    """Graphs, kernels and memory of cuda:1, while cuda:0 stays the caller's current device."""
    assert torch.cuda.current_device() == 0
    with LLM(tiny, device="cuda:1", **SMALL) as llm:
        assert torch.cuda.current_device() == 0
        cache = llm.model_runner.model.model.layers[0].self_attn.attn.cache
        assert cache.k.device == torch.device("cuda:1")
        digits = dataclasses.replace(GREEDY, allowed_token_ids=llm.tokenizer.encode("0123456789"))
        prompts = ["127+345=", "reverse: hello =", "reverse: hello ="]
        outputs = llm.generate(prompts, [GREEDY, GREEDY, digits], use_tqdm=False)
        metrics = llm.metrics()
        assert (metrics["device"], metrics["num_graph_replays"] > 0) == ("cuda:1", True)
        assert torch.cuda.current_device() == 0
    assert [output["text"] for output in outputs[:2]] == ["472", "olleh"]
    assert re.fullmatch(r"\d+", outputs[2]["text"]), "the mask did not act"
    assert torch.cuda.current_device() == 0


def upload_numbers(values: range) -> torch.Tensor:
    """The largest element of arrays that are copied and dropped at once, each of one number."""
    device, maxima = torch.device("cuda", 0), []
    for value in values:
        array = host_array(device, (256, 4748))
        array.fill(value)
        copied = upload_beside(device, array)
        del array
        maxima.append(copied.amax())
        del copied
    return torch.stack(maxima)


@pytest.mark.parametrize(
    "options",
    [{}, {"enforce_eager": True}, {"overlap": False}],
    ids=["all", "eager", "synchronous"],
)
def test_a_timeline_has_the_time_of_the_device(
    options: dict[str, Any], tiny: str, tmp_path: Path
) -> None:
    """Time by CUDA events: no more than passed between two of ours, one step after the other."""
    path, params = tmp_path / "trace.json", SamplingParams(temperature=0.7, max_tokens=40, seed=1)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with LLM(tiny, **SMALL, **options) as llm:
        llm.generate(make_prompts(), params, use_tqdm=False)
        with llm.trace(path):
            begin.record()
            llm.generate(make_prompts(), params, use_tqdm=False)
            end.record()
        end.synchronize()
        assert llm.model_runner.timer is None
    events = json.loads(path.read_text())
    steps = [event for event in events if event.get("cat") == "step"]
    slices = [event for event in events if event.get("cat") == "gpu"]
    busy = [step["args"]["gpu_us"] for step in steps]
    assert len(slices) == len(steps) > 40
    assert all(us > 10 for us in busy)
    assert sum(busy) / 1e3 <= begin.elapsed_time(end)
    assert sum(busy) <= sum(step["dur"] for step in steps) * 1.02
    for before, after in itertools.pairwise(slices):
        assert before["ts"] + before["dur"] <= after["ts"] + 5e-4
    for step, own in zip(steps, slices, strict=True):
        assert own["ts"] + own["dur"] <= step["ts"] + step["dur"], "it ends before it is booked"


def test_a_large_upload_waits_for_nothing() -> None:
    """And its memory is not used again before the kernel that reads it has run."""
    upload_numbers(range(20))  # allocates, loads kernels
    torch.cuda.synchronize()
    torch.cuda._sleep(10**9)
    computing, device = torch.cuda.Event(), torch.device("cuda", 0)
    computing.record()
    array = host_array(device, (256, 4748))
    array.fill(-5)
    assert torch.from_numpy(array).is_pinned()
    copied = upload_beside(device, array)
    with torch.cuda.stream(_side_stream(device)):
        assert copied.amax().item() == -5
    maxima = upload_numbers(range(4))
    assert not computing.query(), "the copies have waited"
    assert maxima.tolist() == [0, 1, 2, 3]


def test_what_reads_a_large_upload_waits_for_it() -> None:
    """And the host does not write over it before it is copied."""
    upload_numbers(range(20))
    torch.cuda.synchronize()
    with torch.cuda.stream(_side_stream(torch.device("cuda", 0))):
        torch.cuda._sleep(10**8)
    assert upload_numbers(range(20, 24)).tolist() == [20, 21, 22, 23]


@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}], ids=["graphs", "eager"])
def test_shared_prefixes_give_the_same_tokens(options: dict[str, Any], tmp_path: Path) -> None:
    """Samples of one prompt, prompts that begin alike, others between them; some end early."""
    path = make_checkpoint(tmp_path / "model", head_dim=32, max_position_embeddings=2048)
    rng = random.Random(SEED)

    def some(n: int) -> list[int]:
        return [rng.randrange(100) for _ in range(n)]

    common, other = some(700), some(300)
    prompts = [common + some(rng.randint(1, 40)) for _ in range(20)]
    prompts += [other + some(9) for _ in range(9)] + [some(50) for _ in range(5)]
    rng.shuffle(prompts)
    params = [SamplingParams(temperature=0, max_tokens=rng.randint(4, 40)) for _ in prompts]
    found = []
    for shares in (True, False):
        sizes = {"max_model_len": 1024, "kvcache_block_size": 16, "num_kvcache_blocks": 1024}
        with LLM(path, dtype="float32", share_prefixes=shares, **sizes, **options) as llm:
            llm.generate([common, other], SamplingParams(max_tokens=1), use_tqdm=False)
            outputs = llm.generate(prompts, params, use_tqdm=False)
            found.append([output.outputs[0].token_ids for output in outputs])
            assert (llm.metrics()["num_shared_prefix_steps"] > 10) == shares
            assert bool(llm.metrics()["num_graph_replays"]) == (not options)
    assert found[0] == found[1]
