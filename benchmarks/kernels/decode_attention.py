"""Decode attention alone: bandwidth of our Triton kernel, and of flash-attn where it is installed.

B sequences with contexts of 200 to 1800 tokens (512 for B = 1), bf16, blocks scattered over the
pool; CUDA-graph replays, median. Counts the bytes of the keys and values read.

    python benchmarks/kernels/decode_attention.py [--heads 16 8] [--head-dim 128] [--block-size 256]

--kv-cache-dtype fp8 has the keys and values in 8 bits. The last line is JSON.
"""

import argparse
import json
import random
import sys
from collections.abc import Callable, Hashable
from functools import partial
from pathlib import Path

import torch
import triton

sys.path.insert(0, str(Path(__file__).parents[2]))
from nanovllm.kernels.attention.decode_many import paged_decode
from nanovllm.tensors.fp8 import FP8
from nanovllm.tensors.kv_cache import KVCache
from nanovllm.tensors.scoring import Scoring

POOL, LONGEST = 614_400, 4096  # tokens of the pool, and of the widest block table
CALLS = 10  # in a graph


def microseconds(call: Callable[[], object]) -> float:
    """Median time of one call."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    return 1e3 * triton.testing.do_bench(graph.replay, 25, 100, return_mode="median") / CALLS


def random_cache(shape: tuple[int, int, int, int], dtype: torch.dtype) -> KVCache:
    """Keys and values [N, S, Hkv, D] of a normal distribution."""
    cache = KVCache.empty(shape, dtype, torch.device("cuda"))
    for stored in cache[:2]:
        for block in stored:
            block.copy_(torch.randn(shape[1:], device="cuda"))
    for exponents in cache[2:]:
        if exponents is not None:
            exponents.zero_()
    return cache


def measure(B: int, HQ: int, cache: KVCache, longest_first: bool) -> dict[str, float]:
    """Microseconds by kernel (and number of splits) for one batch size."""
    N, S, HKV, D = cache.k.shape
    rng = random.Random(B)
    lens = [512] if B == 1 else [rng.randint(200, 1800) for _ in range(B)]
    if longest_first:
        lens.sort(reverse=True)
    blocks = list(range(N))
    rng.shuffle(blocks)
    tables = torch.zeros(B, LONGEST // S, dtype=torch.int32)
    for row, length in enumerate(lens):
        for i in range(-(-length // S)):
            tables[row, i] = blocks.pop()
    tables = tables.cuda()
    context_lens = torch.tensor(lens, dtype=torch.int32, device="cuda")
    q = torch.randn(B, HQ, D, device="cuda", dtype=torch.bfloat16)
    has_exponents = cache.k.dtype == FP8
    size = 2 * HKV * (D * cache.k.itemsize + has_exponents)  # of a token
    times = {"bytes": float(size * sum(lens))}
    decode = partial(paged_decode, q, cache, tables, context_lens, Scoring(D**-0.5))
    shared: dict[Hashable, object] = {}  # by the layers of a step
    for splits in (1, 2, 4, 8, 16, 32):
        times[f"splits {splits}"] = microseconds(partial(decode, num_splits=splits, shared=shared))
    times["chosen"] = microseconds(partial(decode, shared=shared))
    try:
        from flash_attn import flash_attn_with_kvcache
    except ImportError:
        return times
    if S % 256 or cache.k.dtype == FP8:  # not read by flash-attn 2's paged kernels
        return times
    times["flash_attn"] = microseconds(
        lambda: flash_attn_with_kvcache(
            q.unsqueeze(1), *cache[:2], cache_seqlens=context_lens, block_table=tables, causal=True
        )
    )
    return times


def main() -> None:
    """Measure all batch sizes and print them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--heads",
        nargs=2,
        type=int,
        default=[16, 8],
        metavar=("HQ", "HKV"),
        help="query and KV heads (16 8)",
    )
    parser.add_argument("--head-dim", type=int, default=128, help="head size (128)")
    parser.add_argument("--block-size", type=int, default=256, help="tokens per KV block (256)")
    parser.add_argument("--kv-cache-dtype", default="auto", choices=["auto", "fp8"], help="(auto)")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device, PyTorch sees none")
    torch.manual_seed(0)
    HQ, HKV = args.heads
    shape = (POOL // args.block_size, args.block_size, HKV, args.head_dim)
    cache = random_cache(shape, FP8 if args.kv_cache_dtype == "fp8" else torch.bfloat16)
    results = {}
    for longest_first in (False, True):
        order = "longest first" if longest_first else "arrival"
        for B in (1, 8, 32, 64, 128, 256):
            times = measure(B, HQ, cache, longest_first)
            size = times.pop("bytes")
            rates = {name: f"{t:.1f} us ({size / t / 1e6:.2f} TB/s)" for name, t in times.items()}
            results[f"{order}, B={B}"] = {name: round(t, 1) for name, t in times.items()}
            print(order, f"B={B}", *(f"{name}: {rate}" for name, rate in rates.items()), sep=" | ")
    conditions = {"gpu": torch.cuda.get_device_name(), "heads": args.heads, "shape": shape}
    conditions["kv_cache_dtype"] = args.kv_cache_dtype
    print(json.dumps({**conditions, "microseconds": results}))


if __name__ == "__main__":
    main()
