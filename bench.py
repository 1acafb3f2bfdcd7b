"""Throughput benchmark, with nano-vLLM's workload.

256 sequences of `randint(100, 1024)` random token ids in 0..10000, each generating
`randint(100, 1024)` tokens at temperature 0.6, all drawn with `random.seed(0)`. After a warm-up
request, the time of `generate` is taken and the generated tokens are counted and checked.

    python bench.py --dummy qwen3-0.6b       # random weights in the published shape
    python bench.py --model DIR              # a checkpoint
    python bench.py                          # the embedded tiny checkpoint

Beside the tokens per second stand the bytes per second that decode read (weights, keys, values) and
the share of the roofline, where the GPU's limits are known (`benchmarks/limits.py`) or given by
--bandwidth and --flops. The last line is JSON; --save FILE appends it to FILE. On a CPU, without
--num-seqs, a size is chosen that ends in about a minute, if nothing else keeps the cores busy.
"""

import argparse
import json
import logging
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks import limits
from nanovllm import LLM, TINY, SamplingParams, __version__
from nanovllm.model_config import ModelConfig
from nanovllm.quantization import Int4

ROOT = Path(__file__).parent
CPU_SECONDS = 45.0
QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "max_position_embeddings": 40960,
    "torch_dtype": "bfloat16",
    "eos_token_id": 151645,
}
DUMMY_INT4: dict[str, dict[str, Any]] = {  # as checkpoints in 4 bits are published
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False},
}
SHAPES: dict[str, dict[str, Any]] = {  # from the config.json of the published checkpoints
    "qwen3-0.6b": {
        **QWEN3,
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "intermediate_size": 3072,
        "tie_word_embeddings": True,
    },
    "qwen3-4b": {
        **QWEN3,
        "hidden_size": 2560,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "intermediate_size": 9728,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        **QWEN3,
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "intermediate_size": 12288,
        "tie_word_embeddings": False,
    },
    "qwen3-30b-a3b": {
        **QWEN3,
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
    },
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"],
        "vocab_size": 201088,
        "hidden_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 2880,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "swiglu_limit": 7.0,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000,
        "sliding_window": 128,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "eos_token_id": 200002,
    },
    "gemma-3-4b": {
        "architectures": ["Gemma3ForCausalLM"],
        "vocab_size": 262208,
        "hidden_size": 2560,
        "num_hidden_layers": 34,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "intermediate_size": 10240,
        "query_pre_attn_scalar": 256,
        "sliding_window": 1024,
        "rope_theta": 1000000,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "max_position_embeddings": 131072,
        "torch_dtype": "bfloat16",
        "eos_token_id": 1,
    },
    "mistral-7b": {
        "architectures": ["MistralForCausalLM"],
        "vocab_size": 32768,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "eos_token_id": 2,
    },
    "llama-3.1-8b": {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 128256,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "eos_token_id": 128009,
    },
    "qwen2.5-7b": {
        "architectures": ["Qwen2ForCausalLM"],
        "vocab_size": 152064,
        "hidden_size": 3584,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "intermediate_size": 18944,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "eos_token_id": 151645,
    },
}


def workload(
    num_seqs: int, seed: int, vocab_size: int
) -> tuple[list[list[int]], list[SamplingParams]]:
    """nano-vLLM's prompts and parameters; ids are folded into a vocabulary below 10000."""
    rng = random.Random(seed)
    prompts = [
        [rng.randint(0, 10000) % vocab_size for _ in range(rng.randint(100, 1024))]
        for _ in range(num_seqs)
    ]
    params = [
        SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=rng.randint(100, 1024))
        for _ in range(num_seqs)
    ]
    return prompts, params


def run_once(
    llm: LLM, prompts: list[list[int]], params: list[SamplingParams], progress: bool
) -> tuple[int, float]:
    """Generated tokens and seconds of one run; every output is checked for its length."""
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=progress)
    seconds = time.perf_counter() - start
    for output, param in zip(outputs, params, strict=True):
        if len(output.outputs[0].token_ids) != param.max_tokens:
            raise RuntimeError(f"request {output.request_id} did not run to its length")
    return sum(num_new_tokens(params)), seconds


def num_new_tokens(params: list[SamplingParams]) -> list[int]:
    """How many tokens each of them asks for; all say it."""
    return [param.max_tokens or 0 for param in params]


def choose_cpu_size(llm: LLM, seed: int) -> int:
    """Sequences of the workload that take about `CPU_SECONDS`, from a timed probe of 16."""
    prompts, params = workload(16, seed, llm.model_config.vocab_size)
    short = [SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=16) for _ in params]
    _, seconds = run_once(llm, prompts, short, progress=False)
    steps = 562 / 16  # mean output over the probe's
    num_seqs = max(1, min(256, int(16 * CPU_SECONDS / (seconds * steps))))
    print(f"CPU: {num_seqs} of the 256 sequences, about a minute on idle cores (--num-seqs N)")
    return num_seqs


def hardware_name(device: str) -> str:
    """What the GPU or CPU calls itself."""
    import torch

    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")  # Linux; platform.processor() is empty there
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    names = [line.split(": ", 1)[1] for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "CPU"


def conditions(llm: LLM) -> dict[str, Any]:
    """What a figure depends on."""
    import torch

    git = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    metrics = llm.metrics()
    keys = (
        *("attention_backend", "device", "dtype", "quantization", "kv_cache_dtype"),
        *("tensor_parallel_size", "all_reduce", "overlap", "cuda_graphs", "num_kvcache_blocks"),
    )
    return {
        "commit": commit or None,
        "nanovllm": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "hardware": hardware_name(metrics["device"]),
        **{key: metrics[key] for key in keys},
        "mixed_steps": llm.config.mixed_steps,
        "fused_kernels": llm.config.fused_kernels,
        "num_preemptions": metrics["num_preemptions"],
        "num_cached_tokens": metrics["num_cached_tokens"],
    }


def achieved(
    llm: LLM,
    args: argparse.Namespace,
    prompts: list[list[int]],
    params: list[SamplingParams],
    seconds: float,
    num_shared: int = 0,
) -> dict[str, Any]:
    """Bandwidth and share of the roofline of a run (`limits.report`)."""
    metrics = llm.metrics()
    itemsize = 4 if metrics["dtype"] == "float32" else 2
    lens = [len(prompt) for prompt in prompts], num_new_tokens(params)
    config = llm.model_config
    formats = (
        kv_itemsize(metrics["kv_cache_dtype"], config.head_dim, itemsize),
        linear_itemsize(metrics["quantization"], config, itemsize),
    )
    work = limits.work(config, itemsize, *lens, num_shared, *formats)
    name = hardware_name(metrics["device"])
    limit = limits.hardware(name, itemsize, args.bandwidth, args.flops)
    return limits.report(work, seconds, limit and limit.times(metrics["tensor_parallel_size"]))


def kv_itemsize(dtype: str, head_dim: int, itemsize: int) -> float:
    """Bytes of a number in a KV cache, with its share of an exponent."""
    return 1 + 1 / head_dim if "8" in dtype else itemsize


def linear_itemsize(held: str, config: ModelConfig, itemsize: int) -> float:
    """Bytes of a number in a matrix of a linear layer, with its share of a scale."""
    if isinstance(config.quantization, Int4) and held == "int4":
        return 0.5 + 4 / config.quantization.group
    return 1 if held == "fp8" else itemsize


@contextmanager
def checkpoint(args: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """The model's directory and the engine's options, by the command line."""
    options = {
        "enforce_eager": args.enforce_eager,
        "attention_backend": args.attention_backend,
        "device": args.device,
        "kv_cache_dtype": args.kv_cache_dtype,
        "quantization": args.quantization,
        "kvcache_block_size": args.block_size,
        "mixed_steps": not args.no_mixed_steps,
        "fused_kernels": not args.no_fused_kernels,
        "tensor_parallel_size": args.tensor_parallel_size,
        "disable_custom_all_reduce": args.no_custom_all_reduce,
    }
    if args.no_overlap:
        options["overlap"] = False
    if args.model is not None or args.dummy is None:
        yield args.model or TINY, options
        return
    with tempfile.TemporaryDirectory() as directory:
        config = SHAPES[args.dummy]
        if args.quantization in DUMMY_INT4:
            config = config | {"quantization_config": DUMMY_INT4[args.quantization]}
        (Path(directory) / "config.json").write_text(json.dumps(config))
        yield directory, {**options, "load_format": "dummy"}


def build(args: argparse.Namespace) -> tuple[LLM, float]:
    """The engine, and the seconds its construction took."""
    with checkpoint(args) as (directory, options):
        start = time.perf_counter()
        return LLM(directory, **options), time.perf_counter() - start


def publish(result: dict[str, Any], file: str | None) -> None:
    """Print the result as the last line, and append it to `file`: one JSON object a line."""
    line = json.dumps(result)
    print(line, flush=True)
    if file is not None:
        with open(file, "a", encoding="utf-8") as stream:
            stream.write(line + "\n")


def positive(text: str) -> int:
    """An integer of at least 1, from the command line."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def rate(text: str) -> float:
    """A positive number, from the command line."""
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be more than 0, got {text}")
    return value


def add_options(parser: argparse.ArgumentParser, dummy: str | None = None) -> None:
    """Options of all benchmarks; `dummy` is the shape where no model is named."""
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--model", help="directory of a checkpoint")
    source.add_argument(
        "--dummy", choices=sorted(SHAPES), default=dummy, help="random weights in this shape"
    )
    parser.add_argument("--device", default="auto", help="cuda, cuda:N, cpu or auto")
    parser.add_argument(
        "--attention-backend", default="auto", help="flash_attn, triton, torch or auto"
    )
    parser.add_argument("--kv-cache-dtype", default="auto", help="fp8 or auto")
    parser.add_argument(
        "--quantization",
        help="fp8: quantise weights while loading them; with --dummy also awq, gptq",
    )
    parser.add_argument("--block-size", type=int, default=256, help="tokens per KV block (256)")
    parser.add_argument("--enforce-eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--no-overlap", action="store_true", help="the synchronous loop")
    parser.add_argument("--no-mixed-steps", action="store_true", help="prompts before decodes")
    parser.add_argument("--no-fused-kernels", action="store_true", help="plain PyTorch operators")
    parser.add_argument("--tensor-parallel-size", type=positive, default=1, help="GPUs (1)")
    parser.add_argument("--no-custom-all-reduce", action="store_true", help="sums by NCCL alone")
    parser.add_argument("--bandwidth", type=rate, help="one device's limit, bytes per second")
    parser.add_argument("--flops", type=rate, help="its limit, operations per second")
    parser.add_argument("--save", metavar="FILE", help="append the result, as a line of JSON")


def model_name(args: argparse.Namespace) -> str:
    """How results name the model, and the GPUs if there are several."""
    name, size = str(args.model or args.dummy or TINY), args.tensor_parallel_size
    return name if size == 1 else f"{name}, {size} GPUs"


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add_options(parser)
    parser.add_argument("--num-seqs", type=positive, help="sequences (256)")
    parser.add_argument("--seed", type=int, default=0, help="of the workload (0)")
    parser.add_argument("--repeat", type=positive, default=1, help="timed runs (1)")
    parser.add_argument("--no-progress", action="store_true", help="no progress bar")
    return parser.parse_args()


def main() -> None:
    """Build, warm up, time, report."""
    args = parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    llm, construction = build(args)
    llm.generate([[1, 2, 3]], SamplingParams(temperature=0.6, max_tokens=4), use_tqdm=False)
    num_seqs = args.num_seqs or (
        256 if llm.metrics()["device"] != "cpu" else choose_cpu_size(llm, args.seed)
    )
    prompts, params = workload(num_seqs, args.seed, llm.model_config.vocab_size)
    rates = []
    for _ in range(args.repeat):
        llm.reset_prefix_cache()
        tokens, seconds = run_once(llm, prompts, params, progress=not args.no_progress)
        rates.append(tokens / seconds)
        share = limits.describe(achieved(llm, args, prompts, params, seconds))
        print(f"{tokens} tokens in {seconds:.2f} s: {rates[-1]:.0f} tok/s, {share}")
    median = statistics.median(rates)
    result = {
        "benchmark": "bench",
        "model": model_name(args),
        "seed": args.seed,
        "num_seqs": num_seqs,
        "tokens": tokens,
        "tok_per_s_median": round(median, 1),
        "tok_per_s_range": [round(min(rates), 1), round(max(rates), 1)],
        "construction_s": round(construction, 2),
        **achieved(llm, args, prompts, params, tokens / median),
        **conditions(llm),
    }
    llm.exit()
    publish(result, args.save)


if __name__ == "__main__":
    main()
