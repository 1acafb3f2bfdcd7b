"""Time of a decode step in a layer of the 8B shape with FP8 weights, by parts of the layer for one
token, and with and without attention for several.

    python benchmarks/kernels/decode_layer.py [--kv-cache-dtype fp8] [--contexts 590 1500]
    python benchmarks/kernels/decode_layer.py --contexts --sequences 16 64 128 [--ranks 2]

Twelve layers, each with weights of its own, run in one CUDA graph, with and without their norms and
their attention, in one kernel (`fused_decode`) or in two. Prints microseconds a layer, without what
ranks exchange. The cost of a part is the time that it adds beside the others: each kernel is placed
while the one before it runs, so kernels alone, or one after the other, say little of a step.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from triton.testing import do_bench

from nanovllm.kernels.activation import quantized_act_and_mul
from nanovllm.kernels.attention.decode_few import own_decode
from nanovllm.kernels.attention.decode_many import paged_decode
from nanovllm.kernels.attention.rope import qk_norm_rope_store
from nanovllm.kernels.fp8 import quantize
from nanovllm.kernels.norm import add_rms_norm
from nanovllm.kernels.products.fp8_linear import linear
from nanovllm.kernels.products.fp8_row import one_row
from nanovllm.tensors.fp8 import FP8, Codes
from nanovllm.tensors.kv_cache import KVCache
from nanovllm.tensors.qk_norm_rope import QKNormRope, Turn
from nanovllm.tensors.scoring import Scoring
from nanovllm.utils.integers import cdiv

LAYERS, M, I, HQ, HKV, D = 12, 4096, 12288, 32, 8, 128
BLOCK, MAX_CONTEXT = 256, 4096
SCORING = Scoring(D**-0.5)
SHORTEST, LONGEST = 100, 1100  # tokens of several sequences
DTYPE, DEVICE = torch.bfloat16, torch.device("cuda")


def codes(N: int, K: int) -> Codes:
    numbers = torch.randint(0, 127, (N, K), dtype=torch.uint8, device=DEVICE)
    return Codes(numbers.view(FP8), torch.full((N, 1), 1e-4, device=DEVICE), (1, K))


class Layers:
    """Twelve layers, or what one of several ranks has of them, and up to `max_seqs` sequences."""

    def __init__(self, cache_dtype: torch.dtype, ranks: int, max_seqs: int) -> None:
        self.hq, self.hkv, inner = HQ // ranks, HKV // ranks, I // ranks
        shapes = ((self.hq + 2 * self.hkv) * D, M), (M, self.hq * D), (2 * inner, M), (M, inner)
        self.weights = [[codes(*shape) for shape in shapes] for _ in range(LAYERS)]
        width = MAX_CONTEXT // BLOCK
        used = max(width, max_seqs * cdiv(LONGEST, BLOCK))
        self.table = torch.arange(width, dtype=torch.int32, device=DEVICE)[None]
        cache_shape = used, BLOCK, self.hkv, D
        self.caches = [KVCache.empty(cache_shape, cache_dtype, DEVICE) for _ in range(LAYERS)]
        for cache in self.caches:
            for part in cache:
                if part is not None:
                    part.view(torch.uint8).zero_()
        self.x, self.norm = torch.randn(1, M, dtype=DTYPE, device=DEVICE), torch.ones(M).to(DEVICE)
        self.norm = self.norm.to(DTYPE)
        self.turn = Turn(torch.randn(MAX_CONTEXT, D, device=DEVICE), D)

    def step(self, context: int, norms: bool, attention: str) -> Callable[[], object]:
        """A call of all layers for a token after `context` - 1 others. attention: none, two
        kernels, or one.
        """
        last = torch.tensor([context - 1], dtype=torch.int32, device=DEVICE)
        weight = self.norm[:D]
        how = QKNormRope((weight, weight, 1e-6), False, self.turn, last, last)
        where = self.table, last + 1

        def run() -> None:
            x, residual = self.x, self.x
            shared: dict[object, torch.Tensor] = {}
            for (qkv_weight, out_weight, up_weight, down_weight), cache in zip(
                self.weights, self.caches, strict=True
            ):
                if norms:
                    x, residual = add_rms_norm(x, residual, self.norm, 1e-6)  # type: ignore[assignment]
                qkv = one_row(x, qkv_weight, None).view(1, -1, D)
                if attention == "one":
                    heads = own_decode(
                        qkv, how, cache, DTYPE, *where, MAX_CONTEXT, SCORING, shared=shared
                    )
                elif attention == "two":
                    qkv = qk_norm_rope_store(qkv, how, cache, DTYPE)
                    heads = paged_decode(qkv[:, : self.hq], cache, *where, SCORING, shared=shared)
                else:
                    heads = qkv[:, : self.hq]
                x = one_row(heads.flatten(1), out_weight, None)
                if norms:
                    x, residual = add_rms_norm(x, residual, self.norm, 1e-6)  # type: ignore[assignment]
                x = one_row(one_row(x, up_weight, None, gated=True), down_weight, None)

        return run

    def several(self, count: int, with_attention: bool) -> Callable[[], object]:
        """A call of all layers for so many tokens. Without attention, its results are given."""
        first = torch.randn(count, M, dtype=DTYPE, device=DEVICE)
        there = torch.randn(count, self.hq, D, dtype=DTYPE, device=DEVICE)
        lens = torch.linspace(LONGEST, SHORTEST, count).round().int().to(DEVICE)  # longest first
        width, last, weight = cdiv(LONGEST, BLOCK), lens - 1, self.norm[:D]
        tables = torch.arange(count * width, dtype=torch.int32, device=DEVICE).view(count, width)
        slots = tables.gather(1, (last // BLOCK)[:, None].long())[:, 0] * BLOCK + last % BLOCK
        how = QKNormRope((weight, weight, 1e-6), False, self.turn, last, slots)

        def multiply(x: Codes, weight: Codes, partial: bool = True) -> torch.Tensor:
            return linear(x, weight, DTYPE, None, partial)

        def normed(x: torch.Tensor, residual: torch.Tensor) -> tuple[Codes, torch.Tensor]:
            codes, total = add_rms_norm(x, residual, self.norm, 1e-6, act_block=0)
            assert isinstance(codes, Codes)
            return codes, total

        def run() -> None:
            x, residual = first, first
            shared: dict[object, torch.Tensor] = {}
            for (qkv_weight, out_weight, up_weight, down_weight), cache in zip(
                self.weights, self.caches, strict=True
            ):
                codes, residual = normed(x, residual)
                qkv, heads = multiply(codes, qkv_weight), there
                if with_attention:
                    qkv = qkv.view(*qkv.shape[:-1], -1, D)
                    qkv = qk_norm_rope_store(qkv, how, cache, DTYPE)
                    heads = paged_decode(
                        qkv[:, : self.hq], cache, tables, lens, SCORING, shared=shared
                    )
                x = multiply(quantize(heads.flatten(1), 0), out_weight)
                codes, residual = normed(x, residual)
                gates = quantized_act_and_mul(multiply(codes, up_weight, False), False, 0)
                x = multiply(gates, down_weight)

        return run


def microseconds(run: Callable[[], object]) -> float:
    """Microseconds of a layer, in a graph."""
    run()  # kernels compile
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return float(1e3 * do_bench(graph.replay, 10, 60, return_mode="median") / LAYERS)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--kv-cache-dtype", choices=["auto", "fp8"], default="fp8", help="of keys and values"
    )
    parser.add_argument(
        "--contexts", type=int, nargs="*", default=[200, 590, 1500, 3500], help="tokens, each a run"
    )
    parser.add_argument(
        "--sequences", type=int, nargs="*", default=[], help="more than one, each a run"
    )
    parser.add_argument("--ranks", type=int, default=1, help="that the layers are split over")
    args = parser.parse_args()
    if args.ranks < 1 or HKV % args.ranks:
        parser.error(f"--ranks {args.ranks} does not divide the {HKV} KV heads")
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device, PyTorch sees none")
    cache_dtype = FP8 if args.kv_cache_dtype == "fp8" else DTYPE
    layers = Layers(cache_dtype, args.ranks, max(args.sequences, default=0))
    for context in args.contexts:
        for norms in (False, True):
            for attention in ("none", "two", "one"):
                us = microseconds(layers.step(context, norms, attention))
                print(f"context {context}, norms {norms}, attention {attention}: {us:.1f} us")
    for count in args.sequences:
        for with_attention in (False, True):
            us = microseconds(layers.several(count, with_attention))
            print(f"{count} sequences, attention {with_attention}: {us:.1f} us")


if __name__ == "__main__":
    main()
