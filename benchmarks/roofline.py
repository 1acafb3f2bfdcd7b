"""The least time that a workload can take on a GPU, by bytes and operations.

Prefill is bound by arithmetic (matrix products and causal attention of every prompt), decode by
reading: in every step the weights once, and the keys and values of all tokens of the sequences
that are still running, those of a common prefix once for all. All sequences run at once and none
waits; no engine can be faster than the sum without computing less.

    python benchmarks/roofline.py --dummy qwen3-0.6b
    python benchmarks/roofline.py --dummy qwen3-8b --bandwidth 4.3e12 --flops 790e12

The defaults are an H200's: a device-to-device copy of 4.3 TB/s and a bf16 matrix product of
790 TFLOP/s, as measured there.
"""

import argparse
import random
from typing import Any

import numpy as np
from workloads import WORKLOADS, Workload, bench

ITEMSIZE = 2  # bf16


def matrix_parameters(shape: dict[str, Any]) -> tuple[int, int]:
    """Weights that every token is multiplied by: of all layers, and of the LM head."""
    M, I, D = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    heads = 2 * shape["num_attention_heads"] + 2 * shape["num_key_value_heads"]
    return shape["num_hidden_layers"] * M * (heads * D + 3 * I), shape["vocab_size"] * M


def cached_tokens(workload: Workload) -> int:
    """Tokens of the common prefix that `before` leaves in the cache, in blocks of 256."""
    return len(workload.before[0]) // 256 * 256 if workload.before else 0


def decode_bytes(shape: dict[str, Any], workload: Workload) -> float:
    """Bytes that all decode steps read; the first token of each output comes from prefill."""
    kv_bytes = 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"]
    prompts = np.array([len(prompt) for prompt in workload.prompts])
    steps = np.array([params.max_tokens for params in workload.params]) - 1
    shared = cached_tokens(workload)
    contexts = ((prompts - shared) * steps + steps * (steps + 1) / 2).sum() + shared * steps.max()
    weights = sum(matrix_parameters(shape)) * steps.max()
    return ITEMSIZE * float(weights + kv_bytes * contexts)


def prefill_flops(shape: dict[str, Any], workload: Workload) -> float:
    """Operations of all prompts, prefixes that `before` has left in the cache excluded."""
    layers, head = matrix_parameters(shape)
    cached = cached_tokens(workload)
    lengths = np.array([len(prompt) for prompt in workload.prompts])
    pairs = ((lengths**2 - cached**2) / 2).sum()  # of a query and a key it sees
    width = shape["num_hidden_layers"] * shape["num_attention_heads"] * shape["head_dim"]
    return float(2 * (layers * (lengths - cached).sum() + head * len(lengths)) + 4 * pairs * width)


def main() -> None:
    """Print the limit of every workload for one shape."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--dummy", choices=sorted(bench.SHAPES), default="qwen3-0.6b")
    parser.add_argument("--bandwidth", type=float, default=4.3e12, help="bytes per second")
    parser.add_argument("--flops", type=float, default=790e12, help="operations per second")
    args = parser.parse_args()
    shape = {**bench.COMMON, **bench.SHAPES[args.dummy]}
    print(f"{args.dummy}: {args.bandwidth / 1e12:g} TB/s, {args.flops / 1e12:g} TFLOP/s")
    for name, make in WORKLOADS.items():
        workload = make(random.Random(0))
        prefill = prefill_flops(shape, workload) / args.flops
        decode = decode_bytes(shape, workload) / args.bandwidth
        tokens = sum(params.max_tokens for params in workload.params)
        limit = f"{prefill + decode:7.3f} s"
        if workload.per_second:
            limit += f" {tokens / (prefill + decode):10.0f} tok/s"
        print(f"{name:14s} prefill {prefill:6.3f} s  decode {decode:6.3f} s  limit {limit}")


if __name__ == "__main__":
    main()
