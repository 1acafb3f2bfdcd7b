"""`Config`: every option of `LLM(...)`, each checked before anything is loaded."""

import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from typing_extensions import TypedDict

from nanovllm.images.processor import read_limits
from nanovllm.images.prompts import read_max_images
from nanovllm.images.urls import read_domains, read_folder
from nanovllm.sampling_params import LOGPROBS_MODES, SamplingParams, check_logprobs_mode
from nanovllm.utils.checks import (
    check_bool,
    check_choice,
    check_float,
    check_int,
    is_number_or_none,
    listed,
    plain_numbers,
    shown,
)
from nanovllm.utils.options import Foreign, only, own_options

Init = TypeVar("Init", bound=Callable[..., None])

DEVICES = re.compile(r"auto|cpu|cuda(:[0-9]|:[1-9][0-9])?")
DTYPES = ("auto", "bfloat16", "half", "float16", "float", "float32")
ATTENTION_BACKENDS = ("auto", "flash_attn", "triton", "torch")
KV_CACHE_DTYPES = ("auto", "fp8", "fp8_e4m3")
QUANTIZATIONS = ("fp8", "awq", "gptq", "compressed-tensors", "auto-round")
LOAD_FORMATS = ("auto", "safetensors", "dummy")
GENERATION_CONFIGS = ("auto", "vllm")
NO_CODE = "leave it out: code from a checkpoint is never run"
NO_LORA = (
    "LLM(model, adapter=path) merges a LoRA adapter into the weights; several in one batch are not "
    "supported"
)
ONE_TOKENIZER = "the tokenizer is read from the model's directory"
NO_EMBEDS = "prompts are text, token ids and images"
FOREIGN_OPTIONS: Foreign = {
    **dict.fromkeys(
        ("enable_prefix_caching", "max_num_batched_tokens", "max_num_seqs", "seed"),
        (only(None), "leave it out for the default"),
    ),
    "async_scheduling": (only(None, False, True), "overlap=False turns overlapped steps off"),
    "attention_config": (only(None), "pass attention_backend"),
    "block_size": (only(None), "pass kvcache_block_size"),
    "calculate_kv_scales": (only(False), "scales are per token and head"),
    "chat_template": (only(None), "pass it to chat()"),
    "code_revision": (only(None), NO_CODE),
    "compilation_config": (
        only(None),
        "CUDA graphs are captured anyway; enforce_eager=True turns them off",
    ),
    "config_format": (only("auto", "hf"), "config.json is read in Hugging Face's format"),
    "convert": (only(None, "auto", "none"), "generate(), embed() and score() need no option"),
    "cpu_offload_gb": (only(None, 0, 0.0), "weights stay on the device: pass tensor_parallel_size"),
    "disable_cascade_attn": (only(False), "pass share_prefixes=False"),
    "disable_log_requests": (only(False, True), "requests are not logged"),
    "disable_log_stats": (only(None, False, True), "metrics() returns the statistics"),
    "disable_sliding_window": (only(False), "windows are read from config.json"),
    "distributed_executor_backend": (only(None, "mp"), "ranks are processes on this machine"),
    "download_dir": (only(None), "set HF_HOME in the environment"),
    "enable_chunked_prefill": (
        only(None, True),
        "max_num_batched_tokens bounds a chunk; mixed_steps=False separates them from decodes",
    ),
    "enable_expert_parallel": (only(False), "experts are tensor-parallel"),
    "enable_lora": (only(None, False), NO_LORA),
    "fully_sharded_loras": (only(False), NO_LORA),
    "lora_dtype": (only("auto"), NO_LORA),
    "lora_target_modules": (only(None), NO_LORA),
    "enable_prompt_embeds": (only(False), NO_EMBEDS),
    "guided_decoding_backend": (only(None, "auto"), "llguidance is the only backend"),
    "hf_overrides": (only(None, {}), "edit the checkpoint's config.json"),
    "hf_token": (only(None, False, True), "set HF_TOKEN in the environment"),
    "kv_transfer_config": (only(None), "leave it out: each engine computes its own prompts"),
    "logits_processors": (only(None, []), "SamplingParams has logit_bias and structured_outputs"),
    "max_logprobs": (only(None, *range(21)), "the maximum is 20"),
    **dict.fromkeys(("max_cpu_loras", "max_lora_rank", "max_loras"), (is_number_or_none, NO_LORA)),
    "max_seq_len_to_capture": (is_number_or_none, "CUDA graphs serve any sequence length"),
    "model_impl": (only("auto", "vllm"), "only this package's models run"),
    "num_gpu_blocks_override": (only(None), "pass num_kvcache_blocks"),
    "override_generation_config": (only(None, {}), "pass SamplingParams"),
    "pipeline_parallel_size": (only(1), "pass tensor_parallel_size"),
    "pooler_config": (only(None), "pass pooling to embed()"),
    "rope_scaling": (only(None), "it is read from config.json"),
    "rope_theta": (only(None), "it is read from config.json"),
    "runner": (only(None, "auto", "generate"), "embed() and score() need no option"),
    "scheduling_policy": (only("fcfs"), "prompts run in the given order"),
    "served_model_name": (only(None), "`nanovllm serve` has it, as --served-model-name"),
    "skip_tokenizer_init": (only(False), "pass token ids, and detokenize=False for no text"),
    "speculative_config": (only(None), "speculative decoding is not supported"),
    "structured_outputs_config": (only(None), "SamplingParams has structured_outputs"),
    "swap_space": (is_number_or_none, "not needed: preempted requests are recomputed"),
    "task": (only(None, "auto", "generate"), "embed() and score() need no option"),
    "tokenizer": (only(None), ONE_TOKENIZER),
    "tokenizer_mode": (only("auto"), ONE_TOKENIZER),
    "tokenizer_revision": (only(None), "pass revision"),
    "trust_remote_code": (only(False), NO_CODE),
    "use_tqdm_on_load": (only(True), "set TQDM_DISABLE=1 in the environment to turn bars off"),
    "weight_transfer_config": (only(None), "pass tensors to update_weights()"),
}
# Keyword arguments of `generate` and `chat` in vLLM.
FOREIGN_ARGUMENTS: Foreign = {
    "chat_template_content_format": (only("auto", "string"), "content becomes text"),
    "lora_request": (only(None), NO_LORA),
    "mm_processor_kwargs": (only(None, {}), "put it into the prompt, or pass it to LLM()"),
    "priority": (only(None), "prompts run in the given order"),
    "prompt_token_ids": (only(None), "pass token ids as prompts"),
    "tokenization_kwargs": (only(None, {}), "pass token ids as prompts"),
    **{f.name: (only(), f"pass SamplingParams({f.name}=...)") for f in fields(SamplingParams)},
}
FOREIGN_RESET: Foreign = {
    "reset_running_requests": (only(False), "finish requests first, or call abort_all()"),
    "reset_connector": (only(False), "leave it out: the cache is on the device alone"),
}


class Options(TypedDict, total=False):
    """The options of `Config` for type checkers, which cannot see them in its fields."""

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int | None
    gpu_memory_utilization: float
    tensor_parallel_size: int
    data_parallel_size: int
    disable_custom_all_reduce: bool
    enable_sleep_mode: bool
    enforce_eager: bool
    kvcache_block_size: int
    num_kvcache_blocks: int
    device: str
    dtype: str
    attention_backend: str
    kv_cache_dtype: str
    quantization: str | None
    kv_cache_memory_bytes: int | None
    enable_prefix_caching: bool
    share_prefixes: bool
    mixed_steps: bool
    fused_kernels: bool
    batch_invariant: bool
    overlap: bool | None
    load_format: str
    generation_config: str
    logprobs_mode: str
    seed: int
    revision: str | None
    adapter: str | Path | Sequence[str | Path] | None
    limit_mm_per_prompt: Mapping[str, Any] | None
    mm_processor_kwargs: Mapping[str, Any] | None
    allowed_local_media_path: str
    allowed_media_domains: Sequence[str] | None
    language_model_only: bool
    trace: bool | str | Path


@dataclass(frozen=True)
class Config:
    """The options of an engine. Facts derived from them and the model are passed on, not stored.

    Attributes:
        model: directory of a Hugging Face checkpoint, or its name on the hub.
        max_num_batched_tokens: maximum number of tokens in one step; longer prompts take several
            steps.
        max_num_seqs: maximum number of sequences that run at once.
        max_model_len: maximum number of tokens of prompt and output together; the model's own
            limit and the KV pool bound it, too. None: they alone.
        gpu_memory_utilization: share of the GPU's memory for weights, activations and KV cache of
            this engine. Not used on a CPU.
        tensor_parallel_size: number of GPUs (on a CPU: processes) to split the model over, 1 to 8;
            more than one on Linux only.
        data_parallel_size: number of replicas of the engine, each with `tensor_parallel_size` GPUs
            (on a CPU: a process, with its part of the threads) and all other options for itself.
            Requests are divided among them.
        disable_custom_all_reduce: sum over GPUs by NCCL always, never inside our kernels.
        enable_sleep_mode: let `LLM.sleep` give the memory back while the engine stays (weights and
            KV cache are then in memory of their own, at fixed addresses).
        enforce_eager: do not capture CUDA graphs.
        kvcache_block_size: tokens per KV block, a power of two from 16.
        num_kvcache_blocks: number of KV blocks, of all layers; -1 derives it from memory.
        device: "cuda" (or "cuda:1"), "cpu", or "auto": CUDA if available.
        dtype: "bfloat16", "float16" ("half"), "float32" ("float"), or "auto": the checkpoint's on
            CUDA, float32 on a CPU.
        attention_backend: "flash_attn", "triton", "torch", or "auto": the fastest that can run.
        kv_cache_dtype: "fp8" holds keys and values in 8 bits, nearly twice the tokens in the same
            memory (`tensors.kv_cache`); "auto" in the dtype of the model. On CUDA it needs compute
            capability 8.9.
        quantization: "fp8" quantises the matrices of linear layers to 8 bits while they are loaded;
            None loads them as the checkpoint has them, in 16, 8 or 4 bits. The method of a
            quantised checkpoint ("awq", "gptq", "auto-round", "compressed-tensors") may be named;
            another is refused.
        kv_cache_memory_bytes: memory for the KV cache; None derives it from the device: on a CPU
            half of the free memory, at most 4 GiB, and 131,072 tokens or one sequence. There the
            process grows as blocks are first written to: to the blocks that sequences need at once,
            and with cached prefixes up to the whole.
        enable_prefix_caching: reuse the KV blocks of equal prompt prefixes.
        share_prefixes: read a prefix that many running sequences share once for all of them, not
            once for each (Triton backend, CUDA).
        mixed_steps: compute prompts beside decodes, in one step. False computes prompts first and
            alone, and the running sequences wait meanwhile, as in nano-vLLM.
        fused_kernels: on CUDA, use the fused Triton kernels for norms, rotary embedding,
            activation and small products, and in float32 on a CPU oneDNN's matrix products; False
            uses plain PyTorch expressions.
        batch_invariant: compute each token alike, whatever else is in its step: its log-probability
            has the same bits alone and in a batch, in chunks, after a hit in the prefix cache or a
            preemption (docs/reference/reproducible.md). Slower; on a CPU much slower, and with bits
            that depend on the number of PyTorch's threads, of which replicas have a part each.
        overlap: launch each step before the tokens of the previous one are read; None does so on
            CUDA. False is the plain synchronous loop.
        load_format: "auto" or "safetensors" reads the checkpoint's weights; "dummy" draws random
            ones for the shapes in config.json (for benchmarks).
        generation_config: "auto" reads default sampling parameters from the checkpoint's
            generation_config.json; "vllm" does not.
        logprobs_mode: distribution of log-probabilities for requests that name none:
            "raw_logprobs", "temperature_logprobs" or "processed_logprobs" (see `SamplingParams`).
            `score` and `beam_search` always take the first.
        seed: seed of sampling (and of dummy weights).
        revision: branch, tag or commit of a model on the hub; None: its main branch.
        adapter: directory of a LoRA adapter that peft has saved, or its name on the hub, or a list
            of these: they are merged into the weights while these are loaded, one after the other
            (docs/reference/adapters.md).
        limit_mm_per_prompt: maximum number of images in a prompt, `{"image": n}`; None: 999.
        mm_processor_kwargs: bounds on the area of resized images, in pixels, as a dictionary with
            `max_pixels` and `min_pixels`, or `size` with `longest_edge` and `shortest_edge`; None:
            the checkpoint's (docs/reference/images.md).
        allowed_local_media_path: folder whose files the messages of `chat` may name as images; "":
            none.
        allowed_media_domains: names of the hosts from which the messages of `chat` may name images
            by URLs of http and https, at any port; they are fetched when a conversation is
            rendered (docs/reference/images.md). None or empty: nothing is fetched.
        language_model_only: leave out the part of the model that sees, and its memory: prompts have
            no images. Options about images, which a model that does not see refuses, then have no
            effect.
        trace: record the engine's work from its start to its end in this file, for viewers of
            traces and `nanovllm report` (docs/timeline.md). True: in trace.json. An earlier trace
            is overwritten, another file refused.
    """

    model: str
    max_num_batched_tokens: int = 16384
    max_num_seqs: int = 512
    max_model_len: int | None = 4096
    gpu_memory_utilization: float = 0.9
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    disable_custom_all_reduce: bool = False
    enable_sleep_mode: bool = False
    enforce_eager: bool = False
    kvcache_block_size: int = 256
    num_kvcache_blocks: int = -1
    device: str = "auto"
    dtype: str = "auto"
    attention_backend: str = "auto"
    kv_cache_dtype: str = "auto"
    quantization: str | None = None
    kv_cache_memory_bytes: int | None = None
    enable_prefix_caching: bool = True
    share_prefixes: bool = True
    mixed_steps: bool = True
    fused_kernels: bool = True
    batch_invariant: bool = False
    overlap: bool | None = None
    load_format: str = "auto"
    generation_config: str = "auto"
    logprobs_mode: str = LOGPROBS_MODES[0]
    seed: int = 0
    revision: str | None = None
    adapter: str | Path | Sequence[str | Path] | None = None
    limit_mm_per_prompt: Mapping[str, Any] | None = None
    mm_processor_kwargs: Mapping[str, Any] | None = None
    allowed_local_media_path: str = ""
    allowed_media_domains: Sequence[str] | None = None
    language_model_only: bool = False
    trace: bool | str | Path = False

    def __post_init__(self) -> None:
        if not self.model:
            raise ValueError("`model` must be the directory of a checkpoint, got an empty path")
        check_int("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        check_int("max_num_seqs", self.max_num_seqs, 1)
        if self.max_model_len is not None:
            check_int("max_model_len", self.max_model_len, 2)
        check_float("gpu_memory_utilization", self.gpu_memory_utilization, 0.01, 1.0)
        check_int("tensor_parallel_size", self.tensor_parallel_size, 1, 8)
        check_int("data_parallel_size", self.data_parallel_size, 1, 64)
        check_bool("disable_custom_all_reduce", self.disable_custom_all_reduce)
        check_bool("enable_sleep_mode", self.enable_sleep_mode)
        check_bool("enforce_eager", self.enforce_eager)
        check_int("kvcache_block_size", self.kvcache_block_size, 16)
        check_bool("enable_prefix_caching", self.enable_prefix_caching)
        check_bool("share_prefixes", self.share_prefixes)
        check_bool("mixed_steps", self.mixed_steps)
        check_bool("fused_kernels", self.fused_kernels)
        check_bool("batch_invariant", self.batch_invariant)
        if self.overlap is not None:
            check_bool("overlap", self.overlap)
        check_choice("dtype", self.dtype, DTYPES)
        check_choice("attention_backend", self.attention_backend, ATTENTION_BACKENDS)
        check_choice("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        if self.quantization is not None:
            check_choice("quantization", self.quantization, QUANTIZATIONS)
        check_choice("load_format", self.load_format, LOAD_FORMATS)
        check_choice("generation_config", self.generation_config, GENERATION_CONFIGS)
        check_logprobs_mode(self.logprobs_mode)
        check_int("seed", self.seed, 0, 2**64 - 1)
        if self.revision is not None and not isinstance(self.revision, str):
            raise TypeError(f"`revision` must be a string, got {self.revision!r}")
        self._read_adapter()
        self._check_images()
        if isinstance(self.trace, os.PathLike):
            object.__setattr__(self, "trace", os.fspath(self.trace))
        if self.trace == "" or not isinstance(self.trace, (bool, str)):
            raise TypeError(f"`trace` must be the path of a file, or a bool, got {self.trace!r}")
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
        self._check_invariance()
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                "`max_num_batched_tokens` must be at least `max_num_seqs`, so that every running "
                f"sequence gets its token in each step, got {self.max_num_batched_tokens} < "
                f"{self.max_num_seqs}: raise the first or lower the second"
            )

    def _check_images(self) -> None:
        check_bool("language_model_only", self.language_model_only)
        read_max_images(self.limit_mm_per_prompt)
        read_limits(self.mm_processor_kwargs, "mm_processor_kwargs")
        folder = read_folder(self.allowed_local_media_path)
        object.__setattr__(self, "allowed_local_media_path", folder)
        domains = read_domains(self.allowed_media_domains)
        object.__setattr__(self, "allowed_media_domains", domains or None)

    def _check_invariance(self) -> None:
        if self.batch_invariant and self.attention_backend == "flash_attn":
            raise ValueError(
                "`attention_backend` must be 'auto', 'triton' or 'torch' with `batch_invariant`, "
                "got 'flash_attn', which divides keys by what else is in the batch"
            )

    def _read_adapter(self) -> None:
        """Make one path or several a tuple of strings."""
        given: Any = self.adapter
        paths = [given] if isinstance(given, (str, os.PathLike)) else given
        if paths is not None:
            if not isinstance(paths, (list, tuple)) or not all(
                isinstance(path, (str, os.PathLike)) and os.fspath(path) for path in paths
            ):
                raise TypeError(
                    "`adapter` must be the directory of a PEFT adapter, its name on the hub, or a "
                    f"list of these, got {_shown_adapter(given)}"
                )
            object.__setattr__(self, "adapter", tuple(map(os.fspath, paths)) or None)
        if self.adapter is not None and self.load_format == "dummy":
            raise ValueError(
                "`adapter` changes the weights of a checkpoint, which load_format='dummy' does not "
                "read: leave one of them out"
            )

    @property
    def adapters(self) -> tuple[str, ...]:
        """The adapters to merge, in their order."""
        paths: Any = self.adapter
        return paths or ()

    def longest(self, limit: int) -> int:
        """The length of the longest sequence in tokens, for a model with `limit` positions."""
        return limit if self.max_model_len is None else min(self.max_model_len, limit)


def _shown_adapter(given: Any) -> str:
    """A wrong value of `adapter` in short, without the values of tensors."""
    if isinstance(given, Mapping):
        return type(given).__name__
    if not isinstance(given, (list, tuple)):
        return shown(given)
    kinds = [repr(each) if isinstance(each, str) else type(each).__name__ for each in given]
    pair = ": load_adapter() takes pairs of a configuration and tensors"
    return f"a {type(given).__name__} of {listed(kinds)}{pair if len(given) == 2 else ''}"


DEFAULTS = {field.name: field.default for field in fields(Config) if field.name != "model"}


def our_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of `Config`, without those of vLLM that ask for nothing; TypeError for others."""
    return own_options("LLM", options, list(DEFAULTS), FOREIGN_OPTIONS)


def takes_options(init: Init) -> Init:
    """Give an `__init__(self, model, **options)` a signature in which help() shows every option."""
    own = [p for p in inspect.signature(init).parameters.values() if p.kind is not p.VAR_KEYWORD]
    keyword_only, types = inspect.Parameter.KEYWORD_ONLY, get_type_hints(Options)
    options = [
        inspect.Parameter(name, keyword_only, default=default, annotation=types[name])
        for name, default in DEFAULTS.items()
    ]
    init.__dict__["__signature__"] = inspect.Signature([*own, *options], return_annotation=None)
    return init
