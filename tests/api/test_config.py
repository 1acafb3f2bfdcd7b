"""Options, config.json and generation_config.json: what is read, what is refused by name."""

import dataclasses
import inspect
import json
import math
import os
import re
import subprocess
import sys
from types import UnionType
from typing import get_origin, get_type_hints

import numpy as np
import pytest
import torch
import transformers

from checkpoints import (
    PARAMS,
    PROMPT,
    PROMPTS,
    SMALL,
    TINY,
    copy_checkpoint,
    edit_json,
    rare,
    reference,
    references,
    tokens,
)
from nanovllm import LLM, AsyncLLM, SamplingParams
from nanovllm.attention import select_backend
from nanovllm.attention.base import AttentionNeeds
from nanovllm.attention.flash_attn_backend import FlashAttentionBackend
from nanovllm.checkpoint.generation_config import SAMPLING_KEYS, read_sampling_params
from nanovllm.checkpoint.model_config import ModelConfig
from nanovllm.checkpoint.rope import RopeParameters
from nanovllm.config import DEFAULTS, FOREIGN_OPTIONS, Config, Options
from nanovllm.engine import executor
from nanovllm.images.prompts import read_max_images

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

# -- options --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "error", "match"),
    [
        ("max_num_batched_tokens", 0, ValueError, "at least 1, got 0"),
        ("max_num_seqs", 0, ValueError, "at least 1, got 0"),
        ("max_num_seqs", 2.0, TypeError, "an integer, got 2.0"),
        ("max_num_seqs", True, TypeError, "an integer, got True"),
        ("max_model_len", 1, ValueError, "at least 2, got 1"),
        ("max_model_len", "64", TypeError, "an integer, got '64'"),
        ("gpu_memory_utilization", 0, ValueError, "finite and 0.01 to 1, got 0"),
        ("gpu_memory_utilization", 1.5, ValueError, "finite and 0.01 to 1, got 1.5"),
        ("gpu_memory_utilization", math.nan, ValueError, "finite and .*, got nan"),
        ("gpu_memory_utilization", None, TypeError, "a number, got None"),
        ("tensor_parallel_size", 0, ValueError, "between 1 and 8, got 0"),
        ("enforce_eager", 1, TypeError, "True or False, got 1"),
        ("enable_prefix_caching", "no", TypeError, "True or False, got 'no'"),
        ("mixed_steps", 1, TypeError, "True or False, got 1"),
        ("fused_kernels", None, TypeError, "True or False, got None"),
        ("kvcache_block_size", 8, ValueError, "at least 16, got 8"),
        ("kvcache_block_size", 48, ValueError, "a power of two, got 48"),
        ("num_kvcache_blocks", 0, ValueError, "at least 1, got 0"),
        ("num_kvcache_blocks", -2, ValueError, "at least 1, got -2"),
        ("kv_cache_memory_bytes", 0, ValueError, "at least 1, got 0"),
        ("kv_cache_memory_bytes", 1e9, TypeError, "an integer, got 1000000000.0"),
        *(
            ("device", device, ValueError, f"cuda, cuda:N, cpu or auto, got {device!r}")
            for device in ("tpu", 0, "cpu:1", "cpu:cpu", "auto:1", "cuda:x", "cuda:01", "cuda:999")
        ),
        ("dtype", "float64", ValueError, "one of auto, .*float32, got 'float64'"),
        ("attention_backend", "xformers", ValueError, "one of auto, flash_attn, .*'xformers'"),
        ("kv_cache_dtype", "fp8_e5m2", ValueError, "one of auto, fp8, fp8_e4m3, got 'fp8_e5m2'"),
        ("logprobs_mode", "temperature", ValueError, "one of raw_logprobs, .*, got 'temperature'"),
        ("logprobs_mode", "raw_logits", ValueError, "one of raw_.*, got 'raw_logits': logits are "),
        ("limit_mm_per_prompt", 2, TypeError, r'a dictionary like {"image": 2}, got 2'),
        ("mm_processor_kwargs", 9, TypeError, "a dictionary with max_pixels or min_pixels, got 9"),
        ("allowed_local_media_path", "/no/such", ValueError, "a folder that exists, got '/no/such"),
        ("allowed_local_media_path", None, TypeError, "the path of a folder, or .*, got None"),
        ("allowed_media_domains", "a.org", TypeError, r"a list of hosts, \[\"ex.*, got 'a.org'"),
        ("language_model_only", 1, TypeError, "True or False, got 1"),
        ("load_format", "gguf", ValueError, "one of auto, safetensors, dummy, got 'gguf'"),
        ("generation_config", "hf", ValueError, "one of auto, vllm, got 'hf'"),
        ("generation_config", None, ValueError, "one of auto, vllm, got None"),
        ("seed", -1, ValueError, "between 0 and .*, got -1"),
        ("seed", 2**64, ValueError, "between 0 and"),
    ],
)
def test_defect_17_option_out_of_rule_is_named(name, value, error, match):
    with pytest.raises(error, match=f"^`{name}` must be {match}"):
        Config("model", **{name: value})


def test_limits_of_images_as_vllm_has_them(tmp_path):
    given = {"image": {"count": 2, "width": 9}, "video": 0, "audio": {"count": 0}}
    config = Config("model", limit_mm_per_prompt=given, allowed_local_media_path=tmp_path)
    assert read_max_images(config.limit_mm_per_prompt) == 2
    assert read_max_images({}) == read_max_images(None) == 999
    assert config.allowed_local_media_path == str(tmp_path)
    for limit, got in (
        ({"image": -1}, "must be at least 0, got -1"),
        ({"video": 1}, "must be 0, got 1"),
        ({"images": 1}, "must have the key \"image\", got 'images'"),
    ):
        with pytest.raises(ValueError, match=f"`limit_mm_per_prompt.*{got}"):
            Config("model", limit_mm_per_prompt=limit)
    with pytest.raises(ValueError, match=r"`mm_processor_kwargs` must have the keys max_pixels"):
        Config("model", mm_processor_kwargs={"max": 9})


@pytest.mark.parametrize("engine", [LLM, AsyncLLM])
def test_help_shows_every_option(engine):
    model, *options = inspect.signature(engine).parameters.values()
    assert (model.name, model.kind) == ("model", model.POSITIONAL_OR_KEYWORD)
    assert {option.kind for option in options} == {model.KEYWORD_ONLY}
    found = {option.name: option.default for option in options}
    assert vars(Config("path")) == {"model": "path"} | found


def test_type_checkers_know_the_options_of_config():
    options, known = get_type_hints(Options), get_type_hints(Config)
    assert known.pop("model") is str
    assert options == known and list(options) == list(known)
    assert not Options.__required_keys__


@pytest.mark.slow  # mypy takes long
def test_type_checkers_find_wrong_options(tmp_path):
    from mypy import api

    snippet, config = tmp_path / "snippet.py", tmp_path / "mypy.ini"
    lines = [  # a line, and what is wrong with it
        ("from nanovllm import LLM, AsyncLLM, SamplingParams", ""),
        ('llm = LLM("m", max_num_seqs=4, overlap=None, max_model_len=None)', ""),
        ('alone = AsyncLLM("m", dtype="auto", gpu_memory_utilization=1)', ""),
        ('LLM("m", max_num_seqs="x")', 'Argument "max_num_seqs" to "LLM" has incompatible type'),
        ('AsyncLLM("m", max_num_seqs="x")', 'Argument "max_num_seqs" to "AsyncLLM" has incom'),
        ('LLM("m", max_num_seq=4)', 'Unexpected keyword argument "max_num_seq" for "LLM"'),
        ('AsyncLLM("m", max_num_seq=4)', 'Unexpected keyword argument "max_num_seq" for "Async'),
        ("LLM(5)", 'Argument 1 to "LLM" has incompatible type "int"'),
        ('llm.generate(iter(["a"]), [SamplingParams()], on_error="return")', ""),
        ('llm.generate("a", use_tdqm=False)', 'Unexpected keyword argument "use_tdqm"'),
        ('llm.generate("a")[0].outputs[0].text + 1', "Unsupported operand types for +"),
    ]
    snippet.write_text("\n".join(line for line, _ in lines))
    skipped = ("torch", "transformers", "triton", "numpy", "safetensors")
    sections = "".join(f"[mypy-{name}.*]\nfollow_imports = skip\n" for name in skipped)
    config.write_text(f"[mypy]\ncache_dir = {tmp_path / 'cache'}\n{sections}")
    found, errors, _ = api.run(["--config-file", str(config), str(snippet)])
    assert not errors
    shown = dict.fromkeys(range(1, len(lines) + 1), "")
    for line in found.splitlines():
        if match := re.match(rf"{re.escape(str(snippet))}:(\d+): error: (.*)", line):
            shown[int(match[1])] += match[2]
    for (line, wrong), error in zip(lines, shown.values(), strict=True):
        assert error.startswith(wrong) and bool(error) == bool(wrong), (line, error)


def test_options_by_default_and_from_numpy():
    Config("model", max_num_seqs=np.int64(4), gpu_memory_utilization=np.float32(0.5))
    for device in ("auto", "cpu", "cuda", "cuda:0", "cuda:10"):
        assert Config("model", device=device).device == device
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config("model").max_num_seqs = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "value", "plain"),
    [
        ("dtype", "half", "float16"),
        ("dtype", "float", "float32"),
        ("max_model_len", None, 10**9),
    ],
)
def test_values_of_vllm_mean_the_same(name, value, plain, checkpoint):
    facts = []
    for each in (value, plain):
        with LLM(checkpoint, **{**SMALL, name: each}) as llm:
            facts.append(
                (
                    llm.model_runner.built.build.dtype,
                    llm.max_model_len,
                    llm.model_runner.built.build.max_model_len,
                )
            )
    assert facts[0] == facts[1]


def test_safetensors_are_what_a_checkpoint_has(checkpoint):
    with LLM(checkpoint, **SMALL, load_format="safetensors") as llm:
        assert tokens(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == references(checkpoint)


def test_token_budget_below_max_num_seqs_is_refused_with_remedy():
    with pytest.raises(
        ValueError, match=r"max_num_batched_tokens.*at least `max_num_seqs`.*7 < 8: raise .*lower"
    ):
        Config("model", max_num_batched_tokens=7, max_num_seqs=8)
    assert Config("model", max_num_batched_tokens=8, max_num_seqs=8).max_num_seqs == 8


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("max_model_length", "no option `max_model_length`; did you mean `max_model_len`?"),
        ("gpu_memory_utilisation", "did you mean `gpu_memory_utilization`?"),
        ("quux", "no option `quux`; options: max_num_batched_tokens, .*, trace$"),
        ("tokenizer", "no option `tokenizer`; the tokenizer is read from the model's directory$"),
        ("trust_remote_code", "; leave it out: code from a checkpoint is never run$"),
        ("speculative_config", "; speculative decoding is not supported$"),
        ("compilation_config", "; CUDA graphs are captured anyway; enforce_eager=True"),
        ("block_size", "; pass kvcache_block_size$"),
        ("enable_chunked_prefill", "enable_chunked_prefill`; .*mixed_steps=False"),
        (
            "enable_lora",
            r"; LLM\(model, adapter=path\) merges a LoRA adapter into the weights; several",
        ),
        ("pipeline_parallel_size", "; pass tensor_parallel_size$"),
    ],
)
def test_defect_17_unknown_option_names_the_nearest(name, match, tmp_path):
    with pytest.raises(TypeError, match=match):
        LLM(tmp_path, **{name: 4})


# As vLLM's examples and what others build on it pass them.
NOTHING_ASKED = {
    "async_scheduling": True,
    "attention_config": None,
    "config_format": "auto",
    "disable_cascade_attn": False,
    "disable_log_requests": True,
    "enable_expert_parallel": False,
    "guided_decoding_backend": "auto",
    "rope_scaling": None,
    "rope_theta": None,
    "structured_outputs_config": None,
    "block_size": None,
    "compilation_config": None,
    "convert": "auto",
    "cpu_offload_gb": 0,
    "disable_log_stats": True,
    "distributed_executor_backend": None,
    "download_dir": None,
    "enable_chunked_prefill": True,
    "enable_lora": False,
    "fully_sharded_loras": False,
    "lora_dtype": "auto",
    "lora_target_modules": None,
    "enable_prefix_caching": None,
    "hf_overrides": None,
    "hf_token": None,
    "logits_processors": None,
    "max_logprobs": 20,
    "max_num_batched_tokens": None,
    "max_num_seqs": None,
    "max_seq_len_to_capture": 8192,
    "num_gpu_blocks_override": None,
    "override_generation_config": {},
    "pipeline_parallel_size": 1,
    "runner": "auto",
    "seed": None,
    "served_model_name": None,
    "skip_tokenizer_init": False,
    "speculative_config": None,
    "swap_space": 4.0,
    "task": "generate",
    "tokenizer": None,
    "tokenizer_mode": "auto",
    "tokenizer_revision": None,
    "trust_remote_code": False,
    "calculate_kv_scales": False,
    "chat_template": None,
    "code_revision": None,
    "disable_sliding_window": False,
    "enable_prompt_embeds": False,
    "kv_transfer_config": None,
    "max_cpu_loras": None,
    "max_lora_rank": 16,
    "max_loras": 1,
    "model_impl": "auto",
    "pooler_config": None,
    "scheduling_policy": "fcfs",
    "use_tqdm_on_load": True,
    "weight_transfer_config": None,
}


@pytest.mark.parametrize("engine", [LLM, AsyncLLM])
def test_values_of_vllm_that_ask_for_nothing_are_accepted(engine, checkpoint):
    assert set(NOTHING_ASKED) == set(FOREIGN_OPTIONS)
    small = {name: value for name, value in SMALL.items() if name not in NOTHING_ASKED}
    llm = engine(checkpoint, **NOTHING_ASKED, **small, disable_custom_all_reduce=True)
    if engine is LLM:
        assert llm.config == Config(str(checkpoint), **small, disable_custom_all_reduce=True)
    llm.shutdown()
    assert llm.is_closed


@pytest.mark.parametrize("name", sorted(NOTHING_ASKED))
def test_values_of_vllm_that_ask_for_something_are_refused_first(name, tmp_path):
    """Before the directory, which is empty, is looked at."""
    match = f"`{name}`" if name in DEFAULTS else f"no option `{name}`; [^d].*"
    with pytest.raises(TypeError, match=match) as caught:
        LLM(tmp_path, **{name: "something"})
    assert "did you mean" not in str(caught.value)


# -- what the machine must have -------------------------------------------------------------------


def test_cuda_without_cuda_is_refused(checkpoint, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"`device` 'cuda'.*0 CUDA devices"):
        LLM(checkpoint, **{**SMALL, "device": "cuda"})
    with LLM(checkpoint, **{**SMALL, "device": "auto"}) as llm:
        assert llm.metrics()["device"] == "cpu"


def test_defect_18_backend_that_cannot_run_lists_every_refusal(checkpoint):
    with pytest.raises(
        ValueError,
        match=r"attention_backend='flash_attn' .*flash_attn: needs a CUDA device, not cpu.*; "
        r"use attention_backend='auto'",
    ):
        LLM(checkpoint, attention_backend="flash_attn", **SMALL)


def test_flash_attn_names_its_block_size(set_capability):
    set_capability((9, 0))
    needs = AttentionNeeds(torch.device("cuda"), torch.bfloat16, 64, block_size=16)
    refusal = FlashAttentionBackend.refusal(needs)
    assert refusal == "needs kvcache_block_size to be a multiple of 256, got 16"
    with pytest.raises(ValueError, match=r"flash_attn: .*multiple of 256, got 16.*; use "):
        select_backend("flash_attn", needs)


@pytest.mark.parametrize(
    ("size", "changes", "rule"),
    [
        (3, {}, "`tensor_parallel_size` must divide num_attention_heads 4 of this model, got 3"),
        (8, {}, "`tensor_parallel_size` must divide num_attention_heads 4 of this model, got 8"),
        (4, {"intermediate_size": 90}, "must divide intermediate_size 90 of this model, got 4"),
        (
            2,
            {"num_attention_heads": 6, "num_key_value_heads": 3},
            "must divide num_key_value_heads 3 of this model, or be a multiple of it, got 2",
        ),
        (9, {}, "`tensor_parallel_size` must be between 1 and 8, got 9"),
    ],
)
def test_tensor_parallel_size_that_cannot_be_had_is_refused(
    size, changes, rule, checkpoint, tmp_path, monkeypatch
):
    monkeypatch.setattr(executor, "Workers", lambda *_: pytest.fail("a worker was started"))
    path = copy_checkpoint(checkpoint, tmp_path / "model", **changes)
    with pytest.raises(ValueError, match=re.escape(rule)):
        LLM(path, tensor_parallel_size=size, **SMALL)


# Python's -O, of our modules alone: of torch, there is none that was compiled before.
WITHOUT_ASSERTS = """
from importlib.machinery import SourceFileLoader
get_code = SourceFileLoader.get_code
def without_asserts(self, name):
    if not name.startswith("nanovllm"):
        return get_code(self, name)
    return compile(self.get_data(self.path), self.path, "exec", dont_inherit=True, optimize=1)
SourceFileLoader.get_code = without_asserts
"""

PROBE = """
import atexit, dis, json, sys
atexit.register(lambda: print(len(vars(runner).keys() & {"built"}), "left"))
from nanovllm import LLM, SamplingParams
small, path = json.loads(sys.argv[1]), sys.argv[2]
llm = LLM(path, overlap=True, **small)
runner = llm.model_runner
operations = {each.opname for each in dis.get_instructions(type(llm.scheduler).schedule)}
calls = {
    "assert": lambda: [][0] if "LOAD_ASSERTION_ERROR" in operations else None,
    "triton": lambda: LLM(path, attention_backend="triton", **small),
    "option": lambda: LLM(path, **{**small, "max_num_seqs": 0}),
    "max_tokens": lambda: SamplingParams(max_tokens=0),
    "empty": lambda: llm.generate([[]], use_tqdm=False),
    "vocabulary": lambda: llm.generate([[1], [10**6]], use_tqdm=False),
    "lengths": lambda: llm.generate([[1], [2]], [SamplingParams()], use_tqdm=False),
    "directory": lambda: LLM("/nowhere", **small),
}
report = {}
for name, call in calls.items():
    try:
        call()
        report[name] = ["no error", ""]
    except Exception as error:
        report[name] = [type(error).__name__, str(error)]
llm.add_request([1, 2, 3])
llm.step()
report["steps in flight"] = len(llm.core.in_flight)
print(json.dumps(report))
"""


@pytest.mark.parametrize("way", ["ours", rare("-O")])
def test_checks_hold_without_asserts_and_triton_without_gpu_is_refused(way, checkpoint):
    """Defect 17. One process for both, since importing torch takes seconds. The engine is left to
    Python's exit, with a step in flight, and closes in silence before modules are torn down."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    how = ["-O", "-c", PROBE] if way == "-O" else ["-c", WITHOUT_ASSERTS + PROBE]
    command = [sys.executable, *how, json.dumps(SMALL), str(checkpoint)]
    process = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    assert process.stderr == ""
    said, left = process.stdout.splitlines()
    report = json.loads(said)
    assert (left, report.pop("steps in flight")) == ("0 left", 1)
    assert report.pop("assert")[0] == "no error", "asserts are there"
    kind, message = report.pop("triton")
    assert kind == "ValueError"
    assert re.search(
        r"attention_backend='triton'.*triton: needs a CUDA device, not cpu "
        r"\(TRITON_INTERPRET=1 runs it slowly\); flash_attn: needs ",
        message,
    )
    assert {kind for kind, _ in report.values()} == {"ValueError"}, report


# -- config.json ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.*supported: Exaone4.*, Qwen3For"),
        ({"architectures": None}, "model_type 'qwen3' is not supported; supported: Exaone4"),
        (
            {"architectures": ["Qwen4ExpForConditionalGeneration"], "vision_config": {}},
            "Qwen4Exp.* hyper-connections and sparse attention; the nearest .* is Qwen3.5",
        ),
        (
            {"architectures": ["NemotronHForCausalLM"]},
            "NemotronH.* keep a state of Mamba's; the nearest supported model is Qwen3.5",
        ),
        (
            {"architectures": ["FalconH1ForCausalLM"]},
            "FalconH1.* keep a state of Mamba's; the nearest supported model is Qwen3.5",
        ),
        (
            {"architectures": ["GraniteMoeHybridForCausalLM"]},
            "GraniteMoeHybrid.* a state of Mamba's; the nearest supported model is Granite 3",
        ),
        (
            {"architectures": ["Glm4MoeLiteForCausalLM"], "kv_lora_rank": 512},
            r"Glm4MoeLite.* keeps latents, .*\(MLA\); the nearest supported model is Qwen3-MoE",
        ),
        (
            {"architectures": ["M4ForConditionalGeneration"], "text_config": {"kv_lora_rank": 1}},
            r"M4For.* keeps latents, .*\(MLA\)",
        ),
        (
            {"architectures": ["InternVLForConditionalGeneration"], "vision_config": {}},
            "InternVL.* reads images or sound; pass a text-only model",
        ),
        (
            {"architectures": ["OwnForCausalLM"], "auto_map": {"AutoModel": "own.Own"}},
            "OwnFor.* Python code in the checkpoint .`auto_map`., which is never run",
        ),
        ({"hidden_act": "gelu"}, "`hidden_act` 'gelu' is not supported; supported: silu, gelu_"),
        ({"quantization_config": {"quant_method": "hqq"}}, "'hqq' is not supported: use a"),
        ({"layer_types": ["full_attention", "linear"]}, "`layer_types` 'linear' is not supported"),
        ({"layer_types": ["full_attention"]}, "`layer_types` must be a list of .* values, 2, got"),
        ({"dtype": "float8_e4m3fn"}, "`dtype` 'float8_e4m3fn' is not supported, only bfloat16"),
        ({"hidden_size": None}, "`hidden_size` is missing"),
        ({"num_hidden_layers": "2"}, "`num_hidden_layers` must be an integer, got '2'"),
        ({"vocab_size": 0}, "`vocab_size` must be between 1 and .*, got 0"),
        ({"tie_word_embeddings": "yes"}, "`tie_word_embeddings` must be True or False, got 'yes'"),
        ({"num_key_value_heads": 3}, "multiple of `num_key_value_heads`, got 4 and 3"),
        ({"head_dim": 31}, "must select an even number of dimensions of `head_dim` 31, got 1.0"),
        (
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.3}},
            "`partial_rotary_factor` of RoPE must select an even number of dimensions of "
            "`head_dim` 32, got 0.3",
        ),
        ({"rope_scaling": {"rope_type": "mrope"}}, "RoPE scaling 'mrope' is not supported, only"),
        ({"rope_scaling": {"type": "linear"}}, "`factor` is missing"),
        (
            {"rope_scaling": {"type": "su", "short_factor": [1.0]}},
            "`short_factor` of RoPE must be 16 numbers, got 1 values",
        ),
        ({"rope_parameters": None, "rope_theta": None}, "`rope_theta` is missing"),
        (
            {
                "architectures": ["LlamaForCausalLM"],
                "rope_parameters": {"rope_type": "llama3", "factor": 8.0},
            },
            "`low_freq_factor` is missing",
        ),
        (
            {"architectures": ["LlamaForCausalLM"], "head_dim": None, "num_attention_heads": 6},
            "without `head_dim`, `hidden_size` must be a multiple of .*, got 64 and 6",
        ),
        (
            {"rope_scaling": {**LLAMA3, "low_freq_factor": 4}},
            "`low_freq_factor` of RoPE must be below `high_freq_factor`, got 4.0 and 4.0",
        ),
        (
            {"architectures": ["GptOssForCausalLM"], "swiglu_alpha": 1.0},
            "`swiglu_alpha` 1.0 is not supported, only 1.702",
        ),
        (
            {"architectures": ["GptOssForCausalLM"], "swiglu_limit": 0},
            "`swiglu_limit` must be",
        ),
        (
            {
                "architectures": ["GptOssForCausalLM"],
                "hidden_size": 80,
                "quantization_config": {"quant_method": "mxfp4"},
            },
            "`hidden_size` must be a multiple of 32 with MXFP4, got 80",
        ),
        ({"eos_token_id": "end"}, "`eos_token_id` must be token ids, got 'end'"),
        ({"eos_token_id": [1, -1]}, r"`eos_token_id` must be token ids, got \[1, -1\]"),
    ],
)
def test_defect_18_unsupported_checkpoint_is_refused_by_name(changes, match, checkpoint, tmp_path):
    path = copy_checkpoint(checkpoint, tmp_path / "model", **changes)
    with pytest.raises(ValueError, match=match):
        LLM(path, **SMALL)


NASTY = [
    *(math.nan, math.inf, -math.inf, 0, -1, 0.5, 3, 2**31, 10**400, 1e300, 5e-324, True, False),
    *("", "2", "\ud800", [], [1], [[1], "a"], [{}], {}, {"a": 1}, {"a": {"type": []}}),
    {"full_attention": 3, "rope_theta": math.nan, "rope_type": "default"},
    json.loads("[" * 40 + "]" * 40),
]


def outcome(read, file, values, key):
    """Result of `read` for a file with these values; None if it refuses one by file and key."""
    file.unlink(missing_ok=True)  # a file that is cut to nothing and written waits for the disk
    file.write_text(json.dumps(values))
    try:
        return read(str(file.parent))
    except ValueError as error:
        message = str(error)
    names = {key, "rope_theta"} if key.startswith("rope_") else {key}
    assert file.name in message and any(f"`{name}`" in message for name in names), message
    return None


KEYS = [  # beside those of every checkpoint
    *("attention_multiplier", "attn_logit_softcapping", "final_logit_softcapping", "head_dim"),
    *("hidden_activation", "layer_types", "max_window_layers", "mlp_bias", "no_rope_layers"),
    *("no_rope_layer_interval", "original_max_position_embeddings", "partial_rotary_factor"),
    *("query_pre_attn_scalar", "rope_local_base_freq", "rope_parameters", "rope_scaling"),
    *("rope_theta", "sliding_window", "sliding_window_pattern", "torch_dtype"),
    *("use_bidirectional_attention", "use_sliding_window"),
    *("decoder_sparse_step", "mlp_only_layers", "moe_intermediate_size", "norm_topk_prob"),
    *("num_experts", "num_experts_per_tok", "num_local_experts", "swiglu_limit"),
]


@pytest.mark.parametrize(
    "family",
    [
        "Qwen3",
        "GptOss",
        *map(rare, ("Gemma3", "Exaone4", "SmolLM3", "Olmo3", "Phi3", "Qwen3Moe", "Mixtral")),
    ],
)
def test_any_value_of_any_key_is_refused_by_name_or_right(family, checkpoint, tmp_path):
    """NaN and infinity were taken, and others ended in an OverflowError or a TypeError."""
    file = tmp_path / "config.json"
    raw = json.loads((checkpoint / "config.json").read_text())
    raw["architectures"] = [f"{family}ForCausalLM"]
    for key in sorted({*raw, *KEYS} - {"architectures", "model_type", "transformers_version"}):
        for value in NASTY:
            config = outcome(ModelConfig.from_pretrained, file, {**raw, key: value}, key)
            for field in dataclasses.fields(ModelConfig) if config else ():
                found, kind = getattr(config, field.name), get_origin(field.type)
                kind = field.type if kind in (None, UnionType) else kind
                assert isinstance(found, kind), (key, value)
                assert type(found) is not bool or kind is bool, (key, value)
                assert kind is not int or 1 <= found < 2**31, (key, value)
                assert kind is not float or 0 <= found <= 1e30, (key, value)


def test_any_sampling_default_is_refused_by_name_or_right(tmp_path):
    file = tmp_path / "generation_config.json"
    for key, name in SAMPLING_KEYS.items():
        for value in NASTY:
            params = outcome(read_sampling_params, file, {key: value}, key)
            if params is None:
                continue
            is_text = name == "stop" and isinstance(value, str)
            wanted = (value,) if is_text else tuple(value) if name == "stop" else value
            assert getattr(params, name) == wanted


def test_any_end_token_is_refused_by_name_or_right(checkpoint, tmp_path):
    file = copy_checkpoint(checkpoint, tmp_path / "model") / "generation_config.json"
    key = "eos_token_id"
    for value in NASTY:
        config = outcome(ModelConfig.from_pretrained, file, {key: value}, key)
        assert config is None or config.eos_token_ids <= {0, 1, 3}


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": YARN, "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}},
        {"rope_theta": 1e4, "rope_parameters": {"full_attention": {**YARN, "rope_theta": 1e4}}},
    ],
    ids=["beside-rope_parameters", "per-layer-type"],
)
def test_rope_scaling_is_found_wherever_it_hides(changes, checkpoint, tmp_path):
    """Qwen3's model card says to add `rope_scaling`; transformers 5 has written the other key."""
    path = copy_checkpoint(checkpoint, tmp_path / "model", **changes)
    config = ModelConfig.from_pretrained(str(path))
    rope = config.layers[0].rope
    assert (rope.rope_type, rope.factor, rope.rope_theta) == ("yarn", 4.0, 1e4)
    assert rope.attention_factor == pytest.approx(0.1 * math.log(4) + 1)
    assert config.max_position_embeddings == 256, "four times the original context"


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 12345.0, "rope_scaling": None},
        {"rope_theta": 12345, "rope_scaling": {"type": "default"}},
        {"rope_parameters": {"rope_theta": 12345.0, "rope_type": "default"}},
        {"rope_parameters": {"rope_theta": 12345.0, "rope_type": "default"}, "rope_theta": 1.0},
        {"rope_parameters": {"rope_theta": None, "rope_type": None}, "rope_theta": 12345.0},
        {
            "rope_parameters": {
                "full_attention": {"rope_theta": 12345.0, "partial_rotary_factor": None},
                "sliding_attention": {"rope_theta": 1.0},
            }
        },
    ],
    ids=["transformers-4", "transformers-4-default", "transformers-5", "both", "null", "by kind"],
)
def test_defect_6_rope_theta_is_read_in_both_spellings(spelling, checkpoint, tmp_path):
    changes = {"rope_parameters": None, "rope_theta": None, **spelling}
    path = copy_checkpoint(checkpoint, tmp_path / "model", **changes)
    layers = ModelConfig.from_pretrained(str(path)).layers
    assert [layer.rope for layer in layers] == [RopeParameters(12345.0, 32)] * 2


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_dtype_is_read_in_both_spellings(key, checkpoint, tmp_path):
    path = copy_checkpoint(checkpoint, tmp_path / "model", **{"dtype": None, key: "float16"})
    assert ModelConfig.from_pretrained(str(path)).dtype == "float16"


# -- generation_config.json -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "params"),
    [
        ({}, SamplingParams()),
        (  # as Qwen3 has it
            {
                "bos_token_id": 151643,
                "do_sample": True,
                "eos_token_id": [151645, 151643],
                "pad_token_id": 151643,
                "temperature": 0.6,
                "top_k": 20,
                "top_p": 0.95,
                "transformers_version": "4.51.0",
            },
            SamplingParams(temperature=0.6, top_k=20, top_p=0.95),
        ),
        (
            {"min_p": 0.1, "repetition_penalty": 1.05, "max_new_tokens": 2048},
            SamplingParams(min_p=0.1, repetition_penalty=1.05, max_tokens=2048),
        ),
        ({"temperature": 0}, SamplingParams(temperature=0)),
        (
            {"stop_strings": "a", "min_new_tokens": 9},
            SamplingParams(stop=["a"], min_tokens=9),
        ),
        ({"min_new_tokens": 99, "stop_strings": []}, SamplingParams(min_tokens=99, max_tokens=99)),
        (
            {"min_new_tokens": 3, "max_new_tokens": 5, "stop_strings": ["a", "b"]},
            SamplingParams(min_tokens=3, max_tokens=5, stop=["a", "b"]),
        ),
        ({"do_sample": False}, SamplingParams()),
        ({"do_sample": False, "temperature": 0.6}, SamplingParams(temperature=0.6)),
        ({"temperature": None, "top_k": None, "max_new_tokens": None}, SamplingParams()),
        ({"max_length": 20, "num_beams": 4, "n": 3, "seed": 7, "stop": "a"}, SamplingParams()),
    ],
)
def test_sampling_defaults_are_read(values, params, tmp_path):
    edit_json(tmp_path / "generation_config.json", **values)
    assert read_sampling_params(str(tmp_path)) == params


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("temperature", "0.6", "`temperature` must be a number, got '0.6'"),
        ("temperature", math.nan, "`temperature` must be finite and 0 to 1e+09, got nan"),
        ("top_k", 20.0, "`top_k` must be an integer, got 20.0"),
        ("top_k", True, "`top_k` must be an integer, got True"),
        ("top_p", 0, "`top_p` must be above 0 and at most 1, got 0"),
        ("min_p", [0.1], "`min_p` must be a number, got [0.1]"),
        (
            *("repetition_penalty", 0),
            "`repetition_penalty` must be above 0, 1e-09 to 1e+09, got 0",
        ),
        ("max_new_tokens", 0, "`max_tokens` must be at least 1, got 0"),
        ("min_new_tokens", 9.0, "`min_tokens` must be an integer, got 9.0"),
        ("stop_strings", [""], "`stop` must hold strings that are not empty, got ''"),
        ("stop_strings", 3, "`stop` must be a list of strings, got 3"),
    ],
)
def test_wrong_sampling_default_names_file_and_key(key, value, rule, checkpoint, tmp_path):
    path = copy_checkpoint(checkpoint, tmp_path / "model")
    file = path / "generation_config.json"
    edit_json(file, **{key: value})
    with pytest.raises(ValueError) as caught:
        LLM(path, **SMALL)
    assert str(caught.value) == (
        f"`{key}` of {file} is no valid sampling default: {rule}; correct it, or pass "
        'generation_config="vllm" to leave all of them out'
    )
    with LLM(path, generation_config="vllm", **SMALL) as llm:
        assert llm.get_default_sampling_params() == SamplingParams()


@pytest.mark.parametrize(
    "values",
    [
        {"stop_strings": ["3 1"], "max_new_tokens": 30},
        {"min_new_tokens": 12, "max_new_tokens": 20},
        {"min_new_tokens": 70, "stop_strings": ["nowhere"]},
        {"max_new_tokens": 20},
    ],
    ids=repr,
)
def test_stops_and_least_lengths_of_the_checkpoint_are_those_of_transformers(values, tmp_path):
    path = copy_checkpoint(TINY, tmp_path / "model")
    edit_json(path / "generation_config.json", do_sample=False, **values)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    bound = {} if "max_new_tokens" in values else {"max_new_tokens": 70}
    with LLM(path, **{**SMALL, "max_num_batched_tokens": 128}) as llm:
        params = dataclasses.replace(llm.get_default_sampling_params(), temperature=0)
        for prompt in ("count from 11: ", "127+345=", "reverse: engine ="):
            ids = tokenizer(prompt, return_tensors="pt").input_ids
            with torch.inference_mode():
                wanted = model.generate(ids, tokenizer=tokenizer, **bound)[0, ids.shape[1] :]
            [output] = llm.generate(prompt, params, use_tqdm=False)
            assert output["token_ids"] == wanted.tolist()


def test_keys_that_would_change_texts_are_named(tmp_path, caplog):
    nothing = {"no_repeat_ngram_size": 0, "typical_p": 1.0, "bad_words_ids": None, "num_beams": 1}
    edit_json(tmp_path / "generation_config.json", **nothing)
    read_sampling_params(str(tmp_path))
    assert not caplog.records
    changes = {"no_repeat_ngram_size": 3, "suppress_tokens": [7], "num_beams": 4}
    edit_json(tmp_path / "generation_config.json", **changes)
    assert read_sampling_params(str(tmp_path)) == SamplingParams()
    [record] = caplog.records
    assert (
        "`suppress_tokens`, `no_repeat_ngram_size`, `num_beams`, which transformers would apply"
        in record.message
    )


def test_generate_and_add_request_take_the_checkpoints_defaults(checkpoint, tmp_path):
    path = copy_checkpoint(checkpoint, tmp_path / "model")
    edit_json(path / "generation_config.json", temperature=0.0, max_new_tokens=7)
    expected = reference(checkpoint, PROMPT, 7)
    with LLM(path, **SMALL) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0, max_tokens=7)
        assert tokens(llm.generate([PROMPT, PROMPT], use_tqdm=False)) == [expected] * 2
        llm.add_request(PROMPT)
        while not (finished := llm.step()):
            pass
        assert tokens(finished) == [expected]
        # parameters that are given are ours in everything that they leave out
        [output] = llm.generate(PROMPT, SamplingParams(ignore_eos=True), use_tqdm=False)
        assert len(output["token_ids"]) == 64
    with LLM(path, generation_config="vllm", **SMALL) as llm:
        assert llm.get_default_sampling_params() == SamplingParams()
        [output] = llm.generate(PROMPT, use_tqdm=False)
        assert len(output["token_ids"]) == 64


@pytest.mark.parametrize("source", ["auto", "vllm"])
def test_end_tokens_are_read_in_any_case(source, checkpoint, tmp_path):
    path = copy_checkpoint(checkpoint, tmp_path / "model")
    edit_json(path / "generation_config.json", eos_token_id=[1, 2], temperature=0.5)
    with LLM(path, generation_config=source, **SMALL) as llm:
        assert llm.eos_token_ids == {1, 2}


def test_without_generation_config_defaults_are_plain(tmp_path):
    assert read_sampling_params(str(tmp_path)) == SamplingParams()
    assert read_sampling_params(str(TINY)) == SamplingParams()
