"""Speed on a CPU: this library against `generate` of transformers, with the same model and work.

A random Qwen3 of 99 million parameters in float32, prompts and outputs of 16 to 256 tokens,
greedy, the same number of threads. transformers gets its prompts in batches, padded on the left;
a batch runs until its longest output is done, and only the tokens that were asked for count. It
is tried once with every batch size in every order, and its best of each order is repeated, in
turns with ours:

    arrival   as the requests come
    prompt    sorted by the length of the prompt: the least padding
    output    sorted by the length of the output: the least waste, but nobody knows it beforehand

    python benchmarks/cpu_vs_transformers.py [--num-seqs 48] [--batch-sizes 8 16 48] [--repeat 3]

Prints median and range, and how many outputs are equal; the last line is JSON.
"""

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[1]))
from nanovllm import LLM, SamplingParams
from nanovllm.benchmark import harness
from nanovllm.cli import bench

SHAPE: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 640,
    "intermediate_size": 1920,
    "num_hidden_layers": 16,
    "num_attention_heads": 10,
    "num_key_value_heads": 5,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    "initializer_range": 0.05,
}
ORDERS = ("arrival", "prompt", "output")
Outputs = list[list[int]]  # in the order of the prompts


def workload(num_seqs: int, longest: int) -> tuple[list[list[int]], list[int]]:
    """Random prompts, and the numbers of tokens to generate."""
    rng = random.Random(0)
    lengths = [rng.randint(16, longest) for _ in range(num_seqs)]
    prompts = [[rng.randrange(1, SHAPE["vocab_size"]) for _ in range(n)] for n in lengths]
    return prompts, [rng.randint(16, longest) for _ in range(num_seqs)]


def with_transformers(
    model: Any, prompts: list[list[int]], counts: list[int], batch_size: int, order: str
) -> tuple[Outputs, float]:
    """Outputs and seconds."""
    keys = {
        "arrival": lambda i: i,
        "prompt": lambda i: len(prompts[i]),
        "output": counts.__getitem__,
    }
    indices = sorted(range(len(prompts)), key=keys[order])
    outputs: Outputs = [[]] * len(prompts)
    start = time.perf_counter()
    for begin in range(0, len(indices), batch_size):
        batch = indices[begin : begin + batch_size]
        width = max(len(prompts[i]) for i in batch)
        padding = [width - len(prompts[i]) for i in batch]
        ids = torch.tensor([[0] * pad + prompts[i] for pad, i in zip(padding, batch, strict=True)])
        mask = (torch.arange(width) >= torch.tensor(padding).unsqueeze(1)).long()
        longest = max(counts[i] for i in batch)
        rows = model.generate(ids, attention_mask=mask, max_new_tokens=longest, do_sample=False)
        for i, row in zip(batch, rows[:, width:].tolist(), strict=True):
            outputs[i] = row[: counts[i]]
    return outputs, time.perf_counter() - start


def with_nanovllm(llm: LLM, prompts: list[list[int]], counts: list[int]) -> tuple[Outputs, float]:
    """Outputs and seconds."""
    params = [SamplingParams(temperature=0, ignore_eos=True, max_tokens=n) for n in counts]
    llm.reset_prefix_cache()
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    return [output.outputs[0].token_ids for output in outputs], seconds


def measure(
    runs: Mapping[str, Callable[[], tuple[Outputs, float]]], repeat: int
) -> dict[str, tuple[Outputs, list[float]]]:
    """Outputs and seconds of each, taken in turns so that a busy machine hits them alike."""
    outputs: dict[str, Outputs] = {}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeat):
        for name, run in runs.items():
            outputs[name], elapsed = run()
            seconds[name].append(elapsed)
    return {name: (outputs[name], seconds[name]) for name in runs}


def main() -> None:
    """Find transformers' best, time both, compare the outputs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--num-seqs", type=bench.positive, default=48, help="sequences (48)")
    parser.add_argument("--longest", type=bench.positive, default=256, help="prompt and output")
    parser.add_argument(
        "--batch-sizes", nargs="+", type=bench.positive, default=[8, 16, 48], help="of transformers"
    )
    parser.add_argument(
        "--layers", type=bench.positive, default=SHAPE["num_hidden_layers"], help="of the model"
    )
    parser.add_argument(
        "--threads",
        type=bench.positive,
        default=torch.get_num_threads(),
        help="of both (all cores)",
    )
    parser.add_argument("--repeat", type=bench.positive, default=3, help="timed runs (3)")
    parser.add_argument("--save", metavar="FILE", help="append the result, as a line of JSON")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    config = transformers.Qwen3Config(**{**SHAPE, "num_hidden_layers": args.layers})
    model = transformers.Qwen3ForCausalLM(config).eval()
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        llm = LLM(directory, device="cpu")
    prompts, counts = workload(args.num_seqs, args.longest)
    parameters, tokens = sum(p.numel() for p in model.parameters()), sum(counts)
    print(f"{parameters:,} parameters, {args.threads} threads, torch {torch.__version__}")
    print(f"{len(prompts)} prompts of {sum(map(len, prompts))} tokens, {tokens} to generate")

    with_nanovllm(llm, prompts[:2], [4, 4])  # warm-up
    with_transformers(model, prompts[:2], [4, 4], 2, "arrival")
    runs = {"nanovllm": partial(with_nanovllm, llm, prompts, counts)}
    for order in ORDERS:
        tried = {}
        for size in args.batch_sizes:
            tried[size] = with_transformers(model, prompts, counts, size, order)[1]
            print(
                f"  tried: {order}, batches of {size}: {tokens / tried[size]:.1f} tok/s", flush=True
            )
        best = min(tried, key=tried.__getitem__)
        name = f"transformers, {order}, batches of {best}"
        runs[name] = partial(with_transformers, model, prompts, counts, best, order)
    results: dict[str, dict[str, Any]] = {}
    measured = measure(runs, args.repeat)
    ours, our_seconds = measured["nanovllm"]
    for name, (outputs, seconds) in measured.items():
        rates = sorted(tokens / s for s in seconds)
        results[name] = {
            "median": statistics.median(rates),
            "runs": rates,
            "unit": "tok/s",
            "equal_outputs": sum(a == b for a, b in zip(ours, outputs, strict=True)),
            "ours_is_faster_by": statistics.median(seconds) / statistics.median(our_seconds),
        }
        print(
            f"{name:40s} {results[name]['median']:8.1f} tok/s  ({rates[0]:.1f}-{rates[-1]:.1f}), "
            f"ours x {results[name]['ours_is_faster_by']:.2f}, "
            f"{results[name]['equal_outputs']} of {len(ours)} outputs equal ours"
        )
    result = {
        "benchmark": "cpu_vs_transformers",
        "parameters": parameters,
        "num_seqs": len(prompts),
        "tokens": tokens,
        "threads": args.threads,
        "transformers": transformers.__version__,
        "results": results,
        **harness.conditions(llm),
    }
    llm.exit()
    harness.publish(result, args.save)


if __name__ == "__main__":
    main()
