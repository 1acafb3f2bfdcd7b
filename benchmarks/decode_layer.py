"""What one token costs in a layer of the 8B shape with weights in FP8, by parts of the layer; and
what several do without attention.

    python benchmarks/decode_layer.py [--kv-cache-dtype fp8] [--contexts 590 1500]
    python benchmarks/decode_layer.py --contexts --sequences 16 64 128

Twelve layers, each with weights of its own, run in one CUDA graph, with and without their norms and
their attention, in one kernel (`paged_own`) or in two. Prints microseconds a layer. What one part
adds beside the others is what it costs: each kernel is placed while the one before it runs, so
kernels alone, or one after the other, say little of a step.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from triton.testing import do_bench

from nanovllm.kernels.activation import quantized_act_and_mul
from nanovllm.kernels.fp8 import quantize
from nanovllm.kernels.fp8_linear import linear
from nanovllm.kernels.fp8_row import one_row
from nanovllm.kernels.norm import add_rms_norm
from nanovllm.kernels.paged_decode import paged_decode
from nanovllm.kernels.paged_own import own_decode
from nanovllm.kernels.rope import qk_norm_rope_store
from nanovllm.utils.fp8 import FP8, Codes
from nanovllm.utils.kv_cache import KVCache
from nanovllm.utils.qk_norm_rope import QKNormRope

LAYERS, M, I, HQ, HKV, D = 12, 4096, 12288, 32, 8, 128
BLOCK, MAX_CONTEXT = 256, 4096
DTYPE, DEVICE = torch.bfloat16, torch.device("cuda")


def codes(N: int, K: int) -> Codes:
    numbers = torch.randint(0, 127, (N, K), dtype=torch.uint8, device=DEVICE)
    return Codes(numbers.view(FP8), torch.full((N, 1), 1e-4, device=DEVICE), (1, K))


class Layers:
    """Twelve layers, and a token that comes behind `context` - 1 others."""

    def __init__(self, cache_dtype: torch.dtype) -> None:
        shapes = ((HQ + 2 * HKV) * D, M), (M, HQ * D), (2 * I, M), (M, I)
        self.weights = [[codes(*shape) for shape in shapes] for _ in range(LAYERS)]
        num_blocks = MAX_CONTEXT // BLOCK
        self.table = torch.arange(num_blocks, dtype=torch.int32, device=DEVICE)[None]
        cache_shape = num_blocks, BLOCK, HKV, D
        self.caches = [KVCache.empty(cache_shape, cache_dtype, DEVICE) for _ in range(LAYERS)]
        for cache in self.caches:
            for part in cache:
                if part is not None:
                    part.view(torch.uint8).zero_()
        self.x, self.norm = torch.randn(1, M, dtype=DTYPE, device=DEVICE), torch.ones(M).to(DEVICE)
        self.norm = self.norm.to(DTYPE)
        self.cos_sin = torch.randn(MAX_CONTEXT, D, device=DEVICE)

    def step(self, context: int, norms: bool, attention: str) -> Callable[[], object]:
        """A call of all layers. attention: none, two kernels, or one."""
        last = torch.tensor([context - 1], dtype=torch.int32, device=DEVICE)
        weight = self.norm[:D]
        how = QKNormRope((weight, weight, 1e-6), False, self.cos_sin, last, last)
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
                        qkv, how, cache, DTYPE, *where, MAX_CONTEXT, D**-0.5, shared=shared
                    )
                elif attention == "two":
                    qkv = qk_norm_rope_store(qkv, how, cache, DTYPE)
                    heads = paged_decode(qkv[:, :HQ], cache, *where, D**-0.5, shared=shared)
                else:
                    heads = qkv[:, :HQ]
                x = one_row(heads.flatten(1), out_weight, None)
                if norms:
                    x, residual = add_rms_norm(x, residual, self.norm, 1e-6)  # type: ignore[assignment]
                x = one_row(one_row(x, up_weight, None, gated=True), down_weight, None)

        return run

    def several(self, count: int) -> Callable[[], object]:
        """A call of all layers for so many tokens, of which attention's results are there."""
        first, heads = torch.randn(2, count, M, dtype=DTYPE, device=DEVICE).unbind()

        def multiply(x: Codes, weight: Codes, partial: bool = True) -> torch.Tensor:
            return linear(x, weight, DTYPE, None, partial)

        def normed(x: torch.Tensor, residual: torch.Tensor) -> tuple[Codes, torch.Tensor]:
            codes, total = add_rms_norm(x, residual, self.norm, 1e-6, x_block=0)
            assert isinstance(codes, Codes)
            return codes, total

        def run() -> None:
            x, residual = first, first
            for qkv_weight, out_weight, up_weight, down_weight in self.weights:
                codes, residual = normed(x, residual)
                multiply(codes, qkv_weight)
                x = multiply(quantize(heads, 0), out_weight)
                codes, residual = normed(x, residual)
                gates = quantized_act_and_mul(multiply(codes, up_weight, False), False, 0)
                x = multiply(gates, down_weight)

        return run


def microseconds(run: Callable[[], object]) -> float:
    """Of a layer, in a graph."""
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
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device, PyTorch sees none")
    layers = Layers(FP8 if args.kv_cache_dtype == "fp8" else DTYPE)
    for context in args.contexts:
        for norms in (False, True):
            for attention in ("none", "two", "one"):
                us = microseconds(layers.step(context, norms, attention))
                print(f"context {context}, norms {norms}, attention {attention}: {us:.1f} us")
    for count in args.sequences:
        us = microseconds(layers.several(count))
        print(f"{count} sequences, products, norms, activation, quantisation: {us:.1f} us")


if __name__ == "__main__":
    main()
