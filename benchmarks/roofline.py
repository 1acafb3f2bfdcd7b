"""The least time that the workloads can take, for any shape (see `limits.py` for how).

    python benchmarks/roofline.py --dummy qwen3-0.6b
    python benchmarks/roofline.py --model DIR --only bench-0 bs1
    python benchmarks/roofline.py --uniform 64 512 128 --bandwidth 3.35e12 --flops 989e12

--uniform adds a workload: so many prompts, their tokens, and the tokens each generates. The
limits are those measured on an H200 unless others are given.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.workloads import WORKLOADS, Workload, make, uniform
from nanovllm.benchmark import harness, limits
from nanovllm.checkpoint.model_config import ModelConfig
from nanovllm.checkpoint.quantization import choose, format_of
from nanovllm.cli import bench


def main() -> None:
    """Print the limit of every workload for one shape."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    bench.add_options(parser, dummy="qwen3-0.6b")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=list(WORKLOADS),
        default=list(WORKLOADS),
        help="workloads (all)",
    )
    parser.add_argument(
        "--uniform",
        nargs=3,
        type=bench.positive,
        metavar=("PROMPTS", "LENGTH", "OUTPUT"),
        help="a workload more",
    )
    args = parser.parse_args()
    with bench.checkpoint(args) as (directory, options):
        config = ModelConfig.from_pretrained(directory)
    itemsize = 4 if config.dtype == "float32" else 2
    hardware = limits.hardware("NVIDIA H200", itemsize, args.bandwidth, args.flops)
    if hardware is None:
        parser.error("float32 needs --bandwidth and --flops: the H200's are those of 16 bits")
    hardware = hardware.times(options.get("tensor_parallel_size", 1))
    print(
        f"{bench.model_name(args)}: {hardware.bandwidth / 1e12:g} TB/s, "
        f"{hardware.flops / 1e12:g} TFLOP/s"
    )
    packed = config.experts is not None and config.experts.packed
    held = format_of(choose(options.get("quantization"), config.quantization, packed))
    held = "mxfp4" if config.is_mxfp4 else held
    sizes = limits.itemsizes(config, itemsize, options.get("kv_cache_dtype", "auto"), held)
    workloads: dict[str, Workload] = {name: make(name, config.vocab_size) for name in args.only}
    if args.uniform:
        count, length, output = args.uniform
        workloads["uniform"] = uniform([[0] * length] * count, output, True)
    for name, workload in workloads.items():
        lens = [len(p) for p in workload.prompts], harness.num_new_tokens(workload.params)
        work = limits.work(config, sizes, *lens, workload.num_shared)
        prefill, decode = work.seconds(hardware)
        limit = f"{prefill + decode:7.3f} s"
        if workload.per_second:
            limit += f" {workload.num_tokens / (prefill + decode):10.0f} tok/s"
        print(f"{name:14s} prefill {prefill:6.3f} s  decode {decode:6.3f} s  limit {limit}")


if __name__ == "__main__":
    main()
