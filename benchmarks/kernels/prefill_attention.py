"""Prefill attention alone: our Triton kernel, and flash-attn's with a block table where installed.

P prompts of n tokens, some of which see cached tokens that all share, 16 or 32 query heads for 8 KV
heads of 128, bf16, blocks of 256 scattered over the pool; median.

    python benchmarks/kernels/prefill_attention.py [--kv-cache-dtype fp8]
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import triton

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.kernels.decode_attention import random_cache
from nanovllm.kernels.attention.prefill import paged_prefill
from nanovllm.tensors.fp8 import FP8
from nanovllm.tensors.kv_cache import KVCache
from nanovllm.tensors.scoring import Scoring

HKV, D, S, NUM_BLOCKS = 8, 128, 256, 700
CASES = (  # prompts, tokens of each, tokens cached before them
    (8, 2048, 0),
    (29, 560, 0),
    (4, 4096, 0),
    (256, 64, 2048),
    (1, 16384, 0),
    (1, 16384, 16384),
    (1, 2048, 30720),
    (8, 512, 4096),
)


def tflops(call: Callable[[], object], operations: float) -> float:
    """Operations per second in units of 10^12."""
    return operations / triton.testing.do_bench(call, 25, 100, return_mode="median") / 1e9


def measure(hq: int, prompts: int, tokens: int, cached: int, cache: KVCache) -> list[float]:
    """TFLOP/s of our kernel, and of flash-attn's."""
    own, shared = -(-tokens // S), cached // S
    blocks = torch.randperm(NUM_BLOCKS, device="cuda").int()
    tables = blocks[shared : shared + prompts * own].view(prompts, own)
    tables = torch.cat([blocks[:shared].expand(prompts, shared), tables], 1).contiguous()
    q = torch.randn(prompts * tokens, hq, D, device="cuda", dtype=torch.bfloat16)
    steps = torch.arange(prompts + 1, device="cuda")
    cu_q, cu_k = ((steps * n).int() for n in (tokens, tokens + cached))
    operations = 4 * prompts * (tokens * cached + tokens**2 / 2) * hq * D
    k = torch.randn(prompts * tokens, HKV, D, device="cuda", dtype=torch.bfloat16)
    num_keys = prompts * (tokens + cached)
    args = (q, k, k, cache, tables, cu_q, cu_k, tokens, num_keys, Scoring(D**-0.5))
    results = [tflops(lambda: paged_prefill(*args), operations)]
    if cache.k.dtype == FP8:
        return results
    try:
        from flash_attn import flash_attn_varlen_func
    except ImportError:
        return results
    lens = (cu_q, cu_k, tokens, tokens + cached)
    flash = partial(flash_attn_varlen_func, q, *cache[:2], *lens, causal=True, block_table=tables)
    return [*results, tflops(flash, operations)]


def main() -> None:
    """Measure and print every case."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--kv-cache-dtype", default="auto", choices=["auto", "fp8"], help="(auto)")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device, PyTorch sees none")
    torch.manual_seed(0)
    dtype = FP8 if args.kv_cache_dtype == "fp8" else torch.bfloat16
    cache = random_cache((NUM_BLOCKS, S, HKV, D), dtype)
    for hq in (16, 32):
        for prompts, tokens, cached in CASES:
            rates = measure(hq, prompts, tokens, cached, cache)
            names = ("ours", "flash-attn")[: len(rates)]
            text = ", ".join(f"{n} {r:.0f} TFLOP/s" for n, r in zip(names, rates, strict=True))
            print(f"{hq} heads, {prompts} x {tokens} after {cached} cached: {text}", flush=True)


if __name__ == "__main__":
    main()
