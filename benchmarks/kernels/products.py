"""Time of a layer's products, in any format, for several numbers of rows.

    python benchmarks/kernels/products.py --dummy qwen3-8b [--quantization awq] [--rows 64 128 256]
    python benchmarks/kernels/products.py --dummy gpt-oss-20b

Products of eight layers run in one CUDA graph: each has weights of its own, which come from memory,
not from the L2 cache. Prints for each product its microseconds, the rate at which weights are read,
and that of its operations. Activations come in 16 bits, so products in FP8 and INT8 quantise them
first. Experts are chosen by routers of random weights; of their weights those count that a token
has chosen. The last line is JSON.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))
from nanovllm import LLM
from nanovllm.benchmark import harness
from nanovllm.cli import bench
from nanovllm.layers.experts import SparseMLP
from nanovllm.layers.linear import LinearBase, MergedColumnParallelLinear

LAYERS = 8


class Product(NamedTuple):
    """A product of a layer for some rows.

    Attributes:
        name: name of its module.
        call: function that computes it.
        num_bytes: bytes of the weights that it reads.
        num_operations: multiplications and additions.
    """

    name: str
    call: Callable[[], object]
    num_bytes: float
    num_operations: float


def size_of(module: nn.Module) -> int:
    """Bytes of a module's weights."""
    return sum(param.numel() * param.element_size() for param in module.parameters())


def products(
    layer: nn.Module, rows: int, dtype: torch.dtype, device: torch.device
) -> list[Product]:
    """The products of a layer, each for random rows."""

    def random(width: int) -> torch.Tensor:
        return torch.randn(rows, width, dtype=dtype, device=device)

    found = []
    for name, module in layer.named_modules():
        if isinstance(module, SparseMLP):
            experts = module.experts
            M, I = experts.outputs.total, len(experts.part.held)
            x = random(M)
            chosen = module.choose(x)
            share = len(chosen[0].unique()) / experts.num_experts
            call: Callable[[], object] = partial(experts.multiply, x, *chosen)
            operations = 6.0 * chosen[0].numel() * M * I
            found.append(Product(f"{name}.experts", call, share * size_of(experts), operations))
        elif isinstance(module, LinearBase) and min(module.weight.num_rows, rows) > 0:
            x = random(len(module.inputs.held))
            multiply: Callable[..., object] = module.forward
            if isinstance(module, MergedColumnParallelLinear) and "gate_up" in name:
                multiply = module.gated
            call = partial(multiply, x)
            operations = 2.0 * rows * module.weight.num_rows * x.shape[1]
            found.append(Product(name, call, size_of(module), operations))
    return found


def seconds(calls: list[Callable[[], object]]) -> float:
    """The time of a call, by a graph of all of them."""
    from triton.testing import do_bench

    for call in calls:
        call()  # kernels compile
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return float(do_bench(graph.replay, 10, 60, return_mode="median")) / 1e3 / len(calls)


def few_layers(directory: str) -> None:
    """Leave a checkpoint LAYERS layers."""
    path = Path(directory, "config.json")
    config = json.loads(path.read_text())
    text = config.get("text_config", config)
    text["num_hidden_layers"] = LAYERS
    if "layer_types" in text:
        text["layer_types"] = text["layer_types"][:LAYERS]
    path.write_text(json.dumps(config))


def measured(llm: LLM, rows: int) -> Iterator[dict[str, Any]]:
    """The figures of all products for a number of rows; of like layers each once."""
    built = llm.model_runner.built
    layers = built.step.model.model.layers
    of_all = [products(layer, rows, built.build.dtype, built.device) for layer in layers]
    names = {product.name: product for of_layer in of_all for product in of_layer}
    for name, first in names.items():
        same = [product for of_layer in of_all for product in of_layer if product.name == name]
        time = seconds([product.call for product in same])
        read = sum(product.num_bytes for product in same) / len(same)
        yield {
            "product": name,
            "rows": rows,
            "us": 1e6 * time,
            "bytes_per_s": read / time,
            "flops": first.num_operations / time,
        }


def main() -> None:
    """Measure the products of a shape and print them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    bench.add_options(parser, dummy="qwen3-8b")
    parser.add_argument(
        "--rows",
        nargs="+",
        type=bench.positive,
        default=[1, 16, 64, 128, 256, 2048],
        help="(1 16 64 128 256 2048)",
    )
    args = parser.parse_args()
    if not torch.cuda.is_available() or args.dummy is None:
        parser.error("needs a CUDA device and --dummy")
    results = []
    with bench.checkpoint(args) as (directory, options):
        few_layers(directory)
        with LLM(directory, **{**options, "enforce_eager": True}) as llm, torch.inference_mode():
            for rows in args.rows:
                for row in measured(llm, rows):
                    results.append(row)
                    rates = (
                        f"{row['bytes_per_s'] / 1e12:5.2f} TB/s  {row['flops'] / 1e12:6.1f} TFLOP/s"
                    )
                    print(
                        f"{rows:6d} rows  {row['product']:22s} {row['us']:9.1f} us  {rates}",
                        flush=True,
                    )
            conditions = harness.conditions(llm)
    result = {"benchmark": "products", "model": bench.model_name(args), "results": results}
    harness.publish({**result, **conditions}, args.save)


if __name__ == "__main__":
    main()
