"""Gate and up projections with their activation: the product for Hopper that activates itself, and
the library's with a kernel behind it.

Of the shapes of Qwen3-0.6B, 1.7B, 8B, half of 8B's (two GPUs) and 14B, in bf16 and in FP8; the
results are FP8 there, too. Microseconds, median, by CUDA graphs.

    python benchmarks/gated_product.py
"""

import argparse
import sys
from pathlib import Path

import torch
import triton

sys.path.insert(0, str(Path(__file__).parents[1]))
from nanovllm.checkpoint.quantization import Fp8
from nanovllm.kernels import device_features as hopper
from nanovllm.kernels.fp8 import quantize
from nanovllm.kernels.products.fp8_linear import can_multiply
from nanovllm.layers.weights.fp8 import Fp8Weight
from nanovllm.layers.weights.weight import Gate, PlainWeight, Weight

SHAPES = {  # gates, inputs
    "0.6B": (3072, 1024),
    "1.7B": (6144, 2048),
    "half of 8B": (6144, 4096),
    "8B": (12288, 4096),
    "14B": (17408, 5120),
}
ROWS = (256, 512, 1024, 2048, 4096, 8192, 16384)


def weight_of(gates: int, inputs: int, fp8: bool) -> Weight:
    """Random numbers."""
    numbers = torch.randn(2 * gates, inputs, device="cuda", dtype=torch.bfloat16) / inputs**0.5
    weight: Weight = PlainWeight(numbers, fused=True)
    if fp8:
        codes = quantize(numbers, 0)
        with torch.device("cuda"):
            weight = Fp8Weight(2 * gates, inputs, torch.bfloat16, True, Fp8((1, 0), ""))
        weight.data.data, weight.scales.data = codes.codes, codes.scales
        assert can_multiply(weight.codes, torch.bfloat16)
    return weight


def measure(weight: Weight, rows: int) -> dict[str, float]:
    """Microseconds by the name of what multiplies."""
    act_block = weight.act_block
    numbers = torch.randn(rows, weight.data.shape[1], device="cuda", dtype=torch.bfloat16)
    x = numbers if act_block is None else quantize(numbers, act_block)
    found = {}
    for name, own in (("two kernels", False), ("one", True)):
        hopper.own_kernels = own
        call = lambda: weight.multiply(x, gate=Gate(next_block=act_block))  # noqa: E731
        found[name] = 1000 * triton.testing.do_bench_cudagraph(call, 20, return_mode="median")
    return found


def main() -> None:
    """Measure and print every case."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device, PyTorch sees none")
    torch.manual_seed(0)
    for fp8 in (False, True):
        for name, (gates, inputs) in SHAPES.items():
            weight = weight_of(gates, inputs, fp8)
            for rows in ROWS:
                found = measure(weight, rows)
                text = ", ".join(f"{each} {time:.1f} us" for each, time in found.items())
                print(f"{name}, {'FP8' if fp8 else 'bf16'}, {rows} rows: {text}", flush=True)


if __name__ == "__main__":
    main()
