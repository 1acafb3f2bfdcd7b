"""Throughput, with nano-vLLM's workload.

256 sequences of `randint(100, 1024)` random token ids in 0..10000, each generating
`randint(100, 1024)` tokens at temperature 0.6, all drawn with `random.seed(0)`. After a warm-up
request, the time of `generate` is taken and the generated tokens are counted and checked.

    nanovllm bench --dummy qwen3-0.6b       # random weights in the published shape
    nanovllm bench --model DIR              # a checkpoint
    nanovllm bench                          # the embedded tiny checkpoint

Beside the tokens per second stand the bytes per second that decode had to read (weights, keys,
values) and the share of the roofline, if the GPU's limits are known or given by --bandwidth and
--flops. The last line is JSON; --save FILE appends it to FILE. On a CPU, without --num-seqs, the
size is chosen so that a run takes about a minute, if nothing else keeps the cores busy.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm import TINY, SamplingParams
from nanovllm.benchmark.shapes import DUMMY_QUANTIZATIONS, SHAPES
from nanovllm.cli.options import add_engine_options, engine_options, new_file, positive, rate

if TYPE_CHECKING:
    from nanovllm import LLM

CPU_SECONDS = 45.0  # duration of a run on a CPU, roughly


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    add_options(parser)
    parser.add_argument("--num-seqs", type=positive, help="sequences (256)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the workload (0)")
    parser.add_argument("--repeat", type=positive, default=1, help="timed runs (1)")
    parser.add_argument("--no-progress", action="store_true", help="no progress bar")
    parser.set_defaults(verbose=True)


def add_options(parser: argparse.ArgumentParser, dummy: str | None = None) -> None:
    """Add the flags of all benchmarks; `dummy` is the shape used if no model is named."""
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--model", help="directory of a checkpoint")
    source.add_argument(
        "--dummy",
        choices=sorted(SHAPES),
        default=dummy,
        help="random weights in this shape; in 4 bits with --quantization awq or gptq",
    )
    parser.add_argument("--bandwidth", type=rate, help="limit of one device, bytes per second")
    parser.add_argument("--flops", type=rate, help="limit of one device, operations per second")
    parser.add_argument(
        "--save", type=new_file, metavar="FILE", help="append the result, as a line of JSON"
    )
    add_engine_options(parser)


def model_name(args: argparse.Namespace) -> str:
    """The name of the model in results, with the number of GPUs if there are several."""
    name = str(args.model or args.dummy or TINY)
    options = engine_options(args)
    num_replicas, size = (options.get(f"{kind}_parallel_size", 1) for kind in ("data", "tensor"))
    if num_replicas > 1:
        return f"{name}, {num_replicas} replicas of {size} GPU{'s' if size > 1 else ''}"
    return name if size == 1 else f"{name}, {size} GPUs"


@contextmanager
def checkpoint(args: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """The model's directory and the engine's options, from the command line."""
    options = engine_options(args)
    if args.model is not None or args.dummy is None:
        yield args.model or TINY, options
        return
    with tempfile.TemporaryDirectory() as directory:
        config = SHAPES[args.dummy]
        if quantization := DUMMY_QUANTIZATIONS.get(options.get("quantization") or ""):
            config = config | {"quantization_config": quantization}
        (Path(directory) / "config.json").write_text(json.dumps(config))
        yield directory, {**options, "load_format": "dummy"}


def build(args: argparse.Namespace) -> tuple["LLM", float]:
    """The engine, and the duration of its construction in seconds."""
    from nanovllm import LLM

    with checkpoint(args) as (directory, options):
        start = time.perf_counter()
        return LLM(directory, **options), time.perf_counter() - start


def run(args: argparse.Namespace) -> int:
    """Build, warm up, time, report."""
    from nanovllm.benchmark import choices, harness, limits

    llm, construction = build(args)
    llm.generate([[1, 2, 3]], SamplingParams(temperature=0.6, max_tokens=4), use_tqdm=False)
    num_seqs = args.num_seqs or (
        256 if llm.metrics()["device"] != "cpu" else _choose_cpu_size(llm, args.seed)
    )
    prompts, params = harness.workload(num_seqs, args.seed, llm.model_config.vocab_size)
    limit = {"bandwidth": args.bandwidth, "flops": args.flops}
    rates = []
    for _ in range(args.repeat):
        llm.reset_prefix_cache()
        tokens, seconds = harness.run_once(llm, prompts, params, progress=not args.no_progress)
        rates.append(tokens / seconds)
        share = limits.describe(harness.achieved(llm, prompts, params, seconds, **limit))
        print(f"{tokens} tokens in {seconds:.2f} s: {rates[-1]:.0f} tok/s, {share}")
    median = statistics.median(rates)
    conditions = harness.conditions(llm)
    touched = choices.touched(llm, prompts)
    if touched is not None:
        print(touched.describe())
    result = {
        "benchmark": "bench",
        "model": model_name(args),
        "seed": args.seed,
        "num_seqs": num_seqs,
        "tokens": tokens,
        "tok_per_s_median": round(median, 1),
        "tok_per_s_range": [round(min(rates), 1), round(max(rates), 1)],
        "construction_s": round(construction, 2),
        **harness.achieved(llm, prompts, params, tokens / median, **limit),
        **conditions,
        "experts": touched and touched._asdict(),
    }
    llm.exit()
    harness.publish(result, args.save)
    return 0


def _choose_cpu_size(llm: "LLM", seed: int) -> int:
    """The number of sequences that take about `CPU_SECONDS`, by a timed probe of 16."""
    from nanovllm.benchmark import harness

    prompts, params = harness.workload(16, seed, llm.model_config.vocab_size)
    short = [SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=16) for _ in params]
    _, seconds = harness.run_once(llm, prompts, short, progress=False)
    steps = 562 / 16  # mean output length over the probe's
    num_seqs = max(1, min(256, int(16 * CPU_SECONDS / (seconds * steps))))
    print(f"CPU: {num_seqs} of the 256 sequences, about a minute on idle cores (--num-seqs N)")
    return num_seqs
