"""`Config`: every option of `LLM(...)`, checked on its own before anything is loaded."""

import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from nanovllm.utils.checks import (
    check_bool,
    check_choice,
    check_float,
    check_int,
    check_names,
    plain_numbers,
)

Init = TypeVar("Init", bound=Callable[..., None])

DEVICES = re.compile(r"auto|cpu|cuda(:[0-9]|:[1-9][0-9])?")
DTYPES = ("auto", "bfloat16", "half", "float16", "float", "float32")
ATTENTION_BACKENDS = ("auto", "flash_attn", "triton", "torch")
LOAD_FORMATS = ("auto", "dummy")
GENERATION_CONFIGS = ("auto", "vllm")
REMEDIES = {  # for options of vLLM
    "download_dir": "not needed: nothing is downloaded",
    "swap_space": "not needed: what a preempted request had is computed again",
    "tokenizer": "the tokenizer is read from the model's directory",
    "trust_remote_code": "not needed: no code of a checkpoint is run",
}


@dataclass(frozen=True)
class Config:
    """The options of an engine. What follows from them and the model is passed on, not stored here.

    Attributes:
        model: directory of a Hugging Face checkpoint.
        max_num_batched_tokens: the most tokens one step computes; longer prompts take several.
        max_num_seqs: the most sequences that run at once.
        max_model_len: the most tokens of prompt and output together; the model's own limit and
            the KV pool bound it too. None: they alone.
        gpu_memory_utilization: the share of the GPU's memory for weights, activations and KV
            cache of this engine. Not used on a CPU.
        tensor_parallel_size: number of GPUs (on a CPU: processes) to split the model over.
        disable_custom_all_reduce: sum over GPUs by NCCL always, never inside our kernels.
        enforce_eager: do not capture CUDA graphs.
        kvcache_block_size: tokens per KV block, a power of two from 16.
        num_kvcache_blocks: number of KV blocks; -1 derives it from memory.
        device: "cuda" (or "cuda:1"), "cpu", or "auto": CUDA where there is one.
        dtype: "bfloat16", "float16" ("half"), "float32" ("float"), or "auto": the checkpoint's on
            CUDA, float32 on a CPU.
        attention_backend: "flash_attn", "triton", "torch", or "auto".
        kv_cache_memory_bytes: memory for the KV cache; None derives it from the device: on a CPU
            half of the free memory, 4 GiB at most. There the process grows as blocks are first
            written to: by what sequences need at once, and by cached prefixes up to the whole.
        enable_prefix_caching: reuse the KV blocks of equal prompt prefixes.
        mixed_steps: compute prompts beside decodes, in one step. False computes prompts first and
            alone, and the running sequences wait meanwhile, as in nano-vLLM.
        fused_kernels: on CUDA, use the fused Triton kernels for norms, rotary embedding and
            activation, and in float32 on a CPU oneDNN's matrix products; False takes the plain
            PyTorch expressions.
        overlap: launch each step before the tokens of the one before it are read; None does so on
            CUDA. False is the plain synchronous loop.
        load_format: "auto" reads the checkpoint's weights; "dummy" draws random ones for the
            shapes in config.json (for benchmarks).
        generation_config: "auto" takes what sampling parameters are by default from the
            checkpoint's generation_config.json; "vllm" does not.
        seed: seeds sampling (and dummy weights).
    """

    model: str
    max_num_batched_tokens: int = 16384
    max_num_seqs: int = 512
    max_model_len: int = 4096
    gpu_memory_utilization: float = 0.9
    tensor_parallel_size: int = 1
    disable_custom_all_reduce: bool = False
    enforce_eager: bool = False
    kvcache_block_size: int = 256
    num_kvcache_blocks: int = -1
    device: str = "auto"
    dtype: str = "auto"
    attention_backend: str = "auto"
    kv_cache_memory_bytes: int | None = None
    enable_prefix_caching: bool = True
    mixed_steps: bool = True
    fused_kernels: bool = True
    overlap: bool | None = None
    load_format: str = "auto"
    generation_config: str = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.model:
            raise ValueError("`model` must be the directory of a checkpoint, got an empty path")
        check_int("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        check_int("max_num_seqs", self.max_num_seqs, 1)
        if self.max_model_len is None:
            object.__setattr__(self, "max_model_len", sys.maxsize)
        check_int("max_model_len", self.max_model_len, 2)
        check_float("gpu_memory_utilization", self.gpu_memory_utilization, 0.01, 1.0)
        check_int("tensor_parallel_size", self.tensor_parallel_size, 1, 8)
        check_bool("disable_custom_all_reduce", self.disable_custom_all_reduce)
        check_bool("enforce_eager", self.enforce_eager)
        check_int("kvcache_block_size", self.kvcache_block_size, 16)
        check_bool("enable_prefix_caching", self.enable_prefix_caching)
        check_bool("mixed_steps", self.mixed_steps)
        check_bool("fused_kernels", self.fused_kernels)
        if self.overlap is not None:
            check_bool("overlap", self.overlap)
        check_choice("dtype", self.dtype, DTYPES)
        check_choice("attention_backend", self.attention_backend, ATTENTION_BACKENDS)
        check_choice("load_format", self.load_format, LOAD_FORMATS)
        check_choice("generation_config", self.generation_config, GENERATION_CONFIGS)
        check_int("seed", self.seed, 0, 2**64 - 1)
        if not isinstance(self.device, str) or not DEVICES.fullmatch(self.device):
            raise ValueError(f"`device` must be cuda, cuda:N, cpu or auto, got {self.device!r}")
        plain_numbers(self)
        if self.kvcache_block_size & (self.kvcache_block_size - 1):
            raise ValueError(
                f"`kvcache_block_size` must be a power of two, got {self.kvcache_block_size}"
            )
        if self.num_kvcache_blocks != -1:
            check_int("num_kvcache_blocks", self.num_kvcache_blocks, 1)
        if self.kv_cache_memory_bytes is not None:
            check_int("kv_cache_memory_bytes", self.kv_cache_memory_bytes, 1)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                "`max_num_batched_tokens` must be at least `max_num_seqs`, so that every running "
                f"sequence gets its token in each step, got {self.max_num_batched_tokens} < "
                f"{self.max_num_seqs}: raise the first or lower the second"
            )


OPTIONS = [field for field in fields(Config) if field.name != "model"]


def check_options(options: dict[str, Any]) -> None:
    """TypeError for an option that `Config` does not have."""
    check_names("LLM", options, [field.name for field in OPTIONS], REMEDIES)


def takes_options(init: Init) -> Init:
    """For an `__init__(self, model, **options)`: let help() and notebooks see every option."""
    own = [p for p in inspect.signature(init).parameters.values() if p.kind is not p.VAR_KEYWORD]
    keyword_only = inspect.Parameter.KEYWORD_ONLY
    options = [
        inspect.Parameter(field.name, keyword_only, default=field.default, annotation=field.type)
        for field in OPTIONS
    ]
    init.__dict__["__signature__"] = inspect.Signature([*own, *options], return_annotation=None)
    return init
